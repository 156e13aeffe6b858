"""How well any function of x alone could do: the ceiling, and E[y|x], the curve that reaches it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

_LEAST_COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def conditional_mean(moments: Tensor, least_count: int = 64, width: float = 0.0) -> tuple[Array, Array, Array]:
    """E[y|x]: mean x, mean y and the standard deviation of y of groups of neighbouring bins.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin in ascending order of x, float64 ``(6, bins)``.
        least_count: how many pairs a group holds at least, where there are as many.
        width: bins that lie within one multiple of it are joined, however many pairs they hold.

    Returns:
        Three arrays ``(groups,)`` in ascending order of x.
    """
    bins = moments[:, moments[0] > 0].numpy()
    if width > 0 and bins.size:
        bins = _grouped(bins, np.floor(bins[1] / bins[0] / width))
    n, x, y, _, _, yy = _joined(bins, least_count)
    mean = y / n
    return x / n, mean, np.sqrt(np.maximum(yy / n - mean**2, 0))


def ceiling(moments: Tensor) -> float | None:
    """R² that no function of x alone passes: 1 − E[Var(y|x)] / Var(y), cross-validated over the folds.

    E[y|x] of all folds but one predicts that one, piecewise linear between groups of bins, and beyond the outermost
    of them either flat or along the line of all pairs. Which, and how many pairs a group must hold, is chosen by the
    same prediction. On the very pairs that made it, E[y|x] would explain every tail bin that
    holds a single pair perfectly, and the ceiling would be too high.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per fold and bin, float64 ``(folds, 6, bins)``.

    Returns:
        The ceiling, or None where fewer than two folds hold pairs, or y does not vary.
    """
    folds = moments.numpy()
    folds = folds[folds[:, 0].sum(1) > 0]
    whole = folds.sum(0)
    n, y, yy = whole[0].sum(), whole[2].sum(), whole[5].sum()
    total = yy - y**2 / n if n else 0.0
    if len(folds) < 2 or not total > 0:
        return None
    unexplained = min(
        sum(_squared_error(held_out, whole - held_out, count, along_line) for held_out in folds)
        for count in _LEAST_COUNTS
        for along_line in (False, True)
    )
    return float(1 - unexplained / total)


def _squared_error(held_out: Array, others: Array, least_count: int, along_line: bool) -> float:
    """Σ (y − prediction)² over a fold's pairs, predicted from the others'."""
    n, x, y, _, _, yy = held_out[:, held_out[0] > 0]
    slope = others[4].sum() / others[3].sum() if along_line else 0.0
    groups = _joined(others, least_count)
    off_line = (groups[2] - slope * groups[1]) / groups[0]
    predicted = slope * x / n + np.interp(x / n, groups[1] / groups[0], off_line)
    return float((yy - 2 * predicted * y + n * predicted**2).sum())


def _joined(moments: Array, least_count: int) -> Array:
    """Join neighbouring bins so that each group holds ``least_count`` pairs, or all there are: ``(6, groups)``."""
    # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
    occupied = moments[:, moments[0] > 0.5]
    before = np.cumsum(occupied[0]) - occupied[0]
    groups = _grouped(occupied, before // least_count)
    # A group that fell short joins the one before it; at the very beginning, the one behind it.
    enough = groups[0] >= least_count
    return _grouped(groups, np.maximum(np.cumsum(enough) - 1, 0))


def _grouped(moments: Array, group: Array) -> Array:
    """Add up the neighbouring bins that have the same group number."""
    starts = np.flatnonzero(np.diff(group, prepend=-np.inf))
    grouped: Array = np.add.reduceat(moments, starts, axis=1) if len(starts) else moments
    return grouped
