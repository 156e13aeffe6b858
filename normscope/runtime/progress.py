"""Progress of long calls, reported in one way everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

# Called with the name of a stage, the amount done and the total (None if unknown). A name ending in … is one long step.
Progress = Callable[[str, int, int | None], object]


def is_one_step(stage: str) -> bool:
    """True if a stage is one long step without progress of its own."""
    return stage.endswith("…")


def silent(stage: str, done: int, of: int | None) -> None:
    """Report nothing."""


class StageProgress:
    """Progress of one stage.

    >>> stage = StageProgress(print, "samples", 10)
    samples 0 10
    >>> stage.add(4)
    samples 4 10
    """

    def __init__(self, progress: Progress, stage: str, of: int | None, ranks: int = 1) -> None:
        self._progress, self._stage, self._of, self._ranks = progress, stage, of, ranks
        self._done = 0
        self.add(0)

    def add(self, number: int) -> None:
        """Report progress of this rank, as if the others had made as much."""
        self._done += number * self._ranks
        self._progress(self._stage, self._done if self._of is None else min(self._done, self._of), self._of)


_under_way: list[Progress] = []  # of the calls that are running, the innermost last


@contextlib.contextmanager
def reporting(progress: Progress) -> Iterator[None]:
    """Context in which :func:`report` reaches this call's progress."""
    _under_way.append(progress)
    try:
        yield
    finally:
        _under_way.remove(progress)


def report(stage: str, done: int, of: int | None) -> None:
    """Report a stage far below the call with ``progress=``, such as compiling.

    >>> with reporting(print):
    ...     report("compiling …", 0, 1)
    compiling … 0 1
    """
    for progress in _under_way[-1:]:
        progress(stage, done, of)
