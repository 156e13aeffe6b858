"""Comparisons as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from normscope.errors import count
from normscope.fits.curves.known import FREE
from normscope.tables.layout import Explanation
from normscope.tables.table import NONE, Column, names, number, several, table_of, words

if TYPE_CHECKING:
    from normscope.fits.curve_fit import CurveFit, Interval
    from normscope.fits.views.comparison import Compared, Comparison, Ratio

_OF_RATIOS = ("α ratio", "slope ratio")
_PAIRED = "Of the same inputs, each fold is left out of both captures together."
_INDEPENDENT = "Of different inputs, captures count as independent."


def comparison_table(rows: Sequence[Compared]) -> Table:
    """One line a site, curve and capture; those of one site and curve follow one another."""
    places = [(row.counterpart, row.fit.curve) for row in rows]
    begins = [place != above for place, above in zip(places, [None, *places], strict=False)]
    differ = len({row.d for row in rows}) > 1
    columns: list[Column[tuple[Compared, bool]]] = [
        names("site", lambda line: line[0].fit.site if line[1] or line[0].fit.site != line[0].counterpart else ""),
        words("curve", lambda line: line[0].fit.curve if line[1] else ""),
        Column("", lambda line: str(line[0].number)),
        Column("d", lambda line: str(line[0].d), differ, drop=7),
        *several(("A", "α", "slope", "R²", "ceiling"), lambda line: _numbers(line[0].fit), (3, 0, 5, 0, 6)),
        *several(("α ratio", "slope ratio", "R² of 1"), lambda line: _against_first(line[0]), (1, 4, 2)),
    ]
    lines = list(zip(rows, begins, strict=True))
    return table_of(lines, columns, caption=_caption(rows), remark=_nothing, named=3 + differ)


def matching_lines(comparison: Comparison) -> list[str]:
    """Say, capture by capture, what it is and how its sites were put beside those of the first."""
    titles = []
    for place, capture in enumerate(comparison.captures, 1):
        known = [capture.about[key] for key in ("model", "weights", "data")]
        titles.append(f"{place}  {' · '.join(known)} ({count(capture.n_samples, 'sample')})")
    lines = titles[:1]
    for place, (title, match) in enumerate(zip(titles[1:], comparison.matches, strict=True), 2):
        how = "by name" if match.by == "name" else "by placement and relative depth, as most names differ"
        here, there = map(len, match.unmatched)
        without = f"; without a counterpart: {here} of 1, {there} of {place}" if here or there else ""
        lines += [title, f"   {count(len(match.counterparts), 'site')} matched {how}{without}"]
    return lines


def _caption(rows: Sequence[Compared]) -> Iterator[Explanation]:
    yield Explanation("Ratios are to capture 1.", _OF_RATIOS)
    yield Explanation("R² of 1: of capture 1's curve on these pairs.", ("R² of 1",), " ")
    if not any(row.fit.intervals for row in rows):
        yield Explanation("No folds: no intervals, and nothing to tell differences from noise by.", after=" ")
        return
    yield Explanation("In brackets: 95 %, by folds", after=" ")
    yield Explanation("* beyond the noise: a ratio's 95 % do not hold 1", _OF_RATIOS, "; ")
    yield Explanation(".", after="")
    known = {ratio.paired for row in rows for ratio in (row.alpha, row.slope) if ratio and ratio.interval}
    yield from (
        Explanation(text, _OF_RATIOS, " ")
        for paired, text in ((True, _PAIRED), (False, _INDEPENDENT))
        if paired in known
    )


def _nothing(line: tuple[Compared, bool]) -> str | None:
    fit = line[0].fit
    return f"nothing to fit: {fit.nothing}" if fit.degenerate else None


def _numbers(fit: CurveFit) -> list[str]:
    top = number(fit.r2_ceiling, ".4f")
    if fit.curve == FREE:
        return [NONE, NONE, NONE, f"{fit.r2:.4f}", top]
    alpha = _with(f"{fit.alpha:.4g}", fit.intervals.get("alpha"))
    shape = [fit.doubt, ""] if fit.doubt else [f"{fit.amplitude:.4g}", alpha]
    return [*shape, f"{fit.slope:.4g}", f"{fit.r2:.4f}", top]


def _against_first(row: Compared) -> list[str]:
    if row.matched is None:
        return ["", "", ""]
    return [_ratio(row.alpha), _ratio(row.slope), number(row.r2_of_first, ".4f")]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return NONE
    return _with(f"{ratio.value:.3f}", ratio.interval) + ("*" if ratio.in_noise is False else " ")


def _with(text: str, interval: Interval | None) -> str:
    return text if interval is None else f"{text} ({interval[0]:.3g}–{interval[1]:.3g})"
