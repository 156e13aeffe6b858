"""Times of swapped networks as tables for a terminal; ours beside the published ones."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from normscope.errors import count
from normscope.swaps.reports import FUSED, BenchReport, Latency, PublishedReport, Timing
from normscope.tables.table import (
    NONE,
    AdaptiveTable,
    Column,
    Explanation,
    as_cell,
    names,
    number,
    several,
    table_of,
    words,
)

SCOPES = {"norm": "the norm alone", "model": "the whole network"}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def speed_tables(report: BenchReport) -> list[Table]:
    """One table a way, number of passes and dtype, a line a timing; what it means under the last of its scope."""
    widest = max((len(row.variant) for row in report.rows), default=0)
    tables: list[AdaptiveTable] = []
    captions: dict[int, list[Explanation]] = {}
    for scope in SCOPES:
        rows = [row for row in report.rows if row.scope == scope]
        groups = dict.fromkeys(_title(row) for row in rows)
        tables += [_table(title, [row for row in rows if _title(row) == title], widest) for title in groups]
        if rows:
            captions[len(tables) - 1] = _caption(rows, scope)
    if captions:
        captions[len(tables) - 1] += [Explanation(as_cell(line), after="\n") for line in report.left_out]
    for place, caption in captions.items():
        tables[place].explain(caption)
    return list(tables)


def duration(seconds: float) -> str:
    """Write a time with three digits in a suitable unit.

    >>> duration(0.0000632), duration(0.918835), duration(3.1)
    ('63.2 µs', '919 ms', '3.10 s')
    """
    size, unit = _unit(seconds)
    return f"{_digits(seconds / size)} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    return next((size, unit) for size, unit in _UNITS if seconds >= 0.9995 * size or unit == "µs")


def _digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _title(row: Timing) -> str:
    return " · ".join(part for part in (SCOPES[row.scope], row.way, row.passes, row.dtype, row.timer) if part)


def _table(title: str, rows: Sequence[Timing], widest: int) -> AdaptiveTable:
    alone = rows[0].scope == "norm"
    columns: list[Column[Timing]] = [
        words("", lambda row: row.variant),
        *several(("time", "min", "p20–p80", "ratio"), _times, (0, 2, 1, 0)),
        Column("GB/s", lambda row: number(row.gb_per_s, ".3g"), alone, drop=3),
        Column("copy", lambda row: number(row.share_of_copy, ".0%"), alone, drop=4),
        names("", lambda row: row.verdict),
    ]
    table = table_of(rows, columns)
    table.title, table.title_justify, table.title_style = as_cell(title), "left", ""
    table.columns[0].min_width = widest
    return table


def _times(row: Timing) -> list[str]:
    if row.median is None:
        return [NONE] * 4
    least, *ends = _in_its_unit(row, row.minimum, row.p20, row.p80)
    return [duration(row.median), least, "–".join(ends), "" if row.ratio is None else f"{row.ratio:.2f}"]


def _in_its_unit(row: Timing, *seconds: float | None) -> list[str]:
    """Write times in the unit of the median."""
    size, _ = _unit(row.median or 0)
    return [_digits((time or 0) / size) for time in seconds]


def _caption(rows: Sequence[Timing], scope: str) -> list[Explanation]:
    first, passes = rows[0], dict.fromkeys(row.passes for row in rows)
    shape = "×".join(map(str, first.shape))
    if scope == "norm":
        norms = count(first.sites, "norm")
        parts = [
            Explanation(f"One norm on random values of its real shape, {shape}, which {norms} of the network have"),
            Explanation("GB/s count x and y forward; x, y, dy and dx forward + backward", ("GB/s",), ". "),
            Explanation("copy: the share of what a copy gives", ("copy",), "; "),
        ]
    else:
        fewest = min((len(row.samples) for row in rows if row.samples), default=0)
        samples = f"{count(first.sites, 'norm')}; input {shape}; at least {count(fewest, 'sample')} of each"
        parts = [Explanation(samples + "; backward: to the gradients of all parameters" * (len(passes) > 1))]
    verdict = "min and all of p20–p80 lie below the native norm's of the same way, or above; alike: neither."
    parts += [
        Explanation("time: the median; ratio: to the native norm's.", after=". "),
        Explanation(f"faster, slower: {verdict}", after=" "),
    ]
    lines = []
    ways = {row.way for row in rows}
    if ways.intersection(FUSED):
        lines.append(
            "fused: each function by one kernel, in an eager network, beside the eager native norm. "
            "eager, compile: each in plain torch."
        )
    if "compile + fused" in ways:
        lines.append(
            "compile + fused: the same kernels in a compiled network, beside the compiled native norm. torch.compile "
            "cannot merge such a kernel with what surrounds it, as it can plain torch: compare it with compile."
        )
    compiled = [row.compile_seconds for row in rows if row.compile_seconds is not None]
    if compiled:
        lines.append(
            f"Compiled in {duration(min(compiled))} to {duration(max(compiled))} each, which is in no time above."
        )
    lines += dict.fromkeys(f"{row.variant}, {row.way}: {row.note}" for row in rows if row.note)
    return [*parts, *(Explanation(as_cell(line), after="\n") for line in lines)]


def published_table(report: PublishedReport) -> Table:
    """Our seconds beside the published ones, a line a variant, norms and passes; they were not taken on one device."""
    ours, theirs = (
        {(row.variant, row.norms, row.passes): row for row in rows} for rows in (report.rows, report.published)
    )
    columns: list[Column[tuple[str, str, str]]] = [
        words("norms", lambda key: key[0]),
        names("", lambda key: key[1]),
        names("", lambda key: key[2]),
        *several(("layer", "model"), lambda key: _seconds(ours.get(key))),
        *several(("layer, published", "model, published"), lambda key: _seconds(theirs.get(key))),
    ]
    caption = (
        f"Seconds of all passes; layer: of all norms. Ours: {report.device}, {count(report.tokens, 'token')}, "
        f"{report.n_passes} passes. Published: {report.source}, 4,096 tokens, 100 passes, bfloat16."
    )
    return table_of(dict.fromkeys((*ours, *theirs)), columns, caption="\n".join(map(as_cell, [caption, *report.notes])))


def _seconds(row: Latency | None) -> list[str]:
    return [NONE, NONE] if row is None else [f"{row.layer:.3g}", f"{row.model:.3g}"]
