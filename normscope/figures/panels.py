"""One panel of one norm site: its pairs as a density, by token or by channel, under the fitted curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import matplotlib
import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from normscope.figures.style import Look, Style
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.known import FREE
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


def token_scales(stats: PairStats) -> tuple[float, float]:
    """Return the smallest and largest σ among the drawn tokens."""
    scale = 1 / drawn_tokens(stats)[2]
    return (float(np.min(scale)), float(np.max(scale))) if len(scale) else (float("nan"), float("nan"))


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


def image(stats: PairStats, x_range: tuple[float, float], y_range: tuple[float, float], pixels: int) -> Array:
    """Spread the counted pairs evenly over each cell, and gather them by pixel.

    Args:
        stats: sums of a site.
        x_range: limits of the image in x.
        y_range: limits in y.
        pixels: width and height.

    Returns:
        Number of pairs per pixel, float64 ``(pixels, pixels)``, rows in ascending order of y.
    """
    counts = stats.density.numpy().astype(np.float64)
    by_column = _gathered(counts, DENSITY_X_GRID, np.linspace(*x_range, pixels + 1))
    return _gathered(by_column.T, DENSITY_Y_GRID, np.linspace(*y_range, pixels + 1))


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


Limits: TypeAlias = tuple[float, float]
LINE_SHARE = 0.075  # of a panel's height that a line of a corner's text takes
_PIXELS = 220
_TOKEN_POINT = 1.26  # points across
_LEAST_COUNT = 32  # pairs that a point of the drawn E[y|x] averages at least
_CENTRE_SHARE = 0.98  # of all pairs lie in the inset
_BOUND_SHOWN_WITHIN = 1.6  # times the largest |y|; a bound farther away would flatten the curves, and is written
_NAMED = 4  # fits at most in a corner
_NAME_LETTERS = 13  # of a curve's name there: as many as a built-in one has at most
_INSET_FROM = 3.0  # times wider must the tails reach than the centre for an inset to show more


@dataclass(frozen=True)
class Panel:
    """Everything that the panels of one site are drawn from."""

    site: NormSite
    stats: PairStats
    fits: Sequence[CurveFit]
    style: Style
    looks: Mapping[str, Look]

    @property
    def named(self) -> list[CurveFit]:
        """The fits that a corner has room for: all, or those of the largest R²."""
        if len(self.fits) <= _NAMED:
            return list(self.fits)
        return sorted(self.fits, key=lambda fit: math.inf if fit.degenerate else -fit.r2)[:_NAMED]


def panels_of(
    capture: Capture,
    sites: Sequence[NormSite],
    fits: Sequence[CurveFit],
    style: Style,
    looks: Mapping[str, Look] | None = None,
) -> list[Panel]:
    """Bring together what belongs to each of some sites of a capture; ``looks`` are by default of these fits."""
    looks = style.looks(fit.curve for fit in fits) if looks is None else looks
    return [
        Panel(site, capture.stats[site.name], [fit for fit in fits if fit.site == site.name], style, looks)
        for site in sites
    ]


def draw_density(ax: Axes, panel: Panel) -> None:
    """All pairs: how many lie where, on a logarithmic colour scale, and E[y|x] over them."""
    limits = (*ax.get_xlim(), *ax.get_ylim())
    counts = image(panel.stats, limits[:2], limits[2:], _PIXELS)
    shown = np.ma.masked_less_equal(counts, 0)
    if shown.count():
        # The palest quarter of the map is left out, so that a single pair in the tails can still be seen.
        colours = ListedColormap(matplotlib.colormaps[panel.style.density](np.linspace(0.25, 1, 256)))
        ax.imshow(
            shown,
            extent=limits,
            origin="lower",
            aspect="auto",
            norm=LogNorm(0.1, max(float(shown.max()), 1.0)),
            cmap=colours,
            interpolation="nearest",
        )
    width = (limits[1] - limits[0]) / _PIXELS
    x, mean, _ = conditional_mean(panel.stats.moments.sum(0), _LEAST_COUNT, width)
    ax.plot(x, mean, color=panel.style.ink, lw=1.4, zorder=3, path_effects=outline(panel.style))


def draw_tokens(ax: Axes, panel: Panel) -> None:
    """Whole tokens, each its straight line of slope 1/σ, coloured by σ."""
    x, y, rstd = drawn_tokens(panel.stats)
    if not len(x):
        return
    scale = 1 / rstd
    low, high = token_scales(panel.stats)
    norm = LogNorm(low, high * (1 + 1e-6))
    ends = np.stack([x.argmin(1), x.argmax(1)], axis=1)[:, :, None]
    lines = np.concatenate([np.take_along_axis(v[:, :, None], ends, 1) for v in (x, y)], axis=2)
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


def draw_channels(ax: Axes, panel: Panel) -> None:
    """The same tokens, and pairs drawn evenly over x, by channel: those of largest |x| in colour, the rest grey."""
    x, y, channel = drawn_pairs(panel.stats)
    ax.scatter(x, y, color=panel.style.faint, s=1.2, lw=0, alpha=0.35, rasterized=True)
    for colour, extreme in zip(panel.style.channels, extreme_channels(panel.stats), strict=False):
        of_channel = channel == extreme
        ax.scatter(x[of_channel], y[of_channel], color=colour, s=4, lw=0, rasterized=True, zorder=2)


DRAW: dict[str, Callable[[Axes, Panel], None]] = {
    "density": draw_density,
    "token": draw_tokens,
    "channel": draw_channels,
}


def draw_curves(ax: Axes, panel: Panel) -> None:
    """Every fitted curve, and the bounds that no output of the norm passes."""
    grid = torch.linspace(*ax.get_xlim(), 600, dtype=torch.float64)
    for fit in panel.fits:
        if not fit.degenerate:
            colour, dashes = panel.looks[fit.curve]
            ax.plot(grid, fit(grid), color=colour, ls=dashes, lw=1.1, zorder=4, path_effects=outline(panel.style, 0.8))
    if math.isfinite(panel.site.bound):  # running statistics bound nothing
        for bound in (-panel.site.bound, panel.site.bound):
            ax.axhline(bound, color=panel.style.faint, lw=0.7, ls=":", zorder=1)


def draw_panel(ax: Axes, panel: Panel, row: str) -> None:
    """One row of the panels, with its centre enlarged in an inset where the tails reach far beyond it."""
    _draw_within(ax, panel, row, *whole_range(panel))
    centre = enlarged_range(panel)
    if centre is not None:
        _draw_within(inset_of(ax, panel.style), panel, row, *centre)


def inset_of(ax: Axes, style: Style) -> Axes:
    """Make axes for the enlarged centre, in the corner that an S leaves empty."""
    inset: Axes = ax.inset_axes((0.09, 0.58, 0.34, 0.40))
    inset.set_in_layout(False)  # its labels reach no farther than the panel's
    inset.tick_params(labelsize=4.5, length=1.5, pad=1)
    for spine in inset.spines.values():
        spine.set(visible=True, linewidth=0.5, color=style.faint)
    return inset


def _draw_within(ax: Axes, panel: Panel, row: str, x_limits: Limits, y_limits: Limits) -> None:
    ax.set(xlim=x_limits, ylim=y_limits)
    DRAW[row](ax, panel)
    draw_curves(ax, panel)
    ax.set(xlim=x_limits, ylim=y_limits)


def whole_range(panel: Panel) -> tuple[Limits, Limits]:
    """Limits that hold every pair, symmetric about the origin, and the bound where the pairs come near it."""
    stats = panel.stats
    if not stats.n_pairs:
        return (-1.0, 1.0), (-1.0, 1.0)
    reach_x = max(float(stats.reach.max()), 1e-30)
    filled = stats.density.sum(0).nonzero().squeeze(1)
    edges = DENSITY_Y_GRID.edges()[1:-1].abs()  # of the bin that holds the largest |y|: the panel holds it whole
    reach_y = float(edges[(filled - 1).clamp(0, len(edges) - 1)].maximum(edges[filled.clamp(max=len(edges) - 1)]).max())
    if 0 < panel.site.bound < _BOUND_SHOWN_WITHIN * reach_y:
        reach_y = panel.site.bound
    return (-1.06 * reach_x, 1.06 * reach_x), (-1.04 * reach_y, 1.04 * reach_y)


def enlarged_range(panel: Panel) -> tuple[Limits, Limits] | None:
    """Limits about the origin within which nearly all pairs lie, where the tails reach far beyond them."""
    (left, right), _ = whole_range(panel)
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


def legend_handles(panels: Sequence[Panel], *, density: bool, sampled: bool, bounds: bool = True) -> list[Artist]:
    """The legend of these panels: greys, lines and dashes.

    ``density`` is whether they show one, ``sampled`` whether of a sample of the tokens alone, and ``bounds`` whether
    they show y itself, which the norm bounds.
    """
    style = panels[0].style
    handles: list[Artist] = []
    if density:
        grey = matplotlib.colormaps[style.density](0.6)
        pairs = "pairs of the sampled tokens" if sampled else "all pairs"
        handles.append(Patch(facecolor=grey, label=f"{pairs} (log scale, each panel its own)"))
        handles.append(Line2D([], [], color=style.ink, lw=1.4, label="E[y|x], the mean of y at x"))
    fits = [fit for panel in panels for fit in panel.fits]
    shifted = {fit.curve for fit in fits if not fit.degenerate and fit.shift}
    for curve, function in {fit.curve: fit.function.function_name for fit in fits}.items():
        colour, dashes = panels[0].looks[curve]
        label = f"A·{function}(αx{'+s' if curve in shifted else ''}), least squares"
        label = label if function == curve else f"{curve}: {label}"
        label = "free: E[y|x] in groups of bins" if curve == FREE else label
        handles.append(Line2D([], [], color=colour, ls=dashes, lw=1.1, label=label))
    if bounds and any(panel.site.bound < whole_range(panel)[1][1] for panel in panels):
        handles.append(Line2D([], [], color=style.faint, ls=":", lw=0.9, label="bound: ±√(d−1), without centring ±√d"))
    return handles


def corner_lines(panel: Panel, result: Callable[[CurveFit], str]) -> list[tuple[str, str]]:
    """Texts for a corner, each with its colour: the results of the fits that are named, and how many others are."""
    lines = [
        (f"{fit.curve}: nothing to fit", panel.style.faint)
        if fit.degenerate
        else (f"{_short(fit.curve)}  {result(fit)}", panel.looks[fit.curve][0])
        for fit in panel.named
    ]
    more = len(panel.fits) - len(panel.named)
    return [*lines, (f"+ {more} more of smaller R²", panel.style.faint)] if more else lines


def _short(curve: str) -> str:
    return curve if len(curve) <= _NAME_LETTERS else f"{curve[: _NAME_LETTERS - 1]}…"


def corner_text(
    ax: Axes, style: Style, lines: Sequence[tuple[str, str]], size: float = 5.6, lowest: float = 0.02
) -> None:
    """Texts, each in its colour, at the right: by default in the corner that an S leaves empty."""
    for number, (text, colour) in enumerate(reversed(lines)):
        ax.text(
            0.99,
            lowest + LINE_SHARE * number,
            text,
            color=colour,
            ha="right",
            fontsize=size,
            transform=ax.transAxes,
            path_effects=outline(style),
            zorder=6,
        )


def outline(style: Style, width: float = 1.2) -> list[withStroke]:
    """Set lines and letters off from whatever lies behind them."""
    return [withStroke(linewidth=1.1 + width, foreground=style.background, alpha=0.7)]
