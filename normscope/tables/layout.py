"""Tables as wide as the terminal: less important columns give way, and no number or word is ever broken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

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
        across = sum(widths) + len(_GAP) * (len(widths) - 1)
        if self.title:
            yield from _wrapped(plain(self.title), max(across, _LEAST_CAPTION), options, "bold")
        yield from _lines(
            [column.folded_heading(width) for column, width in zip(chosen, widths, strict=True)],
            chosen,
            widths,
            "table.header",
        )
        for row in range(self.row_count):
            yield from self._row(row, kept, chosen, widths, options.max_width)
        shown = {self.labels[number] for number in kept}
        explained = _joined([part for part in self._explanations if not part.of or shown.intersection(part.of)])
        below = [plain(explained)] if explained else []
        if dropped := [self.labels[number] for number in range(len(columns)) if number not in kept]:
            needed = sum(column.wanted for column in columns) + len(_GAP) * (len(columns) - 1)
            names = ", ".join(dropped).rstrip(".")
            below.append(f"Left out at a width of {options.max_width}, as all takes {needed}: {names}.")
        for text in below:
            yield from _wrapped(text, max(across, _LEAST_CAPTION), options, "table.caption")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From the columns that always stay to all of them."""
        columns = [_ColumnTexts(self, number) for number in range(len(self.columns))]
        stays = [column for column, priority in zip(columns, self.priorities, strict=True) if not priority]
        least, most = (
            sum(widths) + len(_GAP) * (len(widths) - 1)
            for widths in ([column.least for column in stays], [column.natural for column in columns])
        )
        return Measurement(least, max(least, most))

    def _kept(self, columns: Sequence[_ColumnTexts], width: int) -> list[int]:
        kept = list(range(len(columns)))
        while sum(columns[number].wanted + len(_GAP) for number in kept) - len(_GAP) > width:
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
        cells = [column.folded(row, room) for column, room in zip(columns[:before], widths, strict=False)]
        if spanning is None:
            yield from _lines(cells, columns, widths)
            return
        indent = sum(widths[:before]) + len(_GAP) * before
        room = max(sum(widths) + len(_GAP) * (len(widths) - 1), min(width, indent + _LEAST_CAPTION)) - indent
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

    def folded(self, row: int, width: int) -> list[str]:
        """A cell's lines."""
        return _folded(self.cells[row], width)

    def folded_heading(self, width: int) -> list[str]:
        """The heading's lines."""
        return _folded(self.heading, width)


def _joined(explanations: Sequence[Explanation]) -> str:
    return "".join(f"{part.after if number else ''}{part.text}" for number, part in enumerate(explanations))


def _widths(columns: Sequence[_ColumnTexts], width: int) -> list[int]:
    """What each column gets: what it wants if all can have that, and of the rest more where most is lacking."""
    room = width - len(_GAP) * (len(columns) - 1)
    widths = [column.wanted for column in columns]
    if sum(widths) > room:
        widths = [column.least for column in columns]
    left = room - sum(widths)
    while (
        left > 0
        and (lacking := max(range(len(columns)), key=lambda n: columns[n].natural / max(widths[n], 1), default=None))
        is not None
    ):
        if columns[lacking].natural <= widths[lacking]:
            break
        widths[lacking] += 1
        left -= 1
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
