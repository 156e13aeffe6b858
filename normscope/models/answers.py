"""A server's first answer within a deadline, or the reason why there is none; and why no cache can take a download."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError

from normscope.errors import ModelError
from normscope.models.registry import embedded_models

DEADLINE = 3.0  # seconds for the first answer, which takes less than one where all is well

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OF_FILES = (errno.EACCES, errno.EPERM)  # and of connections that a firewall forbids, which name no file


class UnusableCacheError(ModelError):
    """The folder that downloads go to is full, or may not be written."""


def ask(question: Callable[[], object], deadline: float = DEADLINE) -> Exception | None:
    """Return what ``question`` raises, TimeoutError where it is not done within ``deadline`` seconds, or None.

    In a thread, because the timeouts of HTTP libraries hold for each address that the host's name has, and do not
    hold for looking that name up.

    >>> ask(lambda: None)
    >>> ask(lambda: 1 // 0)
    ZeroDivisionError('integer division or modulo by zero')
    """
    outcome: list[Exception | None] = []

    def run() -> None:
        try:
            question()
            outcome.append(None)
        except Exception as error:  # reason() tells them apart, in the thread that can raise
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline)
    return outcome[0] if outcome else TimeoutError()


def reason(error: Exception, host: str, within: str = f"{DEADLINE:g} s") -> str:
    """Say in one clause why the hub at ``host`` does not answer; ``within`` is how long was waited for it.

    >>> reason(TimeoutError(), "huggingface.co")
    'the hub at huggingface.co did not answer within 3 s'
    """
    if isinstance(error, HTTPError):
        return reason_of_status(error.code, host)
    causes = list(_causes(error))
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return f"the name of the hub, {host}, cannot be resolved"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return f"the hub at {host} refuses the connection"
    if any("Timeout" in type(cause).__name__ for cause in causes):
        return f"the hub at {host} did not answer within {within}"
    return f"asking the hub at {host} failed with {first_line(error)}"


def reason_of_status(status: int, host: str) -> str:
    """Say in one clause what an HTTP status other than 200 means.

    >>> reason_of_status(404, "huggingface.co")
    'huggingface.co does not know them (status 404)'
    """
    if status == 404:
        return f"{host} does not know them (status 404)"
    if status in (401, 403):
        return f"{host} does not give them to you (status {status}): they are private, gated, or not there"
    return f"{host} cannot serve them now (status {status})"


def ways_on(example: str = embedded_models()[0]) -> str:
    """Say what to do without a hub; ``example`` is the embedded model that comes nearest to the one asked for."""
    return (
        "Name a file with --weights FILE, take --weights random, or use an embedded model, which needs no "
        f"network: normscope plot {example}."
    )


def check_cache(error: BaseException, folder: Path, variable: str) -> None:
    """Raise where a download failed on the disk that it was to be written to.

    Args:
        error: that the download, or reading what it brought, raised.
        folder: of the cache.
        variable: of the environment, which says where the cache is.

    Raises:
        UnusableCacheError: if the folder is full, or must not be written or read.

    >>> check_cache(OSError(errno.ENOSPC, "No space left on device"), Path("/c/hub"), "HF_HOME")
    Traceback (most recent call last):
    normscope.models.answers.UnusableCacheError: The cache /c/hub cannot be used: No space left on device. Set HF_HOME \
to a folder that has room and can be written to.
    """
    for cause in _causes(error):
        number, file = _error_number(cause), getattr(cause, "filename", None)
        if number in _OF_DISKS or (number in _OF_FILES and file is not None):
            what = os.strerror(number) + (f" ({file})" if file else "")
            raise UnusableCacheError(
                f"The cache {folder} cannot be used: {what}. Set {variable} to a folder that has room and can be "
                "written to."
            ) from error


def _error_number(error: BaseException) -> int:
    """Return the system's number of an error, or 0; libraries written in Rust have it in their message alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    told = re.search(r"\(os error (\d+)\)", str(error))
    return int(told[1]) if told else 0


def first_line(error: Exception) -> str:
    """Name an error and say the first line of its message, without the stop at its end.

    >>> first_line(ValueError("too long:\\nsee below"))
    'ValueError: too long'
    """
    line = str(error).strip().partition("\n")[0].rstrip(".:")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
