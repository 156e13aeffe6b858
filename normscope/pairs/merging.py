"""Captures of several runs merged into one, with no input counted twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from normscope.errors import DataError, UsageError
from normscope.pairs.captures import Capture
from normscope.pairs.storage import load_capture
from normscope.pairs.sums.sampling import NO_KEY, TokenSample
from normscope.pairs.sums.stats import PairStats

Source: TypeAlias = Capture | str | Path


def merge_captures(captures: Sequence[Source]) -> Capture:
    """Return the capture of all inputs of several runs; in any order the same, up to float64's rounding of sums.

    Files are read one after the other: no more than two of them are in memory at once, however many there are.

    That an input was captured twice shows in the drawing samples, which hold the tokens and pairs of least keys of
    each capture: of the inputs that two share, the least of both is among them. How surely, follows from the part J of
    all inputs that is shared (Broder, "On the resemblance and containment of documents", 1997): each of the thousands
    of places for single pairs misses it with 1 − J.

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
        if common := _twice(merged, other):
            first = next(i for i in range(number) if _twice(_loaded(captures[i]), other))
            raise DataError(
                f"Cannot merge {names[first]} and {names[number]}: both hold {common}, and merged it would be counted "
                "twice. Capture other inputs, or leave one of the two out."
            )
        try:
            merged = merged.merge(other)
        except DataError as error:
            reason = str(error).removeprefix("Cannot merge ")
            raise DataError(f"Cannot merge {names[0]} and {names[number]}: {reason}") from None
    return merged


def _loaded(source: Source) -> Capture:
    return source if isinstance(source, Capture) else load_capture(source)


def _name(source: Source, number: int) -> str:
    return f"capture {number + 1}" if isinstance(source, Capture) else str(source)


def _twice(one: Capture, other: Capture) -> str | None:
    """An input that both captures drew tokens or pairs from; None if none shows."""
    if one.seed != other.seed:  # the keys of one say nothing of the other's
        return None
    both = [(stats, other.stats[name]) for name, stats in one.stats.items() if name in other.stats]
    for mine, theirs in both:
        for sample in _samples_of_both(mine, theirs):
            return f"sample {sample} of the same data"
    return "some samples of the same data" if any(_pairs_of_both(*stats) for stats in both) else None


def _samples_of_both(one: PairStats, other: PairStats) -> Iterator[int]:
    for name in ("tokens", "largest"):
        (mine, samples), (theirs, _) = (_identified(getattr(stats, name)) for stats in (one, other))
        yield from samples[torch.isin(mine, theirs)].tolist()


def _identified(drawn: TokenSample) -> tuple[Tensor, Tensor]:
    """Keys and samples of the drawn tokens whose sample is known."""
    known = (drawn.sample >= 0) & (drawn.key != NO_KEY)
    return drawn.key[known], drawn.sample[known]


def _pairs_of_both(one: PairStats, other: PairStats) -> bool:
    if not (one.sources.mapped and other.sources.mapped):  # pairs do not tell whether their token was of a sample
        return False
    return bool((one.pairs.filled & (one.pairs.key == other.pairs.key)).any())
