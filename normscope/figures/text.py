"""Text in figures: what stands above and beside them, and what fits into a width."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from normscope.errors import count
from normscope.figures.style import HANDLE_LENGTH
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import NormSite
from normscope.runtime.files import visible

_MOST_LINES = 3
_HINTING = 1.12  # so much wider do letters become where they are fitted to few pixels
_LETTERS = TextToPath()


def width_of(text: str, font: FontProperties) -> float:
    """Return how many inches a line of text takes, without drawing it."""
    width, _, _ = _LETTERS.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72 * _HINTING


def tail(text: str, inches: float, font: FontProperties) -> str:
    """Shorten a text from the left, as the end of a module path tells it from the others, to so many inches.

    What would break the line or turn its letters is written out, see :func:`normscope.runtime.files.visible`.
    """
    text = visible(text)
    if width_of(text, font) <= inches:
        return text
    dropped = bisect_left(range(len(text)), True, key=lambda n: width_of(f"…{text[n:]}", font) <= inches)
    return f"…{text[dropped:].lstrip('.')}"


def wrapped(text: str, inches: float, font: FontProperties) -> list[str]:
    """Break a text into lines of so many inches, at spaces where it can; what is far too long ends in an ellipsis.

    What would break a line elsewhere, or turn its letters, is written out, see :func:`normscope.runtime.files.visible`.
    """
    text, lines = visible(text), list[str]()
    while text:
        fitting = bisect_left(range(len(text)), True, key=lambda n: width_of(text[: n + 1], font) > inches)
        cut = fitting if fitting == len(text) else max(text.rfind(" ", 0, fitting + 1), 0) or fitting
        if len(lines) == _MOST_LINES - 1 and cut < len(text):
            return [*lines, f"{text[: fitting - 1]}…"]
        lines.append(text[:cut])
        text = text[cut:].lstrip()
    return lines


def legend_columns(labels: Sequence[str], inches: float, font: FontProperties) -> int:
    """Return how many columns of a legend lie within so many inches, filled and spaced as matplotlib does."""
    widths, em = [width_of(label, font) for label in labels], font.get_size_in_points() / 72

    def width(columns: int) -> float:
        # To each label its handle and a gap of 0.8; 2 between columns, 0.4 at either side.
        texts = sum(max(column) for column in np.array_split(widths, columns))
        return float(texts) + ((HANDLE_LENGTH + 2.8) * columns - 1.2) * em

    return next((columns for columns in range(len(labels), 1, -1) if width(columns) <= inches), 1)


def head_figure(figure: Figure, capture: Capture) -> None:
    """Say above all panels which network they show, with which weights and data."""
    about = capture.about
    samples = count(capture.n_samples, "sample")
    font, inches = FontProperties(size=7.5), figure.get_figwidth() - 0.2
    texts = (f"{about['model']} · {samples}", f"weights: {about['weights']}", f"data: {about['data']}")
    title = "\n".join(line for text in texts for line in wrapped(text, inches, font))
    figure.suptitle(title, fontproperties=font, parse_math=False)


def scale_by_factors(ax: Axes) -> None:
    """Make the axis of y logarithmic, with plain numbers beside it."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def title_of(site: NormSite, inches: float, font: FontProperties) -> str:
    """Return a norm's number and the end of its path, in a line of so many inches."""
    number = f"{site.index}  "
    return number + tail(site.name, inches - width_of(number, font), font)


def head_panel(ax: Axes, site: NormSite, detail: str, inches: float) -> None:
    """Say above a panel of so many inches which norm it shows, and a line of detail more."""
    kind = " · ".join(part for part in (f"{visible(site.kind)} d={site.d}", site.placement) if part)
    name = title_of(site, inches, ax.title.get_fontproperties())
    ax.set_title(f"{name}\n{kind}\n{detail}", parse_math=False)
