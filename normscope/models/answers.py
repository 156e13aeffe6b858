"""A server's first answer within a deadline, or the reason why there is none: what every download begins with."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from urllib.error import HTTPError

from normscope.models.registry import embedded_models

DEADLINE = 3.0  # seconds for the first answer, which takes less than one where all is well


def ask(question: Callable[[], object]) -> Exception | None:
    """Return what ``question`` raises, TimeoutError where it is not done within DEADLINE, or None.

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
    thread.join(DEADLINE)
    return outcome[0] if outcome else TimeoutError()


def reason(error: Exception, host: str) -> str:
    """Say in one clause why the hub at ``host`` does not answer.

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
        return f"the hub at {host} did not answer within {DEADLINE:g} s"
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
