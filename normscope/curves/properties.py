"""Properties of an elementwise function, measured on a grid of |u| = 1e-6 … 1e6 and at 0: limit, slopes, kinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from normscope.errors import UsageError

Function = Callable[[Tensor], Tensor]

_DECADES = 6  # of |u|, on either side of 1
_POINTS_A_DECADE = 256  # a maximum between two points is missed by 2e-5 of it
_FINITE_UP_TO = 1e3  # |u| up to which values have to be finite
_ROUNDING = 1e-12  # of f: smaller ups and downs, and smaller sums of f(u) and f(−u), are rounding
_STRAIGHT = 0.01  # a power of u nearer to 1 is a straight line
_STILL_GROWS = 0.5  # a bound is near if two decades add less than half of what the two before added
_SAMPLING = 1e-3  # of the supremum: apparent growth of a function with a maximum between grid points
_JUMP = 1e-4  # of the steepest slope up to there: a smaller jump of f′ is no kink
_NEAR_ORIGIN = 1e-8
_HALVINGS = 40
_ORIGIN = 1e-100
_QUOTIENT = 1e-6  # of u: half the width of a difference quotient
_LARGEST = torch.finfo(torch.float64).max


def autograd_of(function: Function) -> Function:
    """Derivative of an elementwise function by torch's autograd, in float64, also under ``no_grad``.

    At the origin it is the slope to the right, at 1e-100, where torch takes that of abs for zero. If autograd makes NaN
    of infinity times zero, as for 1/(1 + e^(−u)) at u = −1000, it is a difference quotient.

    >>> autograd_of(torch.abs)(torch.tensor([-2.0, 0.0, 2.0])).tolist()
    [-1.0, 1.0, 1.0]
    """

    def derivative(u: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            at = torch.where(u == 0, _ORIGIN, u.detach().double()).clone().requires_grad_()
            values = function(at)
            (slope,) = torch.autograd.grad(values, at, torch.ones_like(values))
        if not slope.isnan().any():
            return slope
        below, above = at.detach() * (1 - _QUOTIENT), at.detach() * (1 + _QUOTIENT)
        return torch.where(slope.isnan(), (function(above) - function(below)) / (above - below), slope)

    return derivative


def properties_of(function: Function, derivative: Function, name: str) -> dict[str, Any]:
    """Return properties by the names of Curve's attributes; UsageError as of :func:`normscope.curve_of`."""
    u = grid()
    f = _values(function, u, name)
    slope = _slopes(derivative, u, name)
    scale = torch.maximum(f.abs(), f[u.abs() <= 1].abs().max())
    steps, between = f.diff(), _ROUNDING * torch.maximum(scale[1:], scale[:-1])
    at_origin, peak = _slope_at_origin(u, f), _supremum(u, slope)
    return {
        "limit": _supremum(u, f),
        "zero_centred": bool(((f + f.flip(0)).abs() <= _ROUNDING * scale).all()),
        "monotone": bool((steps >= -between).all() or (steps <= between).all()),
        "slope_at_origin": at_origin,
        "peak": math.inf if peak is None or math.isinf(at_origin) else peak,
        "smooth": not (math.isinf(at_origin) or kinks_of(derivative, u, f, slope)),
    }


def grid(points_a_decade: int = _POINTS_A_DECADE) -> Tensor:
    """Return the u at which functions are measured, ascending."""
    half = torch.logspace(-_DECADES, _DECADES, 2 * _DECADES * points_a_decade + 1, dtype=torch.float64)
    return torch.cat([-half.flip(0), torch.zeros(1, dtype=torch.float64), half])


def _values(function: Function, u: Tensor, name: str) -> Tensor:
    try:
        f = function(u)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"The curve {name!r} cannot be evaluated on a float64 tensor: {error}") from error
    if not isinstance(f, Tensor) or f.shape != u.shape or f.is_complex():
        kind = f"{f.dtype} of shape {tuple(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        raise UsageError(
            f"The curve {name!r} makes a {kind} of a float64 tensor of shape {tuple(u.shape)}; "
            "a curve gives one real number for each u."
        )
    f = f.detach().double()
    _refuse_first(name, "is", u, f)
    f = f.clamp(-_LARGEST, _LARGEST)
    if (f.max() - f.min()) <= _ROUNDING * f.abs().max():
        raise UsageError(f"The curve {name!r} is {f[0].item() + 0:g} wherever u is; a constant cannot be fitted.")
    return f


def _slopes(derivative: Function, u: Tensor, name: str) -> Tensor:
    try:
        slope = derivative(u).detach().double()
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"torch cannot find the derivative of the curve {name!r} ({error}). Give it yourself, as derivative=…"
        ) from error
    if slope.shape != u.shape:
        raise UsageError(
            f"The derivative of the curve {name!r} gives {tuple(slope.shape)} for {tuple(u.shape)} numbers."
        )
    _refuse_first(name, "has the slope", u, slope)
    return slope


def _refuse_first(name: str, does: str, u: Tensor, values: Tensor) -> None:
    bad = values.isnan() | (values.isinf() & (u.abs() <= _FINITE_UP_TO))
    if bad.any():
        at = int(torch.where(bad, u.abs(), math.inf).argmin())
        raise UsageError(
            f"The curve {name!r} {does} {values[at].item():g} at u = {u[at].item():g}; "
            f"it has to be finite for every |u| up to {_FINITE_UP_TO:g}, and a number beyond."
        )


def _supremum(u: Tensor, values: Tensor) -> float | None:
    """Largest magnitude, extrapolated from those up to |u| = 1e2, 1e4 and 1e6; None if these keep growing."""
    magnitude = values.abs()
    near, far, farthest = (float(magnitude[u.abs() <= 1.001 * bound].max()) for bound in (1e2, 1e4, 1e6))
    before, last = far - near, farthest - far
    if not math.isfinite(farthest) or last > max(_STILL_GROWS * before, _SAMPLING * farthest):
        return None
    return farthest + (last * last / (before - last) if before > last else 0.0)


def _slope_at_origin(u: Tensor, f: Tensor) -> float:
    """Return f′(0): infinite or zero by the leading power of |u|, and NaN if the sides differ."""
    origin = len(u) // 2
    powers, slopes = [], []
    rounding = 1e-15 * max(float(f[u.abs() <= 1].abs().max()), abs(float(f[origin])))
    for side in (-1, 1):
        places = (origin + side * (1 + decade * _POINTS_A_DECADE) for decade in range(_DECADES))
        rises = [float(f[index] - f[origin]) for index in places]
        clear = [(near, far) for near, far in pairwise(rises) if abs(near) > rounding]
        powers.append(math.log10(abs(clear[0][1] / clear[0][0])) if clear and clear[0][1] else math.inf)
        slopes.append(0.0 if powers[-1] > 1 + _STRAIGHT else side * rises[0] / float(u[origin + 1]))
    if min(powers) < 1 - _STRAIGHT:
        return math.copysign(math.inf, slopes[1])
    return sum(slopes) / 2 if math.isclose(*slopes, rel_tol=1e-3) else math.nan


def kinks_of(derivative: Function, u: Tensor, f: Tensor, slope: Tensor) -> tuple[float, ...]:
    """Return the u where f′ jumps between two points of a grid: repeated halving of the gap leaves a jump."""
    origin = len(u) // 2
    outwards = slope.abs().clone()
    outwards[origin:] = outwards[origin:].cummax(0).values
    outwards[: origin + 1] = outwards[: origin + 1].flip(0).cummax(0).values.flip(0)
    outwards = outwards.where(outwards < 1 / _NEAR_ORIGIN, f.abs() / u.abs())  # f is vertical further in
    counts = _JUMP * torch.maximum(outwards[1:], outwards[:-1])
    some = slope.diff().abs() > counts
    left, right, at_left, at_right = u[:-1][some], u[1:][some], slope[:-1][some], slope[1:][some]
    for _ in range(_HALVINGS):
        middle = (left + right) / 2
        here = derivative(middle)
        to_the_left = (here - at_left).abs() > (at_right - here).abs()
        left, at_left = torch.where(to_the_left, left, middle), torch.where(to_the_left, at_left, here)
        right, at_right = torch.where(to_the_left, middle, right), torch.where(to_the_left, here, at_right)
    return tuple(((left + right) / 2)[(at_right - at_left).abs() > counts[some]].tolist())
