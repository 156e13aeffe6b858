"""The frame of every figure: size, title, panels, legend, and lines of text below; and its file."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from normscope.errors import UsageError, unknown
from normscope.norms.sites import short_names
from normscope.pairs.captures import Capture
from normscope.runtime.files import whole_file
from normscope.show.figures.style import FULL, HANDLE_LENGTH, SHORT, FigureOptions, Style
from normscope.show.figures.text import NOTE, literal, width_of, wrapped
from normscope.show.tables.markup import latex

NONE = "none"
FORMATS = ("png", "svg", "pdf")
DPI = 200
_LEAST_DPI = 300  # of the points within a vector graphic
MANY_TIMES, _DECADES = 4, 200  # between the values of a logarithmic axis: at least, and of one with powers of ten alone
_LEGEND, _TITLE = FontProperties(size=6.5), FontProperties(size=7.5)
_DIGEST = re.compile(r" \(sha256 [0-9a-f]+\)|, sha256 [0-9a-f]+|sha256 [0-9a-f]+, ")
PAGE_INCHES = 9.0  # height of a paper's text
_MOST_BELOW = 0.15  # of a figure's height, that legend and lines below take; the rest is in its metadata and caption
PANELS_INCHES = (1 - _MOST_BELOW) * PAGE_INCHES - 0.2  # of all panels at most, so that a page contains title and legend
_LINE_INCHES = 0.12


class Sheet(Figure):
    """A figure, and the text for a file beside it.

    Attributes:
        caption: title and all lines below the figure, for its metadata.
        caption_suffix: of the file that contains the caption as well; None for no file.
        math: matplotlib parameters of formulas, which matplotlib reads again when it draws.
        origin: model, weights, data, versions and seed of what is drawn, as JSON.
    """

    caption: str = ""
    caption_suffix: str | None = None
    math: dict[Any, Any]
    origin: Any

    def draw(self, renderer: Any) -> None:
        with matplotlib.rc_context(self.math):
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        super().savefig(fname, **{"dpi": DPI, **options})


@contextlib.contextmanager
def sheet_of(
    options: FigureOptions,
    style: Style,
    width: float,
    height: float,
    about: Mapping[str, str],
    *,
    detail: str = "",
    foot: Sequence[str] = (),
    handles: Sequence[Artist] = (),
    names: Sequence[str] = ("weights", "data"),
    **layout: Any,
) -> Iterator[Sheet]:
    """Make a figure with a title above its panels, and a legend and lines of text below; nothing overlaps.

    The style's parameters apply while its panels are drawn.

    Args:
        options: of the user, including title and caption: with a caption,
            :func:`normscope.figures.save_figure` writes the foot beside the figure.
        style: of the figure.
        width: of the figure, in inches.
        height: of its panels, in inches; title, legend and foot add to it.
        about: the network.
        detail: in the default title, after the network's name.
        foot: sentences above the line of weights and data, each on a line of its own, the most important first.
        handles: of the legend; long labels are wrapped.
        names: entries of ``about`` in the last line.
        layout: spaces between the panels, as :class:`matplotlib.layout_engine.ConstrainedLayoutEngine` takes them.
    """
    title, caption = options.get("title"), options.get("caption")
    usual = heading({**about, "part": " · ".join(filter(None, (about.get("part"), untrained(about))))}, detail)
    above, origin = title_and_foot(title, usual, about, names)
    with matplotlib.rc_context(style.rc()):
        head = wrapped(above, width - 0.2, _TITLE)
        figure = Sheet(figsize=(width, height))
        figure.math, figure.origin, figure.caption_suffix = style.math(), dict(about), caption
        first, last = title_and_foot(None if title == NONE else title, usual, about, names)
        figure.caption = " ".join(f"{text}." for text in (first, *foot, f"{last[:1].upper()}{last[1:]}") if text)
        legend = _legend(figure, handles)
        legend_inches = legend.get_window_extent().height / figure.dpi + 0.05 if legend else 0.0
        height += 0.06 + 0.13 * len(head) if head else 0.0
        room = height * _MOST_BELOW / (1 - _MOST_BELOW) - legend_inches
        lines = [] if caption else _lines_within([*foot, origin], width - 0.2, room)
        lines += wrapped(origin, width - 0.2) if title == NONE and not caption and not lines else []
        below = 0.04 + _LINE_INCHES * len(lines) if lines else 0.0
        whole = height + below + legend_inches
        figure.set_size_inches(width, whole)
        if head:
            figure.suptitle("\n".join(head), fontproperties=_TITLE, parse_math=False)
        if lines:
            look: dict[str, Any] = {"ha": "center", "va": "bottom", "color": style.faint, "fontproperties": NOTE}
            figure.text(0.5, 0.03 / whole, "\n".join(lines), parse_math=False, **look)
        if legend:
            legend.set_bbox_to_anchor((0.5, below / whole))
        below = (below + legend_inches) / whole
        figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, below, 1, 1 - below), **layout))
        yield figure
        if style.fonts != Style.fonts:
            _set_fonts(figure, style)


def _lines_within(texts: Sequence[str], inches: float, room: float) -> list[str]:
    """Return the lines of those texts that are not cut at a width, in order, as far as a height has room for them."""
    lines = list[str]()
    for text in texts:
        more = wrapped(text, inches)
        if "".join(more).replace(" ", "") == text.replace(" ", "") and _LINE_INCHES * (len(lines) + len(more)) <= room:
            lines += more
    return lines


def _set_fonts(figure: Figure, style: Style) -> None:
    """Set the fonts of all letters, which are drawn where the style's parameters no longer apply."""
    for artist in figure.findobj():
        if isinstance(artist, Text):
            artist.set_fontfamily(style.fonts)
            artist.set_math_fontfamily("custom")
        elif isinstance(artist, Axes):
            artist.tick_params(which="both", labelfontfamily=style.fonts)


def _legend(figure: Figure, handles: Sequence[Artist]) -> Legend | None:
    """Put a legend with as many columns as fit at the lower edge of a figure; labels wider than that are wrapped."""
    width = figure.get_figwidth()
    room = width - (HANDLE_LENGTH + 1.6) * _LEGEND.get_size_in_points() / 72
    for handle in handles:
        text = str(handle.get_label()).replace(r"\$", "$")
        if width_of(text, _LEGEND) > room:
            handle.set_label("\n".join(wrapped(text, room, _LEGEND)).replace("$", r"\$"))
    options: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 0.2, "prop": _LEGEND}
    options["columnspacing"] = 1.4
    for columns in range(len(handles), 0, -1):
        legend = figure.legend(handles=handles, ncols=columns, **options)
        if columns == 1 or legend.get_window_extent().width <= width * figure.dpi:
            legend.set_in_layout(False)  # the rectangle of the layout leaves room for it
            return legend
        legend.remove()
    return None


def key(label: str, color: Any, ls: Any = "-", lw: float = 0.9, **look: Any) -> Line2D:
    """Make a legend's entry, in which no dollar sign begins a formula: a line, or with a ``marker`` a point."""
    return Line2D([], [], color=color, ls=ls, lw=lw, label=literal(label), **look)


def heading(about: Mapping[str, str], samples: str = "") -> str:
    """Return a figure's title: the network, and the part of its data if there is one."""
    return " · ".join(text for text in (about.get("model"), about.get("part"), samples) if text)


def untrained(about: Mapping[str, str]) -> str:
    return "random weights" if "random" in about.get("weights", "").lower() else ""


def title_and_foot(
    title: str | None, usual: str, about: Mapping[str, str], names: Sequence[str] = ("weights", "data")
) -> tuple[str, str]:
    """Return a figure's title, and the line of weights and data below it.

    By default the usual title, and weights and data below; ``none`` leaves out both, but never that weights are random.

    >>> title_and_foot("none", "net", {"weights": "w", "data": "d"})
    ('', '')
    >>> title_and_foot("none", "net", {"weights": "random weights", "data": "d"})
    ('', 'random weights')
    """
    if title == NONE:
        weights = without_digest(about.get("weights", ""))
        return "", weights if "random" in weights.lower() or "made" in weights.lower() else ""
    foot = " · ".join(f"{name}: {without_digest(about[name])}" for name in names if name in about)
    return usual if title is None else title, foot


def without_digest(text: str) -> str:
    """Remove the digest of a file, which the figure's metadata contain.

    >>> without_digest("embedded net (trained on digits, sha256 0123456789ab)"), without_digest("net (sha256 01ab)")
    ('embedded net (trained on digits)', 'net')
    """
    return _DIGEST.sub("", text)


def inches_of(width: float | None, usual: float) -> float:
    """Return a figure's width in inches, the default if None was asked for; UsageError if it is out of range."""
    if width is not None and not 2 <= width <= 100:
        raise UsageError(f"A figure cannot be {width:g} inches wide: take 2 to 100; a column of a paper has 3 to 7.")
    return width or usual


def row_inches(usual: float, rows: float, between: float, least: float) -> float:
    """Return the height of each row of panels: less than usual, but not under the least, if a page requires it.

    >>> [round(row_inches(2.0, rows, 0.45, 0.9), 3) for rows in (3, 5, 9)]  # 0.45 inches are between the rows
    [2.0, 1.4, 2.0]
    """
    room = (PANELS_INCHES - between) / rows
    return room if least <= room < usual else usual


def columns_of(options: FigureOptions, panels: int, least_inches: float, most: int) -> int:
    """Return the number of columns with room for each panel, as even over the rows as possible.

    >>> [columns_of({"width": 9.5}, panels, 2.3, 4) for panels in (1, 2, 3, 4, 5, 6, 7, 8)]
    [1, 2, 3, 4, 3, 3, 4, 4]
    """
    fitting = max(1, int(min(most, ((options.get("width") or math.inf) - 0.3) / least_inches)))
    return math.ceil(panels / math.ceil(panels / fitting))


def site_labels(paths: Iterable[str], options: FigureOptions) -> dict[str, str]:
    """Return the label of each site: its short name or path, or with ``none`` its number in the list."""
    names = list(paths)
    labels = options.get("labels", SHORT)
    if labels == FULL:
        return dict(zip(names, names, strict=True))
    return short_names(names) if labels == SHORT else {name: str(number) for number, name in enumerate(names)}


def plain(value: float, digits: int = 6) -> str:
    """Write a positive number without a power of ten.

    >>> plain(5e-05), plain(0.00049123, 3), plain(20.0)
    ('0.00005', '0.000491', '20')
    """
    return np.format_float_positional(value, digits, fractional=False, trim="-")


def scale_by_factors(ax: Axes) -> None:
    """Make the axis of y logarithmic, name it so, and write all of its numbers in one notation."""
    low, high = ax.dataLim.y0, ax.dataLim.y1
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > _DECADES * low else (1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: plain(y)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    if ax.get_ylabel():
        ax.set_ylabel(f"{ax.get_ylabel()}, log")


def scale_where_wide(ax: Axes) -> bool:
    """Make the axis of y logarithmic if its values are many times one another; return whether it was."""
    low, high = ax.dataLim.y0, ax.dataLim.y1
    wide = bool(0 < MANY_TIMES * low < high < math.inf)
    if wide:
        scale_by_factors(ax)
    return wide


def draw_guides(ax: Axes, style: Style) -> None:
    """Draw faint lines behind a panel at the ticks of y."""
    ax.grid(axis="y", color=style.faint, alpha=0.25, lw=0.5)


def save_figure(figure: Figure, path: str | Path, shown: Any = None, dpi: int = DPI) -> Path:
    """Write a figure to a file whose suffix is its format, with its provenance in the metadata, and its caption beside.

    Args:
        figure: what :func:`normscope.plot`, :func:`normscope.figures.overview` or another of them drew.
        path: of the file.
        shown: a capture or a list of them, whose model, weights, data, versions and seed the file contains as JSON; or
            other JSON; by default what the figure was drawn from.
        dpi: dots per inch; of the points within svg and pdf at least 300.

    Returns:
        The path.

    Raises:
        UsageError: if the suffix is not one of png, svg and pdf, or if it cannot be written there.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise UsageError(unknown("figure format", kind, FORMATS))
    text = json.dumps(getattr(figure, "origin", {}) if shown is None else origin_of(shown))
    dpi = dpi if kind == "png" else max(dpi, _LEAST_DPI)
    key = "Subject" if kind == "pdf" else "Description"
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    drawn = io.BytesIO()  # on a full disk matplotlib's PDF writer raises an error of zlib's
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "normscope", "pdf.fonttype": 42}),
        matplotlib.rc_context(figure.math if isinstance(figure, Sheet) else {}),
    ):
        metadata = {key: text, **dates, **({"Title": figure.caption} if isinstance(figure, Sheet) else {})}
        figure.savefig(drawn, dpi=dpi, format=kind, metadata=metadata)
    with whole_file(path) as partial:
        partial.write_bytes(drawn.getvalue())
    if isinstance(figure, Sheet) and figure.caption_suffix:
        written = f"\\caption{{{latex(figure.caption)}}}" if figure.caption_suffix == "tex" else figure.caption
        with whole_file(path.with_suffix(f".{figure.caption_suffix}")) as partial:
            partial.write_text(f"{written}\n", encoding="utf-8")
    return path


def origin_of(shown: Any) -> Any:
    """Return the provenance of captures as JSON, and anything else unchanged."""
    if isinstance(shown, Capture):
        return {**shown.about, "versions": dict(shown.versions), "seed": shown.seed}
    return [origin_of(capture) for capture in shown] if isinstance(shown, (list, tuple)) else shown
