"""Records as tables for a terminal: what all tables share, and the short ones."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from normscope.runtime.files import visible

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


_GAP = "  "
_LEAST_CAPTION = 80
# A long name may go on in a new line after a dot, a slash, a colon, a hyphen or a space; not within 0.8910 or 1/8.
_BREAKS = re.compile(r"(?<=\.)(?![\d./\s])|(?<=[^\W\d][/:-])(?=\w)|(?<= )")
_COMFORTABLE = 24  # of a column that folds, as long as another can give way
_LONGEST_PIECE = 32  # of a name without any of these, which no table has room for


@dataclass(frozen=True)
class Explanation:
    """A part of a caption, which is not shown where no column is that it is about.

    Attributes:
        text: in rich's markup.
        of: what the columns are called that it is about, by their labels; without any it is about the whole table.
        after: what stands between it and the part before.
    """

    text: str
    of: Sequence[str] = ()
    after: str = " · "


class AdaptiveTable(Table):
    """A table whose columns have priorities; wider than what it is shown on, it leaves columns out and says which.

    Headings take several lines and long texts fold between words before a column is left out. Columns come and go as
    a whole: no cell of a number is broken, nor is a word.

    Attributes:
        priorities: of each column; 0 stays at any width, and the largest is the first to be left out, among equals
            the rightmost.
        labels: of each column, what it is called where it was left out.
        folding: of each column, whether its texts may take several lines.
        spans: rows of which all that follows some column is one text, by their number: that column's.
    """

    def __init__(self) -> None:
        """Begin a table without columns."""
        super().__init__(box=None, pad_edge=False, caption_justify="left")
        self._explanations: Sequence[Explanation] = ()
        self.priorities: list[int] = []
        self.labels: list[str] = []
        self.folding: list[bool] = []
        self.spans: dict[int, int] = {}

    def explain(self, explanations: Sequence[Explanation]) -> None:
        """Set the caption, of which a terminal shows what is about the columns that it has room for."""
        self._explanations = explanations
        self.caption = _joined(explanations)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the table out for the width that there is."""
        columns = [_ColumnTexts(self, number) for number in range(len(self.columns))]
        kept = self._kept(columns, options.max_width)
        chosen = [columns[number] for number in kept]
        widths = _widths(chosen, options.max_width)
        across = _across(widths)
        if self.title:
            yield from _wrapped(plain(self.title), max(across, _LEAST_CAPTION), options, "bold")
        headings = [_folded(column.heading, width) for column, width in zip(chosen, widths, strict=True)]
        yield from _lines(headings, chosen, widths, "table.header")
        for row in range(self.row_count):
            yield from self._row(row, kept, chosen, widths, options.max_width)
        shown = {self.labels[number] for number in kept}
        explained = _joined([part for part in self._explanations if not part.of or shown.intersection(part.of)])
        below = [plain(explained)] if explained else []
        if dropped := [self.labels[number] for number in range(len(columns)) if number not in kept]:
            needed = _across([column.wanted for column in columns])
            names = ", ".join(dropped).rstrip(".")
            below.append(f"Left out at a width of {options.max_width}, as all takes {needed}: {names}.")
        for text in below:
            yield from _wrapped(text, max(across, _LEAST_CAPTION), options, "table.caption")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From the columns that always stay to all of them."""
        columns = [_ColumnTexts(self, number) for number in range(len(self.columns))]
        stays = [column for column, priority in zip(columns, self.priorities, strict=True) if not priority]
        least, most = _across([column.least for column in stays]), _across([column.natural for column in columns])
        return Measurement(least, max(least, most))

    def _kept(self, columns: Sequence[_ColumnTexts], width: int) -> list[int]:
        kept = list(range(len(columns)))
        while _across([columns[number].wanted for number in kept]) > width:
            last = max(kept, key=lambda number: (self.priorities[number], number))
            if not self.priorities[last]:
                break
            kept.remove(last)
        return kept

    def _row(
        self, row: int, kept: Sequence[int], columns: Sequence[_ColumnTexts], widths: Sequence[int], width: int
    ) -> Iterator[Text]:
        spanning = self.spans.get(row)
        before = len(kept) if spanning is None else sum(number < spanning for number in kept)
        cells = [_folded(column.cells[row], room) for column, room in zip(columns[:before], widths, strict=False)]
        if spanning is None:
            yield from _lines(cells, columns, widths)
            return
        indent = sum(widths[:before]) + len(_GAP) * before
        room = max(_across(widths), min(width, indent + _LEAST_CAPTION)) - indent
        said = _folded(plain(list(self.columns[spanning].cells)[row]), max(room, 1))
        yield from _lines([*cells, said], [*columns[:before], None], [*widths[:before], 0])


class _ColumnTexts:
    """A column's texts, and how wide it is."""

    def __init__(self, table: AdaptiveTable, number: int) -> None:
        column = table.columns[number]
        self.heading = plain(column.header)
        self.right = column.justify == "right"
        self.cells = [plain(cell) for cell in column.cells]
        own = [cell for row, cell in enumerate(self.cells) if row not in table.spans or table.spans[row] > number]
        folds = table.folding[number]
        least = max(column.min_width or 0, _longest_piece(self.heading.split(" ")))
        self.least = max([least, *(_longest_piece(_pieces(cell)) if folds else cell_len(cell) for cell in own)])
        self.natural = max([self.least, cell_len(self.heading), *map(cell_len, own)])
        self.wanted = max(self.least, min(self.natural, _COMFORTABLE)) if folds else self.least


def _across(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _joined(explanations: Sequence[Explanation]) -> str:
    return "".join(f"{part.after if number else ''}{part.text}" for number, part in enumerate(explanations))


def _widths(columns: Sequence[_ColumnTexts], width: int) -> list[int]:
    """Divide the width among columns; the remainder goes to the columns that lack most."""
    room = width - len(_GAP) * (len(columns) - 1)
    widths = [column.wanted for column in columns]
    if sum(widths) > room:
        widths = [column.least for column in columns]
    for _ in range(room - sum(widths) if columns else 0):
        lacking = max(range(len(columns)), key=lambda n: columns[n].natural / max(widths[n], 1))
        widths[lacking] += columns[lacking].natural > widths[lacking]
    return widths


def _lines(
    cells: Sequence[Sequence[str]], columns: Sequence[_ColumnTexts | None], widths: Sequence[int], style: str = ""
) -> Iterator[Text]:
    """One row, over as many lines as its highest cell has."""
    for line in range(max(map(len, cells), default=0)):
        written = []
        for cell, column, width in zip(cells, columns, widths, strict=False):
            text = cell[line] if line < len(cell) else ""
            space = " " * max(0, width - cell_len(text))
            written.append(space + text if column is not None and column.right else text + space)
        yield Text(_GAP.join(written).rstrip(), style=style, no_wrap=True, overflow="ignore", end="\n")


def _wrapped(text: str, width: int, options: ConsoleOptions, style: str) -> Iterator[Text]:
    for paragraph in text.split("\n"):
        for line in _filled(re.split("(?<= )", paragraph), min(width, options.max_width)):
            yield Text(line, style=style, no_wrap=True, overflow="ignore")


def plain(text: object) -> str:
    """A cell, heading, title or caption of a table without its markup."""
    return text.plain if isinstance(text, Text) else Text.from_markup(str(text)).plain


def _pieces(text: str) -> list[str]:
    """Cut a text where it may go on in a new line.

    >>> _pieces("encoder.layers.11.norm"), _pieces("0.8910 of owner/name")
    (['encoder.', 'layers.11.', 'norm'], ['0.8910 ', 'of ', 'owner/', 'name'])
    """
    return [piece for piece in _BREAKS.split(text) if piece]


def _longest_piece(pieces: Sequence[str]) -> int:
    return min(_LONGEST_PIECE, max((cell_len(piece.rstrip()) for piece in pieces), default=0))


def _folded(text: str, width: int) -> list[str]:
    """Write a text into lines of at most some width.

    >>> _folded("encoder.layers.11.norm", 12)
    ['encoder.', 'layers.11.', 'norm']
    """
    return _filled(_pieces(text), width)


def _filled(pieces: Sequence[str], width: int) -> list[str]:
    """Fill lines with pieces; only one that is longer than a line is cut anywhere."""
    lines = [""]
    for rest in pieces:
        if cell_len((lines[-1] + rest).rstrip()) > width and lines[-1]:
            lines.append("")
        while cell_len(rest.rstrip()) > max(width, 1):
            lines[-1:] = [rest[:width], ""]
            rest = rest[width:]
        lines[-1] += rest
    return [line.rstrip() for line in lines]
