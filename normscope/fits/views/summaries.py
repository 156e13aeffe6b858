"""Summaries of fits: one curve everywhere or the best at each site; the straight lines of single tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.known import FREE
from normscope.pairs.captures import Capture
from normscope.pairs.sums.stats import PairStats, of_tokens
from normscope.runtime.records import Record, Records, Tabled, as_json


@dataclass(frozen=True)
class Layerwise(Record):
    """The two figures of arXiv 2605.14047, which reports 70.2 and 91.6 % for a ViT and curves found by evolution.

    Both are means over sites of R², with A, α and s of each site's own, and over curves of as many free parameters.

    Attributes:
        func: the curve that does best where every site takes the same.
        r2: of it.
        r2_best: where each site takes its own best.
        sites: number of sites.
        curves: number of curves that were compared.
        parameters: number of free parameters of each.
    """

    func: str
    r2: float
    r2_best: float
    sites: int
    curves: int
    parameters: int | None


def layerwise(fits: Sequence[CurveFit]) -> Layerwise | None:
    """Compare one curve everywhere with the best at each site; None with fewer than two curves to compare.

    Args:
        fits: of several curves at several sites, by :func:`normscope.fit`. Those of as many free parameters are
            compared, of the number that most curves have. One that not all sites have, as ``best`` may be, counts for
            the best at each alone.

    >>> import normscope, torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))])
    >>> layerwise(normscope.fit(seen, "tanh,isru,derf")).curves
    2
    """
    known = [one for one in fits if one.curve != FREE and math.isfinite(one.r2)]
    curves: dict[int | None, set[str]] = {}
    for one in known:
        curves.setdefault(one.parameters, set()).add(one.curve)
    if not curves or max(map(len, curves.values())) < 2:
        return None
    parameters = max(curves, key=lambda number: (len(curves[number]), number or 0))
    by_site: dict[tuple[str, int | None], dict[str, float]] = {}
    for one in known:
        r2_of = by_site.setdefault((one.site, one.channel), {})
        if one.parameters == parameters:
            r2_of[one.curve] = one.r2
    sites = list(by_site.values())
    everywhere = [curve for curve in sites[0] if all(curve in r2_of for r2_of in sites)]
    if not everywhere:
        return None
    means = {curve: sum(r2_of[curve] for r2_of in sites) / len(sites) for curve in everywhere}
    func = max(means, key=lambda curve: means[curve])
    best = sum(max(r2_of.values()) for r2_of in sites) / len(sites)
    return Layerwise(func, means[func], best, len(sites), len(curves[parameters]), parameters)


SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True, repr=False)
class TokenSlopes(Tabled):
    """The slopes of all tokens' lines y = (x − μ)/σ at one norm site.

    Attributes:
        model: the network.
        weights: its resolved checkpoint and revision.
        data: what went through it.
        site: module path of the norm.
        n_tokens: number of tokens.
        slopes: quantiles of 1/σ over all of them, in units of 1/x, by their shares; from a histogram of eight bins an
            octave, so that each is right to 9 %.
        ratio: the slope that 5 % of the tokens pass over that which 95 % do: 1 where one line fits all of them.
        drawn: number of drawn tokens that were held against their own lines.
        largest_error: largest |y − (x − μ)/σ| among their elements: what rounding leaves.
    """

    model: str
    weights: str
    data: str
    site: str
    n_tokens: int
    slopes: Mapping[float, float]
    ratio: float
    drawn: int
    largest_error: float

    def as_dict(self) -> dict[str, Any]:
        """The columns of ``normscope fit --per token --json``; a number that is none becomes None."""
        about = ("model", "weights", "data", "site", "n_tokens", "drawn")
        slopes = {f"slope_{100 * share:g}": slope for share, slope in self.slopes.items()}
        row = {name: getattr(self, name) for name in about} | slopes
        row |= {"ratio": self.ratio, "largest_error": self.largest_error}
        return {name: as_json(value) for name, value in row.items()}


def token_slopes(capture: Capture) -> Records[TokenSlopes]:
    """Distributions of the slopes of the tokens' lines, site by site.

    A fit per token needs no search: a norm is linear on each token, and R² is 1.

    >>> import normscope, torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))])
    >>> token_slopes(seen)[0].n_tokens
    64
    """
    return Records(_slopes(capture, site.name) for site in capture.sites)


def _slopes(capture: Capture, site: str) -> TokenSlopes:
    stats = capture.stats[site]
    scales = of_tokens(stats.token_scales)
    slopes = {share: 1 / scales.quantile(1 - share) if scales.count else math.nan for share in SHARES}
    return TokenSlopes(
        model=capture.about["model"],
        weights=capture.about["weights"],
        data=capture.about["data"],
        site=site,
        n_tokens=stats.n_tokens,
        slopes=slopes,
        ratio=slopes[0.95] / slopes[0.05],
        drawn=len(stats.tokens.key),
        largest_error=_largest_error(stats),
    )


def _largest_error(stats: PairStats) -> float:
    """Largest distance of the drawn tokens' elements from the line of slope rstd through each token's mean."""
    if not len(stats.tokens.key):
        return math.nan
    x, y, rstd = stats.tokens.x.double(), stats.tokens.y.double(), stats.tokens.rstd.double()
    line = y.mean(-1, keepdim=True) + (x - x.mean(-1, keepdim=True)) * rstd[:, None]
    return float((y - line).abs().max())
