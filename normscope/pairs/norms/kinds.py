"""Kinds of norms: the elements that share one statistic, y, and the affine step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.pairs.norms.formulas import FORMS, Form, Lines, Normalize, gain_and_shift, layer_norm, scale_and_shift

Axes = Callable[[nn.Module, int], tuple[int, ...]]
Groups = Callable[[nn.Module], int]
OfModule = Callable[[nn.Module, Tensor], Tensor]

_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps")


def token_rows(x: Tensor, axes: tuple[int, ...], batch_axis: int = 0) -> Tensor:
    """Move ``axes`` to the end and ``batch_axis`` to the front, and flatten to ``(tokens, d)``.

    >>> token_rows(torch.zeros(2, 8, 3, 3), axes=(1,)).shape
    torch.Size([18, 8])
    """
    others = token_axes(x, axes, batch_axis)
    d = math.prod(x.shape[axis] for axis in axes)
    return x.permute(*others, *(axis % x.ndim for axis in axes)).reshape(-1, d)


def token_axes(x: Tensor, axes: tuple[int, ...], batch_axis: int = 0) -> list[int]:
    """List the axes that number the tokens, in the order of :func:`token_rows`: samples first.

    >>> token_axes(torch.zeros(4, 2, 8), axes=(-1,), batch_axis=1)
    [1, 0]
    """
    normalized = {axis % x.ndim for axis in axes}
    others = [axis for axis in range(x.ndim) if axis not in normalized]
    if batch_axis in others:
        others = [batch_axis, *(axis for axis in others if axis != batch_axis)]
    return others


def group_rows(x: Tensor, groups: int) -> Tensor:
    """Lay ``(samples, channels, *positions)`` out as ``(samples · groups, channels of a group · positions)``.

    >>> group_rows(torch.zeros(2, 8, 3, 3), groups=4).shape
    torch.Size([8, 18])
    """
    return x.reshape(len(x) * groups, -1)


@dataclass(frozen=True)
class NormKind:
    """The way one class of modules normalizes.

    Attributes:
        name: what tables and figures call it.
        axes: from the module and the number of axes of its input to the axes that share one statistic.
        normalize: from the module, token rows ``(tokens, d)`` in float32 and eps to ``(y, rstd)``: y of the same
            shape, and the slope of each token's straight line, ``(tokens, 1)``.
        affine: from the module and y to what its weight and bias make of it, both ``(tokens, d)``.
        form: what makes ``normalize`` of the token's elements alone; None where it is of another kind.
        centred: whether the token's mean is taken away, so that |y| ≤ √(d−1) and not √d.
        groups: where a token is a group of channels over all positions, the number of groups of the module.
        activation: what the module does to the result of its affine step, if anything.
        bounded: whether the statistics are the token's own, so that √d bounds |y|.
        eps: what is added under the root, where the class fixes it; None where the module says it.
        own_precision: whether the module computes in its input's precision, and not in float32 inside, so that half
            precision rounds every step.
        unbatched_axes: the number of axes of an input without an axis of samples, where the class takes such.
    """

    name: str
    axes: Axes
    normalize: Callable[[nn.Module, Tensor, float], tuple[Tensor, Tensor]]
    affine: OfModule
    centred: bool
    form: Form | None = None
    groups: Groups | None = None
    activation: OfModule | None = None
    bounded: bool = True
    eps: float | None = None
    own_precision: bool = False
    unbatched_axes: int | None = None

    def rows(self, module: nn.Module, x: Tensor, batch_axis: int = 0) -> Tensor:
        """Lay the tokens of ``x`` out as rows ``(tokens, d)``, samples one after the other, in ``x``'s dtype."""
        if self.groups is not None:
            return group_rows(self._batched(x), self.groups(module))
        return token_rows(x, self.axes(module, x.ndim), batch_axis)

    def token_shape(self, module: nn.Module, x: Tensor) -> tuple[int, ...]:
        """Return the sizes of what shares one statistic: of a group, its channels and then its positions."""
        if self.groups is not None:
            _, channels, *positions = self._batched(x).shape
            return (channels // self.groups(module), *positions)
        return tuple(x.shape[axis] for axis in self.axes(module, x.ndim))

    def channels(self, module: nn.Module, x: Tensor) -> int:
        """Return the number of channels: of a token's elements, or the size of axis 1 where tokens are groups."""
        return self._batched(x).shape[1] if self.groups is not None else self.rows(module, x).shape[1]

    def lines(self, module: nn.Module, rows: Tensor, eps: float) -> Lines:
        """Say how the lines of ``rows`` follow from them or, where only ``normalize`` knows, which they are."""
        if self.form is not None:
            return Lines(self.form, eps)
        x = rows.double()
        y, rstd = self.normalize(module, x, eps)
        return Lines(shift=(x - y.double() / rstd.double()).mean(1), rstd=rstd.double().flatten())

    def eps_of(self, module: nn.Module, dtype: torch.dtype) -> float:
        """Return what is added under the root: the class's own, or the module's."""
        return eps_of(module, dtype) if self.eps is None else self.eps

    def output(self, module: nn.Module, y: Tensor) -> Tensor:
        """Return the module's own output ``(tokens, d)``, from y; an activation takes, and gives, float32."""
        out = self.affine(module, y)
        if self.activation is None:
            return out
        return self.activation(module, out.to(torch.float32, copy=True))  # which may work in place

    def gamma(self, module: nn.Module, channels: int) -> Tensor:
        """Return what the affine step multiplies each channel's y by, ``(channels,)``, whatever it does with weight."""
        return self.gain_and_offset(module, channels)[0]

    def gain_and_offset(self, module: nn.Module, channels: int) -> tuple[Tensor, Tensor]:
        """Return what the affine step makes of y, gain · y + offset, each float32 ``(channels,)``."""
        groups = self.groups(module) if self.groups is not None else 1
        tensors = itertools.chain(module.parameters(), module.buffers())
        device = next((tensor.device for tensor in tensors), None)
        # In float64, which mps has not, so that taking the offset away again leaves the gain as it was, to the bit.
        dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
        zero = torch.zeros(groups, channels // groups, dtype=dtype, device=device)
        offset = self.affine(module, zero)
        gain = self.affine(module, zero + 1) - offset
        return gain.detach().flatten().float(), offset.detach().flatten().float()

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if x.ndim == self.unbatched_axes else x


def eps_of(module: nn.Module, dtype: torch.dtype) -> float:
    """Return the module's eps; where it is None, as nn.RMSNorm allows, that of the dtype that torch computes in.

    torch computes half precision in float32, and takes eps from there: 1.2e-7, not float16's 9.8e-4.
    """
    eps = named_eps(module)
    computed_in = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.finfo(computed_in).eps if eps is None else eps


def named_eps(module: nn.Module) -> float | None:
    """Return the eps that the module keeps under one of the usual names; None where it keeps none."""
    values: list[Any] = [getattr(module, name, None) for name in _EPS_NAMES]
    # A NaN is none: it is there to be unequal to others'.
    return next((float(value) for value in values if isinstance(value, (int, float)) and value == value), None)


def scale_and_shift_channels(groups: Groups) -> OfModule:
    """Weight · y + bias where a token is a group of channels over all positions, and both are one a channel."""

    def affine(module: nn.Module, y: Tensor) -> Tensor:
        gain, _ = gain_and_shift(module)
        if gain is None:
            return y
        channels = y.reshape(len(y) // groups(module), gain.numel(), -1)
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
    bounded: bool = True,
    eps: float | None = None,
    own_precision: bool = False,
) -> NormKind:
    """Describe a norm whose tokens are vectors along ``axes``; see :func:`normscope.register_norm`."""
    form = FORMS.get(normalize)
    return NormKind(
        name,
        axes if callable(axes) else lambda module, ndim: axes,
        lambda module, rows, eps: normalize(rows, eps),
        affine,
        form is None or form.centred if centred is None else centred,
        form,
        activation=activation,
        bounded=bounded,
        eps=eps,
        own_precision=own_precision,
    )


def group_norm(name: str, *, groups: Groups = groups_of, activation: OfModule | None = None) -> NormKind:
    """Describe a norm whose tokens are groups of channels of one sample, over all positions (arXiv 1803.08494)."""
    return NormKind(
        name,
        lambda module, ndim: tuple(range(1, ndim)),
        lambda module, rows, eps: layer_norm(rows, eps),
        scale_and_shift_channels(groups),
        centred=True,
        form=FORMS[layer_norm],
        groups=groups,
        activation=activation,
        bounded=False,
    )


def running_norm(name: str, *, activation: OfModule | None = None, own_precision: bool = False) -> NormKind:
    """Describe a norm by running statistics: for each channel one exact line, the same for every input.

    An S over all channels of such a norm says how their scales differ, and not that it squashes what is large.
    """

    def normalize(module: nn.Module, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean, variance = (getattr(module, f"running_{what}").float().to(rows.device) for what in ("mean", "var"))
        of_row = torch.arange(len(rows), device=rows.device) % len(mean)
        rstd = torch.rsqrt(variance + eps)[of_row, None]
        return (rows - mean[of_row, None]) * rstd, rstd

    grouped = group_norm(name, groups=_running_channels, activation=activation)
    return replace(grouped, normalize=normalize, form=None, own_precision=own_precision)


def _running_channels(module: nn.Module) -> int:
    running_mean: Any = module.running_mean
    return len(running_mean)
