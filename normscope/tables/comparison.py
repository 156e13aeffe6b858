"""Comparisons as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from normscope.errors import count
from normscope.fits.curves.known import FREE
from normscope.tables.table import as_cell, table_by_site, unbroken

if TYPE_CHECKING:
    from normscope.fits.curve_fit import CurveFit, Interval
    from normscope.fits.views.comparison import Compared, Comparison, Ratio

_RATIOS = "Ratios are to capture 1. R² of 1: of capture 1's curve on these pairs."
_INTERVALS = "In brackets: 95 %, by folds; * beyond the noise: a ratio's 95 % do not hold 1."
_PAIRED = "Of the same inputs, each fold is left out of both captures together."
_INDEPENDENT = "Of different inputs, captures count as independent."


def comparison_table(rows: Sequence[Compared]) -> Table:
    """One line a site, curve and capture; those of one site and curve follow one another."""
    several = len({row.d for row in rows}) > 1
    table = table_by_site(
        *(
            "func",
            "",
            *(["d"] if several else []),
            "A",
            "α",
            "slope",
            "R²",
            "ceiling",
            "α ratio",
            "slope ratio",
            "R² of 1",
        )
    )
    table.columns[1].justify = "left"
    table.caption = _caption(rows)
    place = None
    for row in rows:
        found = row.fit
        new = (row.counterpart, found.curve) != place
        site = found.site if new or found.site != row.counterpart else ""
        d = [str(row.d)] if several else []
        table.add_row(
            as_cell(site), found.curve if new else "", str(row.number), *d, *_numbers(found), *_against_first(row)
        )
        place = (row.counterpart, found.curve)
    return unbroken(table)


def matching_lines(comparison: Comparison) -> list[str]:
    """Say, capture by capture, what it is and how its sites were put beside those of the first."""
    titles = []
    for number, capture in enumerate(comparison.captures, 1):
        known = [capture.about[key] for key in ("model", "weights", "data")]
        titles.append(f"{number}  {' · '.join(known)} ({count(capture.n_samples, 'sample')})")
    lines = titles[:1]
    for number, (title, one) in enumerate(zip(titles[1:], comparison.matches, strict=True), 2):
        how = "by name" if one.by == "name" else "by placement and relative depth, as most names differ"
        here, there = map(len, one.unmatched)
        without = f"; without a counterpart: {here} of 1, {there} of {number}" if here or there else ""
        lines += [title, f"   {count(len(one.counterparts), 'site')} matched {how}{without}"]
    return lines


def _caption(rows: Sequence[Compared]) -> str:
    if not any(row.fit.intervals for row in rows):
        return f"{_RATIOS} No folds: no intervals, and nothing to tell differences from noise by."
    known = {ratio.paired for row in rows for ratio in (row.alpha, row.slope) if ratio and ratio.interval}
    how = [text for paired, text in ((True, _PAIRED), (False, _INDEPENDENT)) if paired in known]
    return " ".join([_RATIOS, _INTERVALS, *how])


def _numbers(found: CurveFit) -> list[str]:
    if found.degenerate:
        return [f"nothing to fit: {found.nothing}", "", "", "", ""]
    top = "–" if found.r2_ceiling is None else f"{found.r2_ceiling:.4f}"
    if found.curve == FREE:
        return ["–", "–", "–", f"{found.r2:.4f}", top]
    alpha = _with(f"{found.alpha:.4g}", found.intervals.get("alpha"))
    shape = [found.doubt, ""] if found.doubt else [f"{found.amplitude:.4g}", alpha]
    return [*shape, f"{found.slope:.4g}", f"{found.r2:.4f}", top]


def _against_first(row: Compared) -> list[str]:
    if row.matched is None:
        return ["", "", ""]
    return [_ratio(row.alpha), _ratio(row.slope), "–" if row.r2_of_first is None else f"{row.r2_of_first:.4f}"]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return _with(f"{ratio.value:.3f}", ratio.interval) + ("*" if ratio.in_noise is False else " ")


def _with(text: str, interval: Interval | None) -> str:
    return text if interval is None else f"{text} ({interval[0]:.3g}–{interval[1]:.3g})"
