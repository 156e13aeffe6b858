"""Times of norms and networks as tables."""

from __future__ import annotations

from collections.abc import Sequence

from normscope.errors import count
from normscope.runtime.files import visible
from normscope.show.tables.glossary import DEFINITIONS
from normscope.show.tables.table import NONE, Column, TextTable, names, several, table_of, words
from normscope.swaps.inits import published_name
from normscope.tools.bench.reports import BenchReport, Timing

SCOPES = {"norm": "the norm alone", "model": "the whole network"}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def speed_tables(report: BenchReport) -> list[TextTable]:
    """Make a table for each way and number of passes; captions are below the last table of each scope."""
    tables: list[TextTable] = []
    for scope in SCOPES:
        rows = [row for row in report.rows if row.scope == scope]
        groups = dict.fromkeys((row.way, row.passes) for row in rows)
        for way, passes in groups:
            tables.append(_speed_table([row for row in rows if (row.way, row.passes) == (way, passes)]))
        if rows:
            left_out = report.left_out if scope == report.rows[-1].scope else ()
            tables[-1].parts = [*_speed_caption(rows, scope), *("\n" + visible(line) for line in left_out)]
    return tables


def duration(seconds: float) -> str:
    """Write a time with three digits in a suitable unit.

    >>> duration(0.0000632), duration(0.918835), duration(3.1)
    ('63.2 µs', '919 ms', '3.10 s')
    """
    size, unit = unit_of(seconds)
    return f"{_digits(seconds / size)} {unit}"


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the size of a suitable unit in seconds, and its name."""
    return next((size, unit) for size, unit in _UNITS if seconds >= 0.9995 * size or unit == "µs")


def _digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _speed_table(rows: Sequence[Timing]) -> TextTable:
    first = rows[0]
    columns: list[Column[Timing]] = [
        words("", lambda row: published_name(row.variant)),
        *several(("time", "p25–p75", "ratio"), _times, (0, 1, 0)),
        Column("n", lambda row: str(len(row.samples) or NONE), drop=2),
        names("", lambda row: row.verdict),
    ]
    table = table_of(rows, columns)
    table.title = visible(f"{SCOPES[first.scope]} · {first.way} · {first.passes} · {first.dtype}")
    return table


def _times(row: Timing) -> list[str]:
    if row.median is None:
        return [NONE] * 3
    size, _ = unit_of(row.median)
    p25, p75 = (_digits((time or 0) / size) for time in (row.p25, row.p75))
    return [duration(row.median), f"{p25}–{p75}", "" if row.ratio is None else f"{row.ratio:.2f}"]


def _speed_caption(rows: Sequence[Timing], scope: str) -> list[str]:
    first, shape = rows[0], "×".join(map(str, rows[0].shape))
    if scope == "norm":
        norms = count(first.sites, "norm")
        about = f"One norm on random values of its real shape, {shape}, which {norms} of the network have"
    else:
        about = f"{count(first.sites, 'norm')}; input {shape}"
        if any(row.passes != "forward" for row in rows):
            about += "; backward: to the gradients of all parameters"
    parts = [about, *(f"{name}: {DEFINITIONS['swap-bench'][name]}" for name in ("time", "ratio", "n", "verdict"))]
    lines = []
    if any(row.way == "fused" for row in rows):
        lines.append(
            "fused: functions by normscope's kernels, beside the eager native norm. Others are in plain torch."
        )
    lines += dict.fromkeys(f"{row.variant}, {row.way}: {row.note}" for row in rows if row.note)
    return [*parts, *("\n" + visible(line) for line in lines)]
