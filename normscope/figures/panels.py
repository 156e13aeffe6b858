"""One panel of one norm site: its pairs as a density, by token or by channel, under the fitted curves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from normscope.figures.axes import AUTO, Limits, Scales, XAxis, few_ticks, mean_line, number, scales_of
from normscope.figures.style import LEAST_POINTS, Look, Style
from normscope.fits.curve_fit import CurveFit
from normscope.fits.solving.ceiling import conditional_mean
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, FloatGrid
from normscope.pairs.sums.stats import PairStats

Array = NDArray[np.float64]

_EXTREME_CHANNELS = 4


def extreme_channels(stats: PairStats) -> list[int]:
    """Return the channels that reach the largest |x|, the largest first."""
    return [int(i) for i in stats.reach.argsort(descending=True)[:_EXTREME_CHANNELS]]


def drawn_tokens(stats: PairStats) -> tuple[Array, Array, Array]:
    """Return x and y, float64 ``(tokens, d)``, and 1/σ, ``(tokens,)``, of the sampled and of the largest tokens."""

    def both(name: str) -> Array:
        drawn: Array = torch.cat([getattr(stats.tokens, name), getattr(stats.largest, name)]).double().numpy()
        return drawn

    return both("x"), both("y"), both("rstd")


def drawn_pairs(stats: PairStats) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return x, y and channel, ``(pairs,)``, of those tokens and of the pairs that are drawn evenly over x."""
    token_x, token_y, _ = drawn_tokens(stats)
    if stats.grouped:  # of whose tokens only the single pairs know their channel
        token_x, token_y = token_x[:0], token_y[:0]
    channels = np.broadcast_to(np.arange(token_x.shape[1]), token_x.shape)
    filled = stats.pairs.filled
    return (
        np.concatenate([token_x.ravel(), stats.pairs.x[filled].double().numpy()]),
        np.concatenate([token_y.ravel(), stats.pairs.y[filled].double().numpy()]),
        np.concatenate([channels.ravel(), stats.pairs.channel[filled].long().numpy()]),
    )


def image(stats: PairStats, x_edges: Array, y_edges: Array) -> Array:
    """Spread the counted pairs evenly over each cell, and gather them by pixel.

    Args:
        stats: sums of a site.
        x_edges: of the pixels, ascending, ``(columns + 1,)``.
        y_edges: likewise, ``(rows + 1,)``.

    Returns:
        Number of pairs per pixel, float64 ``(rows, columns)``, rows in ascending order of y.
    """
    counts = stats.density.numpy().astype(np.float64)
    return _gathered(_gathered(counts, DENSITY_X_GRID, x_edges).T, DENSITY_Y_GRID, y_edges)


def _gathered(counts: Array, grid: FloatGrid, at: Array) -> Array:
    """Gather counts ``(bins, n)`` between neighbouring places in x: ``(places - 1, n)``."""
    edges = grid.edges().numpy()
    edges[0], edges[-1] = 2 * edges[1], 2 * edges[-2]
    below = np.concatenate([np.zeros((1, counts.shape[1])), counts.cumsum(0)])
    bins = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, grid.size - 1)
    share = np.clip((at - edges[bins]) / (edges[bins + 1] - edges[bins]), 0, 1)
    reached = below[bins] + share[:, None] * (below[bins + 1] - below[bins])
    gathered: Array = np.diff(reached, axis=0)
    return gathered


_PIXELS = 220
_TOKEN_POINT = 1.26  # points across
_CENTRE_SHARE = 0.98  # of all pairs lie in the inset
_MOST_DRAWN = 4  # curves at most
_INSET_FROM = 3.0  # times wider must the tails reach than the centre for an inset to show more
_INSET = (0.06, 0.57, 0.32, 0.43)
_CURVE_POINTS = 600
_LINE_POINTS = 33  # of a token's line on an asinh axis, where it is bent


@dataclass(frozen=True)
class Panel:
    """Everything that the panels of one site are drawn from.

    Attributes:
        site: the norm.
        stats: its sums.
        fits: those that are drawn.
        style: of the figure.
        looks: colour and dashes of each curve.
        scales: of its axes and colours.
        inches: width of the panel between its edges, roughly.
        room: inches that a line of text above it may take.
    """

    site: NormSite
    stats: PairStats
    fits: Sequence[CurveFit]
    style: Style
    looks: Mapping[str, Look]
    scales: Scales
    inches: float = 2.0
    room: float = 2.25

    @functools.cached_property
    def moments(self) -> Tensor:
        """Sums over all folds, per bin of x."""
        moments: Tensor = self.stats.moments
        return moments.sum(0)

    @property
    def axis(self) -> XAxis:
        """The axis of x that holds every pair."""
        return self.scales.x


def panels_of(
    capture: Capture,
    sites: Sequence[NormSite],
    fits: Sequence[CurveFit],
    style: Style,
    looks: Mapping[str, Look] | None = None,
    xscale: str = AUTO,
    inches: float = 2.0,
    room: float = 2.25,
) -> list[Panel]:
    """Bring together what belongs to each of some sites of a capture; ``looks`` are by default of these fits."""
    drawn, _ = best_of(fits)
    looks = style.looks_of(drawn) if looks is None else looks
    return [
        Panel(
            site,
            capture.stats[site.name],
            [fit for fit in fits if fit.site == site.name and fit.curve in drawn],
            style,
            looks,
            scales_of([(site, capture.stats[site.name])], xscale),
            inches,
            room,
        )
        for site in sites
    ]


def with_shared_scales(panels: Sequence[Panel], xscale: str) -> list[Panel]:
    """Give all panels the scales that hold every pair of each."""
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


def draw_density(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """All pairs: how many lie where, on a logarithmic colour scale, and E[y|x] over them."""
    limits = (*axis.limits, *ax.get_ylim())
    counts = image(panel.stats, axis.evenly(_PIXELS + 1), np.linspace(*limits[2:], _PIXELS + 1))
    shown = np.ma.masked_less_equal(counts, 0)
    if shown.count():
        # The palest quarter of the map is left out, so that a single pair in the tails can still be seen.
        colours = ListedColormap(matplotlib.colormaps[panel.style.density](np.linspace(0.25, 1, 256)))
        on_paper = axis.linear_width is not None  # where its columns are as wide as one another
        ax.imshow(
            shown,
            extent=(0, 1, 0, 1) if on_paper else limits,
            transform=ax.transAxes if on_paper else ax.transData,
            origin="lower",
            aspect="auto",
            norm=LogNorm(0.1, max(float(shown.max()), 1.0)),
            cmap=colours,
            interpolation="nearest",
        )
    share = 1.0 if axis == panel.axis else _INSET[2]
    x, mean = mean_line(panel.moments, axis, share * panel.inches)
    ax.plot(x, mean, color=panel.style.ink, lw=1.4, zorder=3, path_effects=outline(panel.style))


def draw_tokens(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """Whole tokens, each its straight line of slope 1/σ, coloured by σ."""
    x, y, rstd = drawn_tokens(panel.stats)
    if not len(x):
        return
    scale = 1 / rstd
    low, high = panel.scales.sigma
    norm = LogNorm(low, high * (1 + 1e-6))
    ends = np.stack([x.argmin(1), x.argmax(1)], axis=1)[:, :, None]
    lines = np.concatenate([np.take_along_axis(v[:, :, None], ends, 1) for v in (x, y)], axis=2)
    if axis.linear_width is not None:
        lines = _bent(lines, axis)
    ax.add_collection(
        LineCollection(
            list(lines), array=scale, norm=norm, cmap=panel.style.tokens, lw=0.5, alpha=0.45, rasterized=True
        ),
        autolim=False,
    )
    # One marker stamped along each token: a scatter that colours point by point takes most of a figure's time.
    for token_x, token_y, colour in zip(x, y, matplotlib.colormaps[panel.style.tokens](norm(scale)), strict=True):
        points = Line2D(token_x, token_y, ls="", marker="o", ms=_TOKEN_POINT, mew=0, color=colour, rasterized=True)
        ax.add_artist(points)


def _bent(lines: Array, axis: XAxis) -> Array:
    """Straight lines as they run on an asinh axis: of their ends, ``(lines, 2, 2)``, make points evenly along it."""
    width = axis.linear_width or 1.0
    first, last = lines[:, :1], lines[:, 1:]
    places = np.linspace(np.arcsinh(first[..., 0] / width), np.arcsinh(last[..., 0] / width), _LINE_POINTS, axis=1)
    x = width * np.sinh(places.reshape(len(lines), -1))
    across = last[..., 0] - first[..., 0]
    share = np.divide(x - first[..., 0], across, out=np.zeros_like(x), where=across != 0)
    return np.stack([x, first[..., 1] + share * (last[..., 1] - first[..., 1])], axis=2)


def draw_channels(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """The same tokens, and pairs drawn evenly over x, by channel: those of largest |x| in colour, the rest grey."""
    x, y, channel = drawn_pairs(panel.stats)
    ax.scatter(x, y, color=panel.style.faint, s=1.2, lw=0, alpha=0.35, rasterized=True)
    for colour, extreme in zip(panel.style.channels, extreme_channels(panel.stats), strict=False):
        of_channel = channel == extreme
        ax.scatter(x[of_channel], y[of_channel], color=colour, s=4, lw=0, rasterized=True, zorder=2)


DRAW: dict[str, Callable[[Axes, Panel, XAxis], None]] = {
    "density": draw_density,
    "token": draw_tokens,
    "channel": draw_channels,
}


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


def draw_panel(ax: Axes, panel: Panel, row: str) -> None:
    """One row of the panels, with its centre enlarged in an inset where the tails reach far beyond it."""
    _draw_within(ax, panel, row, panel.axis, panel.scales.y)
    panel.axis.set_on(ax, panel.inches)
    centre = enlarged_range(panel)
    if centre is not None:
        x_limits, y_limits = centre
        _draw_within(inset_of(ax, panel, x_limits), panel, row, XAxis(x_limits), y_limits)


def inset_of(ax: Axes, panel: Panel, x_limits: Limits) -> Axes:
    """Make axes for the enlarged centre in the corner that an S leaves empty; the numbers are at its right and below.

    There no axis of the panel runs through them.
    """
    inset: Axes = ax.inset_axes(_INSET)
    inset.set_in_layout(False)  # its labels reach no farther than the panel's
    inset.yaxis.tick_right()
    inset.tick_params(labelsize=LEAST_POINTS, length=1.5, pad=1)
    for spine in inset.spines.values():
        spine.set(visible=True, linewidth=0.5, color=panel.style.faint)
    inset.xaxis.set_major_locator(FixedLocator(few_ticks(x_limits, _INSET[2] * panel.inches)))
    inset.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
    inset.yaxis.set_major_locator(MaxNLocator(2, steps=(1, 2, 5, 10), symmetric=True))
    for label in (*inset.get_xticklabels(), *inset.get_yticklabels()):
        label.set_path_effects([*outline(panel.style)])
    return inset


def _draw_within(ax: Axes, panel: Panel, row: str, axis: XAxis, y_limits: Limits) -> None:
    if axis.linear_width is not None:
        ax.set_xscale("asinh", linear_width=axis.linear_width)
    ax.set(xlim=axis.limits, ylim=y_limits)
    DRAW[row](ax, panel, axis)
    draw_curves(ax, panel, axis)
    ax.set(xlim=axis.limits, ylim=y_limits)


def enlarged_range(panel: Panel) -> tuple[Limits, Limits] | None:
    """Limits about the origin within which nearly all pairs lie, where the tails reach far beyond on a linear axis.

    None with shared scales: each panel's centre is another, and panels enlarged differently are not to be compared.
    """
    if panel.axis.linear_width is not None or panel.scales.shared:
        return None
    left, right = panel.axis.limits
    centre = _centre_range(panel.stats)
    return centre if centre is not None and right - left > _INSET_FROM * (centre[0][1] - centre[0][0]) else None


def _centre_range(stats: PairStats) -> tuple[Limits, Limits] | None:
    x, mean, deviation = conditional_mean(stats.moments.sum(0), max(1, stats.n_pairs // 100))
    if len(x) < 2:
        return None
    n = stats.moments[:, 0].sum(0)
    centres = (stats.moments[:, 1].sum(0) / n.clamp_min(1)).abs()
    order = centres.argsort()
    reach = float(centres[order][int((n[order].cumsum(0) < _CENTRE_SHARE * n.sum()).sum())])
    inside = np.abs(x) <= reach
    if reach <= 0 or not inside.any():
        return None
    top = float(np.max(np.abs(mean[inside]) + 1.5 * deviation[inside]))
    return (-reach, reach), (-top, top)


def outline(style: Style, width: float = 1.2) -> list[withStroke]:
    """Set lines and letters off from whatever lies behind them."""
    return [withStroke(linewidth=1.1 + width, foreground=style.background, alpha=0.7)]
