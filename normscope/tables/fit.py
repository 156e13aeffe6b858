"""Fits and advice as tables for a terminal: a row a site and curve."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from normscope.errors import count
from normscope.fits.curves.known import FREE
from normscope.tables.table import NARROWEST_NAME, as_cell, new_table, table_by_site, unbroken, with_interval

if TYPE_CHECKING:
    from normscope.fits.curve_fit import CurveFit
    from normscope.fits.views.advice import Advice, StartingValue
    from normscope.fits.views.summaries import Layerwise, TokenSlopes


_NONE = "–"
_PASSES = 1.0005  # which the table prints as more than 1
_SIGMOID = "sigmoid has no offset here; with one it would be tanh, as 1/(1 + e^−u) = (1 + tanh(u/2))/2"


def fits_table(fits: Sequence[CurveFit]) -> Table:
    """One line a site and curve; where the pairs do not bend, A and α give way to the word 'straight'."""
    shifted = any(found.shift for found in fits if not found.degenerate)
    table = _by_site(
        *("params", "A", "α", *(["s"] if shifted else []), "slope", "R²", "ceiling", "of it"),
        *("RMSE", "tail", "sat.", "rank"),
    )
    previous, rivals = None, Counter((found.site, found.channel, found.parameters) for found in fits)
    for found in fits:
        site = "" if found.site == previous else as_cell(found.site)
        previous = found.site
        if found.nothing is not None:
            table.add_row(site, as_cell(found.curve), found.nothing)
            continue
        shape = [
            _shape(found),
            _with_interval(found, "alpha", "{:.4g}") if found.told_apart else _NONE if found.curve == FREE else "",
            *([f"{found.shift:.3g}" if found.shift else _NONE] if shifted else []),
        ]
        table.add_row(
            site,
            as_cell(found.curve) + (" *" if found.best else ""),
            _NONE if found.parameters is None else str(found.parameters),
            *shape,
            _slope(found),
            _with_interval(found, "r2", "{:.4f}"),
            _with_interval(found, "r2_ceiling", "{:.4f}"),
            _or_none(found.of_ceiling, "{:.3f}"),
            f"{found.rmse:.4g}",
            f"{found.tail_rmse:.4g}",
            _or_none(found.saturated, "{:.1%}"),
            _rank(found) if rivals[found.site, found.channel, found.parameters] > 1 else _NONE,
        )
    table.caption = " · ".join(_explained(fits))
    return unbroken(table)


def channels_table(fits: Sequence[CurveFit]) -> Table:
    """One line a site and curve: quantiles over the channels, whose fits are in the JSON document and the rows."""
    table = _by_site("channels", "bend", "nothing", "A", "α 5 %", "α", "α 95 %", "R² 5 %", "R²", "R² 95 %")
    previous = None
    for (site, curve), own in _grouped(fits, lambda found: (found.site, found.curve)):
        fitted = [found for found in own if not found.degenerate]
        bend = [found for found in fitted if found.told_apart]
        table.add_row(
            "" if site == previous else as_cell(site),
            as_cell(curve),
            str(len(own)),
            str(len(bend)),
            str(len(own) - len(fitted)),
            _quantile([found.amplitude for found in bend], 0.5),
            *(_quantile([found.alpha for found in bend], share) for share in (0.05, 0.5, 0.95)),
            *(_quantile([found.r2 for found in fitted], share) for share in (0.05, 0.5, 0.95)),
        )
        previous = site
    table.caption = (
        f"y ≈ {_formula(fits)} in each channel, without folds; medians, 5th and 95th percentiles over the channels: "
        "A and α of those that bend, R² of all that have something to fit. --json, --csv and -o hold every channel."
    )
    return unbroken(table)


def slopes_table(slopes: Sequence[TokenSlopes]) -> Table:
    """One line a site: how the slopes of its tokens' lines are distributed."""
    shares = list(slopes[0].slopes) if slopes else []
    table = table_by_site("tokens", *(f"{share:.0%}" for share in shares), "95:5", "error")
    for own in slopes:
        numbers = [*own.slopes.values(), own.ratio]
        cells = [f"{number:.4g}" if math.isfinite(number) else _NONE for number in numbers]
        error = f"{own.largest_error:.1g}" if own.drawn else _NONE
        table.add_row(as_cell(own.site), f"{own.n_tokens:,}", *cells, error)
    drawn = sum(own.drawn for own in slopes)
    table.caption = (
        "Each token is a line, exactly: its slope is 1/σ (1/ρ without centring). Percentiles over all tokens, and how "
        f"many times the 5th the 95th is; error: largest |y − line| among the elements of {drawn:,} drawn tokens."
    )
    return unbroken(table)


def layerwise_line(found: Layerwise) -> str:
    """The two figures of arXiv 2605.14047, in words."""
    return (
        f"mean R² over {found.sites} sites: {found.r2:.3f} with {found.func} everywhere, {found.r2_best:.3f} with the "
        f"best of {count(found.curves, 'curve')} at each, with {count(found.parameters or 0, 'free parameter')} each"
    )


def _by_site(*names: str) -> Table:
    table = table_by_site("func", *names)
    table.columns[1].justify = "left"
    return table


def _shape(found: CurveFit) -> str:
    return _NONE if found.curve == FREE else found.doubt or f"{found.amplitude:.4g}"


def _slope(found: CurveFit) -> str:
    """The slope at the origin; of a power law, the law."""
    if found.doubt == "power law":
        return f"{found.coefficient:.4g}·|x|^{found.function.power_at_origin:.3g}"
    return _or_none(found.slope, "{:.4g}")


def _with_interval(found: CurveFit, name: str, form: str) -> str:
    value = getattr(found, name)
    return with_interval(_or_none(value, form), found.intervals.get(name))


def _rank(found: CurveFit) -> str:
    if found.rank is None:
        return _NONE
    return f"{found.rank}{'≈' if found.in_noise and found.rank > 1 else ''}"


def _or_none(value: float | None, form: str) -> str:
    return _NONE if value is None or not math.isfinite(value) else form.format(value)


def _explained(fits: Sequence[CurveFit]) -> Iterable[str]:
    """What the columns mean, as far as there is something in them."""
    weighted = {"gamma": ", pairs weighted by γ²", "x": ", pairs weighted evenly over x"}
    yield f"y ≈ {_formula(fits)}{weighted.get(fits[0].weights_by, '') if fits else ''}; fitted: {_forms(fits)}"
    over = ", ".join(sorted({found.folds for found in fits if found.folds}))
    if over:
        yield f"±: half of the 95 % interval, a jackknife over folds by {over}"
        yield "ceiling: R² of the best held-out function of x that was found; of it: the curve's held-out R² over that"
    else:
        yield "no folds, and so no intervals and no ceiling"
    if passing := dict.fromkeys(as_cell(found.curve) for found in fits if (found.of_ceiling or 0) > _PASSES):
        yield f"of it above 1: {', '.join(passing)} predicts held-out folds better than what the others chose"
    yield "tail: RMSE beyond the 99th percentile of |x|; sat.: pairs where |f′| is under 5 % of its peak"
    if len({found.parameters for found in fits if found.parameters is not None}) > 1:
        yield "rank: among curves with as many free parameters (params)"
    if any(found.doubt == "power law" for found in fits):
        yield "power law: the pairs tell A and α not apart, only the law k·|x|^p, with the sign of x, under slope"
    if any(found.in_noise and found.rank and found.rank > 1 for found in fits):
        yield "≈: no worse than the first but for noise"
    if any(found.best for found in fits):
        yield "*: the best"
    if any(found.curve == "sigmoid" for found in fits):
        yield _SIGMOID


def _forms(fits: Sequence[CurveFit]) -> str:
    """What was fitted of most curves, and of each that differs."""
    forms = {found.curve: found.form for found in fits if found.curve != FREE}
    usual = max(forms.values(), key=list(forms.values()).count, default="E[y|x]")
    return "; ".join([usual, *(f"{curve}: {form}" for curve, form in forms.items() if form != usual)])


def _formula(fits: Sequence[CurveFit]) -> str:
    return "A·f(αx + s)" if any(found.shift for found in fits if not found.degenerate) else "A·f(αx)"


def _quantile(values: Sequence[float], share: float) -> str:
    return f"{np.quantile(values, share):.4g}" if values else _NONE


def _grouped(
    fits: Sequence[CurveFit], key: Callable[[CurveFit], tuple[str, str]]
) -> Iterable[tuple[tuple[str, str], list[CurveFit]]]:
    order = {name: number for number, name in enumerate(dict.fromkeys(map(key, fits)))}
    ordered = sorted(fits, key=lambda found: order[key(found)])
    return ((name, list(own)) for name, own in groupby(ordered, key))


def advice_table(advice: Sequence[Advice]) -> Table:
    """One line a kind of site and curve: where its point-wise functions start, and what was published for such."""
    from normscope.fits.views.advice import NOTE

    table = new_table()
    table.add_column("kind of site", overflow="fold", min_width=NARROWEST_NAME)
    for name in ("func", "feeds"):
        table.add_column(name, no_wrap=True)
    shifted = any(found.shift and (found.shift.least or found.shift.most) for found in advice)
    for name in ("α", "C", *(["s"] if shifted else []), "A", "sites"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("left out", overflow="fold", min_width=8)
    table.add_column("published α₀", overflow="fold", min_width=NARROWEST_NAME)
    kind = None
    for found in advice:
        table.add_row(
            "" if found.kind == kind else as_cell(found.kind),
            found.curve,
            found.feeds or "unknown",
            _start(found.alpha),
            "–" if found.C is None else f"{found.C:.3g}",
            *([_start(found.shift)] if shifted else []),
            _start(found.amplitude),
            str(found.sites),
            _left_out(found),
            f"{found.published.alpha:g} ({found.published.of})" if found.published else "–",
        )
        kind = found.kind
    table.caption = f"Medians of the sites of a kind that bend; in brackets, their range. {NOTE}"
    return unbroken(table)


def _start(start: StartingValue | None) -> str:
    if start is None:
        return "–"
    if start.least == start.most:
        return f"{start.value:.3g}"
    return f"{start.value:.3g} ({start.least:.3g} to {start.most:.3g})"


def _left_out(found: Advice) -> str:
    numbers = ((found.straight, "straight"), (found.not_converged, "not converged"), (found.nothing, "nothing to fit"))
    return ", ".join(f"{number} {why}" for number, why in numbers if number) or "–"
