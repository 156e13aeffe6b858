"""The fused loop on the CPU, compiled by numba: one pass over the tokens fills the same as :mod:`reference`.

Tokens are divided among torch's number of threads. Each thread sums its own folds; sums that two threads share are
joined in the order of the threads, so that the result depends only on their number.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.pairs.sums import reference
from normscope.pairs.sums.binning import MOMENTS, cpu_loop
from normscope.pairs.sums.binning.cpu_loop import Rows, SampleArrays, Sums, add_weighted, draw, fill, join
from normscope.pairs.sums.sampling import NO_KEY, ONE_ELEMENT_IN, element_keys
from normscope.pairs.sums.site_sums import Run, SiteSums, Tokens
from normscope.runtime.compiled_loops import threads

Array = NDArray[Any]

_ADDED = ("channel_sums", "token_offsets", "token_scales")
_PAIRS_A_THREAD = 2**17  # at least: below it, a further thread costs more than it saves


def add(stats: SiteSums, tokens: Tokens) -> None:
    """Add the pairs of ``tokens``, in the CPU's memory, to all of ``stats``."""
    rows = _rows(tokens)
    number = max(1, min(torch.get_num_threads(), rows.rows.size // _PAIRS_A_THREAD, len(rows.rows)))
    first, *shares = _shared_out(tuple(tokens.runs), number)
    sums, samples = _views_of(stats)
    given = None if tokens.lines.explicit_y is None else tokens.lines.explicit_y.contiguous().numpy()
    extra = [_sums_apart(sums) for _ in shares]
    waiting = [threads().submit(fill, rows, given, share, added) for share, added in zip(shares, extra, strict=True)]
    fill(rows, given, first, sums)
    for added, future in zip(extra, waiting, strict=True):
        future.result()
        _join(sums, added)
    if stats.gamma_moments is not None:  # in one thread, so that the sums do not depend on the number of threads
        gamma = torch.ones(tokens.channels) if tokens.gamma is None else tokens.gamma
        (runs,) = _shared_out(tuple(tokens.runs), 1)
        add_weighted(rows, given, runs, gamma.double().square().numpy(), _per_cell(stats.gamma_moments))
    reference.add_optional(stats, tokens, by_gamma=False)
    if (positions := tokens.in_sequence) is not None:
        cpu_loop.add_positions(rows, given, positions.numbers.numpy(), positions.first, sums)
    draw(rows, given, stats.grouped, *samples)


def _rows(tokens: Tokens) -> Rows:
    rows = tokens.rows.detach().float().contiguous().numpy()
    n, d = rows.shape
    lines, form = tokens.lines, tokens.lines.form
    return Rows(
        rows=rows,
        valid=np.ones(n, bool) if tokens.valid is None else tokens.valid.numpy(),
        form=(form.centred, form.about_mean, form.correction, form.eps_at) if form else (False, False, 0, 0),
        eps=lines.eps,
        given=form is None,
        groups=tokens.groups or 1,
        positions=tokens.positions,
        element_keys=_element_keys(d),
        keys=np.empty(n, np.int64),
        shift=np.empty(n) if lines.shift is None else lines.shift.numpy(),
        rstd=np.empty(n) if lines.rstd is None else lines.rstd.numpy(),
        squares=np.empty(n),
        reach=np.empty(n, np.float32),
        position=np.empty(n, np.int64),
        sample=np.empty(n, np.int64),
    )


@functools.lru_cache(maxsize=16)  # the norms of a forward mostly share their runs
def _shared_out(runs: tuple[Run, ...], threads: int) -> list[Array]:
    """Divide tokens evenly, fold after fold, so that each thread has few folds; return the runs for :func:`fill`."""
    total = sum(run.stop - run.start for run in runs)
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(threads)]
    assigned = 0
    for run in sorted(runs, key=lambda run: run.fold):
        start = run.start
        while start < run.stop:
            number = assigned * threads // total
            stop = min(run.stop, start - assigned - (-(number + 1) * total // threads))
            shares[number].append((start, stop, run.fold, run.key, run.position + start - run.start, run.sample))
            assigned, start = assigned + stop - start, stop
    return [np.array(share, np.int64) for share in shares]


# Arrays of a PairStats, and the tensors that they view, because it may later refer to others.
_views: WeakKeyDictionary[SiteSums, tuple[tuple[object, ...], Sums, tuple[Any, Any]]] = WeakKeyDictionary()


def _views_of(stats: SiteSums) -> tuple[Sums, tuple[Any, Any]]:
    """Return the arrays of the sums and of both samples; making them takes as long as adding a few tokens."""
    viewed = (stats.moments, stats.tokens, stats.largest)
    views = _views.get(stats)
    if views is None or any(now is not before for now, before in zip(viewed, views[0], strict=True)):
        samples = [SampleArrays(*(values.numpy() for values in vars(drawn).values())) for drawn in viewed[1:]]
        views = _views[stats] = viewed, _sums_of(stats), (samples[0], samples[1])
    return views[1:]


def _sums_of(stats: SiteSums) -> Sums:
    return Sums(
        moments=_per_cell(stats.moments),
        density=stats.density.view(-1).numpy(),
        **{f"pair_{name}": values.numpy() for name, values in vars(stats.pairs).items()},
        **{name: getattr(stats, name).numpy() for name in ("position_sums", "first_moments", *_ADDED)},
        channel_extremes=stats.channel_extremes.numpy(),
        nonfinite_tokens=stats.nonfinite_tokens.view(1).numpy(),
    )


def _per_cell(moments: Tensor) -> Array:
    """View moments as float64 ``(folds · bins, 6)``."""
    return moments.mT.view(-1, len(MOMENTS)).numpy()


# Sums of further threads, kept from call to call: allocating this much memory takes as long as the loop.
_spare: list[Sums] = []


def _sums_apart(sums: Sums) -> Sums:
    """Return empty sums for another thread."""
    if not _spare:
        empty = Sums(*map(np.zeros_like, sums))
        empty.pair_key[:] = NO_KEY
        _spare.append(empty)
    infinity = np.full(sums.channel_sums.shape[1], np.inf, np.float32)
    extremes = np.stack([infinity, -infinity])
    return _spare.pop()._replace(channel_sums=np.zeros_like(sums.channel_sums), channel_extremes=extremes)


def _join(sums: Sums, further: Sums) -> None:
    """Add another thread's sums, and leave them empty."""
    join(sums, further)
    for name in (*_ADDED, "nonfinite_tokens"):
        getattr(sums, name)[:] += getattr(further, name)
        getattr(further, name)[:] = 0
    np.minimum(sums.channel_extremes[0], further.channel_extremes[0], out=sums.channel_extremes[0])
    np.maximum(sums.channel_extremes[1], further.channel_extremes[1], out=sums.channel_extremes[1])
    _spare.append(further)


@functools.lru_cache(maxsize=16)
def _element_keys(d: int) -> Array:
    """Number the places in a token, those that compete together side by side: uint64 ``(step, places)``."""
    places = -(-d // ONE_ELEMENT_IN) * ONE_ELEMENT_IN
    return np.ascontiguousarray(element_keys(places).numpy().view(np.uint64).reshape(-1, ONE_ELEMENT_IN).T)
