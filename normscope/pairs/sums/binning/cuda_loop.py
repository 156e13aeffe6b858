"""The loop itself, as Triton compiles it: one kernel finds the line of every token, and one adds up the pairs.

Programs add to the same sums by atomic additions, whose order is the GPU's own: counts are exact, and sums agree to
float64's rounding. Whatever a sum is taken over is float64, since y must lie in the bin that the reference puts it in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, MOMENTS, PAIR_GRID, TOKEN_GRID, FloatGrid
from normscope.pairs.sums.sampling import GOLDEN, MIX, NO_KEY, ONE_ELEMENT_IN, PAIRS_PER_BIN


def _of(grid: FloatGrid) -> tl.constexpr:
    """Shift, lowest bits and centre, as :func:`bin_of` takes them."""
    return tl.constexpr((23 - grid.mantissa_bits, ((grid.low + 127) << grid.mantissa_bits) - 1, grid.centre))


PAIR, _DENSITY_X, _DENSITY_Y, _TOKEN = (_of(grid) for grid in (PAIR_GRID, DENSITY_X_GRID, DENSITY_Y_GRID, TOKEN_GRID))
_PAIR_BINS = tl.constexpr(PAIR_GRID.size)
_DENSITY_Y_BINS = tl.constexpr(DENSITY_Y_GRID.size)
_WORDS = tl.constexpr(len(MOMENTS))
_ROOM = tl.constexpr(triton.next_power_of_2(len(MOMENTS)))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_UNCOUNTED = tl.constexpr(-1.0)

_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(number % 2**64) for number in (GOLDEN, *MIX))
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
    return pair_key, (pair_key % _PER_BIN) * _PAIR_BINS + bin_of(x, PAIR)


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


@triton.jit(do_not_specialize=["n", "n_runs", "half"])
def describe(
    rows: tl.tensor, valid: tl.tensor, runs: tl.tensor,
    keys: tl.tensor, folds: tl.tensor, shift: tl.tensor, rstd: tl.tensor, reach: tl.tensor, competing: tl.tensor,
    numbers: tl.tensor, samples: tl.tensor,
    token_offsets: tl.tensor, token_scales: tl.tensor, nonfinite_tokens: tl.tensor,
    n: tl.tensor, d: tl.tensor, n_runs: tl.tensor, half: tl.tensor,
    eps: tl.constexpr, centred: tl.constexpr, about_mean: tl.constexpr, correction: tl.constexpr, clamped: tl.constexpr,
    given: tl.constexpr, all_valid: tl.constexpr, at_once: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Say of each token what its line, its key and its reach are; each program of ``at_once`` of them.

    ``rows`` are ``(n, d)``; ``runs``, int64 ``(5, n_runs)``, the start, fold, key, position and sample of each, and
    ``half`` is the largest power of two below their number. Given to the next kernels, ``(n,)`` each: ``keys``, int64,
    the largest where a token does not count; ``folds``, int32; ``shift`` and ``rstd``, float64, unless they are
    ``given``; ``reach``, float32, max |x|, or −1; ``competing``, int32, zero; ``numbers``, within its sample, and
    ``samples``, int64. The form's five numbers follow :class:`Form`.
    """
    token = tl.program_id(0) * at_once + tl.arange(0, at_once)
    exists = token < n
    is_data = exists
    if not all_valid:
        is_data = exists & tl.load(valid + token, mask=exists, other=0).to(tl.int1)
    mean, squares, largest = _measure(rows, token, is_data, d, about_mean, at_once, tile)
    if given:
        own_shift = tl.load(shift + token, mask=is_data, other=0)
        slope = tl.load(rstd + token, mask=is_data, other=0)
    else:
        own_shift = mean if centred else tl.zeros_like(mean)
        slope = _slope(squares, d, eps, correction, clamped)
        tl.store(shift + token, own_shift, mask=exists)
        tl.store(rstd + token, slope, mask=exists)
    counted = is_data & (largest < _INFINITY_BITS) & (tl.abs(own_shift * slope) < float("inf"))
    lost = tl.sum((is_data & (counted == 0)).to(tl.int64))
    tl.atomic_add(nonfinite_tokens, lost, mask=lost > 0, sem="relaxed")
    one = tl.full((at_once,), 1, tl.int64)
    tl.atomic_add(token_offsets + bin_of((mean * slope).to(tl.float32), _TOKEN), one, mask=counted, sem="relaxed")
    tl.atomic_add(token_scales + bin_of((1 / slope).to(tl.float32), _TOKEN), one, mask=counted, sem="relaxed")
    run = _run_of(token, runs, n_runs, half)
    position = tl.load(runs + 3 * n_runs + run) + token - tl.load(runs + run)
    key = _mixed(tl.load(runs + 2 * n_runs + run).to(tl.uint64) + position.to(tl.uint64) * _GOLDEN)
    tl.store(keys + token, tl.where(counted, key, KEYLESS), mask=exists)
    tl.store(folds + token, tl.load(runs + n_runs + run).to(tl.int32), mask=exists)
    tl.store(reach + token, tl.where(counted, largest.to(tl.float32, bitcast=True), _UNCOUNTED), mask=exists)
    tl.store(competing + token, tl.zeros((at_once,), tl.int32), mask=exists)
    tl.store(numbers + token, position, mask=exists)
    tl.store(samples + token, tl.load(runs + 4 * n_runs + run), mask=exists)


@triton.jit
def _load(
    rows: tl.tensor, keys: tl.tensor, row: tl.tensor, column: tl.tensor, n_rows: tl.tensor,
    width: tl.tensor, per_token: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the keys of some rows' tokens, and x, zero where it does not count."""
    key = tl.load(keys + row // per_token, mask=row < n_rows, other=KEYLESS)
    inside = (key != KEYLESS)[:, None] & (column < width)
    return key, tl.load(rows + row.to(tl.int64)[:, None] * width + column, mask=inside, other=0).to(tl.float32)


@triton.jit
def _add_moments(moments: tl.tensor, cell: tl.tensor, x: tl.tensor, y: tl.tensor) -> None:
    """Add 1, x, y, x², xy, y² of each pair to its cell, unless that is negative.

    Six neighbouring lanes do so for a pair, so that what goes to memory is two sectors of it and not six.
    """
    one = tl.full(x.shape, 1.0, tl.float64)
    even = tl.join(tl.join(one, x * y), tl.join(y, one))  # words 0 and 4, 2 and 6, which is masked
    odd = tl.join(tl.join(x, y * y), tl.join(x * x, one))  # words 1 and 5, 3 and 7
    word = tl.arange(0, _ROOM)[None, :]
    # Not 6 · cell: Triton would see that it is even, and give each lane two neighbouring words, in two instructions.
    place = (cell + cell * (_WORDS - 1))[:, None]
    words = tl.join(even, odd).reshape((x.shape[0], _ROOM))
    tl.atomic_add(moments + place + word, words, mask=(place >= 0) & (word < _WORDS), sem="relaxed")


@triton.jit
def _compete(
    rows: tl.tensor,
    key: tl.tensor,
    before: tl.tensor,
    left: tl.tensor,
    width: tl.tensor,
    pair_keys: tl.tensor,
    tile: tl.constexpr,
) -> tl.tensor:
    """Let one in :data:`ONE_ELEMENT_IN` pairs of a tile compete, and say of each row whether one took a place.

    ``rows`` point to the rows, ``(rows, 1)``, which begin at the element ``before`` of their tokens.
    """
    column = left + ((key >> 8) - before - left & ONE_IN - 1)[:, None] + tl.arange(0, tile // ONE_IN)[None, :] * ONE_IN
    inside = (key != KEYLESS)[:, None] & (column < width)
    x = tl.load(rows + column, mask=inside, other=0).to(tl.float32)
    pair_key, place = pair_of(key[:, None], before[:, None] + column, x)
    beats = inside & (pair_key < tl.load(pair_keys + place, mask=inside, other=0))
    tl.atomic_min(pair_keys + place, pair_key, mask=beats, sem="relaxed")
    return tl.max(beats.to(tl.int32), 1) > 0


@triton.jit
def _add_to_channels(
    sums: tl.tensor,
    extremes: tl.tensor,
    channel: tl.tensor,
    channels: tl.tensor,
    total: tl.tensor,
    squares: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    mask: tl.tensor,
) -> None:
    tl.atomic_add(sums + channel, total, mask=mask, sem="relaxed")
    tl.atomic_add(sums + channels + channel, squares, mask=mask, sem="relaxed")
    tl.atomic_min(extremes + channel, low, mask=mask, sem="relaxed")
    tl.atomic_max(extremes + channels + channel, high, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["n_rows", "steps", "groups"])
def add_pairs(
    rows: tl.tensor, keys: tl.tensor, folds: tl.tensor, shift: tl.tensor, rstd: tl.tensor, competing: tl.tensor,
    moments: tl.tensor, density: tl.tensor, channel_sums: tl.tensor, channel_extremes: tl.tensor, pair_keys: tl.tensor,
    n_rows: tl.tensor, width: tl.tensor, steps: tl.tensor, per_token: tl.tensor, groups: tl.tensor, channels: tl.tensor,
    grouped: tl.constexpr, at_once: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Add the pairs of all tokens that count, and let those compete that may be drawn.

    Elements are taken as ``(n_rows, width)``. Rows are tokens and columns the channels; or, where tokens are groups,
    rows are the channels of every token, ``per_token`` of them, and columns their positions. Each program adds
    ``at_once`` rows, ``steps`` times, of ``tile`` columns, a multiple of eight. What is said of tokens comes from
    :func:`describe`; ``competing`` becomes 1 where a pair took a place, whose key alone is written down here.
    """
    left = tl.program_id(0) * tile
    column = left + tl.arange(0, tile)[None, :]
    total = tl.zeros((at_once, tile), tl.float64)
    squares = tl.zeros((at_once, tile), tl.float64)
    low = tl.full((at_once, tile), float("inf"), tl.float32)
    high = tl.full((at_once, tile), float("-inf"), tl.float32)
    row = tl.program_id(1) * steps * at_once + tl.arange(0, at_once)
    # One step ahead: so it comes while the last is added up, and bfloat16 is not widened in each of the six lanes.
    key, x = _load(rows, keys, row, column, n_rows, width, per_token)
    step = 0
    while step < steps:
        token = row // per_token
        counted = key != KEYLESS
        inside = counted[:, None] & (column < width)
        fold = tl.load(folds + token, mask=counted, other=0)[:, None]
        own_shift = tl.load(shift + token, mask=counted, other=0)[:, None]
        slope = tl.load(rstd + token, mask=counted, other=0)[:, None]
        wide = x.to(tl.float64)
        y = (wide - own_shift) * slope
        narrow_y = (x - own_shift.to(tl.float32)) * slope.to(tl.float32)
        joint = bin_of(x, _DENSITY_X) * _DENSITY_Y_BINS + bin_of(narrow_y, _DENSITY_Y)
        tl.atomic_add(density + joint, tl.full((at_once, tile), 1, tl.int64), mask=inside, sem="relaxed")
        cell = tl.where(inside, fold * _PAIR_BINS + bin_of(x, PAIR), -1)
        flat: tl.constexpr = (at_once * tile,)
        _add_moments(moments, cell.reshape(flat), wide.reshape(flat), y.reshape(flat))
        own_rows = rows + row.to(tl.int64)[:, None] * width
        took = _compete(own_rows, key, row % per_token * width, left, width, pair_keys, tile)
        tl.store(competing + token, 1, mask=took)
        least = tl.where(inside, x, float("inf"))
        most = tl.where(inside, x, float("-inf"))
        if grouped:
            channel = token % groups * per_token + row % per_token
            sums = tl.sum(wide, 1), tl.sum(wide * wide, 1)
            _add_to_channels(
                channel_sums, channel_extremes, channel, channels, *sums, tl.min(least, 1), tl.max(most, 1), counted
            )
        else:
            total += wide
            squares += wide * wide
            low = tl.minimum(low, least)
            high = tl.maximum(high, most)
        step += 1
        row += at_once
        key, x = _load(rows, keys, row, column, tl.where(step < steps, n_rows, 0), width, per_token)
    if not grouped:
        channel = left + tl.arange(0, tile)
        sums = tl.sum(total, 0), tl.sum(squares, 0)
        _add_to_channels(
            channel_sums, channel_extremes, channel, channels, *sums, tl.min(low, 0), tl.max(high, 0), channel < width
        )
