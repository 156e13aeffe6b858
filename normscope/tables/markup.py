"""Tables as they go into papers and pages: LaTeX with booktabs, and Markdown."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from rich.table import Table

from normscope.tables.table import plain

# A table, and what stands above it: model, weights and data.
Titled: TypeAlias = tuple[str, Table]


def _greek(letter: str) -> str:
    """Name a letter as LaTeX does: Σ is capital sigma."""
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
_NUMBERS = re.compile(rf"(?P<value>{_NUMBER})(?: ±(?P<half>{_NUMBER}))?(?P<unit> ?%)?(?P<noise>≈?)")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~$])")


def as_latex(tables: Sequence[Titled]) -> str:
    r"""Write tables for a paper that loads booktabs: all columns, with the digits that a terminal shows.

    What each table is of, and the meaning of its columns, are comments above and below it.

    >>> table = Table("site")
    >>> table.add_column("R²", justify="right")
    >>> table.add_row("blocks.0.norm_1", "0.8910 ±0.014")
    >>> print(as_latex([("demo_vit", table)]), end="")
    % demo_vit
    \begin{tabular}{lr}
    \toprule
    site & R$^{2}$ \\
    \midrule
    blocks.0.norm\_1 & $0.8910 \pm 0.014$ \\
    \bottomrule
    \end{tabular}
    """
    return "\n".join("\n".join(_latex_lines(title, table)) + "\n" for title, table in tables)


def as_markdown(tables: Sequence[Titled]) -> str:
    r"""Write tables as GitHub's Markdown, each between what it is of and the meaning of its columns.

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

    >>> latex_number("-0.2006 ±0.048"), latex_number("1e-06"), latex_number("–")
    ('$-0.2006 \\pm 0.048$', '$1 \\times 10^{-6}$', '--')
    """
    if found := _NUMBERS.fullmatch(text):
        half = f" \\pm {_power(found['half'])}" if found["half"] else ""
        unit = found["unit"].replace(" ", r"\,").replace("%", r"\%") if found["unit"] else ""
        noise = r"\approx" if found["noise"] else ""
        return f"${_power(found['value'])}{half}{unit}{noise}$"
    return latex(text)


def latex(text: str) -> str:
    r"""Write a text so that LaTeX sets it as it stands.

    >>> latex("head_1 & 50%"), latex("1e5")
    ('head\\_1 \\& 50\\%', '1e5')
    """
    parts = []
    for kind, group in itertools.groupby(text, _kind):
        letters = "".join(group)
        if kind == "math":
            parts.append(f"${' '.join(_MATHS[letter] for letter in letters)}$")
        elif kind:
            parts.append(f"${kind}{{{unicodedata.normalize('NFKC', letters).replace('−', '-')}}}$")
        else:
            parts.append("".join(_LATEX.get(letter, letter) for letter in letters))
    return "".join(parts)


def _kind(letter: str) -> str:
    """Classify a letter for LaTeX: math, superscript, subscript, or text."""
    if letter in _MATHS:
        return "math"
    return "^" if letter in _RAISED else "_" if letter in _LOWERED else ""


def _power(number: str) -> str:
    mantissa, _, exponent = number.replace(",", "{,}").partition("e")
    return f"{mantissa} \\times 10^{{{int(exponent)}}}" if exponent else mantissa


def _latex_lines(title: str, table: Table) -> Iterator[str]:
    yield from _comments(title)
    yield from _comments(plain(table.title)) if table.title else ()
    sides = "".join("r" if column.justify == "right" else "l" for column in table.columns)
    yield from (f"\\begin{{tabular}}{{{sides}}}", r"\toprule")
    if table.show_header:
        yield _latex_row([latex(heading) for heading in _headings(table)])
        yield r"\midrule"
    written = [latex_number if column.justify == "right" else latex for column in table.columns]
    for number, cells in enumerate(_rows(table)):
        row = [write(cell) for write, cell in zip(written, cells, strict=True)]
        yield _latex_row(_with_spans(table, number, row, _over_columns))
    yield from (r"\bottomrule", r"\end{tabular}")
    yield from _comments(plain(table.caption)) if table.caption else ()


def _latex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\".lstrip()


def _over_columns(text: str, columns: int) -> list[str]:
    return [f"\\multicolumn{{{columns}}}{{l}}{{{text}}}"]


def _comments(text: str) -> list[str]:
    return [f"% {line}" for line in text.splitlines()]


def _markdown_lines(title: str, table: Table) -> Iterator[str]:
    for above in filter(None, (title, plain(table.title) if table.title else "")):
        yield from (_MARKDOWN.sub(r"\\\1", above), "")
    headings = _headings(table) if table.show_header else [""] * len(table.columns)
    yield _markdown_row([_MARKDOWN.sub(r"\\\1", heading) for heading in headings])
    yield "|" + "".join("---:|" if column.justify == "right" else ":---|" for column in table.columns)
    for number, cells in enumerate(_rows(table)):
        written = [_MARKDOWN.sub(r"\\\1", cell) for cell in cells]
        yield _markdown_row(_with_spans(table, number, written, lambda text, columns: [text] + [""] * (columns - 1)))
    if table.caption:
        yield from ("", _MARKDOWN.sub(r"\\\1", plain(table.caption)))


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _with_spans(table: Table, row: int, cells: list[str], over: Callable[[str, int], list[str]]) -> list[str]:
    """Let one text take the place of all columns from its own, where the row says something instead of numbers."""
    spanning = getattr(table, "spans", {}).get(row)
    return cells if spanning is None else [*cells[:spanning], *over(cells[spanning], len(cells) - spanning)]


def _headings(table: Table) -> list[str]:
    return [plain(column.header) for column in table.columns]


def _rows(table: Table) -> Iterator[list[str]]:
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield list(map(plain, cells))
