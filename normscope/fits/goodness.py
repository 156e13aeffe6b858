"""How well a curve fits: in the whole, in the tails, at its worst; and how much of the data it saturates on."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from normscope.fits.nodes import Nodes

TAIL = 0.99  # of the pairs lie nearer to the origin than those in the tails
_SATURATED = 0.05  # of the largest slope: where the curve is flatter, it tells inputs apart no more


@dataclass(frozen=True)
class Goodness:
    """How well curves fit several problems, each number float64 ``(problems,)``, in units of y where it has one.

    All of them count pairs with the weights of the fit.

    Attributes:
        r2: 1 − Σ(y − prediction)² / Σ(y − ȳ)².
        rmse: root of the mean squared error.
        tail_rmse: of the pairs with |x| beyond the 99th percentile.
        centre_rmse: of the others.
        largest_error: largest distance between the curve and the mean y of neighbouring pairs.
        largest_error_at: their x.
        saturated: share of the pairs at which |f′| is under 5 % of its largest value; NaN where it has none.
    """

    r2: Tensor
    rmse: Tensor
    tail_rmse: Tensor
    centre_rmse: Tensor
    largest_error: Tensor
    largest_error_at: Tensor
    saturated: Tensor

    def numbers(self, problem: int) -> dict[str, float]:
        """Return those of one problem."""
        return {f.name: float(getattr(self, f.name)[problem]) for f in fields(self)}


def goodness(nodes: Nodes, in_tail: Tensor, predicted: Tensor, steepness: Tensor) -> Goodness:
    """Compare predictions with all pairs.

    Args:
        nodes: the problems, with both signs of x.
        in_tail: which of them lie in the tails, by :func:`tails`.
        predicted: A·f(αx + s) at the nodes, ``(problems, nodes)``.
        steepness: |f′| there over its largest value, likewise; NaN for a curve that has none.
    """
    off = nodes.y - predicted
    squares = nodes.weight * off.square() + nodes.scatter
    weight, residual = nodes.weight.sum(-1), squares.sum(-1)
    tail_weight, tail = (nodes.weight * in_tail).sum(-1), (squares * in_tail).sum(-1)
    errors = torch.where(nodes.weight > 0, off.abs(), -1.0)
    largest, at = errors.max(-1, keepdim=True)
    flat = (steepness < _SATURATED) & (nodes.weight > 0)
    return Goodness(
        r2=1 - residual / nodes.total,
        rmse=(residual / weight).sqrt(),
        tail_rmse=(tail / tail_weight).sqrt(),
        centre_rmse=((residual - tail).clamp_min(0) / (weight - tail_weight)).sqrt(),
        largest_error=largest[:, 0],
        largest_error_at=nodes.x.gather(-1, at)[:, 0],
        saturated=torch.where(steepness.isnan().any(-1), torch.nan, (nodes.weight * flat).sum(-1) / weight),
    )


def tails(nodes: Nodes) -> Tensor:
    """Tell the nodes whose |x| lies beyond the 99th percentile: bool ``(problems, nodes)``; at least the farthest."""
    order = nodes.x.abs().argsort(-1)
    below = nodes.weight.gather(-1, order).cumsum(-1)
    beyond = below > TAIL * below[:, -1:]
    return torch.zeros_like(beyond).scatter(-1, order, beyond)
