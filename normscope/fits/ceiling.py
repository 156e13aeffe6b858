"""The ceiling, an estimate of how well a function of x alone can do, and E[y|x] as a curve.

The ceiling is the held-out R² of the best function of x among one fixed set, regardless of the curves to fit. It
estimates 1 − E[Var(y|x)]/Var(y) from below and is not a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.fits.curves.known import CURVES, FREE, Curve
from normscope.fits.jackknife import Interval, interval_of_r2
from normscope.fits.solver import FitForm, Solutions, roughly
from normscope.fits.targets import FitBatch, Nodes, nodes_of

Array = NDArray[np.float64]
Places = NDArray[np.intp]

_LEAST_COUNT = 64
_ROUNDING = 1e-12  # of a sum
_LEAST_COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_WAYS = [(least_count, along_line) for least_count in _LEAST_COUNTS for along_line in (False, True)]
# Of sources that reach less far, a line beyond all pairs saves nothing; for one that reaches farther it may miss all.
_HANDICAP = 1e-3
_TIE = 1e-9  # of an error: two ways that predict alike differ by the rounding of their sums
_SHIFTED = ("tanh", "isru", "erf")  # the published layers' functions: they stand for off-centre curves


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
    """Held-out R² of the best function of x, on pairs that neither fitted nor selected it.

    Attributes:
        r2: the ceiling.
        interval: its 95 %, by a jackknife over the folds; None where nothing is left to explain.
        r2_free: the same of E[y|x] alone, in groups of bins.
        least_count: number of pairs that a group of bins must hold for E[y|x] to predict best.
        along_line: whether beyond the outermost groups the line of all pairs predicts better than a constant.
    """

    r2: float
    interval: Interval | None
    r2_free: float
    least_count: int
    along_line: bool


def ceilings(problems: FitBatch, diagonal: FitBatch | None = None) -> list[Ceiling | None]:
    """Return the held-out R² of the best function of x at each problem.

    The functions are E[y|x] of all folds but one, piecewise linear between groups of bins, for eight least counts of
    pairs in a group and two ways to go on beyond the outermost; every built-in curve, fitted to those folds; and tanh,
    isru and erf with a shift. The one that predicts a fold is chosen by the held-out errors of the other folds.

    Args:
        problems: of pairs (x, y).
        diagonal: of pairs (x, ∂y_i/∂x_i), the same and in the same order, to predict those in place of y: by their own
            mean at x, and by the derivatives of the curves fitted to y.

    Returns:
        For each problem a ceiling, or None where fewer than two folds hold pairs, where y does not vary, or where x or
        y lies off the grid of bins.
    """
    if not problems.occupied.any():
        return [None] * len(problems)
    predicted = problems if diagonal is None else diagonal
    held = predicted.of_folds()
    errors, unbounded = [], []
    for curve, others in _without_folds(problems):
        if diagonal is None:
            values = others.predicted(curve, held.x)
        else:
            values = others.derivative(curve, held.x).where(held.weight > 0, 0.0)
        errors.append(held.residual(values).view(len(problems), -1))
        unbounded.append(diagonal is None and not curve.bounded)
    return best_held_out(predicted, torch.stack(errors), unbounded)


def best_held_out(problems: FitBatch, of_curves: Tensor, unbounded: Sequence[bool]) -> list[Ceiling | None]:
    """Choose among E[y|x] and curves whose squared errors of held-out folds are known.

    Args:
        problems: with folds.
        of_curves: Σ w (y − prediction)² of each fold by what all others gave, ``(curves, problems, folds)``.
        unbounded: of each curve.

    Returns:
        As :func:`ceilings` does.
    """
    handicaps = 1 + _HANDICAP * np.array([*(along_line for _, along_line in _WAYS), *unbounded])
    total, without = problems.nodes().total.tolist(), problems.without_folds().total.view(len(problems), -1).numpy()
    tops: list[Ceiling | None] = []
    for number, level in enumerate(problems.levels):
        folds = problems.occupied[number].nonzero()[:, 0]
        if len(folds) < 2 or problems.off_grid[number] or not total[number] > 0:
            tops.append(None)
            continue
        filled = (level.counts > 0).any(0).nonzero()[:, 0]
        moments, counts = (sums[folds].index_select(-1, filled) for sums in (level.moments, level.counts))
        of_free = _errors(moments.numpy(), counts.numpy(), nodes_of(moments))
        errors = np.concatenate([of_free, of_curves[:, number, folds].numpy()])
        pairs = counts.numpy().sum(1)
        r2, bounds = _chosen(errors, handicaps, total[number], without[number][folds], pairs)
        r2_free, _ = _chosen(of_free, handicaps[: len(_WAYS)], total[number], without[number][folds], pairs)
        best = int((of_free.sum(1) * handicaps[: len(_WAYS)]).argmin())
        tops.append(Ceiling(r2, bounds, r2_free, *_WAYS[best]))
    return tops


def _without_folds(problems: FitBatch) -> Iterator[tuple[Curve, Solutions]]:
    """Fit every curve of the set to all pairs but those of one fold: ``problems · folds`` fits each."""
    forms = [(curve, FitForm()) for curve in CURVES.values() if not curve.shifted]
    for curve, form in [*forms, *((CURVES[name], FitForm(shift=True)) for name in _SHIFTED)]:
        coarse = form.objective(problems.coarse(odd=form.odd(curve)), curve, problems.levels)
        yield curve, roughly(coarse, problems.rough_without_folds(odd=form.odd(curve)))


def _chosen(
    errors: Array, handicaps: Array, total: float, without: Array, pairs: Array
) -> tuple[float, Interval | None]:
    """R² where each fold is predicted by the way that does best on the others, and its 95 %.

    Args:
        errors: squared error of each way and fold, ``(ways, folds)``.
        handicaps: by which those of each way are multiplied where it is chosen, ``(ways,)``.
        total: Σ w (y − ȳ)² of all pairs.
        without: likewise of all pairs but one fold's, ``(folds,)``.
        pairs: number of pairs of each fold, likewise.
    """
    finite = np.isfinite(errors).all(1)  # a derivative may be infinite where x is zero
    errors, handicaps = errors[finite], handicaps[finite]
    folds = np.arange(errors.shape[1])
    others = errors.sum(1, keepdims=True) - errors
    best = _first_of_least(others * handicaps[:, None])
    unexplained = errors[best, folds].sum() / total
    # Without one fold more, what is chosen for a fold may be another; of two folds there is nothing left to choose by.
    left = np.repeat(best[:, None], len(folds), 1)
    if len(folds) > 2:
        left = _first_of_least((others[:, :, None] - errors[:, None]) * handicaps[:, None, None])
    kept = np.where(np.eye(len(folds), dtype=bool), 0.0, errors[left, folds[:, None]])
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (np.array([unexplained]), (kept.sum(0) / without)[None], pairs[None])
    low, high = map(float, interval_of_r2(*map(torch.from_numpy, shares)))
    return float(1 - unexplained), (low, high) if math.isfinite(low + high) else None


def _first_of_least(errors: Array) -> Places:
    """Number of the first way, along axis 0, of least error but for rounding."""
    first: Places = (errors <= (1 + _TIE) * errors.min(0)).argmax(0)
    return first


def free(moments: Tensor, counts: Tensor, top: Ceiling | None) -> Curve:
    """E[y|x] itself as a curve: piecewise linear between groups of bins, as its own cross-validation chose them.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, weighted or not, float64 ``(6, bins)``.
        counts: number of pairs, float64 ``(bins,)``.
        top: what :func:`ceilings` chose; without folds, groups hold 64 pairs and what lies beyond is constant.
    """
    filled = (counts > 0) & (moments[0] > 0)  # pairs without weight have no mean
    bins, number = moments[:, filled].numpy(), counts[filled].numpy()
    (bounds,) = _groups(number, np.array([0, len(number)]), [top.least_count if top else _LEAST_COUNT])
    weight, x, y, xx, xy, _ = np.add.reduceat(bins, bounds[:-1], axis=1)
    beyond = float(xy.sum() / xx.sum()) if top and top.along_line and xx.sum() > 0 else 0.0
    return curve_along(Piecewise(x / weight, y / weight, beyond))


def curve_along(line: Piecewise) -> Curve:
    """The curve called free, made of lines between points."""
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
        """Slopes of all pieces, including the outer ones."""
        between = np.diff(self.mean) / np.maximum(np.diff(self.at), 1e-300)
        return np.concatenate([[self.beyond], between, [self.beyond]])

    def __call__(self, u: Tensor) -> Tensor:
        points = u.detach().double().numpy()
        outside = points - np.clip(points, self.at[0], self.at[-1])
        return torch.from_numpy(np.asarray(np.interp(points, self.at, self.mean) + self.beyond * outside))

    def slope(self, u: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self.slopes[np.searchsorted(self.at, u.detach().double().numpy())]))


def _errors(sums: Array, counts: Array, held: Nodes) -> Array:
    """Σ w (y − E[y|x])² of each fold, with E[y|x] from all other folds, in each way to take it: ``(ways, folds)``.

    Args:
        sums: n, Σx, Σy, Σx², Σxy, Σy² per fold and bin, weighted or not, ``(folds, 6, bins)``.
        counts: number of pairs, ``(folds, bins)``.
        held: the pairs of each fold.
    """
    whole = sums.sum(0)
    weight, sum_x, sum_y, xx, xy, _ = (whole - sums).transpose(1, 0, 2)
    count = counts.sum(0) - counts
    xx, xy = xx.sum(1), xy.sum(1)
    slope = np.divide(xy, xx, out=np.zeros_like(xx), where=xx > 0)
    # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
    filled = (count > 0.5) & (weight > _ROUNDING * whole[0])
    count, weight, sum_x, sum_y = (values[filled] for values in (count, weight, sum_x, sum_y))
    first = np.concatenate([[0], np.cumsum(np.count_nonzero(filled, axis=1))])
    both = sum_x + 1j * sum_y  # as one array, whose groups are summed in one go
    # The pairs of all folds as points, one fold after another, and the last bin of the other folds before each.
    occupied = held.weight.numpy() > 0
    x, y, w = (values.numpy()[occupied] for values in (held.x, held.y, held.weight))
    fold = np.nonzero(occupied)[0]
    ends = np.cumsum(np.count_nonzero(occupied, axis=1))
    begins = np.concatenate([[0], ends[:-1]])
    means = sum_x / weight
    places = [
        start + np.searchsorted(means[start:end], x[begin:stop], "right") - 1
        for (start, end), begin, stop in zip(pairwise(first), begins, ends, strict=True)
    ]
    bins = np.maximum(np.concatenate(places), first[fold])

    errors: list[Array] = []
    for bounds in _groups(count, first, _LEAST_COUNTS):
        grouped, n = np.add.reduceat(both, bounds[:-1]), np.add.reduceat(weight, bounds[:-1])
        at, mean = grouped.real / n, grouped.imag / n
        group = np.searchsorted(bounds, first)
        # Each fold has one piece more than groups: the constant before the first, the lines between, and that beyond.
        pieces = np.ones(len(at), np.intp)
        pieces[group[:-1]] = 2
        base = np.repeat(np.arange(len(at)), pieces)
        with np.errstate(divide="ignore", invalid="ignore"):  # from one fold to the next
            steepness = np.append(np.diff(mean) / np.diff(at), 0.0)[base]
        outer = np.zeros(len(base), bool)
        folds = np.arange(len(slope))
        outer[group[:-1] + folds] = outer[group[1:] + folds] = True
        steepness[outer] = 0.0
        after = np.repeat(np.arange(len(at)), np.diff(bounds))[bins]
        piece = after + fold + (at[after] <= x)
        origin = at[base]
        off = steepness[piece] * (x - origin[piece]) + mean[base][piece] - y
        squares = w * off * off
        errors.append(np.add.reduceat(squares, begins))  # constant beyond all groups
        beyond = np.flatnonzero(outer[piece])
        off = off[beyond] + slope[fold[beyond]] * (x[beyond] - origin[piece[beyond]])
        squares[beyond] = w[beyond] * off * off
        errors.append(np.add.reduceat(squares, begins))  # and along a line there
    of_ways: Array = np.stack(errors) + held.scatter.sum(1).numpy()
    return of_ways


def _groups(n: Array, first: Places, least_counts: Sequence[int]) -> Iterator[Places]:
    """Join neighbouring bins so that each group holds a least number of pairs, or all of its fold.

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
