"""Records as tables for a terminal: what all tables share, and the short ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rich.markup import escape
from rich.table import Table

from normscope.runtime.files import visible
from normscope.tables.layout import AdaptiveTable, Explanation

if TYPE_CHECKING:
    from normscope.fits.curves.known import Curve
    from normscope.pairs.norms.sites import NormSite


NONE = "–"

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table; by default of numbers, which stand at its right and are never cut.

    Attributes:
        heading: what stands above it.
        cell: from a row to the text of its cell.
        shown: whether there is anything to show in it.
        justify: ``left`` or ``right``.
        folds: whether its long texts may take several lines.
        drop: how soon the column gives way where a table is wider than the terminal: 0 never, the largest first.
        label: what it is called where it gave way, if its heading does not say it.
        once: whether a text that is that of the line above gives way to nothing.
    """

    heading: str
    cell: Callable[[Row], str]
    shown: bool = True
    justify: Literal["left", "right"] = "right"
    folds: bool = False
    drop: int = 0
    label: str = ""
    once: bool = False


def names(heading: str, cell: Callable[[Row], str], drop: int = 0, *, once: bool = False) -> Column[Row]:
    """Describe a column of long names or sentences, which fold."""
    return Column(heading, cell, justify="left", folds=True, drop=drop, once=once)


def words(heading: str, cell: Callable[[Row], str], drop: int = 0) -> Column[Row]:
    """Describe a column of short words."""
    return Column(heading, cell, justify="left", drop=drop)


def several(
    headings: Sequence[str],
    cells: Callable[[Row], Sequence[str]],
    drops: Sequence[int] = (),
    *,
    labels: Sequence[str] = (),
    shown: bool = True,
) -> Iterable[Column[Row]]:
    """Describe columns of numbers whose texts one function gives, a list for each row."""
    every = itertools.zip_longest(headings, drops, labels)
    return (
        Column(heading, lambda row, place=place: cells(row)[place], shown, drop=drop or 0, label=label or "")  # type: ignore[misc]
        for place, (heading, drop, label) in enumerate(every)
    )


def table_of(
    rows: Iterable[Row],
    columns: Iterable[Column[Row]],
    *,
    caption: str | Iterable[Explanation] = (),
    remark: Callable[[Row], str | None] = lambda row: None,
    named: int = 1,
) -> AdaptiveTable:
    """Make a table, a line a row.

    Args:
        rows: records.
        columns: those that are not ``shown`` are left out.
        caption: below it, in parts where some are about single columns; what stands for itself in it has gone through
            :func:`as_cell`.
        remark: what is said of a row in place of its numbers; None where it has numbers.
        named: how many columns, of those shown, come before such a remark.
    """
    columns = [column for column in columns if column.shown]
    table = AdaptiveTable()
    table.explain([Explanation(caption)] if isinstance(caption, str) else list(caption))
    for column in columns:
        table.add_column(as_cell(column.heading), justify=column.justify)
        table.priorities.append(column.drop)
        table.labels.append(column.label or column.heading)
        table.folding.append(column.folds)
    above: list[str] = []
    for number_of_row, row in enumerate(rows):
        said = remark(row)
        cells = [column.cell(row) for column in columns[: None if said is None else named]]
        shown = ["" if columns[n].once and above[n : n + 1] == [text] else text for n, text in enumerate(cells)]
        table.add_row(*map(as_cell, shown if said is None else [*shown, said]))
        if said is not None:
            table.spans[number_of_row] = named
        above = cells
    return table


def as_cell(text: str) -> str:
    r"""Write a text for a cell, a title or a caption, where nothing in it is markup or obeyed by a terminal.

    >>> as_cell("blocks[0]\n[red]norm")
    'blocks[0]\\n\\[red]norm'
    """
    return escape(visible(text))


def number(value: float | None, form: str) -> str:
    """Write a number, and a dash for one that is none or not finite.

    >>> number(0.91234, ".3f"), number(None, ".3f"), number(math.inf, ".3f")
    ('0.912', '–', '–')
    """
    return NONE if value is None or not math.isfinite(value) else format(value, form)


def with_interval(written: str, bounds: tuple[float, float] | None) -> str:
    """A number, and half of its interval's width to two digits.

    >>> with_interval("0.912", (0.898, 0.926)), with_interval("0.912", None)
    ('0.912 ±0.014', '0.912')
    """
    return written if bounds is None else f"{written} ±{(bounds[1] - bounds[0]) / 2:.2g}"


def layers_table(sites: Sequence[NormSite]) -> Table:
    """One line a norm site."""
    columns: list[Column[NormSite]] = [
        Column("", lambda site: str(site.index)),
        names("site", lambda site: site.name),
        words("kind", lambda site: site.kind),
        words("shape", lambda site: "×".join(map(str, site.normalized_shape)), 1),
        words("axis", lambda site: str(site.channel_axis), 5),
        Column("eps", lambda site: f"{site.eps:g}", drop=4),
        words("affine", lambda site: "yes" if site.affine else "no", 3),
        words("placement", lambda site: site.placement or NONE, 2),
        Column("calls", lambda site: str(site.calls), drop=6),
    ]
    return table_of(sites, columns)


def models_table(entries: Sequence[Any]) -> Table:
    """One line a model; an entry has name, family, description and source."""
    columns: list[Column[Any]] = [
        names("model", lambda entry: entry.name),
        words("family", lambda entry: entry.family, 1),
        names("what it is", lambda entry: entry.description),
        names("weights", lambda entry: entry.source),
    ]
    return table_of(entries, columns)


def swapped_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a site; where each channel has numbers of its own, their medians.

    Args:
        rows: ``site``, ``norm``, ``curve``, ``amplitude``, ``alpha``, ``shift``, ``r2`` and ``per_channel`` of each; a
            number that is none is None.
    """
    columns: list[Column[Mapping[str, Any]]] = [
        names("site", lambda row: row["site"]),
        words("norm", lambda row: row["norm"], 1),
        words("replaced by", lambda row: row["curve"]),
        Column("A", lambda row: number(row["amplitude"], ".4g")),
        Column("α", lambda row: number(row["alpha"], ".4g")),
        Column("s", lambda row: number(row["shift"], ".4g"), any(row["shift"] is not None for row in rows)),
        Column("R²", lambda row: number(row["r2"], ".4f")),
    ]
    medians = any(row["per_channel"] for row in rows)
    return table_of(rows, columns, caption="A, α, s and R² are medians over the channels" if medians else "")


def curves_table(curves: Sequence[Curve]) -> Table:
    """Name each curve, its other names, its formula and where it is from."""
    columns: list[Column[Curve]] = [
        names("curve", lambda curve: ", ".join((curve.name, *curve.aliases))),
        names("f(u), u = αx + s", lambda curve: curve.formula),
        names("from", lambda curve: curve.source),
    ]
    return table_of(curves, columns)
