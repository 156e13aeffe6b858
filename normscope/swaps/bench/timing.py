"""Timers on CPU and CUDA, and verdicts on samples relative to the native norm's."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as clock

from normscope.swaps.reports import (
    ALIKE,
    BESIDE,
    COPY,
    FASTER,
    NATIVE,
    NOT_RUN,
    SLOWER,
    TOO_FEW,
    Case,
    Passes,
    Timing,
)

Run = Callable[[], object]
Sampler = Callable[[], list[float]]
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")

_BLOCK_SECONDS = 0.02  # of a sample of something short: a hundred times what a clock and a loop add


@dataclass(frozen=True)
class TimeQuantiles:
    """Quantiles of durations, in seconds; of few samples, the interval from p20 to p80 spans all."""

    minimum: float  # the sample that other work on the machine affected least
    median: float
    p20: float  # or the sample below it
    p80: float  # or the sample above it


def spread(samples: Sequence[float]) -> TimeQuantiles:
    """Return minimum, median and quantiles of one sample or more.

    >>> spread([3.0, 1.0, 2.0])
    TimeQuantiles(minimum=1.0, median=2.0, p20=1.0, p80=3.0)
    """
    ordered, last = sorted(samples), len(samples) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return TimeQuantiles(ordered[0], middle, ordered[math.floor(0.2 * last)], ordered[math.ceil(0.8 * last)])


def blocks(run: Run) -> list[float]:
    """Time a short call with torch.utils.benchmark, on all threads: seconds per call, one sample per block."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return list(timer.blocked_autorange(min_run_time=_BLOCK_SECONDS).times)


def once(run: Run, clock: Callable[[], float] = clock) -> list[float]:
    """Time one long call without warm-up, synchronized with CUDA.

    >>> once(lambda: None, iter([3.0, 5.0]).__next__)
    [2.0]
    """
    return [repeated(run, 1, clock)]


def repeated(run: Run, number: int, clock: Callable[[], float] = clock) -> float:
    """Return the seconds of ``number`` calls together.

    >>> repeated(lambda: None, 3, iter([3.0, 5.0]).__next__)
    2.0
    """
    begun = clock()
    for _ in range(number):
        run()
    return clock() - begun


def warmed(run: Callable[[], Result], device: torch.device, clock: Callable[[], float] = clock) -> tuple[Result, float]:
    """Return a call's result and seconds; on CUDA those of a second call, as the first loads libraries for seconds.

    >>> warmed(lambda: "done", torch.device("cpu"), iter([3.0, 5.0]).__next__)
    ('done', 2.0)
    """
    if device.type == "cuda":
        run()
        torch.cuda.synchronize(device)
    begun = clock()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, clock() - begun


def in_turns(
    samplers: Mapping[Name, Sampler],
    *,
    at_least: int,
    at_most: int,
    until: float = math.inf,
    now: Callable[[], float] = time.monotonic,
) -> dict[Name, list[float]]:
    """Sample in rounds, each of which begins with another sampler; return the samples by name.

    After ``at_least`` rounds, no round begins that would end after ``until`` on the clock ``now`` if it took as long as
    the longest.

    >>> in_turns({"a": lambda: [1.0], "b": lambda: [2.0, 3.0]}, at_least=2, at_most=2)
    {'a': [1.0, 1.0], 'b': [2.0, 3.0, 2.0, 3.0]}
    """
    names = list(samplers)
    samples: dict[Name, list[float]] = {name: [] for name in names}
    longest = 0.0
    for number in range(at_most if names else 0):
        begun = now()
        if number >= at_least and begun + longest > until:
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name] += samplers[name]()
        longest = max(longest, now() - begun)
    return samples


Buffers = TypeVar("Buffers")


def flushed(run: Run, milliseconds: int = 100) -> list[float]:
    """Time calls by triton.testing.do_bench, which clears the L2 cache before each: seconds, one sample per call.

    All calls together take about ``milliseconds``, after a warm-up of a quarter of that.
    """
    from triton.testing import do_bench

    times = do_bench(run, warmup=milliseconds // 4, rep=milliseconds, return_mode="all")
    return [time / 1e3 for time in times]


def sets_beyond_cache(nbytes: int, cache: int) -> int:
    """Return how many buffer sets of ``nbytes`` it takes that together are larger than four times the cache.

    >>> sets_beyond_cache(50_000_000, 60_000_000), sets_beyond_cache(1_000_000_000, 60_000_000)
    (5, 4)
    """
    return max(4, math.floor(4 * cache / nbytes) + 1)


def replayed(
    run: Callable[[Buffers], object],
    sets: Sequence[Buffers],
    number: int = 10,
    *,
    calls: int = 200,
    stream: torch.cuda.Stream | None = None,
) -> list[float]:
    """Time the replays of one CUDA graph of about 200 calls: seconds a call, a sample a replay.

    No launch from Python is timed. Each call takes the next of the buffer sets, and its result is kept until that set's
    next turn, so that neither inputs nor outputs are still in the cache.

    Args:
        run: the timed function of a buffer set.
        sets: as many as :func:`sets_beyond_cache` returns.
        number: of replays.
        calls: of one replay, rounded up to a multiple of the sets.
        stream: captures the calls; by default a new one. A backward pass can only be captured on the stream of its
            forward pass.
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


# Three samples that all lie below three others are one draw in twenty where nothing differs; two are one in six.
LEAST_SAMPLES = 3
_TENSORS: dict[Passes, int] = {"forward": 2, "forward + backward": 4}


@dataclass(frozen=True)
class Measured:
    """The samples of a case, in seconds; none if it did not run."""

    case: Case
    samples: tuple[float, ...] = ()
    compile_seconds: float | None = None
    note: str = ""


def bytes_moved(passes: Passes, elements: int, itemsize: int) -> int:
    """Return the least bytes that a norm moves: x and y forward, x, y, dy and dx forward + backward, each once.

    >>> bytes_moved("forward", 1000, 4), bytes_moved("forward + backward", 1000, 2)
    (8000, 8000)
    """
    return _TENSORS[passes] * elements * itemsize


def judged(measured: Sequence[Measured]) -> list[Timing]:
    """Compare each row with the native norm and the copy of the same run."""
    plain = {row.case: _timing(row) for row in measured}
    copies = {(case.dtype, case.timer): row.gb_per_s for case, row in plain.items() if case.variant == COPY}
    natives = {_setting(case): row for case, row in plain.items() if case.variant == NATIVE}
    return [_beside(row, natives.get(_reference(case)), copies) for case, row in plain.items()]


def _timing(row: Measured) -> Timing:
    case = {each.name: getattr(row.case, each.name) for each in dataclasses.fields(Case)}
    if not row.samples:
        return Timing(**case, verdict=NOT_RUN, compile_seconds=row.compile_seconds, note=row.note)
    times, nbytes = spread(row.samples), row.case.nbytes
    # The identity is an empty CUDA graph, whose replays a clock may not see.
    rate = None if nbytes is None or times.median == 0 else nbytes / times.median / 1e9
    values = {**case, **vars(times), "samples": tuple(row.samples), "gb_per_s": rate}
    return Timing(**values, compile_seconds=row.compile_seconds, note=row.note)


def _beside(row: Timing, native: Timing | None, copies: dict[tuple[str, str], float | None]) -> Timing:
    median = row.median
    if median is None:
        return row
    rate, copy = row.gb_per_s, copies.get((row.dtype, row.timer))
    if rate is not None and copy is not None:
        row = dataclasses.replace(row, share_of_copy=rate / copy)
    if row.variant in (NATIVE, COPY) or native is None or native.median is None:
        return row
    return dataclasses.replace(row, ratio=median / native.median, verdict=verdict(row.samples, native.samples))


def verdict(samples: Sequence[float], native: Sequence[float]) -> str:
    """Compare two durations: faster or slower only if minimum, median and spread agree.

    >>> verdict([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]), verdict([1.9, 3.1, 3.2], [2.0, 2.1, 2.2])
    ('faster', 'alike')
    """
    of_samples, of_native = spread(samples), spread(native)
    if _below(of_samples, of_native):
        word = FASTER
    elif _below(of_native, of_samples):
        word = SLOWER
    else:
        return ALIKE
    return word if min(len(samples), len(native)) >= LEAST_SAMPLES else TOO_FEW


def _below(left: TimeQuantiles, right: TimeQuantiles) -> bool:
    return left.minimum < right.minimum and left.p80 < right.p20  # between which the medians lie


def _setting(case: Case) -> tuple[str, ...]:
    return case.way, case.scope, case.passes, case.dtype, case.timer


def _reference(case: Case) -> tuple[str, ...]:
    return BESIDE.get(case.way, case.way), *_setting(case)[1:]
