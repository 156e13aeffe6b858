"""Tables of any record for notebooks, papers and pages: HTML, LaTeX with booktabs, and Markdown."""

from __future__ import annotations

import html
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from normscope.errors import UsageError
from normscope.fits.advice import Advice, TokenSlopes
from normscope.fits.card import NormCard
from normscope.fits.comparison import Compared
from normscope.fits.curve_fit import CurveFit
from normscope.fits.gradient import GradientView
from normscope.fits.saturation import Saturation
from normscope.fits.timeline import Timeline
from normscope.pairs.captures import Capture
from normscope.swaps.bench.reports import BenchReport
from normscope.swaps.drift.reports import DriftReport, KeepReport
from normscope.swaps.heal.reports import HealReport
from normscope.swaps.simplify.reports import SimplifyReport
from normscope.tables.card import card_tables, gradient_tables, saturation_table
from normscope.tables.fit import advice_table, channels_table, comparison_table, fits_table, slopes_table
from normscope.tables.swaps import drift_tables, healing_table, keep_table, quality_table, simplify_table, speed_tables
from normscope.tables.table import layers_table
from normscope.tables.timeline import timeline_tables

# A table, and the line above it: model, weights and data.
Titled: TypeAlias = tuple[str, Table]
_WIDEST = 240  # characters


class Tables:
    """Tables below one another: text in a terminal, HTML in a notebook, and rich's own in ``tables``."""

    def __init__(self, tables: Iterable[Table]) -> None:
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
    for kind, tables in _TABLES.items():
        if isinstance(rows[0], kind):
            return Tables(tables(rows))
    kinds = ", ".join(kind.__name__ for kind in _TABLES)
    raise UsageError(f"There is no table of a {type(rows[0]).__name__}; of {kinds}.")


def _of_healing(report: HealReport) -> list[Table]:
    return [healing_table(report), *([quality_table({("swapped", ""): report.quality})] if report.quality else [])]


_TABLES: dict[type, Callable[[Sequence[Any]], Iterable[Table]]] = {
    Capture: lambda captures: [layers_table(capture.sites) for capture in captures],
    CurveFit: lambda fits: [fits_table(fits) if fits[0].channel is None else channels_table(fits)],
    NormCard: card_tables,
    Saturation: lambda functions: [saturation_table(functions)],
    GradientView: gradient_tables,
    TokenSlopes: lambda slopes: [slopes_table(slopes)],
    Compared: lambda rows: [comparison_table(rows)],
    Timeline: lambda timelines: itertools.chain.from_iterable(map(timeline_tables, timelines)),
    Advice: lambda advice: [advice_table(advice)],
    DriftReport: drift_tables,
    BenchReport: lambda reports: itertools.chain.from_iterable(map(speed_tables, reports)),
    KeepReport: lambda reports: map(keep_table, reports),
    SimplifyReport: lambda reports: map(simplify_table, reports),
    HealReport: lambda reports: itertools.chain.from_iterable(map(_of_healing, reports)),
}


def _html(table: Table) -> str:
    def row(tag: str, cells: Iterable[str]) -> str:
        written = (
            f"<{tag} style='text-align: {column.justify}'>{html.escape(cell)}</{tag}>"
            for cell, column in zip(cells, table.columns, strict=True)
        )
        return f"<tr>{''.join(written)}</tr>"

    lines = "".join([row("th", _headings(table)), *(row("td", cells) for cells in _rows(table))])
    side = "style='caption-side: bottom; text-align: left'"
    title = f"<p><b>{html.escape(str(table.title))}</b></p>" if table.title else ""
    return f"{title}<table><caption {side}>{html.escape(str(table.caption or ''))}</caption>{lines}</table>"


def _greek(letter: str) -> str:
    _, size, _, name = unicodedata.name(letter).replace("LAMDA", "LAMBDA").split()
    return f"\\{name.capitalize() if size == 'CAPITAL' else name.lower()}"


_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"*": "{*}", "[": "{[}", "]": "{]}", "–": "--", "…": r"\ldots{}"},
}
_MATHS = {
    **{letter: letter for letter in "<>|"},
    **{letter: _greek(letter) for letter in "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"},
    **{"µ": r"\mu", "∂": r"\partial", "√": r"\surd", "‖": r"\|", "∞": r"\infty", "·": r"\cdot", "×": r"\times"},
    **{"±": r"\pm", "≤": r"\leq", "≥": r"\geq", "≈": r"\approx", "→": r"\to", "−": "-", "′": "'"},
}
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "₀₁₂₃₄₅₆₇₈₉ᵢ"
_NUMBER = r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?"
_NUMBERS = re.compile(rf"(?P<value>{_NUMBER})(?: ± (?P<half>{_NUMBER}))?(?P<unit> ?%)?(?P<noise>≈?)")
_MARKDOWN, _ESCAPED = re.compile(r"([\\`*_{}\[\]<>|#~$])"), r"\\\1"


def as_latex(tables: Sequence[Titled]) -> str:
    r"""Write tables for a paper that loads booktabs: all columns, with the digits that a terminal shows.

    Comments above and below each table contain its title and the meaning of its columns.

    >>> table = Table("site")
    >>> table.add_column("R²", justify="right")
    >>> table.add_row("blocks.0.norm_1", "0.891 ± 0.014")
    >>> print(as_latex([("demo_vit", table)]), end="")
    % demo_vit
    \begin{tabular}{lr}
    \toprule
    site & R$^{2}$ \\
    \midrule
    blocks.0.norm\_1 & $0.891 \pm 0.014$ \\
    \bottomrule
    \end{tabular}
    """
    return "\n".join("\n".join(_latex_lines(title, table)) + "\n" for title, table in tables)


def as_markdown(tables: Sequence[Titled]) -> str:
    r"""Write tables as GitHub's Markdown, each between its title and the meaning of its columns.

    >>> table = Table("site", "|x|")
    >>> table.add_row("blocks.0.norm_1", "14.8")
    >>> print(as_markdown([("demo_vit", table)]), end="")
    demo\_vit
    <BLANKLINE>
    | site | \|x\| |
    |:---|:---|
    | blocks.0.norm\_1 | 14.8 |
    """
    return "\n".join("\n".join(_markdown_lines(title, table)) + "\n" for title, table in tables)


def latex_number(text: str) -> str:
    r"""Write a number, with its interval if it has one, in math; anything else as :func:`latex` does.

    >>> latex_number("-0.201 ± 0.048"), latex_number("1e-06"), latex_number("–")
    ('$-0.201 \\pm 0.048$', '$1 \\times 10^{-6}$', '--')
    """
    if match := _NUMBERS.fullmatch(text):
        half = f" \\pm {_power(match['half'])}" if match["half"] else ""
        unit = match["unit"].replace(" ", r"\,").replace("%", r"\%") if match["unit"] else ""
        noise = r"\approx" if match["noise"] else ""
        return f"${_power(match['value'])}{half}{unit}{noise}$"
    return latex(text)


def _power(number: str) -> str:
    mantissa, _, exponent = number.replace(",", "{,}").partition("e")
    return f"{mantissa} \\times 10^{{{int(exponent)}}}" if exponent else mantissa


def latex(text: str) -> str:
    r"""Write a text so that LaTeX sets it unchanged.

    >>> latex("head_1 & 50%"), latex("1e5")
    ('head\\_1 \\& 50\\%', '1e5')
    """
    parts = []
    for kind, group in itertools.groupby(text, _latex_kind):
        letters = "".join(group)
        if kind == "math":
            parts.append(f"${' '.join(_MATHS[letter] for letter in letters)}$")
        elif kind:
            parts.append(f"${kind}{{{unicodedata.normalize('NFKC', letters).replace('−', '-')}}}$")
        else:
            parts.append("".join(_LATEX.get(letter, letter) for letter in letters))
    return "".join(parts)


def _latex_kind(letter: str) -> str:
    if letter in _MATHS:
        return "math"
    return "^" if letter in _RAISED else "_" if letter in _LOWERED else ""


def _latex_lines(title: str, table: Table) -> Iterator[str]:
    yield from _comments(title)
    yield from _comments(table.title)
    sides = "".join("r" if column.justify == "right" else "l" for column in table.columns)
    yield from (f"\\begin{{tabular}}{{{sides}}}", r"\toprule")
    if table.show_header:
        yield from (_latex_row(map(latex, _headings(table))), r"\midrule")
    for number, cells in enumerate(_rows(table)):
        row = [latex_number(cell) if side == "r" else latex(cell) for side, cell in zip(sides, cells, strict=True)]
        if (remark := getattr(table, "spans", {}).get(number)) is not None:  # in place of the row's numbers
            row[remark:] = [f"\\multicolumn{{{len(row) - remark}}}{{l}}{{{row[remark]}}}"]
        yield _latex_row(row)
    yield from (r"\bottomrule", r"\end{tabular}")
    yield from _comments(table.caption)


def _latex_row(cells: Iterable[str]) -> str:
    return f"{' & '.join(cells)} \\\\".lstrip()


def _comments(text: object) -> list[str]:
    return [f"% {line}" for line in str(text or "").splitlines()]


def _markdown_lines(title: str, table: Table) -> Iterator[str]:
    for above in filter(None, (title, table.title)):
        yield from (_MARKDOWN.sub(_ESCAPED, str(above)), "")
    yield _markdown_row(_headings(table) if table.show_header else [""] * len(table.columns))
    yield "|" + "".join("---:|" if column.justify == "right" else ":---|" for column in table.columns)
    yield from map(_markdown_row, _rows(table))
    if table.caption:
        yield from ("", _MARKDOWN.sub(_ESCAPED, str(table.caption)))


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_MARKDOWN.sub(_ESCAPED, cell) for cell in cells)} |"


def _headings(table: Table) -> list[str]:
    return [str(column.header) for column in table.columns]


def _rows(table: Table) -> Iterator[list[str]]:
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield list(map(str, cells))
