"""One curve at many levels: solved, held against all pairs, and again without each fold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.fits.curves import Curve
from normscope.fits.forms import Form
from normscope.fits.goodness import Goodness, goodness
from normscope.fits.jackknife import interval
from normscope.fits.objective import Solutions
from normscope.fits.problems import Problems
from normscope.fits.solve import least_squares, refined


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


def fitted(problems: Problems, curve: Curve, form: Form) -> Fitted:
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
    form: Form,
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
