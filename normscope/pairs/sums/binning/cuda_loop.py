"""Bins and keys, as Triton compiles them, and the kernel that finds the line of every token.

Whatever is summed over a token is float64, since its offset and scale must lie in the bins of the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normscope.pairs.sums.binning import PAIR_GRID, TOKEN_GRID, FloatGrid
from normscope.pairs.sums.sampling import GOLDEN, MIX, NO_KEY, ONE_ELEMENT_IN, PAIRS_PER_BIN


def of(grid: FloatGrid) -> tl.constexpr:
    """Shift, lowest bits and centre, as :func:`bin_of` takes them."""
    return tl.constexpr((23 - grid.mantissa_bits, ((grid.low + 127) << grid.mantissa_bits) - 1, grid.centre))


PAIR, _TOKEN = of(PAIR_GRID), of(TOKEN_GRID)
PAIR_BINS = tl.constexpr(PAIR_GRID.size)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_UNCOUNTED = tl.constexpr(-1.0)
# Of x on the grid of bins and 2²⁴ pairs, squares of y and products with it are then normal numbers, and so are sums.
_LEAST_SLOPE, _MOST_Y = tl.constexpr(2.0**-32), tl.constexpr(2.0**48)

_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(number % 2**64) for number in (GOLDEN, *MIX))
GATHERED = tl.constexpr(8)  # words of a cell of the scratch
KEYLESS = tl.constexpr(NO_KEY)
ONE_IN = tl.constexpr(ONE_ELEMENT_IN)
_PER_BIN = tl.constexpr(PAIRS_PER_BIN)


@triton.jit
def bin_of(x: tl.tensor, grid: tl.constexpr) -> tl.tensor:
    """Return :meth:`FloatGrid.index` of float32 numbers, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    steps = ((bits & 0x7FFFFFFF) >> grid[0]) - grid[1]
    steps = tl.minimum(tl.maximum(steps, 0), grid[2])
    return tl.where(bits < 0, -steps, steps) + grid[2]


@triton.jit
def _mixed(z: tl.tensor) -> tl.tensor:
    """splitmix64's finalizer of uint64 numbers, without the sign bit, as int64."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return (z ^ (z >> 31)).to(tl.int64) & KEYLESS


@triton.jit
def pair_of(key: tl.tensor, element: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Return the key of the pair at an element of a token, and the place in the sample that it competes for."""
    of_element = _mixed((element + 1).to(tl.uint64) * _GOLDEN)
    pair_key = ((key ^ of_element).to(tl.uint64) * _MIX_1).to(tl.int64) & KEYLESS
    return pair_key, (pair_key % _PER_BIN) * PAIR_BINS + bin_of(x, PAIR)


@triton.jit
def _run_of(token: tl.tensor, runs: tl.tensor, n_runs: tl.tensor, half: tl.tensor) -> tl.tensor:
    """Return the last run that begins at or before each token."""
    low = tl.zeros_like(token)
    step = half
    while step > 0:
        probe = low + step
        start = tl.load(runs + probe, mask=probe < n_runs, other=KEYLESS)
        low = tl.where(start <= token, probe, low)
        step = step // 2
    return low


@triton.jit
def _measure(
    rows: tl.tensor, token: tl.tensor, is_data: tl.tensor, d: tl.tensor,
    about_mean: tl.constexpr, at_once: tl.constexpr, tile: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return of some tokens the mean, the sum of squares, and the bits of max |x|."""
    first = token.to(tl.int64)[:, None] * d
    total = tl.zeros((at_once, tile), tl.float64)
    squares = tl.zeros((at_once, tile), tl.float64)
    magnitude = tl.zeros((at_once, tile), tl.int32)
    start = 0
    while start < d:
        column = start + tl.arange(0, tile)[None, :]
        x = tl.load(rows + first + column, mask=is_data[:, None] & (column < d), other=0).to(tl.float32)
        # Without the sign, bits ascend as the numbers do, and a NaN lies beyond infinity.
        magnitude = tl.maximum(magnitude, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        total += x.to(tl.float64)
        if not about_mean:
            squares += x.to(tl.float64) * x.to(tl.float64)
        start += tile
    mean = tl.sum(total, 1) / d
    if about_mean:
        start = 0
        while start < d:
            column = start + tl.arange(0, tile)[None, :]
            inside = is_data[:, None] & (column < d)
            x = tl.load(rows + first + column, mask=inside, other=0).to(tl.float64)
            distance = tl.where(inside, x - mean[:, None], 0)
            squares += distance * distance
            start += tile
    return mean, tl.sum(squares, 1), tl.max(magnitude, 1)


@triton.jit
def _slope(
    squares: tl.tensor, d: tl.tensor, eps: tl.constexpr, correction: tl.constexpr, clamped: tl.constexpr
) -> tl.tensor:
    """Return rstd as :meth:`Form.line` does."""
    epsilon = tl.full(squares.shape, eps, tl.float64)  # as a plain number it would be rounded to float32
    if clamped:
        return tl.sqrt(tl.zeros_like(squares) + d) / tl.maximum(tl.sqrt(squares), epsilon)
    else:
        return 1 / tl.sqrt(squares / (d - correction) + epsilon)


@triton.jit
def offered_of(scratch: tl.tensor, cells: tl.constexpr) -> tl.tensor:
    """Return where the numbers of candidates are, int32 ``(2,)``: behind so many cells of float32 zeros."""
    return (scratch + cells * GATHERED).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _offer(candidates: tl.tensor, number: tl.tensor, token: tl.tensor, offered: tl.tensor) -> None:
    """Write tokens down among the candidates, of which there are ``number`` so far, in any order."""
    place = tl.atomic_add(number + tl.zeros_like(token), 1, mask=offered, sem="relaxed")
    tl.store(candidates + place, token, mask=offered)


@triton.jit(do_not_specialize=["n", "n_runs", "half", "cut"])
def describe(
    rows: tl.tensor, valid: tl.tensor, runs: tl.tensor,
    keys: tl.tensor, folds: tl.tensor, shift: tl.tensor, rstd: tl.tensor, reach: tl.tensor, competing: tl.tensor,
    numbers: tl.tensor, samples: tl.tensor,
    candidates: tl.tensor, scratch: tl.tensor, token_key: tl.tensor, largest_rank: tl.tensor,
    token_offsets: tl.tensor, token_scales: tl.tensor, nonfinite_tokens: tl.tensor,
    n: tl.tensor, d: tl.tensor, n_runs: tl.tensor, half: tl.tensor, cut: tl.tensor,
    eps: tl.constexpr, centred: tl.constexpr, about_mean: tl.constexpr, correction: tl.constexpr, clamped: tl.constexpr,
    given: tl.constexpr, all_valid: tl.constexpr, cells: tl.constexpr, uniform: tl.constexpr, largest: tl.constexpr,
    at_once: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Say of each token what its line, its key and its reach are; each program of ``at_once`` of them.

    ``rows`` are ``(n, d)``; ``runs``, int64 ``(5, n_runs)``, the start, fold, key, position and sample of each, and
    ``half`` is the largest power of two below their number. Given to the next kernels, ``(n,)`` each: ``keys``, int64,
    the largest where a token does not count; ``folds``, int32, as ``~fold`` where the squares of y might leave the
    range of float32; ``shift`` and ``rstd``, float64, unless they are
    ``given``; ``reach``, float32, max |x|, or −1; ``competing``, int32, zero; ``numbers``, within its sample, and
    ``samples``, int64. ``candidates``, int32 ``(2, n)``, are the tokens that may take a place of one of the ``uniform``
    or of the ``largest`` of a sample, and two numbers behind the ``cells`` of the ``scratch`` say how many there are
    (:func:`offered_of`): all that come before the last one kept, of the first only those whose keys are below the
    ``cut``. The form's five numbers follow :class:`Form`.
    """
    token = tl.program_id(0) * at_once + tl.arange(0, at_once)
    exists = token < n
    is_data = exists
    if not all_valid:
        is_data = exists & tl.load(valid + token, mask=exists, other=0).to(tl.int1)
    mean, squares, most = _measure(rows, token, is_data, d, about_mean, at_once, tile)
    if given:
        own_shift = tl.load(shift + token, mask=is_data, other=0)
        slope = tl.load(rstd + token, mask=is_data, other=0)
    else:
        own_shift = mean if centred else tl.zeros_like(mean)
        slope = _slope(squares, d, eps, correction, clamped)
        tl.store(shift + token, own_shift, mask=exists)
        tl.store(rstd + token, slope, mask=exists)
    counted = is_data & (most < _INFINITY_BITS) & (tl.abs(own_shift * slope) < float("inf"))
    lost = tl.sum((is_data & (counted == 0)).to(tl.int64))
    tl.atomic_add(nonfinite_tokens, lost, mask=lost > 0, sem="relaxed")
    one = tl.full((at_once,), 1, tl.int64)
    tl.atomic_add(token_offsets + bin_of((mean * slope).to(tl.float32), _TOKEN), one, mask=counted, sem="relaxed")
    tl.atomic_add(token_scales + bin_of((1 / slope).to(tl.float32), _TOKEN), one, mask=counted, sem="relaxed")
    run = _run_of(token, runs, n_runs, half)
    position = tl.load(runs + 3 * n_runs + run) + token - tl.load(runs + run)
    key = _mixed(tl.load(runs + 2 * n_runs + run).to(tl.uint64) + position.to(tl.uint64) * _GOLDEN)
    tl.store(keys + token, tl.where(counted, key, KEYLESS), mask=exists)
    fold = tl.load(runs + n_runs + run).to(tl.int32)
    own_reach = most.to(tl.float32, bitcast=True)
    most_y = (own_reach.to(tl.float64) + tl.abs(own_shift)) * slope
    narrow = (slope >= _LEAST_SLOPE) & (most_y <= _MOST_Y)
    tl.store(folds + token, tl.where(narrow, fold, ~fold), mask=exists)
    tl.store(reach + token, tl.where(counted, own_reach, _UNCOUNTED), mask=exists)
    tl.store(competing + token, tl.zeros((at_once,), tl.int32), mask=exists)
    tl.store(numbers + token, position, mask=exists)
    tl.store(samples + token, tl.load(runs + 4 * n_runs + run), mask=exists)
    offered = offered_of(scratch, cells)
    last_key = tl.max(tl.load(token_key + tl.arange(0, uniform)), 0)
    _offer(candidates, offered, token, counted & (key < tl.minimum(last_key, cut)))
    last_rank = tl.max(tl.load(largest_rank + tl.arange(0, largest)), 0)
    _offer(candidates + n, offered + 1, token, counted & (-own_reach.to(tl.float64) <= last_rank))
