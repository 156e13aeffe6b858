"""Which of the inputs one process takes, and which have been taken: the words that all wings divide work by.

An *input* is what is read at once and counted once: a file, a line of text, a latent, a trajectory, a batch of the
user's own. Its number is the same whatever is taken of the data, in whatever order. A *chunk* is some inputs that are
read together; whatever the number of processes is, the chunks are the same, so that a network sees the same batches.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeVar

from normscope.batches import Batch, as_batches
from normscope.errors import DataError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Chunk:
    """Some inputs that are read together, and what became of them.

    Attributes:
        numbers: of the inputs.
        batches: what they became, to be taken once, in order; made while they are taken, where the network makes them.
            None, where not one of the inputs could be read.
        unreadable: ``name: reason`` of each input that could not be read, by its number.
        cut: how many inputs are longer than the network takes, and were cut.
    """

    numbers: Sequence[int]
    batches: Iterable[Batch]
    unreadable: dict[int, str] = field(default_factory=dict)
    cut: int = 0


@dataclass
class LeftOut:
    """What reading left out so far.

    Attributes:
        unreadable: ``name: reason`` of each input that could not be read, by its number.
        cut: how many inputs were cut.

    >>> left_out = LeftOut()
    >>> left_out.add(Chunk([3, 4], [], {4: "b.png: truncated"}))
    >>> left_out.lines
    ['b.png: truncated']
    """

    unreadable: dict[int, str] = field(default_factory=dict)
    cut: int = 0

    def add(self, other: Chunk | LeftOut) -> None:
        """Take in what a chunk, or another process, left out."""
        self.unreadable |= other.unreadable
        self.cut += other.cut

    @property
    def lines(self) -> list[str]:
        """Return what could not be read, in the order of the inputs' numbers."""
        return [self.unreadable[number] for number in sorted(self.unreadable)]


class Done:
    """Which inputs have been taken: a byte an input, so that its size is known from the start.

    >>> done = Done()
    >>> done.add([0, 2])
    >>> 2 in done, 1 in done, 7 in done, len(done)
    (True, False, False, 2)
    """

    def __init__(self, flags: bytes = b"") -> None:
        """Start with what has been taken before, as :attr:`flags` gave it."""
        self._flags = bytearray(flags)

    def add(self, numbers: Iterable[int]) -> None:
        """Note that these inputs have been taken."""
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
        """Yield the inputs that have been taken, in the order of their numbers."""
        return (number for number, flag in enumerate(self._flags) if flag)

    @property
    def flags(self) -> bytes:
        """Return one byte for each input up to the last that was taken: 1 or 0."""
        return bytes(self._flags)


@dataclass(frozen=True)
class Share:
    """What one process takes of some inputs: every ``ranks``-th chunk of what is left, beginning with its own rank.

    No input is taken twice and none is left out, whatever the numbers: nothing is padded to make shares even.

    >>> [list(Share(rank, 2).of("abcde")) for rank in range(2)]
    [['a', 'c', 'e'], ['b', 'd']]
    """

    rank: int = 0
    ranks: int = 1
    done: Container[int] = ()

    def of(self, chunks: Iterable[_T]) -> Iterator[_T]:
        """Yield this process's own of the chunks of what is left."""
        return islice(chunks, self.rank, None, self.ranks)

    def left(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the inputs that have not been taken."""
        return (number for number in numbers if number not in self.done)


ALL = Share()


def shared(batches: Iterable[Any], share: Share) -> tuple[Batch, Iterator[Chunk]]:
    """Return the first sample of all inputs, whoever takes it, and the chunks of one process's share.

    Args:
        batches: inputs with ``chunks(share)`` and ``first_sample()``, see :class:`normscope.splits.Inputs`; or any
            iterable that :func:`normscope.batches.as_batches` takes, of which each entry counts as one input.
        share: of this process.

    Raises:
        DataError: if there is no batch.
    """
    inputs: Any = batches
    if hasattr(inputs, "chunks"):
        chunks = (replace(chunk, batches=as_batches(chunk.batches)) for chunk in inputs.chunks(share))
        return next(as_batches([inputs.first_sample()])), chunks
    stream = as_batches(batches)
    first = next(stream, None)
    if first is None:
        raise DataError("There is no batch to run the model on.")
    entries = (Chunk([number], [batch]) for number, batch in enumerate(chain([first], stream)))
    left = (chunk for chunk in entries if chunk.numbers[0] not in share.done)
    return first.first_sample(), share.of(left)
