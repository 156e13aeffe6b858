"""Saturation of point-wise functions in place of norms: their α and s, pairs beyond the ends of f, dead channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normscope.curves.known import BY_NAME
from normscope.fits.curve_fit import CurveFit, about_site
from normscope.fits.targets import as_capture, sums_of
from normscope.norms.sites import NormSite
from normscope.pairs.captures import Capture
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import Record, Records, Tabled

MODULE = "module's f"
_ROUNDING = 1e-9  # of u: pairs of a bin are at least as far apart


@dataclass(frozen=True)
class OverChannels:
    """Median of a number over the channels, and its 5th and 95th percentiles; a single number is all three."""

    p50: float
    p5: float
    p95: float


@dataclass(frozen=True, repr=False)
class Saturation(Record, Tabled):
    """One point-wise function, weight · f(u) + bias with u = αx + s, and the part of it that a network uses.

    Attributes:
        site: module path.
        curve: name of f.
        alpha, shift, weight: α, in units of 1/x; s; and the magnitude of the weight.
        slope: of f(αx + s) at x = 0, α·f′(s); None, like ``saturated`` and ``stuck``, for an f without f′ (a table).
        inverse_std: 1/std(x) over all pairs, in the unit of α.
        alpha_std: α·std(x), of the median α: the spread of u.
        beyond_1, beyond_2, beyond_3: shares of pairs with |u| over 1, 2 and 3; None without pairs.
        saturated: share of pairs beyond the ends of f, from which on |f′| stays under 5 % of its peak.
        stuck: channels that are always saturated: all of their u lie beyond the same end.
        dead: channels of constant output, as x is constant there, or α or the weight is zero.
    """

    site: str
    curve: str
    alpha: OverChannels
    shift: OverChannels
    weight: OverChannels
    slope: OverChannels | None
    inverse_std: float
    alpha_std: float
    beyond_1: float | None
    beyond_2: float | None
    beyond_3: float | None
    saturated: float | None
    stuck: list[int] | None
    dead: list[int]


def saturation(capture: Capture | str | Path) -> Records[Saturation]:
    """Report α, s and the saturated pairs of every point-wise function that a network has in place of a norm.

    Numbers cover all pairs, by their sums: shares are right to the pairs of one bin of x, a 64th of an octave, or a
    quarter where channels differ in α.

    Args:
        capture: result of :func:`normscope.capture`, or the path of its file.

    Returns:
        One :class:`Saturation` for each point-wise site; none for norms.

    >>> import normscope
    >>> x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    >>> saturation(normscope.capture(torch.nn.LayerNorm(100), [x]))
    no records
    """
    capture = as_capture(capture, "saturation")
    records = (site_saturation(site, capture.stats[site.name]) for site in capture.sites)
    return Records(record for record in records if record)


def site_saturation(site: NormSite, stats: PairStats) -> Saturation | None:
    """Return the record of one site; None for a norm."""
    if (function := site.pointwise) is None:
        return None
    alpha, shift, weight = (
        torch.tensor(values).double() for values in (function.alpha, function.shift, function.weight)
    )
    curve, std, alphas = BY_NAME.get(function.curve), spread(stats), _over_channels(alpha)
    ends = curve.ends if curve else None
    moments = stats.moments.sum(0)[:, None]  # (6, channels, bins); channels that are alike are one
    if site.channels_differ:
        moments = sums_of(stats.channel_moments, "per channel of", site, "per_channel")
    low, high = stats.channel_extremes.double()
    least, most = (alpha * torch.stack([low, high]) + shift).sort(0).values
    return Saturation(
        site=site.name,
        curve=function.curve,
        alpha=alphas,
        shift=_over_channels(shift),
        weight=_over_channels(weight.abs()),
        slope=_over_channels(alpha * curve.derivative(shift)) if curve else None,
        inverse_std=1 / std if std else math.inf,
        alpha_std=alphas.p50 * std,
        beyond_1=share_beyond((-1, 1), moments, alpha, shift),
        beyond_2=share_beyond((-2, 2), moments, alpha, shift),
        beyond_3=share_beyond((-3, 3), moments, alpha, shift),
        saturated=share_beyond(ends, moments, alpha, shift) if ends else None,
        stuck=((low <= high) & ((most < ends[0]) | (least > ends[1]))).nonzero().flatten().tolist() if ends else None,
        dead=((low == high) | (alpha == 0) | (weight == 0)).nonzero().flatten().tolist(),
    )


def share_beyond(ends: tuple[float, float], moments: Tensor, alpha: Tensor, shift: Tensor) -> float | None:
    """Share of the pairs with αx + s outside of ``ends``; those of a bin are spread evenly, by mean and variance."""
    n, x, _, xx, *_ = moments
    mean = x / n.clamp_min(1)
    deviation = (xx / n.clamp_min(1) - mean.square()).clamp_min(0).sqrt()
    half = (3**0.5 * alpha[:, None].abs() * deviation).clamp_min(_ROUNDING)
    u = alpha[:, None] * mean + shift[:, None]
    below, above = ((0.5 + side * (u - end) / (2 * half)).clamp(0, 1) for side, end in zip((-1, 1), ends, strict=True))
    return float((n * (below + above)).sum() / n.sum()) if n.any() else None


def _over_channels(values: Tensor) -> OverChannels:
    return OverChannels(*np.quantile(values.numpy(), (0.5, 0.05, 0.95)).tolist())


def spread(stats: PairStats) -> float:
    """Return the standard deviation of a site's input x over all of its pairs; NaN without any."""
    n, x, _, xx, _, _ = stats.moments.sum((0, 2)).tolist()
    return math.sqrt(max(xx / n - (x / n) ** 2, 0.0)) if n else math.nan


def with_modules(capture: Capture, fits: Sequence[CurveFit]) -> list[CurveFit]:
    """Add to the fits of each point-wise site its own function, as a curve :data:`MODULE` of known A = 1, α and s."""
    modules = [
        CurveFit(
            **about_site(capture, site.name),
            curve=MODULE,
            function=BY_NAME[record.curve],
            n_pairs=capture.stats[site.name].n_pairs,
            amplitude=1.0,
            alpha=record.alpha.p50,
            shift=record.shift.p50,
            converged=True,
            form="nothing",
            saturated=math.nan if record.saturated is None else record.saturated,
            parameters=0,
            norm=site,
        )
        for site in capture.sites
        if (record := site_saturation(site, capture.stats[site.name])) and record.curve in BY_NAME
    ]
    order = {site.name: index for index, site in enumerate(capture.sites)}
    return sorted([*fits, *modules], key=lambda fit: order.get(fit.site, len(order)))
