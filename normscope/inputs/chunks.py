"""Inputs of a network: read in chunks, and divided among processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from normscope.errors import DataError
from normscope.inputs.batch import Batch, Sample, as_batches
from normscope.inputs.previews import Normalized, Preview, Words, preview_of

if TYPE_CHECKING:
    pass

_T = TypeVar("_T")


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
    """Unreadable and cut inputs so far, as in :class:`Chunk`.

    >>> left_out = LeftOut()
    >>> left_out.add(Chunk([3, 4], [], {4: "b.png: truncated"}))
    >>> left_out.lines
    ['b.png: truncated']
    """

    unreadable: dict[int, str] = field(default_factory=dict)
    cut: int = 0

    def add(self, other: Chunk | LeftOut) -> None:
        self.unreadable |= other.unreadable
        self.cut += other.cut

    @property
    def lines(self) -> list[str]:
        """``name: reason`` of each unreadable input, in the order of their numbers."""
        return [self.unreadable[number] for number in sorted(self.unreadable)]


class Done:
    """Numbers of the inputs already processed, at a byte per input.

    >>> done = Done()
    >>> done.add([0, 2])
    >>> 2 in done, 1 in done, 7 in done, len(done)
    (True, False, False, 2)
    """

    def __init__(self, flags: bytes = b"") -> None:
        self._flags = bytearray(flags)

    def add(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number >= len(self._flags):
                self._flags.extend(bytes(number + 1 - len(self._flags)))
            self._flags[number] = 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number < len(self._flags) and bool(self._flags[number])

    def __len__(self) -> int:
        return self._flags.count(1)

    @property
    def numbers(self) -> Iterator[int]:
        """Numbers of the processed inputs, ascending."""
        return (number for number, flag in enumerate(self._flags) if flag)

    @property
    def flags(self) -> bytes:
        """One byte, 1 or 0, for each input up to the last processed one."""
        return bytes(self._flags)


@dataclass(frozen=True)
class Share:
    """One process's share of some inputs: every ``ranks``-th of the remaining chunks, from its own rank on, unpadded.

    >>> [list(Share(rank, 2).of("abcde")) for rank in range(2)]
    [['a', 'c', 'e'], ['b', 'd']]
    """

    rank: int = 0
    ranks: int = 1
    done: Container[int] = ()

    def of(self, chunks: Iterable[_T]) -> Iterator[_T]:
        return islice(chunks, self.rank, None, self.ranks)

    def left(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the inputs that have not been processed."""
        return (number for number in numbers if number not in self.done)


ALL = Share()


class Inputs(ABC):
    """Batches to run a network on, on its device and in its dtype; iterating again yields the same batches.

    Attributes:
        batch_size: largest number of inputs read together; 1 for a user's own batches.
        left_out: unreadable and cut inputs of the latest iteration.
        normalized_by: mean and standard deviation of each channel of pixels from 0 to 1; None if unknown.
        words: from token ids to their texts; None if unknown.
    """

    batch_size: int = 1
    left_out: LeftOut
    normalized_by: Normalized | None = None
    words: Words | None = None

    @property
    @abstractmethod
    def description(self) -> str:
        """One line about the data."""

    @abstractmethod
    def chunks(self, share: Share) -> Iterator[Chunk]:
        """Yield the chunks of one process's share, and note omissions in ``left_out``."""

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
        """Return the first sample that can be read, in any process's share; DataError if there is none."""
        for batch in self:
            return batch.first_sample()
        raise DataError(f"No sample can be read of {self.description}.")

    def known_samples(self) -> Iterator[Sample]:
        """Yield all samples in order, without reading them where they are known before."""
        return (sample for batch in self for sample in batch.samples)

    def preview(self, batch: Batch, place: int) -> Preview | None:
        """Return a preview of a sample of one of these batches; None if there is nothing to show."""
        return preview_of(batch, place, self.normalized_by, self.words)


class Entries(Inputs):
    """Entries of a user's own iterable, see :func:`normscope.inputs.batch.as_batches`; each counts as one input."""

    description = "inputs"

    def __init__(self, entries: Iterable[Any]) -> None:
        self.left_out, self._entries = LeftOut(), entries

    def chunks(self, share: Share) -> Iterator[Chunk]:
        return self.apart(share)[1]

    def apart(self, share: Share) -> tuple[Batch | None, Iterator[Chunk]]:
        """Return the first batch, which an iterator yields only once, and the chunks of a share."""
        stream = as_batches(self._entries)
        first = next(stream, None)
        batches = enumerate(chain([] if first is None else [first], stream))
        left = (Chunk([number], [batch]) for number, batch in batches if number not in share.done)
        return first, share.of(left)


def as_inputs(batches: Iterable[Any]) -> Inputs:
    """Return inputs as they are, and any other iterable as :class:`Entries`."""
    inputs: Any = batches
    return inputs if hasattr(inputs, "chunks") else Entries(batches)


def shared(batches: Iterable[Any], share: Share, *, may_be_none: bool = False) -> tuple[Batch | Any, Iterator[Chunk]]:
    """Return the first sample of all inputs, and the chunks of one process's share; DataError if there is no batch.

    ``batches`` are :class:`Inputs`, or any iterable that :func:`normscope.inputs.batch.as_batches` takes.
    With ``may_be_none`` the first sample of no batch is None.
    """
    inputs = as_inputs(batches)
    if isinstance(inputs, Entries):
        first, chunks = inputs.apart(share)
        if first is None and not may_be_none:
            raise DataError("There is no batch to run the model on.")
        return first and first.first_sample(), chunks
    chunks = (replace(chunk, batches=as_batches(chunk.batches)) for chunk in inputs.chunks(share))
    return next(as_batches([inputs.first_sample()])), chunks
