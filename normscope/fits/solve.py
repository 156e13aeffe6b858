"""Least squares of y ≈ A·f(αx) by variable projection: given α, A is linear; α alone is searched."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from normscope.fits.curves import Curve
from normscope.fits.nodes import Array, Nodes

_GRID_POINTS_A_DECADE = 8
_STRAIGHTEST = 0.02  # α·max|x| at which tanh and isru differ from their tangent by under 2e-4 of it
_STEEPEST = 1e3  # α times the smallest |x| that counts, at which both are step functions
_SMALLEST_COUNTS = 1e-3  # of all pairs lie below it
_FLAT = 1e-9  # of Σy²: where no α explains more than another by that, x has no spread to tell them apart
_RIVAL = 0.99  # of the highest maximum on the coarse nodes: one as high as that may be the highest on all nodes
_ROUNDING = 1e-12  # of what is explained: lesser ups and downs are no maxima
_STRIDE = 0.03  # in log α: about as much as a parabola through three grid points misses a maximum by
_CLOSE = 1e-5  # in log α: where the secant moves by less, it ends within 1e-8 of the maximum
_STEPS = 60  # more than bisection needs
_BEND = 1e-3  # a curve that saves less than a thousandth of the line's squared error has found no bend


@dataclass(frozen=True)
class Solution:
    """Amplitude and scale of least squared error.

    Attributes:
        amplitude: A.
        alpha: α, positive.
        residual: Σ (y − A·f(αx))² over all pairs.
        straight: the pairs do not bend inwards: A and α mean nothing by themselves, and only their product, the slope
            of the line of least squares, does.
        converged: False where α ran into the upper end of its range, or where no α does better than another.
    """

    amplitude: float
    alpha: float
    residual: float
    straight: bool
    converged: bool


def least_squares(nodes: Nodes, curve: Curve) -> Solution | None:
    """Fit one curve; None where the pairs have no spread in x or y, so that there is nothing to fit."""
    reach = float(nodes.x.abs().max()) if len(nodes.x) else 0.0
    if not reach > 0 or not nodes.total > 0:
        return None
    coarse = nodes.coarse or nodes
    low = math.log(_STRAIGHTEST / reach)
    high = max(math.log(_STEEPEST / _smallest_magnitude(coarse)), low + math.log(_STEEPEST))
    grid = np.linspace(low, high, math.ceil((high - low) / math.log(10) * _GRID_POINTS_A_DECADE) + 1)
    explained = _explained(coarse, curve, grid)
    maxima = [_climb(nodes, curve, start, low, high) for start in _maxima(grid, explained)]
    found = min((_at(nodes, curve, math.exp(maximum)) for maximum in maxima), key=lambda solution: solution.residual)
    line, step = _at(nodes, curve, math.exp(low)), _at(nodes, curve, math.exp(high))
    flat = _FLAT * float(torch.dot(nodes.weight, nodes.y.square()))
    told_apart = max(line.residual, step.residual) - found.residual > flat
    bends_below_steepest = step.residual - found.residual > flat
    if line.residual - found.residual < _BEND * line.residual or line.residual < 1e-12 * nodes.total:
        return replace(line, straight=True, converged=told_apart)
    return replace(found, converged=told_apart and bends_below_steepest and math.isfinite(found.amplitude))


def _at(nodes: Nodes, curve: Curve, alpha: float) -> Solution:
    """Take the best amplitude for one α."""
    values = curve.function(alpha * nodes.x)
    weighted = nodes.weight * values
    amplitude = float(torch.dot(weighted, nodes.y) / torch.dot(weighted, values))
    return Solution(amplitude, alpha, nodes.residual(amplitude * values), straight=False, converged=True)


def _explained(nodes: Nodes, curve: Curve, log_alpha: Array) -> Array:
    """Σy² that the best amplitude explains at each α, (Σyf)² / Σf²: ``(alphas,)``."""
    values = curve.function(torch.from_numpy(np.exp(log_alpha))[:, None] * nodes.x)
    return ((values @ (nodes.weight * nodes.y)).square() / (values.square() @ nodes.weight)).numpy()


def _slope(nodes: Nodes, curve: Curve, log_alpha: float) -> float:
    """Half the derivative of log explained by log α: Σyg / Σyf − Σfg / Σf², where u = αx, f = f(u) and g = u·f′(u)."""
    u = math.exp(log_alpha) * nodes.x
    f, g = curve.function(u), curve.derivative(u) * u
    y, weighted = nodes.weight * nodes.y, nodes.weight * f
    return float(torch.dot(y, g) / torch.dot(y, f) - torch.dot(weighted, g) / torch.dot(weighted, f))


def _maxima(grid: Array, explained: Array) -> list[float]:
    """Where what is explained is highest, and where else nearly so, to the precision of the grid."""
    highest = int(explained.argmax())
    before, here, after = explained[:-2], explained[1:-1], explained[2:]
    rises = here > (1 + _ROUNDING) * before
    rivals = 1 + np.flatnonzero(rises & (here >= after) & (here > _RIVAL * explained[highest]))
    return [_top(grid, explained, at) for at in sorted({highest, *rivals.tolist()})]


def _top(grid: Array, explained: Array, at: int) -> float:
    """Top of the parabola through a maximum of the grid and the two points beside it."""
    if at in (0, len(grid) - 1):
        return float(grid[at])
    rise, fall = explained[at] - explained[at - 1], explained[at] - explained[at + 1]
    return float(grid[at] + (grid[1] - grid[0]) / 2 * (rise - fall) / (rise + fall))


def _climb(nodes: Nodes, curve: Curve, start: float, low: float, high: float) -> float:
    """Follow what is explained uphill from ``start`` to a maximum over log α in [low, high]: a root of its slope."""
    slope = functools.cache(lambda log_alpha: _slope(nodes, curve, log_alpha))
    stride, left, right = _STRIDE, max(start - _STRIDE, low), min(start + _STRIDE, high)
    while slope(left) < 0 and left > low:
        stride *= 2
        left, right = max(left - stride, low), left
    while slope(right) > 0 and right < high:
        stride *= 2
        left, right = right, min(right + stride, high)
    if not slope(left) > 0 > slope(right):
        return left if slope(left) <= 0 else right
    before, at = left, right
    for _ in range(_STEPS):
        # The secant's root; where that lies outside of what is known to hold the maximum, its middle.
        bend = (slope(at) - slope(before)) / (at - before)
        to = at - slope(at) / bend if bend else math.inf
        before, at = at, to if left <= to <= right else (left + right) / 2
        if abs(at - before) < _CLOSE:
            break
        left, right = (at, right) if slope(at) > 0 else (left, at)
    return at


def _smallest_magnitude(nodes: Nodes) -> float:
    """|x| below which lie so few pairs that they cannot say where the bend is."""
    magnitude = np.abs(nodes.x.numpy())
    order = np.argsort(magnitude)
    weight = np.cumsum(nodes.weight.numpy()[order])
    at = np.searchsorted(weight, _SMALLEST_COUNTS * weight[-1])
    return float(max(magnitude[order[at]], magnitude[magnitude > 0].min()))
