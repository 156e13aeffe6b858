"""The gradient view: a norm's Jacobian beside the curves' derivatives, and how constant what each curve holds is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.fits.ceiling import conditional_mean
from normscope.fits.constants import Constants, constants_by_part, finite_or_none
from normscope.fits.curve_fit import CurveFit
from normscope.fits.jacobians import Jacobians, jacobians
from normscope.pairs.binning import PAIR_GRID
from normscope.pairs.captures import Capture
from normscope.pairs.formulas import FORMS, form_name
from normscope.pairs.sites import NormSite
from normscope.pairs.stats import PairStats

Array = NDArray[np.float64]
TAIL_FROM = 0.99  # of the drawn tokens' |x| lie below the tail
_FORMS = {form_name(form): form for form in FORMS.values()}
_LEAST_COUNT = 64  # pairs that a group holds from which the diagonal of other tokens is predicted


@dataclass(frozen=True)
class GradientView:
    """The Jacobian ∂y_i/∂x_j of one norm site, over the drawn tokens of a capture.

    Attributes:
        model: the network.
        weights: its resolved checkpoint and revision.
        data: what went through it.
        site: module path of the norm.
        kind: its name in the table of norms.
        d: number of elements of a token.
        centred: whether the norm takes the token's mean away.
        reason: why there is no closed form here; all numbers are then NaN. None where there is one.
        n_tokens: number of uniformly drawn tokens, which every mean, spread and R² is over.
        n_largest: number of tokens of largest |x|, which the smallest shares take too.
        of_tokens: number of tokens that both were drawn from.
        share: mean over tokens of the part of the Jacobian's squared Frobenius norm that its diagonal holds.
        least_share: the smallest such part; never less than 1 − 1/d for an RMSNorm, 1 − 2/d for a LayerNorm.
        tail_share: mean over the pairs of the tail of the part of row i's squares that ∂y_i/∂x_i holds.
        least_row_share: the smallest such part among all drawn pairs.
        r2_of_x: R² of E[∂y_i/∂x_i | x], learnt from one half of the tokens and tried on the other: what a function of
            x alone can say of the diagonal. NaN with fewer than two tokens.
        r2: R² of each fitted curve's derivative as a prediction of ∂y_i/∂x_i, by the curve's name; NaN where there is
            nothing to fit.
        constants: for ``all`` pairs, for the ``centre`` and for the ``tail``, the hundredth of largest |x|.
    """

    model: str
    weights: str
    data: str
    site: str
    kind: str
    d: int
    centred: bool
    reason: str | None
    n_tokens: int
    n_largest: int
    of_tokens: int
    share: float = math.nan
    least_share: float = math.nan
    tail_share: float = math.nan
    least_row_share: float = math.nan
    r2_of_x: float = math.nan
    r2: dict[str, float] = field(default_factory=dict)
    constants: dict[str, Constants] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``normscope gradient --json`` prints; a number that is none becomes None."""
        origin = (
            "model",
            "weights",
            "data",
            "site",
            "kind",
            "d",
            "centred",
            "reason",
            "n_tokens",
            "n_largest",
            "of_tokens",
        )
        return {
            **{name: getattr(self, name) for name in origin},
            **{
                name: finite_or_none(getattr(self, name))
                for name in ("share", "least_share", "tail_share", "least_row_share", "r2_of_x")
            },
            "r2": {curve: finite_or_none(value) for curve, value in self.r2.items()},
            "constants": {part: found.as_dict() for part, found in self.constants.items()},
        }


@dataclass(frozen=True)
class DrawnJacobians:
    """The Jacobians of the drawn tokens of one site.

    Attributes:
        x: of the uniformly drawn tokens, float64 ``(tokens, d)``.
        y: likewise.
        uniform: their Jacobians.
        largest_x: of the tokens of largest |x|, float64 ``(tokens, d)``.
        largest: their Jacobians.
        tail: |x| from which on a pair lies in the tail.
    """

    x: Tensor
    y: Tensor
    uniform: Jacobians
    largest_x: Tensor
    largest: Jacobians
    tail: float


def gradient(capture: Capture, fits: Sequence[CurveFit] = ()) -> list[GradientView]:
    """Set every site's Jacobian beside its fitted curves' derivatives, from the drawing sample of a capture.

    Args:
        capture: what :func:`normscope.capture` returned, or was read from a file.
        fits: what :func:`normscope.fit` made of it.

    Returns:
        One :class:`GradientView` a site; its ``reason`` says where there is no closed form.

    >>> import normscope
    >>> from torch import nn
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [x])
    >>> [found] = gradient(seen, normscope.fit(seen))
    >>> found.n_tokens, round(found.share, 2), list(found.r2)  # never less than 1 − 2/d
    (64, 0.78, ['tanh', 'isru'])
    """
    return [_view(capture, site, [found for found in fits if found.site == site.name]) for site in capture.sites]


def drawn_jacobians(site: NormSite, stats: PairStats) -> DrawnJacobians | str:
    """Return the Jacobians of a site's drawn tokens, or why there are none, as a clause without a full stop."""
    if site.grouped:
        return "a token is a group, of which a capture keeps a part, and may be normalized by running statistics"
    if site.d < 2:
        return "a token has one element, and its Jacobian nothing off the diagonal"
    uniform, largest = stats.tokens.kept(), stats.largest.kept()
    if not len(uniform.key):
        return "no finite token went through it"
    form = _FORMS.get(site.form or "")
    if form is None:
        return "it is of no form whose Jacobian is known"
    x = uniform.x.double()
    tail = float(np.quantile(x.abs().numpy(), TAIL_FROM, method="inverted_cdf"))
    return DrawnJacobians(
        x=x,
        y=uniform.y.double(),
        uniform=jacobians(form, uniform.x, site.eps),
        largest_x=largest.x.double(),
        largest=jacobians(form, largest.x, site.eps),
        tail=tail,
    )


def mean_diagonal(drawn: DrawnJacobians, least_count: int) -> tuple[Array, Array]:
    """E[∂y_i/∂x_i | x] over the uniformly drawn tokens, in groups of neighbouring x; two arrays ``(groups,)``."""
    x, mean, _ = conditional_mean(_moments(drawn.x, drawn.uniform.diagonal), least_count)
    return x, mean


def _view(capture: Capture, site: NormSite, fits: Sequence[CurveFit]) -> GradientView:
    stats = capture.stats[site.name]
    drawn = drawn_jacobians(site, stats)
    about: dict[str, Any] = {
        **{key: capture.about[key] for key in ("model", "weights", "data")},
        **{"site": site.name, "kind": site.kind, "d": site.d, "centred": site.centred, "of_tokens": stats.n_tokens},
    }
    if not isinstance(drawn, DrawnJacobians):
        return GradientView(**about, reason=drawn, n_tokens=0, n_largest=0)
    in_tail = drawn.x.abs() > drawn.tail
    both = (drawn.uniform, drawn.largest)
    return GradientView(
        **about,
        reason=None,
        n_tokens=len(drawn.x),
        n_largest=len(drawn.largest_x),
        share=float(drawn.uniform.share.mean()),
        least_share=float(torch.cat([one.share for one in both]).amin()),
        tail_share=float(drawn.uniform.row_share[in_tail].mean()),
        least_row_share=float(torch.cat([one.row_share for one in both]).amin()),
        r2_of_x=_r2_of_x(drawn.x, drawn.uniform.diagonal),
        r2={found.curve: _r2_of_curve(found, drawn) for found in fits},
        constants=constants_by_part(drawn.x, drawn.y, drawn.uniform, drawn.tail),
    )


def _r2_of_curve(found: CurveFit, drawn: DrawnJacobians) -> float:
    return math.nan if found.degenerate else _r2(drawn.uniform.diagonal, found.derivative(drawn.x))


def _r2_of_x(x: Tensor, diagonal: Tensor) -> float:
    if len(x) < 2:
        return math.nan
    predicted = torch.empty_like(diagonal)
    for half in (0, 1):
        at, mean, _ = conditional_mean(_moments(x[half::2], diagonal[half::2]), _LEAST_COUNT)
        predicted[1 - half :: 2] = torch.from_numpy(np.interp(x[1 - half :: 2].numpy(), at, mean))
    return _r2(diagonal, predicted)


def _r2(truth: Tensor, predicted: Tensor) -> float:
    total = (truth - truth.mean()).square().sum()
    return float(1 - (truth - predicted).square().sum() / total) if total > 0 else math.nan


def _moments(x: Tensor, y: Tensor) -> Tensor:
    """N, Σx, Σy, Σx², Σxy, Σy² per bin of x, as a capture keeps them: float64 ``(6, bins)``."""
    x, y = x.flatten(), y.flatten()
    bins = PAIR_GRID.index(x.float())
    sums = torch.zeros(6, PAIR_GRID.size, dtype=torch.float64)
    return sums.index_add_(1, bins, torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y]))
