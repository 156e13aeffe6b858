"""From a capture to curves: one CurveFit per norm site and curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.fits.ceiling import Ceiling, ceilings, free
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.expressions import curves_named, split_names
from normscope.fits.curves.known import BEST, CURVES, FREE, Curve
from normscope.fits.jackknife import Attributes, fitted, inside_noise
from normscope.fits.solver import FitForm
from normscope.fits.targets import (
    FitBatch,
    FitTarget,
    batches,
    check_levels,
    fit_targets,
    goodness,
    nodes_of,
    tails,
)
from normscope.pairs.captures import Capture
from normscope.pairs.storage import load_capture
from normscope.runtime.records import Records


def fit(
    capture: Capture | str | Path,
    curves: str | Curve | Sequence[str | Curve] = ("tanh", "isru"),
    *,
    per: str = "site",
    pool: str | None = None,
    amplitude: str = "free",
    theory: bool = False,
    alpha: float | None = None,
    shift: bool | None = None,
    weights_by: str = "pairs",
) -> Records[CurveFit]:
    """Fit curves to every site of a capture, from its binned sums: the cost does not depend on the number of pairs.

    Args:
        capture: what :func:`normscope.capture` returned, or the path of its file.
        curves: names of curves (``dyt`` is tanh, ``dyisru`` is isru, ``derf`` is erf with shift), formulas
            (``mine=x/(1+abs(x))``), or :class:`normscope.Curve`; ``all`` for every built-in curve with the form,
            ``free`` for E[y|x] itself, and ``best`` for the curve of least held-out error among all with as many free
            parameters as tanh.
        per: ``site``; or ``channel``, for a capture taken with ``per_channel``.
        pool: fit sites together: by ``placement``, by ``kind`` (paths that differ in numbers alone), or ``all``.
        amplitude: ``free``; or ``theory``, where A·f tends to √d, or √(d−1) with centring.
        theory: fit nothing: A as above, and the slope at the origin of the token of mean ρ.
        alpha: fix α; 1 is the ablation without α.
        shift: fit s for every curve, so that all have the same freedom; erf is then called derf. By default s is
            fitted for derf alone, which is not ranked against curves without it.
        weights_by: ``pairs`` alike; by ``gamma``², the error that reaches the next layer, for a capture taken with
            ``by_gamma``; or evenly over ``x``, so that the tails count as much as the centre.

    Returns:
        One :class:`CurveFit` for each site (or channel, or pool) and curve, sites first: a list that is also indexed
        as ``fits["norm"]`` and ``fits["norm", "tanh"]``.

    Raises:
        UsageError: if there is no such curve, level or form, or if they contradict one another.
        DataError: if the capture lacks the sums that are needed.

    >>> import normscope, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 4, generator=torch.Generator().manual_seed(0))])
    >>> fits = fit(seen, "dyt")
    >>> fits["1", "tanh"] is fits[0], fits
    (True, 1 CurveFit: 1 site × 1 curve)
    """
    capture = load_capture(capture) if isinstance(capture, (str, Path)) else capture
    form = FitForm(amplitude, theory, alpha, shift)
    requested = _requested(curves, form)
    levels = fit_targets(capture, per=per, pool=pool, weights_by=weights_by)
    for level in levels:
        if form.needs_bound and not math.isfinite(level.bound):
            level.nothing = level.nothing or "no bound on y"
    abouts = [_about(level, capture, weights_by) for level in levels]
    fits = {
        number: [_nothing(level, each, form, abouts[number]) for each in requested]
        for number, level in enumerate(levels)
        if level.nothing is not None
    }
    for numbers, problems in batches(levels):
        fits |= zip(numbers, _fits(problems, requested, form, [abouts[number] for number in numbers]), strict=True)
    return Records(each for number in sorted(fits) for each in fits[number])


def check_fit(
    curves: str | Curve | Sequence[str | Curve],
    *,
    per: str = "site",
    pool: str | None = None,
    weights_by: str = "pairs",
    **form: Any,
) -> None:
    """Refuse arguments that :func:`fit` would refuse for any capture; UsageError."""
    _requested(curves, FitForm(**form))
    check_levels(per, pool, weights_by)


def _requested(curves: str | Curve | Sequence[str | Curve], form: FitForm) -> list[str | Curve]:
    """Curves in a form, and then ``free`` and ``best``; UsageError where a curve that was named has no such form."""
    parts = split_names(curves) if isinstance(curves, str) else curves if isinstance(curves, Iterable) else [curves]
    words = {part.strip().lower() for part in parts if isinstance(part, str)}
    named = [part for part in parts if not isinstance(part, str) or part.strip().lower() not in (FREE, BEST)]
    every = curves_named(named)
    for curve in curves_named([part for part in named if isinstance(part, Curve) or part.strip().lower() != "all"]):
        if refusal := form.refusal(curve):
            raise UsageError(refusal)
    return [*_in_form(every, form).values(), *(word for word in (FREE, BEST) if word in words)]


def _in_form(curves: Iterable[Curve], form: FitForm) -> dict[str, Curve]:
    """Curves that support a form, by their names in it (erf with a shift is derf)."""
    return {form.called(curve).name: form.called(curve) for curve in curves if not form.refusal(curve)}


def _about(level: FitTarget, capture: Capture, weights_by: str) -> Attributes:
    """Attributes that all fits of a level share."""
    return {
        **{name: capture.about[name] for name in ("model", "weights", "data")},
        **{name: getattr(level, name) for name in ("site", "sites", "channel", "x_repeats")},
        "weights_by": weights_by,
        "folds": level.fold_by,
        "norm": next((site for site in capture.sites if site.name == level.site), None),
        "n_pairs": int(level.counts.sum()),
    }


def _nothing(level: FitTarget, requested: str | Curve, form: FitForm, about: Attributes) -> CurveFit:
    """Record of a level with nothing to fit."""
    curve = requested if isinstance(requested, Curve) else replace(CURVES["linear"], name=requested)
    return CurveFit(
        **about,
        curve=curve.name,
        function=curve,
        form=form.words(curve),
        parameters=len(form.parameters(curve)) if isinstance(requested, Curve) else None,
        nothing=level.nothing,
    )


def _fits(
    problems: FitBatch, requested: Sequence[str | Curve], form: FitForm, abouts: Sequence[Attributes]
) -> list[list[CurveFit]]:
    """Fit the requested curves to a batch; return the records of each level."""
    curves = {curve.name: curve for curve in requested if isinstance(curve, Curve)}
    if BEST in requested:
        curves = _in_form(curves_named("all"), form) | curves
    rows, held_out = {}, {}
    for name, curve in curves.items():
        rows[name], held_out[name] = fitted(problems, curve, form)
    for parameters in {of_curve[0]["parameters"] for of_curve in rows.values()}:
        # A shift for some curves only would decide the ranking.
        alike = [name for name, of_curve in rows.items() if of_curve[0]["parameters"] == parameters]
        _rank(problems, [rows[name] for name in alike], torch.stack([held_out[name] for name in alike]))
    of_levels = []
    for number, (shared, top) in enumerate(zip(abouts, ceilings(problems), strict=True)):
        about = shared | {"r2_ceiling": top.r2 if top else None}
        of_top = {"r2_ceiling": top.interval} if top and top.interval else {}
        fits = {}
        for name, of_curve in rows.items():
            intervals = of_curve[number].pop("intervals") | of_top
            fits[name] = CurveFit(**about, **of_curve[number], intervals=intervals)
        if BEST in requested:
            parameters = len(form.parameters(CURVES["tanh"]))
            best = next(each for each in fits.values() if each.rank == 1 and each.parameters == parameters)
            fits[best.curve] = fits[BEST] = replace(best, best=True)
        if FREE in requested:
            fits[FREE] = _free(problems.levels[number], top, about | {"intervals": of_top})
        chosen = [fits[each.name if isinstance(each, Curve) else each] for each in requested]
        of_levels.append(list({each.curve: each for each in chosen}.values()))
    return of_levels


def _rank(problems: FitBatch, rows: Sequence[Sequence[Attributes]], held_out: Tensor) -> None:
    """Rank curves with equally many free parameters by held-out error, or by error without folds.

    Args:
        problems: the batch.
        rows: of each curve and problem, to which ``rank`` and ``in_noise`` are added.
        held_out: squared error of each held-out fold, ``(curves, problems, folds)``.
    """
    has_folds = problems.occupied.sum(-1) > 1
    r2 = torch.tensor([[row["r2"] for row in of_curve] for of_curve in rows], dtype=torch.float64)
    errors = torch.where(has_folds, held_out.sum(-1), 1 - r2).nan_to_num(torch.inf)
    places = errors.argsort(dim=0, stable=True).argsort(dim=0) + 1
    best = held_out[errors.argmin(0), torch.arange(len(problems))]
    pairs = problems.n_pairs.where(problems.occupied, 0.0)
    for of_curve, rank, errors_of_folds in zip(rows, places, held_out, strict=True):
        in_noise = inside_noise(errors_of_folds, best, pairs)
        for row, place, near, tells in zip(of_curve, rank.tolist(), in_noise.tolist(), has_folds.tolist(), strict=True):
            row |= {"rank": place, "in_noise": near if tells else None}


def _free(level: FitTarget, top: Ceiling | None, about: Attributes) -> CurveFit:
    """Record of E[y|x] itself, scored on the bins that it is made of."""
    moments = level.moments.sum(0)
    curve = free(moments, level.counts.sum(0), top)
    nodes = nodes_of(moments[None])
    steepness = curve.derivative(nodes.x).abs() / curve.peak
    errors = goodness(nodes, tails(nodes), curve.function(nodes.x), steepness)
    return CurveFit(
        **about | {name: float(values) for name, values in errors.items()},
        curve=FREE,
        function=curve,
        form=FREE,
        amplitude=1.0,
        alpha=1.0,
        shift=0.0,
        r2_cv=top.r2_free if top else None,
        converged=True,
    )
