"""Ctrl-C, and the signal with which a system ends a job: finish the batch, keep what there is, then stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from normscope.processes import Place

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stopping_between_chunks(say: Callable[[str], None], never: bool = False) -> Iterator[Callable[[], bool]]:
    """Yield what tells whether to stop, in place of being interrupted anywhere; a second signal interrupts at once.

    Not so under torchrun, which passes on what the terminal has told all processes already: a second signal is none of
    the user's. It kills them after half a minute.

    Args:
        say: called once with a sentence for the user, at the first signal.
        never: leave the signals as they are, where nothing would be kept.
    """
    asked = False
    if never:
        yield lambda: False
        return

    launched = Place.from_environment().launched

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and not launched:
            raise KeyboardInterrupt
        if not asked:
            asked = True
            with contextlib.suppress(Exception):  # who reads stderr, a tee perhaps, got the signal too, and may be gone
                say("Finishing the batch." if launched else "Finishing the batch; once more to stop at once.")

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
