"""Leave-one-fold-out refits, and the intervals that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.known import FREE, Curve
from normscope.fits.solving.levels import Level
from normscope.fits.solving.nodes import Goodness, Problems, batches, goodness
from normscope.fits.solving.objective import Parametrization, Solutions
from normscope.fits.solving.solve import least_squares, refined

LEVEL = 0.95
# Student's t at 97.5 %, for 1, 2, … degrees of freedom: folds are eight at most.
_STUDENT = torch.tensor([torch.nan, 12.70620, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624]).double()


def student(folds: Tensor) -> Tensor:
    """Return how many standard errors make 95 %, of so many folds each; NaN for fewer than two."""
    return _STUDENT[(folds - 1).clamp_min(0)]


def interval(whole: Tensor, without: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Delete-a-fold jackknife for folds of unequal size (Busing, Meijer, van der Leeden 1999, eq. 8).

    Args:
        whole: a number as all pairs give it, ``(problems,)``.
        without: as all pairs but one fold's give it, ``(problems, folds)``.
        pairs: number of pairs of each fold, likewise; zero for a fold that does not count.

    Returns:
        Lower and upper bound of 95 %, ``(problems,)`` each; NaN where fewer than two folds count.

    >>> low, high = interval(torch.tensor([2.0]), torch.tensor([[1.5, 2.5]]), torch.tensor([[10.0, 10.0]]))
    >>> bool(low < 2 < high)
    True
    """
    counts = pairs > 0
    folds = counts.sum(-1)
    share = pairs.sum(-1, keepdim=True) / torch.where(counts, pairs, 1.0)
    left = torch.where(counts, whole[:, None] - without, 0.0)
    # With pseudo-values hθ − (h − 1)θ₋ the mean of all is θ + Σ(1 − 1/h)(θ − θ₋).
    pseudo = whole[:, None] + (share - 1) * left
    centre = whole + ((1 - 1 / share) * left).sum(-1)
    spread = torch.where(counts, (pseudo - centre[:, None]).square() / (share - 1).clamp_min(1e-300), 0.0)
    width = student(folds) * (spread.sum(-1) / folds).sqrt()
    return whole - width, whole + width


def inside_noise(errors: Tensor, best: Tensor, pairs: Tensor) -> Tensor:
    """Say whether the held-out error of one curve passes another's by less than their folds differ.

    Args:
        errors: of each held-out fold, ``(problems, folds)``.
        best: of another curve, likewise.
        pairs: number of pairs of each fold, likewise; zero for a fold that does not count.
    """
    difference = torch.where(pairs > 0, errors - best, 0.0)
    total, number = difference.sum(-1, keepdim=True), pairs.sum(-1, keepdim=True)
    # A pair's difference, as a fold of many pairs would pass for noise by its size alone.
    low, _ = interval((total / number)[:, 0], (total - difference) / (number - pairs), pairs)
    return ~(low > 0)


@dataclass(frozen=True)
class Fitted:
    """One curve at a batch of problems.

    Attributes:
        curve: f.
        solutions: A, α and s of each.
        goodness: how well they fit.
        held_out: squared error of each fold by what all others gave, ``(problems, folds)``; None where none has folds.
        r2_cv: R² of those, ``(problems,)``.
        intervals: lower and upper bound of each number, by its name, each ``(problems,)``.
    """

    curve: Curve
    solutions: Solutions
    goodness: Goodness
    held_out: Tensor | None
    r2_cv: Tensor
    intervals: dict[str, tuple[Tensor, Tensor]]


def fitted(problems: Problems, curve: Curve, form: Parametrization) -> Fitted:
    """Fit one curve to a batch of problems, in a form that it has."""
    constraints = form.constraints(curve, problems.levels)
    odd = curve.zero_centred and not constraints.shifted
    nodes = problems.nodes()
    if form.theory:
        solutions = form.in_theory(curve, problems.levels)
    else:
        solutions = least_squares(problems.nodes(odd=odd), problems.coarse(odd=odd), curve, constraints)
    solutions = replace(solutions, converged=solutions.converged & ~problems.unresolved(solutions.alpha))
    u = solutions.alpha[:, None] * nodes.x + solutions.shift[:, None]
    found = goodness(nodes, problems.tails, solutions.amplitude[:, None] * curve.function(u), _steepness(curve, u))
    if not problems.occupied.any():
        return Fitted(curve, solutions, found, None, torch.full_like(solutions.alpha, torch.nan), {})
    folds, without = problems.folds, problems.without_folds(odd=odd)
    every = torch.arange(len(problems)).repeat_interleave(folds)
    others = solutions.of(every)
    if not form.theory:
        others = refined(without, curve, constraints.of(every), others)
    held = problems.of_folds(odd=odd)
    held_out = held.residual(others.predicted(curve, held.x)).view(-1, folds)
    r2_without = 1 - without.residual(others.predicted(curve, without.x)) / without.total
    estimates = _estimates(curve, solutions, found.r2), _estimates(curve, others, r2_without)
    return Fitted(
        curve,
        solutions,
        found,
        held_out,
        1 - torch.where(problems.occupied, held_out, 0.0).sum(-1) / nodes.total,
        _intervals(problems, form, curve, solutions, *estimates),
    )


def _steepness(curve: Curve, u: Tensor) -> Tensor:
    """|f′| over its largest value; NaN where that is infinite."""
    slope = curve.derivative(u).abs()
    return slope / curve.peak if math.isfinite(curve.peak) else torch.full_like(slope, torch.nan)


def _estimates(curve: Curve, solutions: Solutions, r2: Tensor) -> dict[str, Tensor]:
    """Return what has an interval, on the scale on which it is nearest to normal, ``(problems,)`` each."""
    steepness = curve.derivative(solutions.shift) * solutions.alpha
    return {
        "A": solutions.amplitude,
        "alpha": solutions.alpha.log(),
        "C": -2 * solutions.alpha.log(),
        "slope": solutions.amplitude * steepness,
        "coefficient": solutions.amplitude * solutions.alpha**curve.power_at_origin * curve.coefficient_at_origin,
        "shift": solutions.shift,
        "r2": (1 - r2).log(),
    }


_BACK = {"alpha": torch.exp, "C": torch.exp}


def _intervals(
    problems: Problems,
    form: Parametrization,
    curve: Curve,
    solutions: Solutions,
    whole: dict[str, Tensor],
    without: dict[str, Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = torch.where(problems.occupied, problems.n_pairs, 0.0)
    free, told_apart = form.parameters(curve), ~solutions.only_power & solutions.converged
    is_line = curve.power_at_origin == 1
    says = {
        "A": told_apart & ("A" in free or (curve.amplitude_is_inverse_scale and "α" in free)),
        "alpha": told_apart & ("α" in free),
        "C": told_apart & (curve.name == "isru" and "α" in free),
        "shift": told_apart & ("s" in free),
        "slope": (told_apart | (solutions.only_power & is_line)) & (not form.theory),
        "coefficient": solutions.only_power & (not is_line),
    }
    bounds = {}
    for name, estimate in whole.items():
        low, high = interval(estimate, without[name].view(-1, problems.folds), pairs)
        if name == "r2":
            low, high = 1 - high.exp(), 1 - low.exp()
        elif name in _BACK:
            low, high = _BACK[name](low), _BACK[name](high)
        counts = says.get(name, torch.ones_like(told_apart))
        bounds[name] = (torch.where(counts, low, torch.nan), torch.where(counts, high, torch.nan))
    return bounds


_FORM = Parametrization()


@dataclass(frozen=True)
class Without:
    """One fit without each of its folds.

    Attributes:
        alpha: α, float64 ``(folds,)``.
        slope: at the origin, likewise.
        pairs: number of pairs of the fold that is left out, likewise; zero where it holds none.
    """

    alpha: Tensor
    slope: Tensor
    pairs: Tensor


def without_folds(levels: Sequence[Level], fits: Sequence[CurveFit]) -> dict[tuple[str, str], Without]:
    """Fit again without each fold, from where the fits to all pairs ended.

    Args:
        levels: the sites of a capture.
        fits: what :func:`normscope.fit` made of it; those of another form than its default are left out.

    Returns:
        By site and curve, for every level with folds.
    """
    by_place = {(found.site, found.curve): found for found in fits}
    curves = {found.curve: found.function for found in fits if found.curve != FREE}
    held = {}
    for _, problems in batches([level for level in levels if level.fold_by]):
        for name, curve in curves.items():
            own = [by_place.get((level.site, name)) for level in problems.levels]
            known = [found for found in own if found is not None and found.form == _FORM.words(curve)]
            if len(known) == len(problems):
                for level, one in zip(problems.levels, _without(problems, known), strict=True):
                    held[level.site, name] = one
    return held


def _without(problems: Problems, fits: Sequence[CurveFit]) -> list[Without]:
    """Fit one curve to each problem without each of its folds."""
    curve = fits[0].function
    constraints = _FORM.constraints(curve, problems.levels)
    every = torch.arange(len(problems)).repeat_interleave(problems.folds)
    without = problems.without_folds(odd=curve.zero_centred and not constraints.shifted)
    others = refined(without, curve, constraints.of(every), _solutions(fits).of(every))
    slope = others.amplitude * others.alpha * curve.derivative(others.shift)
    columns = (others.alpha, slope, torch.where(problems.occupied, problems.n_pairs, 0.0))
    return [Without(*row) for row in zip(*(column.view(-1, problems.folds) for column in columns), strict=True)]


def _solutions(fits: Sequence[CurveFit]) -> Solutions:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(found, name) for found in fits])

    amplitude, alpha, shift = (column(name).double() for name in ("amplitude", "alpha", "shift"))
    residual = torch.full_like(alpha, torch.nan)
    only_power = column("straight") | column("power_law")
    return Solutions(amplitude, alpha, shift, residual, only_power, column("converged"))
