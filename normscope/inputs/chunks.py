"""Inputs of a network, read in chunks that ranks divide among them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeVar

from normscope.errors import DataError
from normscope.inputs.batch import Batch, Sample, as_batches
from normscope.inputs.previews import Normalized, Preview, Words, preview_of

_T = TypeVar("_T")


class InputSet:
    """Set of numbers of inputs, at a byte per input.

    >>> captured = InputSet()
    >>> captured.update([0, 2])
    >>> 2 in captured, 1 in captured, 7 in captured, len(captured)
    (True, False, False, 2)
    """

    def __init__(self, flags: bytes = b"") -> None:
        self._flags = bytearray(flags)

    def update(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number >= len(self._flags):
                self._flags.extend(bytes(number + 1 - len(self._flags)))
            self._flags[number] = 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number < len(self._flags) and bool(self._flags[number])

    def __iter__(self) -> Iterator[int]:
        return (number for number, flag in enumerate(self._flags) if flag)

    def __len__(self) -> int:
        return self._flags.count(1)

    @property
    def flags(self) -> bytes:
        """One byte, 1 or 0, for each input up to the last of the set."""
        return bytes(self._flags)


@dataclass(frozen=True)
class RankSampler:
    """Sampler of the inputs that one rank reads: every ``ranks``-th group of those not yet captured, unpadded.

    >>> [list(RankSampler(rank, 2, captured={0}).groups(range(6), 2)) for rank in range(2)]
    [[[1, 2], [5]], [[3, 4]]]
    """

    rank: int = 0
    ranks: int = 1
    captured: Container[int] = ()

    def groups(self, numbers: Iterable[int], size: int) -> Iterator[list[int]]:
        """Yield the numbers of this rank's inputs in groups of ``size``; the last has the rest."""
        remaining = (number for number in numbers if number not in self.captured)
        return islice(iter(lambda: list(islice(remaining, size)), []), self.rank, None, self.ranks)

    def select(self, numbered: Iterable[tuple[int, _T]]) -> Iterator[tuple[int, _T]]:
        """Yield this rank's entries of a stream that cannot be read by number."""
        remaining = (entry for entry in numbered if entry[0] not in self.captured)
        return islice(remaining, self.rank, None, self.ranks)


ALL = RankSampler()


@dataclass(frozen=True)
class Chunk:
    """Inputs that are read together.

    Attributes:
        numbers: of the inputs.
        batches: to be iterated once, in order; may be empty.
        unreadable: ``name: reason`` of unreadable inputs, by their numbers.
        cut: number of truncated inputs.
    """

    numbers: Sequence[int]
    batches: Iterable[Batch]
    unreadable: dict[int, str] = field(default_factory=dict)
    cut: int = 0

    def pin_memory(self) -> Chunk:
        """Return the chunk with its batches in pinned memory, as a DataLoader asks for it."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


@dataclass
class LeftOut:
    """Unreadable and truncated inputs of several chunks.

    >>> left_out = LeftOut()
    >>> left_out.add(Chunk([3, 4], [], {4: "b.png: truncated"}))
    >>> left_out.lines
    ['b.png: truncated']
    """

    unreadable: dict[int, str] = field(default_factory=dict)
    cut: int = 0

    def add(self, more: Chunk | LeftOut) -> None:
        self.unreadable |= more.unreadable
        self.cut += more.cut

    @property
    def lines(self) -> list[str]:
        """``name: reason`` of each unreadable input, in the order of their numbers."""
        return [self.unreadable[number] for number in sorted(self.unreadable)]


class Inputs(ABC):
    """Batches to run a network on, on its device and in its dtype; iterating again yields the same batches.

    Attributes:
        left_out: unreadable and truncated inputs of the latest iteration.
        normalized_by: mean and standard deviation of each channel of pixels from 0 to 1; None if unknown.
        words: from token ids to their texts; None if unknown.
    """

    left_out: LeftOut
    normalized_by: Normalized | None = None
    words: Words | None = None

    @property
    @abstractmethod
    def description(self) -> str:
        """One line about the data."""

    @abstractmethod
    def chunks(self, sampler: RankSampler) -> Iterator[Chunk]:
        """Yield the chunks of one rank, and count omissions in ``left_out``."""

    @property
    def n_samples(self) -> int | None:
        """Largest possible number of samples; None if only iterating would show it."""
        return None

    @property
    def unreadable(self) -> list[str]:
        """``name: reason`` of each input that the latest iteration could not read, in order."""
        return self.left_out.lines

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches; DataError at the end if no input could be read."""
        for chunk in self.chunks(ALL):
            yield from chunk.batches

    def first_sample(self) -> Batch:
        """Return the first sample that can be read, of any rank; DataError if there is none."""
        for batch in self:
            return batch.first_sample()
        raise DataError(f"No sample can be read of {self.description}.")

    def known_samples(self) -> Iterator[Sample]:
        """Yield all samples in order, without reading them if they are known before."""
        return (sample for batch in self for sample in batch.samples)

    def preview(self, batch: Batch, index: int) -> Preview | None:
        """Return a preview of a sample of one of these batches; None if there is nothing to show."""
        return preview_of(batch, index, self.normalized_by, self.words)


class Entries(Inputs):
    """Entries of a user's own iterable, see :func:`normscope.inputs.batch.as_batches`; each counts as one input."""

    description = "inputs"

    def __init__(self, entries: Iterable[Any]) -> None:
        self.left_out, self._entries = LeftOut(), entries

    def chunks(self, sampler: RankSampler) -> Iterator[Chunk]:
        batches = enumerate(as_batches(self._entries))
        return (Chunk([number], [batch]) for number, batch in sampler.select(batches))


def as_inputs(batches: Iterable[Any]) -> Inputs:
    """Return inputs as they are, and any other iterable as :class:`Entries`."""
    inputs: Any = batches
    return inputs if hasattr(inputs, "chunks") else Entries(batches)


def first_and_chunks(batches: Iterable[Any], sampler: RankSampler) -> tuple[Batch | None, Iterator[Chunk]]:
    """Return the first sample of all inputs, None if there is no batch, and the chunks of one rank.

    ``batches`` are :class:`Inputs`, or any iterable that :func:`normscope.inputs.batch.as_batches` takes.
    """
    inputs = as_inputs(batches)
    if not isinstance(inputs, Entries):
        return inputs.first_sample(), inputs.chunks(sampler)
    stream = as_batches(batches)  # once: an iterator cannot be read again, and each start of a DataLoader is processes
    first = next(stream, None)
    entries = Entries(stream if first is None else chain([first], stream))
    return first and first.first_sample(), entries.chunks(sampler)
