"""Inputs divided: among processes, and into those to learn from and those held out."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from normscope.errors import DataError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.entries import as_batches, taken_once
from normscope.inputs.previews import Preview, preview_of

if TYPE_CHECKING:
    from torch import Tensor, nn


_T = TypeVar("_T")


@dataclass(frozen=True)
class Chunk:
    """Inputs that are read together, as batches, and what was left out of them.

    Attributes:
        numbers: of the inputs.
        batches: what they became, to be taken once, in order; made while they are taken, where the network makes them.
            None, where not one of the inputs could be read.
        unreadable: ``name: reason`` of each input that could not be read, by its number.
        cut: how many inputs are longer than the network takes, and were cut.
        heard: called, by whoever has run a module on a batch as it came and before the next is asked for, with the
            module and what it gave: where the network makes its inputs, it then takes no second pass for that. None
            where nobody needs it.
    """

    numbers: Sequence[int]
    batches: Iterable[Batch]
    unreadable: dict[int, str] = field(default_factory=dict)
    cut: int = 0
    heard: Callable[[nn.Module, Any], None] | None = None

    def pin_memory(self) -> Chunk:
        """Return the chunk with its batches in pinned memory, as a DataLoader asks for it."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


@dataclass
class LeftOut:
    """Inputs omitted by reading so far.

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
        """Add the omissions of a chunk or of another process."""
        self.unreadable |= other.unreadable
        self.cut += other.cut

    @property
    def lines(self) -> list[str]:
        """Return what could not be read, in the order of the inputs' numbers."""
        return [self.unreadable[number] for number in sorted(self.unreadable)]


class Done:
    """Flags of inputs already read: a byte an input, so that the size is fixed from the start.

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
    """One process's share of some inputs: every ``ranks``-th chunk of the remaining ones, from its own rank on.

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
        batches: inputs with ``chunks(share)`` and ``first_sample()``, see :class:`Inputs`; or any iterable
            that :func:`normscope.inputs.entries.as_batches` takes, of which each entry counts as one input.
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


_ONE_IN = 4  # consecutive sources is held out

_Key = tuple[str, str | int]


class Inputs(Protocol):
    """Batches to run a network on, on its device and in its dtype; iterating again yields the same batches.

    Attributes:
        batch_size: how many inputs are read together, at most. Setting it changes what comes next.
        left_out: what the latest iteration could not read, or has cut.
    """

    batch_size: int
    left_out: LeftOut

    @property
    def description(self) -> str:
        """One line about the data."""

    @property
    def unreadable(self) -> list[str]:
        """``path: reason`` of each input that the latest iteration left out, in order; among ``n_samples``."""

    @property
    def n_samples(self) -> int | None:
        """Largest possible number of samples; None if only iterating would show it."""

    @property
    def n_inputs(self) -> int | None:
        """Number of inputs; None if only iterating would show it."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches; DataError at the end where there was none."""

    def chunks(self, share: Share) -> Iterator[Chunk]:
        """Yield the chunks of one process's share, and note in ``left_out`` what of them could not be read."""

    def first_sample(self) -> Batch:
        """Return the first sample that can be read, whoever's share it is in; DataError where there is none."""


@dataclass
class Part:
    """Some of the samples of other inputs, in batches; to be iterated again and again, as they can be.

    It has the inputs' own chunks, with their numbers, and of their batches the samples of this part.

    Attributes:
        inputs: all of them.
        description: what they are, and which part this is.
        by: what was kept together: ``source`` or ``sample``.
        n_samples: number of samples of this part.
    """

    inputs: Any
    description: str
    by: str
    n_samples: int
    _keys: frozenset[_Key]

    @property
    def n_inputs(self) -> int | None:
        """Number of inputs to search for samples; None if only iterating would show it."""
        n_inputs: int | None = getattr(
            self.inputs, "n_inputs", len(self.inputs) if isinstance(self.inputs, Sized) else None
        )
        return n_inputs

    @property
    def batch_size(self) -> int:
        """Largest number of inputs read together; always one batch for a plain list of batches."""
        batch_size: int = getattr(self.inputs, "batch_size", 1)
        return batch_size

    @batch_size.setter
    def batch_size(self, number: int) -> None:
        if hasattr(self.inputs, "batch_size"):
            self.inputs.batch_size = number

    @property
    def left_out(self) -> LeftOut:
        """Unreadable and truncated inputs of the latest iteration, in this part and the others."""
        left_out: LeftOut = getattr(self.inputs, "left_out", LeftOut())
        return left_out

    @left_out.setter
    def left_out(self, left_out: LeftOut) -> None:
        if hasattr(self.inputs, "left_out"):
            self.inputs.left_out = left_out

    def __iter__(self) -> Iterator[Batch]:
        return self._own(as_batches(self.inputs))

    def chunks(self, share: Share) -> Iterator[Chunk]:
        """Yield the chunks of one process's share, also those that hold nothing of this part."""
        has_chunks = hasattr(self.inputs, "chunks")
        chunks = self.inputs.chunks(share) if has_chunks else shared(self.inputs, share)[1]
        return (replace(chunk, batches=self._own(chunk.batches), heard=None) for chunk in chunks)  # of whole batches

    def first_sample(self) -> Batch:
        """Return the first sample of this part that can be read.

        Raises:
            DataError: if there is none.
        """
        for batch in self:
            return batch.first_sample()
        raise DataError(f"No sample can be read of {self.description}.")

    def known_samples(self) -> Iterator[Sample]:
        """Yield the samples of this part, in order."""
        return (sample for sample in samples_of(self.inputs) if _key(sample, self.by) in self._keys)

    def preview(self, batch: Batch, place: int) -> Preview | None:
        """Return what can be looked at of a sample of one of these batches, as the inputs say."""
        shown: Preview | None = getattr(self.inputs, "preview", preview_of)(batch, place)
        return shown

    @property
    def ends(self) -> Callable[..., Iterator[tuple[Sequence[Sample], Tensor]]] | None:
        """Return a function that runs this part's trajectories, or a share of them, to their ends.

        None where the inputs are no trajectories, or are a single one's.
        """
        walk = getattr(self.inputs, "ends", None)
        if walk is None or self.by != "source":
            return None
        return lambda share=ALL: self._own_ends(walk(share))

    def _own(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            rows = [i for i, sample in enumerate(batch.samples) if _key(sample, self.by) in self._keys]
            if rows:
                yield batch if len(rows) == len(batch.samples) else batch.take(rows)

    def _own_ends(self, ends: Iterable[tuple[Sequence[Sample], Tensor]]) -> Iterator[tuple[Sequence[Sample], Tensor]]:
        for samples, latents in ends:
            rows = [i for i, sample in enumerate(samples) if _key(sample, self.by) in self._keys]
            if rows:
                yield [samples[i] for i in rows], latents[rows]


def divided(inputs: Inputs, calibration: Inputs | None = None) -> tuple[Inputs | Part, Inputs | Part]:
    """Return what to learn from, and what to judge by: calibration and inputs, or two parts of the inputs.

    Args:
        inputs: of a :class:`normscope.inputs.loaded_model.LoadedModel`.
        calibration: likewise.

    Raises:
        DataError: see :func:`learned_and_held_out`.
    """
    return learned_and_held_out(inputs) if calibration is None else (calibration, inputs)


def learned_and_held_out(inputs: Iterable[Any]) -> tuple[Part, Part]:
    """Divide inputs: one source of every four is held out, and the last one where there are fewer than four.

    Its place among the four differs from block to block, so that in periodic data no kind of sources is held out alone.

    Of a single source the samples are divided instead, and the descriptions say so. Unreadable samples are in neither
    part.

    Args:
        inputs: batches as :func:`normscope.capture` takes them, that can be iterated more than once: a list, or the
            inputs of a :class:`normscope.inputs.loaded_model.LoadedModel`.

    Raises:
        DataError: if there are fewer than two samples, or if the inputs cannot be iterated again.

    >>> import torch
    >>> learned, held_out = learned_and_held_out([torch.zeros(4, 8), torch.zeros(4, 8)])
    >>> learned.n_samples, held_out.n_samples
    (6, 2)
    """
    if taken_once(inputs):
        raise DataError(
            "The inputs can be iterated only once, and a part of them has to be held out; pass a list of batches."
        )
    samples = samples_of(inputs)
    by = "source" if len({_key(sample, "source") for sample in samples}) > 1 else "sample"
    keys = list(dict.fromkeys(_key(sample, by) for sample in samples))
    if len(keys) < 2:
        raise DataError(
            f"The inputs hold {count(len(keys), 'sample')}; to learn from some and hold others out takes two at least."
        )
    blocks = (keys[first : first + _ONE_IN] for first in range(0, len(keys) - _ONE_IN + 1, _ONE_IN))
    held = frozenset([block[permutation(_ONE_IN, f"held out\0{n}")[0]] for n, block in enumerate(blocks)] or keys[-1:])
    return (
        _part(inputs, samples, by, frozenset(keys) - held, "to learn from"),
        _part(inputs, samples, by, held, "held out"),
    )


def samples_of(inputs: Iterable[Any]) -> list[Sample]:
    """Return the samples of some inputs in order, from their ``known_samples()`` or by iterating once."""
    known = getattr(inputs, "known_samples", None)
    return list(known()) if known else [sample for batch in as_batches(inputs) for sample in batch.samples]


@functools.lru_cache(maxsize=4096)
def permutation(n: int, key: str) -> list[int]:
    """Return the numbers below n in an order that depends on nothing but the key: the same in every process.

    >>> permutation(4, "block 0"), permutation(4, "block 1")
    ([0, 3, 1, 2], [2, 0, 3, 1])
    """
    return sorted(range(n), key=lambda i: hashlib.blake2b(f"{key}\0{i}".encode("utf-8", "surrogateescape")).digest())


def _part(inputs: Iterable[Any], samples: Sequence[Sample], by: str, keys: frozenset[_Key], which: str) -> Part:
    number = sum(_key(sample, by) in keys for sample in samples)
    of_one = "" if by == "source" else ", all of one source"
    described = f"{getattr(inputs, 'description', 'inputs')} · {number} of {len(samples)} samples {which}{of_one}"
    return Part(inputs, described, by, number, keys)


def _key(sample: Sample, by: str) -> _Key:
    return sample.data, sample.source if by == "source" else sample.index
