"""Progress of long calls, reported in one way everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

# Called with the name of a stage, how much of it is done, and all of it: None where only the end will tell.
Progress = Callable[[str, int, int | None], object]


def silent(stage: str, done: int, of: int | None) -> None:
    """Report nothing."""


class StageProgress:
    """Counts what is done of one stage, and reports it.

    >>> told = StageProgress(print, "samples", 10)
    samples 0 10
    >>> told.add(4)
    samples 4 10
    """

    def __init__(self, progress: Progress, stage: str, of: int | None, ranks: int = 1) -> None:
        """Begin a stage; of several ranks each counts its own share for that of all."""
        self._progress, self._stage, self._of, self._ranks = progress, stage, of, ranks
        self._done = 0
        self.add(0)

    def add(self, number: int) -> None:
        """Count and report what this rank has done since."""
        self._done += number * self._ranks
        self._progress(self._stage, self._done if self._of is None else min(self._done, self._of), self._of)


@contextlib.contextmanager
def told_of_inputs(inputs: object, progress: Progress) -> Iterator[None]:
    """Let inputs that the network itself makes, step by step, report their steps meanwhile; others have nothing to.

    Args:
        inputs: of the network, or a :class:`normscope.inputs.splits.Part` of them.
        progress: is told.
    """
    whole = getattr(inputs, "inputs", inputs)
    if not hasattr(whole, "progress"):
        yield
        return
    before, whole.progress = whole.progress, progress
    try:
        yield
    finally:
        whole.progress = before
