"""Weights by URL into torch.hub's cache, or within seconds the reason why not.

torch.hub's downloads wait for ever, so the server is asked one short question first, and may not fall silent later.
TORCH_HOME means what it means to torch.hub; what its cache holds is taken without asking anybody, as it does.
"""

from __future__ import annotations

import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from normscope.errors import ModelError
from normscope.models import answers

SILENCE = 20.0  # seconds without a byte after which a download has broken off

T = TypeVar("T")


def cache() -> Path:
    """Return the folder that holds what torch.hub downloads, whether it is there yet or not."""
    return Path(torch.hub.get_dir())


def fetch(url: str, cached: Path, download: Callable[[], T], *, embedded: str) -> T:
    """Return what ``download`` returns, once sure that it will not wait for a server that does not answer.

    Args:
        url: https; where the weights are published.
        cached: the file that they come to lie in.
        download: brings ``url`` to ``cached`` unless that is there, and may load it.
        embedded: the model that the message names for want of a network.

    Raises:
        UnusableCacheError: if the cache cannot take them, or may not be read.
        ModelError: if the weights cannot be had, or ``download`` fails on them.
    """
    try:
        if not cached.exists():
            _check_answer(url, embedded)
        # torch.hub says on stdout what it downloads, where the results of normscope go.
        with redirect_stdout(sys.stderr), _socket_timeout(SILENCE):
            return download()
    except Exception as error:  # of urllib, of the disk, of torch
        answers.check_cache(error, cache(), "TORCH_HOME")
        if isinstance(error, ModelError) and not cached.exists():  # the server's answer is none
            raise
        raise ModelError(_failure(error, url, cached, embedded)) from error


def _failure(error: Exception, url: str, cached: Path, embedded: str) -> str:
    """Say what went wrong with a download, or with a file that it left in the cache, and what to do about it."""
    if not cached.exists():
        return f"The download of {url} broke off: {answers.first_line(error)}. {answers.ways_on(embedded)}"
    delete = "Delete it, and the next run fetches it again."
    if isinstance(error, ModelError):
        return f"{error} It is in torch.hub's cache. {delete}"
    why = f"it is damaged, or of another network ({answers.first_line(error)})"
    if isinstance(error, pickle.UnpicklingError):
        why = "it is damaged, or holds Python objects besides tensors, which can run any code"
    return f"The file {str(cached)!r} in torch.hub's cache does not load: {why}. {delete}"


def _check_answer(url: str, embedded: str) -> None:
    """Ask for the file's headers alone; raise ModelError if there is no such answer within the deadline."""
    host = urlsplit(url).netloc

    def question() -> None:
        with urlopen(Request(url, method="HEAD"), timeout=answers.DEADLINE) as answer:  # noqa: S310 (always https)
            if answer.headers.get_content_type() == "text/html":
                raise WebPageError

    failure = answers.ask(question)
    if failure is not None:
        is_page = isinstance(failure, WebPageError)
        reason = f"what answers at {host} is a web page" if is_page else answers.reason(failure, host)
        raise ModelError(f"The weights {url} cannot be had: {reason}. {answers.ways_on(embedded)}") from failure


class WebPageError(Exception):
    """The answer is a page to be read by people: a captive portal's, for example."""


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
