"""Binned sums as the few weighted points on which every fit is evaluated, for many problems at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

_MIRRORED = (1.0, -1.0, -1.0, 1.0, 1.0, 1.0)  # signs of n, Σx, Σy, Σx², Σxy, Σy² of (−x, −y)
_ROUNDING = 1e-7  # of |x|: below it, what is left of the difference of two squares is no spread


@dataclass(frozen=True)
class Nodes:
    """Weighted points (x, y) that stand for all pairs of several least-squares problems, a row each.

    Rows are padded with points of weight zero.

    Attributes:
        x: float64 ``(problems, nodes)``.
        y: likewise.
        weight: of the pairs that each stands for; without weights their number, likewise.
        scatter: Σ w (y − its node's y)² over those pairs: what no fit changes, likewise.
        total: Σ w (y − ȳ)² over all pairs, float64 ``(problems,)``.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    scatter: Tensor
    total: Tensor

    def __len__(self) -> int:
        """Return the number of problems."""
        return len(self.x)

    def residual(self, predicted: Tensor) -> Tensor:
        """Σ w (y − prediction)² over all pairs, ``(problems,)``, for predictions ``(problems, nodes)``."""
        off = self.y - predicted
        return dot(self.weight * off, off) + self.scatter.sum(-1)

    def filled(self) -> Nodes:
        """Leave out the points that no problem has pairs at."""
        own = (self.weight > 0).any(0)
        return Nodes(self.x[:, own], self.y[:, own], self.weight[:, own], self.scatter[:, own], self.total)

    def of(self, problems: Tensor) -> Nodes:
        """Return some of the problems, by their numbers, as often as they are named."""
        return Nodes(**{f.name: getattr(self, f.name).index_select(0, problems) for f in fields(self)})


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·b over the last axis."""
    summed: Tensor = torch.linalg.vecdot(a, b)
    return summed


def joined(moments: Tensor, width: int) -> Tensor:
    """Join neighbouring bins of a :class:`FloatGrid`; none but zero's then holds pairs of both signs.

    Args:
        moments: sums per bin, ``(…, bins)``.
        width: how many become one; a power of two that divides the number of bins an octave.

    Returns:
        The sums per wider bin, in ascending order of x, ``(…, wider bins)``.

    >>> joined(torch.tensor([9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]), 2).tolist()
    [9, 3, 7, 5, 13, 17, 9]
    """
    if width == 1:
        return moments
    centre = moments.shape[-1] // 2
    # Slices added up: a sum over an axis of a few bins takes five times as long.
    negative, positive = (
        sum((side[..., place::width] for place in range(1, width)), side[..., ::width])
        for side in (moments[..., 1:centre], moments[..., centre + 1 : -1])
    )
    return torch.cat([moments[..., :1], negative, moments[..., centre, None], positive, moments[..., -1:]], -1)


def mirrored(moments: Tensor) -> Tensor:
    """Add the bins of negative x to those of positive x, as an odd curve errs by the same at (−x, −y) as at (x, y).

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin of a grid that is symmetric about zero, ``(…, 6, bins)``.
    """
    centre = moments.shape[-1] // 2
    signs = torch.tensor(_MIRRORED, dtype=moments.dtype)[:, None]
    both = moments[..., centre:].clone()
    both[..., 1:] += signs * moments[..., :centre].flip(-1)
    return both


def nodes_of(moments: Tensor, *, odd: bool = False) -> Nodes:
    """Put each bin's pairs at two points, one standard deviation of its x to either side of its mean.

    The two, with y on the bin's own regression line, have the bin's n, Σx, Σx², Σy and Σxy, so that Σf(x)² and
    Σf(x)y are right to second order in the bin's width for any smooth f, without a derivative of it. With bins of
    1/16 octave that leaves relative errors near 1e-7, and near 1e-4 with half octaves.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, float64 ``(problems, 6, bins)``, on a grid that is symmetric about
            zero.
        odd: the curve will be odd: let one point stand for pairs of either sign.
    """
    total = _total(moments)
    if odd:
        moments = mirrored(moments)
    moments = moments[..., (moments[:, 0] > 0).any(0)]
    n, x, y, xx, xy, yy = moments.unbind(1)
    n = n.clamp_min(0)
    filled = n > 0
    one = torch.where(filled, n, 1.0)
    mean_x, mean_y = x / one, y / one
    spread_x = (xx / one - mean_x.square()).clamp_min(0).sqrt()
    spread_x = torch.where(filled & (spread_x > _ROUNDING * mean_x.abs()), spread_x, 0.0)
    variance_y = torch.where(filled, (yy / one - mean_y.square()).clamp_min(0), 0.0)
    limit = variance_y.sqrt()
    spread_y = (xy / one - mean_x * mean_y) / torch.where(spread_x > 0, spread_x, torch.inf)
    spread_y = spread_y.clamp(-limit, limit)
    scatter = n * (variance_y - spread_y.square())
    return Nodes(
        torch.cat([mean_x - spread_x, mean_x + spread_x], -1),
        torch.cat([mean_y - spread_y, mean_y + spread_y], -1),
        torch.cat([n, n], -1) / 2,
        torch.cat([scatter, scatter], -1) / 2,
        total,
    )


def _total(moments: Tensor) -> Tensor:
    """Σ (y − ȳ)² of each problem, bin by bin, so that large means cancel nothing."""
    n, _, y, _, _, yy = moments.unbind(1)
    one = torch.where(n > 0, n, 1.0)
    pairs = n.sum(-1, keepdim=True)
    mean = y.sum(-1, keepdim=True) / torch.where(pairs > 0, pairs, 1.0)
    within = (yy - y.square() / one).clamp_min(0)
    return torch.where(n > 0, within + n * (y / one - mean).square(), 0.0).sum(-1)
