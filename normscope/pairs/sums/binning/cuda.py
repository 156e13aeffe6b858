"""Sums and drawing samples on a GPU: four Triton kernels, for which the host never waits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from normscope.norms.formulas import Form
from normscope.pairs.sums import reference
from normscope.pairs.sums.binning import PAIR_GRID
from normscope.pairs.sums.binning.cuda_pairs import COUNTED, GATHERED, add_pairs, describe, draw, flush
from normscope.pairs.sums.sampling import FOLDS, GROUPED_WIDTH, NO_KEY, ONE_ELEMENT_IN
from normscope.pairs.sums.site_sums import Run, SiteSums, Tokens

_DESCRIBED = 2048  # elements that a program loads together
_COLUMNS_DESCRIBED = 128  # of each token, where there are tokens for so many programs:
_DESCRIBING = 256
_REGISTERS = 168  # of a thread that describes: without this number, ptxas spills some to use fewer
_ADDED = 256  # elements that a program, of a single warp, adds together, so that its lanes exchange words directly
_CELLS = FOLDS * PAIR_GRID.size
_FLUSHED = 128  # cells of a program
_STEPS = 4  # at least: they share the additions to a channel's sums
_PROGRAMS = 3072  # more than any GPU runs at once; beyond them, each takes more steps
_OFFERED = 1024  # tokens that compete together for the samples of tokens
_TIMES_THE_PLACES = 4  # number of tokens, about, that compete for a place of the uniform sample
_PER_PROGRAM = 16  # tokens whose single pairs a program stores
_WARPS_TO_DRAW = 8
_SUMS = ("moments", "density", "channel_sums", "channel_extremes", "token_offsets", "token_scales", "nonfinite_tokens")


def add(stats: SiteSums, tokens: Tokens) -> None:
    """Add the pairs of ``tokens``, in a GPU's memory, to all of ``stats``."""
    rows = tokens.rows.detach()
    rows = (rows.float() if rows.dtype == torch.float64 else rows).contiguous()
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        memory = {
            "rows": rows,
            "valid": rows if tokens.valid is None else tokens.valid.contiguous(),
            "runs": _runs(tuple(tokens.runs), rows.device, rows.is_cuda and torch.cuda.current_stream().cuda_stream),
            "scratch": torch.zeros(_CELLS + _ADDED + 1, GATHERED.value, device=rows.device),
            **_kept(stats),
            **_described(tokens, rows.device),
        }
        _launch_all(stats, tokens, memory)
        reference.add_optional(stats, tokens)
        reference.add_positions(stats, tokens)


def _kept(stats: SiteSums) -> dict[str, Tensor]:
    """Return the tensors of ``stats`` by the names of the kernels' arguments."""
    kept = {name: getattr(stats, name) for name in _SUMS} | {"pair_keys": stats.pairs.key}
    for name, sample in (("token", stats.tokens), ("largest", stats.largest), ("pair", stats.pairs)):
        kept |= {f"{name}_{field}": values for field, values in vars(sample).items()}
    return kept


def _described(tokens: Tokens, device: torch.device) -> dict[str, Tensor]:
    """Return memory for the results of :func:`describe`, by the kernels' arguments, or the lines if they are given."""
    n, lines, given = len(tokens.rows), tokens.lines, {}
    sizes = {
        "keys": (torch.int64, n),
        "folds": (torch.int32, n),
        "reach": (torch.float32, n),
        "competing": (torch.int32, n),
        "numbers": (torch.int64, n),
        "samples": (torch.int64, n),
        "candidates": (torch.int32, 2 * n),
    }
    if lines.shift is not None and lines.rstd is not None:
        given = {"shift": lines.shift.contiguous(), "rstd": lines.rstd.contiguous()}
    else:
        sizes |= {"shift": (torch.float64, n), "rstd": (torch.float64, n)}
    return given | {name: torch.empty(size, dtype=dtype, device=device) for name, (dtype, size) in sizes.items()}


def _options_to_add(device: torch.device) -> dict[str, int]:
    """Return the compiler options of :func:`add_pairs`: below compute capability 9, one warp spills registers."""
    before_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9
    return {"num_warps": 2} if before_hopper else {"num_warps": 1, "maxnreg": 255}


def _launch_all(stats: SiteSums, tokens: Tokens, memory: Mapping[str, Tensor]) -> None:
    """Launch the kernels for some tokens; ``memory`` is by the names of their arguments."""
    n, d = tokens.rows.shape
    uniform, largest = len(stats.tokens.key), len(stats.largest.key)
    # Of n uniformly distributed keys, almost surely enough are below the cut to fill the uniform sample.
    cut = min(NO_KEY, NO_KEY // n * _TIMES_THE_PLACES * uniform)
    sizes = {"n": n, "d": d, "cut": cut, "cells": _CELLS + _ADDED, "uniform": uniform, "largest": largest}
    given, n_runs, groups = tokens.lines.form is None, len(tokens.runs), tokens.groups or 1
    form = vars(tokens.lines.form or Form("given", centred=False, about_mean=False))
    runs = {"n_runs": n_runs, "half": triton.next_power_of_2(n_runs) // 2}
    constants = {"eps": tokens.lines.eps, "given": given, "all_valid": tokens.valid is None}
    at_once, tile = _described_together(n, d)
    constants |= {name: value for name, value in form.items() if name != "name"} | {"at_once": at_once, "tile": tile}
    _launch(describe, (triton.cdiv(n, at_once),), {**memory, **sizes, **runs, **constants}, maxnreg=_REGISTERS)
    grouped = tokens.groups is not None
    width = tokens.positions if grouped else d
    n_rows, tile = n * d // width, _columns(width)
    at_once, options = _ADDED // tile, _options_to_add(stats.channel_sums.device)
    for first_row, last_row, first_column, last_column in _parts(n_rows, width):
        columns = triton.cdiv(last_column - first_column, tile)
        in_rows = triton.cdiv(last_row - first_row, at_once)
        steps = max(_STEPS, triton.cdiv(in_rows * columns, _PROGRAMS))
        numbers = {"n_rows": last_row, "width": width, "first_row": first_row, "first_column": first_column}
        numbers |= {"steps": steps, "per_token": d // width, "groups": groups, "channels": tokens.channels}
        constants = {"cells": _CELLS, "grouped": grouped, "at_once": at_once, "tile": tile}
        grid = (columns, triton.cdiv(in_rows, steps))  # the second at most 65,535
        _launch(add_pairs, grid, {**memory, **numbers, **constants}, **options)
        _launch(flush, (triton.cdiv(_CELLS, _FLUSHED),), {**memory, "cells": _CELLS, "tile": _FLUSHED})
    channels = {"groups": groups, "per_token": d // tokens.positions, "positions": tokens.positions}
    constants = {"grouped_width": GROUPED_WIDTH if stats.grouped else 0, "at_once": _PER_PROGRAM}
    constants |= {"tile": _OFFERED, "pairs_tile": 32 * _WARPS_TO_DRAW}
    programs = 2 + triton.cdiv(n, _PER_PROGRAM)
    _launch(draw, (programs,), {**memory, **sizes, **channels, **constants}, num_warps=_WARPS_TO_DRAW)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: int) -> None:
    kernel[grid](**{name: arguments[name] for name in kernel.arg_names}, **options)


def _described_together(n: int, d: int) -> tuple[int, int]:
    """Return the number of tokens that a program describes, and of their elements that it loads at a time."""
    elements = _DESCRIBED if d % 16 == 0 else _DESCRIBED // 2  # loaded one by one, each takes two registers more
    many = max(1, min(elements // _COLUMNS_DESCRIBED, triton.next_power_of_2(n // _DESCRIBING)))
    tile = min(triton.next_power_of_2(d), elements // many)
    return elements // tile, tile


def _columns(width: int) -> int:
    """Return the number of columns that a program adds at once: the largest of those that waste least."""
    if width < _ADDED:
        return max(ONE_ELEMENT_IN, 1 << (width - 1).bit_length())
    return min((_ADDED, _ADDED // 2), key=lambda tile: -(-width // tile) * tile)


def _parts(n_rows: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield parts whose pairs float32 counts exactly: first and last row, first and last column."""
    wide = min(width, COUNTED)
    high = COUNTED // wide
    for first_row in range(0, n_rows, high):
        for first_column in range(0, width, wide):
            yield first_row, min(first_row + high, n_rows), first_column, min(first_column + wide, width)


@functools.lru_cache(maxsize=16)
def _runs(runs: tuple[Run, ...], device: torch.device, stream: int) -> Tensor:
    """Send the runs to the device: once for all norms of a forward pass, but again for another stream."""
    table = torch.tensor([(run.start, run.fold, run.key, run.position, run.sample) for run in runs]).T.contiguous()
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
