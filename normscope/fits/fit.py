"""From a capture to curves: one fit per norm site and curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from normscope.errors import UsageError
from normscope.fits.ceiling import ceilings
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves import BEST, CURVES, FREE, Curve, curves_named, split_names
from normscope.fits.forms import FITTED, Form
from normscope.fits.levels import Level, check_levels, levels_of
from normscope.fits.problems import Problems, batches
from normscope.fits.rows import Describe, columns
from normscope.fits.search import fitted
from normscope.pairs.captures import Capture


def fit(
    capture: Capture,
    curves: str | Sequence[str | Curve] = ("tanh", "isru"),
    *,
    per: str = "site",
    pool: str | None = None,
    amplitude: str = "free",
    theory: bool = False,
    alpha: float | None = None,
    shift: bool | None = None,
    weights_by: str = "pairs",
) -> list[CurveFit]:
    """Fit curves to every site of a capture, from its binned sums: the cost does not depend on the number of pairs.

    Args:
        capture: what :func:`normscope.capture` returned.
        curves: names of curves (``dyt`` is tanh, ``dyisru`` is isru, ``derf`` is erf with shift), formulas
            (``mine=x/(1+abs(x))``), or :class:`normscope.Curve`; ``all`` for every curve that is known and has the
            form, ``free`` for E[y|x] itself, and ``best`` for the one of least held-out error of all that have as many
            free parameters as tanh.
        per: ``site``; or ``channel``, of a capture that was taken ``per_channel``.
        pool: fit sites together: those of one ``placement``, of one ``kind`` (paths that differ in numbers alone), or
            ``all``.
        amplitude: ``free``; or ``theory``, where A·f tends to √d, or √(d−1) with centring.
        theory: fit nothing: A as above, and the slope at the origin that of the token of mean ρ.
        alpha: fix α; 1 is the ablation without α.
        shift: fit s too, of every curve, so that all that are compared have the same freedom; erf is then called derf.
            By default s is fitted of derf alone, which is ranked against no curve without it.
        weights_by: ``pairs`` alike; by ``gamma``², the error that reaches the next layer, of a capture that was taken
            ``by_gamma``; or evenly over ``x``, so that the tails count as much as the centre.

    Returns:
        One :class:`CurveFit` for each site (or channel, or pool) and curve, sites first.

    Raises:
        UsageError: if there is no such curve, level or form, or if they contradict one another.
        DataError: if the capture lacks the sums that they need.

    >>> import normscope, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 4, generator=torch.Generator().manual_seed(0))])
    >>> [found.curve for found in fit(seen, "dyt")]
    ['tanh']
    """
    plan = planned(curves, per, pool, Form(amplitude, theory, alpha, shift), weights_by)
    return carried_out(plan, capture)


@dataclass(frozen=True)
class Plan:
    """A call of :func:`fit` that was understood, before there is a capture."""

    wanted: Sequence[str | Curve]
    per: str
    pool: str | None
    form: Form
    weights_by: str


def planned(
    curves: str | Sequence[str | Curve],
    per: str = "site",
    pool: str | None = None,
    form: Form = FITTED,
    weights_by: str = "pairs",
) -> Plan:
    """Look the curves up, and refuse what cannot be fitted whatever the data is; UsageError."""
    parts = split_names(curves) if isinstance(curves, str) else curves
    words = [part.strip().lower() for part in parts if isinstance(part, str)]
    names = [part for part in parts if isinstance(part, Curve) or part.strip().lower() not in (FREE, BEST)]
    every = curves_named(names)
    for curve in curves_named([name for name in names if isinstance(name, Curve) or name.strip().lower() != "all"]):
        if refusal := form.refusal(curve):
            raise UsageError(refusal)
    known = list({form.called(curve).name: form.called(curve) for curve in every if not form.refusal(curve)}.values())
    check_levels(per, pool, weights_by)
    return Plan([*known, *(word for word in (FREE, BEST) if word in words)], per, pool, form, weights_by)


def carried_out(plan: Plan, capture: Capture) -> list[CurveFit]:
    """Fit what was planned to one capture, as :func:`fit` does."""
    levels = levels_of(capture, per=plan.per, pool=plan.pool, weights_by=plan.weights_by)
    if plan.form.needs_bound:
        levels = [level if math.isfinite(level.bound) else _unbounded(level) for level in levels]
    describe = Describe(capture, plan.form, plan.weights_by)
    rows: dict[int, list[CurveFit]] = {}
    for numbers, problems in batches(levels):
        rows |= dict(zip(numbers, _rows_of(problems, plan.wanted, describe), strict=True))
    return [
        found
        for number, level in enumerate(levels)
        for found in rows.get(number) or [describe.empty(level, curve) for curve in plan.wanted]
    ]


def _unbounded(level: Level) -> Level:
    return replace(level, nothing=level.nothing or "no bound on y")


def _rows_of(problems: Problems, wanted: Sequence[str | Curve], describe: Describe) -> list[list[CurveFit]]:
    """Fit every curve to a batch, and return the records of each level."""
    curves = {curve.name: curve for curve in wanted if isinstance(curve, Curve)}
    if BEST in wanted:
        alike = [describe.form.called(curve) for curve in curves_named("all") if not describe.form.refusal(curve)]
        curves = {**{curve.name: curve for curve in alike}, **curves}
    numbers = columns(problems, describe.form, [fitted(problems, curve, describe.form) for curve in curves.values()])
    freedom = len(describe.form.parameters(CURVES["tanh"]))
    of_levels = []
    for number, (level, top) in enumerate(zip(problems.levels, ceilings(problems), strict=True)):
        rows = {
            name: describe.row(level, curve, top, **own[number])
            for (name, curve), own in zip(curves.items(), numbers, strict=True)
        }
        if BEST in wanted:
            best = next(row for row in rows.values() if row.rank == 1 and row.parameters == freedom)
            rows[best.curve] = rows[BEST] = replace(best, best=True)
        if FREE in wanted:
            rows[FREE] = describe.free(level, top)
        chosen = [rows[curve.name if isinstance(curve, Curve) else curve] for curve in wanted]
        of_levels.append(list({row.curve: row for row in chosen}.values()))
    return of_levels
