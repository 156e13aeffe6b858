"""Colours and sizes of every figure: told apart by people with any colour vision, on paper and on a dark screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normscope.errors import UsageError, unknown

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
        curves: colour and line style of each fitted curve, by its name.
        density: matplotlib colour map of numbers of pairs.
        tokens: matplotlib colour map of the tokens' σ.
        channels: colours of the channels of largest |x|, the largest first.
    """

    background: str
    ink: str
    faint: str
    curves: dict[str, tuple[str, Any]]
    density: str
    tokens: str
    channels: tuple[str, ...]

    def rc(self) -> dict[Any, Any]:
        """Return the theme as matplotlib parameters."""
        return {
            "figure.facecolor": self.background,
            "axes.facecolor": self.background,
            "savefig.facecolor": self.background,
            "text.color": self.ink,
            "axes.labelcolor": self.ink,
            "axes.edgecolor": self.ink,
            "xtick.color": self.ink,
            "ytick.color": self.ink,
            "axes.linewidth": 0.6,
            "font.size": 7,
            "axes.titlesize": 7.5,
            "axes.labelsize": 7,
            "xtick.labelsize": 6,
            "ytick.labelsize": 6,
            "legend.fontsize": 6.5,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "normscope",
            "pdf.fonttype": 42,
        }


_DASHED = (0, (4, 1.5))
STYLES = {
    "light": Style(
        background="#FFFFFF",
        ink="#1A1A1A",
        faint="#8C8C8C",
        curves={"tanh": (VERMILLION, "-"), "isru": (BLUE, _DASHED)},
        density="Greys",
        tokens="viridis",
        channels=(ORANGE, GREEN, SKY, PURPLE),
    ),
    "dark": Style(
        background="#14171C",
        ink="#E8E8E8",
        faint="#7A808A",
        curves={"tanh": (ORANGE, "-"), "isru": (SKY, _DASHED)},
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
