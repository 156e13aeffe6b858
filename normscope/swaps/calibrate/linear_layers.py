"""Layers that are linear in what they take, each as one matrix between rows: linear layers, convolutions, attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# Of a convolution: what one of its outputs is computed from. The products of so many are as large as a layer may be.
MOST_FEATURES = 4096
MOST_NUMBERS = 2**24  # of what a convolution takes, at once: an image holds each as often as its kernel has places
_FLAT = ("Conv1D",)  # of transformers: a linear layer whose weight is (inputs, outputs)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LinearLayer:
    """A module as a linear map from rows ``(tokens, features)`` to rows ``(tokens, channels)``.

    Of a convolution in groups each group of channels is computed from features of its own, and the rows of what it
    takes are ``(tokens, groups, features)``.

    Attributes:
        module: what it is of.
        weight: the parameter's name.
        bias: likewise; None where there is none.
        channel_axis: the axis of its input and output that numbers the channels.

    >>> convolution = nn.Conv1d(2, 5, 3, stride=2)
    >>> layer, x = LinearLayer.of(convolution), torch.randn(4, 2, 9)
    >>> rows = layer.inputs(x) @ layer.matrix.T + convolution.bias
    >>> torch.allclose(rows, layer.outputs(x, convolution(x)), atol=1e-6)
    True
    """

    module: nn.Module
    weight: str = "weight"
    bias: str | None = "bias"
    channel_axis: int = -1

    @classmethod
    def of(cls, module: nn.Module) -> LinearLayer | None:
        """View a module as one; None where it is of no kind that is known."""
        has_bias = "bias" if getattr(module, "bias", None) is not None else None
        if isinstance(module, nn.Linear):
            return cls(module, bias=has_bias)
        if isinstance(module, _CONVOLUTIONS):
            return cls(module, bias=has_bias, channel_axis=-1 - len(module.kernel_size))
        if isinstance(module, nn.MultiheadAttention):
            return cls(module, "in_proj_weight", "in_proj_bias" if module.in_proj_bias is not None else None)
        if type(module).__name__ in _FLAT and isinstance(getattr(module, "weight", None), nn.Parameter):
            return cls(module, bias=has_bias)
        return None

    @property
    def reason(self) -> str:
        """Why it cannot be refitted whatever it is called with; empty where it can."""
        module = self.module
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is None:
            return "its queries, keys and values have weights of their own, which torch uses without calling a module"
        if not isinstance(module, _CONVOLUTIONS):
            return ""
        features = module.in_channels // module.groups * math.prod(module.kernel_size)
        if features > MOST_FEATURES:
            return f"it is a convolution over {features} numbers, more than {MOST_FEATURES}"
        if len(module.kernel_size) > 2 and math.prod(module.kernel_size) > 1:
            return "it is a convolution over three axes"
        return ""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weight and the bias, as far as they are the module's own and not computed."""
        own = self.module._parameters
        return [one for one in (own.get(self.weight), own.get(self.bias or "")) if one is not None]

    @property
    def matrix(self) -> Tensor:
        """The weight as ``(channels, features)``."""
        weight = self.module.get_parameter(self.weight)
        return weight.T if type(self.module).__name__ in _FLAT else weight.flatten(1)

    @property
    def offset(self) -> Tensor | None:
        """The bias, ``(channels,)``; None where there is none."""
        return None if self.bias is None else self.module.get_parameter(self.bias)

    @torch.no_grad()
    def put(self, matrix: Tensor, offset: Tensor | None, channels: Tensor) -> None:
        """Give some channels other weights.

        Args:
            matrix: ``(channels, features)``.
            offset: ``(channels,)``; None to leave the bias.
            channels: which channels: bool ``(channels,)``.
        """
        weight = self.module.get_parameter(self.weight)
        changed = torch.where(channels[:, None], matrix, self.matrix.to(matrix))
        weight.copy_(changed.T if type(self.module).__name__ in _FLAT else changed.reshape(weight.shape))
        if offset is not None and self.offset is not None:
            self.offset.copy_(torch.where(channels, offset, self.offset.to(offset)))

    def inputs(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """What each row of outputs is computed from, ``(tokens, features)``, or ``(tokens, groups, features)``.

        Args:
            x: what the module takes.
            valid: which positions are data; padding is left out where they are the rows'.
        """
        module = self.module
        if not isinstance(module, _CONVOLUTIONS):
            return rows(self._samples_first(x), valid)
        unfolded = rows(self._unfolded(module, x), valid)
        return unfolded if module.groups == 1 else unfolded.reshape(len(unfolded), module.groups, -1)

    def inputs_in_pieces(self, x: Tensor, valid: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the same in pieces of whole samples, of a convolution that takes each number many times."""
        module = self.module
        size = math.prod(module.kernel_size) * x.numel() if isinstance(module, _CONVOLUTIONS) else 0
        if size <= MOST_NUMBERS:
            yield self.inputs(x, valid)
            return
        samples = max(1, MOST_NUMBERS * len(x) // size)
        for first in range(0, len(x), samples):
            some = slice(first, first + samples)
            yield self.inputs(x[some], None if valid is None else valid[some])

    def _unfolded(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
        """What each output of a convolution is computed from, channel by channel: ``(samples, positions, numbers)``."""
        if math.prod(module.kernel_size) == 1 and not any(module._reversed_padding_repeated_twice):
            for axis, step in enumerate(module.stride, self.channel_axis + 1):
                x = x.movedim(axis, 0)[::step].movedim(0, axis)
            return x.flatten(self.channel_axis + 1).mT
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = functional.pad(x, module._reversed_padding_repeated_twice, mode)
        sizes = (module.kernel_size, module.dilation, module.stride)
        if len(module.kernel_size) == 1:
            x, sizes = x[..., None, :], tuple((1, *size) for size in sizes)  # type: ignore[assignment]
        kernel, dilation, stride = sizes
        return functional.unfold(x, kernel, dilation, 0, stride).mT

    def outputs(self, x: Tensor, output: Tensor | None, valid: Tensor | None = None) -> Tensor:
        """What it gives, ``(tokens, channels)``; of attention, whose output is another, what the weights make of x."""
        if isinstance(self.module, nn.MultiheadAttention):
            given = self.inputs(x, valid) @ self.matrix.T
            return given if self.offset is None else given + self.offset
        if output is None:
            raise ValueError(f"a {type(self.module).__name__} gave no tensor")
        return rows(output if self.channel_axis == -1 else output.flatten(self.channel_axis + 1).mT, valid)

    def _samples_first(self, x: Tensor) -> Tensor:
        turned = isinstance(self.module, nn.MultiheadAttention) and not self.module.batch_first and x.ndim == 3
        return x.transpose(0, 1) if turned else x


def rows(value: Tensor, valid: Tensor | None = None) -> Tensor:
    """Bring values whose last axis numbers the channels to ``(tokens, channels)``, without padding.

    Args:
        value: ``(…, channels)``.
        valid: which positions are data, bool ``(samples, positions)``; without effect where the axes are others.
    """
    if valid is not None and value.ndim > 2 and value.shape[:2] == valid.shape:
        value = value[valid.to(value.device)]
    return value.reshape(-1, value.shape[-1])
