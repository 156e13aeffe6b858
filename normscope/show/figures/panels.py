"""One panel of one norm site: its pairs as a density, by token or by channel, under the fitted curves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from normscope.errors import count
from normscope.fits.curve_fit import CurveFit
from normscope.norms.sites import NormSite, short_names
from normscope.pairs.captures import Capture
from normscope.pairs.sums.stats import PairStats
from normscope.show.figures.axes import Scales, mean_line, pairs_beyond, scales_of
from normscope.show.figures.panel_data import drawn_pairs, drawn_tokens, extreme_channels, image, residuals
from normscope.show.figures.style import LEAST_POINTS, Look, Style, densities, shades
from normscope.show.figures.text import that_fits

RESIDUAL = "residual"
CURVE_WIDTH, MEAN_WIDTH = 0.8, 0.8  # thin, over the pairs
BAND, BAND_ALPHA = 2.0, 0.35  # standard errors on both sides
_GROUPS, _MARGIN = 120, 1.08  # of residuals across a panel, and above the largest
_PIXELS = 220
_TOKEN_POINT = 1.26  # points across
_LINE_POINTS = 33  # of a token's line, which an axis may bend
_CURVE_POINTS = 600
_MOST_DRAWN = 4  # curves at most


@dataclass(frozen=True)
class Panel:
    """Data and style of the panels of one site, which are roughly ``inches`` wide between their edges."""

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

    def beyond(self) -> str:
        """Return the number of pairs beyond the axis in words, of their token or channel if it is one; or nothing."""
        limits, stats = self.scales.x.limits, self.stats
        n, (low, high) = pairs_beyond(self.moments, limits), stats.channel_extremes
        channels = ((low < limits[0]) | (high > limits[1])).nonzero().flatten().tolist()
        if not n:
            return ""
        source = ""
        if pairs_beyond(stats.first_moments.mT, limits) == n:
            source = f" of token {int(stats.position_sums[0].nonzero()[0])}"
        elif len(channels) == 1 and not stats.grouped:
            source = f" of channel {channels[0]}"
        return f"{count(n, 'pair')}{source} beyond"


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
    looks, names, panels = style.looks(curves), short_names(site.name for site in capture.sites), []
    for site in sites:
        stats = capture.stats[site.name]
        fits_here = [fit for fit in fits if fit.site == site.name and fit.curve in curves]
        scales = scales_of([(site, stats)], xscale)
        panels.append(Panel(site, names[site.name], stats, fits_here, style, looks, scales, inches))
    return panels


def with_shared_scales(panels: Sequence[Panel], xscale: str) -> list[Panel]:
    """Return the panels with the widest scales of any of them."""
    shared = scales_of([(panel.site, panel.stats) for panel in panels], xscale, shared=True)
    return [replace(panel, scales=shared) for panel in panels]


def best_of(fits: Sequence[CurveFit]) -> tuple[list[str], list[str]]:
    """Return the curves that are drawn, all or the four of the largest mean R² over sites, and the others likewise."""
    curves = list(dict.fromkeys(fit.curve for fit in fits))
    if len(curves) <= _MOST_DRAWN:
        return curves, []
    r2 = {curve: [-math.inf if fit.degenerate else fit.r2 for fit in fits if fit.curve == curve] for curve in curves}
    ranked = sorted(curves, key=lambda curve: -sum(r2[curve]) / len(r2[curve]))
    return [curve for curve in curves if curve in ranked[:_MOST_DRAWN]], ranked[_MOST_DRAWN:]


def draw_panel(ax: Axes, panel: Panel, row: str) -> None:
    """Draw the panel of a site in one row of the figure; over the density stands the number of pairs beyond."""
    axis, y_limits = panel.scales.x, panel.scales.y
    axis.set_on(ax, panel.inches)
    ax.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10), min_n_ticks=3))
    ax.set(xlim=axis.limits, ylim=y_limits)
    DRAW[row](ax, panel)
    if row == RESIDUAL:
        return
    draw_curves(ax, panel)
    ax.set(xlim=axis.limits, ylim=y_limits)
    if row == "density" and (text := panel.beyond()):
        words = (text, text.replace(" of ", "\nof "), text.replace(" of ", "\nof ").replace(" beyond", "\nbeyond"))
        look: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": LEAST_POINTS}
        look |= {"transform": ax.transAxes, "path_effects": outline(panel.style)}
        ax.text(0.99, 0.03, that_fits(words, 0.5 * panel.inches, LEAST_POINTS), **look)


def outline(style: Style, width: float = 1.2) -> list[withStroke]:
    """Return an outline that separates lines and letters from the background."""
    return [withStroke(linewidth=1.1 + width, foreground=style.background, alpha=0.7)]


def draw_density(ax: Axes, panel: Panel) -> None:
    """All pairs: how many lie where, on a logarithmic colour scale, and E[y|x] over them."""
    axis, y_limits = panel.scales.x, panel.scales.y
    counts = image(panel.stats, axis.evenly(_PIXELS + 1), np.linspace(*y_limits, _PIXELS + 1))
    shown = np.ma.masked_less_equal(counts, 0)
    if shown.count():
        extent: dict[str, Any] = {"extent": (*axis.limits, *y_limits), "transform": ax.transData}
        if axis.linear_width is not None:  # columns of equal width on paper
            extent = {"extent": (0, 1, 0, 1), "transform": ax.transAxes}
        norm = LogNorm(0.1, max(float(shown.max()), 1.0))
        look: dict[str, Any] = {"origin": "lower", "aspect": "auto", "interpolation": "nearest"}
        ax.imshow(shown, norm=norm, cmap=densities(panel.style), **extent, **look)
    ax.plot(*mean_line(panel.moments, axis, panel.inches), color=panel.style.ink, lw=MEAN_WIDTH, zorder=3)


def draw_tokens(ax: Axes, panel: Panel) -> None:
    """Whole tokens, each its straight line of slope 1/σ, coloured by σ; of a point-wise function, without lines."""
    x, y, rstd = drawn_tokens(panel.stats)
    if not len(x):
        return
    axis, (low, high), colours = panel.scales.x, panel.scales.sigma, shades(panel.style)
    norm = LogNorm(low, high * (1 + 1e-6))
    if panel.site.pointwise is None:
        along = axis.at(np.linspace(axis.along(x.min(1)), axis.along(x.max(1)), _LINE_POINTS, axis=1))
        lines = np.stack([along, y[:, :1] + rstd[:, None] * (along - x[:, :1])], axis=2)
        look: dict[str, Any] = {"norm": norm, "cmap": colours, "lw": 0.5, "alpha": 0.45, "rasterized": True}
        ax.add_collection(LineCollection(list(lines), array=1 / rstd, **look), autolim=False)
    # One marker stamped along each token: a scatter that colours point by point takes most of a figure's time.
    for token_x, token_y, colour in zip(x, y, colours(norm(1 / rstd)), strict=True):
        points = Line2D(token_x, token_y, ls="", marker="o", ms=_TOKEN_POINT, mew=0, color=colour, rasterized=True)
        ax.add_artist(points)


def draw_channels(ax: Axes, panel: Panel) -> None:
    """The same tokens, and pairs drawn evenly over x, by channel: those of largest |x| in colour, the rest grey."""
    x, y, channel = drawn_pairs(panel.stats)
    ax.scatter(x, y, color=panel.style.faint, s=1.2, lw=0, alpha=0.35, rasterized=True)
    for colour, extreme in zip(panel.style.channels, extreme_channels(panel.stats), strict=False):
        in_channel = channel == extreme
        ax.scatter(x[in_channel], y[in_channel], color=colour, s=4, lw=0, rasterized=True, zorder=2)


def draw_curves(ax: Axes, panel: Panel) -> None:
    """Every fitted curve, as far as there are pairs, and the bounds that no output of the norm passes."""
    n, sum_x = panel.moments[:2, panel.moments[0] > 0].numpy()
    x = np.clip(sum_x / n, *panel.scales.x.limits)
    ends = (float(x.min()), float(x.max())) if len(x) else panel.scales.x.limits
    grid = torch.from_numpy(replace(panel.scales.x, limits=ends).evenly(_CURVE_POINTS))
    for fit in panel.fits:
        if not fit.degenerate:
            colour, dashes = panel.looks[fit.curve]
            ax.plot(grid, fit(grid), color=colour, ls=dashes, lw=CURVE_WIDTH, zorder=4)
    if math.isfinite(panel.site.bound):  # running statistics bound nothing
        for bound in (-panel.site.bound, panel.site.bound):
            ax.axhline(bound, color=panel.style.faint, lw=0.7, ls=":", zorder=1)


def draw_residuals(ax: Axes, panel: Panel) -> None:
    """E[y|x] − A·f(αx + s) of every fitted curve over ± 2 standard errors."""
    axis, fits = panel.scales.x, [fit for fit in panel.fits if not fit.degenerate]
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


DRAW: dict[str, Callable[[Axes, Panel], None]] = {
    "density": draw_density,
    "token": draw_tokens,
    "channel": draw_channels,
    RESIDUAL: draw_residuals,
}
