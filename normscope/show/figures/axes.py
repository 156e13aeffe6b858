"""Linear and asinh axes of x, limits of panels, and E[y|x] along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.scale import AsinhTransform
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import IdentityTransform, Transform
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import UsageError, unknown
from normscope.norms.sites import NormSite
from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, PAIR_GRID
from normscope.pairs.sums.stats import PairStats
from normscope.show.figures.text import signed

Array = NDArray[np.float64]
Limits: TypeAlias = tuple[float, float]

LINEAR, ASINH = XSCALES = ("linear", "asinh")
_STRETCHED_FOR = 3e-4  # of the pairs, a linear axis becomes e times as long
_SPARED = 0.25  # an axis that can be shortened by this factor or less contains every pair
_LINEAR_SHARE = 0.9  # of the pairs lie on the part of an asinh axis that is nearly linear
_NARROW = 1.4  # inches
_LETTER_INCHES = 0.052  # of a tick's label, at six points
_ENOUGH_TICKS = 2
_LEAST_COUNT = 32  # pairs that a point of the drawn E[y|x] averages at least
_MOST_APART = 1 / 20  # of the axis, that these lie on, and that two joined points lie apart
_BOUND_SHOWN_WITHIN = 1.25  # times the largest y; a bound farther away would flatten the curves, and is written
_MARGIN = 0.03  # of an axis, at each end
_NONE = (-1.0,), (1.0,)  # ends of axes without pairs
_POINTS_AN_INCH = 40  # of the drawn E[y|x]


@dataclass(frozen=True)
class XAxis:
    """An axis of x: ``linear_width`` is half of the part about zero that is nearly linear, None if all of it is."""

    limits: Limits
    linear_width: float | None = None

    @property
    def _transform(self) -> Transform:
        return IdentityTransform() if self.linear_width is None else AsinhTransform(self.linear_width)

    def label(self, inches: float) -> str:
        """Return the axis label, short on a narrow panel."""
        if self.linear_width is None:
            return "norm input x"
        return f"{'norm input x' if inches > _NARROW else 'x'} ({ASINH} scale)"

    def along(self, x: Array) -> Array:
        """Return positions along the axis on paper."""
        return np.asarray(self._transform.transform_non_affine(x))

    def at(self, positions: Array) -> Array:
        """Return x at positions along the axis."""
        return np.asarray(self._transform.inverted().transform_non_affine(positions))

    def evenly(self, number: int) -> Array:
        """Return n values of x from limit to limit, evenly spaced on paper.

        >>> XAxis((-10.0, 10.0), 0.1).evenly(3).tolist()
        [-10.0, 0.0, 10.0]
        """
        low, high = self.along(np.array(self.limits))
        x = self.at(np.linspace(low, high, number))
        x[[0, -1]] = self.limits
        return x

    def set_on(self, ax: Axes, inches: float) -> None:
        """Set scale, limits and ticks of a panel that is ``inches`` wide."""
        if self.linear_width is None:
            ax.xaxis.set_major_locator(MaxNLocator(max(2, min(6, int(inches / 0.42))), steps=(1, 2, 5, 10)))
        else:
            ax.set_xscale(ASINH, linear_width=self.linear_width)
            ax.xaxis.set_major_locator(FixedLocator(self._ticks(inches)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: signed(f"{x:g}")))
            ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlim(self.limits)

    def _ticks(self, inches: float) -> list[float]:
        """Zero and powers of ten of both signs, as far as their labels have room; 1, 2 and 5 times them if few have."""
        end = max(map(abs, self.limits))
        tens, ticks = 10.0 ** (math.floor(math.log10(end)) - np.arange(9)), [0.0]
        for tick in (*tens, *(5 * tens), *(2 * tens)):
            if len(ticks) > _ENOUGH_TICKS and tick not in tens:
                break
            low, high, position, *positions = self.along(np.array([*self.limits, tick, *ticks]))
            apart = np.abs(position - np.array(positions)) / (high - low) * inches / _LETTER_INCHES
            letters = np.array([len(f"{-tick:g}") + len(f"{-placed:g}") + 3 for placed in ticks]) / 2
            if tick <= end and (apart > letters).all():
                ticks.append(float(tick))
        return [*(-tick for tick in ticks[1:]), *ticks]  # matplotlib leaves out those beyond the limits


@dataclass(frozen=True)
class Scales:
    """The scales of a panel: axes, and the range of σ in its colours, NaN without tokens; ``shared`` with others."""

    x: XAxis
    y: Limits
    sigma: tuple[float, float]
    shared: bool = False


def scales_of(sites: Sequence[tuple[NormSite, PairStats]], xscale: str, *, shared: bool = False) -> Scales:
    """Return the scales of one or several sites, which end where their pairs do and contain zero.

    A linear axis leaves out spikes: it becomes e times as long only for 3 pairs in 10,000. The other axes contain every
    pair. Limits of y contain every y on the axis, and the norm's bound if the pairs come near it. UsageError for an
    unknown scale.
    """
    check_xscale(xscale)
    filled = [(site, stats) for site, stats in sites if stats.n_pairs]
    lows, highs = zip(*(_limits_of(stats, xscale == LINEAR) for _, stats in filled), strict=True) if filled else _NONE
    ends = min(lows), max(highs)
    bottoms, tops = zip(*(_heights_of(site, stats, ends) for site, stats in filled), strict=True) if filled else _NONE
    widths = [] if xscale == LINEAR else [reach_of(stats.moments.sum(0), _LINEAR_SHARE) for _, stats in filled]
    rstd = torch.cat([torch.empty(0), *(sample.rstd for _, stats in sites for sample in (stats.tokens, stats.largest))])
    sigmas = (1 / rstd.double()).tolist()
    axis = XAxis(ends, min(filter(None, widths), default=None))
    if xscale != LINEAR:
        low, high = axis.at(np.array(_with_margins(*axis.along(np.array(ends)).tolist()))).tolist()
        axis = replace(axis, limits=(low, high))
    sigma = min(sigmas, default=math.nan), max(sigmas, default=math.nan)
    return Scales(axis, (min(bottoms), max(tops)), sigma, shared)


def _with_margins(low: float, high: float) -> Limits:
    """Return limits that contain zero and leave a margin; 0 alone needs some length."""
    low, high = min(low, 0.0), max(high, 0.0)
    margin = max(_MARGIN * (high - low), 1e-30)
    return low - margin, high + margin


def _limits_of(stats: PairStats, linear: bool) -> Limits:
    """Return the ends of the pairs; on a linear axis with margins, as :func:`scales_of` does, at edges of bins."""
    extremes = float(stats.channel_extremes[0].min()), float(stats.channel_extremes[1].max())
    if not linear:
        return min(extremes[0], 0.0), max(extremes[1], 0.0)
    every = _with_margins(*extremes)
    n, sum_x = stats.moments.sum(0)[:2].numpy()
    x = sum_x[n > 0] / n[n > 0]
    order = np.argsort(np.abs(x))[np.count_nonzero(x == 0) :]
    if not len(order):
        return every
    beyond = (n[n > 0][order][::-1].cumsum()[::-1] - n[n > 0][order]) / n.sum()
    cost = np.log(np.abs(x[order])) + beyond / _STRETCHED_FOR
    last = order[np.flatnonzero(cost <= cost.min() + _SPARED)[-1]]
    inside = x[np.abs(x) <= np.abs(x[last])]
    low, high = _with_margins(float(inside.min()), float(inside.max()))
    edges = PAIR_GRID.edges().numpy()
    low, high = edges[np.searchsorted(edges, low, "right") - 1], edges[np.searchsorted(edges, high)]
    return max(every[0], float(low)), min(every[1], float(high))


def _heights_of(site: NormSite, stats: PairStats, ends: Limits) -> Limits:
    """Return limits that contain every y between two x, and the norm's bound where y comes near it."""
    x_edges, edges = DENSITY_X_GRID.edges(), DENSITY_Y_GRID.edges()
    inside = (x_edges[:-1] < ends[1]) & (x_edges[1:] > ends[0])
    filled = stats.density[inside].sum(0).nonzero().squeeze(1)
    edges[0], edges[-1] = edges[1], edges[-2]
    low, high = float(edges[filled.min()]), float(edges[filled.max() + 1])  # a panel contains all of the outer bins
    low = -site.bound if low < 0 and site.bound < -_BOUND_SHOWN_WITHIN * low else low
    high = site.bound if high > 0 and site.bound < _BOUND_SHOWN_WITHIN * high else high
    return _with_margins(low, high)


def check_xscale(scale: str) -> None:
    """Raise UsageError for an unknown scale."""
    if scale not in XSCALES:
        raise UsageError(unknown("scale of x", scale, XSCALES))


def reach_of(moments: Tensor, share: float) -> float:
    """Return the quantile ``share`` of |x|, to a bin; 0 without pairs."""
    n = moments[0].numpy()
    if not n.any():
        return 0.0
    x = np.abs(moments[1].numpy() / np.maximum(n, 1))
    order = np.argsort(x)
    return float(x[order][min(int((n[order].cumsum() < share * n.sum()).sum()), len(x) - 1)])


def pairs_beyond(moments: Tensor, limits: Limits) -> int:
    """Return the number of pairs beyond the ends of an axis, which are edges of bins or beyond all pairs."""
    n, x = moments[:2].numpy()
    mean = x / np.maximum(n, 1)
    return int(n[(mean < limits[0]) | (mean > limits[1])].sum())


def mean_line(moments: Tensor, axis: XAxis, inches: float) -> tuple[Array, Array]:
    """E[y|x] as a line that is drawn only where there are pairs.

    Each point averages neighbouring bins that contain 32 pairs or more and lie on a twentieth of the axis at most. Two
    points farther apart than that are not joined: NaN breaks the line between them. A panel has 40 points an inch.
    The moments are n, Σx, Σy, … per bin in ascending order of x, ``(6, bins)``.
    """
    n, sum_x, sum_y = moments[:3, moments[0] > 0].numpy()
    low, high = axis.along(np.array(axis.limits))
    share = (axis.along(sum_x / n) - low) / (high - low)
    inside = (share >= 0) & (share <= 1)
    if not inside.any():
        return np.empty(0), np.empty(0)
    n, sum_x, sum_y, share = n[inside], sum_x[inside], sum_y[inside], share[inside]
    columns = np.floor(share * max(20, _POINTS_AN_INCH * inches))
    starts = np.flatnonzero(np.diff(columns, prepend=-np.inf))
    n, sum_x, sum_y, share = (
        np.add.reduceat(n, starts),
        np.add.reduceat(sum_x, starts),
        np.add.reduceat(sum_y, starts),
        np.stack([share[starts], share[np.append(starts[1:], len(share)) - 1]]),
    )
    points, first = [], 0
    for last in range(len(n)):
        while share[1, last] - share[0, first] > _MOST_APART and first < last:
            first += 1
        window = slice(first, last + 1)
        if (total := n[window].sum()) >= _LEAST_COUNT:
            points.append((sum_x[window].sum() / total, sum_y[window].sum() / total))
            first = last + 1
    means = np.array(points).reshape(-1, 2)
    gaps = np.flatnonzero(np.diff(axis.along(means[:, 0])) > (high - low) * _MOST_APART) + 1
    x, y = np.insert(means, gaps, np.nan, axis=0).T
    return x, y
