"""How well any function of x alone could do: the ceiling, and E[y|x], the curve that reaches it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.fits.curves import FREE, Curve

Array = NDArray[np.float64]
Places = NDArray[np.intp]

_LEAST_COUNT = 64
_ROUNDING = 1e-12  # of a sum
_LEAST_COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def conditional_mean(
    moments: Tensor, least_count: int = _LEAST_COUNT, width: float = 0.0
) -> tuple[Array, Array, Array]:
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


@dataclass(frozen=True)
class Ceiling:
    """How well E[y|x] predicts pairs that it was not made of.

    Attributes:
        r2: of that prediction: what no function of x alone passes.
        least_count: number of pairs that a group of bins must hold for the best prediction.
        along_line: whether beyond the outermost groups the line of all pairs predicts better than a constant.
    """

    r2: float
    least_count: int
    along_line: bool


def ceiling(moments: Tensor, counts: Tensor) -> Ceiling | None:
    """R² that no function of x alone passes: 1 − E[Var(y|x)] / Var(y), cross-validated over the folds.

    E[y|x] of all folds but one predicts that one, piecewise linear between groups of bins, and beyond the outermost
    of them either flat or along the line of all pairs. Which, and how many pairs a group must hold, is chosen by the
    same prediction. On the very pairs that made it, E[y|x] would explain every tail bin that
    holds a single pair perfectly, and the ceiling would be too high.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per fold and bin, weighted or not, float64 ``(folds, 6, bins)``.
        counts: number of pairs, float64 ``(folds, bins)``.

    Returns:
        The ceiling, or None where fewer than two folds hold pairs, or y does not vary.
    """
    number = counts.numpy()
    occupied = number > 0
    folds, bins = np.flatnonzero(occupied.any(1)), np.flatnonzero(occupied.any(0))
    if len(folds) < 2:
        return None
    number = number[folds][:, bins]
    sums = np.ascontiguousarray(moments.numpy().transpose(1, 0, 2)[:, folds][:, :, bins])
    whole = sums.sum(1, keepdims=True)
    pairs, _, sum_y, *_, squares = whole.sum(2)[:, 0]
    total = squares - sum_y**2 / pairs
    if not total > 0:
        return None
    others = _Others(number.sum(0) - number, *(whole[:5] - sums[:5]))
    # A bin that a fold leaves empty takes the place that it has in the whole, so that x ascends.
    weight, sum_x, sum_y = sums[:3]
    held = weight > 0
    everywhere = np.divide(whole[1], whole[0], out=np.zeros_like(whole[0]), where=whole[0] > 0)
    x = np.divide(sum_x, weight, out=np.repeat(everywhere, len(folds), axis=0), where=held)
    y = np.divide(sum_y, weight, out=np.zeros_like(weight), where=held)
    within_bins = squares - (weight * y * y).sum()
    error, least_count, along_line = min(_errors(weight, x, y, others))
    return Ceiling(float(1 - (within_bins + error) / total), least_count, along_line)


def free(moments: Tensor, counts: Tensor, made: Ceiling | None) -> Curve:
    """E[y|x] itself as a curve: piecewise linear between groups of bins, as its own cross-validation chose them.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, weighted or not, float64 ``(6, bins)``.
        counts: number of pairs, float64 ``(bins,)``.
        made: what :func:`ceiling` chose; without folds, groups hold 64 pairs and what lies beyond is constant.
    """
    filled = (counts > 0) & (moments[0] > 0)  # pairs without weight have no mean
    bins, number = moments[:, filled].numpy(), counts[filled].numpy()
    (bounds,) = _groups(number, np.array([0, len(number)]), [made.least_count if made else _LEAST_COUNT])
    weight, x, y, xx, xy, _ = np.add.reduceat(bins, bounds[:-1], axis=1)
    beyond = float(xy.sum() / xx.sum()) if made and made.along_line and xx.sum() > 0 else 0.0
    return curve_along(Piecewise(x / weight, y / weight, beyond))


def curve_along(line: Piecewise) -> Curve:
    """Make the curve called free of lines between points."""
    return Curve(
        name=FREE,
        aliases=(),
        formula="E[y|x]",
        function=line,
        derivative=line.slope,
        source="the pairs themselves",
        limit=None,
        zero_centred=False,
        monotone=False,
        slope_at_origin=float(line.slope(torch.zeros(()))),
        peak=float(np.abs(line.slopes).max()),
        smooth=False,
    )


@dataclass(frozen=True, eq=False)
class Piecewise:
    """Lines between points of ascending x, ``at``, and ``mean`` there; beyond them all, of slope ``beyond``."""

    at: Array
    mean: Array
    beyond: float

    @property
    def slopes(self) -> Array:
        """Of each piece, those beyond included."""
        between = np.diff(self.mean) / np.maximum(np.diff(self.at), 1e-300)
        return np.concatenate([[self.beyond], between, [self.beyond]])

    def __call__(self, u: Tensor) -> Tensor:
        given = u.detach().double().numpy()
        outside = given - np.clip(given, self.at[0], self.at[-1])
        return torch.from_numpy(np.asarray(np.interp(given, self.at, self.mean) + self.beyond * outside))

    def slope(self, u: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self.slopes[np.searchsorted(self.at, u.detach().double().numpy())]))


@dataclass(frozen=True)
class _Others:
    """Sums over all folds but one, for each fold: ``(folds, bins)``."""

    count: Array
    weight: Array
    x: Array
    y: Array
    xx: Array
    xy: Array


def _errors(weight: Array, x: Array, y: Array, others: _Others) -> list[tuple[float, int, bool]]:
    """Σ w (y − prediction)² over all folds and bins, by each way to predict.

    Args:
        weight: of the pairs, ``(folds, bins)``.
        x: their mean x, ascending, likewise.
        y: their mean y, likewise.
        others: what the predictions are made of.

    Returns:
        The error of each, with its least count and whether it goes on along the line.
    """
    xx, xy = others.xx.sum(1), others.xy.sum(1)
    slope = np.divide(xy, xx, out=np.zeros_like(xx), where=xx > 0)
    # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
    filled = (others.count > 0.5) & (others.weight > _ROUNDING * (others.weight + weight))
    count, pairs, sum_x, sum_y = (sums[filled] for sums in (others.count, others.weight, others.x, others.y))
    first = np.concatenate([[0], np.cumsum(np.count_nonzero(filled, axis=1))])
    both = sum_x + 1j * sum_y  # as one array, whose groups are summed in one go
    off, errors = np.empty_like(x), []
    for least_count, bounds in zip(_LEAST_COUNTS, _groups(count, first, _LEAST_COUNTS), strict=True):
        sums, grouped = np.add.reduceat(both, bounds[:-1]), np.add.reduceat(pairs, bounds[:-1])
        grouped = np.where(grouped > 0, grouped, np.inf)
        at, predicted = sums.real / grouped, sums.imag / grouped
        group = np.searchsorted(bounds, first)
        for fold, (start, end) in enumerate(pairwise(group)):
            off[fold] = np.interp(x[fold], at[start:end], predicted[start:end])
        off -= y
        weighted = weight * off
        flat = float((weighted * off).sum())
        beyond = x - np.minimum(np.maximum(x, at[group[:-1], None]), at[group[1:] - 1, None])
        beyond *= slope[:, None]
        along_line = flat + float(((2 * weighted + weight * beyond) * beyond).sum())
        errors += [(flat, least_count, False), (along_line, least_count, True)]
    return errors


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
