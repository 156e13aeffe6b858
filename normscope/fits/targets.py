"""Fit targets: the pairs that one fit explains, as binned sums of a capture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from normscope.errors import DataError, UsageError, unknown
from normscope.norms.sites import NormSite, kind_of_site
from normscope.pairs.captures import Capture
from normscope.pairs.storage import load_capture
from normscope.pairs.sums.binning import CHANNEL_GRID, PAIR_GRID, FloatGrid
from normscope.pairs.sums.magnitudes import of_tokens
from normscope.pairs.sums.stats import PairStats

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
    x_repeats: bool = False  # many x of the drawn tokens are equal to the last bit, which bins cannot resolve


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
    """Targets of a capture, in the order of its sites, for the arguments of :func:`normscope.fit`."""
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
    for noun, value, choices in (("level", per, PER), ("pool", pool, POOLS), ("weighting", weights_by, WEIGHTS)):
        if value is not None and value not in choices:
            raise UsageError(unknown(noun, value, choices))
    if per == "channel" and (pool or weights_by == "gamma"):
        raise UsageError(
            "Channels are fitted site by site, and γ² is one number in each; leave pool and weights by gamma out."
        )


def sums_of(sums: Tensor | None, noun: str, site: NormSite, option: str) -> Tensor:
    """Return optional sums of a capture; DataError with the option to set if they are missing."""
    if sums is None:
        raise DataError(
            f"The capture holds no sums {noun} {site.name}; capture again with {option}=True "
            f"(normscope capture --{option.replace('_', '-')})."
        )
    return sums


def _of_site(site: NormSite, stats: PairStats, weights_by: str) -> FitTarget:
    moments = stats.moments
    if weights_by == "gamma":
        moments = sums_of(stats.gamma_moments, "weighted by γ² of", site, "by_gamma")
    target = site_target(site, stats, moments)
    return replace(
        target,
        counts=stats.moments[:, 0],
        bound=site.bound,
        slope=_slope(site, stats),
        x_repeats=_repeats(stats.tokens.x),
    )


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
    eps_share = scales.mean(lambda scale: site.eps / np.maximum(scale, 1e-300)) if site.eps else 0.0
    scale = xy / n + eps_share
    return (1 - 1 / site.d if site.centred else 1.0) / scale if scale > 0 else math.nan


def _channels(site: NormSite, stats: PairStats) -> list[FitTarget]:
    moments = sums_of(stats.channel_moments, "per channel of", site, "per_channel").transpose(0, 1)[:, None]
    slope = _slope(site, stats)
    extremes = stats.channel_extremes.T.tolist()
    return [
        FitTarget(
            site=site.name,
            moments=one_fold,
            counts=one_fold[:, 0],
            reach=max(abs(low), abs(high)),
            nothing=_degenerate(stats, float(one_fold[:, 0].sum()), low, high) or nothing_in(one_fold, NO_PAIR),
            grid=CHANNEL_GRID,
            channel=channel,
            bound=site.bound,
            slope=slope,
        )
        for channel, (one_fold, (low, high)) in enumerate(zip(moments, extremes, strict=True))
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
        x_repeats=any(target.x_repeats for target in used),
    )
