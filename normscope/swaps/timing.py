"""Timers: samples in seconds, taken in turns so that a machine that drifts favours nobody."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as clock

Run = Callable[[], object]
Sampler = Callable[[], list[float]]
Name = TypeVar("Name", bound=Hashable)

_BLOCK_SECONDS = 0.02  # of a sample of something short: a hundred times what a clock and a loop add


@dataclass(frozen=True)
class Spread:
    """How long something took, in seconds.

    Attributes:
        minimum: of the samples: with the least of what else the machine did.
        median: of them.
        p20: quantile 0.2, or the sample below it.
        p80: quantile 0.8, or the sample above it: of few samples the interval is the whole of them.
    """

    minimum: float
    median: float
    p20: float
    p80: float


def spread(samples: Sequence[float]) -> Spread:
    """Return minimum, median and quantiles of one sample or more.

    >>> spread([3.0, 1.0, 2.0])
    Spread(minimum=1.0, median=2.0, p20=1.0, p80=3.0)
    """
    ordered, last = sorted(samples), len(samples) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return Spread(ordered[0], middle, ordered[math.floor(0.2 * last)], ordered[math.ceil(0.8 * last)])


def blocks(run: Run) -> list[float]:
    """Time something short by torch.utils.benchmark: seconds a call, a sample a block of calls, on all threads."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return list(timer.blocked_autorange(min_run_time=_BLOCK_SECONDS).times)


def once(run: Run, clock: Callable[[], float] = clock) -> list[float]:
    """Time one call of something long, without a call before it; the clock waits for CUDA before it looks.

    >>> once(lambda: None, iter([3.0, 5.0]).__next__)
    [2.0]
    """
    return [repeated(run, 1, clock)]


def repeated(run: Run, number: int, clock: Callable[[], float] = clock) -> float:
    """Time so many calls together: the seconds of all of them.

    >>> repeated(lambda: None, 3, iter([3.0, 5.0]).__next__)
    2.0
    """
    begun = clock()
    for _ in range(number):
        run()
    return clock() - begun


def in_turns(
    samplers: Mapping[Name, Sampler],
    *,
    at_least: int,
    at_most: int,
    until: float = math.inf,
    now: Callable[[], float] = time.monotonic,
) -> dict[Name, list[float]]:
    """Take samples of several things in rounds, each round beginning with another of them.

    Args:
        samplers: what to sample, by name.
        at_least: rounds, whatever the time.
        at_most: rounds, whatever time is left.
        until: no further round begins that would end after this, as the longest so far took.
        now: the clock of ``until``.

    Returns:
        The samples by name, in the order of ``samplers``.

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
