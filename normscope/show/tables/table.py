"""Tables for a terminal: columns declared one by one, and a layout for any width."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Generic, Literal, TypeVar

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.containers import Lines
from rich.segment import Segment
from rich.text import Text

from normscope.runtime.files import visible
from normscope.show.tables.glossary import DEFINITIONS, typed

NONE = "–"
_LEAST_FOLDED, _MOST_FOLDED = 16, 32  # least width of a column that folds, by its texts' longest part
_LEAST_CAPTION = 80
_MOST_DECIMALS = 8
_SMALL_SHARE = 0.001  # less has too few digits in columns of percentages with one decimal
_ROUNDING = 1e-9  # of a number: a narrower interval is of rounding errors, as where A·α is fixed
# A long name may continue on a new line after a dot, slash, colon or hyphen, but not within 0.8910 or 1/8.
_BREAKS = re.compile(r"(\s+)|(?<=\.)(?![\d./\s])|(?<=[^\W\d][/:-])(?=\w)")

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table; by default of numbers, which are right-aligned and never broken.

    Attributes:
        heading: printed above it.
        cell: from a row to the text of its cell.
        shown: False for a column without content.
        justify: ``left`` or ``right``.
        folds: long texts may take several lines.
        drop: order in which columns are left out of a narrow terminal, the largest first; 0 is never left out.
        once: leave the cell empty where the row above has the same text.
    """

    heading: str
    cell: Callable[[Row], str]
    shown: bool = True
    justify: Literal["left", "right"] = "right"
    folds: bool = False
    drop: int = 0
    once: bool = False


def names(heading: str, cell: Callable[[Row], str], drop: int = 0, *, once: bool = False) -> Column[Row]:
    """Declare a column of long names or sentences, which fold."""
    return Column(heading, cell, justify="left", folds=True, drop=drop, once=once)


def words(heading: str, cell: Callable[[Row], str], drop: int = 0) -> Column[Row]:
    """Declare a column of short words."""
    return Column(heading, cell, justify="left", drop=drop)


def several(
    headings: Sequence[str], cells: Callable[[Row], Sequence[str]], drops: Sequence[int] = (), *, shown: bool = True
) -> Iterable[Column[Row]]:
    """Declare columns of numbers whose texts one function returns, a list per row."""
    for n, (heading, drop) in enumerate(zip_longest(headings, drops, fillvalue=0)):
        yield Column(str(heading), lambda row, n=n: cells(row)[n], shown, drop=int(drop))  # type: ignore[misc]


class _Name(Text):
    """Text that folds within module paths; rich folds at spaces or after any letter."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        if " " in self.plain or not self.plain.isascii():  # a sentence, or letters that may be wider than one cell
            return super().wrap(console, width, **options)
        wrapper = textwrap.TextWrapper(width, break_on_hyphens=False)
        wrapper.wordsep_simple_re = _BREAKS
        return Lines(map(Text, wrapper.wrap(self.plain)))


@dataclass
class TextTable:
    """Plain texts in rows and columns; no text is parsed as markup.

    A terminal that is too narrow shows fewer columns and lists the others.

    Attributes:
        columns: their declarations.
        rows: a text per column.
        parts: of the caption; a part that begins with a line break is a line of its own.
        about: table of the glossary whose definitions of the columns are in the caption, too.
        title: text above the table.
    """

    columns: list[Column[Any]]
    rows: list[list[str]]
    parts: list[str] = field(default_factory=list)
    about: str = ""
    title: str = ""

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    @property
    def caption(self) -> str:
        definitions = DEFINITIONS.get(self.about, {})
        defined = [f"{name}: {definitions[name]}" for name in dict.fromkeys(self.headings) if name in definitions]
        parts = sorted([*self.parts, *defined], key=lambda text: text.startswith("\n"))
        return " · ".join(parts).replace(" · \n", "\n").removeprefix("\n")

    def only(self, names: Sequence[str]) -> TextTable:
        """Return the table of some columns, in this order, none of which is left out of a narrow terminal.

        Headings are as :func:`normscope.show.tables.glossary.typed` returns them; others are ignored.
        """
        headings = list(map(typed, self.headings))
        chosen = self._selected([n for name in names for n, heading in enumerate(headings) if name == heading])
        return replace(chosen, columns=[replace(column, drop=0) for column in chosen.columns])

    def _selected(self, numbers: Sequence[int]) -> TextTable:
        rows = [[row[n] for n in numbers] for row in self.rows]
        return replace(self, columns=[self.columns[n] for n in numbers], rows=rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the table out for the available width; a table that cannot be as narrow is wider."""
        widths = [_widths(column, [row[n] for row in self.rows]) for n, column in enumerate(self.columns)]
        least, natural = ([pair[n] for pair in widths] for n in range(2))
        kept = self._kept(least, options.max_width)
        width, across = max(options.max_width, _across(least, kept)), _across(natural, kept)
        shown = self._selected(kept)
        table = rich.table.Table(box=None, pad_edge=False, show_header=any(shown.headings))
        for n, column in zip(kept, shown.columns, strict=True):
            fixed = None if column.folds or across <= width else least[n]
            table.add_column(Text(column.heading), justify=column.justify, overflow="fold", width=fixed)
        for row in shown.rows:
            table.add_row(*((_Name if c.folds else Text)(cell) for c, cell in zip(shown.columns, row, strict=True)))
        for_text = options.update(width=min(max(across, _LEAST_CAPTION), options.max_width))
        if self.title:
            yield from _rendered(console, Text(self.title, "bold"), for_text)
        yield from _rendered(console, table, options.update(width=width))
        if shown.caption:
            yield from _rendered(console, Text(shown.caption, "table.caption"), for_text)
        if dropped := [heading for n, heading in enumerate(self.headings) if n not in kept]:
            needed = f"Left out at a width of {options.max_width} (all columns take {_across(least)})"
            yield from _rendered(
                console, Text(f"{needed}: {', '.join(dropped).rstrip('.')}.", "table.caption"), for_text
            )

    def _kept(self, widths: Sequence[int], room: int) -> list[int]:
        """Return the numbers of the columns that fit into a width, or are never left out."""
        kept = list(range(len(widths)))
        while _across(widths, kept) > room:
            last = max(kept, key=lambda n: (self.columns[n].drop, n))
            if not self.columns[last].drop:
                break
            kept.remove(last)
        return kept


def _rendered(console: Console, content: Text | rich.table.Table, options: ConsoleOptions) -> Iterator[Segment]:
    """Yield lines without the spaces at their ends, which a pipe or a file would contain."""
    for line in console.render_lines(content, options, pad=False):
        while line and not line[-1].text.rstrip(" "):
            line.pop()
        yield from line[:-1]
        yield from (Segment(last.text.rstrip(" "), last.style) for last in line[-1:])
        yield Segment.line()


def _widths(column: Column[Any], cells: Sequence[str]) -> tuple[int, int]:
    """Return the least width of a column, whose heading then folds, and its natural width."""
    narrow = longest = max(map(cell_len, cells), default=0)
    if column.folds:
        piece = max((cell_len(piece or "") for cell in cells for piece in _BREAKS.split(cell)), default=0)
        narrow = min(longest, max(_LEAST_FOLDED, piece), _MOST_FOLDED)
    return max(narrow, *map(cell_len, column.heading.split(" "))), max(longest, cell_len(column.heading))


def _across(widths: Sequence[int], kept: Sequence[int] | None = None) -> int:
    """Return the width of the columns kept, by default all, with the gaps between them."""
    chosen = widths if kept is None else [widths[n] for n in kept]
    return sum(chosen) + 2 * (len(chosen) - 1)


def table_of(
    rows: Iterable[Row],
    columns: Iterable[Column[Row]],
    *,
    caption: Iterable[str] = (),
    about: str = "",
    remark: Callable[[Row], str | None] = lambda row: None,
    named: int = 1,
) -> TextTable:
    """Make a table with one line per row, of the columns that are shown.

    ``remark`` returns the reason why a row has no numbers, which is written below the table, or None; such a row has
    the first ``named`` columns alone.
    """
    columns = [column for column in columns if column.shown]
    texts, remarks, above = list[list[str]](), dict[str, None](), list[str]()
    for row in rows:
        if reason := remark(row):
            remarks[f"\n{visible(reason)}"] = None
        cells = [NONE if reason and n >= named else visible(column.cell(row)) for n, column in enumerate(columns)]
        texts.append(
            ["" if column.once and above[n : n + 1] == [cells[n]] else cells[n] for n, column in enumerate(columns)]
        )
        above = cells
    columns = [replace(column, heading=visible(column.heading)) for column in columns]
    return TextTable(columns, texts, [*caption, *remarks], about)


def number(value: float | None, form: str) -> str:
    """Format a number; None, infinity and NaN become a dash, and shares under 0.1% get two digits.

    >>> number(0.91234, ".3f"), number(None, ".3f"), number(0.469, ".1%"), number(0.00041, ".1%")
    ('0.912', '–', '46.9%', '0.041%')
    """
    if value is None or not math.isfinite(value):
        return NONE
    return percent(value) if form.endswith("%") and 0 < abs(value) < _SMALL_SHARE else format(value, form)


def percent(share: float) -> str:
    """Return a share in percent with two digits, without a space at which a line could break.

    >>> percent(0.0263), percent(0.996), percent(2.5e-6)
    ('2.6%', '100%', '0.00025%')
    """
    return f"{float(f'{100 * share:.2g}'):g}%"


def rounded(value: float) -> str:
    """Return a number with three digits, or up to six before the point.

    >>> rounded(25966.4), rounded(0.12345), rounded(6.7e8)
    ('25,966', '0.123', '6.7e+08')
    """
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def measured(value: float | None, interval: tuple[float, float] | None, form: str = ".4g", *, half: bool = True) -> str:
    """Round a number by the error of its interval, whose half width has two digits and is appended if ``half``.

    Without an interval, or with one of rounding errors, ``form`` decides on the digits, as for :func:`number`.

    >>> measured(12.3963, (11.42, 13.38)), measured(1234.5, (1100, 1400)), measured(0.91234, None, ".3f")
    ('12.40 ± 0.98', '1230 ± 150', '0.912')
    >>> measured(1.0, (1 - 2e-16, 1 + 2e-16))
    '1'
    """
    width = (interval[1] - interval[0]) / 2 if interval else 0.0
    if value is None or not math.isfinite(value) or not _ROUNDING * abs(value) < width < math.inf:
        return number(value, form)
    decimals = min(_MOST_DECIMALS, 1 - math.floor(math.log10(float(f"{width:.1e}"))))
    shown = [f"{round(n, decimals):.{max(decimals, 0)}f}" for n in (value, width)]
    return " ± ".join(shown if half else shown[:1])
