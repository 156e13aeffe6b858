"""The Jacobian of a norm on one token, ∂y_i/∂x_j, in closed form: eps and all, without ever making the matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.pairs.formulas import Form


@dataclass(frozen=True)
class Jacobians:
    """What the Jacobians of some tokens hold, in float64.

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
    """Take the Jacobian of each token, from what :meth:`normscope.pairs.formulas.Form.jacobian` makes it of.

    Args:
        form: of the norm.
        rows: tokens, ``(tokens, d)``, of any floating dtype.
        eps: of the norm.

    Returns:
        Their diagonals and norms.

    >>> from normscope.pairs.formulas import FORMS, rms_norm
    >>> found = jacobians(FORMS[rms_norm], torch.tensor([[3.0, 4.0, 0.0, 0.0]]), 0.0)
    >>> [round(float(slope), 3) for slope in found.diagonal[0]]  # (1 − y²/d)/ρ, with ρ = 2.5
    [0.256, 0.144, 0.4, 0.4]
    """
    x = rows.double()
    d = x.shape[1]
    n, c = d - form.correction, float(form.centred)
    rstd, pull, z = form.jacobian(x, eps)
    crossed = c / d * z.sum(1, keepdim=True) - z
    within = 1 - c / d + 2 * pull * crossed + pull.square() * z.square().sum(1, keepdim=True)
    about = x - x.mean(1, keepdim=True) if form.about_mean else x
    own = about.square() * (d / (d - 1) if form.about_mean else 1)
    rest = (about.square().sum(1, keepdim=True) - own).clamp_min(0)
    return Jacobians(
        diagonal=form.diagonal(x, eps),
        rows=within.clamp_min(0) * rstd.square(),
        scale=1 / rstd[:, 0],
        others=rest.sqrt().clamp_min(eps) / math.sqrt(d) if form.clamped else (rest / n + eps).sqrt(),
    )
