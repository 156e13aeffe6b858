"""Scale of a norm's tokens: σ, the effect of eps, and the channels that predict σ²."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.norms.formulas import BESIDE_ROOT, BOUNDS_LENGTH, BOUNDS_SQUARE, FORMS
from normscope.norms.sites import NormSite
from normscope.pairs.sums.magnitudes import Magnitudes
from normscope.pairs.token_sums import TokenSums
from normscope.runtime.records import Record

_NOTICED = 0.01  # relative change of y that counts
_MOST_CHANNELS = 16  # that predict σ²
_RIDGE = 1e-9  # of features of unit mean square: only for features that are linear functions of others


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
