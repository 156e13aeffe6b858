"""Progress of long calls, reported in one way everywhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm.auto import tqdm

# Called with the name of a stage, the amount done and the total (None if unknown). A name ending in … is one long step.
Progress = Callable[[str, int, int | None], object]


def is_one_step(stage: str) -> bool:
    """True if a stage is one long step without progress of its own."""
    return stage.endswith("…")


def silent(stage: str, completed: int, total: int | None) -> None:
    """Report nothing."""


class ProgressBars:
    """Progress bars for ``progress=``, in a notebook or a terminal: one for each stage, removed at its end.

    >>> import normscope, torch
    >>> bars = ProgressBars()
    >>> seen = normscope.capture(torch.nn.LayerNorm(4), [torch.randn(2, 4)], progress=bars)
    """

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[NoReturn]] = {}

    def __call__(self, stage: str, completed: int, total: int | None) -> None:
        from tqdm.auto import tqdm

        if is_one_step(stage):
            tqdm.write(stage, file=sys.stderr)
            return
        bar = self._bars.get(stage)
        if bar is None:
            bar = self._bars[stage] = tqdm(desc=stage, total=total, leave=False)
        elif completed < bar.n:  # the next call; the total of the previous one was unknown
            bar.reset(total)
        bar.update(completed - bar.n)
        if completed == total:
            self._bars.pop(stage).close()


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


def report(stage: str, completed: int, total: int | None) -> None:
    """Report a stage far below the call with ``progress=``, such as compiling.

    >>> with reporting(print):
    ...     report("compiling …", 0, 1)
    compiling … 0 1
    """
    for progress in _under_way[-1:]:
        progress(stage, completed, total)
