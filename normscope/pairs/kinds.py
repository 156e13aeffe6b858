"""How a class of modules normalizes: over which elements, to what y, and what it makes of y."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.pairs.layouts import by_channel, group_channels, group_rows, token_rows

Axes = Callable[[nn.Module, int], tuple[int, ...]]
Normalize = Callable[[Tensor, float], tuple[Tensor, Tensor]]
Groups = Callable[[nn.Module], int]
OfModule = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class NormKind:
    """How one class of modules normalizes.

    Attributes:
        name: what tables and figures call it.
        axes: from the module and the number of axes of its input to the axes that share one statistic.
        normalize: from the module, token rows ``(tokens, d)`` in float32 and eps to ``(y, rstd)``: y of the same
            shape, and the slope of each token's straight line, ``(tokens, 1)``.
        affine: from the module and y to what its weight and bias make of it, both ``(tokens, d)``.
        centred: whether the token's mean is taken away, so that |y| ≤ √(d−1) and not √d.
        groups: where a token is a group of channels over all positions, the number of groups of the module.
        activation: what the module does to the result of its affine step, if anything.
        bounded: whether the statistics are the token's own, so that √d bounds |y|.
    """

    name: str
    axes: Axes
    normalize: Callable[[nn.Module, Tensor, float], tuple[Tensor, Tensor]]
    affine: OfModule
    centred: bool
    groups: Groups | None = None
    activation: OfModule | None = None
    bounded: bool = True

    def rows(self, module: nn.Module, x: Tensor, batch_axis: int = 0) -> Tensor:
        """Lay the tokens of ``x`` out as rows ``(tokens, d)``, samples one after the other, in ``x``'s dtype."""
        if self.groups is not None:
            return group_rows(x, self.groups(module))
        return token_rows(x, self.axes(module, x.ndim), batch_axis)

    def channels(self, module: nn.Module, x: Tensor) -> int:
        """Return the number of channels: of a token's elements, or the size of axis 1 where tokens are groups."""
        return x.shape[1] if self.groups is not None else self.rows(module, x).shape[1]

    def channel_of(self, module: nn.Module, rows: Tensor, channels: int) -> Tensor | None:
        """Number the channel of each element of ``rows``, ``(tokens, d)``; None where it is its place in the row."""
        if self.groups is None:
            return None
        return group_channels(rows.shape[0], rows.shape[1], channels, self.groups(module)).to(rows.device)

    def output(self, module: nn.Module, y: Tensor) -> Tensor:
        """Return the module's own output ``(tokens, d)``, from y."""
        out = self.affine(module, y)
        return out if self.activation is None else self.activation(module, out)

    def gamma(self, module: nn.Module, channels: int) -> Tensor:
        """Return what the affine step multiplies each channel's y by, ``(channels,)``, whatever it does with weight."""
        groups = self.groups(module) if self.groups is not None else 1
        device = next((parameter.device for parameter in module.parameters()), None)
        zero = torch.zeros(groups, channels // groups, device=device)
        return (self.affine(module, zero + 1) - self.affine(module, zero)).detach().flatten()


def layer_norm(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Y = (x − mean) / √(variance + eps) over each row of float32 ``(tokens, d)``; returns y and rstd."""
    y, _, rstd = torch.native_layer_norm(rows, [rows.shape[-1]], None, None, eps)
    return y, rstd


def rms_norm(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Y = x / √(mean of x² + eps) over each row of float32 ``(tokens, d)`` (arXiv 1910.07467, eq. 4)."""
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return rows * rstd, rstd


def scale_and_shift(module: nn.Module, y: Tensor) -> Tensor:
    """Weight · y + bias, whichever of the two the module has."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is not None:
        y = y * weight.float().flatten()
    if bias is not None:
        y = y + bias.float().flatten()
    return y


def scale_and_shift_channels(groups: Groups) -> OfModule:
    """The same where a token is a group of channels over all positions, and weight and bias are one a channel."""

    def affine(module: nn.Module, y: Tensor) -> Tensor:
        weight = getattr(module, "weight", None)
        if weight is None:
            return y
        channels = by_channel(y, weight.numel(), groups(module))
        return scale_and_shift(module, channels.mT).mT.reshape(y.shape)

    return affine


def groups_of(module: nn.Module) -> int:
    """Return a GroupNorm's number of groups; of norms that take each channel for itself, the number of channels."""
    groups: Any = getattr(module, "num_groups", None) or getattr(module, "num_features", None)
    return int(groups)


def trailing_axes(module: nn.Module, ndim: int) -> tuple[int, ...]:
    """Return the last axes, as many as ``normalized_shape`` has (one where the module does not say)."""
    shape = getattr(module, "normalized_shape", None)
    count = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
    return tuple(range(-count, 0))


def token_norm(
    name: str,
    *,
    axes: Axes | tuple[int, ...] = trailing_axes,
    normalize: Normalize = layer_norm,
    affine: OfModule = scale_and_shift,
    centred: bool | None = None,
    activation: OfModule | None = None,
) -> NormKind:
    """Describe a norm whose tokens are vectors along ``axes``; see :func:`normscope.register_norm`."""
    return NormKind(
        name,
        axes if callable(axes) else lambda module, ndim: axes,
        lambda module, rows, eps: normalize(rows, eps),
        affine,
        normalize is not rms_norm if centred is None else centred,
        activation=activation,
    )


def group_norm(name: str, *, groups: Groups = groups_of, activation: OfModule | None = None) -> NormKind:
    """Describe a norm whose tokens are groups of channels of one sample, over all positions (arXiv 1803.08494)."""
    return NormKind(
        name,
        lambda module, ndim: tuple(range(1, ndim)),
        lambda module, rows, eps: layer_norm(rows, eps),
        scale_and_shift_channels(groups),
        centred=True,
        groups=groups,
        activation=activation,
        bounded=False,
    )


def running_norm(name: str, *, activation: OfModule | None = None) -> NormKind:
    """Describe a norm by running statistics: for each channel one exact line, the same for every input.

    An S over all channels of such a norm says how their scales differ, and not that it squashes what is large.
    """

    def normalize(module: nn.Module, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean, variance = (getattr(module, f"running_{what}").float() for what in ("mean", "var"))
        of_row = torch.arange(len(rows), device=rows.device) % len(mean)
        rstd = torch.rsqrt(variance + eps)[of_row, None]
        return (rows - mean[of_row, None]) * rstd, rstd

    return replace(group_norm(name, groups=_running_channels, activation=activation), normalize=normalize)


def _running_channels(module: nn.Module) -> int:
    running_mean: Any = module.running_mean
    return len(running_mean)
