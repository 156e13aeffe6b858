"""Binned sums as the few weighted points on which every fit is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.pairs.binning import PAIR_GRID

Array = NDArray[np.float64]

_MIRRORED = np.array([[1.0], [-1.0], [-1.0], [1.0], [1.0], [1.0]])  # signs of n, Σx, Σy, Σx², Σxy, Σy² of (−x, −y)
_NEGLIGIBLE = 1e-3  # share of Σy² beyond the grid
_STRAIGHT_UP_TO = 0.1  # u below which a curve departs from its tangent by less than a thousandth of it


@dataclass(frozen=True)
class Nodes:
    """Weighted points (x, y) that stand for all pairs of a site in a least-squares fit of an odd curve.

    Attributes:
        x: float64 ``(nodes,)``.
        y: float64 ``(nodes,)``.
        weight: number of pairs that each stands for, float64 ``(nodes,)``.
        scatter: Σ (y − its node's y)² over all pairs: what is left of Σy² at the nodes, and what no fit changes.
        total: Σ (y − ȳ)² over all pairs.
        coarse: far fewer nodes for the same pairs, on which a first look costs little; None for those themselves.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    scatter: float
    total: float
    coarse: Nodes | None = None

    def residual(self, predicted: Tensor) -> float:
        """Σ (y − prediction)² over all pairs, for a prediction at the nodes."""
        off = self.y - predicted
        return float(torch.dot(self.weight * off, off)) + self.scatter


def nodes_of(moments: Tensor) -> Nodes:
    """Put each bin's pairs at two points, one standard deviation of its x to either side of its mean.

    The two, with y on the bin's own regression line, have the bin's n, Σx, Σx², Σy and Σxy, so that Σf(x)² and
    Σf(x)y are right to second order in the bin's width for any smooth f, without a derivative of it. With bins of
    1/64 octave that leaves relative errors near 1e-8, and near 1e-4 with the half octaves of the coarse nodes.

    An odd curve errs by the same at (−x, −y) as at (x, y): the bins of either sign are added up.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, float64 ``(6, bins)``, on a grid that is symmetric about zero.
    """
    bins = moments.numpy()
    centre = bins.shape[1] // 2
    total = _total(_filled(bins))
    magnitudes = bins[:, centre:].copy()
    magnitudes[:, 1:] += _MIRRORED * bins[:, :centre][:, ::-1]
    magnitudes = _filled(magnitudes)
    mantissa, exponent = np.frexp(magnitudes[1] / magnitudes[0])
    half_octave = 4 * exponent + np.trunc(4 * mantissa)
    starts = np.flatnonzero(np.diff(half_octave, prepend=-np.inf))
    coarse = _at_two_points(np.add.reduceat(magnitudes, starts, axis=1), total)
    return _at_two_points(magnitudes, total, coarse)


def unresolved(moments: Tensor, alpha: float) -> bool:
    """Whether the grid is too narrow for these pairs: the bend, or much of y, lies in a bin that has no width.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, float64 ``(6, bins)``.
        alpha: of the fitted curve.
    """
    yy = moments[5]
    beyond = float(yy[0] + yy[-1]) > _NEGLIGIBLE * float(yy.sum())
    below = alpha * 2.0**PAIR_GRID.low > _STRAIGHT_UP_TO and float(moments[3, PAIR_GRID.centre]) > 0
    return beyond or below


def _filled(bins: Array) -> Array:
    return bins.take(np.flatnonzero(bins[0] > 0), axis=1)


def _total(bins: Array) -> float:
    n, _, y, _, _, yy = bins
    mean = y.sum() / max(n.sum(), 1)
    return float(np.maximum(yy - y**2 / n, 0).sum() + n @ (y / n - mean) ** 2)


def _at_two_points(bins: Array, total: float, coarse: Nodes | None = None) -> Nodes:
    n, x, y, xx, xy, yy = bins
    mean_x, mean_y = x / n, y / n
    spread_x = np.sqrt(np.maximum(xx / n - mean_x**2, 0))
    # Below this, what is left of the difference of the two squares is rounding.
    spread_x *= spread_x > 1e-7 * np.abs(mean_x)
    variance_y = np.maximum(yy / n - mean_y**2, 0)
    limit = np.sqrt(variance_y)
    spread_y = np.divide(xy / n - mean_x * mean_y, spread_x, out=np.zeros_like(x), where=spread_x > 0)
    spread_y = np.minimum(np.maximum(spread_y, -limit), limit)
    return Nodes(
        torch.from_numpy(np.concatenate([mean_x - spread_x, mean_x + spread_x])),
        torch.from_numpy(np.concatenate([mean_y - spread_y, mean_y + spread_y])),
        torch.from_numpy(np.concatenate([n, n]) / 2),
        float(n @ (variance_y - spread_y**2)),
        total,
        coarse,
    )
