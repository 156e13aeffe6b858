"""What adds up the pairs, as Triton compiles it: one kernel gathers them in float32, and one adds that to float64.

Programs add to the same sums by atomic additions, whose order is the GPU's own. A pair's sums are gathered about the
centre of its bin, eight words of float32 in one sector of memory. Counts are exact there, as no more than
:data:`COUNTED` pairs are gathered before they go to the sums. What float32 cannot hold, or what very many pairs may
share, goes to the sums directly: pairs beyond the grid of bins and in the bin that holds zero, and those of tokens
whose fold :func:`describe` inverts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, MOMENTS, PAIR_GRID
from normscope.pairs.sums.binning.cuda_loop import GATHERED, KEYLESS, ONE_IN, PAIR, PAIR_BINS, bin_of, of, pair_of

COUNTED = 2**24  # float32 counts no further

_DENSITY_X, _DENSITY_Y = of(DENSITY_X_GRID), of(DENSITY_Y_GRID)
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
def _load(
    rows: tl.tensor, keys: tl.tensor, row: tl.tensor, column: tl.tensor, n_rows: tl.tensor,
    width: tl.tensor, per_token: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the keys of some rows' tokens, and x, NaN where it does not count."""
    key = tl.load(keys + row // per_token, mask=row < n_rows, other=KEYLESS)
    inside = (key != KEYLESS)[:, None] & (column < width)
    places = rows + row.to(tl.int64)[:, None] * width + column
    return key, tl.load(places, mask=inside, other=float("nan")).to(tl.float32)


@triton.jit
def _places(x: tl.tensor) -> tl.tensor:
    """Return how many bins x lies above or below the one that holds zero, on the grid, and on that of the density.

    Where it lies beyond the grid these are any numbers; the first is then no less than the grid's :data:`_CENTRE`.
    """
    bits = x.to(tl.int32, bitcast=True)
    away = ((bits & 0x7FFFFFFF) >> PAIR[0]) - PAIR[1]
    coarsely = (away + _ALL_BUT_ONE) >> _COARSER
    return away, tl.where(bits < 0, -away, away), tl.where(bits < 0, -coarsely, coarsely)


@triton.jit
def _gather(scratch: tl.tensor, cell: tl.tensor, off: tl.tensor, y: tl.tensor) -> None:
    """Add the eight words of each pair to its cell of the scratch.

    With δ = x − the centre of its bin, exact in float32, they are 1, δ, y, δ², δy, y², of which y and y² are two each:
    their leading eight bits, of which 65,536 alike add up without rounding, and the rest. Two neighbouring lanes do so
    for a pair, by four words each, so that what goes to memory is one sector of it.
    """
    word = tl.arange(0, GATHERED)[None, :]
    second, of_half = word >= _HALF, word % _HALF
    off, y = off[:, None], y[:, None]
    by_off, by_y = tl.where(second, off, 1.0), tl.where(second, y, 1.0)
    last = y * by_y
    leading = (last.to(tl.int32, bitcast=True) & _LEADING_BITS).to(tl.float32, bitcast=True)
    words = tl.where(of_half == 0, by_off * by_off, off * by_y)
    words = tl.where(of_half < 2, words, tl.where(of_half == 2, leading, last - leading))
    tl.atomic_add(scratch + cell[:, None] * GATHERED + word, words, sem="relaxed")


@triton.jit
def _add_directly(
    moments: tl.tensor, density: tl.tensor, centre: tl.tensor, x: tl.tensor, shift: tl.tensor, slope: tl.tensor,
    mask: tl.tensor,
) -> None:  # fmt: skip
    """Add pairs to the sums themselves: those of the bin that holds zero row by row, as they may be all there are.

    ``centre`` is the cell of that bin in each row's fold.
    """
    near_shift, near_slope = shift.to(tl.float32)[:, None], slope.to(tl.float32)[:, None]
    y_bin = bin_of((x - near_shift) * near_slope, _DENSITY_Y)
    joint = bin_of(x, _DENSITY_X) * _DENSITY_Y_BINS + y_bin
    y_bin_of_zero = bin_of((tl.zeros_like(near_shift) - near_shift) * near_slope, _DENSITY_Y)
    central = mask & (tl.abs(x) < _LEAST)
    alike = central & (y_bin == y_bin_of_zero)
    of_zero = tl.sum(y_bin_of_zero, 1) + _DENSITY_X[2] * _DENSITY_Y_BINS
    number = tl.sum(alike.to(tl.int32), 1).to(tl.int64)
    tl.atomic_add(density + of_zero, number, mask=number > 0, sem="relaxed")
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


@triton.jit(do_not_specialize=["n_rows", "first_row", "first_column", "steps", "groups"])
def add_pairs(
    rows: tl.tensor, keys: tl.tensor, folds: tl.tensor, shift: tl.tensor, rstd: tl.tensor, competing: tl.tensor,
    scratch: tl.tensor, moments: tl.tensor, density: tl.tensor, channel_sums: tl.tensor, channel_extremes: tl.tensor,
    pair_keys: tl.tensor, n_rows: tl.tensor, width: tl.tensor, first_row: tl.tensor, first_column: tl.tensor,
    steps: tl.tensor, per_token: tl.tensor, groups: tl.tensor, channels: tl.tensor,
    cells: tl.constexpr, grouped: tl.constexpr, at_once: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Add the pairs of all tokens that count, and let those compete that may be drawn.

    Elements are taken as ``(n_rows, width)``. Rows are tokens and columns the channels; or, where tokens are groups,
    rows are the channels of every token, ``per_token`` of them, and columns their positions. Each program adds
    ``at_once`` rows, ``steps`` times, of ``tile`` columns, a multiple of eight, and the first of them begins at
    ``first_row`` and ``first_column``. What is said of tokens comes from :func:`describe`. ``scratch``, float32
    ``(cells + at_once · tile, GATHERED)``, goes to :func:`flush`; behind the ``cells``, one for each fold and bin, is
    where that goes which is not gathered. ``competing`` becomes 1 where a pair took a place, whose key alone is
    written down here.
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
        rest = (own_shift - near_shift.to(tl.float64)).to(tl.float32)
        distance = x - near_shift[:, None]
        y_bin = bin_of(distance * near_slope, _DENSITY_Y)
        away, bins, coarse_bins = _places(x)
        limit = tl.where(fold < 0, 0, _CENTRE - 1).to(tl.uint32)
        gathered = (away - 1).to(tl.uint32, bitcast=True) < limit[:, None]  # which NaN never is
        centre = tl.where(fold < 0, ~fold, fold) * PAIR_BINS + _CENTRE
        cell = tl.where(gathered, centre[:, None] + bins, nowhere)
        middle = ((x.to(tl.int32, bitcast=True) & _BIN) | _HALF_A_BIN).to(tl.float32, bitcast=True)
        y = (distance - rest[:, None]) * near_slope
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
def flush(scratch: tl.tensor, moments: tl.tensor, cells: tl.tensor, tile: tl.constexpr) -> None:
    """Add what was gathered in ``cells`` cells to the sums, and leave zeros; each program of ``tile`` of them."""
    cell = tl.program_id(0) * tile + tl.arange(0, tile)
    own, sums = scratch + cell * GATHERED, moments + cell * _WORDS
    n = tl.load(own, mask=cell < cells, other=0).to(tl.float64)
    held = n > 0
    off = tl.load(own + 1, mask=held, other=0).to(tl.float64)
    y = tl.load(own + 2, mask=held, other=0).to(tl.float64) + tl.load(own + 3, mask=held, other=0).to(tl.float64)
    off_off = tl.load(own + 4, mask=held, other=0).to(tl.float64)
    off_y = tl.load(own + 5, mask=held, other=0).to(tl.float64)
    yy = tl.load(own + 6, mask=held, other=0).to(tl.float64) + tl.load(own + 7, mask=held, other=0).to(tl.float64)
    steps = cell % PAIR_BINS - _CENTRE
    size = ((2 * tl.abs(steps) - 1) * _HALF_A_BIN + _LEAST_BITS).to(tl.float32, bitcast=True).to(tl.float64)
    x = tl.where(steps < 0, -size, size)
    tl.store(sums, tl.load(sums, mask=held) + n, mask=held)
    tl.store(sums + 1, tl.load(sums + 1, mask=held) + (x * n + off), mask=held)
    tl.store(sums + 2, tl.load(sums + 2, mask=held) + y, mask=held)
    tl.store(sums + 3, tl.load(sums + 3, mask=held) + (x * x * n + 2 * x * off + off_off), mask=held)
    tl.store(sums + 4, tl.load(sums + 4, mask=held) + (x * y + off_y), mask=held)
    tl.store(sums + 5, tl.load(sums + 5, mask=held) + yy, mask=held)
    for word in tl.static_range(GATHERED):
        tl.store(own + word, tl.zeros((tile,), tl.float32), mask=held)
