"""Inputs divided into those to learn from and those held out, source by source.

Whatever is fitted or trained is judged on other inputs; crops of one photograph are not other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from normscope.batches import Batch, Sample, as_batches
from normscope.errors import DataError, count
from normscope.shares import ALL, Chunk, LeftOut, Share, shared

if TYPE_CHECKING:
    from torch import Tensor

_ONE_IN = 4  # sources is held out

_Key = tuple[str, str | int]


class Inputs(Protocol):
    """Batches that say what they are; iterating again gives the same batches again.

    Attributes:
        batch_size: how many inputs are read together, at most. Setting it changes what comes next.
        left_out: what the latest iteration could not read, or has cut.
    """

    batch_size: int
    left_out: LeftOut

    @property
    def description(self) -> str:
        """One line that says what was read."""

    @property
    def n_samples(self) -> int | None:
        """How many samples there are at most; None where only iterating would tell."""

    @property
    def n_inputs(self) -> int | None:
        """How many inputs there are; None where only iterating would tell."""

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
        """How many inputs there are to look for samples in; None where only iterating would tell."""
        n_inputs: int | None = getattr(
            self.inputs, "n_inputs", len(self.inputs) if isinstance(self.inputs, Sized) else None
        )
        return n_inputs

    @property
    def batch_size(self) -> int:
        """How many inputs are read together, at most; of a plain list of batches each is one, and that stays so."""
        batch_size: int = getattr(self.inputs, "batch_size", 1)
        return batch_size

    @batch_size.setter
    def batch_size(self, number: int) -> None:
        if hasattr(self.inputs, "batch_size"):
            self.inputs.batch_size = number

    @property
    def left_out(self) -> LeftOut:
        """What the latest iteration could not read, or has cut, of this part and of the others."""
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
        own = hasattr(self.inputs, "chunks")
        chunks = self.inputs.chunks(share) if own else shared(self.inputs, share)[1]
        return (replace(chunk, batches=self._own(chunk.batches)) for chunk in chunks)

    def first_sample(self) -> Batch:
        """Return the first sample of this part that can be read.

        Raises:
            DataError: if there is none.
        """
        for batch in self:
            return batch.first_sample()
        raise DataError(f"No sample can be read of {self.description}.")

    @property
    def ends(self) -> Callable[..., Iterator[tuple[Sequence[Sample], Tensor]]] | None:
        """What walks this part's trajectories to their ends, or those of a share of them.

        None where the inputs are no trajectories, or are a single one's.
        """
        walk = getattr(self.inputs, "ends", None)
        if walk is None or self.by != "source":
            return None
        return lambda share=ALL: self._own_ends(walk(share))

    def _own(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            own = [i for i, sample in enumerate(batch.samples) if _key(sample, self.by) in self._keys]
            if own:
                yield batch if len(own) == len(batch.samples) else batch.take(own)

    def _own_ends(self, ends: Iterable[tuple[Sequence[Sample], Tensor]]) -> Iterator[tuple[Sequence[Sample], Tensor]]:
        for samples, latents in ends:
            own = [i for i, sample in enumerate(samples) if _key(sample, self.by) in self._keys]
            if own:
                yield [samples[i] for i in own], latents[own]


def divided(inputs: Inputs, calibration: Inputs | None = None) -> tuple[Inputs | Part, Inputs | Part]:
    """Return what to learn from, and what to judge by: calibration and inputs, or two parts of the inputs.

    Args:
        inputs: of a :class:`normscope.models.base.LoadedModel`.
        calibration: likewise.

    Raises:
        DataError: see :func:`learned_and_held_out`.
    """
    return learned_and_held_out(inputs) if calibration is None else (calibration, inputs)


def learned_and_held_out(inputs: Iterable[Any]) -> tuple[Part, Part]:
    """Divide inputs: every fourth source is held out, and the last one where there are fewer than four.

    Of a single source the samples are divided instead, and the descriptions say so. To see what there is, inputs that
    know their samples, as those of ``known_samples()`` do, are asked, and others are gone through once. Of a sample
    that turns out to be unreadable nothing comes.

    Args:
        inputs: batches as :func:`normscope.capture` takes them, that can be iterated more than once: a list, or the
            inputs of a :class:`normscope.models.base.LoadedModel`.

    Raises:
        DataError: if there are fewer than two samples, or if the inputs cannot be iterated again.

    >>> import torch
    >>> learned, held_out = learned_and_held_out([torch.zeros(4, 8), torch.zeros(4, 8)])
    >>> learned.n_samples, held_out.n_samples
    (6, 2)
    """
    if iter(inputs) is inputs:
        raise DataError(
            "The inputs can be iterated only once, and a part of them has to be held out; pass a list of batches."
        )
    known = getattr(inputs, "known_samples", None)
    samples = list(known()) if known else [sample for batch in as_batches(inputs) for sample in batch.samples]
    by = "source" if len({_key(sample, "source") for sample in samples}) > 1 else "sample"
    keys = list(dict.fromkeys(_key(sample, by) for sample in samples))
    if len(keys) < 2:
        raise DataError(
            f"The inputs hold {count(len(keys), 'sample')}; to learn from some and hold others out takes two at least."
        )
    held = frozenset(keys[_ONE_IN - 1 :: _ONE_IN] or keys[-1:])
    return (
        _part(inputs, samples, by, frozenset(keys) - held, "to learn from"),
        _part(inputs, samples, by, held, "held out"),
    )


def _part(inputs: Iterable[Any], samples: Sequence[Sample], by: str, keys: frozenset[_Key], which: str) -> Part:
    number = sum(_key(sample, by) in keys for sample in samples)
    of_one = "" if by == "source" else ", all of one source"
    described = f"{getattr(inputs, 'description', 'inputs')} · {number} of {len(samples)} samples {which}{of_one}"
    return Part(inputs, described, by, number, keys)


def _key(sample: Sample, by: str) -> _Key:
    return sample.data, sample.source if by == "source" else sample.index
