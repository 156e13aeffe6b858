"""Which tokens and pairs are drawn, and sums of several threads as one: what numba compiles beside the loop itself.

After a change to what this file imports from :mod:`normscope.pairs.sums.binning.cpu_loop`, touch it: numba keeps what
it compiled until the file of the function that is called changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from normscope.pairs.sums.binning.compiled_loops import compiled
from normscope.pairs.sums.binning.cpu_loop import count, put, row_of

_called = compiled()
_exact = compiled(within=True)


@_called
def draw(tokens: Any, grouped: bool, uniform: Any, largest: Any) -> None:
    """Let the tokens of a call compete for the places of two :class:`Sample`, those of least rank and key win.

    Args:
        tokens: a :class:`Rows` that has been filled.
        grouped: whether tokens are groups, of which :func:`evenly` says what is drawn.
        uniform: the sample in which all have the same rank.
        largest: the one in which a token's rank is -max |x|.
    """
    _draw_tokens(tokens, False, grouped, uniform)
    _draw_tokens(tokens, True, grouped, largest)


@_exact
def _draw_tokens(tokens: Any, by_reach: bool, grouped: bool, sample: Any) -> None:
    last = _last(sample)
    for t in range(tokens.keys.size):
        rank = -np.float64(tokens.reach[t]) if by_reach else 0.0
        key = tokens.keys[t]
        if tokens.reach[t] < 0 or (rank, key) >= (sample.rank[last], sample.key[last]):
            continue
        sample.rank[last], sample.key[last], sample.rstd[last] = rank, key, tokens.rstd[t]
        sample.position[last], sample.sample[last] = tokens.position[t], tokens.sample[t]
        row, width = tokens.rows[t], sample.x.shape[1]
        for i in range(width):
            sample.x[last, i] = row[i * row.size // width]
        if grouped:
            sample.x[last, 0], sample.x[last, width - 1] = row.min(), row.max()
        for i in range(width):
            sample.y[last, i] = (np.float64(sample.x[last, i]) - tokens.shift[t]) * tokens.rstd[t]
        last = _last(sample)


@_exact
def _last(sample: Any) -> int:
    last = 0
    for i in range(1, sample.key.size):
        if (sample.rank[i], sample.key[i]) > (sample.rank[last], sample.key[last]):
            last = i
    return last


@_called
def join(table: Any, other: Any) -> None:
    """Add the sums of another thread, and leave zeros."""
    for block in range(other.rows.size - 1):
        if other.rows[block] != 0:
            row, source = row_of(table.rows, block), other.rows[block]
            for i in range(table.values.shape[1]):
                table.values[row, i] += other.values[source, i]
                other.values[source, i] = 0
            other.rows[block] = 0
    other.rows[-1] = 0


@_called
def join_density(sums: Any, other: Any) -> None:
    """Add the counts of another thread, and leave zeros."""
    for cell in range(other.density.size):
        if other.density[cell] != 0:
            count(sums.density, sums.density_high, cell, other.density[cell])
            other.density[cell] = 0
    for cell in range(other.density_high.size):
        if other.density_high[cell] != 0:
            sums.density_high[cell] += other.density_high[cell]
            other.density_high[cell] = 0


@_called
def join_pairs(sums: Any, other: Any) -> None:
    """Take the drawn pairs of lesser keys, and leave none."""
    for block in range(other.pair_key.rows.size - 1):
        for place in range(other.pair_key.values.shape[1] if other.pair_key.rows[block] != 0 else 0):
            key = other.pair_key.values[other.pair_key.rows[block], place]
            if key > sums.pair_key.values[sums.pair_key.rows[block], place]:
                put(sums.pair_key, block, place, key)
                put(sums.pair_x, block, place, other.pair_x.values[other.pair_x.rows[block], place])
                put(sums.pair_y, block, place, other.pair_y.values[other.pair_y.rows[block], place])
                put(sums.pair_channel, block, place, other.pair_channel.values[other.pair_channel.rows[block], place])
    other.pair_key.values[: other.pair_key.rows[-1] + 1] = 0
