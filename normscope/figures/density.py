"""A joint histogram on logarithmic bins, as an image on linear axes of any range."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from normscope.pairs.binning import DENSITY_X_GRID, DENSITY_Y_GRID, FloatGrid
from normscope.pairs.stats import PairStats

Array = NDArray[np.float64]


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
