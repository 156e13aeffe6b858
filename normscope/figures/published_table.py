"""Our times beside the published ones, as a table for a terminal."""

from __future__ import annotations

from rich.table import Table

from normscope.errors import count
from normscope.figures.tables import as_cell, new_table
from normscope.speeds import Latency, PublishedReport


def published_table(report: PublishedReport) -> Table:
    """Our seconds beside the published ones, a line a variant, norms and passes; they were not taken on one device."""
    table = new_table()
    table.add_column("norms", no_wrap=True)
    for name in ("", ""):
        table.add_column(name)
    for name in ("layer", "model", "layer, published", "model, published"):
        table.add_column(name, justify="right")
    theirs = {(row.variant, row.norms, row.passes): row for row in report.published}
    ours = {(row.variant, row.norms, row.passes): row for row in report.rows}
    for key in dict.fromkeys((*ours, *theirs)):
        numbers = [
            text
            for row in (ours.get(key), theirs.get(key))
            for text in (_seconds(row, "layer"), _seconds(row, "model"))
        ]
        table.add_row(as_cell(key[0]), key[1], key[2], *numbers)
    table.caption = as_cell(
        f"Seconds of all passes; layer: of all norms. Ours: {report.device}, {count(report.tokens, 'token')}, "
        f"{report.n_passes} passes. Published: {report.source}, 4,096 tokens, 100 passes, bfloat16."
    )
    if report.notes:
        table.caption = "\n".join([table.caption, *map(as_cell, report.notes)])
    return table


def _seconds(row: Latency | None, which: str) -> str:
    return "–" if row is None else f"{getattr(row, which):.3g}"
