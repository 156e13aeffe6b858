"""The sums and the drawing samples on a GPU: four Triton kernels a call, and nothing that the host waits for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from normscope.pairs.sums.binning import PAIR_GRID, reference
from normscope.pairs.sums.binning.cuda_draw import draw
from normscope.pairs.sums.binning.cuda_loop import describe
from normscope.pairs.sums.binning.cuda_pairs import COUNTED, GATHERED, add_pairs, flush
from normscope.pairs.sums.sampling import FOLDS, GROUPED_WIDTH, NO_KEY, ONE_ELEMENT_IN
from normscope.pairs.sums.tokens import Run, Tokens

if TYPE_CHECKING:
    from normscope.pairs.sums.stats import PairStats

_DESCRIBED = 2048  # elements that a program looks at together
_COLUMNS_DESCRIBED = 128  # of each token, where there are tokens for so many programs:
_DESCRIBING = 256
_ADDED = 256  # elements that a program, of a single warp, adds together: so its lanes exchange words without waiting
_CELLS = FOLDS * PAIR_GRID.size
_FLUSHED = 128  # cells that a program looks after
_STEPS = 4  # at least: they share the additions to a channel's sums
_PROGRAMS = 3072  # more than any GPU runs at once; beyond them, each takes more steps
_OFFERED = 1024  # tokens that compete together for the drawing samples
_TIMES_THE_PLACES = 4  # so many tokens, about, compete for the uniform one
_LOOKED_AFTER = 16  # tokens whose single pairs a program writes down
_WARPS_TO_DRAW = 8


def add(stats: PairStats, tokens: Tokens) -> None:
    """Add the pairs of ``tokens``, in a GPU's memory, to everything that ``stats`` keeps."""
    rows = tokens.rows.detach()
    rows = (rows.float() if rows.dtype == torch.float64 else rows).contiguous()
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        scratch = torch.zeros(_CELLS + _ADDED + 1, GATHERED, device=rows.device)
        described = _describe(stats, tokens, rows, scratch)
        _add_pairs(stats, tokens, rows, described, scratch)
        _draw(stats, tokens, rows, described)
        reference.add_optional(stats, tokens)


@dataclass(frozen=True)
class _Described:
    """What :func:`describe` says of each token, ``(tokens,)`` each."""

    keys: Tensor
    folds: Tensor
    shift: Tensor
    rstd: Tensor
    reach: Tensor
    competing: Tensor
    position: Tensor
    sample: Tensor
    candidates: Tensor  # (2, tokens), and how many of each there are, (2,)
    offered: Tensor

    @classmethod
    def room(cls, tokens: Tokens, offered: Tensor) -> _Described:
        def empty(dtype: torch.dtype) -> Tensor:
            return torch.empty(len(tokens.rows), dtype=dtype, device=tokens.rows.device)

        def given(values: Tensor | None) -> Tensor:
            return empty(torch.float64) if values is None else values.contiguous()

        return cls(
            keys=empty(torch.int64),
            folds=empty(torch.int32),
            shift=given(tokens.lines.shift),
            rstd=given(tokens.lines.rstd),
            reach=empty(torch.float32),
            competing=empty(torch.int32),
            position=empty(torch.int64),
            sample=empty(torch.int64),
            candidates=torch.empty(2, len(tokens.rows), dtype=torch.int32, device=tokens.rows.device),
            offered=offered,
        )


def _describe(stats: PairStats, tokens: Tokens, rows: Tensor, scratch: Tensor) -> _Described:
    n, d = rows.shape
    form, n_runs = tokens.lines.form, len(tokens.runs)
    described = _Described.room(tokens, scratch[-1].view(torch.int32))
    at_once, tile = _described_together(n, d)
    describe[(triton.cdiv(n, at_once),)](
        rows,
        rows if tokens.valid is None else tokens.valid.contiguous(),
        _runs(tuple(tokens.runs), rows.device, _stream(rows.device)),
        *vars(described).values(),
        stats.tokens.key,
        stats.largest.rank,
        stats.token_offsets,
        stats.token_scales,
        stats.nonfinite_tokens,
        n,
        d,
        n_runs,
        triton.next_power_of_2(n_runs) // 2,
        _cut(stats, n),
        eps=tokens.lines.eps,
        centred=form is not None and form.centred,
        about_mean=form is not None and form.about_mean,
        correction=0 if form is None else form.correction,
        clamped=form is not None and form.clamped,
        given=form is None,
        all_valid=tokens.valid is None,
        uniform=len(stats.tokens.key),
        largest=len(stats.largest.key),
        at_once=at_once,
        tile=tile,
    )
    return described


def _described_together(n: int, d: int) -> tuple[int, int]:
    """Return how many of ``n`` tokens a program describes, and how many of their ``d`` elements it takes at a time."""
    elements = _DESCRIBED if d % 16 == 0 else _DESCRIBED // 2  # loaded one by one, each takes two registers more
    many = max(1, min(elements // _COLUMNS_DESCRIBED, triton.next_power_of_2(n // _DESCRIBING)))
    tile = min(triton.next_power_of_2(d), elements // many)
    return elements // tile, tile


def _cut(stats: PairStats, n: int) -> int:
    """Below which enough of ``n`` uniformly distributed keys lie to fill the uniform sample, almost surely."""
    return min(NO_KEY, NO_KEY // n * _TIMES_THE_PLACES * len(stats.tokens.key))


def _add_pairs(stats: PairStats, tokens: Tokens, rows: Tensor, described: _Described, scratch: Tensor) -> None:
    if not stats.moments.mT.is_contiguous():
        stats.moments = stats.moments.mT.contiguous().mT
    width = rows.shape[1] if tokens.groups is None else tokens.positions
    n_rows = rows.numel() // width
    tile = _columns(width)
    at_once = _ADDED // tile
    for first_row, last_row, first_column, last_column in _parts(n_rows, width):
        columns = triton.cdiv(last_column - first_column, tile)
        in_rows = triton.cdiv(last_row - first_row, at_once)
        steps = max(_STEPS, triton.cdiv(in_rows * columns, _PROGRAMS))
        add_pairs[(columns, triton.cdiv(in_rows, steps))](  # of which the second may be 65,535 at most
            rows,
            described.keys,
            described.folds,
            described.shift,
            described.rstd,
            described.competing,
            scratch,
            stats.moments,
            stats.density,
            stats.channel_sums,
            stats.channel_extremes,
            stats.pairs.key,
            last_row,
            width,
            first_row,
            first_column,
            steps,
            rows.shape[1] // width,
            tokens.groups or 1,
            tokens.channels,
            cells=_CELLS,
            grouped=tokens.groups is not None,
            at_once=at_once,
            tile=tile,
            num_warps=1,
        )
        flush[(triton.cdiv(_CELLS, _FLUSHED),)](scratch, stats.moments, _CELLS, tile=_FLUSHED)


def _columns(width: int) -> int:
    """Return how many columns a program adds at once: of rows so wide those that waste least, and the most of these."""
    if width < _ADDED:
        return max(ONE_ELEMENT_IN, triton.next_power_of_2(width))
    return min((_ADDED, _ADDED // 2), key=lambda tile: triton.cdiv(width, tile) * tile)


def _parts(n_rows: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut rows of so many elements into parts that are counted exactly: first and last row, first and last column."""
    wide = min(width, COUNTED)
    high = COUNTED // wide
    for first_row in range(0, n_rows, high):
        for first_column in range(0, width, wide):
            yield first_row, min(first_row + high, n_rows), first_column, min(first_column + wide, width)


def _draw(stats: PairStats, tokens: Tokens, rows: Tensor, described: _Described) -> None:
    n, d = rows.shape
    draw[(2 + triton.cdiv(n, _LOOKED_AFTER),)](
        rows,
        described.keys,
        described.shift,
        described.rstd,
        described.reach,
        described.competing,
        described.position,
        described.sample,
        described.candidates,
        described.offered,
        *vars(stats.tokens).values(),
        *vars(stats.largest).values(),
        *vars(stats.pairs).values(),
        n,
        d,
        _cut(stats, n),
        tokens.groups or 1,
        d // tokens.positions,
        tokens.positions,
        uniform=len(stats.tokens.key),
        largest=len(stats.largest.key),
        grouped_width=GROUPED_WIDTH if stats.grouped else 0,
        at_once=_LOOKED_AFTER,
        tile=_OFFERED,
        pairs_tile=32 * _WARPS_TO_DRAW,
        num_warps=_WARPS_TO_DRAW,
    )


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=16)
def _runs(runs: tuple[Run, ...], device: torch.device, stream: int) -> Tensor:
    """Send what :func:`describe` takes of runs: once for all norms of a forward, but again for another stream."""
    table = torch.tensor([(run.start, run.fold, run.key, run.position, run.sample) for run in runs]).T.contiguous()
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
