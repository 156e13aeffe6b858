"""What one panel shows of one norm site: its pairs as a density, by token or by channel, under the fitted curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from normscope.figures import density
from normscope.figures.style import Style
from normscope.fits.fit import CurveFit
from normscope.fits.goodness import conditional_mean
from normscope.pairs.sites import NormSite
from normscope.pairs.stats import PairStats

Array = NDArray[np.float64]
_PIXELS = 220
_LEAST_COUNT = 32  # pairs that a point of the drawn E[y|x] averages at least
_EXTREME_CHANNELS = 4


@dataclass(frozen=True)
class Panel:
    """Everything that the panels of one site are drawn from."""

    site: NormSite
    stats: PairStats
    fits: Sequence[CurveFit]
    style: Style


def draw_density(ax: Axes, panel: Panel) -> None:
    """All pairs: how many lie where, on a logarithmic colour scale, and E[y|x] over them."""
    limits = (*ax.get_xlim(), *ax.get_ylim())
    counts = density.image(panel.stats, limits[:2], limits[2:], _PIXELS)
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
    x, y, rstd = _drawn_tokens(panel.stats)
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
    colours = np.repeat(scale, x.shape[1])
    ax.scatter(
        x.ravel(), y.ravel(), c=colours, norm=norm, cmap=panel.style.tokens, s=1.6, lw=0, rasterized=True, zorder=2
    )


def draw_channels(ax: Axes, panel: Panel) -> None:
    """The same tokens, and pairs drawn evenly over x, by channel: those of largest |x| in colour, the rest grey."""
    x, y, channel = _drawn_pairs(panel.stats)
    ax.scatter(x, y, color=panel.style.faint, s=1.2, lw=0, alpha=0.35, rasterized=True)
    for colour, extreme in zip(panel.style.channels, extreme_channels(panel.stats), strict=False):
        own = channel == extreme
        ax.scatter(x[own], y[own], color=colour, s=4, lw=0, rasterized=True, zorder=2)


DRAW: dict[str, Callable[[Axes, Panel], None]] = {
    "density": draw_density,
    "token": draw_tokens,
    "channel": draw_channels,
}


def draw_curves(ax: Axes, panel: Panel) -> None:
    """Every fitted curve, and the bounds that no output of the norm passes."""
    grid = torch.linspace(*ax.get_xlim(), 600, dtype=torch.float64)
    for found in panel.fits:
        if not found.degenerate:
            colour, dashes = panel.style.curves[found.curve]
            ax.plot(
                grid, found(grid), color=colour, ls=dashes, lw=1.1, zorder=4, path_effects=outline(panel.style, 0.8)
            )
    for bound in (-panel.site.bound, panel.site.bound):
        ax.axhline(bound, color=panel.style.faint, lw=0.7, ls=":", zorder=1)


def extreme_channels(stats: PairStats) -> list[int]:
    """Return the channels that reach the largest |x|, the largest first."""
    reach = stats.channel_extremes.abs().amax(0)
    return [int(i) for i in reach.argsort(descending=True)[:_EXTREME_CHANNELS]]


def token_scales(stats: PairStats) -> tuple[float, float]:
    """Return the smallest and largest σ among the drawn tokens."""
    scale = 1 / _drawn_tokens(stats)[2]
    return (float(np.min(scale)), float(np.max(scale))) if len(scale) else (float("nan"), float("nan"))


def _drawn_tokens(stats: PairStats) -> tuple[Array, Array, Array]:
    def both(name: str) -> Array:
        drawn: Array = torch.cat([getattr(stats.tokens, name), getattr(stats.largest, name)]).double().numpy()
        return drawn

    return both("x"), both("y"), both("rstd")


def _drawn_pairs(stats: PairStats) -> tuple[Array, Array, NDArray[np.int64]]:
    token_x, token_y, _ = _drawn_tokens(stats)
    channels = np.broadcast_to(np.arange(stats.d), token_x.shape)
    filled = stats.pairs.filled
    return (
        np.concatenate([token_x.ravel(), stats.pairs.x[filled].double().numpy()]),
        np.concatenate([token_y.ravel(), stats.pairs.y[filled].double().numpy()]),
        np.concatenate([channels.ravel(), stats.pairs.channel[filled].long().numpy()]),
    )


def outline(style: Style, width: float = 1.2) -> list[withStroke]:
    """Set lines and letters off from whatever lies behind them."""
    return [withStroke(linewidth=1.1 + width, foreground=style.background, alpha=0.7)]
