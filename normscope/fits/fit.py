"""From a capture to curves: one CurveFit per norm site and curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.curves.expressions import curves_named, split_names
from normscope.curves.known import BEST, CURVES, FREE, Curve
from normscope.errors import UsageError
from normscope.fits.ceiling import Ceiling, ceilings, free
from normscope.fits.curve_fit import CurveFit, about_site
from normscope.fits.form import FitForm
from normscope.fits.jackknife import Attributes, fitted, inside_noise
from normscope.fits.nodes import FitBatch, batches, goodness, nodes_of
from normscope.fits.sinks import Sink, sink_of, without_first
from normscope.fits.targets import POINTWISE, FitTarget, as_capture, check_targets, fit_targets
from normscope.pairs.captures import Capture
from normscope.runtime.records import Records

_TIE = 1e-6  # of R²: bins resolve no smaller difference


def fit(
    capture: Capture | str | Path,
    curves: str | Curve | Sequence[str | Curve] = ("tanh", "isru"),
    *,
    per: str = "site",
    pool: str | None = None,
    amplitude: str = "free",
    theory: bool = False,
    alpha: float | None = None,
    shift: bool = True,
    weights_by: str = "pairs",
) -> Records[CurveFit]:
    """Fit curves y ≈ A·f(αx + s) to every site of a capture, from its binned sums, whatever the number of pairs.

    s lies inside f and moves the curve along x. It is not the bias of a DyT layer, which is added to the output. Every
    curve has one, so that all have the same freedom; erf with s is called derf.

    Args:
        capture: result of :func:`normscope.capture`, or the path of its file.
        curves: names of curves (``dyt`` is tanh, ``dyisru`` is isru, ``derf`` is erf), formulas
            (``mine=x/(1+abs(x))``), or :class:`normscope.curves.known.Curve`; ``all`` for every built-in curve
            with the form, ``free`` for E[y|x] itself, and ``best`` for the curve of least held-out error among all with
            as many free parameters as tanh.
        per: ``site``; or ``channel``, for a capture taken with ``per_channel``.
        pool: fit sites together: by ``placement``, by ``kind`` (paths that differ in numbers alone), or ``all``.
        amplitude: ``free``; or ``theory``, where A·f tends to √d, or √(d−1) with centring.
        theory: fit nothing: A as above, and the slope at the origin of the token of mean ρ.
        alpha: fix α; 1 is the ablation without α.
        shift: fit s. If False, curves are the papers' A·f(αx), and derf is erf. Three cases have no s in any case:
            theory; softcap, which is t·tanh(x/t); and curves that rise vertically, whose centre bins do not resolve.
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
    capture = as_capture(capture, "fit")
    form = FitForm(amplitude, theory, alpha, shift)
    requested = requested_curves(curves, form)
    targets = fit_targets(capture, per=per, pool=pool, weights_by=weights_by)
    for target in targets:
        if form.needs_bound and not math.isfinite(target.bound):
            target.nothing = target.nothing or "no bound on y"
        if form.theory and math.isnan(target.slope):
            target.nothing = target.nothing or POINTWISE
    abouts = [_about(target, capture, weights_by) for target in targets]
    fits = _fit_targets(targets, requested, form, abouts)
    if per == "site" and pool is None:
        sinks = [sink_of(capture.stats[target.site]) for target in targets]
        first = [n for n, sink in enumerate(sinks) if sink and sink.position == capture.skip and not targets[n].nothing]
        first = first if weights_by == "pairs" and not theory else []
        functions = {fit.curve: fit.function for n in first for fit in fits[n] if fit.curve != FREE}
        without_sink = [without_first(targets[n], capture.stats[targets[n].site]) for n in first]
        refits = _fit_targets(without_sink, list(functions.values()), form, [abouts[n] for n in first])
        r2 = {(fit.site, fit.curve): fit.r2 for fit in itertools.chain(*refits) if not fit.degenerate}
        for row, sink in zip(fits, sinks, strict=True):
            row[:] = [_with_sink(fit, sink, r2) for fit in row] if sink else row
    return Records(itertools.chain(*fits))


def _with_sink(fit: CurveFit, sink: Sink, r2_without: Mapping[tuple[str, str], float]) -> CurveFit:
    r2 = None if fit.degenerate else fit.r2
    return replace(fit, sink=replace(sink, curve=fit.curve, r2=r2, r2_without=r2_without.get((fit.site, fit.curve))))


def _fit_targets(
    targets: Sequence[FitTarget], requested: Sequence[str | Curve], form: FitForm, abouts: Sequence[Attributes]
) -> list[list[CurveFit]]:
    """Fit the requested curves to each target."""
    fits = {
        number: [_nothing(target, curve, form, abouts[number]) for curve in requested]
        for number, target in enumerate(targets)
        if target.nothing is not None
    }
    for numbers, problems in batches(targets):
        fits |= zip(numbers, _fits(problems, requested, form, [abouts[number] for number in numbers]), strict=True)
    return [fits[number] for number in sorted(fits)]


def check_fit(
    curves: str | Curve | Sequence[str | Curve],
    *,
    per: str = "site",
    pool: str | None = None,
    weights_by: str = "pairs",
    **form: Any,
) -> None:
    """Raise the UsageError of :func:`fit` for arguments that it refuses for any capture."""
    requested_curves(curves, FitForm(**form))
    check_targets(per, pool, weights_by)


def requested_curves(curves: str | Curve | Sequence[str | Curve], form: FitForm) -> list[str | Curve]:
    """Return curves in a form, then ``free`` and ``best``; UsageError if a curve that was named has no such form."""
    names = split_names(curves) if isinstance(curves, str) else curves if isinstance(curves, Iterable) else [curves]
    words = {name: name.strip().lower() if isinstance(name, str) else None for name in names}
    named = [name for name, word in words.items() if word not in (FREE, BEST)]
    every = curves_named(named)
    for curve in curves_named([name for name in named if words[name] != "all"]):
        if refusal := form.refusal(curve):
            raise UsageError(refusal)
    return [*_in_form(every, form).values(), *(word for word in (FREE, BEST) if word in words.values())]


def _in_form(curves: Iterable[Curve], form: FitForm) -> dict[str, Curve]:
    """Curves that support a form, by their names in it (erf with a shift is derf)."""
    return {form.called(curve).name: form.called(curve) for curve in curves if not form.refusal(curve)}


def curves_in(curves: str | Curve | Sequence[str | Curve], form: FitForm) -> list[Curve]:
    """Return the named curves in a form; UsageError for ``free`` and ``best``, which are none."""
    requested = requested_curves(curves, form)
    if words := [curve for curve in requested if not isinstance(curve, Curve)]:
        raise UsageError(f"{words[0]} is no curve with A and α. Name curves, such as tanh and isru.")
    return [curve for curve in requested if isinstance(curve, Curve)]


def _about(target: FitTarget, capture: Capture, weights_by: str) -> Attributes:
    """Attributes that all fits of a target share."""
    return {
        **about_site(capture, target.site),
        **{"sites": target.sites, "channel": target.channel, "x_repeats": target.x_repeats},
        "weights_by": weights_by,
        "folds": target.fold_by,
        "norm": next((site for site in capture.sites if site.name == target.site), None),
        "n_pairs": int(target.counts.sum()),
    }


def _nothing(target: FitTarget, requested: str | Curve, form: FitForm, about: Attributes) -> CurveFit:
    curve = requested if isinstance(requested, Curve) else replace(CURVES["linear"], name=requested)
    return CurveFit(
        **about,
        curve=curve.name,
        function=curve,
        form=form.words(curve),
        parameters=len(form.parameters(curve)) if isinstance(requested, Curve) else None,
        nothing=target.nothing,
    )


def _fits(
    problems: FitBatch, requested: Sequence[str | Curve], form: FitForm, abouts: Sequence[Attributes]
) -> list[list[CurveFit]]:
    """Fit the requested curves to a batch; return the records of each target."""
    curves = {curve.name: curve for curve in requested if isinstance(curve, Curve)}
    if BEST in requested:
        curves = _in_form(curves_named("all"), form) | curves
    rows, held_out = {}, {}
    for name, curve in curves.items():
        rows[name], held_out[name] = fitted(problems, curve, form)
    for parameters in {row["parameters"] for row, *_ in rows.values()}:
        # A shift for some curves only would decide the ranking.
        alike = [name for name, (row, *_) in rows.items() if row["parameters"] == parameters]
        _rank(problems, [rows[name] for name in alike], torch.stack([held_out[name] for name in alike]))
    records = []
    tops = ceilings(problems, fitted=list(held_out.values()))
    for number, (shared, top) in enumerate(zip(abouts, tops, strict=True)):
        target_rows = {name: column[number] for name, column in rows.items()}
        # The ceiling adds up the same errors in another order: to the last bit it is none of theirs.
        scores = [row["r2_cv"] for row in target_rows.values() if row["r2_cv"] is not None]
        about = shared | {"r2_ceiling": max(top.r2, *scores, -math.inf) if top else None}
        bounds = {"r2_ceiling": top.interval} if top and top.interval else {}
        fits = {
            name: CurveFit(**about | row | {"intervals": row["intervals"] | bounds})
            for name, row in target_rows.items()
        }
        if BEST in requested:
            parameters = len(form.parameters(CURVES["tanh"]))
            best = next(fit for fit in fits.values() if fit.rank == 1 and fit.parameters == parameters)
            fits[best.curve] = fits[BEST] = replace(best, best=True)
        if FREE in requested:
            fits[FREE] = _free(problems.targets[number], top, about | {"intervals": bounds})
        selected = [fits[curve.name if isinstance(curve, Curve) else curve] for curve in requested]
        records.append(list({fit.curve: fit for fit in selected}.values()))
    return records


def _rank(problems: FitBatch, rows: Sequence[Sequence[Attributes]], held_out: Tensor) -> None:
    """Add ``rank`` and ``in_noise`` to the rows of curves with equally many free parameters.

    The squared errors of held-out folds, ``(curves, problems, folds)``, decide; without folds R² does.
    """
    has_folds = problems.occupied.sum(-1) > 1
    r2 = torch.tensor([[row["r2"] for row in curve_rows] for curve_rows in rows], dtype=torch.float64)
    errors = torch.where(has_folds, held_out.sum(-1) / problems.nodes().total, 1 - r2).nan_to_num(torch.inf)
    ranks = 1 + (errors[:, None] < errors - _TIE).sum(0)
    best = held_out[errors.argmin(0), torch.arange(len(problems))]
    pairs = problems.n_pairs.where(problems.occupied, 0.0)
    for curve_rows, curve_ranks, fold_errors in zip(rows, ranks.tolist(), held_out, strict=True):
        in_noise = inside_noise(fold_errors, best, pairs).tolist()
        for row, rank, near, has in zip(curve_rows, curve_ranks, in_noise, has_folds.tolist(), strict=True):
            row |= {"rank": rank, "in_noise": near if has else None}


def _free(target: FitTarget, top: Ceiling | None, about: Attributes) -> CurveFit:
    """Record of E[y|x] itself, scored on the bins that it was estimated from."""
    moments = target.moments.sum(0)
    curve = free(moments, target.counts.sum(0), top)
    ones = torch.ones(1, dtype=torch.float64)
    errors = goodness(nodes_of(moments[None]), curve, ones, ones, 0 * ones)
    errors["saturated"] = torch.full((1,), torch.nan)  # where E[y|x] is flat is noise
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
