"""How well any function of x alone could do: the ceiling, and E[y|x], the curve that reaches it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Places = NDArray[np.intp]

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
    if width > 0:
        multiple = np.floor(bins[1] / bins[0] / width)
        bins = np.add.reduceat(bins, np.flatnonzero(np.diff(multiple, prepend=-np.inf)), axis=1)
    (bounds,) = _groups(bins[0], np.array([0, bins.shape[1]]), [least_count])
    n, x, y, _, _, yy = np.add.reduceat(bins, bounds[:-1], axis=1)
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
    sums = moments.numpy().transpose(1, 0, 2)
    occupied = sums[0] > 0
    folds, bins = np.flatnonzero(occupied.any(1)), np.flatnonzero(occupied.any(0))
    if len(folds) < 2:
        return None
    if len(folds) < len(occupied):
        sums = sums[:, folds]
    sums = np.ascontiguousarray(sums[:, :, bins])
    whole = sums.sum(1, keepdims=True)
    pairs, _, sum_y, *_, squares = whole.sum(2)[:, 0]
    total = squares - sum_y**2 / pairs
    if not total > 0:
        return None
    others = whole[:5] - sums[:5]
    # A bin that a fold leaves empty takes the place that it has in the whole, so that x ascends.
    n, sum_x, sum_y = sums[:3]
    x = np.divide(sum_x, n, out=np.repeat(whole[1] / whole[0], len(folds), axis=0), where=n > 0)
    y = np.divide(sum_y, n, out=np.zeros_like(n), where=n > 0)
    xx, xy = others[3:].sum(2)
    slope = np.divide(xy, xx, out=np.zeros_like(xx), where=xx > 0)
    within_bins = squares - (n * y * y).sum()
    return float(1 - (within_bins + _least_error(n, x, y, others[:3], slope)) / total)


def _least_error(n: Array, x: Array, y: Array, others: Array, slope: Array) -> float:
    """Σ n (y − prediction)² over all folds and bins, by the best of the predictions.

    Args:
        n: number of pairs, ``(folds, bins)``.
        x: their mean x, ascending, likewise.
        y: their mean y, likewise.
        others: n, Σx and Σy of all folds but that one, ``(3, folds, bins)``.
        slope: of the line through the origin and the pairs of all folds but that one, ``(folds,)``.
    """
    # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
    filled = others[0] > 0.5
    count, sum_x, sum_y = others.reshape(3, -1).take(np.flatnonzero(filled), axis=1)
    first = np.concatenate([[0], np.cumsum(np.count_nonzero(filled, axis=1))])
    before = np.concatenate([[0], np.cumsum(count)])
    both = sum_x + 1j * sum_y  # as one array, whose groups are summed in one go
    off, errors = np.empty_like(x), []
    for bounds in _groups(count, first, _LEAST_COUNTS):
        sums, pairs = np.add.reduceat(both, bounds[:-1]), np.diff(before.take(bounds))
        at, predicted = sums.real / pairs, sums.imag / pairs
        group = np.searchsorted(bounds, first)
        for fold, (start, end) in enumerate(pairwise(group)):
            off[fold] = np.interp(x[fold], at[start:end], predicted[start:end])
        off -= y
        weighted = n * off
        flat = (weighted * off).sum()
        beyond = x - np.minimum(np.maximum(x, at[group[:-1], None]), at[group[1:] - 1, None])
        beyond *= slope[:, None]
        along_line = flat + ((2 * weighted + n * beyond) * beyond).sum()
        errors += [flat, along_line]
    return float(min(errors))


def _groups(n: Array, first: Places, least_counts: Sequence[int]) -> Iterator[Places]:
    """Join neighbouring bins so that each group holds a least count of pairs, or all that its fold has.

    Groups are cut wherever the number of pairs before a bin passes a multiple of the least count, and a group that
    fell short joins the one before it. The first of a fold never does, unless it is all there is.

    Args:
        n: number of pairs in each bin, the bins of one fold after those of another, ``(bins,)``.
        first: where each fold begins, and where the last one ends, ``(folds + 1,)``.
        least_counts: each a multiple of the one before, so that its cuts are among those of that one.

    Yields:
        For each least count, where each group begins, and where the last one ends, ``(groups + 1,)``.
    """
    before = np.concatenate([[0], np.cumsum(n)])
    in_fold = before - np.repeat(before[first], np.diff(first, append=first[-1] + 1))
    place, opens_fold = np.arange(len(before)), np.zeros(len(before), bool)
    opens_fold[first] = True
    for least_count in least_counts:
        passed = np.floor(in_fold / least_count)
        cut = opens_fold.copy()
        cut[1:] |= passed[1:] != passed[:-1]
        cuts = np.flatnonzero(cut)
        if len(cuts) < len(place):
            place, before, in_fold, opens_fold = (along.take(cuts) for along in (place, before, in_fold, opens_fold))
        enough = opens_fold.copy()
        enough[:-1] |= before[1:] - before[:-1] >= least_count
        yield place.take(np.flatnonzero(enough))
