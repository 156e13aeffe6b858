"""Exact rewrites of norms as a table."""

from __future__ import annotations

from normscope.errors import count
from normscope.show.tables.table import Column, TextTable, names, number, table_of, words
from normscope.tools.simplify.reports import SimplifiedNorm, SimplifyReport


def simplify_table(report: SimplifyReport) -> TextTable:
    """Make a table with one line per norm: its exact rewrites, or the reasons against them."""
    columns: list[Column[SimplifiedNorm]] = [
        names("site", lambda norm: norm.site),
        words("kind", lambda norm: norm.kind, 2),
        names("RMSNorm", lambda norm: "removed" if norm.removed is not None else norm.blocked or "exact"),
        names("folded", lambda norm: norm.folded or norm.unfolded),
        Column("change", lambda norm: number(norm.change, ".1e"), drop=1),
    ]
    return table_of(report.norms, columns, caption=[f"on {count(report.samples, 'sample')}"], about="simplify")
