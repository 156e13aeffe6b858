"""From solved batches to records: one CurveFit a level and curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from normscope.fits.ceiling import Ceiling, free
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves import CURVES, FREE, Curve
from normscope.fits.forms import Form
from normscope.fits.goodness import goodness, tails
from normscope.fits.jackknife import inside_noise
from normscope.fits.levels import Level
from normscope.fits.nodes import nodes_of
from normscope.fits.problems import Problems
from normscope.fits.search import Fitted
from normscope.pairs.captures import Capture

Columns = dict[str, Any]
_NUMBERS = ("amplitude", "alpha", "shift", "r2", "rmse")


@dataclass(frozen=True)
class Describe:
    """What all records of one call of ``fit`` share."""

    capture: Capture
    form: Form
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


def columns(problems: Problems, form: Form, found: Sequence[Fitted]) -> list[list[Columns]]:
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
