"""The ceiling, the held-out R² of the best function of x alone, and E[y|x] as a curve.

The ceiling selects among one fixed set of functions. Only a fitted curve of higher held-out R² raises it. It estimates
1 − E[Var(y|x)]/Var(y) from below and is not a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.curves.known import CURVES, FREE, Curve
from normscope.fits.form import FitForm
from normscope.fits.jackknife import Interval, interval_of_r2
from normscope.fits.nodes import FitBatch, Nodes, nodes_of
from normscope.fits.solver import Solutions, roughly

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

_LEAST_COUNT = 64
_ROUNDING = 1e-12  # of a sum
_LEAST_COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_WAYS = [(least_count, along_line) for least_count in _LEAST_COUNTS for along_line in (False, True)]
# Choose linear extrapolation only if it lowers the held-out error by 0.1 %: it can be far off for a larger |x|.
_HANDICAP = 1e-3
_TIE = 1e-9  # of an error: ways that predict alike differ by rounding
_SHIFTED = ("tanh", "isru", "erf")  # the published layers' functions


@dataclass(frozen=True)
class Ceiling:
    """Held-out R² of the best function of x, on pairs that neither fitted nor selected it."""

    r2: float
    interval: Interval | None  # 95 %; None if nothing is left to explain
    r2_free: float  # of E[y|x] alone
    least_count: int  # of pairs in a group of bins, with which E[y|x] predicts best
    along_line: bool  # a line through all pairs extrapolates E[y|x] better than a constant


def ceilings(
    problems: FitBatch, diagonal: FitBatch | None = None, fitted: Sequence[Tensor] = ()
) -> list[Ceiling | None]:
    """Return the held-out R² of the best function of x at each problem.

    The functions are fitted to all folds but one: E[y|x], piecewise linear between groups of bins, for eight least
    counts of pairs in a group and two extrapolations; every built-in curve; and tanh, isru and erf with a shift. The
    held-out errors of the other folds select the one that predicts a fold. If E[y|x] alone or one of the ``fitted``
    curves has a higher held-out R² than this selection, the ceiling is that one's.

    Args:
        problems: of pairs (x, y).
        diagonal: of pairs (x, ∂y_i/∂x_i), in the same order, to predict in place of y: by their own mean at x, and by
            the derivatives of the curves fitted to y.
        fitted: Σ w (y − prediction)² of each held-out fold for other curves, ``(problems, folds)`` each.

    Returns:
        For each problem a ceiling; None if fewer than two folds contain pairs, if y does not vary, or if x or y lies
        off the grid of bins.
    """
    if not problems.occupied.any():
        return [None] * len(problems)
    predicted = problems if diagonal is None else diagonal
    held = predicted.nodes("folds")
    errors, unbounded = [], []
    for curve, without in _without_folds(problems):
        values = (without.predicted if diagonal is None else without.derivative)(curve, held.x)
        errors.append(held.residual(values.where(held.weight > 0, 0.0)).view(len(problems), -1))
        unbounded.append(diagonal is None and not curve.bounded)
    return best_held_out(predicted, torch.stack(errors), unbounded, fitted)


def best_held_out(
    problems: FitBatch, curve_errors: Tensor, unbounded: Sequence[bool], fitted: Sequence[Tensor] = ()
) -> list[Ceiling | None]:
    """Select among E[y|x] and curves, as :func:`ceilings` does.

    ``curve_errors`` are Σ w (y − prediction)² of each held-out fold, ``(curves, problems, folds)``; ``unbounded`` marks
    the curves without bounds.
    """
    free_handicaps = 1 + _HANDICAP * np.array([along_line for _, along_line in _WAYS])
    handicaps = np.concatenate([free_handicaps, 1 + _HANDICAP * np.array(unbounded, float)])
    total, without = problems.nodes().total.tolist(), problems.nodes("others").total.view(len(problems), -1).numpy()
    tops: list[Ceiling | None] = []
    for number, target in enumerate(problems.targets):
        folds = problems.occupied[number].nonzero()[:, 0]
        if len(folds) < 2 or problems.off_grid[number] or not total[number] > 0:
            tops.append(None)
            continue
        filled = (target.counts > 0).any(0).nonzero()[:, 0]
        moments, counts = (sums[folds].index_select(-1, filled) for sums in (target.moments, target.counts))
        free_errors = _errors(moments.numpy(), counts.numpy(), nodes_of(moments))
        errors = np.concatenate([free_errors, curve_errors[:, number, folds].numpy()])
        scales = total[number], without[number][folds], counts.numpy().sum(1)
        free_r2, _ = free_alone = _selected(free_errors, free_handicaps, *scales)
        single = (curve[number, folds].numpy()[None] for curve in fitted if curve[number, folds].isfinite().all())
        curves_alone = (_selected(curve, np.ones(1), *scales) for curve in single)
        r2, bounds = max(_selected(errors, handicaps, *scales), free_alone, *curves_alone, key=lambda top: top[0])
        best = int((free_errors.sum(1) * free_handicaps).argmin())
        tops.append(Ceiling(r2, bounds, free_r2, *_WAYS[best]))
    return tops


def _without_folds(problems: FitBatch) -> Iterator[tuple[Curve, Solutions]]:
    """Fit every curve of the set to all pairs but those of one fold, ``problems · folds`` times."""
    forms = [(curve, FitForm(shift=False)) for curve in CURVES.values() if not curve.shifted]
    for curve, form in [*forms, *((CURVES[name], FitForm()) for name in _SHIFTED)]:
        odd = form.odd(curve)
        coarse = form.objective(problems.nodes("coarse", odd=odd), curve, problems.targets)
        yield curve, roughly(coarse, problems.nodes("rough others", odd=odd))


def _selected(
    errors: Array, handicaps: Array, total: float, without: Array, pairs: Array
) -> tuple[float, Interval | None]:
    """R² with each fold predicted by the way of least error on the other folds, and its 95 %.

    ``errors`` are ``(ways, folds)``, and ``handicaps`` their factors in the selection. ``total`` is Σ w (y − ȳ)² of all
    pairs, and ``without`` that of all but one fold's.
    """
    finite = np.isfinite(errors).all(1)  # a derivative may be infinite at x = 0
    errors, handicaps = errors[finite], handicaps[finite]
    folds = np.arange(errors.shape[1])
    other_errors = errors.sum(1, keepdims=True) - errors
    best = _first_of_least(other_errors * handicaps[:, None])
    unexplained = errors[best, folds].sum() / total
    # For the jackknife, select for each fold without it and one other; with two folds nothing would remain, so use the
    # common choice.
    ways = np.repeat(best[:, None], len(folds), 1)
    if len(folds) > 2:
        ways = _first_of_least((other_errors[:, :, None] - errors[:, None]) * handicaps[:, None, None])
    fold_errors = np.where(np.eye(len(folds), dtype=bool), 0.0, errors[ways, folds[:, None]])
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (np.array([unexplained]), (fold_errors.sum(0) / without)[None], pairs[None])
    low, high = map(float, interval_of_r2(*map(torch.from_numpy, shares)))
    return float(1 - unexplained), (low, high) if math.isfinite(low + high) else None


def _first_of_least(errors: Array) -> Indices:
    """Number of the first way, along axis 0, of least error up to rounding."""
    first: Indices = (errors <= (1 + _TIE) * errors.min(0)).argmax(0)
    return first


def free(moments: Tensor, counts: Tensor, top: Ceiling | None) -> Curve:
    """E[y|x] itself as a curve, from moments ``(6, bins)``: piecewise linear between groups of bins.

    Cross-validation chose the groups; without ``top`` they contain 64 pairs, and E[y|x] is constant beyond them.
    """
    filled = (counts > 0) & (moments[0] > 0)  # pairs without weight have no mean
    bins, number = moments[:, filled].numpy(), counts[filled].numpy()
    groups = groups_of_bins(number, top.least_count if top else _LEAST_COUNT)
    weight, x, y, xx, xy, _ = np.add.reduceat(bins, groups, axis=1)
    beyond = float(xy.sum() / xx.sum()) if top and top.along_line and xx.sum() > 0 else 0.0
    return curve_along(Piecewise(x / weight, y / weight, beyond))


def curve_along(line: Piecewise) -> Curve:
    """Make the curve called free from lines between points."""
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
    """Lines between points ``mean`` at ascending x, ``at``, and of slope ``beyond`` beyond the outermost."""

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
    """Σ w (y − E[y|x])² of each fold, with E[y|x] from all other folds, for each way to estimate it: ``(ways, folds)``.

    ``sums`` are ``(folds, 6, bins)``, weighted or not; ``held`` contains the pairs of each fold.
    """
    whole, number = sums.sum(0), counts.sum(0)
    errors = np.empty((len(_WAYS), len(sums)))
    for fold, (x, y, w) in enumerate(zip(held.x.numpy(), held.y.numpy(), held.weight.numpy(), strict=True)):
        n, remaining = number - counts[fold], whole - sums[fold]
        xx, xy = remaining[3:5].sum(1)
        slope = xy / xx if xx > 0 else 0.0
        # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
        filled = (n > 0.5) & (remaining[0] > _ROUNDING * whole[0])
        n, remaining = n[filled], remaining[:3, filled]
        for way, least_count in enumerate(_LEAST_COUNTS):
            weight, sum_x, sum_y = np.add.reduceat(remaining, groups_of_bins(n, least_count), axis=1)
            at = sum_x / weight
            off = np.interp(x, at, sum_y / weight) - y
            errors[2 * way, fold] = w @ (off * off)
            off += slope * (x - x.clip(at[0], at[-1]))
            errors[2 * way + 1, fold] = w @ (off * off)
    total: Array = errors + held.scatter.sum(1).numpy()
    return total


def groups_of_bins(n: Array, least_count: int) -> Indices:
    """First bins of groups that contain a least number of pairs, or all of them, from the number of pairs in each bin.

    Groups begin where the number of pairs before a bin passes a multiple of the least count. A group that falls short
    joins the one before it.
    """
    before = np.concatenate([[0], np.cumsum(n)])
    first = np.flatnonzero(np.diff(before[:-1] // least_count, prepend=-1))
    enough = np.diff(before[[*first, len(n)]]) >= least_count
    enough[:1] = True
    return first[enough]
