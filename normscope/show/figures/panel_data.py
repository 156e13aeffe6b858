"""Numbers that panels draw: the density of all pairs by pixel, drawn tokens and pairs, and residuals of curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.fits.curve_fit import CurveFit
from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, FloatGrid
from normscope.pairs.sums.stats import PairStats

Array = NDArray[np.float64]
_EXTREME_CHANNELS = 4
_LEAST_COUNT = 128  # pairs in a group of residuals at least


def extreme_channels(stats: PairStats) -> list[int]:
    """Return the channels that reach the largest |x|, the largest first."""
    return [int(i) for i in stats.reach.argsort(descending=True)[:_EXTREME_CHANNELS]]


def drawn_tokens(stats: PairStats) -> tuple[Array, Array, Array]:
    """Return x and y, float64 ``(tokens, d)``, and 1/σ, ``(tokens,)``, of the sampled and of the largest tokens."""
    x, y, rstd = (
        torch.cat([getattr(stats.tokens, name), getattr(stats.largest, name)]).double().numpy()
        for name in ("x", "y", "rstd")
    )
    return x, y, rstd


def drawn_pairs(stats: PairStats) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return x, y and channel, ``(pairs,)``, of those tokens and of the pairs that are drawn evenly over x."""
    token_x, token_y, _ = drawn_tokens(stats)
    if stats.grouped:  # of whose tokens only the single pairs know their channel
        token_x, token_y = token_x[:0], token_y[:0]
    channels = np.broadcast_to(np.arange(token_x.shape[1]), token_x.shape)
    filled = stats.pairs.filled
    return (
        np.concatenate([token_x.ravel(), stats.pairs.x[filled].double().numpy()]),
        np.concatenate([token_y.ravel(), stats.pairs.y[filled].double().numpy()]),
        np.concatenate([channels.ravel(), stats.pairs.channel[filled].long().numpy()]),
    )


def image(stats: PairStats, x_edges: Array, y_edges: Array) -> Array:
    """Return the number of pairs per pixel, ``(rows, columns)``, of counts that are spread evenly over their cells.

    The edges of pixels ascend, ``(columns + 1,)`` and ``(rows + 1,)``.
    """
    counts = stats.density.numpy().astype(np.float64)
    return _gathered(_gathered(counts, DENSITY_X_GRID, x_edges).T, DENSITY_Y_GRID, y_edges)


def _gathered(counts: Array, grid: FloatGrid, at: Array) -> Array:
    """Gather counts ``(bins, n)`` between neighbouring places in x: ``(places - 1, n)``."""
    edges = grid.edges().numpy()
    edges[0], edges[-1] = 2 * edges[1], 2 * edges[-2]
    below = np.concatenate([np.zeros((1, counts.shape[1])), counts.cumsum(0)])
    bins = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, grid.size - 1)
    share = np.clip((at - edges[bins]) / (edges[bins + 1] - edges[bins]), 0, 1)
    gathered: Array = np.diff(below[bins] + share[:, None] * (below[bins + 1] - below[bins]), axis=0)
    return gathered


@dataclass(frozen=True)
class Residuals:
    """Of groups of neighbouring bins, in ascending order of x.

    Attributes:
        x: mean x, float64 ``(groups,)``.
        error: standard error of E[y|x], in units of y, ``(groups,)``; NaN where the pairs are of a single fold.
        off: E[y|x] − A·f(αx + s), in units of y, ``(fits, groups)``.
    """

    x: Array
    error: Array
    off: Array


def residuals(
    moments: Tensor,
    fits: Sequence[CurveFit],
    width: float,
    least_count: int = _LEAST_COUNT,
    along: Callable[[Array], Array] = lambda x: x,
) -> Residuals:
    """Return mean residuals of the curves in groups of bins, and the standard error of E[y|x] from the folds.

    Folds are independent, pairs are not. With the folds' shares w of a group's pairs and their means m of y, the
    standard error is √(Σw² · Σw(m − Σwm)² / (1 − Σw²)), which is sd / √folds for folds of equal size.

    Args:
        moments: n, Σx, Σy, … per fold and bin of x: float64 ``(folds, 6, bins)``.
        fits: of this site, none degenerate.
        width: of a group at most, unless it would contain too few pairs.
        least_count: least number of pairs of a group.
        along: position of x on an axis, in units of the width.

    >>> n, y = torch.full((4, 1), 50.0), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> groups = residuals(torch.stack([n, n, n * y, n, n, n], 1).double(), (), 1.0)
    >>> round(float(groups.error[0]), 6), round(float(y.std() / 4**0.5), 6)
    (0.645497, 0.645497)
    """
    filled = moments[:, 0].sum(0) > 0
    n, sum_x, sum_y = moments[:, :3, filled].numpy().transpose(1, 0, 2)
    if not n.size:
        return Residuals(np.empty(0), np.empty(0), np.empty((len(fits), 0)))
    x = sum_x.sum(0) / n.sum(0)
    starts = _group_starts(n.sum(0), along(x), width, least_count)
    by_fold, y_by_fold = np.add.reduceat(n, starts, axis=1), np.add.reduceat(sum_y, starts, axis=1)
    total = by_fold.sum(0)
    mean = y_by_fold.sum(0) / total
    share = by_fold / total
    fold_means = np.divide(y_by_fold, by_fold, out=np.zeros_like(by_fold), where=by_fold > 0)
    alike = (share**2).sum(0)
    several = np.count_nonzero(by_fold, axis=0) > 1
    error = np.full_like(mean, np.nan)
    np.divide(alike * (share * (fold_means - mean) ** 2).sum(0), 1 - alike, out=error, where=several)
    expected = np.stack([fit(torch.from_numpy(x)).numpy() for fit in fits]) if fits else np.empty((0, len(x)))
    at_fit = np.add.reduceat(n.sum(0) * expected, starts, axis=1) / total
    return Residuals(np.add.reduceat(sum_x.sum(0), starts) / total, np.sqrt(error), mean - at_fit)


def _group_starts(n: Array, x: Array, width: float, least_count: int) -> NDArray[np.intp]:
    """First bins of the groups: at most one in a multiple of ``width``, each of ``least_count`` pairs if there are."""
    cuts = np.flatnonzero(np.diff(np.floor(x / width), prepend=-np.inf))
    starts, in_group = [0], 0.0
    for first_bin, count in zip(cuts, np.add.reduceat(n, cuts), strict=True):
        if in_group >= least_count:
            starts.append(int(first_bin))
            in_group = 0.0
        in_group += count
    return np.array(starts[:-1] if in_group < least_count and len(starts) > 1 else starts)
