"""Parts shared by all figures: colours, sizes, the sheet with title and footer, and texts above panels."""

from __future__ import annotations

import contextlib
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypedDict

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font_names
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.textpath import TextToPath
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from normscope.curves.known import CURVES
from normscope.errors import UsageError, unknown
from normscope.norms.sites import short_names
from normscope.runtime.files import visible

Look: TypeAlias = tuple[str, Any]  # colour and line style, as matplotlib takes them

# Okabe and Ito, "Color Universal Design" (2008): distinguishable with protanopia, deuteranopia and tritanopia.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"


@dataclass(frozen=True)
class Style:
    """One theme.

    Attributes:
        background: of figure and panels.
        ink: text, axes and E[y|x].
        faint: bounds, grids and background elements.
        curves: colours of the fitted curves.
        density: matplotlib colour map of numbers of pairs.
        tokens: matplotlib colour map of the tokens' σ.
        channels: colours of the channels of largest |x|, the largest first.
        fonts: families of all letters, in the order in which they are looked for a letter.
    """

    background: str
    ink: str
    faint: str
    curves: tuple[str, ...]
    density: str
    tokens: str
    channels: tuple[str, ...]
    fonts: tuple[str, ...] = ("sans-serif",)

    def looks(self, curves: Iterable[str] = ()) -> dict[str, Look]:
        """Return a colour and a line style for every built-in curve and for each of ``curves``.

        Built-in curves look the same in every figure; others follow in order. Up to 30 curves, no two look alike.

        >>> looks = STYLES["light"].looks(["tanh", "my_curve"])
        >>> looks["tanh"]
        ('#D55E00', '-')
        >>> looks["my_curve"] in [look for name, look in looks.items() if name != "my_curve"]
        False
        """
        places = {name: place for place, name in enumerate(CURVES)}
        for name in curves:
            places.setdefault(name, len(places))
        return {
            name: (self.curves[place % len(self.curves)], _DASHES[place % len(_DASHES)])
            for name, place in places.items()
        }

    def looks_of(self, curves: Sequence[str]) -> dict[str, Look]:
        """Return the looks of the few curves that one figure draws: no two of one colour while there are others."""
        looks, colours = self.looks(curves), dict[str, str]()
        for curve in sorted(curves, key=lambda curve: curve not in CURVES):  # a built-in one keeps its own
            usual = looks[curve][0]
            choice = (usual, *self.curves, *self.channels)
            colours[curve] = next((colour for colour in choice if colour not in colours.values()), usual)
        return {curve: (colours[curve], looks[curve][1]) for curve in curves}

    def math(self) -> dict[Any, Any]:
        """Return matplotlib parameters of formulas, whose letters are of a chosen font as well."""
        if self.fonts == Style.fonts:
            return {}
        font = self.fonts[0]
        letters = {"mathtext.rm": font, "mathtext.it": f"{font}:italic", "mathtext.cal": font}
        return {"mathtext.fontset": "custom", "mathtext.fallback": "stix", **letters}

    def rc(self) -> dict[Any, Any]:
        """Return the theme as matplotlib parameters."""
        return {
            **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), self.background),
            **dict.fromkeys(
                ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), self.ink
            ),
            "axes.linewidth": 0.6,
            "font.family": self.fonts,
            **self.math(),
            "font.size": 7,
            "axes.titlesize": 7.5,
            "axes.labelsize": 7,
            **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 6),
            "legend.fontsize": 6.5,
            "legend.frameon": False,
            "legend.handlelength": HANDLE_LENGTH,
            **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
            "svg.fonttype": "none",
            "svg.hashsalt": "normscope",
            **dict.fromkeys(("pdf.fonttype", "ps.fonttype"), 42),
        }


LEAST_POINTS = 6.0  # no letter in a figure is smaller
HANDLE_LENGTH = 3.2  # of a legend's lines, in letter sizes: two periods of the longest dashes
# As many as have no divisor in common with the number of colours: neighbours then differ in both.
_DASHES = (
    "-",
    (0, (4, 1.5)),
    (0, (1, 1.2)),
    (0, (5, 1.3, 1, 1.3)),
    (0, (5, 1.2, 1, 1.2, 1, 1.2)),
    (0, (7, 1.5, 3, 1.5)),
)
# Besides Okabe's and Ito's: far from one another and from the channels with any colour vision, by Machado, Oliveira
# and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009).
VIOLET, BROWN, NAVY, LILAC, OLIVE, MINT = "#9911FF", "#774433", "#112266", "#AA55FF", "#AA9955", "#BBFFBB"
STYLES = {
    "light": Style(
        background="#FFFFFF",
        ink="#1A1A1A",
        faint="#707070",
        curves=(VERMILLION, BLUE, VIOLET, BROWN, NAVY),
        density="Greys",
        tokens="viridis",
        channels=(ORANGE, GREEN, SKY, PURPLE),
    ),
    "dark": Style(
        background="#14171C",
        ink="#E8E8E8",
        faint="#8D939D",
        curves=(ORANGE, SKY, LILAC, OLIVE, MINT),
        density="bone",
        tokens="viridis",
        channels=(VERMILLION, GREEN, YELLOW, PURPLE),
    ),
}


def shades(style: Style) -> ListedColormap:
    """Return the map of the tokens' σ without the end that is near the background, for lines."""
    low, high = (0.25, 1.0) if style.background < style.ink else (0.0, 0.85)
    return ListedColormap(matplotlib.colormaps[style.tokens](np.linspace(low, high, 256)))


def style_named(name: str, font: str | None = None) -> Style:
    """Return a theme by its name, in a font family; UsageError for an unknown name or family."""
    if name not in STYLES:
        raise UsageError(unknown("style", name, STYLES))
    if font is None:
        return STYLES[name]
    try:
        findfont(FontProperties(family=[font]), fallback_to_default=False)
    except ValueError:
        fonts = unknown("font", font, sorted(get_font_names()))
        raise UsageError(f"{fonts} matplotlib takes those that are installed.") from None
    return replace(STYLES[name], fonts=(font, "DejaVu Sans"))  # has the Greek letters that other fonts may lack


LABELS = NO_LABELS, SHORT, FULL = ("none", "short", "full")
CAPTIONS = ("txt", "tex")


class FigureOptions(TypedDict, total=False):
    """Options of every figure, as of :func:`normscope.plot`."""

    width: float | None
    title: str | None
    style: str
    labels: str
    font: str | None
    caption: str | None


def theme_of(options: Mapping[str, Any]) -> Style:
    """Return the theme; UsageError for an unknown option, style, kind of labels, font or kind of caption."""
    for name in options.keys() - FigureOptions.__annotations__.keys():
        raise UsageError(unknown("option of a figure", name, FigureOptions.__annotations__))
    for kind, value, choices in (
        ("labels", options.get("labels", SHORT), LABELS),
        ("caption", options.get("caption"), (None, *CAPTIONS)),
    ):
        if value not in choices:
            raise UsageError(unknown(f"kind of {kind}", str(value), filter(None, choices)))
    return style_named(options.get("style", "light"), options.get("font"))


_CONTRAST = 4.5  # of letters, by the Web Content Accessibility Guidelines 2.2


def readable(colour: str, background: Any) -> str:
    """Return a colour for letters: mixed with black or white until its contrast with the background is 4.5:1.

    >>> readable("#D55E00", "white"), readable("#0072B2", "white")
    ('#c05500', '#0072b2')
    """
    behind = _luminance(to_rgb(background))
    end = np.full(3, float(behind < 0.18))
    for share in np.linspace(0, 1, 21):
        mixed = (1 - share) * np.array(to_rgb(colour)) + share * end
        high, low = sorted((_luminance(mixed), behind), reverse=True)
        if (high + 0.05) / (low + 0.05) >= _CONTRAST:
            break
    return to_hex(tuple(mixed))


def _luminance(rgb: Any) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


_MOST_LINES = 3
_NAME_INCHES, _UPRIGHT_INCHES = 1.45, 0.1  # of a site, which stands upright
MANY_TIMES = 4  # between the values of a logarithmic axis, at least
_HINTING = 1.12  # so much wider do letters become where they are fitted to few pixels
_LETTERS = TextToPath()
_TINY = FontProperties(size=LEAST_POINTS)


def width_of(text: str, font: FontProperties) -> float:
    """Return the width of a text's longest line in inches, without drawing it."""
    font = font.copy()
    font.set_family(matplotlib.rcParams["font.family"])
    widths = [_LETTERS.get_text_width_height_descent(line, font, ismath=False)[0] for line in text.split("\n")]
    return float(max(widths)) / 72 * _HINTING


def tail(text: str, inches: float, font: FontProperties) -> str:
    """Shorten a text from the left to so many inches, as module paths differ at their ends."""
    text = visible(text)
    if width_of(text, font) <= inches:
        return text
    dropped = bisect_left(range(len(text)), True, key=lambda n: width_of(f"…{text[n:]}", font) <= inches)
    return f"…{text[dropped:].lstrip('.')}"


def names_inches(names: Sequence[str]) -> float:
    """Return the height of names that :func:`name_sites` writes."""
    return min(_NAME_INCHES, max((width_of(name, _TINY) for name in names), default=0.0))


def name_sites(ax: Axes, names: Sequence[str], inches: float) -> None:
    """Write names upright below a panel so many inches wide: every one, or every second, third … of them."""
    every = max(1, math.ceil(len(names) * _UPRIGHT_INCHES / inches))
    labels = [literal(tail(name, _NAME_INCHES, _TINY)) for name in names[::every]]
    ax.set_xticks(range(0, len(names), every), labels, rotation=90, fontproperties=_TINY)
    ax.margins(x=0.01)


def that_fits(texts: Sequence[str], inches: float, points: float = 7) -> str:
    """Return the first of several texts that is at most so many inches wide, or the last."""
    font = FontProperties(size=points)
    return next((text for text in texts if width_of(text, font) <= inches), texts[-1])


def wrapped(text: str, inches: float, font: FontProperties) -> list[str]:
    """Break a text into at most three lines of so many inches, at spaces where possible; the rest is an ellipsis."""
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
    """Return the number of columns of a legend that fit, filled and spaced as matplotlib does."""
    widths, em = [width_of(label, font) for label in labels], font.get_size_in_points() / 72

    def width(columns: int) -> float:
        # To each label its handle and a gap of 0.8; 2 between columns, 0.4 at either side.
        texts = sum(float(max(column)) for column in np.array_split(widths, columns))
        return texts + ((HANDLE_LENGTH + 2.8) * columns - 1.2) * em

    return next((columns for columns in range(len(labels), 1, -1) if width(columns) <= inches), 1)


def scale_by_factors(ax: Axes) -> None:
    """Make the axis of y logarithmic, with plain numbers beside it."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


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


def literal(text: str) -> str:
    """Write a text as matplotlib takes it in labels: one line, and no dollar sign begins a formula."""
    return visible(text).replace("$", r"\$")


Words: TypeAlias = Sequence[tuple[str, str]]  # texts of one line, each with its colour

LINE_POINTS = 7.6
_ABOVE_POINTS = 2.5
_BELOW_TITLE = 3.0
_SPACE_POINTS = 3.6
NOTE, LEGEND, _TITLE = (FontProperties(size=points) for points in (LEAST_POINTS, 6.5, 7.5))
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
    look: dict[str, Any] = {"fontproperties": NOTE, "parse_math": False, "in_layout": False}
    for number, words in enumerate(reversed(lines)):
        x = 0.0
        for text, colour in words:
            look["color"] = readable(colour, ax.get_facecolor())
            write_at(ax, text, (0, 1), (x, _ABOVE_POINTS + LINE_POINTS * number), annotation_clip=False, **look)
            x += 72 * width_of(text, NOTE) + _SPACE_POINTS
    number = max(len(lines), least)
    if not number:
        return _ABOVE_POINTS
    # A title is given room by its height alone, and these lines need no other; with y it stays below a strip.
    ax.set_title(" ", loc="right", y=1, fontproperties=NOTE, pad=_ABOVE_POINTS + LINE_POINTS * (number - 1))
    return _ABOVE_POINTS + LINE_POINTS * number + _BELOW_TITLE


def write_at(
    ax: Axes,
    text: str,
    at: tuple[float, float],
    points: tuple[float, float],
    xycoords: Any = "axes fraction",
    **look: Any,
) -> None:
    """Write a text some points off a place of a panel."""
    ax.annotate(text, at, points, xycoords=xycoords, textcoords="offset points", **{"va": "bottom", **look})


def broken(parts: Sequence[str], colour: str, inches: float) -> list[Words]:
    """Put parts of a text into as few lines as fit; no part is divided."""
    lines: list[str] = []
    for part in parts:
        if lines and width_of(f"{lines[-1]}  {part}", NOTE) <= inches:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return [[(line, colour)] for line in lines]


def words_inches(words: Words) -> float:
    """Return the width of a line of words."""
    return sum(width_of(text, NOTE) + _SPACE_POINTS / 72 for text, _ in words) - _SPACE_POINTS / 72


def heading(about: Mapping[str, str], samples: str = "") -> str:
    """Return a figure's title: the network, and the part of its data if there is one."""
    return " · ".join(part for part in (about.get("model"), about.get("part"), samples) if part)


def without_digest(text: str) -> str:
    """Remove the digest of a file, which the figure's metadata contain.

    >>> without_digest("embedded net (trained on digits, sha256 0123456789ab)"), without_digest("net (sha256 01ab)")
    ('embedded net (trained on digits)', 'net')
    """
    return _DIGEST.sub("", text)


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


def inches_of(width: float | None, usual: float) -> float:
    """Return a figure's width in inches, the default if None was asked for; UsageError if it is out of range."""
    if width is not None and not 2 <= width <= 100:
        raise UsageError(f"A figure cannot be {width:g} inches wide: take 2 to 100; a column of a paper has 3 to 7.")
    return width or usual


class Sheet(Figure):
    """A figure, and the text for a file beside it.

    Attributes:
        caption: suffix and text of that file; None for no file.
        math: matplotlib parameters of formulas, which matplotlib reads again when it draws.
        origin: model, weights, data, versions and seed of what is drawn, as JSON.
    """

    caption: tuple[str, str] | None = None
    math: dict[Any, Any]
    origin: Any

    def draw(self, renderer: Any) -> None:
        with matplotlib.rc_context(self.math):
            super().draw(renderer)


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
    font: FontProperties = LEGEND,
    **layout: Any,
) -> Iterator[Sheet]:
    """Make a figure with a title above its panels, and a legend and lines of text below; nothing overlaps.

    The style's parameters apply while its panels are drawn.

    Args:
        options: of the user, whose title and caption are taken: with a caption,
            :func:`normscope.figures.save_figure` writes the foot beside the figure.
        style: of the figure.
        width: in inches.
        height: of its panels, in inches; title, legend and foot add to it.
        about: of the network.
        detail: in the default title, after the network's name.
        foot: sentences above the line of weights and data, each on a line of its own.
        handles: of the legend; long labels are wrapped.
        names: entries of ``about`` in the last line.
        font: of the legend.
        layout: spaces between the panels, as :class:`matplotlib.layout_engine.ConstrainedLayoutEngine` takes them.
    """
    title, caption = options.get("title"), options.get("caption")
    usual = heading({**about, "part": " · ".join(filter(None, (about.get("part"), untrained(about))))}, detail)
    above, origin = title_and_foot(title, usual, about, names)
    with matplotlib.rc_context(style.rc()):
        head = wrapped(above, width - 0.2, _TITLE)
        below_panels = () if caption else (*foot, origin)
        lines = [line for text in below_panels for line in wrapped(text, width - 0.2, NOTE)]
        figure = Sheet(figsize=(width, height))
        figure.math, figure.origin = style.math(), dict(about)
        if caption:
            first, last = title_and_foot(None if title == NONE else title, usual, about, names)
            figure.caption = (
                caption,
                " ".join(f"{text}." for text in (first, *foot, f"{last[:1].upper()}{last[1:]}") if text),
            )
        below = 0.04 + 0.12 * len(lines) if lines else 0.0
        legend = _legend(figure, handles, font)
        legend_inches = legend.get_window_extent().height / figure.dpi + 0.05 if legend else 0.0
        whole = height + (0.06 + 0.13 * len(head) if head else 0.0) + below + legend_inches
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
        # Letters are drawn where these parameters no longer apply.
        for artist in figure.findobj() if style.fonts != Style.fonts else ():
            if isinstance(artist, Text):
                artist.set_fontfamily(style.fonts)
                artist.set_math_fontfamily("custom")
            elif isinstance(artist, Axes):
                artist.tick_params(which="both", labelfontfamily=style.fonts)


def untrained(about: Mapping[str, str]) -> str:
    return "random weights" if "random" in about.get("weights", "").lower() else ""


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
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 0.2}
    legend = figure.legend(handles=handles, ncols=columns, prop=font, **place)
    legend.set_in_layout(False)  # the rectangle of the layout leaves room for it
    return legend


def key(label: str, color: Any, ls: Any = "-", lw: float = 0.9, **look: Any) -> Line2D:
    """Make a legend's entry, in which no dollar sign begins a formula: a line, or with a ``marker`` a point."""
    return Line2D([], [], color=color, ls=ls, lw=lw, label=literal(label), **look)


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
