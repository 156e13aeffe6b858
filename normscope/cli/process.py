"""The process: Ctrl-C and SIGTERM; closed pipes and full disks under its output."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import cast

from normscope.runtime.processes import Place

_USAGE = 2
_CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell reports a program that the signal ended


class StreamError(Exception):
    """Standard output or standard error takes nothing more.

    No OSError, and no NormscopeError: what handles those (rich, typer, files being written) must let this one pass.

    Attributes:
        sentence: what to tell the user; empty for a closed pipe, whose reader has seen enough.
    """

    def __init__(self, sentence: str, exit_status: int) -> None:
        """Keep what to say and how to exit."""
        super().__init__(sentence)
        self.sentence, self.exit_status = sentence, exit_status


class _Stream(io.TextIOWrapper):
    """A standard stream that raises StreamError once, and from then on drops what is written to it."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._lost(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> StreamError:
        # What is still in the buffer is dropped, as it would fail again when the interpreter exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            return StreamError("", _CLOSED_PIPE)
        name = "output" if self.fileno() == 1 else "error"
        return StreamError(f"Cannot write to standard {name}: {error.strerror or error}.", _USAGE)


def guard_streams() -> None:
    """Make standard output and standard error raise StreamError where they cannot be written.

    Raises:
        StreamError: if standard output is closed.
    """
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    else:
        sys.stderr = _guarded(sys.stderr)
    if sys.stdout is None:
        raise StreamError("Standard output is closed; give it a file or a pipe.", _USAGE)
    sys.stdout = _guarded(sys.stdout)


def flush_streams() -> None:
    """Write what is still in the buffers; StreamError if that fails."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _guarded(stream: object) -> _Stream:
    text = cast(io.TextIOWrapper, stream)
    return _Stream(
        cast(io.BufferedWriter, text.buffer),
        encoding=text.encoding,
        errors="backslashreplace" if text.errors == "strict" else text.errors,  # α, where the encoding is not UTF-8
        line_buffering=text.line_buffering,
        write_through=text.write_through,
    )


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stopping_between_chunks(say: Callable[[str], None], never: bool = False) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether to stop between chunks; a second signal interrupts at once.

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
