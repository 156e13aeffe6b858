"""Themes of all figures: colours, line styles, fonts and matplotlib parameters; and the options of a figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypedDict

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, to_hex, to_rgb
from matplotlib.font_manager import FontProperties, findfont, get_font_names

from normscope.curves.known import CURVES, FREE
from normscope.errors import UsageError, unknown

Look: TypeAlias = tuple[str, Any]  # colour and line style, as matplotlib takes them

# Okabe and Ito, "Color Universal Design" (2008): distinguishable with protanopia, deuteranopia and tritanopia.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
# Besides Okabe's and Ito's: far from one another and from the channels with any colour vision, by Machado, Oliveira
# and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009).
VIOLET, BROWN, NAVY, PLUM, IRIS, MOSS = "#9911FF", "#774433", "#112266", "#594364", "#9B7AFF", "#7A9B59"
LILAC, OLIVE, MINT, MAGENTA, LIME, SAGE = "#AA55FF", "#AA9955", "#BBFFBB", "#A63790", "#6FFF7A", "#9BBCA6"
LEAST_POINTS = 6.0  # no letter in a figure is smaller
HANDLE_LENGTH = 2.4  # of a legend's lines, in letter sizes: a period of the longest dashes
_DASHES = (
    "-",
    (0, (4, 1.5)),
    (0, (1, 1.2)),
    (0, (5, 1.3, 1, 1.3)),
    (0, (5, 1.2, 1, 1.2, 1, 1.2)),
    (0, (7, 1.5, 3, 1.5)),
)
# The first eight, which papers compare, differ in colour; others share them, such as softcap tanh's and derf erf's.
_BY_COLOUR = (
    *("tanh", "isru", "sigmoid", "hardtanh", "erf", "arctan", "linear", "softsign"),
    *("softcap", "satursin", "expsign", FREE, "derf"),
)
_CONTRAST = 4.5  # of letters, by the Web Content Accessibility Guidelines 2.2
LABELS = NO_LABELS, SHORT, FULL = ("none", "short", "full")
CAPTIONS = ("txt", "tex")


@dataclass(frozen=True)
class Style:
    """One theme.

    Attributes:
        background: of figure and panels.
        ink: text, axes and E[y|x].
        faint: bounds, grids and background elements.
        curves: colours of the fitted curves.
        density: matplotlib colour map of numbers of pairs, and the part of it that is drawn.
        tokens: matplotlib colour map of the tokens' σ.
        channels: colours of the channels of largest |x|, the largest first.
        fonts: families of all letters, in the order in which they are looked for a letter.
    """

    background: str
    ink: str
    faint: str
    curves: tuple[str, ...]
    density: tuple[str, float, float]
    tokens: str
    channels: tuple[str, ...]
    fonts: tuple[str, ...] = ("sans-serif",)

    def looks(self, curves: Iterable[str] = ()) -> dict[str, Look]:
        """Return a colour and a line style for every built-in curve and for each of ``curves``.

        Built-in curves look the same in every figure; others follow in order. Up to 48 curves, no two look alike.

        >>> looks = STYLES["light"].looks(["tanh", "my_curve"])
        >>> looks["tanh"]
        ('#D55E00', '-')
        >>> looks["my_curve"] in [look for name, look in looks.items() if name != "my_curve"]
        False
        """
        looks: dict[str, Look] = {}
        for number, name in enumerate(dict.fromkeys((*_BY_COLOUR, *CURVES, *curves))):
            again, colour = divmod(number, len(self.curves))
            looks[name] = self.curves[colour], _DASHES[(colour + again) % len(_DASHES)]
        return looks

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


STYLES = {
    "light": Style(
        background="#FFFFFF",
        ink="#1A1A1A",
        faint="#707070",
        curves=(VERMILLION, BLUE, PLUM, BROWN, VIOLET, IRIS, NAVY, MOSS),
        density=("Greys", 0.4, 0.92),
        tokens="viridis",
        channels=(ORANGE, GREEN, SKY, PURPLE),
    ),
    "dark": Style(
        background="#14171C",
        ink="#E8E8E8",
        faint="#8D939D",
        curves=(ORANGE, SKY, MAGENTA, OLIVE, LILAC, LIME, MINT, SAGE),
        density=("Greys_r", 0.2, 0.5),
        tokens="viridis",
        channels=(VERMILLION, GREEN, YELLOW, PURPLE),
    ),
}


def densities(style: Style) -> ListedColormap:
    """Return the map of numbers of pairs, without the end at which a single pair could not be seen."""
    name, low, high = style.density
    return ListedColormap(matplotlib.colormaps[name](np.linspace(low, high, 256)))


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


class FigureOptions(TypedDict, total=False):
    """Options of every figure, as of :func:`normscope.plot`."""

    width: float | None
    title: str | None
    style: str
    labels: str
    font: str | None
    caption: str | None


def theme_of(options: Mapping[str, Any], also: Iterable[str] = ()) -> Style:
    """Return the theme; UsageError for an option that is not ``also`` one, style, labels, font or caption."""
    for name in options.keys() - FigureOptions.__annotations__.keys():
        raise UsageError(unknown("option of a figure", name, [*also, *FigureOptions.__annotations__]))
    for kind, value, choices in (
        ("labels", options.get("labels", SHORT), LABELS),
        ("caption", options.get("caption"), (None, *CAPTIONS)),
    ):
        if value not in choices:
            raise UsageError(unknown(f"kind of {kind}", str(value), filter(None, choices)))
    return style_named(options.get("style", "light"), options.get("font"))


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
    linear = [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in rgb]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))
