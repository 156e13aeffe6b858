"""Triton kernels that sum pairs: one gathers in float32, and one adds the result to float64.

Programs add to the same sums by atomic additions, in no fixed order. A pair's sums are gathered about the centre of its
bin, as eight words of float32 in one sector of memory. Counts are exact, as at most :data:`COUNTED` pairs are gathered
before they are added to the sums. Some pairs are added to the sums directly, because float32 cannot represent them or
very many pairs may share a bin: pairs beyond the grid of bins or in the bin of zero, and pairs of tokens whose fold
:func:`describe` inverts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normscope.norms import formulas
from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, MOMENTS, PAIR_GRID, TOKEN_GRID
from normscope.pairs.sums.sampling import GOLDEN, MIX, NO_KEY, ONE_ELEMENT_IN, PAIRS_PER_BIN

PAIR, _TOKEN = tl.constexpr(PAIR_GRID.from_bits), tl.constexpr(TOKEN_GRID.from_bits)
PAIR_BINS = tl.constexpr(PAIR_GRID.size)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_UNCOUNTED = tl.constexpr(-1.0)
_BOUNDS_LENGTH, _BOUNDS_SQUARE = tl.constexpr(formulas.BOUNDS_LENGTH), tl.constexpr(formulas.BOUNDS_SQUARE)
_BESIDE_ROOT = tl.constexpr(formulas.BESIDE_ROOT)
# Of x on the grid of bins and 2²⁴ pairs, squares of y and products with it are then normal numbers, and so are sums.
_LEAST_SLOPE, _MOST_Y = tl.constexpr(2.0**-32), tl.constexpr(2.0**48)

_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(number % 2**64) for number in (GOLDEN, *MIX))
GATHERED = tl.constexpr(8)  # words of a cell of the scratch
KEYLESS = tl.constexpr(NO_KEY)
ONE_IN = tl.constexpr(ONE_ELEMENT_IN)
_PER_BIN = tl.constexpr(PAIRS_PER_BIN)


@triton.jit
def bin_of(x, grid: tl.constexpr):
    """Return :meth:`FloatGrid.index` of float32 numbers, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    steps = ((bits & 0x7FFFFFFF) >> grid[0]) - grid[1]
    steps = tl.minimum(tl.maximum(steps, 0), grid[2])
    return tl.where(bits < 0, -steps, steps) + grid[2]


@triton.jit
def _mixed(z):
    """splitmix64's finalizer of uint64 numbers, without the sign bit, as int64."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return (z ^ (z >> 31)).to(tl.int64) & KEYLESS


@triton.jit
def pair_of(key, element, x):
    """Return the key of the pair at an element of a token, and the place in the sample that it competes for."""
    element_key = _mixed((element + 1).to(tl.uint64) * _GOLDEN)
    pair_key = ((key ^ element_key).to(tl.uint64) * _MIX_1).to(tl.int64) & KEYLESS
    return pair_key, (pair_key % _PER_BIN) * PAIR_BINS + bin_of(x, PAIR)


@triton.jit
def _run_of(token, runs, n_runs, half):
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
def _measure(rows, token, is_data, d, about_mean: tl.constexpr, at_once: tl.constexpr, tile: tl.constexpr):
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
def _slope(squares, d, eps: tl.constexpr, correction: tl.constexpr, eps_at: tl.constexpr):
    """Return rstd as :meth:`Form.line` does."""
    epsilon = tl.full(squares.shape, eps, tl.float64)  # as a plain number it would be rounded to float32
    if eps_at == _BOUNDS_LENGTH:
        return tl.sqrt(tl.zeros_like(squares) + d) / tl.maximum(tl.sqrt(squares), epsilon)
    elif eps_at == _BOUNDS_SQUARE:
        return 1 / tl.sqrt(tl.maximum(squares / (d - correction), epsilon))
    elif eps_at == _BESIDE_ROOT:
        return 1 / (tl.sqrt(squares / (d - correction)) + epsilon)
    else:
        return 1 / tl.sqrt(squares / (d - correction) + epsilon)


@triton.jit
def offered_of(scratch, cells: tl.constexpr):
    """Return the address of the two numbers of candidates, int32, behind the cells of float32 zeros."""
    return (scratch + cells * GATHERED).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _offer(candidates, number, token, offered):
    """Append tokens to the candidates, of which there are ``number`` so far, in any order."""
    index = tl.atomic_add(number + tl.zeros_like(token), 1, mask=offered, sem="relaxed")
    tl.store(candidates + index, token, mask=offered)


@triton.jit(do_not_specialize=["n", "n_runs", "half", "cut"])
def describe(
    rows, valid, runs, keys, folds, shift, rstd, reach, competing, numbers, samples, candidates, scratch, token_key,
    largest_rank, token_offsets, token_scales, nonfinite_tokens, n, d, n_runs, half, cut, eps: tl.constexpr,
    centred: tl.constexpr, about_mean: tl.constexpr, correction: tl.constexpr, eps_at: tl.constexpr,
    given: tl.constexpr, all_valid: tl.constexpr, cells: tl.constexpr, uniform: tl.constexpr, largest: tl.constexpr,
    at_once: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute line, key and reach of each token; each program those of ``at_once`` tokens.

    ``rows`` are ``(n, d)``. ``runs``, int64 ``(5, n_runs)``, contain start, fold, key, position and sample of each;
    ``half`` is the largest power of two below their number. The constants of the form are those of :class:`Form`.

    Results for the next kernels, ``(n,)`` each: ``keys``, int64, the largest number where a token does not count;
    ``folds``, int32, ``~fold`` where the squares of y might leave the range of float32; ``shift`` and ``rstd``,
    float64, unless they are ``given``; ``reach``, float32, max |x|, or −1; ``competing``, int32, zero; ``numbers``
    within the sample, and ``samples``, int64. ``candidates``, int32 ``(2, n)``, are the tokens that may take one of the
    ``uniform`` or ``largest`` places: those that rank before the last token there, the first only with keys below the
    ``cut``. :func:`offered_of` returns their numbers.
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
        slope = _slope(squares, d, eps, correction, eps_at)
        tl.store(shift + token, own_shift, mask=exists)
        tl.store(rstd + token, slope, mask=exists)
    counted = is_data & (most < _INFINITY_BITS) & (tl.abs(own_shift * slope) < float("inf"))
    lost = tl.sum((is_data & (counted == 0)).to(tl.int64))
    tl.atomic_add(nonfinite_tokens, lost, mask=lost > 0, sem="relaxed")
    ones = tl.full((at_once,), 1, tl.int64)
    tl.atomic_add(token_offsets + bin_of((mean * slope).to(tl.float32), _TOKEN), ones, mask=counted, sem="relaxed")
    tl.atomic_add(token_scales + bin_of((1 / slope).to(tl.float32), _TOKEN), ones, mask=counted, sem="relaxed")
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


@triton.jit
def _last(ranks, keys, slots):
    """Return rank, key and slot of the token that is replaced first: of greatest rank, and then key."""
    rank = tl.max(ranks, 0)
    key = tl.max(tl.where(ranks == rank, keys, -1), 0)
    return rank, key, tl.max(tl.where((ranks == rank) & (keys == key), slots, 0), 0)


@triton.jit
def _before(rank, key, other_rank, other_key):
    return (rank < other_rank) | ((rank == other_rank) & (key < other_key))


@triton.jit
def _y(x, shift, slope):
    return ((x.to(tl.float64) - shift) * slope).to(tl.float32)


@triton.jit
def _write_token(row, d, shift, slope, own_x, own_y, slot, tile: tl.constexpr):
    start = 0
    while start < d:
        column = start + tl.arange(0, tile)
        x = tl.load(row + column, mask=column < d, other=0).to(tl.float32)
        tl.store(own_x + slot * d + column, x, mask=column < d)
        tl.store(own_y + slot * d + column, _y(x, shift, slope), mask=column < d)
        start += tile


@triton.jit
def _write_grouped_token(row, d, shift, slope, own_x, own_y, slot, width: tl.constexpr, tile: tl.constexpr):
    """Store the elements that :func:`normscope.pairs.sums.sampling.evenly` takes of a token."""
    low = tl.full((tile,), float("inf"), tl.float32)
    high = tl.full((tile,), float("-inf"), tl.float32)
    start = 0
    while start < d:
        column = start + tl.arange(0, tile)
        x = tl.load(row + column, mask=column < d, other=0).to(tl.float32)
        low = tl.minimum(low, tl.where(column < d, x, float("inf")))
        high = tl.maximum(high, tl.where(column < d, x, float("-inf")))
        start += tile
    number = tl.arange(0, width)
    x = tl.load(row + number.to(tl.int64) * d // width).to(tl.float32)
    x = tl.where(number == 0, tl.min(low, 0), tl.where(number == width - 1, tl.max(high, 0), x))
    tl.store(own_x + slot * width + number, x)
    tl.store(own_y + slot * width + number, _y(x, shift, slope))


@triton.jit
def _draw_tokens(
    rows, keys, shift, rstd, reach, numbers, samples, own_rank, own_key, own_x, own_y, own_rstd, own_position,
    own_sample, candidates, number, n, d, cut, places: tl.constexpr, by_reach: tl.constexpr,
    grouped_width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Let the ``number`` candidates compete for the places of one sample: the best replaces the last while it may.

    Candidates have keys below the ``cut``. If they are fewer than the places, all ``n`` tokens compete.
    """
    slots = tl.arange(0, places)
    ranks, kept_keys = tl.load(own_rank + slots), tl.load(own_key + slots)
    chosen = tl.full((places,), -1, tl.int32)
    last_rank, last_key, slot = _last(ranks, kept_keys, slots)
    uncut = (number < places) & (last_key > cut)
    number = tl.where(uncut, n, number)
    start = 0
    while start < number:
        index = start + tl.arange(0, tile)
        token = tl.where(uncut, index, tl.load(candidates + index, mask=(index < number) & (uncut == 0), other=n))
        key = tl.load(keys + token, mask=token < n, other=KEYLESS)
        rank = tl.zeros((tile,), tl.float64)
        if by_reach:
            rank -= tl.load(reach + token, mask=token < n, other=0)
        offered = (key != KEYLESS) & _before(rank, key, last_rank, last_key)
        while tl.max(offered.to(tl.int32), 0) > 0:
            best_rank = tl.min(tl.where(offered, rank, float("inf")), 0)
            best_key = tl.min(tl.where(offered & (rank == best_rank), key, KEYLESS), 0)
            best = tl.min(tl.where(offered & (rank == best_rank) & (key == best_key), token, n), 0)
            chosen = tl.where(slots == slot, best, chosen)
            ranks = tl.where(slots == slot, best_rank, ranks)
            kept_keys = tl.where(slots == slot, best_key, kept_keys)
            last_rank, last_key, slot = _last(ranks, kept_keys, slots)
            offered &= (token != best) & _before(rank, key, last_rank, last_key)
        start += tile
    tl.store(own_rank + slots, ranks)
    tl.store(own_key + slots, kept_keys)
    slot = tl.max(tl.where(chosen >= 0, slots, -1), 0)
    while slot >= 0:
        best = tl.max(tl.where(slots == slot, chosen, -1), 0)
        row, own_shift, slope = rows + best.to(tl.int64) * d, tl.load(shift + best), tl.load(rstd + best)
        if grouped_width:
            _write_grouped_token(row, d, own_shift, slope, own_x, own_y, slot, grouped_width, tile)
        else:
            _write_token(row, d, own_shift, slope, own_x, own_y, slot, tile)
        tl.store(own_rstd + slot, slope.to(tl.float32))
        tl.store(own_position + slot, tl.load(numbers + best))
        tl.store(own_sample + slot, tl.load(samples + best))
        slot = tl.max(tl.where((chosen >= 0) & (slots < slot), slots, -1), 0)


@triton.jit
def _draw_pairs(
    row, key, shift, slope, first_channel, positions, d, pair_keys, pair_x, pair_y, pair_channel, tile: tl.constexpr,
):  # fmt: skip
    """Store those pairs of a token that have won their places."""
    element = ((key >> 8) & ONE_IN - 1) + tl.arange(0, tile) * ONE_IN
    while tl.min(element, 0) < d:
        x = tl.load(row + element, mask=element < d, other=0).to(tl.float32)
        pair_key, slot = pair_of(key, element, x)
        won = (element < d) & (pair_key == tl.load(pair_keys + slot))
        tl.store(pair_x + slot, x, mask=won)
        tl.store(pair_y + slot, _y(x, shift, slope), mask=won)
        tl.store(pair_channel + slot, (first_channel + element // positions).to(tl.int32), mask=won)
        element += ONE_IN * tile


@triton.jit(do_not_specialize=["n", "cut", "groups", "per_token"])
def draw(
    rows, keys, shift, rstd, reach, competing, numbers, samples, candidates, scratch, token_rank, token_key, token_x,
    token_y, token_rstd, token_position, token_sample, largest_rank, largest_key, largest_x, largest_y, largest_rstd,
    largest_position, largest_sample, pair_keys, pair_x, pair_y, pair_channel, n, d, cut, groups, per_token, positions,
    cells: tl.constexpr, uniform: tl.constexpr, largest: tl.constexpr, grouped_width: tl.constexpr,
    at_once: tl.constexpr, tile: tl.constexpr, pairs_tile: tl.constexpr,
):  # fmt: skip
    """Fill the samples: the first program the uniform one, the second the largest, all others the single pairs.

    ``rows`` are ``(n, d)``; the other inputs come from the previous kernels. The samples are those of
    :class:`TokenSample`, with ``uniform`` and ``largest`` places, and :class:`PairSample`. Of a token that is a group
    they store ``grouped_width`` elements, which is zero otherwise. A token has ``per_token`` channels, each of
    ``positions`` neighbouring elements. Each of the other programs handles ``at_once`` tokens.
    """
    program = tl.program_id(0)
    if program == 0:
        _draw_tokens(
            rows, keys, shift, rstd, reach, numbers, samples,
            token_rank, token_key, token_x, token_y, token_rstd, token_position, token_sample,
            candidates, tl.load(offered_of(scratch, cells)), n, d, cut, uniform, False, grouped_width, tile,
        )  # fmt: skip
    elif program == 1:
        _draw_tokens(
            rows, keys, shift, rstd, reach, numbers, samples,
            largest_rank, largest_key, largest_x, largest_y, largest_rstd, largest_position, largest_sample,
            candidates + n, tl.load(offered_of(scratch, cells) + 1), n, d, KEYLESS, largest, True, grouped_width, tile,
        )  # fmt: skip
    else:
        token = (program - 2) * at_once + tl.arange(0, at_once)
        waiting = tl.where(tl.load(competing + token, mask=token < n, other=0) > 0, token, n)
        while tl.min(waiting, 0) < n:
            drawn = tl.min(waiting, 0)
            _draw_pairs(
                rows + drawn.to(tl.int64) * d, tl.load(keys + drawn), tl.load(shift + drawn), tl.load(rstd + drawn),
                drawn % groups * per_token, positions, d, pair_keys, pair_x, pair_y, pair_channel, pairs_tile,
            )  # fmt: skip
            waiting = tl.where(waiting == drawn, n, waiting)


COUNTED = 2**24  # float32 counts no further

_DENSITY_X, _DENSITY_Y = tl.constexpr(DENSITY_X_GRID.from_bits), tl.constexpr(DENSITY_Y_GRID.from_bits)
_DENSITY_Y_BINS = tl.constexpr(DENSITY_Y_GRID.size)
_COARSER = tl.constexpr(PAIR_GRID.mantissa_bits - DENSITY_X_GRID.mantissa_bits)  # of two grids with the same octaves
_ALL_BUT_ONE = tl.constexpr(2**_COARSER.value - 1)
_CENTRE = tl.constexpr(PAIR_GRID.centre)
_LEAST = tl.constexpr(2.0**PAIR_GRID.low)
_LEAST_BITS = tl.constexpr((PAIR_GRID.low + 127) << 23)
_WORDS = tl.constexpr(len(MOMENTS))
_HALF = tl.constexpr(GATHERED.value // 2)
_HALF_A_BIN = tl.constexpr(1 << 22 - PAIR_GRID.mantissa_bits)  # in bits of float32
_BIN = tl.constexpr(-(1 << 23 - PAIR_GRID.mantissa_bits))
_LEADING_BITS = tl.constexpr(-(1 << 16))  # sign, exponent and eight bits of the number, the implied one among them


@triton.jit
def _load(rows, keys, row, column, n_rows, width, per_token):
    """Return the keys of some rows' tokens, and x, NaN where it does not count."""
    key = tl.load(keys + row // per_token, mask=row < n_rows, other=KEYLESS)
    inside = (key != KEYLESS)[:, None] & (column < width)
    places = rows + row.to(tl.int64)[:, None] * width + column
    return key, tl.load(places, mask=inside, other=float("nan")).to(tl.float32)


@triton.jit
def _places(x):
    """Return the distance of x from the bin of zero: unsigned, signed, and signed on the density's grid.

    Beyond the grid these are arbitrary numbers, the first of them at least the grid's :data:`_CENTRE`.
    """
    bits = x.to(tl.int32, bitcast=True)
    away = ((bits & 0x7FFFFFFF) >> PAIR[0]) - PAIR[1]
    coarsely = (away + _ALL_BUT_ONE) >> _COARSER
    return away, tl.where(bits < 0, -away, away), tl.where(bits < 0, -coarsely, coarsely)


@triton.jit
def _gather(scratch, cell, off, y):
    """Add the eight words of each pair to its cell of the scratch.

    With δ = x − the centre of its bin, exact in float32, they are 1, δ, y, δ², δy, y². Both y and y² are two words:
    the leading eight bits, of which 65,536 equal ones add up without rounding, and the rest. Two neighbouring lanes add
    four words each, so that a pair writes to one sector of memory.
    """
    word = tl.arange(0, GATHERED)[None, :]
    second, term = word >= _HALF, word % _HALF
    off, y = off[:, None], y[:, None]
    by_off, by_y = tl.where(second, off, 1.0), tl.where(second, y, 1.0)
    last = y * by_y
    leading = (last.to(tl.int32, bitcast=True) & _LEADING_BITS).to(tl.float32, bitcast=True)
    words = tl.where(term == 0, by_off * by_off, off * by_y)
    words = tl.where(term < 2, words, tl.where(term == 2, leading, last - leading))
    tl.atomic_add(scratch + cell[:, None] * GATHERED + word, words, sem="relaxed")


@triton.jit
def _add_directly(moments, density, centre, x, shift, slope, mask):
    """Add pairs to the sums directly; those in the bin of zero row by row, as they may be all pairs.

    ``centre`` is the cell of that bin in each row's fold.
    """
    near_shift, near_slope = shift.to(tl.float32)[:, None], slope.to(tl.float32)[:, None]
    y_bin = bin_of((x - near_shift) * near_slope, _DENSITY_Y)
    joint = bin_of(x, _DENSITY_X) * _DENSITY_Y_BINS + y_bin
    y_bin_of_zero = bin_of((tl.zeros_like(near_shift) - near_shift) * near_slope, _DENSITY_Y)
    central = mask & (tl.abs(x) < _LEAST)
    alike = central & (y_bin == y_bin_of_zero)
    zero_cell = tl.sum(y_bin_of_zero, 1) + _DENSITY_X[2] * _DENSITY_Y_BINS
    number = tl.sum(alike.to(tl.int32), 1).to(tl.int64)
    tl.atomic_add(density + zero_cell, number, mask=number > 0, sem="relaxed")
    tl.atomic_add(density + joint, tl.full(x.shape, 1, tl.int64), mask=mask & (alike == 0), sem="relaxed")
    wide = x.to(tl.float64)
    y = (wide - shift[:, None]) * slope[:, None]
    beyond = centre[:, None] + bin_of(x, PAIR) - _CENTRE
    holds = tl.max(central.to(tl.int32), 1) > 0
    for word in tl.static_range(_WORDS):
        values = tl.full(x.shape, 1.0, tl.float64)
        if word == 1 or word == 3 or word == 4:
            values *= wide
        if word == 3:
            values *= wide
        if word == 2 or word == 4 or word == 5:
            values *= y
        if word == 5:
            values *= y
        total = tl.sum(tl.where(central, values, 0), 1)
        tl.atomic_add(moments + centre * _WORDS + word, total, mask=holds, sem="relaxed")
        tl.atomic_add(moments + beyond * _WORDS + word, values, mask=mask & (central == 0), sem="relaxed")


@triton.jit
def _compete(rows, key, before, left, width, pair_keys, tile: tl.constexpr):
    """Let one in :data:`ONE_ELEMENT_IN` pairs of a tile compete, and return which rows won a place.

    ``rows`` point to the rows, ``(rows, 1)``, which begin at the element ``before`` of their tokens.
    """
    column = left + ((key >> 8) - before - left & ONE_IN - 1)[:, None] + tl.arange(0, tile // ONE_IN)[None, :] * ONE_IN
    inside = (key != KEYLESS)[:, None] & (column < width)
    x = tl.load(rows + column, mask=inside, other=0).to(tl.float32)
    pair_key, slot = pair_of(key[:, None], before[:, None] + column, x)
    beats = inside & (pair_key < tl.load(pair_keys + slot, mask=inside, other=0))
    tl.atomic_min(pair_keys + slot, pair_key, mask=beats, sem="relaxed")
    return tl.max(beats.to(tl.int32), 1) > 0


@triton.jit
def _add_to_channels(sums, extremes, channel, channels, total, squares, low, high, mask):
    tl.atomic_add(sums + channel, total, mask=mask, sem="relaxed")
    tl.atomic_add(sums + channels + channel, squares, mask=mask, sem="relaxed")
    tl.atomic_min(extremes + channel, low, mask=mask, sem="relaxed")
    tl.atomic_max(extremes + channels + channel, high, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["n_rows", "first_row", "first_column", "steps", "groups"])
def add_pairs(
    rows, keys, folds, shift, rstd, competing, scratch, moments, density, channel_sums, channel_extremes, pair_keys,
    n_rows, width, first_row, first_column, steps, per_token, groups, channels, cells: tl.constexpr,
    grouped: tl.constexpr, at_once: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Add the pairs of all tokens that count, and let those compete that may be drawn.

    Elements are ``(n_rows, width)``: rows are tokens and columns channels or, where tokens are groups, rows are the
    ``per_token`` channels of every token and columns their positions. Each program adds ``at_once`` rows, ``steps``
    times, of ``tile`` columns, a multiple of eight; the first begins at ``first_row`` and ``first_column``.
    :func:`describe` provides the inputs per token. ``scratch``, float32 ``(cells + at_once · tile, GATHERED)``, has one
    cell for each fold and bin, for :func:`flush`, and behind them cells for pairs that are not gathered. ``competing``
    becomes 1 where a pair won a place; only its key is stored here.
    """
    left = first_column + tl.program_id(0) * tile
    column = left + tl.arange(0, tile)[None, :]
    nowhere = cells + tl.arange(0, at_once)[:, None] * tile + tl.arange(0, tile)[None, :]
    total = tl.zeros((at_once, tile), tl.float64)
    squares = tl.zeros((at_once, tile), tl.float64)
    low = tl.full((at_once, tile), float("inf"), tl.float32)
    high = tl.full((at_once, tile), float("-inf"), tl.float32)
    row = first_row + tl.program_id(1) * steps * at_once + tl.arange(0, at_once)
    key, x = _load(rows, keys, row, column, n_rows, width, per_token)  # one step ahead
    step = 0
    while step < steps:
        token = row // per_token
        counted = key != KEYLESS
        fold = tl.load(folds + token, mask=counted, other=0)
        own_shift = tl.load(shift + token, mask=counted, other=0)
        slope = tl.load(rstd + token, mask=counted, other=0)
        near_shift, near_slope = own_shift.to(tl.float32), slope.to(tl.float32)[:, None]
        residual = (own_shift - near_shift.to(tl.float64)).to(tl.float32)
        distance = x - near_shift[:, None]
        y_bin = bin_of(distance * near_slope, _DENSITY_Y)
        away, bins, coarse_bins = _places(x)
        limit = tl.where(fold < 0, 0, _CENTRE - 1).to(tl.uint32)
        gathered = (away - 1).to(tl.uint32, bitcast=True) < limit[:, None]  # which NaN never is
        centre = tl.where(fold < 0, ~fold, fold) * PAIR_BINS + _CENTRE
        cell = tl.where(gathered, centre[:, None] + bins, nowhere)
        middle = ((x.to(tl.int32, bitcast=True) & _BIN) | _HALF_A_BIN).to(tl.float32, bitcast=True)
        y = (distance - residual[:, None]) * near_slope
        flat: tl.constexpr = (at_once * tile,)
        _gather(scratch, cell.reshape(flat), (x - middle).reshape(flat), y.reshape(flat))
        joint = (coarse_bins + _DENSITY_X[2]) * _DENSITY_Y_BINS + y_bin
        tl.atomic_add(density + joint, tl.full((at_once, tile), 1, tl.int64), mask=gathered, sem="relaxed")
        is_number = x == x
        left_over = is_number & (gathered == 0)
        if tl.max(tl.max(left_over.to(tl.int32), 1), 0) > 0:
            _add_directly(moments, density, centre, x, own_shift, slope, left_over)
        own_rows = rows + row.to(tl.int64)[:, None] * width
        took = _compete(own_rows, key, row % per_token * width, left, width, pair_keys, tile)
        tl.store(competing + token, 1, mask=took)
        wide = tl.where(is_number, x, 0).to(tl.float64)
        if grouped:
            channel = token % groups * per_token + row % per_token
            sums = tl.sum(wide, 1), tl.sum(wide * wide, 1)
            least = tl.min(tl.where(is_number, x, float("inf")), 1)
            most = tl.max(tl.where(is_number, x, float("-inf")), 1)
            _add_to_channels(channel_sums, channel_extremes, channel, channels, *sums, least, most, counted)
        else:
            total += wide
            squares += wide * wide
            low = tl.minimum(low, tl.where(is_number, x, float("inf")))
            high = tl.maximum(high, tl.where(is_number, x, float("-inf")))
        step += 1
        row += at_once
        key, x = _load(rows, keys, row, column, tl.where(step < steps, n_rows, 0), width, per_token)
    if not grouped:
        channel = left + tl.arange(0, tile)
        sums = tl.sum(total, 0), tl.sum(squares, 0)
        _add_to_channels(
            channel_sums, channel_extremes, channel, channels, *sums, tl.min(low, 0), tl.max(high, 0), channel < width
        )


@triton.jit
def flush(scratch, moments, cells, tile: tl.constexpr):
    """Add the gathered ``cells`` to the sums, and leave zeros; each program ``tile`` of them."""
    cell = tl.program_id(0) * tile + tl.arange(0, tile)
    gathered, sums = scratch + cell * GATHERED, moments + cell * _WORDS
    n = tl.load(gathered, mask=cell < cells, other=0).to(tl.float64)
    filled = n > 0
    off = tl.load(gathered + 1, mask=filled, other=0).to(tl.float64)
    y = tl.load(gathered + 2, mask=filled, other=0).to(tl.float64) + tl.load(gathered + 3, mask=filled, other=0).to(
        tl.float64
    )
    off_off = tl.load(gathered + 4, mask=filled, other=0).to(tl.float64)
    off_y = tl.load(gathered + 5, mask=filled, other=0).to(tl.float64)
    yy = tl.load(gathered + 6, mask=filled, other=0).to(tl.float64) + tl.load(gathered + 7, mask=filled, other=0).to(
        tl.float64
    )
    steps = cell % PAIR_BINS - _CENTRE
    size = ((2 * tl.abs(steps) - 1) * _HALF_A_BIN + _LEAST_BITS).to(tl.float32, bitcast=True).to(tl.float64)
    x = tl.where(steps < 0, -size, size)
    tl.store(sums, tl.load(sums, mask=filled) + n, mask=filled)
    tl.store(sums + 1, tl.load(sums + 1, mask=filled) + (x * n + off), mask=filled)
    tl.store(sums + 2, tl.load(sums + 2, mask=filled) + y, mask=filled)
    tl.store(sums + 3, tl.load(sums + 3, mask=filled) + (x * x * n + 2 * x * off + off_off), mask=filled)
    tl.store(sums + 4, tl.load(sums + 4, mask=filled) + (x * y + off_y), mask=filled)
    tl.store(sums + 5, tl.load(sums + 5, mask=filled) + yy, mask=filled)
    for word in tl.static_range(GATHERED):
        tl.store(gathered + word, tl.zeros((tile,), tl.float32), mask=filled)
