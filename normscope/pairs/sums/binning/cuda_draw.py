"""The drawing samples, as Triton fills them: whole tokens, and those pairs whose keys have got their places."""

from __future__ import annotations

import triton
import triton.language as tl

from normscope.pairs.sums.binning.cuda_loop import KEYLESS, ONE_IN, offered_of, pair_of


@triton.jit
def _last(ranks: tl.tensor, keys: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """Return rank and key of what is thrown out first, of greatest rank and then key, and where it is."""
    rank = tl.max(ranks, 0)
    key = tl.max(tl.where(ranks == rank, keys, -1), 0)
    return rank, key, tl.max(tl.where((ranks == rank) & (keys == key), slots, 0), 0)


@triton.jit
def _before(rank: tl.tensor, key: tl.tensor, other_rank: tl.tensor, other_key: tl.tensor) -> tl.tensor:
    return (rank < other_rank) | ((rank == other_rank) & (key < other_key))


@triton.jit
def _y(x: tl.tensor, shift: tl.tensor, slope: tl.tensor) -> tl.tensor:
    return ((x.to(tl.float64) - shift) * slope).to(tl.float32)


@triton.jit
def _write_token(
    row: tl.tensor,
    d: tl.tensor,
    shift: tl.tensor,
    slope: tl.tensor,
    own_x: tl.tensor,
    own_y: tl.tensor,
    slot: tl.tensor,
    tile: tl.constexpr,
) -> None:
    start = 0
    while start < d:
        column = start + tl.arange(0, tile)
        x = tl.load(row + column, mask=column < d, other=0).to(tl.float32)
        tl.store(own_x + slot * d + column, x, mask=column < d)
        tl.store(own_y + slot * d + column, _y(x, shift, slope), mask=column < d)
        start += tile


@triton.jit
def _write_grouped_token(
    row: tl.tensor,
    d: tl.tensor,
    shift: tl.tensor,
    slope: tl.tensor,
    own_x: tl.tensor,
    own_y: tl.tensor,
    slot: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write down what :func:`normscope.pairs.sums.sampling.evenly` takes of a token."""
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
    rows: tl.tensor, keys: tl.tensor, shift: tl.tensor, rstd: tl.tensor, reach: tl.tensor,
    numbers: tl.tensor, samples: tl.tensor,
    own_rank: tl.tensor, own_key: tl.tensor, own_x: tl.tensor, own_y: tl.tensor, own_rstd: tl.tensor,
    own_position: tl.tensor, own_sample: tl.tensor,
    candidates: tl.tensor, number: tl.tensor, n: tl.tensor, d: tl.tensor, cut: tl.tensor,
    places: tl.constexpr, by_reach: tl.constexpr, grouped_width: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Let the candidates compete for the places of one sample: the best there is takes that of the last, while it may.

    They are ``number``, of those only whose keys are below the ``cut``; where these are fewer than there are places,
    all ``n`` tokens compete.
    """
    slots = tl.arange(0, places)
    ranks, kept_keys = tl.load(own_rank + slots), tl.load(own_key + slots)
    chosen = tl.full((places,), -1, tl.int32)
    last_rank, last_key, slot = _last(ranks, kept_keys, slots)
    of_all = (number < places) & (last_key > cut)
    number = tl.where(of_all, n, number)
    start = 0
    while start < number:
        place = start + tl.arange(0, tile)
        token = tl.where(of_all, place, tl.load(candidates + place, mask=(place < number) & (of_all == 0), other=n))
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
    row: tl.tensor, key: tl.tensor, shift: tl.tensor, slope: tl.tensor,
    first_channel: tl.tensor, positions: tl.tensor, d: tl.tensor,
    pair_keys: tl.tensor, pair_x: tl.tensor, pair_y: tl.tensor, pair_channel: tl.tensor, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Write down those pairs of a token that have got their places."""
    element = ((key >> 8) & ONE_IN - 1) + tl.arange(0, tile) * ONE_IN
    while tl.min(element, 0) < d:
        x = tl.load(row + element, mask=element < d, other=0).to(tl.float32)
        pair_key, place = pair_of(key, element, x)
        won = (element < d) & (pair_key == tl.load(pair_keys + place))
        tl.store(pair_x + place, x, mask=won)
        tl.store(pair_y + place, _y(x, shift, slope), mask=won)
        tl.store(pair_channel + place, (first_channel + element // positions).to(tl.int32), mask=won)
        element += ONE_IN * tile


@triton.jit(do_not_specialize=["n", "cut", "groups", "per_token"])
def draw(
    rows: tl.tensor, keys: tl.tensor, shift: tl.tensor, rstd: tl.tensor, reach: tl.tensor, competing: tl.tensor,
    numbers: tl.tensor, samples: tl.tensor, candidates: tl.tensor, scratch: tl.tensor,
    token_rank: tl.tensor, token_key: tl.tensor, token_x: tl.tensor, token_y: tl.tensor, token_rstd: tl.tensor,
    token_position: tl.tensor, token_sample: tl.tensor,
    largest_rank: tl.tensor, largest_key: tl.tensor, largest_x: tl.tensor, largest_y: tl.tensor,
    largest_rstd: tl.tensor, largest_position: tl.tensor, largest_sample: tl.tensor,
    pair_keys: tl.tensor, pair_x: tl.tensor, pair_y: tl.tensor, pair_channel: tl.tensor,
    n: tl.tensor, d: tl.tensor, cut: tl.tensor, groups: tl.tensor, per_token: tl.tensor, positions: tl.tensor,
    cells: tl.constexpr, uniform: tl.constexpr, largest: tl.constexpr, grouped_width: tl.constexpr,
    at_once: tl.constexpr, tile: tl.constexpr, pairs_tile: tl.constexpr,
) -> None:  # fmt: skip
    """Fill the samples: the first program the uniform one, the second the largest, all others the single pairs.

    ``rows`` are ``(n, d)``, and what is said of tokens comes from the kernels before. The samples are as
    :class:`TokenSample` and :class:`PairSample` keep them, with ``uniform`` and ``largest`` places; of a token that is
    a group they keep ``grouped_width`` elements, which is zero otherwise. Its channels are ``per_token``, each of
    ``positions`` neighbouring elements. Each of the other programs looks after ``at_once`` tokens.
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
