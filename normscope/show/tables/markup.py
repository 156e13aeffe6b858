"""Tables for notebooks, papers and pages: HTML, LaTeX with booktabs, and Markdown."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from rich.console import Console
from tabulate import LATEX_ESCAPE_RULES, tabulate

from normscope.show.tables.table import TextTable

# A table, and the line above it: model, weights and data.
Titled: TypeAlias = tuple[str, TextTable]
_WIDEST = 240  # characters


def _greek(letter: str) -> str:
    _, size, _, name = unicodedata.name(letter).replace("LAMDA", "LAMBDA").split()
    return f"\\{name.capitalize() if size == 'CAPITAL' else name.lower()}"


# LaTeX for signs that tabulate does not escape. At the start of a row, * and [ would be arguments of the row above.
_MATHS = {
    **{letter: _greek(letter) for letter in "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"},
    **{"µ": r"\mu", "∂": r"\partial", "√": r"\surd", "‖": r"\|", "∞": r"\infty", "·": r"\cdot", "×": r"\times"},
    **{"±": r"\pm", "≤": r"\leq", "≥": r"\geq", "≈": r"\approx", "→": r"\to", "−": "-", "′": "'", "|": "|"},
    **{raised: f"^{{{unicodedata.normalize('NFKC', raised)}}}" for raised in "⁰¹²³⁴⁵⁶⁷⁸⁹"},
    **{lowered: f"_{{{unicodedata.normalize('NFKC', lowered)}}}" for lowered in "₀₁₂₃₄₅₆₇₈₉ᵢ"},
    **{"⁻": "^{-}"},
}
_SIGNS = str.maketrans(
    {
        **{sign: rf"\ensuremath{{{maths}}}" for sign, maths in _MATHS.items()},
        **{"*": "{*}", "[": "{[}", "]": "{]}", "–": "--", "…": r"\ldots{}"},
    }
)
_NEGATIVE = re.compile(r"(?<![\w.])-(?=\d)")
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in r"\`*_{}[]<>|#~$"})


class Tables:
    """Tables below one another: text in a terminal, HTML in a notebook, and rich's own in ``tables``."""

    def __init__(self, tables: Iterable[TextTable]) -> None:
        self.tables = list(tables)

    def __repr__(self) -> str:
        console = Console(width=_WIDEST, color_system=None)
        with console.capture() as printed:
            for table in self.tables:
                console.print(table, crop=False)
        return printed.get().removesuffix("\n")

    def _repr_html_(self) -> str:
        return "\n".join(map(_html, self.tables))


def _html(table: TextTable) -> str:
    above, below = (f"<p>{html.escape(text)}</p>" if text else "" for text in (table.title, table.caption))
    written = re.sub("<(t[dh])>", r'<\1 style="text-align: left;">', _written(table, "html"))  # Jupyter aligns right
    return f"{above}{written}{below}"


def _written(table: TextTable, form: str, escape: Callable[[str], str] = str) -> str:
    headings, *rows = [list(map(escape, cells)) for cells in (table.headings, *table.rows)]
    sides = [column.justify for column in table.columns]
    has_head = any(headings) or form == "pipe"
    written: str = tabulate(rows, headings if has_head else (), form, disable_numparse=True, colalign=sides)
    return written


def as_latex(tables: Sequence[Titled]) -> str:
    r"""Write tables for a paper that loads booktabs: all columns, with the digits that a terminal shows.

    Comments above and below each table contain its title and the meaning of its columns.

    >>> from normscope.show.tables.table import Column, words
    >>> table = TextTable([words("site", str), Column("R²", str)], [["blocks.0.norm_1", "0.891 ± 0.014"]])
    >>> print(as_latex([("demo_vit", table)]), end="")
    % demo_vit
    \begin{tabular}{lr}
    \toprule
     site            &            R\ensuremath{^{2}} \\
    \midrule
     blocks.0.norm\_1 & 0.891 \ensuremath{\pm} 0.014 \\
    \bottomrule
    \end{tabular}
    """
    return "\n".join(_latex(title, table) for title, table in tables)


def _latex(title: str, table: TextTable) -> str:
    above, below = (
        "".join(f"% {line}\n" for text in texts for line in text.splitlines())
        for texts in ((title, table.title), (table.caption,))
    )
    tabular = _NEGATIVE.sub("$-$", _written(table, "latex_booktabs"))
    return f"{above}{tabular.translate(_SIGNS)}\n{below}"


def latex(text: str) -> str:
    r"""Write a text so that LaTeX sets it unchanged.

    >>> latex("head_1 & 50%"), latex("1e5")
    ('head\\_1 \\& 50\\%', '1e5')
    """
    return text.translate(str.maketrans(LATEX_ESCAPE_RULES) | _SIGNS)


def as_markdown(tables: Sequence[Titled]) -> str:
    r"""Write tables as GitHub's Markdown, each between its title and the meaning of its columns.

    >>> from normscope.show.tables.table import Column, words
    >>> table = TextTable([words("site", str), Column("|x|", str)], [["blocks.0.norm_1", "14.8"]])
    >>> print(as_markdown([("demo_vit", table)]), end="")
    demo\_vit
    <BLANKLINE>
    | site             |   \|x\| |
    |:-----------------|--------:|
    | blocks.0.norm\_1 |    14.8 |
    """
    return "\n".join(_markdown(title, table) for title, table in tables)


def _markdown(title: str, table: TextTable) -> str:
    def escaped(text: str) -> str:
        return text.translate(_MARKDOWN)

    parts = [escaped(title), escaped(table.title), _written(table, "pipe", escaped), escaped(table.caption)]
    return "\n\n".join(filter(None, parts)) + "\n"
