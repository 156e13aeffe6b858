"""Binned sums as the few weighted points on which every fit is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.pairs.binning import PAIR_GRID

_NEGLIGIBLE = 1e-3  # share of Σy² beyond the grid
_STRAIGHT_UP_TO = 0.1  # u below which a curve departs from its tangent by less than a thousandth of it


@dataclass(frozen=True)
class Nodes:
    """Weighted points (x, y) that stand for all pairs of a site in a least-squares fit.

    Attributes:
        x: float64 ``(nodes,)``.
        y: float64 ``(nodes,)``.
        weight: number of pairs that each stands for, float64 ``(nodes,)``.
        scatter: Σ (y − its node's y)² over all pairs: what is left of Σy² at the nodes, and what no fit changes.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    scatter: float

    @property
    def total(self) -> float:
        """Σ (y − ȳ)² over all pairs."""
        mean = (self.weight * self.y).sum() / self.weight.sum()
        return float((self.weight * (self.y - mean).square()).sum()) + self.scatter

    def residual(self, predicted: Tensor) -> float:
        """Σ (y − prediction)² over all pairs, for a prediction at the nodes."""
        return float((self.weight * (self.y - predicted).square()).sum()) + self.scatter


def nodes_of(moments: Tensor) -> Nodes:
    """Put each bin's pairs at two points, one standard deviation of its x to either side of its mean.

    The two, with y on the bin's own regression line, have the bin's n, Σx, Σx², Σy and Σxy, so that Σf(x)² and
    Σf(x)y are right to second order in the bin's width for any smooth f, without a derivative of it. With bins of
    1/64 octave that leaves relative errors near 1e-8.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, float64 ``(6, bins)``.
    """
    n, x, y, xx, xy, yy = moments[:, moments[0] > 0]
    mean_x, mean_y = x / n, y / n
    spread_x = (xx / n - mean_x.square()).clamp_min(0).sqrt()
    # Below this, what is left of the difference of the two squares is rounding.
    spread_x = torch.where(spread_x > 1e-7 * mean_x.abs(), spread_x, 0)
    covariance = xy / n - mean_x * mean_y
    spread_y = torch.where(spread_x > 0, covariance / spread_x.clamp_min(torch.finfo(torch.float64).tiny), 0)
    limit = (yy / n - mean_y.square()).clamp_min(0).sqrt()
    spread_y = spread_y.clamp(-limit, limit)
    scatter = (yy - n * (mean_y.square() + spread_y.square())).clamp_min(0).sum()
    return Nodes(
        torch.cat([mean_x - spread_x, mean_x + spread_x]),
        torch.cat([mean_y - spread_y, mean_y + spread_y]),
        torch.cat([n, n]) / 2,
        float(scatter),
    )


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
