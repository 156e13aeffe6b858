"""Standard output and standard error, when nobody reads them, nothing fits into them, or they are not there."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import cast

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
        # What is still in the buffer goes nowhere, instead of failing again when the interpreter exits.
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
        errors=text.errors,
        line_buffering=text.line_buffering,
        write_through=text.write_through,
    )
