"""Distributions of magnitudes over pairs and tokens, from their counts per bin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from normscope.pairs.sums.binning import TOKEN_GRID

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Magnitudes:
    """Numbers in bins, spread evenly over each bin.

    Attributes:
        n: count of each bin, ``(bins,)``, positive, in ascending order of the bins.
        low: lower end of the numbers of a bin, likewise.
        high: upper end, likewise; ``low`` where all numbers are the same.
    """

    n: Array
    low: Array
    high: Array

    @property
    def count(self) -> float:
        """Total number."""
        return float(self.n.sum())

    def quantile(self, share: float) -> float:
        """Return the quantile at ``share``, accurate to the width of its bin.

        >>> Magnitudes(np.array([1.0, 3.0]), np.array([0.0, 1.0]), np.array([1.0, 2.0])).quantile(0.5)
        1.3333333333333333
        """
        below = np.concatenate([[0], np.cumsum(self.n)])
        bin_ = min(int(np.searchsorted(below[1:], share * below[-1])), len(self.n) - 1)
        within = (share * below[-1] - below[bin_]) / self.n[bin_]
        return float(self.low[bin_] + within * (self.high[bin_] - self.low[bin_]))

    def below(self, value: float) -> float:
        """Return the count of numbers up to ``value``."""
        width = self.high - self.low
        within = np.divide(value - self.low, width, out=np.where(value >= self.low, 1.0, 0.0), where=width > 0)
        return float(self.n @ np.clip(within, 0, 1))

    def mean(self, function: Callable[[Array], Array]) -> float:
        """Return the mean of a function of the numbers that is nearly linear within a bin."""
        return float(self.n @ function((self.low + self.high) / 2) / self.n.sum())


def of_pairs(moments: Tensor, *, signed: bool = False) -> Magnitudes:
    """Return the distribution of |x| over all pairs; within a bin, by its mean and variance.

    A bin with a single pair, as in the tails, places it at its x.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, float64 ``(6, bins)``, on a grid that is symmetric about zero.
        signed: return the distribution of x itself.
    """
    rows = [row.numpy() for row in (moments[0], moments[1] if signed else moments[1].abs(), moments[3])]
    n, x, xx = rows if signed else map(_folded, rows)
    filled = n > 0
    n, x, xx = n[filled], x[filled], xx[filled]
    mean = x / n
    half = np.sqrt(3 * np.maximum(xx / n - mean**2, 0))  # an even spread's, from its standard deviation
    half *= half > 1e-7 * np.abs(mean)  # below that it is rounding
    return Magnitudes(n, mean - half if signed else np.maximum(mean - half, 0), mean + half)


def of_tokens(counts: Tensor) -> Magnitudes:
    """Return the distribution over tokens of the counted magnitude, μ/σ or σ, in bins of at most 12 %.

    Args:
        counts: number of tokens per bin of the grid of tokens, int64 ``(bins,)``.
    """
    edges = TOKEN_GRID.edges().numpy()[TOKEN_GRID.centre + 1 :]
    low, high = np.concatenate([[0.0], edges[:-1]]), edges
    high = np.where(np.isfinite(high), high, low)
    n = _folded(counts.double().numpy())
    filled = n > 0
    return Magnitudes(n[filled], low[filled], high[filled])


def _folded(row: Array) -> Array:
    """Add the bins of negative numbers to those of the positive ones of the same magnitude."""
    centre = len(row) // 2
    folded = row[centre:].copy()
    folded[1:] += row[:centre][::-1]
    return folded
