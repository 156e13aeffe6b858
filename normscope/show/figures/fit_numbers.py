"""Numbers of fits over the depth of a network, with intervals, ceilings and open markers for doubtful fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from normscope.curves.known import FREE
from normscope.fits.curve_fit import CurveFit
from normscope.show.figures.sheet import draw_guides, key
from normscope.show.figures.style import Style

MARKERS = "osD^vP*X"
NO_CEILING = "No ceiling where it is known to be too low"
_DIGITS = ((200, (1,)), (20, (1, 3)), (4, (1, 2, 5)))  # at ticks of a logarithmic axis, by the factor that it spans


@dataclass(frozen=True)
class FitNumber:
    """A number of a fit: the label of its axis, its name in the fit's intervals, and its value, NaN without any."""

    label: str
    name: str
    value: Callable[[CurveFit], float]


AMPLITUDE = FitNumber("A", "amplitude", lambda fit: fit.amplitude if fit.identified else math.nan)
ALPHA = FitNumber("α", "alpha", lambda fit: fit.alpha if fit.identified else math.nan)
SLOPE = FitNumber("slope at 0", "slope", lambda fit: math.nan if fit.curve == FREE else fit.slope)
SATURATED = FitNumber("saturated", "saturated", lambda fit: fit.saturated)
_R2 = FitNumber("R²", "r2", lambda fit: fit.r2)
_HELD_OUT = FitNumber("held-out R²", "r2_cv", lambda fit: math.nan if fit.r2_cv is None else fit.r2_cv)


def r_squared(fits: Sequence[CurveFit]) -> FitNumber:
    """Return the held-out R², which compares with the ceiling, or that of all pairs if no fit has folds."""
    return _R2 if all(fit.r2_cv is None for fit in fits) else _HELD_OUT


def draw_number(
    ax: Axes, number: FitNumber, points: Sequence[tuple[float, CurveFit]], look: Mapping[str, Any], ceiling: Any
) -> None:
    """Draw a number of each fit at its x, with 95% intervals; of R² also the ceiling, in a colour.

    A ceiling that is known to be too low is not drawn. Markers of fits whose A and α are not identified are open.
    """
    marker = {**look, "ls": "", "ms": 3, "mew": 0.8}
    values = [number.value(fit) for _, fit in points]
    ax.plot([x for x, _ in points], values, lw=0.9, zorder=2, **{**look, "marker": ""})
    for (x, fit), y in zip(points, values, strict=True):
        if math.isfinite(y):
            ax.plot([x], [y], mfc=ax.get_facecolor() if fit.doubt else look["color"], zorder=3, **marker)
            ax.plot([x, x], fit.intervals.get(number.name, (y, y)), color=look["color"], lw=0.7, zorder=1)
    if number in (_R2, _HELD_OUT):
        ceilings = [(x, fit.r2_ceiling) for x, fit in points if fit.r2_ceiling is not None and not is_too_low(fit)]
        dots: dict[str, Any] = {"color": ceiling, "ls": ":", "lw": 0.9, "marker": "_", "ms": 4, "zorder": 1}
        ax.plot([x for x, _ in ceilings], [y for _, y in ceilings], **dots)


def is_too_low(fit: CurveFit) -> bool:
    """True if the ceiling beside a fit is known to be too low."""
    return fit.r2_ceiling is not None and fit.x_repeats


def handles_of_fits(fits: Sequence[CurveFit], theme: Style) -> list[Artist]:
    """Return the legend of open markers, ceilings and bars, as far as there are any."""
    handles: list[Artist] = []
    if any(fit.doubt for fit in fits):
        reasons = " or ".join(dict.fromkeys(fit.doubt for fit in fits if fit.doubt and not fit.unidentified))
        label = f"open: {reasons + ', so ' if reasons else ''}no A and α"
        handles.append(key(label, theme.ink, "", marker="o", mfc=theme.background, ms=3.2))
    if any(fit.r2_ceiling is not None for fit in fits):
        handles.append(key("ceiling: held-out R² of the best function of x", theme.ink, ":", marker="_", ms=4))
    if any(fit.intervals for fit in fits):
        handles.append(key("95% interval", theme.ink, "", marker="|", ms=6))
    return handles


def finish(ax: Axes, number: FitNumber, theme: Style) -> None:
    """Draw guides, and say in words if no fit has the number."""
    draw_guides(ax, theme)
    if not ax.dataLim.y0 < math.inf:
        text = f"no {number.label}" + "\nidentified" * (number in (AMPLITUDE, ALPHA))
        ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes)


def draw_against_std(
    ax: Axes, points: Sequence[tuple[float, float, dict[str, Any]]], theme: Style, ratio: float | None = None
) -> None:
    """α against 1/std of x, on axes of equal factors, and the line of a ratio α·std, by default the median."""
    if not points:
        finish(ax, ALPHA, theme)
        return
    for x, alpha, look in points:
        ax.plot([x], [alpha], ls="", ms=3, mew=0, zorder=3, **look)
    at, alphas = np.array(sorted((x, alpha) for x, alpha, _ in points)).T
    ends = at[[0, -1]]
    if ratio is not None:  # the axes alike, so that the line is their diagonal
        ends = at = alphas = np.array([min(*at, *alphas), max(*at, *alphas)])
    ax.set(xscale="log", yscale="log")
    for axis, values in ((ax.xaxis, at), (ax.yaxis, alphas)):
        factor = max(values) / min(values)
        digits = next((few for most, few in _DIGITS if factor > most), (1, 1.5, 2, 3, 5, 7))
        axis.set_major_locator(LogLocator(subs=digits, numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    slope = np.median(alphas / at) if ratio is None else ratio
    ax.plot(ends, slope * ends, color=theme.ink, ls=(0, (4, 2)), lw=0.8, zorder=1)
