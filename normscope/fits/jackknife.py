"""Intervals by a delete-a-fold jackknife, and the fits without each fold that they take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope.curves.known import Curve
from normscope.fits.form import FitForm
from normscope.fits.nodes import FitBatch, goodness
from normscope.fits.solver import Solutions, least_squares, refined

Interval = tuple[float, float]
Attributes = dict[str, Any]  # of a CurveFit, by their names

_NOTHING_LEFT = 1e-4  # of Σ(y − ȳ)²: a smaller rest may come from a few tokens, and does not generalize
# Student's t at 97.5 %, for 0, 1, 2, … degrees of freedom: there are at most eight folds.
_STUDENT = torch.tensor([torch.nan, 12.70620, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624]).double()


def student(folds: Tensor) -> Tensor:
    """Number of standard errors in a 95 % interval, by the number of folds; NaN for fewer than two."""
    return _STUDENT[(folds - 1).clamp_min(0)]


def interval(whole: Tensor, without: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Delete-a-fold jackknife for folds of unequal size (Busing, Meijer, van der Leeden 1999, eq. 8).

    Args:
        whole: an estimate from all pairs, ``(problems,)``.
        without: from all pairs but those of one fold, ``(problems, folds)``.
        pairs: number of pairs of each fold, likewise; zero for a fold that does not count.

    Returns:
        Lower and upper 95 % bound, ``(problems,)`` each; NaN if fewer than two folds count.

    >>> low, high = interval(torch.tensor([2.0]), torch.tensor([[1.5, 2.5]]), torch.tensor([[10.0, 10.0]]))
    >>> bool(low < 2 < high)
    True
    """
    counts = pairs > 0
    folds = counts.sum(-1)
    share = pairs.sum(-1, keepdim=True) / torch.where(counts, pairs, 1.0)
    left = torch.where(counts, whole[:, None] - without, 0.0)
    # The mean of the pseudo-values hθ − (h − 1)θ₋ is θ + Σ(1 − 1/h)(θ − θ₋).
    pseudo = whole[:, None] + (share - 1) * left
    centre = whole + ((1 - 1 / share) * left).sum(-1)
    squares = torch.where(counts, (pseudo - centre[:, None]).square() / (share - 1).clamp_min(1e-300), 0.0)
    width = student(folds) * (squares.sum(-1) / folds).sqrt()
    return whole - width, whole + width


def interval_of_r2(unexplained: Tensor, without: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the :func:`interval` of R² from 1 − R², whose logarithm is nearest to normal.

    It is also NaN if its upper bound leaves nothing to explain.
    """
    low, high = interval(unexplained.log(), without.log(), pairs)
    counts = low.exp() > _NOTHING_LEFT
    return (1 - high.exp()).where(counts, torch.nan), (1 - low.exp()).where(counts, torch.nan)


def inside_noise(errors: Tensor, best: Tensor, pairs: Tensor) -> Tensor:
    """True if a curve's held-out errors, ``(problems, folds)``, exceed the best ones by less than folds differ."""
    difference = torch.where(pairs > 0, errors - best, 0.0)
    total, number = difference.sum(-1, keepdim=True), pairs.sum(-1, keepdim=True)
    # Per pair, as the size alone of a large fold would pass for noise.
    low, _ = interval((total / number)[:, 0], (total - difference) / (number - pairs), pairs)
    return ~(low > 0)


def solved(problems: FitBatch, curve: Curve, form: FitForm) -> Solutions:
    """Fit one curve to all pairs of each problem."""
    if form.theory:
        solutions = form.in_theory(curve, problems.targets)
    else:
        odd = form.odd(curve)
        objective = form.objective(problems.nodes(odd=odd), curve, problems.targets)
        solutions = least_squares(objective, problems.nodes("coarse", odd=odd))
    return replace(solutions, converged=solutions.converged & ~problems.unresolved(solutions.alpha))


def fitted(problems: FitBatch, curve: Curve, form: FitForm) -> tuple[list[Attributes], Tensor]:
    """Fit one curve to a batch of problems, and again without each of their folds.

    Returns attributes of each problem's CurveFit, and the squared error of each fold under the fit to all others,
    ``(problems, folds)``.
    """
    nodes, odd = problems.nodes(), form.odd(curve)
    solutions = solved(problems, curve, form)
    errors = goodness(nodes, curve, solutions.amplitude, solutions.alpha, solutions.shift)
    held_out, intervals, refits = torch.zeros_like(problems.n_pairs), {}, torch.zeros(len(problems), 0, 2)
    r2_cv = torch.full_like(solutions.alpha, torch.nan)
    if problems.occupied.any():
        without_fold = solutions.of(torch.arange(len(problems)).repeat_interleave(problems.folds))
        without, held = problems.nodes("others", odd=odd), problems.nodes("folds", odd=odd)
        if not form.theory:
            objective = form.objective(problems.nodes(odd=odd), curve, problems.targets)
            without_fold = refined(objective.on(without), without_fold, problems.nodes("rough others", odd=odd))
        fold_errors = held.residual(without_fold.predicted(curve, held.x)).view(-1, problems.folds)
        held_out = torch.where(problems.occupied, fold_errors, 0.0)
        r2_cv = (1 - held_out.sum(-1) / nodes.total).where(problems.occupied.any(-1), torch.nan)
        r2_without = 1 - without.residual(without_fold.predicted(curve, without.x)) / without.total
        estimates = _estimates(curve, solutions, errors["r2"]), _estimates(curve, without_fold, r2_without)
        intervals = _intervals(problems, form, curve, solutions, *estimates)
        refits = torch.stack([without_fold.alpha, estimates[1]["slope"]], -1).view(len(problems), -1, 2)
    numbers = {
        **{name: getattr(solutions, name) for name in ("amplitude", "alpha", "shift", "converged")},
        "straight": solutions.unbent & curve.linear_at_origin,
        "unidentified": solutions.unbent & (not curve.linear_at_origin),
        "reach": solutions.alpha * torch.tensor([target.reach for target in problems.targets], dtype=torch.float64),
        "r2_cv": r2_cv,
        "refits": refits,
        **errors,
    }
    parameters = len(form.parameters(curve))
    shared = {"curve": curve.name, "function": curve, "form": form.words(curve), "parameters": parameters}
    columns, bounds = ({name: t.tolist() for name, t in table.items()} for table in (numbers, intervals))
    rows = []
    for number in range(len(problems)):
        row: Attributes = shared | {name: column[number] for name, column in columns.items()}
        row["r2_cv"] = None if math.isnan(row["r2_cv"]) else row["r2_cv"]
        pairs = {name: tuple(column[number]) for name, column in bounds.items()}
        row["intervals"] = {name: pair for name, pair in pairs.items() if all(map(math.isfinite, pair))}
        rows.append(row)
    return rows, held_out


def _estimates(curve: Curve, solutions: Solutions, r2: Tensor) -> dict[str, Tensor]:
    """Numbers that have an interval, on the scale on which each is nearest to normal, ``(problems,)``."""
    steepness = curve.derivative(solutions.shift) * solutions.alpha
    return {
        "amplitude": solutions.amplitude,
        "alpha": solutions.alpha.log(),
        "C": -2 * solutions.alpha.log(),
        "slope": solutions.amplitude * steepness,
        "shift": solutions.shift,
        "r2": 1 - r2,
    }


def _intervals(
    problems: FitBatch,
    form: FitForm,
    curve: Curve,
    solutions: Solutions,
    whole: dict[str, Tensor],
    without: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Lower and upper 95 % of each number, ``(problems, 2)``; NaN if the pairs do not identify it."""
    pairs = torch.where(problems.occupied, problems.n_pairs, 0.0)
    free, bent = form.parameters(curve), ~solutions.unbent & solutions.converged
    has_slope = not (form.theory or curve.vertical_at_origin)
    identified = {
        "amplitude": bent & ("A" in free or (curve.amplitude_is_inverse_scale and "α" in free)),
        "alpha": bent & ("α" in free),
        "C": bent & (curve.name == "isru" and "α" in free),
        "shift": bent & ("s" in free),
        "slope": (bent | (solutions.unbent & curve.linear_at_origin)) & has_slope,
        "r2": torch.ones_like(bent),
    }
    bounds = {}
    for name, estimate in whole.items():
        jackknife = interval_of_r2 if name == "r2" else interval
        low, high = jackknife(estimate, without[name].view(-1, problems.folds), pairs)
        if name in ("alpha", "C"):
            low, high = low.exp(), high.exp()
        bounds[name] = torch.stack([low, high], -1).where(identified[name][:, None], torch.nan)
    return bounds
