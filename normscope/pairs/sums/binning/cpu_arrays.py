"""What the compiled loop takes and fills: named tuples of arrays, which numba knows how to pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, PAIR_GRID, TOKEN_GRID, FloatGrid
from normscope.pairs.sums.sampling import ONE_ELEMENT_IN, PAIRS_PER_BIN


class LoopConstants(NamedTuple):
    """What the grids and the drawing samples are; passed, since numba keeps what it compiled when other files change.

    Of each grid: the shift to its bins, what is taken from them, and the number of the central one, as int32.
    """

    pair: tuple[Any, Any, Any]
    density_x: tuple[Any, Any, Any]
    density_y: tuple[Any, Any, Any]
    token: tuple[Any, Any, Any]
    one_element_in: int
    pairs_per_bin: int


class Rows(NamedTuple):
    """Tokens as :func:`fill` takes them, and room for what it says of each.

    Attributes:
        rows: float32 ``(tokens, d)``.
        valid: which of them are data, bool ``(tokens,)``.
        form: centred, about_mean, correction and clamped of :class:`Form`.
        eps: of that form.
        given: whether shift and rstd are there already, in place of a form.
        groups: number of groups of channels; 1 where a token holds all channels.
        positions: number of neighbouring elements of a token that are of one channel.
        element_keys: number of each place in a token, uint64 ``(step, ≥ d / step)``: those of the places that compete
            for single pairs together, one in ``step``, are a row.
        keys: takes the key of each token that counts, int64 ``(tokens,)``.
        shift: takes its shift, float64 ``(tokens,)``.
        rstd: takes its slope, float64 ``(tokens,)``.
        reach: takes its max |x|, float32 ``(tokens,)``; −1 for a token that does not count.
        position: takes its number within its sample, int64 ``(tokens,)``.
        sample: takes that sample's number, int64 ``(tokens,)``.
    """

    rows: Any
    valid: Any
    form: tuple[bool, bool, int, bool]
    eps: float
    given: bool
    groups: int
    positions: int
    element_keys: Any
    keys: Any
    shift: Any
    rstd: Any
    reach: Any
    position: Any
    sample: Any


class BlockRows(NamedTuple):
    """One group of a :class:`Blocks`: a block without a row gets one when it is first needed."""

    rows: Any
    values: Any


class Sums(NamedTuple):
    """What one thread fills: as :class:`PairStats` keeps them, each :class:`Compacted` field as tables.

    Attributes:
        moments: of every fold, ``(folds, …)``, the same arrays for all threads.
        shared: moments of a fold that another thread has begun.
        density: lower 16 bits of the counts, uint16 and flat.
        density_high: the counts over 65,536, int64 and flat.
    """

    moments: BlockRows
    shared: BlockRows
    density: Any
    density_high: Any
    channel_sums: Any
    channel_extremes: Any
    token_offsets: Any
    token_scales: Any
    nonfinite_tokens: Any
    pair_key: BlockRows
    pair_x: BlockRows
    pair_y: BlockRows
    pair_channel: BlockRows


class SampleArrays(NamedTuple):
    """A :class:`TokenSample` with all its places: those that are free have the largest rank and key."""

    rank: Any
    key: Any
    x: Any
    y: Any
    rstd: Any
    position: Any
    sample: Any


class Tile(NamedTuple):
    """What is computed of a part of some tokens.

    Attributes:
        y: of one of them, float32 ``(elements,)``.
        bins: of x, int32 ``(tokens, elements)``.
        cells: of (x, y), int32 ``(tokens, elements)``.
    """

    y: Any
    bins: Any
    cells: Any


def _of(grid: FloatGrid) -> tuple[Any, Any, Any]:
    return (
        np.int32(23 - grid.mantissa_bits),
        np.int32(((grid.low + 127) << grid.mantissa_bits) - 1),
        np.int32(grid.centre),
    )


CONSTANTS = LoopConstants(
    _of(PAIR_GRID), _of(DENSITY_X_GRID), _of(DENSITY_Y_GRID), _of(TOKEN_GRID), ONE_ELEMENT_IN, PAIRS_PER_BIN
)
