"""Fits over the depth of one network, by kind of site; and α against how far the norm's input spreads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from normscope.errors import DataError, count
from normscope.figures.legends import remarks
from normscope.figures.notes import framed, heading, inches_of, title_and_foot
from normscope.figures.panels import best_of
from normscope.figures.style import Style, scale_by_factors, style_named, that_fits
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.known import FREE
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import kind_of_site
from normscope.pairs.sums.stats import PairStats

_MARKERS = "osD^vP*X"
_ROW_INCHES, _SQUARE_INCHES = 1.15, 1.7
_COLUMN_INCHES = 2.3
_MANY_TIMES = 4


def plot_depth(
    capture: Capture,
    fits: Sequence[CurveFit],
    *,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw A, α and R² of every site over the depth, a line a kind of site, and α against 1/std of the norm's input.

    A column a curve, of more than four those of the four largest mean R². Bars are 95 % intervals; dotted lines are the
    ceilings. A and α that the pairs do not tell apart are left out. The last row is figure 8 of arXiv 2503.10622, for
    fitted α in place of learned ones; there the dashed line is α·std = 1.

    Args:
        capture: what :func:`normscope.capture` returned.
        fits: what :func:`normscope.fit` made of each of its sites.
        width: of the figure, in inches.
        title: above all panels, as of :func:`normscope.plot`.
        style: ``light`` or ``dark``.

    Returns:
        A matplotlib figure; :func:`normscope.save_figure` writes it.

    Raises:
        DataError: if there is no fit of a site of this capture.
        UsageError: if there is no such style.
    """
    theme = style_named(style)
    numbers = {site.name: site.index for site in capture.sites}
    fits = [fit for fit in fits if fit.site in numbers and fit.channel is None]
    if not fits:
        raise DataError("There is no fit of a site to draw over the depth; fit each site by itself.")
    curves, _ = best_of([fit for fit in fits if fit.curve != FREE] or fits)
    kinds = list(dict.fromkeys(kind_of_site(site.name) for site in capture.sites))
    handles = _handles(kinds, theme)
    inches = inches_of(width, max(4.6, 0.5 + _COLUMN_INCHES * len(curves)))
    room = (inches - 0.5) / len(curves)
    usual = heading(capture.about, count(capture.n_samples, "sample"))
    title, origin = title_and_foot(title, usual, capture.about)
    foot = [*remarks([], fits), origin]
    with matplotlib.rc_context(theme.rc()):
        figure = framed(inches, 0.7 + _ROW_INCHES * len(_NUMBERS) + _SQUARE_INCHES, title, foot, theme, handles)
        ratios = [*([_ROW_INCHES] * len(_NUMBERS)), _SQUARE_INCHES]
        axes = figure.subplots(len(ratios), len(curves), squeeze=False, height_ratios=ratios)
        for column, curve in enumerate(curves):
            of_curve = [fit for fit in fits if fit.curve == curve]
            for ax, (label, draw) in zip(axes[:-1, column], _NUMBERS.items(), strict=True):
                for place, kind in enumerate(kinds):
                    of_kind = [fit for fit in of_curve if kind_of_site(fit.site) == kind]
                    draw(ax, [(numbers[fit.site], fit) for fit in of_kind], _look(place, theme))
                ax.set_ylabel(label if column == 0 else "")
                ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
                _finish(ax, theme)
            names = ("norm site, in the order of calls", "norm site")
            axes[-2, column].set_xlabel(that_fits(names, room), labelpad=1)
            axes[0, column].set_title(curve, parse_math=False)
            _draw_spread(axes[-1, column], capture, of_curve, kinds, theme)
            names = ("1 / std of the norm's input x", "1 / std of x")
            axes[-1, column].set_xlabel(that_fits(names, room), labelpad=1)
        axes[-1, 0].set_ylabel("α")
        figure.align_ylabels(axes[:, 0])
    return figure


def _look(place: int, theme: Style) -> dict[str, Any]:
    colours = theme.curves
    return {"color": colours[place % len(colours)], "marker": _MARKERS[place % len(_MARKERS)]}


def _handles(kinds: Sequence[str], theme: Style) -> list[Line2D]:
    handles = [
        Line2D([], [], lw=0.9, ms=3, label=kind.replace("$", r"\$"), **_look(place, theme))
        for place, kind in enumerate(kinds)
    ]
    faint: dict[str, Any] = {"color": theme.faint, "lw": 0.9}
    handles.append(Line2D([], [], ls=":", marker="_", ms=4, label="ceiling: the best f(x) that was found", **faint))
    return [*handles, Line2D([], [], ls="--", label="α = 1/std", **faint)]


def _draw_number(
    ax: Axes,
    points: Sequence[tuple[int, CurveFit]],
    look: dict[str, Any],
    name: str,
    value: Callable[[CurveFit], float],
) -> None:
    shown = [(at, fit) for at, fit in points if math.isfinite(value(fit))]
    ax.plot([at for at, _ in shown], [value(fit) for _, fit in shown], lw=0.8, ms=2.8, mew=0, zorder=3, **look)
    for at, fit in shown:
        if name in fit.intervals:
            ax.plot([at, at], fit.intervals[name], color=look["color"], lw=0.6, zorder=2)


def _draw_amplitude(ax: Axes, points: Sequence[tuple[int, CurveFit]], look: dict[str, Any]) -> None:
    _draw_number(ax, points, look, "amplitude", lambda fit: fit.amplitude if fit.told_apart else math.nan)


def _draw_alpha(ax: Axes, points: Sequence[tuple[int, CurveFit]], look: dict[str, Any]) -> None:
    _draw_number(ax, points, look, "alpha", _alpha)


def _alpha(fit: CurveFit) -> float:
    return fit.alpha if fit.told_apart else math.nan


def _draw_r2(ax: Axes, points: Sequence[tuple[int, CurveFit]], look: dict[str, Any]) -> None:
    _draw_number(ax, points, look, "r2", lambda fit: fit.r2)
    ceilings = [(at, fit.r2_ceiling) for at, fit in points if fit.r2_ceiling is not None]
    if ceilings:
        ax.plot(*zip(*ceilings, strict=True), color=look["color"], ls=":", marker="_", ms=4, lw=0.9, zorder=1)


_NUMBERS = {"A": _draw_amplitude, "α": _draw_alpha, "R²": _draw_r2}


def _finish(ax: Axes, theme: Style) -> None:
    low, high = ax.dataLim.y0, ax.dataLim.y1
    if low > 0 and _MANY_TIMES * low < high < math.inf:
        scale_by_factors(ax)
    ax.grid(axis="y", color=theme.faint, alpha=0.25, lw=0.5)


def spread(stats: PairStats) -> float:
    """Return the standard deviation of a norm's input x over all of its pairs; NaN without any."""
    n, x, _, xx, _, _ = stats.moments.sum((0, 2)).tolist()
    return math.sqrt(max(xx / n - (x / n) ** 2, 0.0)) if n else math.nan


def _draw_spread(ax: Axes, capture: Capture, fits: Sequence[CurveFit], kinds: Sequence[str], theme: Style) -> None:
    """α against 1/std of x, on axes of equal factors."""
    every = []
    for place, kind in enumerate(kinds):
        of_kind = [(spread(capture.stats[fit.site]), _alpha(fit)) for fit in fits if kind_of_site(fit.site) == kind]
        points = [(1 / std, alpha) for std, alpha in of_kind if std > 0 and alpha > 0]
        every += points
        look = {**_look(place, theme), "ls": "", "ms": 3, "mew": 0, "zorder": 3}
        ax.plot([x for x, _ in points], [alpha for _, alpha in points], **look)
    if not every:
        ax.text(0.5, 0.5, "no α is told", color=theme.faint, ha="center", va="center", transform=ax.transAxes)
        return
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    x = np.array(sorted(x for x, _ in every))
    limits = ax.get_ylim()
    ax.plot(x[[0, -1]], x[[0, -1]], color=theme.faint, ls="--", lw=0.8, zorder=1)
    ax.set_ylim(min(limits[0], x[0]), max(limits[1], x[-1]))
