"""One curve for all sites against the best at each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.curves.known import FREE
from normscope.fits.curve_fit import CurveFit
from normscope.runtime.records import Record


@dataclass(frozen=True)
class Layerwise(Record):
    """One curve for all sites against the best at each, as in arXiv 2605.14047 (70.2 and 91.6 % for a ViT).

    Attributes:
        func: the best curve for all sites.
        r2: its mean R² over sites, with A, α and s of each site.
        r2_best: mean R² if each site takes its own best curve.
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
    """Compare one curve for all sites with the best at each; None with fewer than two curves to compare.

    Args:
        fits: of several curves at several sites. Only curves with the most common number of free parameters are
            compared. A curve that some sites lack, as with ``best``, counts for the best at each alone.

    >>> import normscope, torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))])
    >>> layerwise(normscope.fit(seen, "tanh,isru,linear")).curves
    2
    """
    scored = [fit for fit in fits if fit.curve != FREE and math.isfinite(fit.r2)]
    curves: dict[int | None, set[str]] = {}
    for fit in scored:
        curves.setdefault(fit.parameters, set()).add(fit.curve)
    if max(map(len, curves.values()), default=0) < 2:
        return None
    parameters = max(curves, key=lambda number: (len(curves[number]), number or 0))
    by_site: dict[tuple[str, int | None], dict[str, float]] = {}
    for fit in scored:
        r2_of = by_site.setdefault((fit.site, fit.channel), {})
        if fit.parameters == parameters:
            r2_of[fit.curve] = fit.r2
    sites = list(by_site.values())
    everywhere = [curve for curve in sites[0] if all(curve in r2_of for r2_of in sites)]
    if not everywhere:
        return None
    means = {curve: sum(r2_of[curve] for r2_of in sites) / len(sites) for curve in everywhere}
    func = max(means, key=lambda curve: means[curve])
    best = sum(max(r2_of.values()) for r2_of in sites) / len(sites)
    return Layerwise(func, means[func], best, len(sites), len(curves[parameters]), parameters)
