"""Scales of panels, linear or asinh axes of x, and E[y|x] along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import UsageError, unknown
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.sums.binning import DENSITY_Y_GRID
from normscope.pairs.sums.stats import PairStats

Array = NDArray[np.float64]
Limits: TypeAlias = tuple[float, float]

LINEAR, ASINH, AUTO = "linear", "asinh", "auto"
XSCALES = (LINEAR, ASINH, AUTO)
_MOST_SHARE, _MOST_WIDTH = 0.99, 0.1  # auto: asinh where so many pairs lie in under so much of the width
_LINEAR_SHARE = 0.9  # of the pairs lie on the part of an asinh axis that is nearly linear
_NARROW = 1.4  # inches
_LETTER_INCHES = 0.052  # of a tick's label, at six points
_LEAST_COUNT = 32  # pairs that a point of the drawn E[y|x] averages at least
_MOST_APART = 1 / 20  # of the axis, that these lie on, and that two joined points lie apart
_BOUND_SHOWN_WITHIN = 1.6  # times the largest |y|; a bound farther away would flatten the curves, and is written
_MARGIN = 1.04  # of y
_NO_REACH = 1.0 / 1.06  # of a site without a pair, whose axis goes to 1
_POINTS_AN_INCH = 40  # of the drawn E[y|x]


@dataclass(frozen=True)
class XAxis:
    """An axis of x.

    Attributes:
        limits: of the axis.
        linear_width: half-width of the part about zero on which an asinh axis is nearly linear; None of a linear one.
    """

    limits: Limits
    linear_width: float | None = None

    def label(self, inches: float) -> str:
        """Return the axis label, short on a narrow panel."""
        name = "norm input x" if inches > _NARROW or self.linear_width is None else "x"
        return name if self.linear_width is None else f"{name} (asinh scale)"

    def along(self, x: Array) -> Array:
        """Return positions along the axis on paper: x itself or asinh(x / linear_width)."""
        return x if self.linear_width is None else np.arcsinh(x / self.linear_width)

    def evenly(self, number: int) -> Array:
        """Return n values of x from limit to limit, evenly spaced on paper.

        >>> XAxis((-10.0, 10.0), 0.1).evenly(3).tolist()
        [-10.0, 0.0, 10.0]
        """
        if self.linear_width is None:
            return np.linspace(*self.limits, number)
        low, high = self.along(np.array(self.limits))
        x = self.linear_width * np.sinh(np.linspace(low, high, number))
        x[[0, -1]] = self.limits
        return x

    def set_on(self, ax: Axes, inches: float) -> None:
        """Set scale, limits and ticks of a panel so many inches wide."""
        if self.linear_width is None:
            ax.set_xlim(self.limits)
            ax.xaxis.set_major_locator(MaxNLocator(max(2, min(6, int(inches / 0.42))), steps=(1, 2, 5, 10)))
            return
        ax.set_xscale("asinh", linear_width=self.linear_width)
        ax.set_xlim(self.limits)
        reach = max(map(abs, self.limits))
        ticks = self._that_fit(asinh_ticks(self.linear_width, reach), inches)
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
        ax.xaxis.set_minor_locator(FixedLocator(_between_decades(self.linear_width, reach)))
        ax.tick_params(axis="x", which="minor", length=1.2, width=0.4)

    def _that_fit(self, ticks: Sequence[float], inches: float) -> list[float]:
        """Leave out ticks whose labels would run into the label of one before them in the list."""
        low, high = self.along(np.array(self.limits))
        letters = float(inches / (high - low) / _LETTER_INCHES)  # between two places on the axis, by their distance

        def apart(tick: float, kept: float) -> bool:
            distance = letters * abs(float(self.along(np.array(tick))) - float(self.along(np.array(kept))))
            return distance > (len(number(tick)) + len(number(kept)) + 1.5) / 2

        fitting: list[float] = []
        for tick in ticks:
            if all(apart(tick, kept) for kept in fitting):
                fitting.append(tick)
        return fitting


def few_ticks(limits: Limits, inches: float) -> list[float]:
    """Return a round number within limits about zero, its negative and zero, as far as their labels have room.

    >>> few_ticks((-46.0, 46.0), 1.0), few_ticks((-0.03, 0.03), 0.3)
    ([20.0, -20.0, 0.0], [0.02])
    """
    power = 10.0 ** math.floor(math.log10(limits[1]))
    tick = max(digit * power for digit in (1, 2, 5) if digit * power <= limits[1])
    return XAxis(limits)._that_fit([tick, -tick, 0.0], inches)


def number(value: float) -> str:
    """Write a tick's number, with a true minus sign.

    >>> number(-0.5), number(2e6)
    ('−0.5', '2e+06')
    """
    return f"{value:g}".replace("-", "−")


def x_axis(moments: Sequence[Tensor], reach: float, scale: str, margin: float = 1.06) -> XAxis:
    """Make the axis of one or several sites' pairs, symmetric about zero.

    ``auto`` is asinh where 99 % of a site's pairs lie in under a tenth of the width, and linear elsewhere. An asinh
    axis is nearly linear for the 90 % of the narrowest site's pairs that are nearest to zero.

    Args:
        moments: of each site, n, Σx, Σy, … per bin: float64 ``(6, bins)``.
        reach: largest |x|.
        scale: ``linear``, ``asinh`` or ``auto``.
        margin: the axis goes so many times as far.

    Raises:
        UsageError: if there is no such scale.
    """
    check_xscale(scale)
    limits = (-margin * reach, margin * reach)
    if scale == LINEAR:
        return XAxis(limits)
    most, linear = (
        min(filter(None, (_reach_of(of_site, share) for of_site in moments)), default=0.0)
        for share in (_MOST_SHARE, _LINEAR_SHARE)
    )
    if linear <= 0 or (scale == AUTO and most >= _MOST_WIDTH * limits[1]):
        return XAxis(limits)
    return XAxis(limits, linear)


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


def scales_of(sites: Sequence[tuple[NormSite, PairStats]], xscale: str, *, shared: bool = False) -> Scales:
    """Return the scales that contain every pair of some sites, symmetric about zero.

    The limits of y include the norm's bound where a site's pairs come near it.
    """
    filled = [(site, stats) for site, stats in sites if stats.n_pairs]
    reach = max((float(stats.reach.max()) for _, stats in filled), default=_NO_REACH)
    top = max((_top_of(site, stats) for site, stats in filled), default=1 / _MARGIN)
    ends = [end for _, stats in sites for end in _sigma_of(stats)]
    return Scales(
        x_axis([stats.moments.sum(0) for _, stats in filled or sites], max(reach, 1e-30), xscale),
        (-_MARGIN * top, _MARGIN * top),
        (min(ends, default=math.nan), max(ends, default=math.nan)),
        shared,
    )


def _top_of(site: NormSite, stats: PairStats) -> float:
    """Return the end of an axis that contains every y; the norm's bound if the pairs come near it."""
    filled = stats.density.sum(0).nonzero().squeeze(1)
    edges = DENSITY_Y_GRID.edges()[1:-1].abs()  # of the bin that holds the largest |y|: the panel holds it whole
    reach = float(edges[(filled - 1).clamp(0, len(edges) - 1)].maximum(edges[filled.clamp(max=len(edges) - 1)]).max())
    return site.bound if 0 < site.bound < _BOUND_SHOWN_WITHIN * reach else reach


def _sigma_of(stats: PairStats) -> list[float]:
    sigma = 1 / torch.cat([stats.tokens.rstd, stats.largest.rstd]).double()
    return [float(sigma.min()), float(sigma.max())] if len(sigma) else []


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


def _reach_of(moments: Tensor, share: float) -> float:
    """Return the quantile ``share`` of |x|, to a bin; 0 without pairs."""
    n = moments[0].numpy()
    if not n.any():
        return 0.0
    x = np.abs(moments[1].numpy() / np.maximum(n, 1))
    order = np.argsort(x)
    return float(x[order][min(int((n[order].cumsum() < share * n.sum()).sum()), len(x) - 1)])


def asinh_ticks(least: float, most: float) -> list[float]:
    """Return zero and round numbers of both signs, the most important first.

    Powers of ten, where there are two of them between ``least`` and ``most``; else up to three of 1, 2, 5, 10, ….

    >>> asinh_ticks(0.3, 300.0)
    [0.0, -100.0, 100.0, -1.0, 1.0, -10.0, 10.0]
    >>> asinh_ticks(0.3, 15.0)
    [0.0, -10.0, 10.0, -1.0, 1.0]
    >>> asinh_ticks(2.0, 9.0)
    [0.0, -5.0, 5.0, -2.0, 2.0]
    """
    powers = range(math.floor(math.log10(least)), math.floor(math.log10(most)) + 1)
    round_numbers = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    inside = [at for at in round_numbers if least <= at <= most]
    tens = [at for at in inside if at in round_numbers[::3]]
    decades = tens if len(tens) > 1 else inside[::-1][:3]
    first = [max(decades), min(decades)] if decades else []
    return [0.0, *(sign * at for at in dict.fromkeys([*first, *decades]) for sign in (-1, 1))]


def _between_decades(least: float, most: float) -> list[float]:
    powers = range(math.floor(math.log10(least)) - 1, math.floor(math.log10(most)) + 1)
    at = [digit * 10.0**power for power in powers for digit in range(1, 10)]
    return [sign * x for x in at if least <= x <= most for sign in (-1, 1)]


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
    if not n.size:
        return np.empty(0), np.empty(0)
    low, high = axis.along(np.array(axis.limits))
    share = (axis.along(sum_x / n) - low) / (high - low)
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
        held = slice(first, last + 1)
        if (total := n[held].sum()) >= _LEAST_COUNT:
            points.append((sum_x[held].sum() / total, sum_y[held].sum() / total))
            first = last + 1
    return _broken(np.array(points).reshape(-1, 2), axis, (high - low) * _MOST_APART)


def _broken(points: Array, axis: XAxis, apart: float) -> tuple[Array, Array]:
    gaps = np.flatnonzero(np.diff(axis.along(points[:, 0])) > apart) + 1
    x, y = np.insert(points, gaps, np.nan, axis=0).T
    return x, y
