"""Binned sums as the few weighted points on which fits are evaluated; many problems as one batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from normscope.errors import DataError, UsageError, unknown
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import NormSite, kind_of_site
from normscope.pairs.sums.binning import CHANNEL_GRID, PAIR_GRID, FloatGrid
from normscope.pairs.sums.stats import PairStats, of_tokens

PER = ("site", "channel")
POOLS = ("placement", "kind", "all")
WEIGHTS = ("pairs", "gamma", "x")

CONSTANT_OUTPUT = "constant output"
_REPEATED = 0.02  # of the drawn x: far fewer are equal by chance
_NO_SPREAD = 1e-14  # of the mean square: below it, what is left of the difference of two squares is rounding


@dataclass(eq=False)
class FitTarget:
    """All pairs that one fit explains.

    Attributes:
        site: module path of the norm; of pooled sites, what they have in common.
        moments: n, Σx, Σy, Σx², Σxy, Σy² per fold and bin, float64 ``(folds, 6, bins)``, weighted as requested.
        counts: number of pairs per fold and bin, float64 ``(folds, bins)``.
        reach: largest |x|.
        nothing: reason why there is nothing to fit, in words; None where there is.
        grid: of the bins.
        fold_by: unit of the folds; None without folds.
        sites: module paths of the pooled sites; empty for one site.
        channel: number of the channel, or None for all.
        bound: largest possible |y|; infinite without a bound.
        slope: of the mean token's line at the origin, (1 − 1/d)/σ with centring and 1/ρ without.
        x_repeats: True if many x of the drawn tokens are equal to the last bit, which bins cannot resolve.
    """

    site: str
    moments: Tensor
    counts: Tensor
    reach: float
    nothing: str | None
    grid: FloatGrid = PAIR_GRID
    fold_by: Literal["source", "sample"] | None = None
    sites: tuple[str, ...] = ()
    channel: int | None = None
    bound: float = math.inf
    slope: float = math.nan
    x_repeats: bool = False


def fit_targets(
    capture: Capture, *, per: str = "site", pool: str | None = None, weights_by: str = "pairs"
) -> list[FitTarget]:
    """Levels of a capture, in the order of its sites.

    The arguments are those of :func:`normscope.fit`.

    Raises:
        UsageError: if there is no such level, pool or weighting, or if they exclude one another.
        DataError: if the capture lacks the sums that they need.
    """
    check_levels(per, pool, weights_by)
    if per == "channel":
        levels = [level for site in capture.sites for level in _channels(site, capture.stats[site.name])]
    else:
        levels = [_of_site(site, capture.stats[site.name], weights_by) for site in capture.sites]
    if pool is not None:
        groups: dict[str, list[FitTarget]] = {}
        for site, level in zip(capture.sites, levels, strict=True):
            groups.setdefault(_shared(site, pool), []).append(level)
        levels = [_pooled(name, members) for name, members in groups.items()]
    return [_even_over_x(level) for level in levels] if weights_by == "x" else levels


def check_levels(per: str, pool: str | None, weights_by: str) -> None:
    """Refuse arguments that :func:`fit_targets` would refuse, before there is a capture; UsageError."""
    for what, value, choices in (("level", per, PER), ("pool", pool, POOLS), ("weighting", weights_by, WEIGHTS)):
        if value is not None and value not in choices:
            raise UsageError(unknown(what, value, choices))
    if per == "channel" and (pool or weights_by == "gamma"):
        raise UsageError(
            "Channels are fitted site by site, and γ² is one number in each; leave pool and weights by gamma out."
        )


def _shared(site: NormSite, pool: str) -> str:
    if pool == "placement":
        return site.placement or "beside the residual stream"
    return kind_of_site(site.name) if pool == "kind" else "all sites"


def sums_of(sums: Tensor | None, what: str, site: NormSite, option: str) -> Tensor:
    """Return optional sums of a capture; DataError with the option to set if they are missing."""
    if sums is None:
        raise DataError(
            f"The capture holds no sums {what} {site.name}; capture again with {option}=True "
            f"(normscope capture --{option.replace('_', '-')})."
        )
    return sums


def _of_site(site: NormSite, stats: PairStats, weights_by: str) -> FitTarget:
    moments = stats.moments
    if weights_by == "gamma":
        moments = sums_of(stats.gamma_moments, "weighted by γ² of", site, "by_gamma")
    level = site_level(site, stats, moments)
    return replace(level, counts=stats.moments[:, 0], bound=site.bound, slope=_slope(site, stats))


def site_level(site: NormSite, stats: PairStats, moments: Tensor) -> FitTarget:
    """Sums of pairs of a site, ``(folds, 6, bins)``, as a level without a bound on y."""
    low, high = stats.channel_extremes
    return FitTarget(
        site=site.name,
        moments=moments,
        counts=moments[:, 0],
        reach=float(stats.reach.max()) if stats.n_pairs else math.nan,
        nothing=_degenerate(stats, stats.n_pairs, float(low.min()), float(high.max()))
        or _nothing_in(moments, "γ is zero"),
        fold_by=stats.fold_by,
        x_repeats=_repeats(stats.tokens.x),
    )


def _repeats(x: Tensor) -> bool:
    """True if many x occur more than once, as those of blank patches; those that half precision holds do by chance."""
    fine = x[(x != x.half()) & (x != x.bfloat16())]
    _, times = torch.unique(fine, return_counts=True)
    return bool(times[times > 1].sum() > _REPEATED * x.numel())


def _even_over_x(level: FitTarget) -> FitTarget:
    """Weight every bin with pairs by its width, shared alike among them."""
    width = level.grid.edges().diff()
    # Nothing is known of how far pairs lie apart beyond the grid.
    share = width.where(width.isfinite(), 0.0) / level.counts.sum(0).clamp_min(1)
    moments = level.moments * share
    return replace(level, moments=moments, nothing=level.nothing or _nothing_in(moments, "x beyond the grid"))


def _degenerate(stats: PairStats, pairs: float, low: float, high: float) -> str | None:
    """Reason why there is nothing to fit, from the number of pairs and the range of x; None where there may be."""
    if not pairs:
        return "no finite pair"
    if low == high:
        return "constant input" if low else "all zero"
    return "one token" if stats.n_tokens == 1 else None


def _nothing_in(moments: Tensor, no_weight: str) -> str | None:
    n, _, y, _, _, yy = moments.sum((0, 2)).tolist()
    if not n > 0:
        return no_weight
    return CONSTANT_OUTPUT if yy - y * y / n <= _NO_SPREAD * yy else None


def _slope(site: NormSite, stats: PairStats) -> float:
    """Slope at the origin of the token of mean ρ or σ: of all pairs Σxy/n is that mean but for eps, which is added."""
    n, _, _, _, xy, _ = stats.moments.sum((0, 2)).tolist()
    if not n:
        return math.nan
    scales = of_tokens(stats.token_scales)
    of_eps = scales.mean(lambda scale: site.eps / np.maximum(scale, 1e-300)) if site.eps else 0.0
    scale = xy / n + of_eps
    return (1 - 1 / site.d if site.centred else 1.0) / scale if scale > 0 else math.nan


def _channels(site: NormSite, stats: PairStats) -> list[FitTarget]:
    moments = sums_of(stats.channel_moments, "per channel of", site, "per_channel").transpose(0, 1)
    slope = _slope(site, stats)
    n, _, y, _, _, yy = moments.sum(-1).unbind(-1)
    flat = yy - y * y / n.clamp_min(1) <= _NO_SPREAD * yy
    low, high = stats.channel_extremes
    columns = zip(n.tolist(), low.tolist(), high.tolist(), flat.tolist(), strict=True)
    return [
        FitTarget(
            site=site.name,
            moments=moments[channel, None],
            counts=moments[channel, None, 0],
            reach=max(abs(least), abs(most)),
            nothing=_degenerate(stats, pairs, least, most) or (CONSTANT_OUTPUT if is_flat else None),
            grid=CHANNEL_GRID,
            channel=channel,
            bound=site.bound,
            slope=slope,
        )
        for channel, (pairs, least, most, is_flat) in enumerate(columns)
    ]


def _pooled(name: str, members: Sequence[FitTarget]) -> FitTarget:
    """Add up the pairs of several sites; folds stay folds, as a source is in the same one at every site."""
    filled = [level for level in members if level.nothing not in ("no finite pair", "γ is zero")]
    used = filled or list(members)
    folds = {level.fold_by for level in used}
    n = [float(level.counts.sum()) for level in used]
    slopes = [pairs * level.slope for pairs, level in zip(n, used, strict=True) if level.slope > 0]
    bounds = {level.bound for level in used}
    return FitTarget(
        site=name,
        moments=reduce(torch.add, [level.moments for level in used]),
        counts=reduce(torch.add, [level.counts for level in used]),
        reach=max(level.reach for level in used),
        nothing=None if any(level.nothing is None for level in used) else used[0].nothing,
        fold_by=folds.pop() if len(folds) == 1 else None,
        sites=tuple(level.site for level in members),
        bound=bounds.pop() if len(bounds) == 1 else math.inf,
        slope=sum(slopes) / sum(n) if sum(n) else math.nan,
        x_repeats=any(level.x_repeats for level in used),
    )


_MIRRORED = (1.0, -1.0, -1.0, 1.0, 1.0, 1.0)  # signs of n, Σx, Σy, Σx², Σxy, Σy² of (−x, −y)
_ROUNDING = 1e-7  # of |x|: below it, what is left of the difference of two squares is no spread


class Batched:
    """A record of tensors with a row for each of several problems."""

    def of(self, problems: Tensor) -> Self:
        """The rows of some of the problems, by their numbers, as often as they are named."""
        return type(self)(**{name: rows.index_select(0, problems) for name, rows in vars(self).items()})


@dataclass(frozen=True)
class Nodes(Batched):
    """Weighted points (x, y) that stand for all pairs of several least-squares problems, a row each.

    Rows are padded with points of weight zero.

    Attributes:
        x: float64 ``(problems, nodes)``.
        y: likewise.
        weight: of the pairs that each stands for; without weights their number, likewise.
        scatter: Σ w (y − its node's y)² over those pairs: what no fit changes, likewise.
        total: Σ w (y − ȳ)² over all pairs, float64 ``(problems,)``.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    scatter: Tensor
    total: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def residual(self, predicted: Tensor) -> Tensor:
        """Σ w (y − prediction)² over all pairs, ``(problems,)``, for predictions ``(problems, nodes)``."""
        off = self.y - predicted
        return dot(self.weight * off, off) + self.scatter.sum(-1)

    def filled(self) -> Nodes:
        """The nodes without those at which no problem has pairs."""
        filled = (self.weight > 0).any(0)
        return Nodes(self.x[:, filled], self.y[:, filled], self.weight[:, filled], self.scatter[:, filled], self.total)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·b over the last axis."""
    summed: Tensor = torch.linalg.vecdot(a, b)
    return summed


def joined(moments: Tensor, width: int) -> Tensor:
    """Join neighbouring bins of a :class:`FloatGrid`; none but zero's then holds pairs of both signs.

    Args:
        moments: sums per bin, ``(…, bins)``.
        width: how many become one; a power of two that divides the number of bins an octave.

    Returns:
        The sums per wider bin, in ascending order of x, ``(…, wider bins)``.

    >>> joined(torch.tensor([9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]), 2).tolist()
    [9, 3, 7, 5, 13, 17, 9]
    """
    if width == 1:
        return moments
    centre = moments.shape[-1] // 2
    # Slices added up: a sum over an axis of a few bins takes five times as long.
    negative, positive = (
        sum((side[..., place::width] for place in range(1, width)), side[..., ::width])
        for side in (moments[..., 1:centre], moments[..., centre + 1 : -1])
    )
    return torch.cat([moments[..., :1], negative, moments[..., centre, None], positive, moments[..., -1:]], -1)


def mirrored(moments: Tensor) -> Tensor:
    """Add the bins of negative x to those of positive x, as an odd curve errs by the same at (−x, −y) as at (x, y).

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin of a grid that is symmetric about zero, ``(…, 6, bins)``.
    """
    centre = moments.shape[-1] // 2
    signs = torch.tensor(_MIRRORED, dtype=moments.dtype)[:, None]
    both = moments[..., centre:].clone()
    both[..., 1:] += signs * moments[..., :centre].flip(-1)
    return both


def nodes_of(moments: Tensor, *, odd: bool = False) -> Nodes:
    """Put each bin's pairs at two points, one standard deviation of its x to either side of its mean.

    The two, with y on the bin's own regression line, have the bin's n, Σx, Σx², Σy and Σxy, so that Σf(x)² and
    Σf(x)y are right to second order in the bin's width for any smooth f, without a derivative of it. With bins of
    1/16 octave that leaves relative errors near 1e-7, and near 1e-4 with half octaves.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, float64 ``(problems, 6, bins)``, on a grid that is symmetric about
            zero.
        odd: the curve will be odd: let one point stand for pairs of either sign.
    """
    total = _total(moments)
    if odd:
        moments = mirrored(moments)
    n, x, y, xx, xy, yy = _filled(moments).unbind(1)
    n = n.clamp_min(0)
    filled = n > 0
    number = torch.where(filled, n, 1.0)
    mean_x, mean_y = x / number, y / number
    deviation_x = (xx / number - mean_x.square()).clamp_min(0).sqrt()
    deviation_x = torch.where(filled & (deviation_x > _ROUNDING * mean_x.abs()), deviation_x, 0.0)
    variance_y = torch.where(filled, (yy / number - mean_y.square()).clamp_min(0), 0.0)
    limit = variance_y.sqrt()
    deviation_y = (xy / number - mean_x * mean_y) / torch.where(deviation_x > 0, deviation_x, torch.inf)
    deviation_y = deviation_y.clamp(-limit, limit)
    scatter = n * (variance_y - deviation_y.square())
    return Nodes(
        torch.cat([mean_x - deviation_x, mean_x + deviation_x], -1),
        torch.cat([mean_y - deviation_y, mean_y + deviation_y], -1),
        torch.cat([n, n], -1) / 2,
        torch.cat([scatter, scatter], -1) / 2,
        total,
    )


def _filled(moments: Tensor) -> Tensor:
    """The bins that hold pairs, side by side, each problem's its own, and zeros behind: ``(problems, 6, most)``."""
    filled = moments[:, 0] > 0
    place = filled.cumsum(-1)
    problem, bins = filled.nonzero().unbind(-1)
    kept = moments.new_zeros(len(moments), moments.shape[1], int(place[:, -1].max()))
    kept[problem, :, place[problem, bins] - 1] = moments[problem, :, bins]
    return kept


def _total(moments: Tensor) -> Tensor:
    """Σ (y − ȳ)² of each problem, bin by bin, so that large means cancel nothing."""
    n, _, y, _, _, yy = moments.unbind(1)
    number = torch.where(n > 0, n, 1.0)
    pairs = n.sum(-1, keepdim=True)
    mean = y.sum(-1, keepdim=True) / torch.where(pairs > 0, pairs, 1.0)
    within = (yy - y.square() / number).clamp_min(0)
    return torch.where(n > 0, within + n * (y / number - mean).square(), 0.0).sum(-1)


TAIL = 0.99  # of the pairs lie nearer to the origin than those in the tails
_SATURATED = 0.05  # of the largest slope: where the curve is flatter, it tells inputs apart no more


def goodness(nodes: Nodes, in_tail: Tensor, predicted: Tensor, steepness: Tensor) -> dict[str, Tensor]:
    """Errors of predictions over all pairs, with the weights of the fit, by the names of CurveFit's attributes.

    Args:
        nodes: the problems, with both signs of x.
        in_tail: nodes in the tails, by :func:`tails`.
        predicted: A·f(αx + s) at the nodes, ``(problems, nodes)``.
        steepness: |f′| there over its largest value, likewise; NaN for a curve that has none.

    Returns:
        Float64 ``(problems,)`` each.
    """
    off = nodes.y - predicted
    squares = nodes.weight * off.square() + nodes.scatter
    weight, residual = nodes.weight.sum(-1), squares.sum(-1)
    tail_weight, tail = (nodes.weight * in_tail).sum(-1), (squares * in_tail).sum(-1)
    errors = torch.where(nodes.weight > 0, off.abs(), -1.0)
    largest, at = errors.max(-1, keepdim=True)
    flat = (steepness < _SATURATED) & (nodes.weight > 0)
    return {
        "r2": 1 - residual / nodes.total,
        "rmse": (residual / weight).sqrt(),
        "tail_rmse": (tail / tail_weight).sqrt(),
        "centre_rmse": ((residual - tail).clamp_min(0) / (weight - tail_weight)).sqrt(),
        "largest_error": largest[:, 0],
        "largest_error_at": nodes.x.gather(-1, at)[:, 0],
        "saturated": torch.where(steepness.isnan().any(-1), torch.nan, (nodes.weight * flat).sum(-1) / weight),
    }


def tails(nodes: Nodes) -> Tensor:
    """Nodes whose |x| lies beyond the 99th percentile, at least the farthest: bool ``(problems, nodes)``."""
    order = nodes.x.abs().argsort(-1)
    below = nodes.weight.gather(-1, order).cumsum(-1)
    beyond = below > TAIL * below[:, -1:]
    return torch.zeros_like(beyond).scatter(-1, order, beyond)


_BINS_AN_OCTAVE = 16
_FEW_BINS = 512  # so many need not be joined: x that lies within a few octaves is resolved as finely as it was binned
_COARSER = 8  # times fewer bins, for the first look
_ROUGH_BINS_AN_OCTAVE = 4  # which leave α right to a hundredth, and the error at it to a millionth
_NEGLIGIBLE = 1e-3  # share of Σy² beyond the grid, or of Σx² below it
_STRAIGHT_UP_TO = 0.1  # u below which curves depart little from their tangent
_BINS_AT_ONCE = 2**20  # of all folds and levels: some tens of megabytes


class FitBatch:
    """Levels on one grid of bins, and their nodes, each made once and when it is first needed.

    Attributes:
        levels: in the order of the problems.
        folds: number of folds of each, whether they hold pairs or not.
    """

    def __init__(self, levels: Sequence[FitTarget], bins_an_octave: int) -> None:
        """Stack the sums of all levels, on so many bins an octave."""
        self.levels, self.folds = levels, len(levels[0].moments)
        self._nodes: dict[tuple[str, bool], Nodes] = {}
        grid = levels[0].grid
        self._bins_an_octave = bins_an_octave
        width = 2**grid.mantissa_bits // bins_an_octave
        self._moments = torch.stack([joined(level.moments, width) for level in levels])
        self._counts = torch.stack([joined(level.counts, width) for level in levels])

    def __len__(self) -> int:
        return len(self.levels)

    @functools.cached_property
    def n_pairs(self) -> Tensor:
        """Number of pairs in each fold, float64 ``(problems, folds)``."""
        return self._counts.sum(-1)

    @functools.cached_property
    def _whole(self) -> Tensor:
        """Moments of all pairs, float64 ``(problems, 6, bins)``."""
        return self._moments.sum(1) if self.folds > 1 else self._moments[:, 0]

    @functools.cached_property
    def occupied(self) -> Tensor:
        """Folds that hold pairs, of levels that have folds: bool ``(problems, folds)``."""
        has_folds = torch.tensor([level.fold_by is not None for level in self.levels])
        return (self.n_pairs > 0) & has_folds[:, None]

    @functools.cached_property
    def off_grid(self) -> Tensor:
        """True where much of x or of y is in a bin without width, below the grid or beyond; bool ``(problems,)``."""
        centre = self._whole.shape[-1] // 2
        xx, yy = self._whole[:, 3], self._whole[:, 5]
        beyond = yy[:, [0, -1]].sum(-1) > _NEGLIGIBLE * yy.sum(-1)
        return beyond | (xx[:, centre] > _NEGLIGIBLE * xx.sum(-1))

    def unresolved(self, alpha: Tensor) -> Tensor:
        """True where the grid is too narrow for a curve: for x or y, or for the bend; bool ``(problems,)``."""
        below = self._whole[:, 3, self._whole.shape[-1] // 2] > 0
        return self.off_grid | ((alpha * 2.0 ** self.levels[0].grid.low > _STRAIGHT_UP_TO) & below)

    def nodes(self, *, odd: bool = False) -> Nodes:
        """All pairs of each problem."""
        return self._once("all", odd, lambda: self._whole)

    @functools.cached_property
    def tails(self) -> Tensor:
        """Nodes in the tails, bool ``(problems, nodes)``."""
        return tails(self.nodes())

    def coarse(self, *, odd: bool = False) -> Nodes:
        """All pairs of each problem, on far fewer nodes."""
        return self._once("coarse", odd, lambda: joined(self._whole, min(_COARSER, self._bins_an_octave)))

    def without_folds(self, *, odd: bool = False) -> Nodes:
        """All pairs but those of one fold: ``problems · folds`` problems, the folds of one problem side by side."""
        return self._once("without", odd, lambda: self._others)

    def rough_without_folds(self, *, odd: bool = False) -> Nodes:
        """All pairs but those of one fold, likewise, on fewer nodes."""
        return self._once("rough without", odd, lambda: joined(self._others, self._rougher))

    @functools.cached_property
    def _others(self) -> Tensor:
        """Moments of all pairs but those of one fold, ``(problems · folds, 6, bins)``."""
        # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
        held = self._counts.sum(1, keepdim=True) - self._counts > 0.5
        return (self._whole[:, None] - self._moments).where(held[:, :, None], 0.0).flatten(0, 1)

    @property
    def _rougher(self) -> int:
        """Number of bins that become one of the rough ones; those that need not be joined are not."""
        return self._bins_an_octave // _ROUGH_BINS_AN_OCTAVE if self._bins_an_octave == _BINS_AN_OCTAVE else 1

    def of_folds(self, *, odd: bool = False) -> Nodes:
        """The pairs of one fold each: ``problems · folds`` problems, likewise."""
        return self._once("folds", odd, lambda: self._moments.flatten(0, 1))

    def _once(self, name: str, odd: bool, moments: Callable[[], Tensor]) -> Nodes:
        """Nodes of some moments, which all odd curves share, and all others."""
        if (name, odd) not in self._nodes:
            self._nodes[name, odd] = nodes_of(moments(), odd=odd)
        return self._nodes[name, odd]


def batches(levels: Sequence[FitTarget]) -> Iterator[tuple[list[int], FitBatch]]:
    """Batches of the levels that have something to fit, each with their numbers among ``levels``."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, level in enumerate(levels):
        if level.nothing is None:
            octave = 2**level.grid.mantissa_bits
            few = octave <= _BINS_AN_OCTAVE or int((level.counts > 0).any(0).sum()) <= _FEW_BINS
            alike.setdefault((octave, octave if few else _BINS_AN_OCTAVE), []).append(number)
    for (_, bins_an_octave), numbers in alike.items():
        first = levels[numbers[0]]
        bins = first.counts.numel() * bins_an_octave // 2**first.grid.mantissa_bits
        at_once = max(1, _BINS_AT_ONCE // bins)
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            yield part, FitBatch([levels[number] for number in part], bins_an_octave)
