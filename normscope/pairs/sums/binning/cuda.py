"""The sums and the drawing samples on a GPU: three Triton kernels a call, and nothing that the host waits for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from normscope.pairs.sums.binning import reference
from normscope.pairs.sums.binning.cuda_draw import draw
from normscope.pairs.sums.binning.cuda_loop import add_pairs, describe
from normscope.pairs.sums.sampling import GROUPED_WIDTH, ONE_ELEMENT_IN
from normscope.pairs.sums.tokens import Run, Tokens

if TYPE_CHECKING:
    from normscope.pairs.sums.stats import PairStats

_DESCRIBED = 1024  # elements that a program looks at together
_ADDED = 256  # elements that a program adds together: with more, registers leave no room for other programs beside it
_STEPS = 4  # at least: they share the additions to a channel's sums
_PROGRAMS = 2048  # more than any GPU runs at once; beyond them, each takes more steps
_OFFERED = 2048  # tokens that compete together for the drawing samples
_LOOKED_AFTER = 16  # tokens whose single pairs a program writes down
_WARPS_TO_DRAW = 8


def add(stats: PairStats, tokens: Tokens) -> None:
    """Add the pairs of ``tokens``, in a GPU's memory, to everything that ``stats`` keeps."""
    rows = tokens.rows.detach()
    rows = (rows.float() if rows.dtype == torch.float64 else rows).contiguous()
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        described = _describe(stats, tokens, rows)
        _add_pairs(stats, tokens, rows, described)
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

    @classmethod
    def room(cls, tokens: Tokens) -> _Described:
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
        )


def _describe(stats: PairStats, tokens: Tokens, rows: Tensor) -> _Described:
    n, d = rows.shape
    form, n_runs = tokens.lines.form, len(tokens.runs)
    described = _Described.room(tokens)
    tile = min(triton.next_power_of_2(d), _DESCRIBED)
    describe[(triton.cdiv(n, _DESCRIBED // tile),)](
        rows,
        rows if tokens.valid is None else tokens.valid.contiguous(),
        _runs(tuple(tokens.runs), rows.device, _stream(rows.device)),
        *vars(described).values(),
        stats.token_offsets,
        stats.token_scales,
        stats.nonfinite_tokens,
        n,
        d,
        n_runs,
        triton.next_power_of_2(n_runs) // 2,
        eps=tokens.lines.eps,
        centred=form is not None and form.centred,
        about_mean=form is not None and form.about_mean,
        correction=0 if form is None else form.correction,
        clamped=form is not None and form.clamped,
        given=form is None,
        all_valid=tokens.valid is None,
        at_once=_DESCRIBED // tile,
        tile=tile,
    )
    return described


def _add_pairs(stats: PairStats, tokens: Tokens, rows: Tensor, described: _Described) -> None:
    if not stats.moments.mT.is_contiguous():
        stats.moments = stats.moments.mT.contiguous().mT
    width = rows.shape[1] if tokens.groups is None else tokens.positions
    n_rows = rows.numel() // width
    tile = max(ONE_ELEMENT_IN, min(triton.next_power_of_2(width), _ADDED))
    at_once, columns = _ADDED // tile, triton.cdiv(width, tile)
    steps = max(_STEPS, triton.cdiv(triton.cdiv(n_rows, at_once) * columns, _PROGRAMS))
    add_pairs[(columns, triton.cdiv(n_rows, at_once * steps))](  # of which the second may be 65,535 at most
        rows,
        described.keys,
        described.folds,
        described.shift,
        described.rstd,
        described.competing,
        stats.moments,
        stats.density,
        stats.channel_sums,
        stats.channel_extremes,
        stats.pairs.key,
        n_rows,
        width,
        steps,
        rows.shape[1] // width,
        tokens.groups or 1,
        tokens.channels,
        grouped=tokens.groups is not None,
        at_once=at_once,
        tile=tile,
    )


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
        *vars(stats.tokens).values(),
        *vars(stats.largest).values(),
        *vars(stats.pairs).values(),
        n,
        d,
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
