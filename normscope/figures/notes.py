"""Texts above panels and below figures, where nothing is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import ScaledTranslation

from normscope.figures.style import LEAST_POINTS, Style, width_of, wrapped

Words: TypeAlias = Sequence[tuple[str, str]]  # texts of one line, each with its colour

LINE_POINTS = 7.6
_ABOVE_POINTS = 2.5
_BELOW_TITLE = 3.0
_SPACE_POINTS = 3.6
NOTE = FontProperties(size=LEAST_POINTS)
NONE = "none"


def write_above(ax: Axes, lines: Sequence[Words], least: int = 0) -> float:
    """Write lines of coloured words right above a panel, from its left edge.

    Args:
        ax: the panel.
        lines: from top to bottom.
        least: number of lines that room is left for, so that titles above panels beside one another are in line.

    Returns:
        The pad of a title above them, in points.
    """
    for number, words in enumerate(reversed(lines)):
        x = 0.0
        for text, colour in words:
            ax.annotate(
                text,
                (0, 1),
                (x, _ABOVE_POINTS + LINE_POINTS * number),
                xycoords="axes fraction",
                textcoords="offset points",
                color=colour,
                va="bottom",
                fontproperties=NOTE,
                annotation_clip=False,
                parse_math=False,
                in_layout=False,
            )
            x += 72 * width_of(text, NOTE) + _SPACE_POINTS
    number = max(len(lines), least)
    if not number:
        return _ABOVE_POINTS
    # A title is given room by its height alone, and these lines need no other.
    ax.set_title(" ", loc="right", fontproperties=NOTE, pad=_ABOVE_POINTS + LINE_POINTS * (number - 1))
    return _ABOVE_POINTS + LINE_POINTS * number + _BELOW_TITLE


def broken(parts: Sequence[str], colour: str, inches: float) -> list[Words]:
    """Put parts of a text into as few lines of so many inches as they need; no part is divided."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines else part
        if lines and width_of(longer, NOTE) <= inches:
            lines[-1] = longer
        else:
            lines.append(part)
    return [[(line, colour)] for line in lines]


def lined(words: Words, inches: float) -> list[Words]:
    """Put words of several colours into as few lines of so many inches as they need."""
    lines: list[list[tuple[str, str]]] = [[]]
    left = inches
    for text, colour in words:
        width = width_of(text, NOTE) + _SPACE_POINTS / 72
        if lines[-1] and width > left:
            lines.append([])
            left = inches
        lines[-1].append((text, colour))
        left -= width
    return list(lines)


def strip_above(ax: Axes, left_points: float, width_points: float) -> Axes:
    """Make axes as high as a letter within the lowest line above a panel, for a colour bar there."""
    inches = (left_points / 72, (_ABOVE_POINTS + 1.2) / 72, width_points / 72, 4.2 / 72)
    corner: Any = ax.transAxes  # annotated as any transform
    strip: Axes = ax.inset_axes(inches, transform=ax.figure.dpi_scale_trans + ScaledTranslation(0, 1, corner))
    strip.set_in_layout(False)
    return strip


def heading(about: Mapping[str, str], samples: str = "") -> str:
    """Name the network, and the part of its data if it is one: a figure's title."""
    return " · ".join(part for part in (about["model"], about.get("part"), samples) if part)


def provenance(about: Mapping[str, str]) -> str:
    """Name weights and data in one line: a figure's footer."""
    return f"weights: {about['weights']} · data: {about['data']}"


def title_and_foot(title: str | None, usual: str, foot: str, weights: str) -> tuple[str, str]:
    """Decide what stands above a figure and below it.

    Without a title of one's own, the usual one and the footer; ``none`` is neither. That weights are not trained
    stands in every figure.

    >>> title_and_foot("none", "net", "weights: w · data: d", "w"), title_and_foot("none", "net", "…", "random weights")
    (('', ''), ('', 'random weights'))
    """
    if title is None:
        return usual, foot
    if title == NONE:
        return "", "" if not _made(weights) else weights
    return title, foot


def _made(weights: str) -> bool:
    return "random" in weights.lower() or "made" in weights.lower()


def frame(figure: Figure, title: str, foot: Sequence[str], style: Style, **legend: Any) -> ConstrainedLayoutEngine:
    """Write a title above all panels, and a legend and lines of text below them, with nothing over one another.

    To be called once the figure has its size.

    Args:
        figure: of any size.
        title: empty for none.
        foot: texts, each of which begins a line; empty ones are left out.
        style: of the figure.
        legend: what :meth:`matplotlib.figure.Figure.legend` takes, without a place.

    Returns:
        The engine that lays the panels out between them.
    """
    width, height = figure.get_size_inches()
    if title:
        font = FontProperties(size=7.5)
        figure.suptitle("\n".join(wrapped(title, width - 0.2, font)), fontproperties=font, parse_math=False)
    below = foot_inches(foot, width) / height
    if lines := _foot_lines(foot, width):
        figure.text(
            *(0.5, 0.03 / height, "\n".join(lines)),
            ha="center",
            va="bottom",
            color=style.faint,
            fontproperties=NOTE,
            parse_math=False,
        )
    if legend.get("handles"):
        drawn = figure.legend(loc="lower center", bbox_to_anchor=(0.5, below), borderaxespad=0.2, **legend)
        drawn.set_in_layout(False)  # as nothing else leaves room for text below it
        below += drawn.get_window_extent().height / figure.bbox.height + 0.05 / height
    engine = ConstrainedLayoutEngine(rect=(0, below, 1, 1 - below))
    figure.set_layout_engine(engine)
    return engine


def _foot_lines(foot: Sequence[str], width: float) -> list[str]:
    return [line for text in foot if text for line in wrapped(text, width - 0.2, NOTE)]


def foot_inches(foot: Sequence[str], width: float) -> float:
    """Return how high lines of text stand below a figure of so many inches."""
    lines = _foot_lines(foot, width)
    return 0.04 + 0.12 * len(lines) if lines else 0.0


def title_inches(title: str, width: float) -> float:
    """Return how high a title stands above a figure of so many inches."""
    return (0.06 + 0.13 * len(wrapped(title, width - 0.2, FontProperties(size=7.5)))) if title else 0.0
