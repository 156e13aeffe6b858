"""Weighted points that represent the pairs of fit targets, and batches of targets with the same grid of bins."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self

import torch
from torch import Tensor

from normscope.curves.known import FLAT, Curve
from normscope.fits.targets import FitTarget

Pairs = Literal["all", "coarse", "others", "rough others", "folds"]
_TAIL = 0.99  # share of the pairs nearer to the origin than the tails
_MIRRORED = (1.0, -1.0, -1.0, 1.0, 1.0, 1.0)  # signs of n, Σx, Σy, Σx², Σxy, Σy² of (−x, −y)
_ROUNDING = 1e-7  # of |x|: a smaller standard deviation within a bin is rounding
_BINS_AN_OCTAVE = 16
_FEW_BINS = 512  # occupied bins that need not be joined: x within a few octaves is resolved as it was binned
_COARSER = 8  # factor between the bins of the fit and those of the first look
_ROUGH_BINS_AN_OCTAVE = 4  # leave α right to a hundredth, and the error at it to a millionth
_NEGLIGIBLE = 1e-3  # share of Σy² beyond the grid, or of Σx² below it
_STRAIGHT_UP_TO = 0.1  # u below which curves hardly depart from their tangent
_BINS_AT_ONCE = 2**20  # of all folds and targets: some tens of megabytes


@dataclass(frozen=True)
class Batched:
    """A record of tensors with a row for each of several problems."""

    def of(self, problems: Tensor) -> Self:
        """Select the rows of some problems by their numbers, with repetitions."""
        return type(self)(*(getattr(self, field.name).index_select(0, problems) for field in fields(self)))


@dataclass(frozen=True)
class Nodes(Batched):
    """Weighted points (x, y) that represent all pairs of several problems, float64 ``(problems, nodes)``.

    Rows are padded with points of weight zero.
    """

    x: Tensor
    y: Tensor
    weight: Tensor  # of the pairs that a point represents, by default their number
    scatter: Tensor  # Σ w (y − its node's y)² over those pairs, which no fit changes
    total: Tensor  # Σ w (y − ȳ)² over all pairs, (problems,)

    def __len__(self) -> int:
        return len(self.x)

    @functools.cached_property
    def in_tail(self) -> Tensor:
        """Nodes whose |x| lies beyond the 99th percentile, at least the farthest: bool ``(problems, nodes)``."""
        order = self.x.abs().argsort(-1)
        below = self.weight.gather(-1, order).cumsum(-1)
        beyond = below > _TAIL * below[:, -1:]
        return torch.zeros_like(beyond).scatter(-1, order, beyond)

    def split(self, alpha: Tensor, shift: Tensor, kinks: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, y and weight of points that represent the pairs on either side of a kink of f(αx + s) separately.

        Each bin's pairs are spread evenly over x, and two points of Gauss and Legendre represent either part: sums of f
        and f² then change smoothly as a kink passes the bin. Of a bin without a kink they are its nodes.
        """
        if not kinks:
            return self.x, self.y, self.weight
        (x, dx), (y, dy) = (
            ((low + high) / 2, (high - low) / 2) for low, high in (self.x.chunk(2, -1), self.y.chunk(2, -1))
        )
        bends, u = torch.tensor(kinks, dtype=torch.float64), alpha[:, None] * x + shift[:, None]
        nearest = bends[torch.bucketize(u, (bends[1:] + bends[:-1]) / 2)]
        half_width = math.sqrt(3)  # of an even spread, in standard deviations
        kink = ((nearest - u) / (half_width * alpha[:, None] * dx)).nan_to_num(0.0).clamp(-1, 1)
        if (kink.abs() == 1).all():
            return self.x, self.y, self.weight
        below, above = (1 + kink) / 2, (1 - kink) / 2  # shares of the pairs
        left, right = -half_width * above, half_width * below  # centres of the parts
        at = torch.cat([left - below, left + below, right - above, right + above], -1)
        n = self.weight.chunk(2, -1)[0]
        weight = torch.cat([below * n, below * n, above * n, above * n], -1)
        return x.repeat(1, 4) + at * dx.repeat(1, 4), y.repeat(1, 4) + at * dy.repeat(1, 4), weight

    def residual(self, predicted: Tensor) -> Tensor:
        """Σ w (y − prediction)² over all pairs, ``(problems,)``."""
        off = self.y - predicted
        return dot(self.weight * off, off) + self.scatter.sum(-1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·b over the last axis."""
    summed: Tensor = torch.linalg.vecdot(a, b)
    return summed


def coarsened(moments: Tensor, width: int) -> Tensor:
    """Join ``width`` neighbouring bins of a :class:`FloatGrid`, the last axis, into one; zero's stays as it is.

    >>> coarsened(torch.tensor([9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]), 2).tolist()
    [9, 3, 7, 5, 13, 17, 9]
    """
    if width == 1:
        return moments
    centre = moments.shape[-1] // 2
    # A sum of slices takes a fifth of the time of a sum over an axis of a few bins.
    negative, positive = (
        sum((side[..., first::width] for first in range(1, width)), side[..., ::width])
        for side in (moments[..., 1:centre], moments[..., centre + 1 : -1])
    )
    return torch.cat([moments[..., :1], negative, moments[..., centre, None], positive, moments[..., -1:]], -1)


def mirrored(moments: Tensor) -> Tensor:
    """Add the bins of −x, ``(…, 6, bins)``, to those of x: an odd curve has the same error at (−x, −y) and (x, y)."""
    centre = moments.shape[-1] // 2
    signs = torch.tensor(_MIRRORED, dtype=moments.dtype)[:, None]
    both = moments[..., centre:].clone()
    both[..., 1:] += signs * moments[..., :centre].flip(-1)
    return both


def nodes_of(moments: Tensor, *, odd: bool = False) -> Nodes:
    """Put each bin's pairs at two points, one standard deviation of its x to either side of its mean.

    With y on the bin's own regression line, the two have the bin's n, Σx, Σx², Σy and Σxy. For any smooth f, Σf(x)² and
    Σf(x)y are then right to second order in the bin's width: to about 1e-7 with bins of 1/16 octave. ``moments`` are
    n, Σx, Σy, Σx², Σxy, Σy² per bin, ``(problems, 6, bins)``. For an ``odd`` curve a point represents both signs of x.
    """
    total = _total(moments)
    if odd:
        moments = mirrored(moments)
    n, x, y, xx, xy, yy = _filled(moments).unbind(1)
    n = n.clamp_min(0)
    filled = n > 0
    number = torch.where(filled, n, 1.0)
    mean_x, mean_y = x / number, y / number
    deviation_x = (xx / number - mean_x.square()).clamp_min(0).sqrt()
    deviation_x = torch.where(filled & (deviation_x > _ROUNDING * mean_x.abs()), deviation_x, 0.0)
    variance_y = torch.where(filled, (yy / number - mean_y.square()).clamp_min(0), 0.0)
    limit = variance_y.sqrt()
    deviation_y = (xy / number - mean_x * mean_y) / torch.where(deviation_x > 0, deviation_x, torch.inf)
    deviation_y = deviation_y.clamp(-limit, limit)
    scatter = n * (variance_y - deviation_y.square())
    return Nodes(
        torch.cat([mean_x - deviation_x, mean_x + deviation_x], -1),
        torch.cat([mean_y - deviation_y, mean_y + deviation_y], -1),
        torch.cat([n, n], -1) / 2,
        torch.cat([scatter, scatter], -1) / 2,
        total,
    )


def _filled(moments: Tensor) -> Tensor:
    """Move each problem's occupied bins to the front, with zeros behind: ``(problems, 6, most)``."""
    filled = moments[:, 0] > 0
    number = filled.cumsum(-1)
    problem, bins = filled.nonzero().unbind(-1)
    occupied = moments.new_zeros(len(moments), moments.shape[1], int(number[:, -1].max()))
    occupied[problem, :, number[problem, bins] - 1] = moments[problem, :, bins]
    return occupied


def _total(moments: Tensor) -> Tensor:
    """Σ (y − ȳ)² of each problem, bin by bin, so that large means do not cancel."""
    n, _, y, _, _, yy = moments.unbind(1)
    number = torch.where(n > 0, n, 1.0)
    pairs = n.sum(-1, keepdim=True)
    mean = y.sum(-1, keepdim=True) / torch.where(pairs > 0, pairs, 1.0)
    within = (yy - y.square() / number).clamp_min(0)
    return torch.where(n > 0, within + n * (y / number - mean).square(), 0.0).sum(-1)


def goodness(nodes: Nodes, curve: Curve, amplitude: Tensor, alpha: Tensor, shift: Tensor) -> dict[str, Tensor]:
    """Errors of A·f(αx + s) over all pairs, ``(problems,)`` each, by the names of CurveFit's attributes.

    ``nodes`` have both signs of x.
    """
    u = alpha[:, None] * nodes.x + shift[:, None]
    off = nodes.y - amplitude[:, None] * curve.function(u)
    squares = nodes.weight * off.square() + nodes.scatter
    weight, residual = nodes.weight.sum(-1), squares.sum(-1)
    tail_weight, tail = (nodes.weight * nodes.in_tail).sum(-1), (squares * nodes.in_tail).sum(-1)
    largest, at = torch.where(nodes.weight > 0, off.abs(), -1.0).max(-1, keepdim=True)
    steepness = curve.derivative(u).abs() / curve.peak
    flat = (steepness < FLAT) & (nodes.weight > 0)
    has_ends = ~steepness.isnan().any(-1) & math.isfinite(curve.peak)
    return {
        "r2": 1 - residual / nodes.total,
        "rmse": (residual / weight).sqrt(),
        "tail_rmse": (tail / tail_weight).sqrt(),
        "centre_rmse": ((residual - tail).clamp_min(0) / (weight - tail_weight)).sqrt(),
        "largest_error": largest[:, 0],
        "largest_error_at": nodes.x.gather(-1, at)[:, 0],
        "saturated": ((nodes.weight * flat).sum(-1) / weight).where(has_ends, torch.nan),
    }


class FitBatch:
    """Targets on one grid of bins as a batch of problems, each with ``folds`` folds; nodes are computed once.

    Attributes:
        targets, folds: the targets, and the number of folds of each.
        n_pairs: number of pairs in each fold, float64 ``(problems, folds)``.
        occupied: folds that contain pairs, for targets that have folds: bool ``(problems, folds)``.
        off_grid: True if much of x or of y is in a bin without width, below the grid or beyond; bool ``(problems,)``.
    """

    def __init__(self, targets: Sequence[FitTarget], bins_an_octave: int) -> None:
        self.targets, self.folds = targets, len(targets[0].moments)
        self._bins_an_octave = bins_an_octave
        width = 2 ** targets[0].grid.mantissa_bits // bins_an_octave
        self._moments = torch.stack([coarsened(target.moments, width) for target in targets])
        self._counts = torch.stack([coarsened(target.counts, width) for target in targets])
        self._whole = self._moments.sum(1) if self.folds > 1 else self._moments[:, 0]
        self.n_pairs = self._counts.sum(-1)
        has_folds = torch.tensor([target.fold_by is not None for target in targets])
        self.occupied = (self.n_pairs > 0) & has_folds[:, None]
        xx, yy = self._whole[:, 3], self._whole[:, 5]
        near_zero, beyond = xx[:, xx.shape[-1] // 2], yy[:, [0, -1]].sum(-1)
        self.off_grid = (beyond > _NEGLIGIBLE * yy.sum(-1)) | (near_zero > _NEGLIGIBLE * xx.sum(-1))
        self._nodes: dict[tuple[Pairs, bool], Nodes] = {}

    def __len__(self) -> int:
        return len(self.targets)

    def unresolved(self, alpha: Tensor) -> Tensor:
        """True if the grid is too narrow for a curve: for x or y, or for the bend; bool ``(problems,)``."""
        below = self._whole[:, 3, self._whole.shape[-1] // 2] > 0
        return self.off_grid | ((alpha * 2.0 ** self.targets[0].grid.low > _STRAIGHT_UP_TO) & below)

    def nodes(self, pairs: Pairs = "all", *, odd: bool = False) -> Nodes:
        """Return nodes of each problem, ``coarse`` ones for a first look; or of each problem and fold, side by side.

        These are of the pairs of all ``others``, on ``rough others`` fewer nodes, or of the ``folds`` themselves.
        """
        if (pairs, odd) not in self._nodes:
            match pairs:
                case "all":
                    moments = self._whole
                case "coarse":
                    moments = coarsened(self._whole, min(_COARSER, self._bins_an_octave))
                case "others":
                    moments = self._others
                case "rough others":
                    rough = self._bins_an_octave == _BINS_AN_OCTAVE  # a few bins are not joined here either
                    moments = coarsened(self._others, _BINS_AN_OCTAVE // _ROUGH_BINS_AN_OCTAVE if rough else 1)
                case "folds":
                    moments = self._moments.flatten(0, 1)
            self._nodes[pairs, odd] = nodes_of(moments, odd=odd)
        return self._nodes[pairs, odd]

    @functools.cached_property
    def _others(self) -> Tensor:
        # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
        left = self._counts.sum(1, keepdim=True) - self._counts > 0.5
        remaining = (self._whole[:, None] - self._moments).where(left[:, :, None], 0.0)
        # A target without folds may have all pairs in one. It stays whole: a search needs pairs.
        return remaining.where(self.occupied[:, :, None, None], self._whole[:, None]).flatten(0, 1)


def batches(targets: Sequence[FitTarget]) -> Iterator[tuple[list[int], FitBatch]]:
    """Batches of the targets that have something to fit, each with their numbers among ``targets``."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, target in enumerate(targets):
        if target.nothing is None:
            octave = 2**target.grid.mantissa_bits
            few = octave <= _BINS_AN_OCTAVE or int((target.counts > 0).any(0).sum()) <= _FEW_BINS
            alike.setdefault((octave, octave if few else _BINS_AN_OCTAVE), []).append(index)
    for (octave, bins_an_octave), numbers in alike.items():
        bins = targets[numbers[0]].counts.numel() * bins_an_octave // octave
        at_once = max(1, _BINS_AT_ONCE // bins)
        for start in range(0, len(numbers), at_once):
            selected = numbers[start : start + at_once]
            yield selected, FitBatch([targets[number] for number in selected], bins_an_octave)
