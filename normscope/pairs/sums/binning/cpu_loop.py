"""The loop itself, as numba compiles it. Every step is one plain loop over neighbouring numbers, so that it vectorizes.

Integers are cast to 32 bits at every step, since numba would go on in 64, at half the speed. Everything compiled stands
in this file: numba keeps what it compiled until the file of the function that is called changes, and sees no other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import event
from numba.extending import intrinsic
from numpy.typing import NDArray

from normscope.pairs.sums.binning.compiled_loops import compiled
from normscope.pairs.sums.binning.cpu_arrays import Tile
from normscope.pairs.sums.sampling import GOLDEN, MIX, NO_KEY
from normscope.runtime.progress import report

Array = NDArray[Any]

_i4 = np.int32
_TILE = 1024  # elements of a token at a time, so that what is computed of them stays in the first-level cache
_BYTES_OF_A_BIN = 48
_TOGETHER = 4  # tokens that are added to the channels' sums at once, for a quarter of the loads and stores
_UNCOUNTED = -1.0

_u8 = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = (_u8(number % 2**64) for number in (GOLDEN, *MIX))
_NO_KEY = _u8(NO_KEY)


_exact = compiled()
# Sums may be added up in any order, as vector instructions do; a NaN or an infinity stays what it is.
_any_order = compiled(fastmath={"reassoc", "contract"})
_finite = compiled(fastmath={"nnan", "nsz", "reassoc"})


@intrinsic
def _add_pair(typing_context: Any, row: Any, x: Any, y: Any) -> Any:
    """Add 1, x, y, x², xy, y² to the six neighbouring float64 at an address: three additions of two each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, x, y = arguments
        double, place = ir.DoubleType(), ir.IntType(32)
        pair = ir.VectorType(double, 2)

        def both(first: Any, second: Any) -> Any:
            half = builder.insert_element(ir.Constant(pair, ir.Undefined), first, place(0))
            return builder.insert_element(half, second, place(1))

        one = double(1.0)
        products = (both(one, x), builder.fmul(both(y, x), both(one, x)), builder.fmul(both(x, y), both(y, y)))
        for number, added in enumerate(products):
            address = builder.inttoptr(builder.add(row, ir.IntType(64)(16 * number)), pair.as_pointer())
            before = builder.load(address)
            before.align = 16
            builder.store(builder.fadd(before, added), address).align = 16
        return context.get_dummy_value()

    return types.void(types.uint64, types.float64, types.float64), generate


@_exact
def _steps(bits: Any, shift: Any, lowest: Any, centre: Any) -> Any:
    """How many bins from the central one a float32 number of these bits lies."""
    # That the shift is below 32 lets the compiler stay within 32 bits.
    steps = _i4(_i4(_i4(bits & _i4(0x7FFFFFFF)) >> _i4(shift & _i4(31))) - lowest)
    return _i4(min(_i4(max(steps, _i4(0))), centre))


@_exact
def _to_either_side(steps: Any, bits: Any, centre: Any) -> Any:
    sign = _i4(bits >> _i4(31))
    return _i4(_i4(_i4(steps ^ sign) - sign) + centre)


@_exact
def _bin(bits: Any, shift: Any, lowest: Any, centre: Any) -> Any:
    """Return :meth:`FloatGrid.index` of a float32 number of these bits."""
    return _to_either_side(_steps(bits, shift, lowest, centre), bits, centre)


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
    """Bits of max |x|: those of floats without their sign ascend as the floats do, and a NaN lies beyond infinity."""
    largest = _i4(0)
    for j in range(bits.size):
        largest = max(largest, _i4(bits[j] & _i4(0x7FFFFFFF)))
    return largest


@_exact
def _line(row: Any, eps: float, form: Any) -> Any:
    """Return :meth:`Form.line` of a token."""
    centred, about_mean, correction, clamped = form
    mean = _total(row) / row.size if about_mean else 0.0
    squares = _squares(row, mean)
    shift = mean if centred else 0.0
    if clamped:
        return shift, np.sqrt(row.size) / max(np.sqrt(squares), eps)
    return shift, 1 / np.sqrt(squares / (row.size - correction) + eps)


@_exact
def _mixed(z: Any) -> Any:
    z = (z ^ (z >> _u8(30))) * _MIX_1
    z = (z ^ (z >> _u8(27))) * _MIX_2
    return (z ^ (z >> _u8(31))) & _NO_KEY


@_exact
def _index(row: Any, shift: float, rstd: float, constants: Any, tile: Any) -> None:
    """Find the bins of x and the cells of (x, y) of a tile."""
    bits, y_bits = row.view(np.int32), tile.y.view(np.int32)
    narrow_shift, narrow_rstd = np.float32(shift), np.float32(rstd)
    for j in range(row.size):
        tile.y[j] = (row[j] - narrow_shift) * narrow_rstd
    joined = _i4(constants.density_x[0] - constants.pair[0])  # two to this power of the pairs' bins are one here
    round_up = _i4((1 << joined) - 1)
    y_bins = _i4(_i4(2) * constants.density_y[2] + _i4(1))
    for j in range(row.size):
        steps = _steps(bits[j], *constants.pair)
        tile.bins[j] = _to_either_side(steps, bits[j], constants.pair[2])
        steps = _i4(_i4(steps + round_up) >> _i4(joined & _i4(31)))
        cell = _i4(_to_either_side(steps, bits[j], constants.density_x[2]) * y_bins)
        tile.cells[j] = _i4(cell + _bin(y_bits[j], *constants.density_y))


@_exact
def _add_pairs(row: Any, shift: float, rstd: float, tile: Any, moments: Any, density: Any) -> None:
    address = _u8(moments.ctypes.data)
    for j in range(row.size):
        density[_u8(tile.cells[j])] += 1
        x = np.float64(row[j])
        row_of_bin = address + _u8(tile.bins[j]) * _u8(_BYTES_OF_A_BIN)
        _add_pair(row_of_bin, x, (x - shift) * rstd)  # type: ignore[call-arg]


@_exact
def _draw_pairs(
    row: Any, line: Any, bins: Any, key: Any, element_keys: Any, channels: Any, constants: Any, sums: Any
) -> None:
    """Let some pairs of a tile compete for the places of their bins, as :meth:`PairSample.add` says.

    ``line`` is the token's shift and rstd. ``channels`` says how the tile's elements are numbered: the token's first
    channel, the tile's first element, and how many neighbouring elements are of one channel.
    """
    step, last_place = constants.one_element_in, _u8(constants.pairs_per_bin - 1)
    bins_in_all = _u8(2 * constants.pair[2] + 1)
    shift, rstd = line
    first_channel, first, positions = channels
    for j in range(np.int64((key >> _u8(8)) % _u8(step)), row.size, step):
        drawn = ((key ^ element_keys[j]) * _MIX_1) & _NO_KEY
        place = (drawn & last_place) * bins_in_all + _u8(bins[j])
        if np.int64(drawn) < sums.pair_key[place]:
            sums.pair_key[place] = np.int64(drawn)
            sums.pair_x[place] = row[j]
            sums.pair_y[place] = (np.float64(row[j]) - shift) * rstd
            sums.pair_channel[place] = first_channel + (first + j) // positions


@_exact
def _add_token(tokens: Any, t: int, key: Any, constants: Any, moments: Any, sums: Any, tile: Any) -> None:
    """Add the pairs of one finite token, a tile at a time; the tile's buffers are used again and again."""
    row, d = tokens.rows[t], tokens.rows.shape[1]
    shift, rstd, density = tokens.shift[t], tokens.rstd[t], sums.density.reshape(-1)
    first_channel = t % tokens.groups * (d // tokens.positions)
    for first in range(0, d, _TILE):
        part = slice(first, min(first + _TILE, d))
        _index(row[part], shift, rstd, constants, tile)
        _add_pairs(row[part], shift, rstd, tile, moments, density)
        channels = (first_channel, first, tokens.positions)
        _draw_pairs(row[part], (shift, rstd), tile.bins, key, tokens.element_keys[part], channels, constants, sums)
    mean = tokens.shift[t] if tokens.form[0] else _total(row) / d
    tile.y[0], tile.y[1] = mean * rstd, 1 / rstd
    scalar_bits = tile.y.view(np.int32)
    sums.token_offsets[_bin(scalar_bits[0], *constants.token)] += 1
    sums.token_scales[_bin(scalar_bits[1], *constants.token)] += 1


@_exact
def _add_to_channels(rows: Any, four_tokens: Any, sums: Any, extremes: Any) -> None:
    """Add four finite tokens that hold every channel once to what is kept of each."""
    one, two, three, four = (
        rows[four_tokens[0]],
        rows[four_tokens[1]],
        rows[four_tokens[2]],
        rows[four_tokens[3]],
    )
    total, squares, low, high = sums[0], sums[1], extremes[0], extremes[1]
    for j in range(one.size):
        a, b, c, d = np.float64(one[j]), np.float64(two[j]), np.float64(three[j]), np.float64(four[j])
        total[j] += (a + b) + (c + d)
        squares[j] += (a * a + b * b) + (c * c + d * d)
    for row in (one, two, three, four):
        for j in range(row.size):
            low[j] = row[j] if row[j] < low[j] else low[j]
            high[j] = row[j] if row[j] > high[j] else high[j]


@_finite
def _extremes(row: Any) -> Any:
    low = high = row[0]
    for j in range(1, row.size):
        low, high = min(low, row[j]), max(high, row[j])
    return low, high


@_exact
def _add_token_to_channels(tokens: Any, t: int, sums: Any) -> None:
    """Add one finite token to what is kept of the channels that it holds."""
    positions = tokens.positions
    held = tokens.rows.shape[1] // positions
    for number in range(held):
        elements = tokens.rows[t, number * positions : (number + 1) * positions]
        low, high = _extremes(elements)
        channel = t % tokens.groups * held + number
        sums.channel_sums[0, channel] += _total(elements)
        sums.channel_sums[1, channel] += _squares(elements, 0.0)
        sums.channel_extremes[0, channel] = min(sums.channel_extremes[0, channel], low)
        sums.channel_extremes[1, channel] = max(sums.channel_extremes[1, channel], high)


@_exact
def fill(constants: Any, tokens: Any, runs: Any, sums: Any) -> None:
    """Add the tokens of some runs to one thread's sums, and say of each what its line, its key and its reach are.

    Args:
        constants: :data:`CONSTANTS`.
        tokens: a :class:`Rows`.
        runs: start, stop, fold, key, position and sample of each, int64 ``(runs, 6)``; the fold is negative for
            ``shared``.
        sums: a :class:`Sums`.
    """
    magnitude_bits = np.empty(1, np.int32)
    magnitude = magnitude_bits.view(np.float32)
    tile = Tile(np.empty(_TILE, np.float32), np.empty(_TILE, np.int32), np.empty(_TILE, np.int32))
    waiting, n_waiting = np.empty(_TOGETHER, np.int64), 0
    for run in range(runs.shape[0]):
        start, stop, fold, sample_key, position, sample = runs[run]
        moments = sums.shared if fold < 0 else sums.moments[fold]
        for t in range(start, stop):
            tokens.reach[t] = _UNCOUNTED
            if not tokens.valid[t]:
                continue
            magnitude_bits[0] = _largest_magnitude(tokens.rows[t].view(np.int32))
            if not tokens.given:
                tokens.shift[t], tokens.rstd[t] = _line(tokens.rows[t], tokens.eps, tokens.form)
            if not (np.isfinite(magnitude[0]) and np.isfinite(tokens.shift[t] * tokens.rstd[t])):
                sums.nonfinite_tokens[0] += 1
                continue
            key = _mixed(_u8(sample_key) + _u8(position + t - start) * _GOLDEN)
            tokens.keys[t], tokens.reach[t] = np.int64(key), magnitude[0]
            tokens.position[t], tokens.sample[t] = position + t - start, sample
            _add_token(tokens, t, key, constants, moments, sums, tile)
            if tokens.positions > 1 or tokens.groups > 1:
                _add_token_to_channels(tokens, t, sums)
                continue
            waiting[n_waiting] = t
            n_waiting += 1
            if n_waiting == _TOGETHER:
                _add_to_channels(tokens.rows, waiting, sums.channel_sums, sums.channel_extremes)
                n_waiting = 0
    for number in range(n_waiting):
        _add_token_to_channels(tokens, waiting[number], sums)


@_exact
def add_weighted(constants: Any, tokens: Any, runs: Any, weight: Any, moments: Any) -> None:
    """Add the pairs of the tokens that :func:`fill` has counted, each times the weight of its channel.

    Args:
        constants: :data:`CONSTANTS`.
        tokens: a :class:`Rows` that has been filled.
        runs: start, stop and fold of each, int64 ``(runs, 3)``.
        weight: float64 ``(channels,)``.
        moments: of every fold, float64 ``(folds, bins, 6)``.
    """
    d, positions = tokens.rows.shape[1], tokens.positions
    for run in range(runs.shape[0]):
        start, stop, fold = runs[run]
        for t in range(start, stop):
            if tokens.reach[t] < 0:
                continue
            row, shift, rstd = tokens.rows[t], tokens.shift[t], tokens.rstd[t]
            bits = row.view(np.int32)
            first_channel = t % tokens.groups * (d // positions)
            for j in range(d):
                x = np.float64(row[j])
                y = (x - shift) * rstd
                of_one = weight[first_channel + j // positions]
                of_x, of_y = of_one * x, of_one * y
                sums = moments[fold, _bin(bits[j], *constants.pair)]
                sums[0] += of_one
                sums[1] += of_x
                sums[2] += of_y
                sums[3] += of_x * x
                sums[4] += of_x * y
                sums[5] += of_y * y


@_exact
def draw(tokens: Any, by_reach: bool, grouped: bool, sample: Any) -> None:
    """Let the tokens of a call compete for the places of a :class:`Sample`, those of least rank and key win.

    Args:
        tokens: a :class:`Rows` that has been filled.
        by_reach: whether a token's rank is -max |x|; otherwise all have the same.
        grouped: whether tokens are groups, of which :func:`evenly` says what is drawn.
        sample: a :class:`Sample`.
    """
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


@_exact
def join(into: Any, other: Any) -> None:
    """Add flat sums of 64 bits to others, and leave zeros; most are zero already, and are passed over in eights."""
    bits, whole = other.view(np.int64), into.size - into.size % 8
    for i in range(0, whole, 8):
        low = bits[i] | bits[i + 1] | bits[i + 2] | bits[i + 3]
        if (low | bits[i + 4] | bits[i + 5] | bits[i + 6] | bits[i + 7]) != 0:
            _move(into[i : i + 8], other[i : i + 8])
    _move(into[whole:], other[whole:])


@_exact
def _move(into: Any, other: Any) -> None:
    for i in range(into.size):
        into[i] += other[i]
        other[i] = 0


@_exact
def join_pairs(sums: Any, other: Any) -> None:
    """Take the drawn pairs of lesser keys."""
    for i in range(sums.pair_key.size):
        if other.pair_key[i] < sums.pair_key[i]:
            sums.pair_key[i], sums.pair_x[i], sums.pair_y[i] = other.pair_key[i], other.pair_x[i], other.pair_y[i]
            sums.pair_channel[i] = other.pair_channel[i]


class _Compiling(event.Listener):
    """Reports that the loops are being compiled, which numba does once and keeps; what others compile is theirs."""

    _depth = 0  # a loop is compiled with the functions that it calls

    def on_start(self, happened: event.Event) -> None:
        if self._is_of_the_loops(happened):
            if not self._depth:
                report(_compiling(), 0, 1)
            self._depth += 1

    def on_end(self, happened: event.Event) -> None:
        if self._is_of_the_loops(happened):
            self._depth -= 1
            if not self._depth:
                report(_compiling(), 1, 1)

    def _is_of_the_loops(self, happened: event.Event) -> bool:
        function = getattr(happened.data.get("dispatcher"), "py_func", None)
        return getattr(function, "__module__", "") == __name__


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]


def _compiling() -> str:
    kept = fill.stats.cache_path is not None
    how_often = "once on this machine" if kept else "in every process, as there is no folder to keep them in"
    return f"compiling the loops that sum pairs ({how_often}, about 7 s) …"
