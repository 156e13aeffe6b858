"""Pairs that one fit explains: binned sums of a capture, and the weighted points that stand for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from normscope.curves.known import FLAT
from normscope.errors import DataError, UsageError, unknown
from normscope.norms.sites import NormSite, kind_of_site
from normscope.pairs.captures import Capture
from normscope.pairs.storage import load_capture
from normscope.pairs.sums.binning import CHANNEL_GRID, PAIR_GRID, FloatGrid
from normscope.pairs.sums.stats import PairStats, of_tokens

PER = ("site", "channel")
POOLS = ("placement", "kind", "all")
WEIGHTS = ("pairs", "gamma", "x")

CONSTANT_OUTPUT, NO_PAIR, NO_WEIGHT = "constant output", "no finite pair", "γ is zero"
POINTWISE = "a point-wise function, of which theory expects nothing"
_REPEATED = 0.02  # of the drawn x: far fewer are equal by chance
_NO_SPREAD = 1e-14  # of the mean square: a smaller variance is rounding


@dataclass(eq=False)
class FitTarget:
    """All pairs that one fit explains: of a site, a channel or a pool of sites."""

    site: str  # module path; of pooled sites, what they have in common
    moments: Tensor  # n, Σx, Σy, Σx², Σxy, Σy² per fold and bin, float64 (folds, 6, bins), weighted as requested
    counts: Tensor  # number of pairs per fold and bin, float64 (folds, bins)
    reach: float  # largest |x|
    nothing: str | None  # reason why there is nothing to fit
    grid: FloatGrid = PAIR_GRID
    fold_by: Literal["source", "sample"] | None = None
    sites: tuple[str, ...] = ()  # of a pool
    channel: int | None = None
    bound: float = math.inf  # of |y|
    slope: float = math.nan  # of the mean token's line at the origin, (1 − 1/d)/σ with centring and 1/ρ without
    drawn: tuple[Tensor, ...] = ()  # x of the tokens drawn at each site

    @functools.cached_property
    def x_repeats(self) -> bool:
        """True if many x of the drawn tokens are equal to the last bit, which bins cannot resolve."""
        return any(map(_repeats, self.drawn))


def as_capture(given: object, caller: str) -> Capture:
    """Return a capture, also from its file; UsageError for a network in its place, DataError without such a file."""
    if isinstance(given, (str, Path)):
        if not Path(given).exists():
            name = str(given)
            raise DataError(
                f"There is no capture file {name!r}; normscope.capture(normscope.load({name!r})) captures a model."
            )
        return load_capture(given)
    if not isinstance(given, Capture):
        raise UsageError(f"normscope.{caller} takes a Capture; normscope.capture(network) makes one.")
    return given


def fit_targets(
    capture: Capture, *, per: str = "site", pool: str | None = None, weights_by: str = "pairs"
) -> list[FitTarget]:
    """Targets of a capture, in the order of its sites, for the arguments of :func:`normscope.fit`.

    Raises:
        UsageError: as of :func:`check_targets`.
        DataError: if the capture lacks the sums that they need.
    """
    check_targets(per, pool, weights_by)
    if per == "channel":
        targets = [target for site in capture.sites for target in _channels(site, capture.stats[site.name])]
    else:
        targets = [_of_site(site, capture.stats[site.name], weights_by) for site in capture.sites]
    if pool is not None:
        groups: dict[str, list[FitTarget]] = {}
        for site, target in zip(capture.sites, targets, strict=True):
            pools = {"placement": site.placement or "beside the residual stream", "kind": kind_of_site(site.name)}
            groups.setdefault(pools.get(pool, "all sites"), []).append(target)
        targets = [_pooled(name, members) for name, members in groups.items()]
    return [_even_over_x(target) for target in targets] if weights_by == "x" else targets


def check_targets(per: str, pool: str | None, weights_by: str) -> None:
    """Raise UsageError if there is no such level, pool or weighting, or if they exclude one another."""
    for what, value, choices in (("level", per, PER), ("pool", pool, POOLS), ("weighting", weights_by, WEIGHTS)):
        if value is not None and value not in choices:
            raise UsageError(unknown(what, value, choices))
    if per == "channel" and (pool or weights_by == "gamma"):
        raise UsageError(
            "Channels are fitted site by site, and γ² is one number in each; leave pool and weights by gamma out."
        )


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
    target = site_target(site, stats, moments)
    return replace(target, counts=stats.moments[:, 0], bound=site.bound, slope=_slope(site, stats))


def site_target(site: NormSite, stats: PairStats, moments: Tensor) -> FitTarget:
    """Target of a site from sums of pairs, ``(folds, 6, bins)``, without a bound on y."""
    (low, high), n_pairs = stats.channel_extremes, stats.n_pairs
    return FitTarget(
        site=site.name,
        moments=moments,
        counts=moments[:, 0],
        reach=float(stats.reach.max()) if n_pairs else math.nan,
        nothing=_degenerate(stats, n_pairs, float(low.min()), float(high.max())) or nothing_in(moments, NO_WEIGHT),
        fold_by=stats.fold_by,
        drawn=(stats.tokens.x,),
    )


def _repeats(x: Tensor) -> bool:
    """True if many x occur more than once, other than those that half precision represents."""
    fine = x[(x != x.half()) & (x != x.bfloat16())]
    _, times = torch.unique(fine, return_counts=True)
    return bool(times[times > 1].sum() > _REPEATED * x.numel())


def _even_over_x(target: FitTarget) -> FitTarget:
    """Weight every bin by its width, divided evenly among its pairs; bins beyond the grid have no width."""
    width = target.grid.edges().diff()
    share = width.where(width.isfinite(), 0.0) / target.counts.sum(0).clamp_min(1)
    moments = target.moments * share
    return replace(target, moments=moments, nothing=target.nothing or nothing_in(moments, "x beyond the grid"))


def _degenerate(stats: PairStats, pairs: float, low: float, high: float) -> str | None:
    if not pairs:
        return NO_PAIR
    if low == high:
        return "constant input" if low else "all zero"
    return "one token" if stats.n_tokens == 1 else None


def nothing_in(moments: Tensor, no_weight: str) -> str | None:
    """Return the reason why there is nothing to fit to moments ``(folds, 6, bins)``, if there is one."""
    n, _, y, _, _, yy = moments.sum((0, 2)).tolist()
    if not n > 0:
        return no_weight
    return CONSTANT_OUTPUT if yy - y * y / n <= _NO_SPREAD * yy else None


def _slope(site: NormSite, stats: PairStats) -> float:
    """Slope at the origin of the token of mean ρ or σ: Σxy/n over all pairs is that mean, less what eps adds.

    NaN for a point-wise function, whose tokens have no lines.
    """
    n, _, _, _, xy, _ = stats.moments.sum((0, 2)).tolist()
    if not n or site.pointwise is not None:
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
    """Add up the pairs of several sites. Folds stay folds, as a source is in the same one at every site."""
    used = [target for target in members if target.nothing not in (NO_PAIR, NO_WEIGHT)] or list(members)
    folds, bounds = {target.fold_by for target in used}, {target.bound for target in used}
    n = [float(target.counts.sum()) for target in used]
    slopes = [pairs * target.slope for pairs, target in zip(n, used, strict=True) if target.slope > 0]
    return FitTarget(
        site=name,
        moments=reduce(torch.add, [target.moments for target in used]),
        counts=reduce(torch.add, [target.counts for target in used]),
        reach=max(target.reach for target in used),
        nothing=None if any(target.nothing is None for target in used) else used[0].nothing,
        fold_by=folds.pop() if len(folds) == 1 else None,
        sites=tuple(target.site for target in members),
        bound=bounds.pop() if len(bounds) == 1 else math.inf,
        slope=sum(slopes) / sum(n) if slopes and sum(n) else math.nan,
        drawn=tuple(x for target in used for x in target.drawn),
    )


_MIRRORED = (1.0, -1.0, -1.0, 1.0, 1.0, 1.0)  # signs of n, Σx, Σy, Σx², Σxy, Σy² of (−x, −y)
_ROUNDING = 1e-7  # of |x|: a smaller standard deviation within a bin is rounding


class Batched:
    """A record of tensors with a row for each of several problems."""

    def of(self, problems: Tensor) -> Self:
        """Select the rows of some problems by their numbers, with repetitions."""
        return type(self)(**{name: rows.index_select(0, problems) for name, rows in vars(self).items()})


@dataclass(frozen=True)
class Nodes(Batched):
    """Weighted points (x, y) that represent all pairs of several problems, float64 ``(problems, nodes)``.

    Rows are padded with points of weight zero.
    """

    x: Tensor
    y: Tensor
    weight: Tensor  # of the pairs that each represents, by default their number
    scatter: Tensor  # Σ w (y − its node's y)² over those pairs, which no fit changes
    total: Tensor  # Σ w (y − ȳ)² over all pairs, (problems,)

    def __len__(self) -> int:
        return len(self.x)

    def split(self, alpha: Tensor, shift: Tensor, kinks: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, y and weight of points that represent the pairs on either side of a kink of f(αx + s) separately.

        Each bin's pairs are spread evenly over x, and two points of Gauss and Legendre represent either part: sums of f
        and f² then change smoothly as a kink passes the bin. Of a bin without a kink they are its nodes.
        """
        if not kinks:
            return self.x, self.y, self.weight
        (x, dx), (y, dy) = (
            ((low + high) / 2, (high - low) / 2) for low, high in (self.x.chunk(2, -1), self.y.chunk(2, -1))
        )
        bends, u = torch.tensor(kinks, dtype=torch.float64), alpha[:, None] * x + shift[:, None]
        nearest = bends[torch.bucketize(u, (bends[1:] + bends[:-1]) / 2)]
        half_width = math.sqrt(3)  # of an even spread, in standard deviations
        place = ((nearest - u) / (half_width * alpha[:, None] * dx)).nan_to_num(0.0).clamp(-1, 1)
        if (place.abs() == 1).all():
            return self.x, self.y, self.weight
        below, above = (1 + place) / 2, (1 - place) / 2  # shares of the pairs
        left, right = -half_width * above, half_width * below  # centres of the parts
        at = torch.cat([left - below, left + below, right - above, right + above], -1)
        n = self.weight.chunk(2, -1)[0]
        weight = torch.cat([below * n, below * n, above * n, above * n], -1)
        return x.repeat(1, 4) + at * dx.repeat(1, 4), y.repeat(1, 4) + at * dy.repeat(1, 4), weight

    def residual(self, predicted: Tensor) -> Tensor:
        """Σ w (y − prediction)² over all pairs, ``(problems,)``."""
        off = self.y - predicted
        return dot(self.weight * off, off) + self.scatter.sum(-1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·b over the last axis."""
    summed: Tensor = torch.linalg.vecdot(a, b)
    return summed


def joined(moments: Tensor, width: int) -> Tensor:
    """Join ``width`` neighbouring bins of a :class:`FloatGrid`, the last axis, into one; zero's stays as it is.

    >>> joined(torch.tensor([9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]), 2).tolist()
    [9, 3, 7, 5, 13, 17, 9]
    """
    if width == 1:
        return moments
    centre = moments.shape[-1] // 2
    # A sum of slices takes a fifth of the time of a sum over an axis of a few bins.
    negative, positive = (
        sum((side[..., place::width] for place in range(1, width)), side[..., ::width])
        for side in (moments[..., 1:centre], moments[..., centre + 1 : -1])
    )
    return torch.cat([moments[..., :1], negative, moments[..., centre, None], positive, moments[..., -1:]], -1)


def mirrored(moments: Tensor) -> Tensor:
    """Add the bins of −x, ``(…, 6, bins)``, to those of x: an odd curve has the same error at (−x, −y) and (x, y)."""
    centre = moments.shape[-1] // 2
    signs = torch.tensor(_MIRRORED, dtype=moments.dtype)[:, None]
    both = moments[..., centre:].clone()
    both[..., 1:] += signs * moments[..., :centre].flip(-1)
    return both


def nodes_of(moments: Tensor, *, odd: bool = False) -> Nodes:
    """Put each bin's pairs at two points, one standard deviation of its x to either side of its mean.

    With y on the bin's own regression line, the two have the bin's n, Σx, Σx², Σy and Σxy. For any smooth f, Σf(x)² and
    Σf(x)y are then right to second order in the bin's width: to about 1e-7 with bins of 1/16 octave. ``moments`` are
    n, Σx, Σy, Σx², Σxy, Σy² per bin, ``(problems, 6, bins)``. For an ``odd`` curve a point represents both signs of x.
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
    """Move each problem's occupied bins to the front, with zeros behind: ``(problems, 6, most)``."""
    filled = moments[:, 0] > 0
    place = filled.cumsum(-1)
    problem, bins = filled.nonzero().unbind(-1)
    kept = moments.new_zeros(len(moments), moments.shape[1], int(place[:, -1].max()))
    kept[problem, :, place[problem, bins] - 1] = moments[problem, :, bins]
    return kept


def _total(moments: Tensor) -> Tensor:
    """Σ (y − ȳ)² of each problem, bin by bin, so that large means do not cancel."""
    n, _, y, _, _, yy = moments.unbind(1)
    number = torch.where(n > 0, n, 1.0)
    pairs = n.sum(-1, keepdim=True)
    mean = y.sum(-1, keepdim=True) / torch.where(pairs > 0, pairs, 1.0)
    within = (yy - y.square() / number).clamp_min(0)
    return torch.where(n > 0, within + n * (y / number - mean).square(), 0.0).sum(-1)


TAIL = 0.99  # share of the pairs nearer to the origin than the tails


def goodness(nodes: Nodes, in_tail: Tensor, predicted: Tensor, steepness: Tensor) -> dict[str, Tensor]:
    """Errors of predictions over all pairs, ``(problems,)`` each, by the names of CurveFit's attributes.

    ``nodes`` have both signs of x, and ``in_tail`` is by :func:`tails`. ``steepness`` is |f′| at the nodes over its
    largest value; NaN for a curve without one.
    """
    off = nodes.y - predicted
    squares = nodes.weight * off.square() + nodes.scatter
    weight, residual = nodes.weight.sum(-1), squares.sum(-1)
    tail_weight, tail = (nodes.weight * in_tail).sum(-1), (squares * in_tail).sum(-1)
    errors = torch.where(nodes.weight > 0, off.abs(), -1.0)
    largest, at = errors.max(-1, keepdim=True)
    flat = (steepness < FLAT) & (nodes.weight > 0)
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


Pairs = Literal["all", "coarse", "others", "rough others", "folds"]
_BINS_AN_OCTAVE = 16
_FEW_BINS = 512  # occupied bins that need not be joined: x within a few octaves is resolved as it was binned
_COARSER = 8  # factor between the bins of the fit and those of the first look
_ROUGH_BINS_AN_OCTAVE = 4  # leave α right to a hundredth, and the error at it to a millionth
_NEGLIGIBLE = 1e-3  # share of Σy² beyond the grid, or of Σx² below it
_STRAIGHT_UP_TO = 0.1  # u below which curves hardly depart from their tangent
_BINS_AT_ONCE = 2**20  # of all folds and targets: some tens of megabytes


class FitBatch:
    """Targets on one grid of bins as a batch of problems, each with ``folds`` folds; nodes are computed once."""

    def __init__(self, targets: Sequence[FitTarget], bins_an_octave: int) -> None:
        self.targets, self.folds = targets, len(targets[0].moments)
        self._nodes: dict[tuple[Pairs, bool], Nodes] = {}
        self._bins_an_octave = bins_an_octave
        width = 2 ** targets[0].grid.mantissa_bits // bins_an_octave
        self._moments = torch.stack([joined(target.moments, width) for target in targets])
        self._counts = torch.stack([joined(target.counts, width) for target in targets])

    def __len__(self) -> int:
        return len(self.targets)

    @functools.cached_property
    def n_pairs(self) -> Tensor:
        """Number of pairs in each fold, float64 ``(problems, folds)``."""
        return self._counts.sum(-1)

    @functools.cached_property
    def _whole(self) -> Tensor:
        return self._moments.sum(1) if self.folds > 1 else self._moments[:, 0]

    @functools.cached_property
    def occupied(self) -> Tensor:
        """Folds that contain pairs, for targets that have folds: bool ``(problems, folds)``."""
        has_folds = torch.tensor([target.fold_by is not None for target in self.targets])
        return (self.n_pairs > 0) & has_folds[:, None]

    @functools.cached_property
    def off_grid(self) -> Tensor:
        """True if much of x or of y is in a bin without width, below the grid or beyond; bool ``(problems,)``."""
        centre = self._whole.shape[-1] // 2
        xx, yy = self._whole[:, 3], self._whole[:, 5]
        beyond = yy[:, [0, -1]].sum(-1) > _NEGLIGIBLE * yy.sum(-1)
        return beyond | (xx[:, centre] > _NEGLIGIBLE * xx.sum(-1))

    def unresolved(self, alpha: Tensor) -> Tensor:
        """True if the grid is too narrow for a curve: for x or y, or for the bend; bool ``(problems,)``."""
        below = self._whole[:, 3, self._whole.shape[-1] // 2] > 0
        return self.off_grid | ((alpha * 2.0 ** self.targets[0].grid.low > _STRAIGHT_UP_TO) & below)

    @functools.cached_property
    def tails(self) -> Tensor:
        return tails(self.nodes())

    def nodes(self, pairs: Pairs = "all", *, odd: bool = False) -> Nodes:
        """Return nodes of each problem, ``coarse`` ones for a first look; or of each problem and fold, side by side.

        These are of the pairs of all ``others``, on ``rough others`` fewer nodes, or of the ``folds`` themselves.
        """
        if (pairs, odd) not in self._nodes:
            self._nodes[pairs, odd] = nodes_of(self._moments_of(pairs), odd=odd)
        return self._nodes[pairs, odd]

    def _moments_of(self, pairs: Pairs) -> Tensor:
        match pairs:
            case "all":
                return self._whole
            case "coarse":
                return joined(self._whole, min(_COARSER, self._bins_an_octave))
            case "others":
                return self._others
            case "rough others":
                rough = self._bins_an_octave == _BINS_AN_OCTAVE  # a few bins are not joined here either
                return joined(self._others, _BINS_AN_OCTAVE // _ROUGH_BINS_AN_OCTAVE if rough else 1)
            case "folds":
                return self._moments.flatten(0, 1)

    @functools.cached_property
    def _others(self) -> Tensor:
        # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
        left = self._counts.sum(1, keepdim=True) - self._counts > 0.5
        others = (self._whole[:, None] - self._moments).where(left[:, :, None], 0.0)
        # A target without folds may have all pairs in one. It stays whole: a search needs pairs.
        return others.where(self.occupied[:, :, None, None], self._whole[:, None]).flatten(0, 1)


def batches(targets: Sequence[FitTarget]) -> Iterator[tuple[list[int], FitBatch]]:
    """Batches of the targets that have something to fit, each with their numbers among ``targets``."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, target in enumerate(targets):
        if target.nothing is None:
            octave = 2**target.grid.mantissa_bits
            few = octave <= _BINS_AN_OCTAVE or int((target.counts > 0).any(0).sum()) <= _FEW_BINS
            alike.setdefault((octave, octave if few else _BINS_AN_OCTAVE), []).append(number)
    for (octave, bins_an_octave), numbers in alike.items():
        bins = targets[numbers[0]].counts.numel() * bins_an_octave // octave
        at_once = max(1, _BINS_AT_ONCE // bins)
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            yield part, FitBatch([targets[number] for number in part], bins_an_octave)
