"""Texts of figures: their widths, names of sites, and coloured words above panels."""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, TypeAlias

import matplotlib
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from normscope.runtime.files import visible
from normscope.show.figures.style import LEAST_POINTS, readable

Words: TypeAlias = Sequence[tuple[str, str]]  # texts of one line, each with its colour

LINE_POINTS = 7.6
NOTE, TITLE = FontProperties(size=LEAST_POINTS), FontProperties(size=7)
_MOST_LINES, _MOST_LETTERS = 3, 1000
_NAME_INCHES, _UPRIGHT_INCHES = 1.45, 0.1  # length and height of a site's name, which stands upright
_HINTING = 1.12  # letters are wider where they are fitted to few pixels
_LETTERS = TextToPath()
_ABOVE_POINTS, _BELOW_TITLE, _SPACE_POINTS = 2.5, 3.0, 3.6
_SIGNS = re.compile(r"[-+*/,_]+|\.(?!\d)")  # after which a formula or a path may be broken


def width_of(text: str, font: FontProperties = NOTE) -> float:
    """Return the width of a text's longest line in inches, without drawing it."""
    family, points = tuple(matplotlib.rcParams["font.family"]), font.get_size_in_points()
    return max(_line_inches(line, family, points) for line in text.split("\n"))


@functools.lru_cache(10_000)
def _line_inches(line: str, family: tuple[str, ...], points: float) -> float:
    font = FontProperties(family=family, size=points)
    return float(_LETTERS.get_text_width_height_descent(line, font, ismath=False)[0]) / 72 * _HINTING


def signed(text: str) -> str:
    """Write the numbers of a text with true minus signs.

    >>> signed("s -0.5"), signed("2e-06")
    ('s −0.5', '2e−06')
    """
    return text.replace("-", "−")


def words_inches(words: Words) -> float:
    """Return the width of a line of words."""
    return sum(width_of(text) + _SPACE_POINTS / 72 for text, _ in words) - _SPACE_POINTS / 72


def lines_of_words(words: Words, room: float) -> list[Words]:
    """Put words into as few lines of a width as possible; a text that is wider than a line is divided at spaces."""
    lines: list[list[tuple[str, str]]] = []
    for text, colour in words:
        for word in [text] if words_inches([(text, colour)]) <= room else text.split():
            if lines and words_inches([*lines[-1], (word, colour)]) <= room:
                lines[-1].append((word, colour))
            else:
                lines.append([(word, colour)])
    return list(lines)


def that_fits(texts: Sequence[str], inches: float, points: float = 7) -> str:
    """Return the first of several texts that fits into a width, or the last."""
    font = FontProperties(size=points)
    return next((text for text in texts if width_of(text, font) <= inches), texts[-1])


def tail(text: str, inches: float, font: FontProperties = NOTE) -> str:
    """Shorten a text from the left until it fits into a width, as module paths differ at their ends."""
    shown = text = visible(text)[-_MOST_LETTERS:]
    while text and width_of(shown, font) > inches:
        text = text[1:]
        shown = f"…{text.lstrip('.')}"
    return shown


def wrapped(text: str, inches: float, font: FontProperties = NOTE) -> list[str]:
    """Break a text into at most three lines of a width, at spaces or after signs; an ellipsis replaces the rest.

    >>> wrapped("f(u) = u/(1+abs(u)**3)**(1/3)", 0.75)
    ['f(u) =', 'u/(1+abs(u)**', '3)**(1/3)']
    """
    text, lines = visible(text)[:_MOST_LETTERS], list[str]()
    while text:
        letters = bisect_left(range(len(text)), True, key=lambda n: width_of(text[: n + 1], font) > inches)
        cut = letters
        if letters < len(text):
            signs = [match.end() for match in _SIGNS.finditer(text, 0, letters)]
            cut = max(text.rfind(" ", 0, letters + 1), 0) or max([1, *(signs[-1:] or [letters])])
        if len(lines) == _MOST_LINES - 1 and cut < len(text):
            return [*lines, f"{text[: letters - 1]}…"]
        lines.append(text[:cut])
        text = text[cut:].lstrip()
    return lines


def literal(text: str) -> str:
    """Escape a text for matplotlib's labels: one line, and no dollar sign begins a formula."""
    return visible(text).replace("$", r"\$")


def names_inches(names: Sequence[str]) -> float:
    """Return the height of names that :func:`name_sites` writes."""
    return min(_NAME_INCHES, max(map(width_of, names), default=0.0))


def name_sites(ax: Axes, names: Sequence[str], inches: float) -> None:
    """Write names upright below a panel of a width: every one, or every second, third … of them."""
    every = max(1, math.ceil(len(names) * _UPRIGHT_INCHES / inches))
    labels = [literal(tail(name, _NAME_INCHES)) for name in names[::every]]
    ax.set_xticks(range(0, len(names), every), labels, rotation=90, fontproperties=NOTE)
    ax.margins(x=0.01)


def write_above(ax: Axes, lines: Sequence[Words]) -> float:
    """Write lines of coloured words right above a panel, and return the pad of a title above them, in points.

    Empty lines leave room, so that titles above neighbouring panels are in line.
    """
    look: dict[str, Any] = {"fontproperties": NOTE, "parse_math": False, "in_layout": False}
    for number, words in enumerate(reversed(lines)):
        x = 0.0
        for text, colour in words:
            look["color"] = readable(colour, ax.get_facecolor())
            write_at(ax, text, (0, 1), (x, _ABOVE_POINTS + LINE_POINTS * number), annotation_clip=False, **look)
            x += 72 * width_of(text) + _SPACE_POINTS
    if not (number := len(lines)):
        return _ABOVE_POINTS
    # A title is given room by its height alone, and these lines need no other; with y it stays below a strip.
    ax.set_title(" ", loc="right", y=1, fontproperties=NOTE, pad=_ABOVE_POINTS + LINE_POINTS * (number - 1))
    return _ABOVE_POINTS + LINE_POINTS * number + _BELOW_TITLE


def write_at(
    ax: Axes,
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    xycoords: Any = "axes fraction",
    **look: Any,
) -> None:
    """Write a text beside a point of a panel; the offset is in points."""
    ax.annotate(text, at, offset, xycoords=xycoords, textcoords="offset points", **{"va": "bottom", **look})
