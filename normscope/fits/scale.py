"""Scale of a norm's tokens: σ and the slopes 1/σ, the effect of eps, and the channels that predict σ²."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.fits.curve_fit import SiteRecord, about_site
from normscope.fits.targets import as_capture
from normscope.norms.formulas import BESIDE_ROOT, BOUNDS_LENGTH, BOUNDS_SQUARE, FORMS
from normscope.norms.sites import NormSite
from normscope.pairs.captures import Capture
from normscope.pairs.sums.magnitudes import Magnitudes, of_tokens
from normscope.pairs.token_sums import TokenSums
from normscope.runtime.records import Record, Records, as_json

_NOTICED = 0.01  # relative change of y that counts
_MOST_CHANNELS = 16  # that predict σ²
_RIDGE = 1e-9  # of features of unit mean square: only for features that are linear functions of others
SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of the quantiles of slopes


@dataclass(frozen=True)
class Scale(Record):
    """The σ that tokens are divided by, and the c for which eps still leaves y(c·x) = y(x); over all tokens.

    Attributes:
        sigma_p5, sigma_p50, sigma_p95: percentiles of σ = 1/rstd, about zero if the norm does not centre.
        touched: share of tokens whose y eps makes smaller by more than 1 %. None, with the other two, if y does not
            follow from the token alone.
        holds_to: the c at which y(c·x) is smaller than y(x) by 1 % for one token in a hundred, and by less for the
            others.
        holds_to_p50: the c at which it is for half of the tokens.
        channels: up to 16 channels that predict σ², chosen greedily, in that order; empty without a second pass.
        r2: held-out R² of σ² with the first 1, 2, … of them.
    """

    sigma_p5: float
    sigma_p50: float
    sigma_p95: float
    touched: float | None = None
    holds_to: float | None = None
    holds_to_p50: float | None = None
    channels: tuple[int, ...] = ()
    r2: tuple[float, ...] = ()

    _properties = ("spread",)

    @property
    def spread(self) -> float:
        """The 95th percentile of σ over the 5th."""
        return self.sigma_p95 / self.sigma_p5 if self.sigma_p5 > 0 else math.inf


def scale_of(site: NormSite, sigmas: Magnitudes, sums: TokenSums | None = None) -> Scale:
    """Return the effect of σ from the tokens' counted σ, and with ``sums`` the channels that predict it."""
    p1, p5, p50, p95 = (sigmas.quantile(share) for share in (0.01, 0.05, 0.5, 0.95))
    if site.form is None:
        return Scale(p5, p50, p95)
    channels, r2 = _predictors(sums) if sums else ((), ())
    return Scale(p5, p50, p95, _touched(site, sigmas), _holds_to(site, p1), _holds_to(site, p50), channels, r2)


def _touched(site: NormSite, sigmas: Magnitudes) -> float:
    if (bound := _bound(site)) is not None:  # all tokens that eps bounds have the same σ, within one bin
        return float(sigmas.n[sigmas.low <= bound].sum()) / sigmas.count
    if FORMS[site.form or ""].eps_at == BESIDE_ROOT:
        return sigmas.below(site.eps / _NOTICED) / sigmas.count
    return sigmas.below(math.sqrt(site.eps / (1 - (1 - _NOTICED) ** 2))) / sigmas.count


def _holds_to(site: NormSite, sigma: float) -> float:
    """The c at which a token's y(c·x) is 0.99 y(x), from its σ² = v + eps, or σ = √v + eps.

    If eps is added, y(c·x)² : y(x)² is (v + eps) : (v + eps/c²). If it bounds σ, y falls as c does below the bound.
    """
    if (bound := _bound(site)) is not None:
        return (1 - _NOTICED) * min(bound / sigma, 1) if sigma > 0 else 1 - _NOTICED
    if FORMS[site.form or ""].eps_at == BESIDE_ROOT:  # y(c·x) : y(x) is (√v + eps) : (√v + eps/c)
        return site.eps / (site.eps + sigma * _NOTICED / (1 - _NOTICED)) if site.eps > 0 else 0.0
    excess = sigma**2 * ((1 - _NOTICED) ** -2 - 1)
    return math.sqrt(site.eps / (site.eps + excess)) if site.eps > 0 else 0.0


def _bound(site: NormSite) -> float | None:
    """The σ that eps, a bound of ‖x‖ or of the mean square, is equivalent to; None if eps is no bound."""
    eps_at = FORMS[site.form or ""].eps_at
    if eps_at == BOUNDS_LENGTH:
        return site.eps / math.sqrt(site.d)
    return math.sqrt(site.eps) if eps_at == BOUNDS_SQUARE else None


def _predictors(sums: TokenSums) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Choose channels that predict σ², and return them with the held-out R² of σ² after each.

    σ² is predicted from 1, z and z² of the channels, by least squares. Each step adds the channel that leaves the
    smallest held-out error.
    """
    training, held_out = sums.gram.cpu()
    total = held_out[-1, -1] - held_out[0, -1] ** 2 / held_out[0, 0]
    candidates = len(sums.channels)
    chosen, r2 = list[int](), list[float]()
    for _ in range(min(_MOST_CHANNELS, candidates)):
        remaining = [n for n in range(candidates) if n not in chosen]
        trials = torch.tensor([[*chosen, n] for n in remaining])
        # The features v are 1, z of all candidates, their z², and σ².
        features = torch.cat([torch.zeros(len(trials), 1, dtype=torch.long), 1 + trials, 1 + candidates + trials], 1)
        slopes = _least_squares(training, features)
        gram = held_out[features[:, :, None], features[:, None, :]]
        errors = held_out[-1, -1] - (slopes.mT @ (2 * held_out[features, -1, None] - gram @ slopes)).flatten()
        best = int(errors.argmin())
        chosen.append(remaining[best])
        r2.append(float(1 - errors[best] / total))
    return tuple(sums.channels[chosen].tolist()), tuple(r2)


def _least_squares(gram: Tensor, features: Tensor) -> Tensor:
    """Return the coefficients of each trial's features for σ², ``(trials, features, 1)``, by a Gram matrix."""
    diagonal = gram.diagonal()[features]
    unit = diagonal.rsqrt().where(diagonal > 0, 0.0)[:, :, None]
    within = gram[features[:, :, None], features[:, None, :]] * unit * unit.mT
    within = within + _RIDGE * torch.eye(within.shape[-1], dtype=gram.dtype)
    slopes: Tensor = torch.linalg.solve(within, gram[features][:, :, -1:] * unit)
    return unit * slopes


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
