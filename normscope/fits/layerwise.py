"""One curve everywhere, or the best at each site: what a network gains by choosing per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves import FREE


@dataclass(frozen=True)
class Layerwise:
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

    def as_dict(self) -> dict[str, Any]:
        """Return what ``normscope fit --json`` prints."""
        return asdict(self)


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
    known = [found for found in fits if found.curve != FREE and math.isfinite(found.r2)]
    curves: dict[int | None, set[str]] = {}
    for found in known:
        curves.setdefault(found.parameters, set()).add(found.curve)
    if not curves or max(map(len, curves.values())) < 2:
        return None
    parameters = max(curves, key=lambda number: (len(curves[number]), number or 0))
    by_site: dict[tuple[str, int | None], dict[str, float]] = {}
    for found in known:
        own = by_site.setdefault((found.site, found.channel), {})
        if found.parameters == parameters:
            own[found.curve] = found.r2
    sites = list(by_site.values())
    everywhere = [curve for curve in sites[0] if all(curve in own for own in sites)]
    if not everywhere:
        return None
    means = {curve: sum(own[curve] for own in sites) / len(sites) for curve in everywhere}
    func = max(means, key=lambda curve: means[curve])
    best = sum(max(own.values()) for own in sites) / len(sites)
    return Layerwise(func, means[func], best, len(sites), len(curves[parameters]), parameters)
