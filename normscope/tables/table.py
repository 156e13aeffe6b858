"""Records as tables for a terminal: what all tables share, and the short ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from normscope.runtime.files import visible

if TYPE_CHECKING:
    from normscope.pairs.norms.sites import NormSite


NARROWEST_NAME = 12


def layers_table(sites: Sequence[NormSite]) -> Table:
    """One line a norm site."""
    table = new_table()
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("site", overflow="fold", min_width=NARROWEST_NAME)
    for name in ("kind", "shape", "axis", "eps", "affine", "placement", "calls"):
        table.add_column(name, justify="right" if name in ("eps", "calls") else "left", no_wrap=True)
    for site in sites:
        table.add_row(
            str(site.index),
            as_cell(site.name),
            as_cell(site.kind),
            "×".join(map(str, site.normalized_shape)),
            str(site.channel_axis),
            f"{site.eps:g}",
            "yes" if site.affine else "no",
            site.placement or "–",
            str(site.calls),
        )
    return table


def models_table(entries: Sequence[Any]) -> Table:
    """One line a model; an entry has name, family, description and source."""
    table = new_table()
    for name in ("model", "family"):
        table.add_column(name, no_wrap=True)
    for name in ("what it is", "weights"):
        table.add_column(name, overflow="fold", min_width=NARROWEST_NAME)
    for entry in entries:
        table.add_row(*(as_cell(text) for text in (entry.name, entry.family, entry.description, entry.source)))
    return table


def as_cell(text: str) -> str:
    r"""Write a text for a cell, a title or a caption, where nothing in it is markup or obeyed by a terminal.

    >>> as_cell("blocks[0]\n[red]norm")
    'blocks[0]\\n\\[red]norm'
    """
    return escape(visible(text))


def new_table() -> Table:
    """Make a table as all of them look."""
    return Table(box=None, pad_edge=False, caption_justify="left")


def table_by_site(*names: str) -> Table:
    """Make a table of a column of sites, whose long names fold, and of columns of numbers, which do not."""
    table = new_table()
    table.add_column("site", overflow="fold", min_width=NARROWEST_NAME)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def with_interval(written: str, bounds: tuple[float, float] | None) -> str:
    """A number, and half of its interval's width to two digits.

    >>> with_interval("0.912", (0.898, 0.926)), with_interval("0.912", None)
    ('0.912 ±0.014', '0.912')
    """
    return written if bounds is None else f"{written} ±{(bounds[1] - bounds[0]) / 2:.2g}"


def unbroken(table: Table) -> Table:
    """Give every column that may not wrap the width of its widest cell.

    rich takes the longest word for the least width, and a number that is cut off is another number.
    """
    for column in table.columns:
        if column.no_wrap:
            column.min_width = max(len(str(cell)) for cell in (column.header, *column.cells))
    return table


_NONE = "–"


def swapped_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a site; where each channel has numbers of its own, their medians.

    Args:
        rows: ``site``, ``norm``, ``func``, ``A``, ``alpha``, ``shift``, ``r2`` and ``per_channel`` of each; a number
            that is none is None.
    """
    shifted = any(row["shift"] is not None for row in rows)
    table = table_by_site("norm", "replaced by", "A", "α", *(["s"] if shifted else []), "R²")
    for column in table.columns[1:3]:
        column.justify = "left"
    for row in rows:
        numbers = [_shown(row[name], ".4g") for name in ("A", "alpha", *(["shift"] if shifted else []))]
        names = [as_cell(row[name]) for name in ("site", "norm", "func")]
        table.add_row(*names, *numbers, _shown(row["r2"], ".4f"))
    if any(row["per_channel"] for row in rows):
        table.caption = "A, α, s and R² are medians over the channels"
    return unbroken(table)


def _shown(value: float | None, form: str) -> str:
    return _NONE if value is None or not math.isfinite(value) else format(value, form)
