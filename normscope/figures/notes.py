"""Texts above panels, and above and below figures, where nothing is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.transforms import ScaledTranslation

from normscope.errors import UsageError
from normscope.figures.style import HANDLE_LENGTH, LEAST_POINTS, Style, legend_columns, width_of, wrapped

Words: TypeAlias = Sequence[tuple[str, str]]  # texts of one line, each with its colour

LINE_POINTS = 7.6
_ABOVE_POINTS = 2.5
_BELOW_TITLE = 3.0
_SPACE_POINTS = 3.6
_TITLE_POINTS = 7.5
NOTE, LEGEND = FontProperties(size=LEAST_POINTS), FontProperties(size=6.5)
NONE = "none"
_DIGEST = re.compile(r" \(sha256 [0-9a-f]+\)|, sha256 [0-9a-f]+|sha256 [0-9a-f]+, ")


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
    return " · ".join(part for part in (about.get("model"), about.get("part"), samples) if part)


def without_digest(text: str) -> str:
    """Leave out the digest of a file, which nobody compares by eye; the figure's metadata hold it.

    >>> without_digest("embedded net (trained on digits, sha256 0123456789ab)"), without_digest("net (sha256 01ab)")
    ('embedded net (trained on digits)', 'net')
    """
    return _DIGEST.sub("", text)


def provenance(about: Mapping[str, str], names: Sequence[str] = ("weights", "data")) -> str:
    """Name weights and data in one line, as far as they are known: a figure's footer."""
    return " · ".join(f"{name}: {without_digest(about[name])}" for name in names if name in about)


def title_and_foot(
    title: str | None, usual: str, about: Mapping[str, str], names: Sequence[str] = ("weights", "data")
) -> tuple[str, str]:
    """Decide what stands above a figure and below it.

    Without a title of one's own, the usual one and, as with one, where everything is from; ``none`` is neither. That
    weights are not trained stands in every figure.

    >>> title_and_foot("none", "net", {"weights": "w", "data": "d"})
    ('', '')
    >>> title_and_foot("none", "net", {"weights": "random weights", "data": "d"})
    ('', 'random weights')
    """
    if title == NONE:
        weights = without_digest(about.get("weights", ""))
        return "", weights if _made(weights) else ""
    return usual if title is None else title, provenance(about, names)


def _made(weights: str) -> bool:
    return "random" in weights.lower() or "made" in weights.lower()


def inches_of(width: float | None, usual: float) -> float:
    """Return how wide a figure is that may have been asked to be so many inches wide; UsageError if none can be."""
    if width is not None and not 2 <= width <= 100:
        raise UsageError(f"A figure cannot be {width:g} inches wide: take 2 to 100; a column of a paper has 3 to 7.")
    return width or usual


def framed(
    width: float,
    height: float,
    title: str,
    foot: Sequence[str],
    style: Style,
    handles: Sequence[Artist] = (),
    font: FontProperties = LEGEND,
    **layout: Any,
) -> Figure:
    """Make a figure with a title above all panels, and a legend and lines of text below, nothing over one another.

    Args:
        width: of the figure, in inches.
        height: of its panels and what stands between them; the figure is as much higher as the rest takes.
        title: empty for none.
        foot: texts, each of which begins a line; empty ones are left out.
        style: of the figure.
        handles: of the legend; labels too long for the figure are broken into lines.
        font: of the legend.
        layout: spaces between the panels, as :class:`matplotlib.layout_engine.ConstrainedLayoutEngine` takes them.
    """
    figure = Figure(figsize=(width, height))
    font_of_title = FontProperties(size=_TITLE_POINTS)
    head = wrapped(title, width - 0.2, font_of_title)
    lines = [line for text in foot if text for line in wrapped(text, width - 0.2, NOTE)]
    below = 0.04 + 0.12 * len(lines) if lines else 0.0
    legend = _legend(figure, handles, font)
    legend_inches = legend.get_window_extent().height / figure.dpi + 0.05 if legend else 0.0
    whole = height + (0.06 + 0.13 * len(head) if head else 0.0) + below + legend_inches
    figure.set_size_inches(width, whole)
    if head:
        figure.suptitle("\n".join(head), fontproperties=font_of_title, parse_math=False)
    if lines:
        figure.text(
            *(0.5, 0.03 / whole, "\n".join(lines)),
            ha="center",
            va="bottom",
            color=style.faint,
            fontproperties=NOTE,
            parse_math=False,
        )
    if legend:
        legend.set_bbox_to_anchor((0.5, below / whole))
    below = (below + legend_inches) / whole
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, below, 1, 1 - below), **layout))
    return figure


def _legend(figure: Figure, handles: Sequence[Artist], font: FontProperties) -> Legend | None:
    """Put a legend at the lower edge of a figure, with no label wider than that."""
    if not handles:
        return None
    width = figure.get_figwidth()
    room = width - (HANDLE_LENGTH + 1.6) * font.get_size_in_points() / 72
    for handle in handles:
        text = str(handle.get_label()).replace(r"\$", "$")
        if width_of(text, font) > room:
            handle.set_label("\n".join(wrapped(text, room, font)).replace("$", r"\$"))
    columns = legend_columns([str(handle.get_label()) for handle in handles], width, font)
    legend = figure.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, 0), borderaxespad=0.2, ncols=columns, prop=font
    )
    legend.set_in_layout(False)  # as nothing else leaves room for text below it
    return legend
