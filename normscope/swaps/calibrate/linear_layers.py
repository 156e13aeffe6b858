"""Linear layers, convolutions and attention's projection as linear maps between rows of features and channels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MOST_FEATURES = 4096  # of a convolution: numbers from which one output is computed
MOST_NUMBERS = 2**24  # of unfolded features at once: a convolution repeats each number kernel-size times
_FLAT = ("Conv1D",)  # transformers' linear layer, whose weight is (inputs, outputs)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LinearLayer:
    """Module as a linear map from rows ``(tokens, features)`` to rows ``(tokens, channels)``.

    Input rows of a grouped convolution are ``(tokens, groups, features)``. ``weight`` and ``bias`` are names of
    parameters, and ``channel_axis`` is that of input and output.

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
        """View a module as a linear layer; None for other modules."""
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
        """Reason why it cannot be refitted with any input, or nothing."""
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
    def matrix(self) -> Tensor:
        """The weight as ``(channels, features)``."""
        weight = self.module.get_parameter(self.weight)
        return weight.T if type(self.module).__name__ in _FLAT else weight.flatten(1)

    @property
    def offset(self) -> Tensor | None:
        return None if self.bias is None else self.module.get_parameter(self.bias)

    @property
    def values(self) -> tuple[Tensor, Tensor | None]:
        """Matrix and offset in float64 on the CPU."""
        offset = None if self.offset is None else self.offset.detach().to("cpu", torch.float64)
        return self.matrix.detach().to("cpu", torch.float64), offset

    @torch.no_grad()
    def put(self, matrix: Tensor, offset: Tensor | None, channels: Tensor) -> None:
        """Set the weights ``(channels, features)`` and biases of the channels in a mask; None leaves the biases."""
        weight = self.module.get_parameter(self.weight)
        matrix, channels = matrix.float().to(weight.device), channels.to(weight.device)
        changed = torch.where(channels[:, None], matrix, self.matrix.to(matrix))
        weight.copy_(changed.T if type(self.module).__name__ in _FLAT else changed.reshape(weight.shape))
        if offset is not None and self.offset is not None:
            self.offset.copy_(torch.where(channels, offset.to(matrix), self.offset.to(matrix)))

    def inputs(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the features of each valid output row: ``(tokens, features)``, or ``(tokens, groups, features)``."""
        module = self.module
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first and x.ndim == 3:
            x = x.transpose(0, 1)
        if not isinstance(module, _CONVOLUTIONS):
            return rows(x, valid)
        unfolded = rows(self._unfolded(module, x), valid)
        return unfolded if module.groups == 1 else unfolded.reshape(len(unfolded), module.groups, -1)

    def inputs_in_pieces(self, x: Tensor, valid: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the features in pieces of whole samples, as a convolution repeats each number many times."""
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
        """Unfold the inputs of a convolution, channel by channel: ``(samples, positions, numbers)``."""
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

    def outputs(self, x: Tensor, output: Any, valid: Tensor | None = None) -> Tensor:
        """Return the output rows, ``(tokens, channels)``; for attention, its projection of x alone."""
        if isinstance(self.module, nn.MultiheadAttention):
            projected = self.inputs(x, valid) @ self.matrix.T
            return projected if self.offset is None else projected + self.offset
        return rows(output if self.channel_axis == -1 else output.flatten(self.channel_axis + 1).mT, valid)


def rows(value: Tensor, valid: Tensor | None = None) -> Tensor:
    """Bring values ``(…, channels)`` to ``(tokens, channels)``, without padding if ``valid`` has their first axes."""
    if valid is not None and value.ndim > 2 and value.shape[:2] == valid.shape:
        value = value[valid.to(value.device)]
    return value.reshape(-1, value.shape[-1])
