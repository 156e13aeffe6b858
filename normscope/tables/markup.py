"""Tables of any record for notebooks, papers and pages: HTML, LaTeX with booktabs, and Markdown."""

from __future__ import annotations

import html
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from rich.console import Console
from tabulate import LATEX_ESCAPE_RULES, tabulate

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
from normscope.tables.table import TextTable, layers_table
from normscope.tables.timeline import timeline_tables

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


def _of_healing(report: HealReport) -> list[TextTable]:
    return [healing_table(report), *([quality_table({("swapped", ""): report.quality})] if report.quality else [])]


_TABLES: dict[type, Callable[[Sequence[Any]], Iterable[TextTable]]] = {
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

    >>> from normscope.tables.table import Column, words
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

    >>> from normscope.tables.table import Column, words
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
