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
    columns = _shares(DENSITY_X_GRID, x_range, pixels)
    rows = _shares(DENSITY_Y_GRID, y_range, pixels)
    gathered: Array = rows @ stats.density.numpy().T.astype(np.float64) @ columns.T
    return gathered


def _shares(grid: FloatGrid, limits: tuple[float, float], pixels: int) -> Array:
    """Which share of each bin lies in each pixel: ``(pixels, bins)``."""
    edges = grid.edges().numpy()
    edges[0], edges[-1] = 2 * edges[1], 2 * edges[-2]
    at = np.linspace(*limits, pixels + 1)
    low = np.clip(at[:-1, None], edges[:-1], edges[1:])
    high = np.clip(at[1:, None], edges[:-1], edges[1:])
    shares: Array = (high - low) / np.diff(edges)
    return shares
