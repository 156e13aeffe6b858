"""How everything is timed on a GPU, and what stands in for that in a rehearsal."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from on_gpu.parts import Setting

from normscope.swaps.bench import timing
from normscope.swaps.bench.timing import flushed, replayed

GRAPH, DO_BENCH, WALL = "graph", "do_bench", "wall clock"
ROUNDS = 2
KEPT = 50  # samples of a round
_MILLISECONDS = 25  # of do_bench
_SECONDS, _REPLAYS, _CALLS = 0.1, 5, 200  # that all replays take; what is slow is called less often

Buffers = TypeVar("Buffers")
Times = dict[str, list[float]]  # microseconds of a call, by timer


@contextlib.contextmanager
def one_stream(setting: Setting) -> Iterator[None]:
    """Let all within run on one stream of its own: what is captured there may go backward through what was made before.

    Autograd goes backward on the stream of the forward pass, and the default stream cannot be captured.
    """
    if setting.rehearsal:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def timed(setting: Setting, run: Callable[[Buffers], object], sets: Sequence[Buffers]) -> Times:
    """Time calls by do_bench, of one buffer set, and by the replay of a CUDA graph that goes round all of them.

    In a rehearsal the wall clock stands in for both, with one call.
    """
    if setting.rehearsal:
        [seconds] = timing.once(lambda: run(sets[0]))
        return {GRAPH: [1e6 * seconds], DO_BENCH: [1e6 * seconds]}
    alone = flushed(lambda: run(sets[0]), _MILLISECONDS)
    return {DO_BENCH: _kept(alone), GRAPH: _kept(_by_graph(run, sets, statistics.median(alone)))}


def by_graph(setting: Setting, run: Callable[[Buffers], object], sets: Sequence[Buffers]) -> list[float]:
    """Time the replay of a CUDA graph alone, of what launches kernels and nothing else: microseconds of a call."""
    seconds = timing.repeated(lambda: run(sets[0]), 2 if setting.rehearsal else 5) / (2 if setting.rehearsal else 5)
    return _kept([seconds] if setting.rehearsal else _by_graph(run, sets, seconds))


def _by_graph(run: Callable[[Buffers], object], sets: Sequence[Buffers], seconds: float) -> list[float]:
    calls = calls_of(seconds, len(sets))
    return replayed(run, sets, _REPLAYS, calls=calls, stream=torch.cuda.current_stream())


def calls_of(seconds: float, sets: int) -> int:
    """Return how many calls a graph has, of what takes so long: 200, or fewer where that would take too long.

    >>> calls_of(20e-6, sets=4), calls_of(200e-6, sets=4), calls_of(0.02, sets=4)
    (200, 100, 4)
    """
    return max(sets, min(_CALLS, int(_SECONDS / (_REPLAYS * seconds))))


def _kept(seconds: Sequence[float]) -> list[float]:
    """Return microseconds, of many samples some that lie evenly among them.

    >>> _kept([1e-6, 2e-6]), len(_kept([1e-6] * 120))
    ([1.0, 2.0], 40)
    """
    return [1e6 * one for one in seconds[:: -(-len(seconds) // KEPT)]]


def by_wall_clock(setting: Setting, run: Callable[[], object]) -> list[float]:
    """Time calls as the host sees them, of what the GPU has done before the next comes: microseconds of a call."""
    calls, samples = (1, 1) if setting.rehearsal else (200, 10)
    run()
    return [1e6 * timing.repeated(run, calls) / calls for _ in range(samples)]
