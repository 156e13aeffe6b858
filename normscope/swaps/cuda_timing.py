"""Timers on CUDA: triton's do_bench, and a CUDA graph whose calls go round buffers that no cache holds together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from normscope.swaps.timing import Run

_CALLS = 200  # of one replay
_REPLAYS = 10
_LEAST_SETS = 4
_CACHES = 4  # so many times the L2 cache the buffers are together

Buffers = TypeVar("Buffers")


def flushed(run: Run, milliseconds: int = 100) -> list[float]:
    """Time calls by triton.testing.do_bench, which clears the L2 cache before each: seconds, a sample a call.

    Args:
        run: what is timed.
        milliseconds: that all calls together take, about; a quarter of them more to warm up.
    """
    from triton.testing import do_bench

    taken = do_bench(run, warmup=milliseconds // 4, rep=milliseconds, return_mode="all")
    return [one / 1e3 for one in taken]


def sets_beyond_cache(nbytes: int, cache: int) -> int:
    """Return how many buffer sets of ``nbytes`` it takes that together are larger than four times the cache.

    >>> sets_beyond_cache(50_000_000, 60_000_000), sets_beyond_cache(1_000_000_000, 60_000_000)
    (5, 4)
    """
    return max(_LEAST_SETS, math.floor(_CACHES * cache / nbytes) + 1)


def cache_of(device: torch.device) -> int:
    """Return the size of a CUDA device's L2 cache in bytes."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def replayed(
    run: Callable[[Buffers], object],
    sets: Sequence[Buffers],
    number: int = _REPLAYS,
    *,
    calls: int = _CALLS,
    stream: torch.cuda.Stream | None = None,
) -> list[float]:
    """Time the replays of one CUDA graph of about 200 calls: seconds a call, a sample a replay.

    No launch from Python is timed. Each call takes the next of the buffer sets, and what it returns is kept until that
    set's next turn, so that neither what it reads nor what it writes is still in the cache.

    Args:
        run: what is timed, of a buffer set.
        sets: as many as :func:`sets_beyond_cache` says.
        number: of replays.
        calls: of one replay; a few more where they are no multiple of the sets.
        stream: that the calls are captured on; a new one without. A backward pass runs on the stream of its forward
            pass, and can only be captured on that.
    """
    aside: torch.cuda.Stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what is set up at first calls cannot be captured
        for buffers in sets[:3]:
            run(buffers)
    torch.cuda.current_stream().wait_stream(aside)
    graph, calls = torch.cuda.CUDAGraph(), math.ceil(calls / len(sets)) * len(sets)
    kept: deque[object] = deque(maxlen=len(sets))
    # A capture that fails raises before torch.cuda.graph has gone back from its stream; the outer one does.
    with torch.cuda.stream(aside), torch.cuda.graph(graph, stream=aside):
        for call in range(calls):
            kept.append(run(sets[call % len(sets)]))
    graph.replay()
    samples = []
    for _ in range(number):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / calls)
    return samples
