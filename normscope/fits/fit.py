"""From a capture to curves: one CurveFit per norm site and curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from normscope.errors import UsageError
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.known import BEST, CURVES, FREE, Curve
from normscope.fits.curves.lookup import curves_named, split_names
from normscope.fits.solving.ceiling import Ceiling, ceilings, free
from normscope.fits.solving.levels import Level, check_levels, levels_of
from normscope.fits.solving.nodes import Problems, batches, goodness, nodes_of, tails
from normscope.fits.solving.objective import FITTED, Parametrization
from normscope.fits.solving.refits import Fitted, fitted, inside_noise
from normscope.pairs.captures import Capture

Columns = dict[str, Any]
_NUMBERS = ("amplitude", "alpha", "shift", "r2", "rmse")


@dataclass(frozen=True)
class Describe:
    """What all records of one call of ``fit`` share."""

    capture: Capture
    form: Parametrization
    weights_by: str

    def row(self, level: Level, curve: Curve, top: Ceiling | None, **columns: Any) -> CurveFit:
        """Make the record of one curve at one level."""
        about = self.capture.about
        if top is not None and top.interval is not None:
            columns["intervals"] = {**columns.get("intervals", {}), "r2_ceiling": top.interval}
        return CurveFit(
            model=about["model"],
            weights=about["weights"],
            data=about["data"],
            site=level.site,
            sites=level.sites,
            channel=level.channel,
            curve=curve.name,
            function=curve,
            weights_by=self.weights_by,
            folds=level.fold_by,
            r2_ceiling=top.r2 if top else None,
            norm=next((site for site in self.capture.sites if site.name == level.site), None),
            **columns,
        )

    def empty(self, level: Level, curve: Curve | str) -> CurveFit:
        """Make the record of a level with nothing to fit."""
        known = curve if isinstance(curve, Curve) else replace(CURVES["linear"], name=curve)
        nothing = {"nothing": level.nothing, "straight": False, "converged": False, "form": self.form.words(known)}
        numbers = {"n_pairs": int(level.counts.sum()), **dict.fromkeys(_NUMBERS, math.nan)}
        freedom = len(self.form.parameters(known)) if isinstance(curve, Curve) else None
        return self.row(level, known, None, parameters=freedom, **numbers, **nothing)

    def free(self, level: Level, top: Ceiling | None) -> CurveFit:
        """Make the record of E[y|x] itself, scored on the bins that it is made of, in sample as held out."""
        moments = level.moments.sum(0)
        curve = free(moments, level.counts.sum(0), top)
        nodes = nodes_of(moments[None])
        steepness = curve.derivative(nodes.x).abs() / curve.peak
        found = goodness(nodes, tails(nodes), curve.function(nodes.x), steepness).numbers(0)
        own = {"amplitude": 1.0, "alpha": 1.0, "shift": 0.0, "straight": False, "converged": True}
        numbers = {"n_pairs": int(level.counts.sum()), "r2_cv": top.r2_free if top else None, **found}
        return self.row(level, curve, top, form=FREE, **own, **numbers)


def columns(problems: Problems, form: Parametrization, found: Sequence[Fitted]) -> list[list[Columns]]:
    """Return what is known of each curve, and of each problem, by the names of CurveFit's fields."""
    freedom = [len(form.parameters(one.curve)) for one in found]
    ranks: list[list[Columns]] = [[] for _ in found]
    for number in set(freedom):  # a shift given to some curves alone would decide which of all are first
        alike = [place for place, own in enumerate(freedom) if own == number]
        for place, own_ranks in zip(alike, _ranks(problems, [found[place] for place in alike]), strict=True):
            ranks[place] = own_ranks
    return [
        [
            {"form": form.words(one.curve), "parameters": number, **own, **rank}
            for own, rank in zip(_columns(problems, one), more, strict=True)
        ]
        for one, number, more in zip(found, freedom, ranks, strict=True)
    ]


def _columns(problems: Problems, one: Fitted) -> list[Columns]:
    reach = torch.tensor([level.reach for level in problems.levels], dtype=torch.float64)
    is_line = one.curve.power_at_origin == 1
    numbers = {
        "amplitude": one.solutions.amplitude,
        "alpha": one.solutions.alpha,
        "shift": one.solutions.shift,
        "straight": one.solutions.only_power & is_line,
        "power_law": one.solutions.only_power & (not is_line),
        "converged": one.solutions.converged,
        "r2_cv": one.r2_cv,
        "reach": one.solutions.alpha * reach,
        "n_pairs": problems.n_pairs.sum(-1).long(),
        **vars(one.goodness),
    }
    rows = [dict(zip(numbers, row, strict=True)) for row in zip(*(v.tolist() for v in numbers.values()), strict=True)]
    bounds = {name: list(zip(low.tolist(), high.tolist(), strict=True)) for name, (low, high) in one.intervals.items()}
    for number, row in enumerate(rows):
        row["r2_cv"] = None if math.isnan(row["r2_cv"]) else row["r2_cv"]
        own = {name: pairs[number] for name, pairs in bounds.items()}
        row["intervals"] = {name: pair for name, pair in own.items() if all(map(math.isfinite, pair))}
    return rows


def _ranks(problems: Problems, found: Sequence[Fitted]) -> list[list[Columns]]:
    """Rank curves of as many free parameters by what they leave of held-out folds, or of all pairs without any."""
    has_folds = problems.occupied.sum(-1) > 1
    held = [None if one.held_out is None else one.held_out.where(problems.occupied, 0.0) for one in found]
    errors = torch.stack(
        [
            torch.where(has_folds, own.sum(-1) if own is not None else 0.0, 1 - one.goodness.r2)
            for own, one in zip(held, found, strict=True)
        ]
    ).nan_to_num(torch.inf)
    places = errors.argsort(dim=0, stable=True).argsort(dim=0) + 1
    best = errors.argmin(0)
    rows = []
    for own, place in zip(held, places, strict=True):
        if own is None:
            rows.append([{"rank": rank} for rank in place.tolist()])
            continue
        leading = torch.stack([other for other in held if other is not None])[best, torch.arange(len(problems))]
        noise = inside_noise(own, leading, problems.n_pairs.where(problems.occupied, 0.0)).tolist()
        told = has_folds.tolist()
        rows.append(
            [
                {"rank": rank, "in_noise": bool(near) if tells else None}
                for rank, near, tells in zip(place.tolist(), noise, told, strict=True)
            ]
        )
    return rows


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
    plan = planned(curves, per, pool, Parametrization(amplitude, theory, alpha, shift), weights_by)
    return carried_out(plan, capture)


@dataclass(frozen=True)
class Plan:
    """A call of :func:`fit` that was understood, before there is a capture."""

    wanted: Sequence[str | Curve]
    per: str
    pool: str | None
    form: Parametrization
    weights_by: str


def planned(
    curves: str | Sequence[str | Curve],
    per: str = "site",
    pool: str | None = None,
    form: Parametrization = FITTED,
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
