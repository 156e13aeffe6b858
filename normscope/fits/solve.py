"""Least squares of y ≈ A·f(αx) by variable projection: given α, A is linear; α alone is searched."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.fits.curves import Curve
from normscope.fits.nodes import Nodes

_GRID_POINTS_A_DECADE = 8
_STRAIGHTEST = 0.02  # α·max|x| at which tanh and isru differ from their tangent by under 2e-4 of it
_STEEPEST = 1e3  # α times the smallest |x| that counts, at which both are step functions
_SMALLEST_COUNTS = 1e-3  # of all pairs lie below it
_FLAT = 1e-9  # of Σy²: where no α explains more than another by that, x has no spread to tell them apart
_GOLDEN = (math.sqrt(5) - 1) / 2
_GOLDEN_STEPS = 48  # shrink a bracket of two grid points to the precision that float64 gives a minimum
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
    low = math.log(_STRAIGHTEST / reach)
    high = max(math.log(_STEEPEST / _smallest_magnitude(nodes)), low + math.log(_STEEPEST))
    points = math.ceil((high - low) / math.log(10) * _GRID_POINTS_A_DECADE) + 1
    grid = torch.linspace(low, high, points, dtype=torch.float64)
    explained = _explained(nodes, curve, grid)
    best = int(explained.argmax())
    bracket = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, points - 1)])
    found = _at(nodes, curve, math.exp(_golden_section(nodes, curve, *bracket)))
    line = _at(nodes, curve, math.exp(low))
    flat = _FLAT * float((nodes.weight * nodes.y.square()).sum())
    told_apart = float(explained.max() - explained.min()) > flat
    bends_below_steepest = float(explained.max() - explained[-1]) > flat
    if line.residual - found.residual < _BEND * line.residual or line.residual < 1e-12 * nodes.total:
        return replace(line, straight=True, converged=told_apart)
    return replace(found, converged=told_apart and bends_below_steepest and math.isfinite(found.amplitude))


def _at(nodes: Nodes, curve: Curve, alpha: float) -> Solution:
    """Take the best amplitude for one α."""
    values = curve.function(alpha * nodes.x)
    amplitude = float((nodes.weight * nodes.y * values).sum() / (nodes.weight * values.square()).sum())
    return Solution(amplitude, alpha, nodes.residual(amplitude * values), straight=False, converged=True)


def _explained(nodes: Nodes, curve: Curve, log_alpha: Tensor) -> Tensor:
    """Σy² that the best amplitude explains at each α: ``(alphas,)``."""
    values = curve.function(log_alpha.exp()[:, None] * nodes.x)
    return (values @ (nodes.weight * nodes.y)).square() / (values.square() @ nodes.weight)


def _golden_section(nodes: Nodes, curve: Curve, low: float, high: float) -> float:
    """Maximize what is explained over log α in [low, high], where it has one maximum."""

    def explained(at: float) -> float:
        return float(_explained(nodes, curve, torch.tensor([at], dtype=torch.float64)))

    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = explained(left), explained(right)
    for _ in range(_GOLDEN_STEPS):
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = explained(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = explained(right)
    return (low + high) / 2


def _smallest_magnitude(nodes: Nodes) -> float:
    """|x| below which lie so few pairs that they cannot say where the bend is."""
    magnitude, order = nodes.x.abs().sort()
    weight = nodes.weight[order].cumsum(0)
    at = int(torch.searchsorted(weight, _SMALLEST_COUNTS * weight[-1:]))
    nonzero = magnitude[magnitude > 0]
    return float(max(magnitude[at], nonzero[0]))
