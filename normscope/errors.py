"""Errors that normscope raises on purpose, each with its exit status.

Messages are whole sentences with the wrong value and the remedy.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence


class NormscopeError(Exception):
    """Base of all errors that normscope raises on purpose."""

    exit_status = 1


class UsageError(NormscopeError):
    """An invalid argument: an unknown curve, layer, option value or output path."""

    exit_status = 2


class ModelError(NormscopeError):
    """A model or its weights are unavailable: unknown name, no network, a checkpoint that does not fit."""

    exit_status = 3


class DataError(NormscopeError):
    """Input data or a capture file cannot be read."""

    exit_status = 4


class DeviceError(NormscopeError):
    """The requested device is not available."""

    exit_status = 5


class MemoryEndedError(DeviceError):
    """Weights or a forward pass need more memory than there is."""


class RankLostError(DeviceError):
    """Another of the processes that divide the work ended before its part was finished."""


class StoppedError(NormscopeError):
    """A run stopped between two batches, as the user or the system asked."""

    exit_status = 130


def unknown(what: str, value: str, choices: Iterable[str]) -> str:
    """Return a sentence on an unknown value of an option, with the nearest choices.

    >>> unknown("curve", "thanh", ["tanh", "isru"])
    "There is no curve 'thanh'. Did you mean 'tanh'?"
    >>> unknown("curve", "spline", ["tanh", "isru"])
    "There is no curve 'spline'. There are: tanh, isru."
    """
    names = list(choices)
    near = difflib.get_close_matches(value, names, n=3, cutoff=0.6)
    if near:
        return f"There is no {what} {value!r}. Did you mean {' or '.join(repr(name) for name in near)}?"
    return f"There is no {what} {value!r}. There are: {', '.join(names)}."


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "image"), count(2000, "image")
    ('1 image', '2,000 images')
    """
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def first_few(names: Sequence[str]) -> str:
    """Return the first three of many names, and the number of the others.

    >>> first_few(["a", "b", "c", "d", "e"])
    'a, b, c, and 2 more'
    """
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, without the stop at its end.

    >>> first_line(ValueError("too long:\\nsee below"))
    'ValueError: too long'
    """
    line = str(error).strip().partition("\n")[0].rstrip(".:")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def warn(text: str) -> None:
    """Warn at the line outside of normscope that called it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("normscope."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
