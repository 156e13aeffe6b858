"""Kinds of norms: the elements that share one statistic, y, and the affine step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.curves.known import Curve
from normscope.norms.formulas import Form, Lines, Normalize, gain_and_shift, layer_norm, scale_and_shift
from normscope.norms.sites import PointwiseParameters

Axes = Callable[[nn.Module, int], tuple[int, ...]]
Groups = Callable[[nn.Module], int]
OfModule = Callable[[nn.Module, Tensor], Tensor]
OfChannels = Callable[[nn.Module], Tensor]
Parts = Callable[[nn.Module], tuple[Tensor, Tensor, Tensor]]

_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_NEXT_TO_ZERO = 1e-30  # under the root of a token's σ that divides nothing: tokens of equal elements count too


def token_axes(x: Tensor, axes: tuple[int, ...], batch_axis: int = 0) -> list[int]:
    """List the axes that number the tokens, samples first.

    >>> token_axes(torch.zeros(4, 2, 8), axes=(-1,), batch_axis=1)
    [1, 0]
    """
    normalized = {axis % x.ndim for axis in axes}
    return sorted(set(range(x.ndim)) - normalized, key=lambda axis: (axis != batch_axis, axis))


@dataclass(frozen=True)
class NormKind:
    """The computation of one class of norms.

    Attributes:
        name: its name in tables and figures.
        axes: from the module and the number of axes of its input to the axes that share one statistic.
        normalize: from the module, token rows ``(tokens, d)`` and eps to y ``(tokens, d)`` and rstd ``(tokens, 1)``,
            the slope of each token's line.
        affine: from the module and y to the output of its affine step, both ``(tokens, d)``.
        centred: whether the token's mean is subtracted, so that |y| ≤ √(d−1) and not √d.
        form: of ``normalize``, where that is one of the forms in :data:`normscope.norms.formulas.FORMS`.
        groups: the module's number of groups, where a token is a group of channels over all positions.
        heads: whether a group is of one position, and its channels are on ``axes``.
        activation: follows the affine step within the module, if there is one.
        bounded: whether the statistics are the token's own, so that √d bounds |y|.
        eps: added under the root, where the class fixes it, or a function of the module; None where the module has
            it under one of the usual names.
        own_precision: whether the module computes in its input's precision, so that half precision rounds every step;
            otherwise it computes in float32.
        unbatched_axes: number of axes of an input without an axis of samples, for classes that accept such inputs.
        curve: f of a point-wise function, whose y is f(αx + s); None for a norm.
        parts: α, s and weight of such a module, each flat and of one element or one per channel.
    """

    name: str
    axes: Axes
    normalize: Callable[[nn.Module, Tensor, float], tuple[Tensor, Tensor]]
    affine: OfModule
    centred: bool
    form: Form | None = None
    groups: Groups | None = None
    heads: bool = False
    activation: OfModule | None = None
    bounded: bool = True
    eps: float | Callable[[nn.Module], float] | None = None
    own_precision: bool = False
    unbatched_axes: int | None = None
    curve: Curve | None = None
    parts: Parts | None = None

    @property
    def over_positions(self) -> bool:
        """True if a token is of all positions of a sample."""
        return self.groups is not None and not self.heads

    def rows(self, module: nn.Module, x: Tensor, batch_axis: int = 0) -> Tensor:
        """Lay the tokens of ``x`` out as rows ``(tokens, d)``, one sample after the other, in ``x``'s dtype.

        Rows of a grouped norm are ``(samples · groups, channels of a group · positions)``.
        """
        if self.groups is not None and not self.heads:
            x = self._batched(x)
            return x.reshape(len(x) * self.groups(module), -1)
        axes = [axis % x.ndim for axis in self.axes(module, x.ndim)]
        d = math.prod(self.token_shape(module, x))
        return x.permute(*token_axes(x, tuple(axes), batch_axis), *axes).reshape(-1, d)

    def token_shape(self, module: nn.Module, x: Tensor) -> tuple[int, ...]:
        """Return the sizes of the axes that share one statistic; of a group, its channels and then its positions."""
        if self.groups is not None and not self.heads:
            _, channels, *positions = self._batched(x).shape
            return (channels // self.groups(module), *positions)
        sizes = tuple(x.shape[axis] for axis in self.axes(module, x.ndim))
        return (math.prod(sizes) // self.groups(module),) if self.groups is not None else sizes

    def channels(self, module: nn.Module, x: Tensor) -> int:
        """Return the number of channels: the elements of a token, or the size of axis 1 where tokens are groups."""
        if self.groups is None or self.heads:
            return math.prod(x.shape[axis] for axis in self.axes(module, x.ndim))
        return self._batched(x).shape[1]

    def lines(self, module: nn.Module, rows: Tensor, eps: float) -> Lines:
        """Return the lines of token rows: by their form, or as numbers where ``normalize`` has none."""
        if self.form is not None:
            return Lines(self.form, eps)
        if self.curve is not None:
            y, _ = self.normalize(module, rows.float().double(), eps)
            return Lines(layer_norm, _NEXT_TO_ZERO, explicit_y=y)
        x = rows.double()
        y, rstd = self.normalize(module, x, eps)
        return Lines(shift=(x - y.double() / rstd.double()).mean(1), rstd=rstd.double().flatten())

    def eps_of(self, module: nn.Module, dtype: torch.dtype) -> float:
        """Return eps: of the class, the module or, as for ``nn.RMSNorm(d, eps=None)``, of the dtype torch computes in.

        torch computes half precision in float32, whose eps is 1.2e-7 and not float16's 9.8e-4.
        """
        eps = self.eps(module) if callable(self.eps) else named_eps(module) if self.eps is None else self.eps
        return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps if eps is None else eps

    def output(self, module: nn.Module, y: Tensor) -> Tensor:
        """Return the module's own output from y, both ``(tokens, d)``; float32 if there is an activation."""
        out = self.affine(module, y)
        if self.activation is None:
            return out
        return self.activation(module, out.to(torch.float32, copy=True))  # which may work in place

    def gamma(self, module: nn.Module, channels: int) -> Tensor:
        """Return each channel's factor of y in the affine step, float32 ``(channels,)``."""
        return self.gain_and_offset(module, channels)[0]

    def gain_and_offset(self, module: nn.Module, channels: int) -> tuple[Tensor, Tensor]:
        """Return the affine step gain · y + offset, each float32 ``(channels,)``."""
        groups = self.groups(module) if self.groups is not None else 1
        tensors = itertools.chain(module.parameters(), module.buffers())
        device = next((tensor.device for tensor in tensors), None)
        # In float64, which mps lacks, so that subtracting the offset leaves the gain as it was, to the bit.
        dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
        zero = torch.zeros(groups, channels // groups, dtype=dtype, device=device)
        offset = self.affine(module, zero)
        gain = self.affine(module, zero + 1) - offset
        return gain.detach().flatten().float(), offset.detach().flatten().float()

    def pointwise(self, module: nn.Module) -> PointwiseParameters | None:
        """Return the parameters of a point-wise function; None for a norm."""
        if self.curve is None or self.parts is None:
            return None
        return PointwiseParameters(self.curve.name, *(tuple(parameter.tolist()) for parameter in self.parts(module)))

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if x.ndim == self.unbatched_axes else x


def named_eps(module: nn.Module) -> float | None:
    """Return the eps that the module stores under one of the usual names, if any."""
    values: list[Any] = [getattr(module, name, None) for name in _EPS_NAMES]
    return next((float(value) for value in values if isinstance(value, (int, float)) and not math.isnan(value)), None)


def groups_of(module: nn.Module) -> int:
    """Return a GroupNorm's number of groups, or the number of channels of norms that treat each channel separately."""
    groups: Any = getattr(module, "num_groups", None) or getattr(module, "num_features", None)
    return int(groups)


def trailing_axes(module: nn.Module, ndim: int) -> tuple[int, ...]:
    """Return the last axes, as many as ``normalized_shape`` has; the last one if the module has no such attribute."""
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
    **options: Any,
) -> NormKind:
    """Describe a norm whose tokens are vectors along ``axes``; see :func:`normscope.register_norm`.

    ``options`` are further attributes of :class:`NormKind`.
    """
    form = normalize if isinstance(normalize, Form) else None
    options.setdefault("bounded", form is None or form.centred or not form.about_mean)
    return NormKind(
        name,
        axes if callable(axes) else lambda module, ndim: axes,
        lambda module, rows, eps: normalize(rows, eps),
        affine,
        form is None or form.centred if centred is None else centred,
        form,
        **options,
    )


def group_norm(name: str, *, groups: Groups = groups_of, **options: Any) -> NormKind:
    """Describe a norm whose tokens are groups of channels of one sample, over all positions (arXiv 1803.08494)."""

    def affine(module: nn.Module, y: Tensor) -> Tensor:
        gain, _ = gain_and_shift(module)
        if gain is None:
            return y
        channels = y.reshape(len(y) // groups(module), gain.numel(), -1)
        return scale_and_shift(module, channels.mT).mT.reshape(y.shape)

    kind = token_norm(name, axes=lambda module, ndim: tuple(range(1, ndim)), affine=affine)
    return replace(kind, groups=groups, bounded=False, **options)


def running_norm(name: str, **options: Any) -> NormKind:
    """Describe a norm by running statistics: each channel has one line, the same for every input.

    Pooled over its channels, y against x is S-shaped where their scales differ; large inputs are not squashed.
    """

    def normalize(module: nn.Module, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean, variance = (getattr(module, f"running_{name}").float().to(rows.device) for name in ("mean", "var"))
        channel = torch.arange(len(rows), device=rows.device) % len(mean)
        rstd = torch.rsqrt(variance + eps)[channel, None]
        return (rows - mean[channel, None]) * rstd, rstd

    def channels(module: Any) -> int:
        return len(module.running_mean)

    return replace(group_norm(name, groups=channels, **options), normalize=normalize, form=None)


def measured_affine(gain: OfChannels, shift: OfChannels, groups: Groups | None = None) -> OfModule:
    """Return the step gain · y + shift of tensors that a trial has found in the module, each of 1 or all channels."""

    def affine(module: nn.Module, y: Tensor) -> Tensor:
        factor, summand = (read(module).to(y)[:, None] for read in (gain, shift))
        channels = max(len(factor), len(summand))
        if channels == 1:
            return y * factor + summand
        by_channel = y.reshape(len(y) // (groups(module) if groups else 1), channels, -1)
        return (by_channel * factor + summand).reshape(y.shape)

    return affine


def _own_parts(module: Any) -> tuple[Tensor, Tensor, Tensor]:
    gain, _ = gain_and_shift(module)
    shift = getattr(module, "shift", None)
    parts = (module.alpha, *(torch.zeros(1) if shift is None else shift, torch.ones(1) if gain is None else gain))
    alpha, shift, gain = (parameter.detach().flatten() for parameter in parts)
    return alpha, shift, gain


def pointwise_function(
    name: str, curve: Curve, *, axes: Axes | tuple[int, ...], parts: Parts = _own_parts, **options: Any
) -> NormKind:
    """Describe a point-wise function weight · f(αx + s) + bias; by default, α and s are ``alpha`` and ``shift``."""

    def normalize(module: nn.Module, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        alpha, shift, _ = (parameter.to(rows) for parameter in parts(module))
        y = curve.function(alpha * rows + shift)
        return y, torch.ones_like(y[:, :1])

    kind = token_norm(name, axes=axes, centred=False, eps=0.0, **options)
    return replace(kind, normalize=normalize, form=None, bounded=curve.limit == 1, curve=curve, parts=parts)
