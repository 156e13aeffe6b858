"""Captures of several runs merged into one, with no input counted twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from normscope.errors import DataError, UsageError
from normscope.pairs.captures import Capture, shared_input
from normscope.pairs.storage import load_capture

Source: TypeAlias = Capture | str | Path


def merge_captures(captures: Sequence[Source]) -> Capture:
    """Return the capture of all inputs of several runs; in any order the same, up to float64's rounding of sums.

    Files are read one after the other: no more than two of them are in memory at once, however many there are.

    Args:
        captures: two or more, or the files that hold them.

    Raises:
        DataError: if a file is no capture, if they are not of the same model, weights, sites, seed and kind of sums,
            or if an input is in two of them.
        UsageError: if there are fewer than two.
    """
    if len(captures) < 2:
        raise UsageError(f"Merging takes two captures or more; there {'is one' if captures else 'is none'}.")
    names = [_name(source, number) for number, source in enumerate(captures)]
    merged = _loaded(captures[0])
    for number in range(1, len(captures)):
        other = _loaded(captures[number])
        try:
            merged = merged.merge(other)
        except DataError as error:
            first = next((i for i in range(number) if shared_input(_loaded(captures[i]), other)), 0)
            reason = str(error).removeprefix("Cannot merge ").removeprefix("two captures: ")
            raise DataError(f"Cannot merge {names[first]} and {names[number]}: {reason}") from None
    return merged


def _loaded(source: Source) -> Capture:
    return source if isinstance(source, Capture) else load_capture(source)


def _name(source: Source, number: int) -> str:
    return f"capture {number + 1}" if isinstance(source, Capture) else str(source)
