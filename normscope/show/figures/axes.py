"""Linear, asinh and symlog axes of x, limits of panels, and E[y|x] along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.scale import AsinhTransform, SymmetricalLogTransform
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import IdentityTransform, Transform
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import UsageError, unknown
from normscope.fits.curve_fit import CurveFit
from normscope.norms.sites import NormSite
from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, PAIR_GRID
from normscope.pairs.sums.stats import PairStats

Array = NDArray[np.float64]
Limits: TypeAlias = tuple[float, float]

LINEAR, ASINH, SYMLOG = XSCALES = ("linear", "asinh", "symlog")
MOST_PAIRS = 0.99  # that a linear axis contains at least, wherever the curve saturates
_SATURATED = 3.0  # |αx|, where tanh is 0.995
_LINEAR_SHARE = 0.9  # of the pairs lie on the part of an asinh axis that is nearly linear
_NARROW = 1.4  # inches
_LETTER_INCHES = 0.052  # of a tick's label, at six points
_ENOUGH_TICKS = 2
_LEAST_COUNT = 32  # pairs that a point of the drawn E[y|x] averages at least
_MOST_APART = 1 / 20  # of the axis, that these lie on, and that two joined points lie apart
_BOUND_SHOWN_WITHIN = 1.6  # times the largest |y|; a bound farther away would flatten the curves, and is written
_MARGIN_X, _MARGIN_Y = 1.06, 1.04
_POINTS_AN_INCH = 40  # of the drawn E[y|x]


@dataclass(frozen=True)
class XAxis:
    """An axis of x.

    Attributes:
        limits: of the axis.
        linear_width: half-width of the part about zero that is (nearly) linear; None if all of the axis is.
        symlog: logarithmic beyond that width; otherwise the axis is an asinh axis.
    """

    limits: Limits
    linear_width: float | None = None
    symlog: bool = False

    @property
    def _transform(self) -> Transform:
        if self.linear_width is None:
            return IdentityTransform()
        return SymmetricalLogTransform(10, self.linear_width, 1) if self.symlog else AsinhTransform(self.linear_width)

    def label(self, inches: float) -> str:
        """Return the axis label, short on a narrow panel."""
        if self.linear_width is None:
            return "norm input x"
        return f"{'norm input x' if inches > _NARROW else 'x'} ({SYMLOG if self.symlog else ASINH} scale)"

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
            width = "linthresh" if self.symlog else "linear_width"
            ax.set_xscale(SYMLOG if self.symlog else ASINH, **{width: self.linear_width})
            ax.xaxis.set_major_locator(FixedLocator(self._ticks(inches)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
            ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlim(self.limits)

    def _ticks(self, inches: float) -> list[float]:
        """Zero and powers of ten of both signs, as far as their labels have room; 1, 2 and 5 times them if few have."""
        end = self.limits[1]
        tens, ticks = 10.0 ** (math.floor(math.log10(end)) - np.arange(9)), [0.0]
        for tick in (*tens, *(5 * tens), *(2 * tens)):
            if len(ticks) > _ENOUGH_TICKS and tick not in tens:
                break
            places = self.along(np.array([end, tick, *ticks]))
            apart = np.abs(places[1] - places[2:]) / (2 * places[0]) * inches / _LETTER_INCHES
            letters = np.array([len(number(-tick)) + len(number(-other)) + 3 for other in ticks]) / 2
            if tick <= end and (apart > letters).all():
                ticks.append(float(tick))
        return [*(-tick for tick in ticks[1:]), *ticks]


def number(value: float) -> str:
    """Write a tick's number, with a true minus sign.

    >>> number(-0.5), number(2e6)
    ('−0.5', '2e+06')
    """
    return f"{value:g}".replace("-", "−")


@dataclass(frozen=True)
class Scales:
    """The scales of a panel.

    Attributes:
        x: its axis of x.
        y: limits of y.
        sigma: the smallest and the largest σ that a colour stands for; NaN where no token is drawn.
        shared: whether other panels have the same.
    """

    x: XAxis
    y: Limits
    sigma: tuple[float, float]
    shared: bool = False


def scales_of(
    sites: Sequence[tuple[NormSite, PairStats]], xscale: str, fits: Sequence[CurveFit] = (), *, shared: bool = False
) -> Scales:
    """Return the scales of one or several sites, symmetric about zero.

    A linear axis ends where the fitted curve saturates, at |αx| = 3, but contains 99 % of the pairs; the other axes
    contain every pair. Limits of y contain every y on the axis, the ends of the fitted curves, and the norm's bound if
    the pairs come near it.

    Args:
        sites: the norms and their sums.
        xscale: ``linear``, ``asinh`` or ``symlog``.
        fits: of these sites; tanh, or else the first curve that bends, ends a linear axis.
        shared: whether other panels have the same.

    Raises:
        UsageError: if there is no such scale.
    """
    check_xscale(xscale)
    filled = [(site, stats) for site, stats in sites if stats.n_pairs]
    of_sites = {name: [fit for fit in fits if fit.site == name] for name in (site.name for site, _ in filled)}
    linear = xscale == LINEAR
    end = max((linear_end(stats, of_sites[site.name] if linear else ()) for site, stats in filled), default=1.0)
    widths = [] if linear else [reach_of(stats.moments.sum(0), _LINEAR_SHARE) for _, stats in filled]
    tops = [_top_of(site, stats, end) for site, stats in filled] or [1 / _MARGIN_Y]
    ends = torch.tensor([-end, end], dtype=torch.float64)
    top = max([*tops, *(float(fit(ends).abs().max()) for fit in fits if fit.identified and fit.function.bounded)])
    rstd = torch.cat([torch.empty(0), *(sample.rstd for _, stats in sites for sample in (stats.tokens, stats.largest))])
    sigmas = (1 / rstd.double()).tolist()
    return Scales(
        XAxis((-end, end), min(filter(None, widths), default=None), xscale == SYMLOG),
        (-_MARGIN_Y * top, _MARGIN_Y * top),
        (min(sigmas, default=math.nan), max(sigmas, default=math.nan)),
        shared,
    )


def linear_end(stats: PairStats, fits: Sequence[CurveFit]) -> float:
    """Return the end of a linear axis, as :func:`scales_of` does: an edge of bins, unless it contains every pair."""
    every = _MARGIN_X * max(float(stats.reach.max()), 1e-30)
    bent = [fit for fit in fits if fit.identified and fit.function.bounded and fit.alpha]
    if not bent:
        return every
    fit = next((fit for fit in bent if fit.curve == "tanh"), bent[0])
    end = max(_SATURATED / abs(fit.alpha), reach_of(stats.moments.sum(0), MOST_PAIRS))
    edges = PAIR_GRID.edges().numpy()
    return min(every, float(edges[np.searchsorted(edges, end)]))


def _top_of(site: NormSite, stats: PairStats, end: float) -> float:
    """Return the end of an axis that contains every y at |x| up to ``end``; the norm's bound if y comes near it."""
    x_edges = DENSITY_X_GRID.edges()
    inside = (x_edges[:-1] < end) & (x_edges[1:] > -end)
    filled = stats.density[inside].sum(0).nonzero().squeeze(1)
    edges = DENSITY_Y_GRID.edges()[1:-1].abs()  # of the bin that holds the largest |y|: the panel holds it whole
    reach = float(edges[(filled - 1).clamp(0, len(edges) - 1)].maximum(edges[filled.clamp(max=len(edges) - 1)]).max())
    return site.bound if 0 < site.bound < _BOUND_SHOWN_WITHIN * reach else reach


def share_colours(axes: Sequence[Axes]) -> None:
    """Give the densities of all these panels one scale of greys."""
    images = [image for ax in axes for image in ax.images]
    most = max((float(image.get_clim()[1] or 1) for image in images), default=1.0)
    for image in images:
        image.set_clim(vmax=most)


def share_heights(axes: Sequence[Axes]) -> None:
    """Give these panels common limits of y."""
    limits = [ax.get_ylim() for ax in axes]
    for ax in axes:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


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
    """Return the number of pairs beyond the ends of an axis, which are edges of bins."""
    n, x = moments[:2].numpy()
    mean = x / np.maximum(n, 1)
    return int(n[(mean < limits[0]) | (mean > limits[1])].sum())


def mean_line(moments: Tensor, axis: XAxis, inches: float) -> tuple[Array, Array]:
    """E[y|x] as a line that is drawn only where there are pairs.

    Each point averages neighbouring bins that hold 32 pairs or more and lie on a twentieth of the axis at most; two
    points farther apart than that are not joined.

    Args:
        moments: n, Σx, Σy, … per bin in ascending order of x: float64 ``(6, bins)``.
        axis: that it is drawn along.
        inches: width of the panel, 40 points an inch.

    Returns:
        x and y, ``(points,)``, with NaN where the line is broken.
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
    return _broken(np.array(points).reshape(-1, 2), axis, (high - low) * _MOST_APART)


def _broken(points: Array, axis: XAxis, farthest: float) -> tuple[Array, Array]:
    gaps = np.flatnonzero(np.diff(axis.along(points[:, 0])) > farthest) + 1
    x, y = np.insert(points, gaps, np.nan, axis=0).T
    return x, y
