"""Downloads: a server's first answer within a deadline, and files by URL in torch.hub's cache."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from normscope.errors import ModelError

DEADLINE = 3.0  # seconds for the first answer, which takes less than one where all is well


def ask(question: Callable[[], object], deadline: float = DEADLINE) -> Exception | None:
    """Return the exception of ``question``, TimeoutError if it takes more than ``deadline`` seconds, or None.

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
    """Explain in one clause why the hub at ``host`` does not answer; ``within`` is the time that it had.

    >>> reason(TimeoutError(), "huggingface.co")
    'the hub at huggingface.co did not answer within 3 s'
    """
    cause: BaseException | None = error
    while cause is not None:
        if "Timeout" in type(cause).__name__:
            return f"the hub at {host} did not answer within {within}"
        cause = cause.__cause__ or cause.__context__
    return f"asking the hub at {host} failed with {first_line(error)}"


def ways_on(example: str = "demo_vit") -> str:
    """Remedies without a hub; ``example`` is the embedded model nearest to the requested one."""
    return (
        "Name a file with --weights FILE, take --weights random, or use an embedded model, which needs no "
        f"network: normscope plot {example}."
    )


def first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message, without the stop at its end.

    >>> first_line(ValueError("too long:\\nsee below"))
    'ValueError: too long'
    """
    line = str(error).strip().partition("\n")[0].rstrip(".:")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


SILENCE = 20.0  # seconds without a byte after which a download has broken off

T = TypeVar("T")


def cache() -> Path:
    """Return the folder that holds what torch.hub downloads, whether it is there yet or not."""
    return Path(torch.hub.get_dir())


def fetch(url: str, cached: Path, download: Callable[[], T], *, embedded: str) -> T:
    """Download a file, after checking that its server answers.

    Args:
        url: https; where the weights are published.
        cached: the file that they come to lie in.
        download: brings ``url`` to ``cached`` unless that is there, and may load it.
        embedded: the model that the message names for want of a network.

    Raises:
        ModelError: if the weights cannot be had, or ``download`` fails on them.
    """
    try:
        if not cached.exists():
            _check_answer(url, embedded)
        # torch.hub says on stdout what it downloads, where the results of normscope go.
        with redirect_stdout(sys.stderr), _socket_timeout(SILENCE):
            return download()
    except Exception as error:  # of urllib, of the disk, of torch
        if isinstance(error, ModelError) and not cached.exists():  # the server's answer is none
            raise
        raise ModelError(_failure(error, url, cached, embedded)) from error


def broken_off(what: str, folder: Path, error: Exception, remedy: str) -> str:
    """Report a download that a server or the disk ended."""
    return f"The download of {what} to {folder} broke off: {first_line(error)}. {remedy}"


def _failure(error: Exception, url: str, cached: Path, embedded: str) -> str:
    """Explain what is wrong with a download or a cached file, and the remedy."""
    if not cached.exists():
        return broken_off(url, cached.parent, error, f"TORCH_HOME sets another folder. {ways_on(embedded)}")
    delete = "Delete it, and the next run fetches it again."
    if isinstance(error, ModelError):
        return f"{error} It is in torch.hub's cache. {delete}"
    why = f"it is damaged, or of another network ({first_line(error)})"
    if isinstance(error, pickle.UnpicklingError):
        why = "it is damaged, or holds Python objects besides tensors, which can run any code"
    return f"The file {str(cached)!r} in torch.hub's cache does not load: {why}. {delete}"


def _check_answer(url: str, embedded: str) -> None:
    """Ask for the file's headers alone; raise ModelError if there is no such answer within the deadline."""
    host = urlsplit(url).netloc

    def question() -> None:
        with urlopen(Request(url, method="HEAD"), timeout=DEADLINE) as answer:  # noqa: S310 (always https)
            if answer.headers.get_content_type() == "text/html":
                raise NotAHubError

    failure = ask(question)
    if failure is not None:
        is_page = isinstance(failure, NotAHubError)
        why = f"what answers at {host} is a web page" if is_page else reason(failure, host)
        raise ModelError(f"The weights {url} cannot be had: {why}. {ways_on(embedded)}") from failure


class NotAHubError(Exception):
    """The answer is a web page: a captive portal's, or that of a mistyped address."""


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
