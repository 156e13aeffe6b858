"""Point-wise functions in place of the norms: where tanh fits, and where a training without norms would start."""

from __future__ import annotations

import math
import statistics
from typing import Any

from normscope.errors import count, first_few
from normscope.fits.curve_fit import CurveFit
from normscope.fits.fit import fit
from normscope.norms.sites import NormSite, kind_of_site
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.reports import Answer

_POOR = 0.9  # R² below which tanh leaves a third of y's length, √0.1
# Measured: docs/papers.md (without training), docs/swaps.md (calibrated).
_EXPECTATION = (
    "without training, a swap changes outputs much (relative L2 of DyT 0.75 on all-MiniLM-L6-v2, 9.23 on a Whisper "
    "encoder; calibrated 0.47, 0.38): `normscope swap-bench` measures it"
)
_ELSEWHERE = 0.5  # α₀ of DyT outside language models (arXiv 2503.10622, section 7)
# α₀ of LLaMA there by the width of the network: norms in attention blocks, and all others.
_BY_WIDTH = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}


def pointwise(evidence: Evidence) -> Answer:
    """Answer how well tanh fits each norm, which should stay norms, and at which α and A a training would start."""
    tanh = fit(evidence.capture, "tanh")
    fits = [(site, found) for site, _ in evidence.norms() if not (found := tanh[site.name][0]).degenerate]
    if not fits:
        return Answer("point-wise", "omitted", "no norm here has pairs to fit")
    bent: dict[str, list[CurveFit]] = {}
    for start in fit(evidence.capture, "tanh", shift=False):
        bent.setdefault(kind_of_site(start.site), []).extend([start] * start.identified)
    rows: list[dict[str, Any]] = [
        {
            **{"site": site.name, "r2": found.r2, "r2_without_sink": found.sink and found.sink.r2_without},
            **{"straight": found.straight, "keep": found.r2 < _POOR},
            **_medians(bent[kind_of_site(site.name)]),
            **_published(evidence, site),
        }
        for site, found in fits
    ]
    worst = min(rows, key=lambda row: row["r2"])
    parts = [f"R² of tanh is at least {worst['r2']:.3f} ({evidence.short[worst['site']]})"]
    if keep := sorted((row for row in rows if row["keep"]), key=lambda row: row["r2"]):
        names = first_few([evidence.short[row["site"]] for row in keep])
        parts.append(f"below {_POOR}, {count(len(keep), 'norm')} should rather stay: {names}")
    if sinks := sum((row["r2_without_sink"] or 0) >= _POOR for row in keep):
        parts.append(f"at {sinks} of them one position alone is the reason, such as the first token")
    if straight := sum(row["straight"] for row in rows):
        parts.append(f"{straight} of {count(len(rows), 'norm')} are straight: a constant scale fits them as well")
    return Answer("point-wise", "note", "; ".join([*parts, _EXPECTATION]), worst["site"], rows)


def _medians(bent: list[CurveFit]) -> dict[str, float | None]:
    """Return the α and A to start at: medians over the sites of a kind that bend, of α on a log scale."""
    if not bent:
        return {"alpha": None, "amplitude": None}
    alpha = math.exp(statistics.median(math.log(found.alpha) for found in bent))
    return {"alpha": alpha, "amplitude": statistics.median(found.amplitude for found in bent)}


def _published(evidence: Evidence, site: NormSite) -> dict[str, Any]:
    """Return the published α₀ of DyT, for LLaMA by what the norm feeds; of the nearest width on a log scale."""
    if evidence.capture.about.get("family") != "language":
        return {"feeds": None, "published_alpha": _ELSEWHERE, "published_for": "all but language models"}
    if not evidence.logits:
        return {"feeds": None, "published_alpha": None, "published_for": None}
    attended = {found.front for found in evidence.logits.values()}
    feeds = "attention" if site.name in attended or site.placement == "qk" else "other"
    nearest = min(_BY_WIDTH, key=lambda width: abs(math.log(width / site.d)))
    alpha = _BY_WIDTH[nearest][feeds == "other"]
    return {"feeds": feeds, "published_alpha": alpha, "published_for": f"LLaMA of width {nearest}, {feeds}"}
