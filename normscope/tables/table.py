"""Tables for a terminal: columns declared one by one, a layout for any width, and the short tables."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from normscope.errors import count
from normscope.runtime.files import visible
from normscope.swaps.inits import published_name
from normscope.tables.glossary import DEFINITIONS, TERMS, typed

if TYPE_CHECKING:
    from normscope.curves.known import Curve
    from normscope.fits.card import NormCard
    from normscope.fits.curve_fit import CurveFit
    from normscope.pairs.norms.sites import NormSite


NONE = "–"

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
    headings: Sequence[str],
    cells: Callable[[Row], Sequence[str]],
    drops: Sequence[int] = (),
    *,
    shown: bool = True,
) -> Iterable[Column[Row]]:
    """Declare columns of numbers whose texts one function returns, a list per row."""
    for place, (heading, drop) in enumerate(zip_longest(headings, drops, fillvalue=0)):
        yield Column(str(heading), lambda row, place=place: cells(row)[place], shown, drop=int(drop))  # type: ignore[misc]


@dataclass(frozen=True)
class Explanation:
    """A part of a caption, left out with the columns that it is about; with a line break before it, the last part."""

    text: str
    of: Sequence[str] = ()  # headings; none for the whole table


def table_of(
    rows: Iterable[Row],
    columns: Iterable[Column[Row]],
    *,
    caption: Iterable[str | Explanation] = (),
    about: str = "",
    remark: Callable[[Row], str | None] = lambda row: None,
    named: int = 1,
) -> AdaptiveTable:
    """Make a table with one line per row.

    Args:
        rows: records.
        columns: of the table, without those that are not ``shown``.
        caption: below it.
        about: table of the glossary whose definitions of the columns follow in the caption.
        remark: a row's text in place of its numbers; None where it has numbers.
        named: number of shown columns before such a remark.
    """
    columns = [column for column in columns if column.shown]
    table = AdaptiveTable(columns)
    definitions = DEFINITIONS.get(about, {})
    defined = [name for name in dict.fromkeys(table.headings) if name in definitions]
    table.explain([*caption, *(Explanation(f"{name}: {definitions[name]}", (name,)) for name in defined)])
    above: list[str] = []
    for number_of_row, row in enumerate(rows):
        text = remark(row)
        cells = [column.cell(row) for column in columns[: None if text is None else named]]
        shown = ["" if columns[n].once and above[n : n + 1] == [cell] else cell for n, cell in enumerate(cells)]
        if text is not None:
            shown.append(text)
            table.spans[number_of_row] = named
        table.add_row(*map(visible, shown))
        above = cells
    return table


def number(value: float | None, form: str) -> str:
    """Format a number; None, infinity and NaN become a dash.

    >>> number(0.91234, ".3f"), number(None, ".3f"), number(math.inf, ".3f")
    ('0.912', '–', '–')
    """
    return NONE if value is None or not math.isfinite(value) else format(value, form)


def measured(value: float | None, interval: tuple[float, float] | None, form: str = ".4g", *, half: bool = True) -> str:
    """Round a number by the error of its interval, whose half width has two digits and is appended.

    Args:
        value: None, infinity and NaN become a dash.
        interval: lower and upper bound; without one, or with one of no width, ``form`` decides on the digits.
        form: as of :func:`format`.
        half: append half of the interval's width.

    >>> measured(12.3963, (11.42, 13.38)), measured(1234.5, (1100, 1400)), measured(0.91234, None, ".3f")
    ('12.40 ± 0.98', '1230 ± 150', '0.912')
    """
    width = (interval[1] - interval[0]) / 2 if interval else 0.0
    if value is None or not math.isfinite(value) or not 0 < width < math.inf:
        return number(value, form)
    decimals = min(_MOST_DECIMALS, 1 - math.floor(math.log10(float(f"{width:.1e}"))))
    shown = [f"{round(part, decimals):.{max(decimals, 0)}f}" for part in (value, width)]
    return " ± ".join(shown if half else shown[:1])


_MOST_DECIMALS = 8
_GAP = "  "
_LEAST_CAPTION = 80
# A long name may continue on a new line after a dot, slash, colon, hyphen or space, but not within 0.8910 or 1/8.
_BREAKS = re.compile(r"(?<=\.)(?![\d./\s])|(?<=[^\W\d][/:-])(?=\w)|(?<= )")
_COMFORTABLE = 16  # width of a folding column, as long as another column can be left out
_LONGEST_PIECE = 32  # of a name without any of these separators


class AdaptiveTable(Table):
    """A table that leaves out columns, and lists them, where it is wider than the terminal.

    Headings and long texts fold before a column is left out. Numbers and words are never broken. Texts are plain: no
    cell, heading, title or caption is parsed as markup.

    Attributes:
        declared: the columns' declarations.
        headings: of the columns.
        spans: for each row with a remark, by row number: the column where the remark begins.
    """

    def __init__(self, columns: Sequence[Column[Any]]) -> None:
        super().__init__(box=None, pad_edge=False)
        self.declared = columns
        self.spans: dict[int, int] = {}
        self.headings = [column.heading for column in columns]
        for column in columns:
            self.add_column(visible(column.heading), justify=column.justify)

    def explain(self, parts: Sequence[str | Explanation]) -> None:
        """Set the caption; parts about columns that are left out are not printed."""
        self._explanations = [Explanation(part) if isinstance(part, str) else part for part in parts]
        self.caption = self._explained(self.headings)

    def _explained(self, headings: Collection[str]) -> str:
        parts = [part.text for part in self._explanations if not part.of or set(part.of) & set(headings)]
        return " · ".join(sorted(parts, key=lambda text: text.startswith("\n"))).replace(" · \n", "\n")

    def only(self, names: Sequence[str]) -> AdaptiveTable:
        """Return the table of some columns, in this order, none of which is left out of a narrow terminal.

        Args:
            names: headings, as :func:`normscope.tables.glossary.typed` returns them; others are ignored.
        """
        headings = list(map(typed, self.headings))
        places = [place for name in names for place, heading in enumerate(headings) if name == heading]
        table = AdaptiveTable([replace(self.declared[place], drop=0) for place in places])
        table.title = self.title
        table.explain([part for part in self._explanations if not part.of or set(part.of) & set(table.headings)])
        texts = [list(map(str, column.cells)) for column in self.columns]
        for row in range(self.row_count):
            cells = [texts[place][row] for place in places]
            remark = self.spans.get(row, len(texts))
            if beyond := [n for n, place in enumerate(places) if place >= remark]:
                cells[beyond[0] :] = [texts[remark][row]]
                table.spans[row] = beyond[0]
            table.add_row(*cells)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the table out for the available width."""
        every = self._texts()
        kept = self._kept(every, options.max_width)
        columns = [every[number] for number in kept]
        widths = _widths(columns, options.max_width)
        across = _across(widths)
        if self.title:
            yield from _wrapped(str(self.title), across, options, "bold")
        headings = [_filled(_pieces(column.heading), width) for column, width in zip(columns, widths, strict=True)]
        yield from _lines(headings, columns, widths, "table.header")
        rest: list[str] = []  # of a folded name, beside the rows below that leave their cell empty
        for row in range(self.row_count):
            spanning = self.spans.get(row, len(every))
            before = sum(number < spanning for number in kept)
            cells = [
                _filled(_pieces(column.cells[row]), width)
                for column, width in zip(columns[:before], widths, strict=False)
            ]
            if row in self.spans:
                indent = sum(widths[:before]) + len(_GAP) * before
                room = max(across, min(options.max_width, indent + _LEAST_CAPTION)) - indent
                cells.append(_filled(_pieces(every[spanning].cells[row]), max(room, 1)))
            if kept[:1] == [0] and self.declared[0].once:
                if cells[0] == [""]:
                    cells[0] = rest
                elif rest:
                    yield from _lines([rest], columns, widths)
                height = max(map(len, cells[1:]), default=1)
                cells[0], rest = cells[0][:height], cells[0][height:]
            yield from _lines(cells, columns[:before], widths[:before])
        yield from _lines([rest], columns, widths) if rest else ()
        below = [self._explained([self.headings[number] for number in kept])]
        if dropped := [heading for number, heading in enumerate(self.headings) if number not in kept]:
            needed = _across([column.comfortable for column in every])
            left_out = ", ".join(dropped).rstrip(".")
            below.append(f"Left out at a width of {options.max_width} (all columns take {needed}): {left_out}.")
        for text in filter(None, below):
            yield from _wrapped(text, across, options, "table.caption")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the width of the columns that always stay, and that of all columns."""
        every = self._texts()
        stays = [texts.least for texts, column in zip(every, self.declared, strict=True) if not column.drop]
        least = _across(stays)
        return Measurement(least, max(least, _across([texts.natural for texts in every])))

    def _texts(self) -> list[_ColumnTexts]:
        return [_ColumnTexts(self, number) for number in range(len(self.columns))]

    def _kept(self, columns: Sequence[_ColumnTexts], width: int) -> list[int]:
        kept = list(range(len(columns)))
        while _across([columns[number].comfortable for number in kept]) > width:
            last = max(kept, key=lambda number: (self.declared[number].drop, number))
            if not self.declared[last].drop:
                break
            kept.remove(last)
        return kept


class _ColumnTexts:
    """A column's texts and widths: the least one, one without folds, and one that leaves room for other columns."""

    def __init__(self, table: AdaptiveTable, number: int) -> None:
        column, folds = table.columns[number], table.declared[number].folds
        self.heading, self.cells = str(column.header), list(map(str, column.cells))
        self.right = column.justify == "right"
        unspanned = [cell for row, cell in enumerate(self.cells) if table.spans.get(row, number + 1) > number]
        widths = [_longest_piece(_pieces(cell)) if folds else cell_len(cell) for cell in unspanned]
        self.least = max([column.min_width or 0, _longest_piece(self.heading.split(" ")), *widths])
        self.natural = max([self.least, cell_len(self.heading), *map(cell_len, unspanned)])
        self.comfortable = max(self.least, min(self.natural, _COMFORTABLE)) if folds else self.least


def _across(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _widths(columns: Sequence[_ColumnTexts], width: int) -> list[int]:
    """Divide the width among columns; the remainder goes to the columns that lack most."""
    room = width - len(_GAP) * (len(columns) - 1)
    widths = [column.comfortable for column in columns]
    if sum(widths) > room:
        widths = [column.least for column in columns]
    for _ in range(room - sum(widths) if columns else 0):
        lacking = max(range(len(columns)), key=lambda n: columns[n].natural / max(widths[n], 1))
        widths[lacking] += columns[lacking].natural > widths[lacking]
    return widths


def _lines(
    cells: Sequence[Sequence[str]], columns: Sequence[_ColumnTexts], widths: Sequence[int], style: str = ""
) -> Iterator[Text]:
    """Print one row, over as many lines as its highest cell has; a cell beyond the columns is a remark."""
    for texts in zip_longest(*cells, fillvalue=""):
        padded = [
            (" " * (width - cell_len(text)) + text if column.right else text + " " * (width - cell_len(text)))
            for text, column, width in zip(texts, columns, widths, strict=False)
        ]
        line = _GAP.join([*padded, *texts[len(columns) :]])
        yield Text(line.rstrip(), style=style, no_wrap=True, overflow="ignore", end="\n")


def _wrapped(text: str, width: int, options: ConsoleOptions, style: str) -> Iterator[Text]:
    """Print a title or caption, at most as wide as the table or 80 characters."""
    for paragraph in text.split("\n"):
        for line in _filled(re.split("(?<= )", paragraph), min(max(width, _LEAST_CAPTION), options.max_width)):
            yield Text(line, style=style, no_wrap=True, overflow="ignore")


def _pieces(text: str) -> list[str]:
    """Cut a text where it may continue on a new line.

    >>> _pieces("encoder.layers.11.norm"), _pieces("0.8910 of owner/name")
    (['encoder.', 'layers.11.', 'norm'], ['0.8910 ', 'of ', 'owner/', 'name'])
    """
    return [piece for piece in _BREAKS.split(text) if piece]


def _longest_piece(pieces: Sequence[str]) -> int:
    return min(_LONGEST_PIECE, max((cell_len(piece.rstrip()) for piece in pieces), default=0))


def _filled(pieces: Sequence[str], width: int) -> list[str]:
    """Fill lines with pieces; only a piece longer than a line is cut.

    >>> _filled(_pieces("encoder.layers.11.norm"), 12)
    ['encoder.', 'layers.11.', 'norm']
    """
    lines = [""]
    for rest in pieces:
        if cell_len((lines[-1] + rest).rstrip()) > width and lines[-1]:
            lines.append("")
        while cell_len(rest.rstrip()) > max(width, 1):
            lines[-1:] = [rest[:width], ""]
            rest = rest[width:]
        lines[-1] += rest
    return [line.rstrip() for line in lines]


def layers_table(sites: Sequence[NormSite]) -> Table:
    """Make a table with one line per site; point-wise functions have a curve and α, the median over channels."""
    functions = any(site.pointwise for site in sites)
    columns: list[Column[NormSite]] = [
        Column("", lambda site: str(site.index)),
        names("site", lambda site: site.name),
        words("kind", lambda site: site.kind),
        *several(("f", "α"), _function, shown=functions),
        words("shape", lambda site: "×".join(map(str, site.normalized_shape)), 1),
        words("axis", lambda site: str(site.channel_axis), 5),
        Column("eps", lambda site: f"{site.eps:g}", drop=4),
        words("affine", lambda site: "yes" if site.affine else "no", 3),
        words("placement", lambda site: site.placement or NONE, 2),
        Column("calls", lambda site: str(site.calls), drop=6),
    ]
    return table_of(sites, columns)


def _function(site: NormSite) -> list[str]:
    function = site.pointwise
    return [NONE, NONE] if function is None else [function.curve, f"{statistics.median(function.alpha):.4g}"]


def models_table(entries: Sequence[Any]) -> Table:
    """Make a table with one line per model; an entry has name, family, description and source."""
    columns: list[Column[Any]] = [
        names("model", lambda entry: entry.name),
        words("family", lambda entry: entry.family, 1),
        names("what it is", lambda entry: entry.description),
        names("weights", lambda entry: entry.source),
    ]
    return table_of(entries, columns)


def swapped_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table with one line per swapped site, with medians over the channels of per-channel curves.

    Args:
        rows: ``site``, ``norm``, ``curve``, ``amplitude``, ``alpha``, ``shift``, ``r2``, ``per_channel``, ``straight``
            and ``weights_by`` of each; a missing number is None.
    """
    straight = any(row["straight"] for row in rows)
    columns: list[Column[Mapping[str, Any]]] = [
        names("site", lambda row: row["site"]),
        words("norm", lambda row: row["norm"], 1),
        words("replaced by", lambda row: published_name(row["curve"])),
        Column("A", lambda row: "straight" if row["straight"] else number(row["amplitude"], ".4g")),
        Column("α", lambda row: NONE if row["straight"] else number(row["alpha"], ".4g")),
        Column("A·α", lambda row: number(row["amplitude"] * row["alpha"], ".4g") if row["straight"] else "", straight),
        Column("s", lambda row: number(row["shift"], ".4g"), any(row["shift"] is not None for row in rows)),
        Column("R²", lambda row: number(row["r2"], ".4f")),
    ]
    caption = ["A, α, s and R² are medians over the channels"] if any(row["per_channel"] for row in rows) else []
    if any(row["weights_by"] == "gamma" for row in rows):
        caption.append("pairs weighted by γ², the error that reaches the next layer; `normscope fit` weights all alike")
    if straight:
        caption.append(f"straight: {DEFINITIONS[TERMS]['straight']}")
    return table_of(rows, columns, caption=caption)


def curves_table(curves: Sequence[Curve]) -> Table:
    columns: list[Column[Curve]] = [
        names("curve", lambda curve: ", ".join((curve.name, *curve.aliases))),
        names("f(u), u = αx + s", lambda curve: curve.formula),
        names("from", lambda curve: curve.source),
    ]
    return table_of(curves, columns)


def sink_sentence(records: Sequence[CurveFit | NormCard]) -> str | None:
    """Describe the sink that changes R² most, and the number of further sites with one; None if there is none.

    Of several records of one site, the first counts.
    """
    sinks = {record.site: record.sink for record in reversed(records) if record.sink}
    if not sinks:
        return None

    def gain(site: str) -> tuple[float, float]:
        r2, without, share = sinks[site].r2, sinks[site].r2_without, sinks[site].share
        return (-1.0 if r2 is None or without is None else without - r2), share

    site = max(sinks, key=gain)
    sink, more = sinks[site], len(sinks) - 1
    share = f"{sink.share:.0%}" if sink.share < 0.995 else "over 99%"
    text = f"{visible(site)}: position {sink.position} carries {share} of Σx²"
    if sink.r2_without is not None:
        with_it = f"({sink.r2:.3f} with it): --skip {sink.position + 1}"
        text += f"; without it {sink.curve}'s R² is {sink.r2_without:.3f} {with_it}"
    return text + (f"; likewise at {count(more, 'further site')}" if more else "")
