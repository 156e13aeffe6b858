"""Colours and sizes of every figure: told apart by people with any colour vision, on paper and on a dark screen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from normscope.errors import UsageError, unknown
from normscope.fits.curves.known import CURVES

Look: TypeAlias = tuple[str, Any]  # colour and line style, as matplotlib takes them

# Okabe and Ito, "Color Universal Design" (2008): distinguishable with protanopia, deuteranopia and tritanopia.
ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)


@dataclass(frozen=True)
class Style:
    """One theme.

    Attributes:
        background: of figure and panels.
        ink: text, axes and E[y|x].
        faint: bounds, grids and whatever stands back.
        curves: colours of the fitted curves.
        density: matplotlib colour map of numbers of pairs.
        tokens: matplotlib colour map of the tokens' σ.
        channels: colours of the channels of largest |x|, the largest first.
    """

    background: str
    ink: str
    faint: str
    curves: tuple[str, ...]
    density: str
    tokens: str
    channels: tuple[str, ...]

    def looks(self, curves: Iterable[str] = ()) -> dict[str, Look]:
        """Return a colour and a line style for every built-in curve and for each of ``curves``.

        A built-in curve has the same in every figure; others take what is left, in the order in which they come. No
        two look alike up to a number of 30, and those of the same colour differ in their dashes.

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

    def rc(self) -> dict[Any, Any]:
        """Return the theme as matplotlib parameters."""
        return {
            **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), self.background),
            **dict.fromkeys(
                ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), self.ink
            ),
            "axes.linewidth": 0.6,
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
            "pdf.fonttype": 42,
        }


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
        faint="#8C8C8C",
        curves=(VERMILLION, BLUE, VIOLET, BROWN, NAVY),
        density="Greys",
        tokens="viridis",
        channels=(ORANGE, GREEN, SKY, PURPLE),
    ),
    "dark": Style(
        background="#14171C",
        ink="#E8E8E8",
        faint="#7A808A",
        curves=(ORANGE, SKY, LILAC, OLIVE, MINT),
        density="bone",
        tokens="viridis",
        channels=(VERMILLION, GREEN, YELLOW, PURPLE),
    ),
}


def style_named(name: str) -> Style:
    """Look a theme up; UsageError where there is none of that name."""
    if name not in STYLES:
        raise UsageError(unknown("style", name, STYLES))
    return STYLES[name]
