"""Fits as tables for a terminal: a row a site and curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from normscope.curves.known import FREE
from normscope.errors import count
from normscope.fits.saturation import MODULE
from normscope.runtime.files import visible
from normscope.show.tables.card import sink_sentence
from normscope.show.tables.table import (
    NONE,
    Column,
    TextTable,
    measured,
    names,
    number,
    percent,
    several,
    table_of,
    words,
)

if TYPE_CHECKING:
    from normscope.fits.comparison import Compared, Comparison, Ratio
    from normscope.fits.curve_fit import CurveFit
    from normscope.fits.layerwise import Layerwise
    from normscope.fits.scale import TokenSlopes


def fits_table(fits: Sequence[CurveFit]) -> TextTable:
    """Make a table with one line per site and curve; 'straight' replaces A and α that are not identifiable."""
    rivals = Counter((fit.site, fit.channel, fit.parameters) for fit in fits)
    functions = any(fit.curve == MODULE for fit in fits)
    held_out = any(fit.r2_cv is not None for fit in fits)  # as the ceiling is: it stays where R² itself has no room

    def rank(fit: CurveFit) -> str:
        if fit.rank is None or rivals[fit.site, fit.channel, fit.parameters] == 1:
            return NONE
        return f"{fit.rank}{'≈' if fit.in_noise and fit.rank > 1 else ''}"

    columns: list[Column[CurveFit]] = [
        names("site", lambda fit: fit.site, once=True),
        words("curve", lambda fit: fit.curve + (" *" if fit.best else "")),
        *several(("params", "A", "α"), _shape, (9, 1, 0)),
        Column("s", lambda fit: _with_interval(fit, "shift") if fit.shift else NONE, _shifted(fits), drop=4),
        Column("slope", lambda fit: _with_interval(fit, "slope", half=False), drop=6),
        Column("R²", lambda fit: _with_interval(fit, "r2", ".4f"), drop=3 if held_out else 0),
        Column("held-out R²", lambda fit: measured(fit.r2_cv, fit.intervals.get("r2"), ".4f", half=False), held_out),
        Column("ceiling", lambda fit: _with_interval(fit, "r2_ceiling", ".4f", half=False), drop=2),
        Column("RMSE", lambda fit: number(fit.rmse, ".4g"), drop=7),
        Column("tail", lambda fit: number(fit.tail_rmse, ".4g"), drop=8),
        Column("saturated", lambda fit: number(fit.saturated, ".1%"), drop=2 if functions else 10),
        Column("rank", rank, drop=5),
    ]

    def nothing(fit: CurveFit) -> str | None:
        return fit.nothing and f"{fit.site}: {fit.nothing}"

    return table_of(fits, columns, caption=_caption(fits), about="fit", remark=nothing, named=2)


def channels_table(fits: Sequence[CurveFit]) -> TextTable:
    """Make a table with one line per site and curve: quantiles over the channels."""
    groups: dict[tuple[str, str], list[CurveFit]] = {}
    for fit in fits:
        groups.setdefault((fit.site, fit.curve), []).append(fit)
    columns: list[Column[list[str]]] = [
        names("site", lambda row: row[0], once=True),
        words("curve", lambda row: row[1]),
        *several(
            ("channels", "bend", "nothing", "A", "α 5%", "α", "α 95%", "R² 5%", "R²", "R² 95%"),
            lambda row: row[2:],
            (3, 2, 4, 0, 1, 0, 1, 1, 0, 1),
        ),
    ]
    caption = [
        f"y ≈ {_formula(fits)} in each channel, without folds; medians, 5th and 95th percentiles over the channels, "
        "of A and α of those that bend, and of R² of all that have something to fit. --json and -o contain all."
    ]
    return table_of([[*key, *_over_channels(group)] for key, group in groups.items()], columns, caption=caption)


def slopes_table(slopes: Sequence[TokenSlopes]) -> TextTable:
    """Make a table with one line per site: quantiles of its tokens' slopes."""
    shares = list(slopes[0].slopes) if slopes else []
    columns: list[Column[TokenSlopes]] = [
        names("site", lambda row: row.site),
        Column("tokens", lambda row: f"{row.n_tokens:,}", drop=2),
        *several(
            [*(percent(share) for share in shares), "95:5"],
            lambda row: [number(value, ".4g") for value in (*row.slopes.values(), row.ratio)],
            [int(not 0.05 <= share <= 0.95) for share in shares],
        ),
        Column("error", lambda row: f"{row.largest_error:.1g}" if row.drawn else NONE, drop=3),
    ]
    caption = [
        "Each token is a line, exactly: its slope is 1/σ (1/ρ without centring). Percentiles over all tokens",
        f"{sum(row.drawn for row in slopes):,} drawn tokens",
    ]
    return table_of(slopes, columns, caption=caption, about="fit --per token")


def layerwise_line(means: Layerwise) -> str:
    """Return the two mean R² of arXiv 2605.14047 as a sentence."""
    return (
        f"mean R² (of all pairs) over {means.sites} sites: {means.r2:.3f} with {means.func} everywhere, "
        f"{means.r2_best:.3f} with the best of {count(means.curves, 'curve')} at each, "
        f"with {count(means.parameters or 0, 'free parameter')} each"
    )


def _shifted(fits: Sequence[CurveFit]) -> bool:
    return any(fit.shift for fit in fits if not fit.degenerate)


def _shape(fit: CurveFit) -> list[str]:
    """Number of parameters, A and α, or why there are none."""
    parameters = NONE if fit.parameters is None else str(fit.parameters)
    alpha = _with_interval(fit, "alpha") if fit.identified else "" if fit.doubt else NONE
    return [parameters, fit.doubt or _with_interval(fit, "amplitude"), alpha]


def _with_interval(fit: CurveFit, name: str, form: str = ".4g", *, half: bool = True) -> str:
    return measured(getattr(fit, name), fit.intervals.get(name), form, half=half)


def _over_channels(fits: Sequence[CurveFit]) -> list[str]:
    fitted = [fit for fit in fits if not fit.degenerate]
    bend = [fit for fit in fitted if fit.identified]
    alphas, r2 = [fit.alpha for fit in bend], [fit.r2 for fit in fitted]
    return [
        *(str(len(fits)), str(len(bend)), str(len(fits) - len(fitted))),
        _quantile([fit.amplitude for fit in bend], 0.5),
        *(_quantile(values, share) for values in (alphas, r2) for share in (0.05, 0.5, 0.95)),
    ]


def _caption(fits: Sequence[CurveFit]) -> Iterable[str]:
    """Yield the formula and what the columns have in common; the glossary defines each."""
    weighted = {"gamma": ", pairs weighted by γ²", "x": ", pairs weighted evenly over x"}
    weights = weighted.get(fits[0].weights_by, "") if fits else ""
    # The form that was fitted of most curves, and of each that differs.
    forms = {fit.curve: fit.form for fit in fits if fit.curve != FREE}
    usual = max(forms.values(), key=list(forms.values()).count, default="E[y|x]")
    fitted = "; ".join([usual, *(f"{curve}: {form}" for curve, form in forms.items() if form != usual)])
    yield f"y ≈ {_formula(fits)}{weights}; fitted: {fitted}"
    yield _folds(fits)
    if sink := sink_sentence(fits):
        yield sink
    if low := dict.fromkeys(fit.site for fit in fits if fit.x_repeats and fit.r2_ceiling is not None):
        where = visible(", ".join(low))
        yield f"ceiling underestimated at {where}, where many x are identical, as in blank patches"
    if any(fit.best for fit in fits):
        yield "*: the best"
    if any(fit.curve == "sigmoid" for fit in fits):
        yield "sigmoid has no offset here; with one it would be tanh, as 1/(1 + e^−u) = (1 + tanh(u/2))/2"


def _folds(fits: Iterable[CurveFit]) -> str:
    folds = ", ".join(sorted({fit.folds for fit in fits if fit.folds}))
    if not folds:
        return "no folds, and so no intervals and no ceiling"
    return f"±: half of the 95% interval, a jackknife over folds by {folds}"


def _formula(fits: Sequence[CurveFit]) -> str:
    return "A·f(αx + s)" if _shifted(fits) else "A·f(αx)"


def _quantile(values: Sequence[float], share: float) -> str:
    return f"{np.quantile(values, share):.4g}" if values else NONE


def comparison_table(rows: Sequence[Compared]) -> TextTable:
    """Make a table with one line per site, curve and capture."""
    keys = [(row.counterpart, row.fit.curve) for row in rows]
    begins = [key != above for key, above in zip(keys, [None, *keys], strict=False)]
    differ, functions = len({row.d for row in rows}) > 1, any(row.curve == MODULE for row in rows)
    r2 = "held-out R²" if any(row.fit.r2_cv is not None for row in rows) else "R²"  # as the ceiling is
    columns: list[Column[tuple[Compared, bool]]] = [
        names("site", lambda line: line[0].fit.site if line[1] or line[0].fit.site != line[0].counterpart else ""),
        words("curve", lambda line: line[0].fit.curve if line[1] else ""),
        Column("", lambda line: str(line[0].number)),
        Column("d", lambda line: str(line[0].d), differ, drop=7),
        *several(("A", "α", "slope", r2, "ceiling"), lambda line: _numbers(line[0].fit, r2), (3, 0, 5, 0, 6)),
        Column("saturated", lambda line: number(line[0].fit.saturated, ".1%"), functions, drop=1),
        *several(("α ratio", "slope ratio", "R² of 1"), lambda line: _against_first(line[0]), (1, 4, 2)),
    ]

    def nothing(line: tuple[Compared, bool]) -> str | None:
        fit = line[0].fit
        return f"{fit.site}: nothing to fit: {fit.nothing}" if fit.degenerate else None

    caption = [_folds(row.fit for row in rows)]
    kinds = {ratio.paired for row in rows for ratio in (row.alpha, row.slope) if ratio and ratio.interval}
    if True in kinds:
        caption.append("ratios: of the same inputs, each fold is left out of both together")
    if False in kinds:
        caption.append("ratios: of different inputs, captures count as independent")
    lines = list(zip(rows, begins, strict=True))
    return table_of(lines, columns, caption=caption, about="compare", remark=nothing, named=3 + differ)


def matching_lines(comparison: Comparison) -> list[str]:
    """Describe each capture and how its sites were matched to those of the first."""
    titles = []
    for n, capture in enumerate(comparison.captures, 1):
        parts = [capture.about[key] for key in ("model", "weights", "data")]
        titles.append(f"{n}  {' · '.join(parts)} ({count(capture.n_samples, 'sample')})")
    lines = titles[:1]
    for n, (title, match) in enumerate(zip(titles[1:], comparison.matches, strict=True), 2):
        how = "by name" if match.by == "name" else "by placement and relative depth, as most names differ"
        here, there = map(len, match.unmatched)
        without = f"; without a counterpart: {here} of 1, {there} of {n}" if here or there else ""
        lines += [title, f"   {count(len(match.counterparts), 'site')} matched {how}{without}"]
    return lines


def _numbers(fit: CurveFit, heading: str) -> list[str]:
    value = fit.r2 if heading == "R²" else fit.r2_cv
    ceiling = _with_interval(fit, "r2_ceiling", ".4f", half=False)
    r2 = [measured(value, fit.intervals.get("r2"), ".4f", half=False), ceiling]
    if fit.curve == FREE:
        return [NONE, NONE, NONE, *r2]
    amplitude = _with_interval(fit, "amplitude", half=False)
    shape = [fit.doubt, ""] if fit.doubt else [amplitude, _with_interval(fit, "alpha")]
    return [*shape, _with_interval(fit, "slope", half=False), *r2]


def _against_first(row: Compared) -> list[str]:
    if row.matched is None:
        return ["", "", ""]
    return [_ratio(row.alpha), _ratio(row.slope), number(row.r2_of_first, ".4f")]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return NONE
    bounds = "({:.3g}–{:.3g})".format(*ratio.interval) if ratio.interval else ""
    value = measured(ratio.value, ratio.interval, ".3f", half=False)
    return f"{value} {bounds}".rstrip() + ("*" if ratio.in_noise is False else " ")
