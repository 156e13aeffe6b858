"""table(): the tables of any record, as text in a terminal and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normscope.errors import UsageError
from normscope.fits.advice import Advice, TokenSlopes
from normscope.fits.card import NormCard
from normscope.fits.comparison import Compared
from normscope.fits.curve_fit import CurveFit
from normscope.fits.gradient import GradientView
from normscope.pairs.captures import Capture
from normscope.swaps.reports import BenchReport, DriftReport, HealReport, KeepReport
from normscope.tables.card import card_tables, gradient_tables
from normscope.tables.drift import drift_tables, healing_table, keep_table, quality_table
from normscope.tables.fit import advice_table, channels_table, comparison_table, fits_table, slopes_table
from normscope.tables.speed import speed_tables
from normscope.tables.table import layers_table

_WIDEST = 240  # characters


class Tables:
    """Tables below one another: text in a terminal, HTML in a notebook, and rich's own in ``tables``."""

    def __init__(self, tables: Iterable[Table]) -> None:
        """Keep the tables."""
        self.tables = list(tables)

    def __repr__(self) -> str:
        console = Console(width=_WIDEST, color_system=None)
        with console.capture() as printed:
            for table in self.tables:
                console.print(table, width=console.measure(table).maximum)
        return "\n".join(line.rstrip() for line in printed.get().splitlines())

    def _repr_html_(self) -> str:
        return "\n".join(map(_html, self.tables))


def table(records: Any) -> Tables:
    """Return the tables that the command line prints, of a capture, of a record, or of a list of records of one kind.

    Raises:
        UsageError: if there are none, or they are of no kind that has tables.

    >>> import normscope
    >>> seen = normscope.capture(normscope.load("demo_vit", limit=2), layers="norm")
    >>> print(table(seen))
        site  kind       shape  axis    eps  affine  placement  calls
    16  norm  LayerNorm  64     -1    1e-06  yes     final          1
    """
    rows = list(records) if isinstance(records, (list, tuple)) else [records]
    if not rows:
        raise UsageError("There is no record to make a table of.")
    for kind, tables in _OF.items():
        if isinstance(rows[0], kind):
            return Tables(tables(rows))
    raise UsageError(f"There is no table of a {type(rows[0]).__name__}; of {', '.join(kind.__name__ for kind in _OF)}.")


def _of_fits(fits: Sequence[CurveFit]) -> list[Table]:
    return [fits_table(fits) if fits[0].channel is None else channels_table(fits)]


def _of_healing(report: HealReport) -> list[Table]:
    return [healing_table(report), *([quality_table({("swapped", ""): report.quality})] if report.quality else [])]


_OF: dict[type, Callable[[Sequence[Any]], list[Table]]] = {
    Capture: lambda captures: [layers_table(capture.sites) for capture in captures],
    CurveFit: _of_fits,
    NormCard: card_tables,
    GradientView: gradient_tables,
    TokenSlopes: lambda slopes: [slopes_table(slopes)],
    Compared: lambda rows: [comparison_table(rows)],
    Advice: lambda advice: [advice_table(advice)],
    DriftReport: drift_tables,
    BenchReport: lambda reports: [table for report in reports for table in speed_tables(report)],
    KeepReport: lambda reports: [keep_table(report) for report in reports],
    HealReport: lambda reports: [table for report in reports for table in _of_healing(report)],
}


def _html(table: Table) -> str:
    """Write a table with what stands in its cells, and nothing in them as HTML."""
    sides = [column.justify for column in table.columns]
    heads = [str(column.header) for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = [_row("th", heads, sides), *(_row("td", map(str, row), sides) for row in rows)]
    caption = f"<caption style='caption-side: bottom; text-align: left'>{_plain(str(table.caption or ''))}</caption>"
    title = f"<p><b>{_plain(str(table.title))}</b></p>" if table.title else ""
    return f"{title}<table>{caption}{''.join(lines)}</table>"


def _row(tag: str, cells: Iterable[str], sides: Sequence[str]) -> str:
    written = (
        f"<{tag} style='text-align: {side}'>{_plain(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(written)}</tr>"


def _plain(markup: str) -> str:
    return escape(Text.from_markup(markup).plain)
