"""Levels: the pairs of one fit, from a site, one of its channels, or several sites together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

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
class Level:
    """All pairs that one fit explains.

    Attributes:
        site: module path of the norm; of pooled sites, what they have in common.
        sites: module paths of the pooled sites; empty for one site.
        channel: number of the channel, or None for all.
        moments: n, Σx, Σy, Σx², Σxy, Σy² per fold and bin, float64 ``(folds, 6, bins)``, with the weights that were
            asked for.
        counts: number of pairs per fold and bin, float64 ``(folds, bins)``.
        grid: of the bins.
        fold_by: what the folds are; None where they are no folds.
        reach: largest |x|.
        bound: largest possible |y|; infinite where nothing that is known bounds it.
        slope: of the mean token's line at the origin, (1 − 1/d)/σ with centring and 1/ρ without.
        nothing: why there is nothing to fit, in words; None where there is.
        x_repeats: whether many x of the drawn tokens are equal to the last bit, which bins do not tell from others.
    """

    site: str
    sites: tuple[str, ...]
    channel: int | None
    moments: Tensor
    counts: Tensor
    grid: FloatGrid
    fold_by: Literal["source", "sample"] | None
    reach: float
    bound: float
    slope: float
    nothing: str | None
    x_repeats: bool = False


def levels_of(
    capture: Capture, *, per: str = "site", pool: str | None = None, weights_by: str = "pairs"
) -> list[Level]:
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
        groups: dict[str, list[Level]] = {}
        for site, level in zip(capture.sites, levels, strict=True):
            groups.setdefault(_shared(site, pool), []).append(level)
        levels = [_pooled(name, members) for name, members in groups.items()]
    return [_even_over_x(level) for level in levels] if weights_by == "x" else levels


def check_levels(per: str, pool: str | None, weights_by: str) -> None:
    """Refuse arguments that :func:`levels_of` would refuse, before there is a capture; UsageError."""
    for what, value, known in (("level", per, PER), ("pool", pool, POOLS), ("weighting", weights_by, WEIGHTS)):
        if value is not None and value not in known:
            raise UsageError(unknown(what, value, known))
    if per == "channel" and (pool or weights_by == "gamma"):
        raise UsageError(
            "Channels are fitted site by site, and γ² is one number in each; leave pool and weights by gamma out."
        )


def _shared(site: NormSite, pool: str) -> str:
    if pool == "placement":
        return site.placement or "beside the residual stream"
    return kind_of_site(site.name) if pool == "kind" else "all sites"


def _of_site(site: NormSite, stats: PairStats, weights_by: str) -> Level:
    moments = stats.moments
    if weights_by == "gamma":
        if stats.gamma_moments is None:
            raise DataError(
                f"The capture holds no sums weighted by γ² of {site.name}; capture again with by_gamma=True "
                "(normscope capture --by-gamma)."
            )
        moments = stats.gamma_moments
    level = site_level(site, stats, moments)
    return replace(level, counts=stats.moments[:, 0], bound=site.bound, slope=_slope(site, stats))


def site_level(site: NormSite, stats: PairStats, moments: Tensor) -> Level:
    """Sums of pairs of a site, ``(folds, 6, bins)``, as a level that nothing bounds."""
    return Level(
        site=site.name,
        sites=(),
        channel=None,
        moments=moments,
        counts=moments[:, 0],
        grid=PAIR_GRID,
        fold_by=stats.fold_by,
        reach=float(stats.reach.max()) if stats.n_pairs else math.nan,
        bound=math.inf,
        slope=math.nan,
        nothing=_nothing_at(stats, moments),
        x_repeats=_repeats(stats.tokens.x),
    )


def _repeats(x: Tensor) -> bool:
    """True if many x occur more than once, as those of blank patches; those that half precision holds do by chance."""
    fine = x[(x != x.half()) & (x != x.bfloat16())]
    _, times = torch.unique(fine, return_counts=True)
    return bool(times[times > 1].sum() > _REPEATED * x.numel())


def _even_over_x(level: Level) -> Level:
    """Give every bin that holds pairs the weight of its width, shared alike among them."""
    width = level.grid.edges().diff()
    # Nothing is known of how far pairs lie apart beyond the grid.
    share = width.where(width.isfinite(), 0.0) / level.counts.sum(0).clamp_min(1)
    moments = level.moments * share
    return replace(level, moments=moments, nothing=level.nothing or _nothing_in(moments, "x beyond the grid"))


def _nothing_at(stats: PairStats, moments: Tensor) -> str | None:
    """Reason why there is nothing to fit at a site, from its (weighted) moments; None where there is something."""
    low, high = stats.channel_extremes
    if not stats.n_pairs:
        return "no finite pair"
    if bool(low.min() == high.max()):
        return "all zero" if not float(low.min()) else "constant input"
    if stats.n_tokens == 1:
        return "one token"
    return _nothing_in(moments, "γ is zero")


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


def _channels(site: NormSite, stats: PairStats) -> list[Level]:
    if stats.channel_moments is None:
        raise DataError(
            f"The capture holds no sums per channel of {site.name}; capture again with per_channel=True "
            "(normscope capture --per-channel)."
        )
    moments = stats.channel_moments.transpose(0, 1)
    slope = _slope(site, stats)
    n, _, y, _, _, yy = moments.sum(-1).unbind(-1)
    flat = yy - y * y / n.clamp_min(1) <= _NO_SPREAD * yy
    low, high = stats.channel_extremes
    one_token = stats.n_tokens == 1
    reasons = [
        "no finite pair" if not has
        else ("constant input" if least else "all zero") if least == most
        else "one token" if one_token
        else CONSTANT_OUTPUT if level
        else None
        for has, least, most, level in zip(n.tolist(), low.tolist(), high.tolist(), flat.tolist(), strict=True)
    ]  # fmt: skip
    reach, bound = torch.maximum(low.abs(), high.abs()).tolist(), site.bound
    return [
        Level(
            site=site.name,
            sites=(),
            channel=channel,
            moments=moments[channel, None],
            counts=moments[channel, None, 0],
            grid=CHANNEL_GRID,
            fold_by=None,
            reach=reach[channel],
            bound=bound,
            slope=slope,
            nothing=nothing,
        )
        for channel, nothing in enumerate(reasons)
    ]


def _pooled(name: str, members: Sequence[Level]) -> Level:
    """Add up the pairs of several sites; folds stay folds, as a source is in the same one at every site."""
    filled = [level for level in members if level.nothing not in ("no finite pair", "γ is zero")]
    used = filled or list(members)
    folds = {level.fold_by for level in used}
    moments = reduce(torch.add, [level.moments for level in used])
    counts = reduce(torch.add, [level.counts for level in used])
    n = [float(level.counts.sum()) for level in used]
    slopes = [pairs * level.slope for pairs, level in zip(n, used, strict=True) if level.slope > 0]
    bounds = {level.bound for level in used}
    return Level(
        site=name,
        sites=tuple(level.site for level in members),
        channel=None,
        moments=moments,
        counts=counts,
        grid=PAIR_GRID,
        fold_by=folds.pop() if len(folds) == 1 else None,
        reach=max(level.reach for level in used),
        bound=bounds.pop() if len(bounds) == 1 else math.inf,
        slope=sum(slopes) / sum(n) if sum(n) else math.nan,
        nothing=None if any(level.nothing is None for level in used) else used[0].nothing,
        x_repeats=any(level.x_repeats for level in used),
    )
