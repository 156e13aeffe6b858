"""Signals that stop a command between two batches."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from normscope.runtime.processes import Process


@contextlib.contextmanager
def stopping_between_chunks(warn: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once a signal has asked to stop, which ``warn`` reports.

    A second signal interrupts at once. Under torchrun it changes nothing: torchrun repeats the signal that the terminal
    has already sent to all processes, and kills them after half a minute.
    """
    asked, launched = False, Process.current().launched

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and not launched:
            raise KeyboardInterrupt
        if not asked:
            asked = True
            with contextlib.suppress(Exception):  # the reader of stderr, such as tee, may have ended by the signal too
                warn("Finishing the batch." if launched else "Finishing the batch; once more to stop at once.")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
