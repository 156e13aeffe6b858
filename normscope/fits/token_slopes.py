"""Slopes of the tokens' lines y = (x − μ)/σ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normscope.fits.curve_fit import SiteRecord, about_site
from normscope.fits.targets import as_capture
from normscope.pairs.captures import Capture
from normscope.pairs.sums.magnitudes import of_tokens
from normscope.runtime.records import Records, as_json

SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of the quantiles of slopes


@dataclass(frozen=True, repr=False)
class TokenSlopes(SiteRecord):
    """The slopes of all tokens' lines y = (x − μ)/σ at one norm site.

    Attributes:
        n_tokens: number of tokens.
        slopes: quantiles of 1/σ over all tokens, in units of 1/x, by their shares; right to 9 %, as tokens are counted
            in eight bins an octave.
        ratio: the 95th percentile of the slopes over the 5th: 1 if one line fits all tokens.
        drawn: number of drawn tokens that were compared with their own lines.
        largest_error: largest |y − (x − μ)/σ| among their elements, which is rounding.
    """

    n_tokens: int
    slopes: Mapping[float, float]
    ratio: float
    drawn: int
    largest_error: float

    def as_dict(self) -> dict[str, Any]:
        """Return the columns of ``normscope fit --per token --json``; a number that is not finite is None."""
        row = {name: getattr(self, name) for name in ("model", "weights", "data", "site", "n_tokens", "drawn")}
        row |= {f"slope_{100 * share:g}": slope for share, slope in self.slopes.items()}
        row |= {"ratio": self.ratio, "largest_error": self.largest_error}
        return as_json(row)  # type: ignore[no-any-return]


def token_slopes(capture: Capture) -> Records[TokenSlopes]:
    """Distributions of the slopes of the tokens' lines, site by site.

    A fit per token needs no search: a norm is linear on each token, and R² is 1. Point-wise functions are left out.

    >>> import normscope, torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))])
    >>> token_slopes(seen)[0].n_tokens
    64
    """
    capture = as_capture(capture, "token_slopes")
    return Records(_slopes(capture, site.name) for site in capture.sites if site.pointwise is None)


def _slopes(capture: Capture, site: str) -> TokenSlopes:
    stats = capture.stats[site]
    scales = of_tokens(stats.token_scales)
    slopes = {share: 1 / scales.quantile(1 - share) if scales.count else math.nan for share in SHARES}
    x, y, rstd = stats.tokens.x.double(), stats.tokens.y.double(), stats.tokens.rstd.double()
    line = y.mean(-1, keepdim=True) + (x - x.mean(-1, keepdim=True)) * rstd[:, None]
    return TokenSlopes(
        **about_site(capture, site),
        n_tokens=stats.n_tokens,
        slopes=slopes,
        ratio=slopes[0.95] / slopes[0.05],
        drawn=len(stats.tokens.key),
        largest_error=float((y - line).abs().max()) if len(y) else math.nan,
    )
