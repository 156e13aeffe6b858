"""Texts that have to fit into a width: how wide they are, and what to leave out."""

from __future__ import annotations

from bisect import bisect_left

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

_MOST_LINES = 3
_HINTING = 1.12  # so much wider do letters become where they are fitted to few pixels
_LETTERS = TextToPath()


def width_of(text: str, font: FontProperties) -> float:
    """Return how many inches a line of text takes, without drawing it."""
    width, _, _ = _LETTERS.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72 * _HINTING


def tail(text: str, inches: float, font: FontProperties) -> str:
    """Shorten a text from the left, as the end of a module path tells it from the others, to so many inches."""
    if width_of(text, font) <= inches:
        return text
    dropped = bisect_left(range(len(text)), True, key=lambda n: width_of(f"…{text[n:]}", font) <= inches)
    return f"…{text[dropped:].lstrip('.')}"


def wrapped(text: str, inches: float, font: FontProperties) -> list[str]:
    """Break a text into lines of so many inches, at spaces where it can; what is far too long ends in an ellipsis."""
    lines: list[str] = []
    while text:
        fitting = bisect_left(range(len(text)), True, key=lambda n: width_of(text[: n + 1], font) > inches)
        cut = fitting if fitting == len(text) else max(text.rfind(" ", 0, fitting + 1), 0) or fitting
        if len(lines) == _MOST_LINES - 1 and cut < len(text):
            return [*lines, f"{text[: fitting - 1]}…"]
        lines.append(text[:cut])
        text = text[cut:].lstrip()
    return lines
