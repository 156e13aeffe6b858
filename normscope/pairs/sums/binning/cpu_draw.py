"""Which tokens and pairs are drawn, and sums of several threads as one: what numba compiles beside the loop itself.

Everything compiled stands in this file, as in :mod:`normscope.pairs.sums.binning.cpu_loop`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from normscope.pairs.sums.binning.compiled_loops import compiled

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
