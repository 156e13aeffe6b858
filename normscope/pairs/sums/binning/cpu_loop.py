"""The loop itself, as numba compiles it. Every step is one plain loop over neighbouring numbers, so that it vectorizes.

Integers are cast to 32 bits at every step, since numba would continue in 64, at half the speed. All compiled code is in
this file: numba's cache is valid until the file of the called function changes, and ignores other files. A change of
the grids or of the samples' constants therefore takes a change here.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from normscope.norms.formulas import BESIDE_ROOT, BOUNDS_LENGTH, BOUNDS_SQUARE
from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, PAIR_GRID, TOKEN_GRID
from normscope.pairs.sums.sampling import GOLDEN, MIX, NO_KEY, ONE_ELEMENT_IN, PAIRS_PER_BIN, TokenSample
from normscope.runtime.compiled_loops import compiled

Array = NDArray[Any]

_i4 = np.int32
# Numbers of tokens, and of elements of each, that one step after the other processes: what the steps read and write
# again stays in the first-level cache.
_TOKENS = 32
_ELEMENTS = 1024
_BYTES_OF_A_BIN = 48
_UNCOUNTED = -1.0
_DENSITY_Y_BINS = _i4(DENSITY_Y_GRID.size)

_u8 = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = (_u8(number % 2**64) for number in (GOLDEN, *MIX))
_NO_KEY = _u8(NO_KEY)


_called = compiled()
_exact = compiled(within=True)
# Sums may be added up in any order, as vector instructions do; a NaN or an infinity stays what it is.
_any_order = compiled(fastmath={"reassoc", "contract"}, within=True)
_finite = compiled(fastmath={"nnan", "nsz", "reassoc"}, within=True)


class Rows(NamedTuple):
    """Tokens for :func:`fill`, and what it writes down of each."""

    rows: Any  # float32 (tokens, d)
    valid: Any  # False for padding, bool (tokens,)
    form: tuple[bool, bool, int, int]  # centred, about_mean, correction and eps_at of a Form
    eps: float  # of that form
    given: bool  # whether shift and rstd are given, in place of a form
    groups: int  # of channels; 1 where a token contains all channels
    positions: int  # number of neighbouring elements of a token that are of one channel
    # Number of each place in a token, uint64 (step, ≥ d / step): each row contains the places, one in ``step``, that
    # compete for single pairs together.
    element_keys: Any
    keys: Any  # filled with the key of each token that counts, int64 (tokens,)
    shift: Any  # filled with its shift, float64 (tokens,)
    rstd: Any  # filled with its slope, float64 (tokens,)
    squares: Any  # filled with its Σx², float64 (tokens,)
    reach: Any  # filled with its max |x|, float32 (tokens,); −1 for a token that does not count
    position: Any  # filled with its number within its sample, int64 (tokens,)
    sample: Any  # filled with that sample's number, int64 (tokens,)


class Sums(NamedTuple):
    """The arrays of a :class:`SiteSums` that a thread fills."""

    moments: Any  # float64 (folds · bins, 6)
    density: Any  # int64 (x bins · y bins,)
    pair_key: Any  # int64 (PAIRS_PER_BIN, bins)
    pair_x: Any  # float32, likewise
    pair_y: Any  # float32, likewise
    pair_channel: Any  # int32, likewise
    position_sums: Any
    first_moments: Any
    channel_sums: Any
    channel_extremes: Any
    token_offsets: Any
    token_scales: Any
    nonfinite_tokens: Any


# The arrays of a TokenSample with all its places: free ones have the largest rank and key.
SampleArrays: Any = namedtuple("SampleArrays", [field.name for field in fields(TokenSample)])  # type: ignore[misc]


_PAIR, _DENSITY_X, _DENSITY_Y, _TOKEN = (
    tuple(map(np.int32, grid.from_bits)) for grid in (PAIR_GRID, DENSITY_X_GRID, DENSITY_Y_GRID, TOKEN_GRID)
)
_PAIR_BINS = PAIR_GRID.size
_JOINED = _i4(PAIR_GRID.mantissa_bits - DENSITY_X_GRID.mantissa_bits)  # 2**_JOINED bins of pairs are one of the density


@intrinsic
def _add_pair(typing_context: Any, row: Any, x: Any, y: Any) -> Any:
    """Add 1, x, y, x², xy, y² to the six neighbouring float64 at an address: three additions of two each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, x, y = arguments
        double, index = ir.DoubleType(), ir.IntType(32)
        pair = ir.VectorType(double, 2)

        def both(first: Any, second: Any) -> Any:
            half = builder.insert_element(ir.Constant(pair, ir.Undefined), first, index(0))
            return builder.insert_element(half, second, index(1))

        unit = double(1.0)
        products = (both(unit, x), builder.fmul(both(y, x), both(unit, x)), builder.fmul(both(x, y), both(y, y)))
        for number, added in enumerate(products):
            address = builder.inttoptr(builder.add(row, ir.IntType(64)(16 * number)), pair.as_pointer())
            before = builder.load(address)
            before.align = 16
            builder.store(builder.fadd(before, added), address).align = 16
        return context.get_dummy_value()

    return types.void(types.uint64, types.float64, types.float64), generate


@_exact
def _steps(bits: Any, shift: Any, below: Any, centre: Any) -> Any:
    """Return the distance in bins from the central one of a float32 number with these bits."""
    steps = _i4(_i4(_i4(bits & _i4(0x7FFFFFFF)) >> shift) - below)
    return _i4(min(_i4(max(steps, _i4(0))), centre))


@_exact
def _to_either_side(steps: Any, bits: Any, centre: Any) -> Any:
    sign = _i4(bits >> _i4(31))
    return _i4(_i4(_i4(steps ^ sign) - sign) + centre)


@_exact
def _bin(bits: Any, shift: Any, below: Any, centre: Any) -> Any:
    """Return :meth:`FloatGrid.index` of a float32 number of these bits."""
    return _to_either_side(_steps(bits, shift, below, centre), bits, centre)


@_any_order
def _total(row: Any) -> float:
    total = 0.0
    for j in range(row.size):
        total += np.float64(row[j])
    return total


@_any_order
def _squares(row: Any, centre: float) -> float:
    total = 0.0
    for j in range(row.size):
        distance = np.float64(row[j]) - centre
        total += distance * distance
    return total


@_exact
def _largest_magnitude(bits: Any) -> Any:
    """Return the bits of max |x|; without their sign, bits ascend as the floats do, with NaN beyond infinity."""
    largest = _i4(0)
    for j in range(bits.size):
        largest = max(largest, _i4(bits[j] & _i4(0x7FFFFFFF)))
    return largest


@_exact
def _line(row: Any, eps: float, form: Any) -> Any:
    """Return :meth:`Form.line` of a token, and its Σx²."""
    centred, about_mean, correction, eps_at = form
    mean = _total(row) / row.size if about_mean else 0.0
    squares = _squares(row, mean)
    shift, total_squares = mean if centred else 0.0, squares + row.size * mean * mean
    mean_square = squares / (row.size - correction)
    if eps_at == BOUNDS_LENGTH:
        return shift, np.sqrt(row.size) / max(np.sqrt(squares), eps), total_squares
    if eps_at == BOUNDS_SQUARE:
        return shift, 1 / np.sqrt(max(mean_square, eps)), total_squares
    if eps_at == BESIDE_ROOT:
        return shift, 1 / (np.sqrt(mean_square) + eps), total_squares
    return shift, 1 / np.sqrt(mean_square + eps), total_squares


@_exact
def _mixed(z: Any) -> Any:
    z = (z ^ (z >> _u8(30))) * _MIX_1
    z = (z ^ (z >> _u8(27))) * _MIX_2
    return (z ^ (z >> _u8(31))) & _NO_KEY


# Numba compiles each function twice, without the branches that a None decides: for tokens with lines, whose ``given``
# is None, and for tokens with a given y, float64 (tokens, d).
@_exact
def _part(tokens: Any, given: Any, t: int, first: int, stop: int) -> Any:
    """Return x of a part of a token, its shift and rstd, and y of the part if it is given."""
    part = None if given is None else given[t, first:stop]
    return tokens.rows[t, first:stop], tokens.shift[t], tokens.rstd[t], part


@_exact
def _y(row: Any, shift: float, rstd: float, given: Any, j: int) -> float:
    if given is None:
        return (np.float64(row[j]) - shift) * rstd
    return given[j]  # type: ignore[no-any-return]


@_exact
def _index(row: Any, shift: float, rstd: float, given: Any, y: Any, bins: Any, cells: Any) -> None:
    """Find the bins of x and the cells of (x, y) of a part of a token."""
    bits, y_bits = row.view(np.int32), y.view(np.int32)
    narrow_shift, narrow_rstd = np.float32(shift), np.float32(rstd)
    for j in range(row.size):
        if given is None:
            y[j] = (row[j] - narrow_shift) * narrow_rstd
        else:
            y[j] = given[j]
    round_up = _i4((1 << _JOINED) - 1)
    for j in range(row.size):
        steps = _steps(bits[j], *_PAIR)
        bins[j] = _to_either_side(steps, bits[j], _PAIR[2])
        steps = _i4(_i4(steps + round_up) >> _JOINED)
        x_bin, y_bin = _to_either_side(steps, bits[j], _DENSITY_X[2]), _bin(y_bits[j], *_DENSITY_Y)
        cells[j] = _i4(_i4(x_bin * _DENSITY_Y_BINS) + y_bin)


@_exact
def _add_pairs(
    row: Any, shift: float, rstd: float, given: Any, bins: Any, cells: Any, first_cell: Any, sums: Any
) -> None:
    first_row, density, fours = _u8(sums.moments[first_cell:].ctypes.data), sums.density, row.size - row.size % 4
    for first in range(0, fours, 4):
        for j in range(first, first + 4):
            _add_moments(row, shift, rstd, given, j, first_row + _u8(bins[j]) * _u8(_BYTES_OF_A_BIN))
        for j in range(first, first + 4):
            density[_u8(cells[j])] += 1
    for j in range(fours, row.size):
        _add_moments(row, shift, rstd, given, j, first_row + _u8(bins[j]) * _u8(_BYTES_OF_A_BIN))
        density[_u8(cells[j])] += 1


@_exact
def _add_moments(row: Any, shift: float, rstd: float, given: Any, j: int, address: Any) -> None:
    _add_pair(address, np.float64(row[j]), _y(row, shift, rstd, given, j))  # type: ignore[call-arg]


@_exact
def _draw_pairs(tokens: Any, given: Any, t: int, first: int, stop: int, bins: Any, sums: Any) -> None:
    """Let some pairs of a part of a token compete for the places of their bins, as in :meth:`PairSample.add`."""
    key, step, last_slot = _u8(tokens.keys[t]), ONE_ELEMENT_IN, _u8(PAIRS_PER_BIN - 1)
    start = np.int64((key >> _u8(8)) % _u8(step))
    element_keys = tokens.element_keys[start, first // step :]
    for i in range((stop - first - start + step - 1) // step):
        j = start + i * step
        drawn = ((key ^ element_keys[i]) * _MIX_1) & _NO_KEY
        slot, bin_ = drawn & last_slot, _u8(bins[j])
        if np.int64(drawn) < sums.pair_key[slot, bin_]:
            row, shift, rstd, part = _part(tokens, given, t, first, stop)
            channels = tokens.rows.shape[1] // tokens.positions
            channel = t % tokens.groups * channels + (first + j) // tokens.positions
            _put(sums, slot, bin_, np.int64(drawn), row[j], _y(row, shift, rstd, part, j), channel)


@_exact
def _put(sums: Any, slot: Any, bin_: Any, key: Any, x: Any, y: Any, channel: Any) -> None:
    sums.pair_key[slot, bin_], sums.pair_channel[slot, bin_] = key, channel
    sums.pair_x[slot, bin_], sums.pair_y[slot, bin_] = x, y


@_exact
def _add_block(tokens: Any, given: Any, block: Any, first_cell: Any, sums: Any, y: Any, bins: Any, cells: Any) -> None:
    """Add the pairs of some finite tokens, one step after the other for a part of each."""
    rows, d = tokens.rows, tokens.rows.shape[1]
    plain = tokens.positions == 1 and tokens.groups == 1
    for first in range(0, d, _ELEMENTS):
        stop = min(first + _ELEMENTS, d)
        for i in range(block.size):
            row, shift, rstd, part = _part(tokens, given, block[i], first, stop)
            _index(row, shift, rstd, part, y, bins[i], cells[i])
        for i in range(block.size):
            row, shift, rstd, part = _part(tokens, given, block[i], first, stop)
            _add_pairs(row, shift, rstd, part, bins[i], cells[i], first_cell, sums)
        for i in range(block.size):
            _draw_pairs(tokens, given, block[i], first, stop, bins[i], sums)
        if plain:
            _add_to_channels(rows, block, first, stop, sums)
    if not plain:
        for t in block:
            _add_token_to_channels(tokens, t, sums)


@_exact
def _add_to_channels(rows: Any, block: Any, first: int, stop: int, sums: Any) -> None:
    """Add a part of finite tokens with one element per channel to the channels' sums, four for one load and store."""
    total, squares = sums.channel_sums[0, first:stop], sums.channel_sums[1, first:stop]
    low, high = sums.channel_extremes[0, first:stop], sums.channel_extremes[1, first:stop]
    fours = block.size - block.size % 4
    for i in range(0, fours, 4):
        one, two = rows[block[i], first:stop], rows[block[i + 1], first:stop]
        three, four = rows[block[i + 2], first:stop], rows[block[i + 3], first:stop]
        for j in range(one.size):
            a, b, c, d = np.float64(one[j]), np.float64(two[j]), np.float64(three[j]), np.float64(four[j])
            total[j] += (a + b) + (c + d)
            squares[j] += (a * a + b * b) + (c * c + d * d)
        for j in range(one.size):
            low[j] = _lesser(low[j], _lesser(_lesser(one[j], two[j]), _lesser(three[j], four[j])))
            high[j] = _greater(high[j], _greater(_greater(one[j], two[j]), _greater(three[j], four[j])))
    for i in range(fours, block.size):
        row = rows[block[i], first:stop]
        for j in range(row.size):
            x = np.float64(row[j])
            total[j] += x
            squares[j] += x * x
            low[j], high[j] = _lesser(low[j], row[j]), _greater(high[j], row[j])


@_exact
def _lesser(a: Any, b: Any) -> Any:
    return a if a < b else b


@_exact
def _greater(a: Any, b: Any) -> Any:
    return a if a > b else b


@_finite
def _extremes(row: Any) -> Any:
    low = high = row[0]
    for j in range(1, row.size):
        low, high = min(low, row[j]), max(high, row[j])
    return low, high


@_exact
def _add_token_to_channels(tokens: Any, t: int, sums: Any) -> None:
    """Add one finite token to the sums of its channels."""
    positions = tokens.positions
    channels = tokens.rows.shape[1] // positions
    for number in range(channels):
        elements = tokens.rows[t, number * positions : (number + 1) * positions]
        low, high = _extremes(elements)
        channel = t % tokens.groups * channels + number
        sums.channel_sums[0, channel] += _total(elements)
        sums.channel_sums[1, channel] += _squares(elements, 0.0)
        sums.channel_extremes[0, channel] = min(sums.channel_extremes[0, channel], low)
        sums.channel_extremes[1, channel] = max(sums.channel_extremes[1, channel], high)


@_exact
def _add_scalars(tokens: Any, t: int, sums: Any) -> None:
    """Count a finite token's mean/σ and σ."""
    mean = tokens.shift[t] if tokens.form[0] else _total(tokens.rows[t]) / tokens.rows.shape[1]
    offset, scale = np.float32(mean * tokens.rstd[t]), np.float32(1 / tokens.rstd[t])
    sums.token_offsets[_bin(offset.view(np.int32), *_TOKEN)] += 1
    sums.token_scales[_bin(scale.view(np.int32), *_TOKEN)] += 1


@_called
def fill(tokens: Any, given: Any, runs: Any, sums: Any) -> None:
    """Add the tokens of some runs to one thread's sums, and note the line, key and reach of each.

    Args:
        tokens: a :class:`Rows`.
        given: y, float64 ``(tokens, d)``; None where it follows from shift and rstd.
        runs: start, stop, fold, key, position and sample of each, int64 ``(runs, 6)``.
        sums: a :class:`Sums`.
    """
    magnitude_bits = np.empty(1, np.int32)
    magnitude = magnitude_bits.view(np.float32)
    shape = (_TOKENS, min(_ELEMENTS, tokens.rows.shape[1]))
    y, bins, cells = np.empty(_ELEMENTS, np.float32), np.empty(shape, np.int32), np.empty(shape, np.int32)
    block, filled = np.empty(_TOKENS, np.int64), 0
    for run in range(runs.shape[0]):
        start, stop, fold, sample_key, position, sample = runs[run]
        first_cell = fold * _PAIR_BINS
        for t in range(start, stop):
            tokens.reach[t] = _UNCOUNTED
            if not tokens.valid[t]:
                continue
            magnitude_bits[0] = _largest_magnitude(tokens.rows[t].view(np.int32))
            if tokens.given:
                tokens.squares[t] = _squares(tokens.rows[t], 0.0)
            else:
                tokens.shift[t], tokens.rstd[t], tokens.squares[t] = _line(tokens.rows[t], tokens.eps, tokens.form)
            if not (np.isfinite(magnitude[0]) and np.isfinite(tokens.shift[t] * tokens.rstd[t])):
                sums.nonfinite_tokens[0] += 1
                continue
            key = _mixed(_u8(sample_key) + _u8(position + t - start) * _GOLDEN)
            tokens.keys[t], tokens.reach[t] = np.int64(key), magnitude[0]
            tokens.position[t], tokens.sample[t] = position + t - start, sample
            _add_scalars(tokens, t, sums)
            block[filled] = t
            filled += 1
            if filled == _TOKENS:
                _add_block(tokens, given, block, first_cell, sums, y, bins, cells)
                filled = 0
        if filled:
            _add_block(tokens, given, block[:filled], first_cell, sums, y, bins, cells)
            filled = 0


@_exact
def _add_times(sums: Any, weight: float, x: float, y: float) -> None:
    """Add a pair to the six moments of a bin, times a weight."""
    weighted_x, weighted_y = weight * x, weight * y
    sums[0] += weight
    sums[1] += weighted_x
    sums[2] += weighted_y
    sums[3] += weighted_x * x
    sums[4] += weighted_x * y
    sums[5] += weighted_y * y


@_called
def add_weighted(tokens: Any, given: Any, runs: Any, weight: Any, moments: Any) -> None:
    """Add the pairs of the tokens that :func:`fill` has counted, each times the weight of its channel.

    ``weight`` is float64 ``(channels,)``, and ``moments`` float64 ``(folds · bins, 6)``; the rest as of :func:`fill`.
    """
    d, positions = tokens.rows.shape[1], tokens.positions
    for run in range(runs.shape[0]):
        start, stop, fold, _, _, _ = runs[run]
        for t in range(start, stop):
            if tokens.reach[t] < 0:
                continue
            row, shift, rstd, given_row = _part(tokens, given, t, 0, d)
            bits = row.view(np.int32)
            first_channel = t % tokens.groups * (d // positions)
            for j in range(d):
                x, y = np.float64(row[j]), _y(row, shift, rstd, given_row, j)
                cell = fold * _PAIR_BINS + _bin(bits[j], *_PAIR)
                _add_times(moments[_u8(cell)], weight[first_channel + j // positions], x, y)


@_called
def add_positions(tokens: Any, given: Any, positions: Any, first: int, sums: Any) -> None:
    """Add the tokens that :func:`fill` has counted, at ``positions`` ``(tokens,)``, to the sums by position."""
    last = sums.position_sums.shape[1] - 1
    for t in range(positions.size):
        if tokens.reach[t] < 0:
            continue
        sums.position_sums[0, min(positions[t], last)] += 1
        sums.position_sums[1, min(positions[t], last)] += tokens.squares[t]
        if positions[t] != first:
            continue
        row, shift, rstd, given_row = _part(tokens, given, t, 0, tokens.rows.shape[1])
        bits = row.view(np.int32)
        for j in range(row.size):
            y = _y(row, shift, rstd, given_row, j)
            _add_times(sums.first_moments[_u8(_bin(bits[j], *_PAIR))], 1.0, np.float64(row[j]), y)


@_called
def draw(tokens: Any, given: Any, grouped: bool, uniform: Any, largest: Any) -> None:
    """Let the tokens of a call compete for the places of two samples: those of least rank and key win.

    Args:
        tokens: a :class:`Rows` that has been filled.
        given: as of :func:`fill`; of tokens that are no groups.
        grouped: whether tokens are groups, whose drawn elements are those of :func:`evenly`.
        uniform: :data:`SampleArrays` in which all tokens have the same rank.
        largest: the same, in which a token's rank is -max |x|.
    """
    _draw_tokens(tokens, given, False, grouped, uniform)
    _draw_tokens(tokens, given, True, grouped, largest)


@_exact
def _draw_tokens(tokens: Any, given: Any, by_reach: bool, grouped: bool, sample: Any) -> None:
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
        _, shift, rstd, part = _part(tokens, given, t, 0, width)
        for i in range(width):
            sample.y[last, i] = _y(sample.x[last], shift, rstd, part, i)
        last = _last(sample)


@_exact
def _last(sample: Any) -> int:
    last = 0
    for i in range(1, sample.key.size):
        if (sample.rank[i], sample.key[i]) > (sample.rank[last], sample.key[last]):
            last = i
    return last


@_called
def join(sums: Any, further: Any) -> None:
    """Add the binned sums and drawn pairs of another thread, and leave them empty."""
    moments, added = sums.moments, further.moments
    for cell in range(added.shape[0]):
        if added[cell, 0] != 0:
            for i in range(added.shape[1]):
                moments[cell, i] += added[cell, i]
                added[cell, i] = 0
    density, counts = sums.density, further.density
    for first in range(0, counts.size, _DENSITY_Y_BINS):  # in rows: vector loads of pages without memory are slow
        row = counts[first : first + _DENSITY_Y_BINS]
        if row.sum() > 0:
            density[first : first + _DENSITY_Y_BINS] += row
            row[:] = 0
    kept_keys, keys = sums.pair_key, further.pair_key
    for slot in range(keys.shape[0]):
        for bin_ in range(keys.shape[1]):
            key = keys[slot, bin_]
            if key < kept_keys[slot, bin_]:
                x, y = further.pair_x[slot, bin_], further.pair_y[slot, bin_]
                _put(sums, slot, bin_, key, x, y, further.pair_channel[slot, bin_])
            keys[slot, bin_] = _NO_KEY
