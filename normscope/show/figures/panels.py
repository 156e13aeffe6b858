"""One panel of one norm site: its pairs as a density, by token or by channel, under the fitted curves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from torch import Tensor

from normscope.fits.ceiling import conditional_mean
from normscope.fits.curve_fit import CurveFit
from normscope.norms.sites import NormSite, short_names
from normscope.pairs.captures import Capture
from normscope.pairs.sums.stats import PairStats
from normscope.show.figures.axes import (
    MOST_PAIRS,
    Limits,
    Scales,
    XAxis,
    mean_line,
    number,
    pairs_beyond,
    reach_of,
    scales_of,
)
from normscope.show.figures.panel_data import drawn_pairs, drawn_tokens, extreme_channels, image, residuals
from normscope.show.figures.style import LEAST_POINTS, Look, Style
from normscope.show.figures.text import that_fits

RESIDUAL = "residual"
RANGE_POINTS = 2.0  # width of the bar of 99 % of the pairs
BAND, BAND_ALPHA = 2.0, 0.35  # standard errors on both sides
_GROUPS, _MARGIN = 120, 1.08  # of residuals across a panel, and above the largest
_PIXELS = 220
_TOKEN_POINT = 1.26  # points across
_LINE_POINTS = 33  # of a token's line, which an axis may bend
_CURVE_POINTS = 600
_MOST_DRAWN = 4  # curves at most
_INSET = (0.06, 0.57, 0.32, 0.43)
_INSET_FROM = 3.0  # times as wide as the range of 99 % of the pairs is an axis with an inset
_LEAST_INCHES = 1.5  # of a panel with an inset
_LONG = 4  # letters of a tick, of which an inset has room for one


@dataclass(frozen=True)
class Panel:
    """Data and style of the panels of one site.

    Attributes:
        site: the norm.
        name: its short name.
        stats: its sums.
        fits: those that are drawn.
        style: of the figure.
        looks: colour and dashes of each curve.
        scales: of its axes and colours.
        inches: width of the panel between its edges, roughly.
    """

    site: NormSite
    name: str
    stats: PairStats
    fits: Sequence[CurveFit]
    style: Style
    looks: Mapping[str, Look]
    scales: Scales
    inches: float

    @property
    def room(self) -> float:
        """Width of the lines above the panel, in inches."""
        return self.inches + 0.05

    @functools.cached_property
    def moments(self) -> Tensor:
        """Sums over all folds, per bin of x."""
        moments: Tensor = self.stats.moments
        return moments.sum(0)

    @functools.cached_property
    def centre(self) -> tuple[Limits, Limits] | None:
        """Limits of x and y that contain nearly all pairs, where a wide panel's linear axis goes far beyond.

        None with shared scales: panels enlarged differently cannot be compared.
        """
        if self.scales.x.linear_width is not None or self.scales.shared or self.inches < _LEAST_INCHES:
            return None
        reach = reach_of(self.moments, MOST_PAIRS)
        x, mean, deviation = conditional_mean(self.moments, max(1, self.stats.n_pairs // 100))
        inside = np.abs(x) <= reach
        if reach <= 0 or not inside.any() or self.scales.x.limits[1] < _INSET_FROM * reach:
            return None
        top = float(np.max(np.abs(mean[inside]) + 1.5 * deviation[inside]))
        return (-reach, reach), (-top, top)


def panels_of(
    capture: Capture,
    sites: Sequence[NormSite],
    fits: Sequence[CurveFit],
    style: Style,
    xscale: str,
    inches: float,
    curves: Sequence[str] | None = None,
) -> list[Panel]:
    """Make the panels of some sites of a capture; ``curves`` are drawn, by default the best of these fits."""
    curves = best_of(fits)[0] if curves is None else curves
    looks, names, panels = style.looks_of(curves), short_names(site.name for site in capture.sites), []
    for site in sites:
        stats = capture.stats[site.name]
        fits_here = [fit for fit in fits if fit.site == site.name and fit.curve in curves]
        scales = scales_of([(site, stats)], xscale, fits_here)
        panels.append(Panel(site, names[site.name], stats, fits_here, style, looks, scales, inches))
    return panels


def with_shared_scales(panels: Sequence[Panel], xscale: str) -> list[Panel]:
    """Return the panels with the widest scales of any of them."""
    fits = [fit for panel in panels for fit in panel.fits]
    shared = scales_of([(panel.site, panel.stats) for panel in panels], xscale, fits, shared=True)
    return [replace(panel, scales=shared) for panel in panels]


def best_of(fits: Sequence[CurveFit]) -> tuple[list[str], list[str]]:
    """Return the curves that are drawn, all or the four of the largest mean R² over sites, and the others likewise."""
    curves = list(dict.fromkeys(fit.curve for fit in fits))
    if len(curves) <= _MOST_DRAWN:
        return curves, []
    r2 = {curve: [-math.inf if fit.degenerate else fit.r2 for fit in fits if fit.curve == curve] for curve in curves}
    ranked = sorted(curves, key=lambda curve: -sum(r2[curve]) / len(r2[curve]))
    return [curve for curve in curves if curve in ranked[:_MOST_DRAWN]], ranked[_MOST_DRAWN:]


def draw_panel(ax: Axes, panel: Panel, row: str, *, beyond: bool = False, inset: bool = True) -> None:
    """Draw one row of the panels.

    Args:
        ax: of the panel.
        panel: its data.
        row: name of the row.
        beyond: write how many pairs lie beyond the axis.
        inset: enlarge the centre in an inset, where the axis goes far beyond it.
    """
    axis = panel.scales.x
    axis.set_on(ax, panel.inches)
    _draw_within(ax, panel, row, axis, panel.scales.y)
    if row == RESIDUAL:
        return
    if len(middle := _middle(panel.moments)):
        look: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "solid_capstyle": "butt", "clip_on": False}
        ax.plot(np.clip(middle, *axis.limits), [0, 0], color=panel.style.ink, lw=RANGE_POINTS, zorder=5, **look)
    if beyond and (n := pairs_beyond(panel.moments, axis.limits)):
        words = [f"{n:,} pair{'s' * (n > 1)} beyond", f"{n:,} pair{'s' * (n > 1)}\nbeyond"]
        look = {"ha": "right", "va": "bottom", "fontsize": LEAST_POINTS, "path_effects": outline(panel.style)}
        ax.text(0.99, 0.05, that_fits(words, 0.5 * panel.inches, LEAST_POINTS), transform=ax.transAxes, **look)
    if inset and panel.centre is not None:
        x_limits, y_limits = panel.centre
        _draw_within(_inset_of(ax, panel, x_limits), panel, row, XAxis(x_limits), y_limits)


def _draw_within(ax: Axes, panel: Panel, row: str, axis: XAxis, y_limits: Limits) -> None:
    ax.set(xlim=axis.limits, ylim=y_limits)
    DRAW[row](ax, panel, axis)
    if row != RESIDUAL:
        draw_curves(ax, panel, axis)
        ax.set(xlim=axis.limits, ylim=y_limits)


def _middle(moments: Tensor) -> list[float]:
    """Return the range of x that contains 99 % of the pairs."""
    n, x = moments[:2, moments[0] > 0].numpy()
    if not n.size:
        return []
    below = n.cumsum() / n.sum()
    outside = (1 - MOST_PAIRS) / 2
    return [float((x / n)[np.searchsorted(below, share)]) for share in (outside, 1 - outside)]


def _inset_of(ax: Axes, panel: Panel, x_limits: Limits) -> Axes:
    """Make axes for the enlarged centre in the corner that an S leaves empty, away from the panel's axes."""
    inset: Axes = ax.inset_axes(_INSET)
    inset.set_in_layout(False)  # its labels reach no farther than the panel's
    inset.yaxis.tick_right()
    inset.tick_params(labelsize=LEAST_POINTS, length=1.5, pad=1)
    for spine in inset.spines.values():
        spine.set(visible=True, linewidth=0.5, color=panel.style.faint)
    end = float(f"{0.7 * x_limits[1]:.0e}")
    inset.xaxis.set_major_locator(FixedLocator([-end, end] if len(number(end)) < _LONG else [end]))
    inset.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
    inset.yaxis.set_major_locator(MaxNLocator(2, steps=(1, 2, 5, 10), symmetric=True))
    for label in (*inset.get_xticklabels(), *inset.get_yticklabels()):
        label.set_path_effects([*outline(panel.style)])
    return inset


def outline(style: Style, width: float = 1.2) -> list[withStroke]:
    """Return an outline that separates lines and letters from the background."""
    return [withStroke(linewidth=1.1 + width, foreground=style.background, alpha=0.7)]


def draw_density(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """All pairs: how many lie where, on a logarithmic colour scale, and E[y|x] over them."""
    limits = (*axis.limits, *ax.get_ylim())
    counts = image(panel.stats, axis.evenly(_PIXELS + 1), np.linspace(*limits[2:], _PIXELS + 1))
    shown = np.ma.masked_less_equal(counts, 0)
    if shown.count():
        # The palest quarter of the map is left out, so that a single pair in the tails can still be seen.
        colours = ListedColormap(matplotlib.colormaps[panel.style.density](np.linspace(0.25, 1, 256)))
        place: dict[str, Any] = {"extent": limits, "transform": ax.transData}
        if axis.linear_width is not None:  # columns of equal width on paper
            place = {"extent": (0, 1, 0, 1), "transform": ax.transAxes}
        norm = LogNorm(0.1, max(float(shown.max()), 1.0))
        look: dict[str, Any] = {"origin": "lower", "aspect": "auto", "interpolation": "nearest", "cmap": colours}
        ax.imshow(shown, norm=norm, **place, **look)
    share = 1.0 if axis == panel.scales.x else _INSET[2]
    x, mean = mean_line(panel.moments, axis, share * panel.inches)
    ax.plot(x, mean, color=panel.style.ink, lw=1.4, zorder=3, path_effects=outline(panel.style))


def draw_tokens(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """Whole tokens, each its straight line of slope 1/σ, coloured by σ; of a point-wise function, without lines."""
    x, y, rstd = drawn_tokens(panel.stats)
    if not len(x):
        return
    low, high = panel.scales.sigma
    norm = LogNorm(low, high * (1 + 1e-6))
    if panel.site.pointwise is None:
        along = axis.at(np.linspace(axis.along(x.min(1)), axis.along(x.max(1)), _LINE_POINTS, axis=1))
        lines = np.stack([along, y[:, :1] + rstd[:, None] * (along - x[:, :1])], axis=2)
        look: dict[str, Any] = {"norm": norm, "cmap": panel.style.tokens, "lw": 0.5, "alpha": 0.45, "rasterized": True}
        ax.add_collection(LineCollection(list(lines), array=1 / rstd, **look), autolim=False)
    # One marker stamped along each token: a scatter that colours point by point takes most of a figure's time.
    for token_x, token_y, colour in zip(x, y, matplotlib.colormaps[panel.style.tokens](norm(1 / rstd)), strict=True):
        points = Line2D(token_x, token_y, ls="", marker="o", ms=_TOKEN_POINT, mew=0, color=colour, rasterized=True)
        ax.add_artist(points)


def draw_channels(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """The same tokens, and pairs drawn evenly over x, by channel: those of largest |x| in colour, the rest grey."""
    x, y, channel = drawn_pairs(panel.stats)
    ax.scatter(x, y, color=panel.style.faint, s=1.2, lw=0, alpha=0.35, rasterized=True)
    for colour, extreme in zip(panel.style.channels, extreme_channels(panel.stats), strict=False):
        in_channel = channel == extreme
        ax.scatter(x[in_channel], y[in_channel], color=colour, s=4, lw=0, rasterized=True, zorder=2)


def draw_curves(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """Every fitted curve, and the bounds that no output of the norm passes."""
    grid = torch.from_numpy(axis.evenly(_CURVE_POINTS))
    for fit in panel.fits:
        if not fit.degenerate:
            colour, dashes = panel.looks[fit.curve]
            ax.plot(grid, fit(grid), color=colour, ls=dashes, lw=1.1, zorder=4, path_effects=outline(panel.style, 0.8))
    if math.isfinite(panel.site.bound):  # running statistics bound nothing
        for bound in (-panel.site.bound, panel.site.bound):
            ax.axhline(bound, color=panel.style.faint, lw=0.7, ls=":", zorder=1)


def draw_residuals(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """E[y|x] − A·f(αx + s) of every fitted curve over ± 2 standard errors."""
    fits = [fit for fit in panel.fits if not fit.degenerate]
    low, high = axis.along(np.array(axis.limits))
    groups = residuals(panel.stats.moments, fits, (high - low) / _GROUPS, along=axis.along)
    band = BAND * groups.error
    inside = (groups.x >= axis.limits[0]) & (groups.x <= axis.limits[1])
    reach = _MARGIN * float(np.nanmax(np.abs(np.array([*groups.off, *([] if fits else [band])])[:, inside]), initial=0))
    reach = reach if reach > 0 else 1.0
    ax.set(xlim=axis.limits, ylim=(-reach, reach))
    look: dict[str, Any] = {"lw": 1.0, "zorder": 4, "path_effects": outline(panel.style, 0.6)}
    band_look: dict[str, Any] = {"color": panel.style.faint, "alpha": BAND_ALPHA, "lw": 0, "zorder": 1}
    ax.fill_between(groups.x, -band, band, **band_look)
    ax.axhline(0, color=panel.style.ink, lw=0.6, zorder=2)
    for fit, off in zip(fits, groups.off, strict=True):
        colour, dashes = panel.looks[fit.curve]
        ax.plot(groups.x, off, color=colour, ls=dashes, **look)


DRAW: dict[str, Callable[[Axes, Panel, XAxis], None]] = {
    "density": draw_density,
    "token": draw_tokens,
    "channel": draw_channels,
    RESIDUAL: draw_residuals,
}
