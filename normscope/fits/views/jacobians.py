"""The Jacobian of a norm on one token in closed form, and how constant ρ, σ and C are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from normscope.pairs.norms.formulas import Form
from normscope.runtime.records import Record


@dataclass(frozen=True)
class Jacobians:
    """Diagonals and norms of the Jacobians of some tokens, in float64.

    Attributes:
        diagonal: ∂y_i/∂x_i, ``(tokens, d)``.
        rows: sum of the squares of each row's entries, Σ_j (∂y_i/∂x_j)², ``(tokens, d)``. The sum of these is the
            squared Frobenius norm.
        scale: 1/rstd: ρ of an RMSNorm, σ of a LayerNorm, eps in it, ``(tokens,)``.
        others: the scale that the token would have with x_i at the mean of its other elements, or at zero where
            squares are taken about zero, ``(tokens, d)``: what stays as it is while x_i moves. DyISRU's constant C is
            d·others² for an RMSNorm and d²/(d − 1)·others² for a LayerNorm (docs/theory.md, 27 and 28).
    """

    diagonal: Tensor
    rows: Tensor
    scale: Tensor
    others: Tensor

    @property
    def share(self) -> Tensor:
        """The part of the squared Frobenius norm that the diagonal holds, ``(tokens,)``."""
        return self.diagonal.square().sum(1) / self.rows.sum(1)

    @property
    def row_share(self) -> Tensor:
        """The part of each row's squares that the diagonal holds, ``(tokens, d)``; 1 of a row of zeros."""
        return torch.where(self.rows > 0, self.diagonal.square() / self.rows, 1.0)


def jacobians(form: Form, rows: Tensor, eps: float) -> Jacobians:
    """Jacobians of some tokens, from what :meth:`normscope.pairs.norms.formulas.Form.jacobian` makes it of.

    Args:
        form: of the norm.
        rows: tokens, ``(tokens, d)``, of any floating dtype.
        eps: of the norm.

    Returns:
        Their diagonals and norms.

    >>> from normscope.pairs.norms.formulas import FORMS, rms_norm
    >>> taken = jacobians(FORMS[rms_norm], torch.tensor([[3.0, 4.0, 0.0, 0.0]]), 0.0)
    >>> [round(float(slope), 3) for slope in taken.diagonal[0]]  # (1 − y²/d)/ρ, with ρ = 2.5
    [0.256, 0.144, 0.4, 0.4]
    """
    x = rows.double()
    d = x.shape[1]
    n, c = d - form.correction, float(form.centred)
    rstd, pull, z = form.jacobian(x, eps)
    crossed = c / d * z.sum(1, keepdim=True) - z
    within = 1 - c / d + 2 * pull * crossed + pull.square() * z.square().sum(1, keepdim=True)
    about = x - x.mean(1, keepdim=True) if form.about_mean else x
    share = about.square() * (d / (d - 1) if form.about_mean else 1)
    rest = (about.square().sum(1, keepdim=True) - share).clamp_min(0)
    return Jacobians(
        diagonal=form.diagonal(x, eps),
        rows=within.clamp_min(0) * rstd.square(),
        scale=1 / rstd[:, 0],
        others=rest.sqrt().clamp_min(eps) / math.sqrt(d) if form.clamped else (rest / n + eps).sqrt(),
    )


PARTS = ("all", "centre", "tail")
_ALIKE = 0.05  # two spreads that differ by less are called alike: they are over a few dozen tokens


@dataclass(frozen=True)
class Spread(Record):
    """Quantiles 0.16, 0.50 and 0.84 of some positive numbers: two thirds lie between them. NaN of no numbers."""

    p16: float
    p50: float
    p84: float

    _properties = ("ratio",)

    @property
    def ratio(self) -> float:
        """p84/p16: 1 of a constant."""
        return self.p84 / self.p16 if self.p16 > 0 else math.nan


@dataclass(frozen=True)
class Constants(Record):
    """Spreads of what the curves' derivations hold constant, over some pairs of the uniformly drawn tokens.

    Attributes:
        n_pairs: number of pairs.
        scale: 1/rstd, which DyT holds constant: ρ of an RMSNorm, σ of a LayerNorm. A token counts once a pair.
        others: √C, which DyISRU holds constant, in the same unit: the scale that the token's other elements make.
        C: x²(d/y² − 1), in units of x². For an RMSNorm it is d·others². A LayerNorm's takes x as it is, with the
            token's mean in it, and means nothing where y passes through zero.
    """

    n_pairs: int
    scale: Spread
    others: Spread
    C: Spread

    _properties = ("steadier",)

    @property
    def steadier(self) -> Literal["scale", "others"] | None:
        """The one of ``scale`` and ``others`` of smaller ratio; None where they differ by less than 5 %."""
        scale, others = self.scale.ratio, self.others.ratio
        if not abs(math.log(scale / others)) > _ALIKE:
            return None
        return "scale" if scale < others else "others"


def constants_by_part(x: Tensor, y: Tensor, jacobians: Jacobians, tail: float) -> dict[str, Constants]:
    """Constants of all pairs of some tokens, of those of |x| up to ``tail``, and of those beyond.

    Args:
        x: of the tokens, float64 ``(tokens, d)``.
        y: likewise.
        jacobians: of the tokens.
        tail: in units of x.

    Returns:
        The constants of each of :data:`PARTS`.
    """
    d = x.shape[1]
    beyond = x.abs() > tail
    scale = jacobians.scale[:, None].expand_as(x)
    # Where x and y both are zero the pair says nothing; what is left of x²·d/y² is then the token's own.
    slope = torch.where((x == 0) & (y == 0), scale, x / y)
    values = (scale, jacobians.others, d * slope.square() - x.square())
    parts = dict(zip(PARTS, (torch.ones_like(beyond), ~beyond, beyond), strict=True))
    return {
        part: Constants(int(inside.sum()), *(_spread(value[inside]) for value in values))
        for part, inside in parts.items()
    }


def _spread(values: Tensor) -> Spread:
    if not len(values):
        return Spread(math.nan, math.nan, math.nan)
    # Quantiles that are values themselves: between two infinite ones there is nothing to interpolate.
    return Spread(*np.quantile(values.numpy(), (0.16, 0.5, 0.84), method="inverted_cdf").tolist())
