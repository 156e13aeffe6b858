"""Trials of modules of unknown classes: which formula reproduces their output, over which axes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normscope.curves.known import CURVES, Curve
from normscope.norms.formulas import (
    BESIDE_ROOT,
    BOUNDS_LENGTH,
    BOUNDS_SQUARE,
    FORMS,
    UNDER_ROOT,
    deviation_norm,
    scale_and_shift,
    unit_length,
    unit_offset,
)
from normscope.norms.kinds import (
    NormKind,
    OfChannels,
    group_norm,
    measured_affine,
    named_eps,
    pointwise_function,
    running_norm,
    token_norm,
)
from normscope.norms.verification import excess
from normscope.runtime.spread import copied

Call = tuple[tuple[Any, ...], Mapping[str, Any]]

REGISTER = "normscope.register_norm says what it does"
_HIDDEN = f"its output fits more than one form (weights of zero hide y); {REGISTER}"
_NO_CURVE = "no known curve f makes weight · f(αx + s) + bias of its input"
_CALLED_POINTWISE = re.compile("dynamic_?(tanh|erf|isru)|dyt|dyisru|derf|pointwise", re.IGNORECASE)
_MOST_PARAMETERS = 6  # of a norm or a point-wise function
_MOST_ELEMENTS = 2**14  # of a weight per head and channel

# (mean, σ) of noise: scales whose squares are near the usual eps, and an offset that reveals centring.
_PROBES = ((0.0, 1e-9), (0.0, 1e-5), (0.0, 1e-3), (0.0, 1.0), (3.0, 1.0))
_BENDS = (0.3, 1.0, 3.0, 30.0)  # σ of αx, which reaches the bends and the tails of every curve
_MOST_TOKENS = 256  # that a trial compares
_POSITIONS, _FEW = 8, 2  # elements along an axis that no form normalizes over, and in trials of single elements
_DRAWS = 8
_SATURATING = 30.0  # σ of noise at which a norm ignores eps, but few other functions have reached their ends
_LARGE = 1e4  # σ of noise whose square is far above every eps
_FAR = 1e9  # |x| at which a bounded curve has reached its end; its third power is a float32
_HALVINGS = 90
_SAME = 1e-5  # largest difference of two numbers that count as one: float32, as many modules compute, explains 1e-6
_TRANSFORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(lambda v: v, lambda v: 1 + v, torch.exp, F.softplus, torch.reciprocal),
)
_LADDER = [(0.0, 10.0**exponent) for exponent in range(-14, 3)]  # likewise; on some of them, eps shows
_ROUND = 1e-4  # a measured eps this close to one of the module's numbers, or to three digits, is that


def is_small(module: nn.Module) -> bool:
    """True if a module has no parameters but a few numbers, or one per channel, as norms and point-wise functions do.

    >>> is_small(nn.Linear(8, 8)), is_small(nn.PReLU(8))  # torch's own layers are known
    (False, False)
    """
    parameters = list(module.parameters())
    if type(module).__module__.startswith("torch.nn") or len(parameters) > _MOST_PARAMETERS:
        return False
    if any(is_lazy(parameter) or not parameter.is_floating_point() for parameter in parameters):
        return False
    flat = all(max(parameter.shape, default=1) == parameter.numel() for parameter in parameters)
    if next(module.children(), None) is None:
        return flat or all(parameter.numel() <= _MOST_ELEMENTS for parameter in parameters)
    return flat and len(parameters) > 0 and len({parameter.numel() for parameter in parameters} - {1}) <= 1


def called_pointwise(module: nn.Module) -> bool:
    """True if a small module with parameters or an α has the name of a point-wise function, such as DynamicTanh."""
    named = _CALLED_POINTWISE.search(type(module).__name__) is not None
    return named and is_small(module) and (next(module.parameters(), None) is not None or hasattr(module, "alpha"))


class Trial:
    """Outputs of a copy of a module, in float64 if it computes in it, for inputs in place of one of its arguments.

    Attributes:
        module: the copy.
        shape: of the inputs: shorter than the argument along axes of no parameter's size.
    """

    def __init__(
        self, module: nn.Module, call: Call, x: Tensor, most: int = _POSITIONS, dtype: torch.dtype = torch.float64
    ) -> None:
        """Copy a module that was called with ``x`` among the arguments of ``call``; shorten axes to ``most``."""
        sizes = {size for parameter in module.parameters() for size in (parameter.numel(), *parameter.shape)} - {1}
        ends = {1, x.ndim - 1} if most > _FEW and x[:most].numel() <= _MOST_ELEMENTS * most else {x.ndim - 1}
        ends = ends if most > _FEW else set()
        short = [n if n in sizes or axis in ends else min(n, most) for axis, n in enumerate(x.shape)]
        if most > _FEW and x.ndim > 1:
            short[0] = max(short[0], 2)  # among which statistics of a batch show
        dtypes = [torch.float32] if x.device.type == "mps" or dtype == torch.float32 else [dtype, torch.float32]
        self._call, self._x = call, x
        failed: Exception = TypeError("its output has another shape")
        for self._dtype, self.shape in itertools.product(dtypes, (short, list(x.shape))):
            self.module = copied(module).eval().to(self._dtype)
            try:
                if self(self.noise()).shape == torch.Size(self.shape):
                    return
            except Exception as error:  # of code that is not ours, on inputs that it was not made for
                failed = error
        raise failed

    def __call__(self, probe: Tensor) -> Tensor:
        args, kwargs = self._call
        args = tuple(probe.clone() if value is self._x else value for value in args)
        kwargs = {key: probe.clone() if value is self._x else value for key, value in kwargs.items()}
        output = self.module(*args, **kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        return output.to(self._dtype)

    def noise(self, seed: int = 0) -> Tensor:
        """Draw standard normal numbers."""
        noise = torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))
        return noise.to(self._x.device, self._dtype)

    def elementwise(self) -> bool:
        """True if each element of the output depends on the same element of the input alone."""
        x, replacement = self.noise(), self.noise(1)
        keep = self.noise(2) > 0
        return bool(torch.equal(self(x)[keep], self(x.where(keep, 9 * replacement))[keep]))

    def ignores_scale(self) -> bool:
        """True if the output stays as it is while an input doubles, but follows small changes of it in small steps."""
        x, step = self.noise(), self.noise(1)
        for scale in (_SATURATING, _LARGE):  # a norm's outputs differ by less than a thousandth
            single, double, near = (self(scale * values) for values in (x, 2 * x, x + 1e-3 * step))
            if not bool((double - single).abs().mean() < 0.01 * single.abs().mean()):
                return False
        moved, size = (near - single).abs(), single.abs().mean()  # a softmax or a saturated function jumps, or stays
        return bool(((moved > 1e-6 * size) & (moved < 0.1 * size)).float().mean() > 0.02)

    def extents(self) -> list[int]:
        """Return along each axis the number of elements that share a statistic with the first."""
        x = self.noise()
        changed = x.clone()
        changed[(0,) * x.ndim] = 1e3
        before, after = self(x), self(changed)
        shared = (after - before).abs() > 1e-7 * before.abs().max()
        if not bool(shared.any()):
            return [1] * x.ndim
        return [int(where.max()) + 1 for where in shared.nonzero().mT]


def _readers(module: nn.Module) -> Iterator[tuple[str, int, OfChannels]]:
    """Yield name and size of each tensor of a module, and functions from the module to it, or to what it may encode."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        for transform in _TRANSFORMS if tensor.is_floating_point() else ():

            def read(module: nn.Module, name: str = name, of: Any = transform) -> Tensor:
                path, _, last = name.rpartition(".")
                tensor: Tensor = getattr(module.get_submodule(path), last)
                return of(tensor.detach().float().flatten())  # type: ignore[no-any-return]

            yield name, tensor.numel(), read


def _tensor_of(
    module: nn.Module, values: Tensor, within: Tensor | float, used: set[str], *, wide: bool = True, signed: bool = True
) -> OfChannels | None:
    """Return a reader of the module's tensor whose values a trial has measured, and add its name to ``used``.

    ``values`` are those of all channels, NaN where unknown, and off by up to ``within``; without ``signed``,
    magnitudes. ``wide`` prefers tensors of as many elements to scalars.
    """
    trivial = _alike(values, torch.zeros_like(values), within) or _alike(values, torch.ones_like(values), within)
    sized = [reader for reader in _readers(module) if reader[0] not in used and reader[1] in (1, len(values))]
    for name, size, read in sorted(sized, key=lambda named: (named[1] == 1) == wide):
        expected = read(module).to(values) if signed else read(module).to(values).abs()
        if _alike(values, expected, within) and (not trivial or (size > 1) == wide or "alpha" in name):  # as at first
            used.add(name)
            return read
    return None


def _alike(values: Tensor, expected: Tensor, within: Tensor | float) -> bool:
    """True if numbers are equal to measured ones, where those are no NaN, within what a trial can tell."""
    return bool(((values - expected).abs() <= _SAME * values.abs() + within)[~values.isnan()].all())


def _constant(values: Tensor, within: Tensor | float) -> OfChannels:
    """Return a reader of numbers that are no tensor of the module: one, if all that are known are alike."""
    values = values.where(~(values.abs() <= within), 0.0)
    middle = values.nanmedian()
    constant = (middle[None] if _alike(values, middle, 0.0) else values.nan_to_num(nan=float(middle))).float()
    return lambda module: constant


@functools.cache
def _quartiles(curve: Curve) -> tuple[float, ...]:
    """Return the ends of a curve, and the u at which a quarter and three quarters of its rise are behind it."""
    low, high = curve.function(torch.tensor([-_FAR, _FAR], dtype=torch.float64))
    levels = low + torch.tensor([0.25, 0.75], dtype=torch.float64) * (high - low)
    return (*(low.item(), high.item()), *_bisected(curve.function, levels).tolist())


def _bisected(rising: Callable[[Tensor], Tensor], levels: Tensor) -> Tensor:
    """Return where a rising function passes some levels, between ±:data:`_FAR`."""
    low, high = torch.full_like(levels, -_FAR), torch.full_like(levels, _FAR)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        under = rising(middle) < levels
        low, high = middle.where(under, low), high.where(under, middle)
    return (low + high) / 2


def _pointwise(module: nn.Module, call: Call, x: Tensor, output: Tensor) -> NormKind | str | None:
    """Find the curve of an element-wise module, weight · f(αx + s) + bias; None for an activation or a scale.

    f tends to a limit on either side, and its quartiles determine α and s. A function is an activation if its lower end
    is zero, if all its parameters are single numbers and its amplitude is not one, or if α is one and no parameter.
    """
    trial, named = Trial(module, call, x, _FEW), called_pointwise(module)
    like = trial.noise()
    low, high, beyond = (trial(torch.full_like(like, reach)) for reach in (-_FAR, _FAR, 2 * _FAR))
    rise, size = high - low, high.abs() + low.abs()
    if not bool(((beyond - high).abs() <= 1e-3 * size).all()):
        return _NO_CURVE if named else None
    alive = rise.abs() > _SAME * size
    if named and not bool(alive.any()):
        alpha = getattr(module, "alpha", None)
        constant = isinstance(alpha, Tensor) and not bool(alpha.any())
        return "its α is zero, so that its output is constant" if constant else _HIDDEN
    numbers = all(parameter.numel() == 1 for parameter in module.parameters())
    amplitude = numbers and not torch.allclose(rise.abs(), rise.new_tensor(2.0))
    if not named and (amplitude or not bool(low.any()) or not bool(alive.any())):
        return None
    levels = (torch.full_like(like, level) for level in (0.25, 0.75))
    quartiles = [_bisected(lambda t: ((trial(t) - low) / rise).nan_to_num(), level) for level in levels]
    measured = [*(values.where(alive, math.nan) for values in quartiles), low, rise]
    width = float((measured[1] - measured[0]).nanmedian())
    single = Trial(module, call, x, _FEW, torch.float32)
    probes = [(probe, single(probe)) for probe in (single.noise() * bend * width for bend in _BENDS)]
    drawn = 3 * width * trial.noise()
    kinds = _pointwise_kinds(module, measured, (drawn, trial(drawn)))
    for _, hard_coded, kind in sorted(kinds, key=operator.itemgetter(0)):
        if all(_fits(kind, module, *probe) for probe in probes):
            return None if hard_coded and not named else _as_called(kind, module, x, output)
    return _NO_CURVE


def _pointwise_kinds(
    module: nn.Module, measured: Sequence[Tensor], drawn: tuple[Tensor, Tensor]
) -> Iterator[tuple[bool, bool, NormKind]]:
    """Yield functions of the curves with some x at both quartiles, lower end and rise, that pass near drawn pairs.

    Before each come whether α is no tensor of the module, and whether it is one without being a tensor.
    """
    places = [axis for axis in (-1, 1, -2) if axis in range(-measured[0].ndim, measured[0].ndim)]
    rows = {axis: torch.stack([values.movedim(axis, -1).flatten(0, -2) for values in measured]) for axis in places}
    axes = [axis for axis in places if torch.allclose(rows[axis], rows[axis][:, :1], rtol=_SAME, equal_nan=True)][:1]
    for axis, curve in itertools.product(axes, CURVES.values()):
        if not curve.bounded or curve.amplitude_is_inverse_scale or curve.shifted:
            continue
        below, above, low, rise = rows[axis][:, 0]
        f_low, f_high, u_below, u_above = _quartiles(curve)
        alpha, gain = (u_above - u_below) / (above - below), rise / (f_high - f_low)
        shift, bias = u_below - alpha * below, low - f_low * gain
        within = _SAME * (low.abs() + rise.abs())
        x, out = (values.movedim(axis, -1).flatten(0, -2) for values in drawn)
        if bool(((gain * curve.function(alpha * x + shift) + bias - out).abs() > 1e-3 * rise.abs()).any()):
            continue
        used: set[str] = set()
        own_alpha = _tensor_of(module, alpha, 0.0, used, wide=False, signed=not curve.zero_centred)
        if own_alpha is not None:  # of either sign, as f(αx + s) is −f(−αx − s)
            sign = own_alpha(module).to(alpha).sign()
            alpha, shift, gain = (sign * values for values in (alpha, shift, gain))
        read_gain, read_bias = (
            _tensor_of(module, values, within, used) or _constant(values, within) for values in (gain, bias)
        )
        own_shift = _tensor_of(module, shift, _SAME, used, wide=False)
        read_shift = own_shift or _constant(shift, _SAME)
        readers = (own_alpha or _constant(alpha, 0.0), read_shift, read_gain)
        shifted = own_shift is not None or bool(read_shift(module).any())
        function = next((entry for entry in CURVES.values() if shifted and entry.shift_of == curve.name), curve)

        def parts(module: nn.Module, readers: Any = readers) -> tuple[Tensor, Tensor, Tensor]:
            alpha, shift, gain = (read(module) for read in readers)
            return alpha, shift, gain

        affine, name = measured_affine(read_gain, read_bias), type(module).__name__
        unit = own_alpha is None and not shifted and bool(((alpha - 1).abs() < _SAME).all())
        kind = pointwise_function(name, function, axes=(axis,), parts=parts, affine=affine)
        yield own_alpha is None, unit, kind


# Norms.
@torch.no_grad()
def identified(module: nn.Module, call: Call, x: Tensor, output: Tensor, ancestor: NormKind | None) -> NormKind | str:
    """Find the formula that reproduces a module's output, by trial on a copy; return the reason if there is none.

    ``x`` is the normalized tensor among the arguments of ``call``. ``ancestor`` is the kind of a base class whose
    ``forward`` the module's class overrides.
    """
    if not x.is_floating_point() or output.shape != x.shape:
        return "it does not take floating-point numbers and return as many"
    if sum(isinstance(value, Tensor) for value in (*call[0], *call[1].values())) > 1:
        return f"its output depends on a second tensor that it is called with; {REGISTER}"
    try:
        elementwise = ancestor is None and Trial(module, call, x, _FEW).elementwise()
        if elementwise and (pointwise := _pointwise(module, call, x, output)) is not None:
            return pointwise
        trial = Trial(module, call, x)
        if torch.allclose(trial(trial.noise()), trial(trial.noise(1)), rtol=_SAME, atol=0):
            return _HIDDEN
        probes, ladder = (_probes(module, call, x, scales) for scales in (_PROBES, _LADDER))
        for kind in _candidates(module, trial, ancestor, ladder):
            if all(_fits(kind, module, *probe) for probe in probes):
                return _as_called(kind, module, x, output)
    except Exception as error:  # of code that is not ours, on inputs that it was not made for
        return f"it could not be tried on other inputs ({type(error).__name__}); {REGISTER}"
    if elementwise:
        return f"each element of its output depends on the same one of its input alone; {REGISTER}"
    differs = "no form that is known" if ancestor is None else f"neither {ancestor.name}'s nor another known form"
    return f"{differs} reproduces its output, with weights along the axes of its statistics; {REGISTER}"


@torch.no_grad()
def tried(module: nn.Module, call: Call, x: Tensor, output: Tensor) -> NormKind | str | None:
    """Find the formula of a module whose name says nothing; None unless it is point-wise or ignores its input's scale.

    >>> x = torch.randn(2, 8)
    >>> [tried(module, ((x,), {}), x, module(x)) for module in (nn.PReLU(8), nn.Softmax(-1))]
    [None, None]
    """
    if not x.is_floating_point() or output.shape != x.shape or not x.numel():
        return None
    try:
        running = hasattr(module, "running_mean") and hasattr(module, "running_var")
        if not running and Trial(module, call, x, _FEW).elementwise():
            return _pointwise(module, call, x, output) if list(module.parameters()) else None
        if not running and not Trial(module, call, x).ignores_scale():
            return None
    except Exception:  # of code that is not ours, on inputs that it was not made for
        return None
    return identified(module, call, x, output, None)


@torch.no_grad()
def normalizes_first(module: nn.Module, call: Call, x: Tensor | None, output: Any) -> bool:
    """True if the first of several outputs has the shape of the input and ignores its scale."""
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    if isinstance(first, Tensor) and x is not None and first.shape == x.shape and x.is_floating_point():
        with contextlib.suppress(Exception):  # of code that is not ours, on inputs that it was not made for
            return Trial(module, call, x).ignores_scale()
    return False


def _fits(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor) -> bool:
    try:
        return excess(kind, module, x, output, at_most=_MOST_TOKENS) <= 1
    except (RuntimeError, TypeError):  # channels or statistics of other sizes than the form needs, or none
        return False


def reproduced(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor) -> NormKind | None:
    """Return a kind that reproduces a module's output in its own dtype, where it may round every step; else None."""
    precisions = (kind, replace(kind, own_precision=True))
    return next((precision for precision in precisions if _fits(precision, module, x, output)), None)


@torch.no_grad()
def shared(kind: NormKind, module: nn.Module, call: Call, x: Tensor, output: Tensor) -> NormKind | None:
    """Return the kind of another module of the class if it reproduces this one's output on noise, too; else None."""
    with contextlib.suppress(Exception):  # of code that is not ours, on inputs that it was not made for
        if kind.curve is None and all(_fits(kind, module, *probe) for probe in _probes(module, call, x)):
            return reproduced(kind, module, x, output)
    return None


def _probes(
    module: nn.Module, call: Call, x: Tensor, means_and_scales: Iterable[tuple[float, float]] = _PROBES
) -> list[tuple[Tensor, Tensor]]:
    single = Trial(module, call, x, dtype=torch.float32)
    return [(probe, single(probe)) for probe in (mean + sigma * single.noise() for mean, sigma in means_and_scales)]


def _as_called(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor) -> NormKind | str:
    reason = "its output is of no form on this input, whose largest |x| is {:.3g}: it may overflow there"
    return reproduced(kind, module, x, output) or reason.format(x.detach().abs().max())


def _candidates(
    module: nn.Module, trial: Trial, ancestor: NormKind | None, ladder: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[NormKind]:
    """Yield kinds of norms whose gain and shift are measured, those of the fewest unexplained numbers first."""
    name = type(module).__name__
    if ancestor is not None:
        yield replace(ancestor, name=name)
        if ancestor.groups is not None:
            return
        yield from (replace(ancestor, name=name, axes=layout.axes) for layout in _layouts(name, trial))
    if hasattr(module, "running_mean") and hasattr(module, "running_var"):
        yield from (replace(running_norm(name), eps=eps) for eps in (named_eps(module), 1e-5, 1e-3) if eps is not None)
    for layout in _layouts(name, trial):
        for _, kind in sorted(_measured(module, trial, layout), key=operator.itemgetter(0)):
            yield from _with_eps(module, kind, ladder)


def _layouts(name: str, trial: Trial) -> Iterator[NormKind]:
    """Yield LayerNorms, GroupNorms and norms of heads over the elements that share a statistic."""
    shape, extents = trial.shape, trial.extents()
    ndim, positions = len(shape), list(range(2, len(shape)))
    shared = [axis for axis, extent in enumerate(extents) if extent > 1]
    partly = [axis for axis in shared if extents[axis] < shape[axis]]
    if not shared or (0 in shared and ndim > 1):  # no statistic, or one of the whole batch
        return

    def grouped(extent: int) -> NormKind:
        return group_norm(name, groups=lambda module: shape[1] // extent)

    def heads(groups: int, *axes: int) -> NormKind:
        return token_norm(name, axes=axes, groups=lambda module: groups, heads=True)

    if partly == shared == [ndim - 1]:
        yield heads(shape[-1] // extents[-1], -1)
    elif ndim > 2 and shared in (positions, [1, *positions]) and shared != [ndim - 1]:
        yield grouped(extents[1])
    if not partly:
        first = {1: 1} if shared == [1] and ndim > 2 else {}
        yield token_norm(name, axes=tuple(first.get(axis, axis - ndim) for axis in shared))
        if shared == [ndim - 1] == [2]:
            yield grouped(1)
        elif shared == [ndim - 1] == [3]:
            yield from (heads(shape[1], 1, -1), heads(shape[2], -2, -1))


def _measured(module: nn.Module, trial: Trial, layout: NormKind) -> Iterator[tuple[int, NormKind]]:
    """Yield kinds over a layout's tokens whose y is mapped to the output by one line per channel, without eps.

    Beside each is the number of its vectors that are no tensor of the module.
    """
    probes = [_LARGE * (3 + trial.noise(seed)) for seed in range(_DRAWS)]
    x, out = (
        torch.cat([layout.rows(module, tensor) for tensor in parts]).double() for parts in (probes, map(trial, probes))
    )
    groups, channels, d = layout.groups(module) if layout.groups else 1, layout.channels(module, probes[0]), x.shape[1]
    if d < 2 or any(parameter.numel() not in (1, d, channels) for parameter in module.parameters(recurse=False)):
        return
    forms = [token_norm("", normalize=form) for form in FORMS.values() if form.eps_at == UNDER_ROOT]
    forms.append(token_norm("", normalize=deviation_norm, bounded=False))
    centres = [read for _, size, read in _readers(module) if size == d == channels][:: len(_TRANSFORMS)]
    forms += [
        replace(token_norm("", centred=False, bounded=False), normalize=_about(read), form=None) for read in centres
    ]

    def by_channel(rows: Tensor) -> Tensor:
        return rows.reshape(len(rows) // groups, channels, -1).transpose(0, 1).flatten(1)

    for form in forms:
        y, o = by_channel(form.normalize(module, x, 0.0)[0]), by_channel(out)
        about, size = y - y.mean(1, keepdim=True), o.abs().amax(1)
        gain = (about * o).sum(1) / about.square().sum(1)
        shift = o.mean(1) - gain * y.mean(1)
        if bool(((o - gain[:, None] * y - shift[:, None]).abs() <= _SAME * size[:, None]).all()):
            bounded = form.bounded and not layout.over_positions
            kind = replace(layout, normalize=form.normalize, form=form.form, centred=form.centred, bounded=bounded)
            yield from _with_affine(module, kind, gain, shift, _SAME * size, d)


def _about(read: OfChannels) -> Callable[[nn.Module, Tensor, float], tuple[Tensor, Tensor]]:
    """Return the formula of an RMSNorm that takes its squares about a tensor of the module."""

    def normalize(module: nn.Module, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rstd = torch.rsqrt((rows - read(module).to(rows)).square().mean(-1, keepdim=True) + eps)
        return rows * rstd, rstd

    return normalize


def _with_affine(
    module: nn.Module, kind: NormKind, gain: Tensor, shift: Tensor, within: Tensor, d: int
) -> Iterator[tuple[int, NormKind]]:
    """Yield a kind with the affine step that a trial has measured, unless a part of the module takes it."""
    for affine in (scale_and_shift, unit_offset, unit_length) if kind.groups is None else (kind.affine,):
        with contextlib.suppress(RuntimeError):  # of sizes that do not fit
            named = replace(kind, affine=affine)
            expected = torch.stack(named.gain_and_offset(module, len(gain))).to(gain)
            if _alike(torch.stack([gain, shift]), expected, within):
                yield 0, named
                return
    containers = (nn.ParameterList, nn.ParameterDict)
    paths = {name for name, child in module.named_modules() if name and not isinstance(child, containers)}
    used = {name for name, _ in module.named_parameters() if name.rpartition(".")[0] in paths}
    own_gain, own_shift = (_tensor_of(module, values, within, used) for values in (gain, shift))
    plain = any(_alike(gain, gain.new_tensor(root), 0.0) for root in (1, d**-0.5, d**0.5))
    read_gain, read_shift = own_gain or _constant(gain, within), own_shift or _constant(shift, within)
    unexplained = (own_gain is None and not plain) + (own_shift is None and bool(read_shift(module).any()))
    if not unexplained or list(module.parameters(recurse=False)):
        affine = measured_affine(read_gain, read_shift, kind.groups)
        yield unexplained, replace(kind, affine=affine)


def _with_eps(module: nn.Module, kind: NormKind, ladder: Sequence[tuple[Tensor, Tensor]]) -> Iterator[NormKind]:
    """Yield a kind with the eps that explains how much its output shrinks on noise, in each place that eps may have."""
    form, shrunk = kind.form, _shrunk(module, kind, ladder)
    variants = [
        entry for entry in FORMS.values() if form and form == replace(entry, name=form.name, eps_at=form.eps_at)
    ]
    if shrunk is not None:
        d, root, bound = shrunk
        measured = {UNDER_ROOT: bound.square() - root.square(), BESIDE_ROOT: bound - root}
        measured |= {BOUNDS_LENGTH: d**0.5 * bound, BOUNDS_SQUARE: bound.square()}
        # In its true place, eps is the same number for all tokens.
        for eps_at in sorted(measured, key=lambda role: float(measured[role].std() / measured[role].median().abs())):
            eps = _own_eps(module, float(measured[eps_at].median()), d)
            if form is None:
                yield replace(kind, eps=eps)
            for candidate in (variant for variant in variants if variant.eps_at == eps_at):
                normalize = token_norm("", normalize=candidate).normalize
                yield replace(kind, form=candidate, normalize=normalize, eps=eps)
    yield from (replace(kind, eps=eps) for eps in (named_eps(module) or 0.0, 0.0))  # too small to show


def _shrunk(
    module: nn.Module, kind: NormKind, ladder: Sequence[tuple[Tensor, Tensor]]
) -> tuple[int, Tensor, Tensor] | None:
    """Return d, and 1/rstd without and with eps, of noise where eps shrinks outputs to about a third; None if nowhere.

    Both are of some tokens, ``(tokens, 1)``.
    """
    best, distance = None, math.inf
    for probe, output in ladder:
        rows, out = (kind.rows(module, tensor).double() for tensor in (probe, output))
        y, rstd = kind.normalize(module, rows, 0.0)
        offset = kind.affine(module, torch.zeros_like(y))
        full = kind.affine(module, y) - offset
        ratio = (full * (out - offset)).sum(1, keepdim=True) / full.square().sum(1, keepdim=True)
        middle = float(ratio.nanmedian())
        if 0 < middle < 0.9 and abs(math.log(3 * middle)) < distance:
            distance, best = abs(math.log(3 * middle)), (rows.shape[1], 1 / rstd, 1 / (rstd * ratio))
    return best


def _own_eps(module: nn.Module, measured: float, d: int) -> Any:
    """Return a measured eps: as a reader of the module's number that it is, for ‖x‖ or its mean square; or rounded."""
    attributes = (torch.finfo(torch.float32).eps, *vars(module).values())  # the first is that of F.rms_norm(x, shape)
    numbers: list[tuple[float, Any]] = [(value, value) for value in attributes if isinstance(value, float)]
    numbers += [(float(read(module)), read) for _, size, read in _readers(module) if size == 1]
    matches = itertools.product(numbers, (1.0, 1 / d, d**-0.5, d**0.5))
    matching = (pair for pair in matches if math.isclose(pair[1] * pair[0][0], measured, rel_tol=_ROUND))
    if (match := next(matching, None)) is not None:
        (_, source), factor = match
        return (lambda module: factor * float(source(module))) if callable(source) else factor * source
    rounded = float(f"{measured:.3g}")
    return rounded if math.isclose(rounded, measured, rel_tol=_ROUND) else measured
