"""Sums over the pairs of a norm in plain torch: the reference for the faster loops, and the fallback.

No step waits for a GPU: tokens that must not count go to an extra bin that is discarded, so that no size depends on the
data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.pairs.sums.binning import CHANNEL_GRID, DENSITY_X_GRID, DENSITY_Y_GRID, MOMENTS, PAIR_GRID, TOKEN_GRID
from normscope.pairs.sums.sampling import (
    FOLDS,
    GROUPED_WIDTH,
    LARGEST_TOKENS,
    NO_KEY,
    UNIFORM_TOKENS,
    TokenSample,
    evenly,
)
from normscope.pairs.sums.site_sums import POSITIONS, SiteSums, Tokens

_PAIRS_AT_ONCE = 2**20  # bounds the float64 temporaries of one step to about 100 MB


@dataclass(frozen=True)
class _Pairs:
    """The pairs of some tokens, ``(tokens, d)`` each; x and y are zero where a token does not count."""

    x: Tensor
    y: Tensor
    bins: Tensor
    cells: Tensor  # fold and bin in one number, the one behind the last where a token does not count
    channel: Tensor
    shift: Tensor | None  # (tokens, 1); None where y is on no line of its token
    rstd: Tensor  # (tokens, 1)
    valid: Tensor  # (tokens, 1)
    counted: Tensor  # (tokens, 1)


def add(stats: SiteSums, tokens: Tokens) -> None:
    """Add the pairs of ``tokens`` to all of ``stats``."""
    add_optional(stats, tokens)
    add_positions(stats, tokens)
    keys, places = tokens.keys(), tokens.places()
    for rows, pairs in _in_steps(tokens):
        stats.moments += _moments(pairs)
        stats.nonfinite_tokens += (pairs.valid & ~pairs.counted).sum()
        stats.density += _density(pairs)
        _add_channels(stats, pairs)
        _count(stats.token_offsets, pairs.x.mean(1, keepdim=True) * pairs.rstd, pairs.counted)
        _count(stats.token_scales, 1 / pairs.rstd, pairs.counted)
        _draw(stats, pairs, keys[rows], (places[0][rows], places[1][rows]))


def add_optional(stats: SiteSums, tokens: Tokens, *, by_gamma: bool = True) -> None:
    """Add the pairs of ``tokens`` to the optional sums only; without ``by_gamma``, not to those weighted by γ²."""
    weighted = stats.gamma_moments if by_gamma else None
    if weighted is None and stats.channel_moments is None and stats.diagonal_moments is None:
        return
    for _, pairs in _in_steps(tokens):
        if weighted is not None:
            gamma = torch.ones(tokens.channels) if tokens.gamma is None else tokens.gamma
            weight = gamma.to(pairs.x.device).double().square()
            weighted += _moments(pairs, weight[pairs.channel])
        if stats.channel_moments is not None:
            _, channels, bins = stats.channel_moments.shape
            cells = (pairs.channel * bins + CHANNEL_GRID.index(pairs.x.float())).where(pairs.counted, channels * bins)
            stats.channel_moments += binned_moments(pairs.x, pairs.y, cells, channels * bins).view(-1, channels, bins)
        if stats.diagonal_moments is not None:
            form = tokens.lines.form
            assert form is not None  # noqa: S101 - the sums are kept of sites with a form alone
            stats.diagonal_moments += _moments(replace(pairs, y=form.diagonal(pairs.x, tokens.lines.eps)))


def add_positions(stats: SiteSums, tokens: Tokens) -> None:
    """Add ``tokens`` to the sums by position, and the pairs at the first one to the moments of these alone."""
    if (places := tokens.in_sequence) is None:
        return
    squares = torch.linalg.vector_norm(tokens.rows.detach(), dim=1, dtype=torch.float64).square()
    counted = squares.isfinite() if tokens.valid is None else squares.isfinite() & tokens.valid
    added = torch.stack([torch.ones_like(squares), squares]).where(counted, 0.0)
    stats.position_sums.index_add_(1, places.numbers.clamp(0, POSITIONS), added)
    # Selecting by a mask would have to wait for a GPU.
    there, first = (counted & (places.numbers == places.first)).int().topk(places.sequences)
    x = tokens.rows[first].float().double()
    shift, rstd = tokens.lines.of(x, first)
    y = (x - shift) * rstd if tokens.lines.explicit_y is None else tokens.lines.explicit_y[first]
    there = (there[:, None] > 0) & (shift * rstd).isfinite()
    x, y = x.where(there, 0.0), y.where(there, 0.0)
    bins = PAIR_GRID.index(x.float()).where(there, PAIR_GRID.size)
    stats.first_moments += binned_moments(x, y, bins, PAIR_GRID.size).mT


def _in_steps(tokens: Tokens) -> Iterator[tuple[slice, _Pairs]]:
    folds = tokens.folds()[:, None]
    step = max(1, _PAIRS_AT_ONCE // tokens.rows.shape[1])
    for start in range(0, len(tokens.rows), step):
        rows = slice(start, start + step)
        x = tokens.rows[rows].float().double()
        shift, rstd = tokens.lines.of(x, rows)
        finite = torch.isfinite(x).all(1, keepdim=True) & torch.isfinite(shift * rstd)
        valid = torch.ones_like(finite) if tokens.valid is None else tokens.valid[rows, None]
        counted = valid & finite
        explicit_y = tokens.lines.explicit_y
        y = ((x - shift) * rstd if explicit_y is None else explicit_y[rows]).where(counted, 0)
        x = x.where(counted, 0)
        bins = PAIR_GRID.index(x.float())
        cells = (folds[rows] * PAIR_GRID.size + bins).where(counted, FOLDS * PAIR_GRID.size)
        line_shift = shift if explicit_y is None else None
        yield rows, _Pairs(x, y, bins, cells, tokens.channel_of(rows), line_shift, rstd, valid, counted)


def binned_moments(x: Tensor, y: Tensor, index: Tensor, bins: int, weight: Tensor | None = None) -> Tensor:
    """Sum 1, x, y, x², xy and y² over the pairs of each bin, times their weights: float64 ``(6, bins)``.

    All tensors have one shape. The index of a pair that is in no sum is ``bins``. With float32 sums, the variance
    within a bin would be off by a tenth.
    """
    w = torch.ones_like(x) if weight is None else weight
    moments = torch.zeros(len(MOMENTS), bins + 1, dtype=torch.float64, device=x.device)
    for row, values in enumerate((w, w * x, w * y, w * x * x, w * x * y, w * y * y)):
        moments[row].index_add_(0, index.flatten(), values.flatten())
    return moments[:, :-1]


def _density(pairs: _Pairs) -> Tensor:
    """Count the pairs per cell; rounding of y to float32 may move a pair across the edge of its bin."""
    x, size = pairs.x.float(), DENSITY_X_GRID.size * DENSITY_Y_GRID.size
    y = pairs.y.float() if pairs.shift is None else (x - pairs.shift.float()) * pairs.rstd.float()
    cells = DENSITY_X_GRID.index(x) * DENSITY_Y_GRID.size + DENSITY_Y_GRID.index(y)
    counts = torch.zeros(size + 1, dtype=torch.int64, device=x.device)
    counts.index_add_(0, cells.where(pairs.counted, size).flatten(), torch.ones_like(cells).flatten())
    return counts[:-1].view(DENSITY_X_GRID.size, -1)


def _moments(pairs: _Pairs, weight: Tensor | None = None) -> Tensor:
    sums = binned_moments(pairs.x, pairs.y, pairs.cells, FOLDS * PAIR_GRID.size, weight)
    return sums.view(len(MOMENTS), FOLDS, -1).transpose(0, 1)


def _add_channels(stats: SiteSums, pairs: _Pairs) -> None:
    places, narrow = pairs.channel.flatten(), pairs.x.float()
    for sums, values in zip(stats.channel_sums, (pairs.x, pairs.x.square()), strict=True):
        sums.index_add_(0, places, values.flatten())
    low, high = stats.channel_extremes
    low.scatter_reduce_(0, places, narrow.where(pairs.counted, torch.inf).flatten(), "amin")
    high.scatter_reduce_(0, places, narrow.where(pairs.counted, -torch.inf).flatten(), "amax")


def _count(counts: Tensor, values: Tensor, counted: Tensor) -> None:
    bins = TOKEN_GRID.index(values.where(counted, 0).float())
    counts.index_add_(0, bins.flatten(), counted.flatten().long())


def _draw(stats: SiteSums, pairs: _Pairs, keys: Tensor, places: tuple[Tensor, Tensor]) -> None:
    """Let single pairs and whole tokens compete for their places in the drawing samples."""
    counted = pairs.counted[:, 0]
    x, y, keys = pairs.x.float(), pairs.y.float(), keys.where(counted, NO_KEY)
    stats.pairs.add(keys, pairs.bins, x, y, pairs.channel)
    drawn = evenly(x, y, GROUPED_WIDTH) if stats.grouped else (x, y)
    # The token of the largest reach has the least rank; tokens that do not count come last.
    by_reach = -pairs.x.abs().amax(1).where(counted, -1)
    offered = TokenSample(torch.zeros_like(by_reach), keys, *drawn, pairs.rstd[:, 0].float(), *places)
    stats.tokens = stats.tokens.with_more(offered, UNIFORM_TOKENS)
    stats.largest = stats.largest.with_more(replace(offered, rank=by_reach), LARGEST_TOKENS)
