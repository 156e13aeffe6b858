"""Inputs divided into those to learn from and those held out."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from normscope.errors import DataError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import ALL, Chunk, Inputs, LeftOut, Share, as_inputs
from normscope.inputs.entries import as_batches, taken_once
from normscope.inputs.previews import Preview

if TYPE_CHECKING:
    from torch import Tensor

_ONE_IN = 4  # consecutive sources is held out

_Key = tuple[str, str | int]


class Part(Inputs):
    """Some of the samples of other inputs, in batches: of the inputs' own chunks, the samples of this part.

    Attributes:
        inputs: all of them.
        by: what was kept together: ``source`` or ``sample``.
    """

    def __init__(self, inputs: Inputs, samples: Sequence[Sample], by: str, keys: frozenset[_Key], which: str) -> None:
        """Note which of all samples belong to the part; ``which`` describes them."""
        self.inputs, self.by, self._keys = inputs, by, keys
        self._n_samples = sum(_key(sample, by) in keys for sample in samples)
        of_one = "" if by == "source" else ", all of one source"
        self._description = f"{inputs.description} · {self._n_samples} of {len(samples)} samples {which}{of_one}"

    @property
    def description(self) -> str:
        """Describe the inputs, and the part."""
        return self._description

    @property
    def n_samples(self) -> int:
        """Number of samples of this part."""
        return self._n_samples

    @property
    def n_inputs(self) -> int | None:
        """Number of inputs to search for samples; None if only iterating would show it."""
        return self.inputs.n_inputs

    @property
    def batch_size(self) -> int:
        """Largest number of inputs read together."""
        return self.inputs.batch_size

    @batch_size.setter
    def batch_size(self, number: int) -> None:
        self.inputs.batch_size = number

    @property
    def left_out(self) -> LeftOut:
        """Unreadable and truncated inputs of the latest iteration, in this part and the others."""
        return self.inputs.left_out

    @left_out.setter
    def left_out(self, left_out: LeftOut) -> None:
        self.inputs.left_out = left_out

    def __iter__(self) -> Iterator[Batch]:
        return self._of_part(as_batches(self.inputs))

    def chunks(self, share: Share) -> Iterator[Chunk]:
        """Yield the chunks of one process's share, also those without a sample of this part."""
        chunks = self.inputs.chunks(share)
        return (replace(chunk, batches=self._of_part(chunk.batches), heard=None) for chunk in chunks)

    def first_sample(self) -> Batch:
        """Return the first sample of this part that can be read; DataError if there is none."""
        for batch in self:
            return batch.first_sample()
        raise DataError(f"No sample can be read of {self.description}.")

    def known_samples(self) -> Iterator[Sample]:
        """Yield the samples of this part, in order."""
        return (sample for sample in self.inputs.known_samples() if _key(sample, self.by) in self._keys)

    def preview(self, batch: Batch, place: int) -> Preview | None:
        """Return a preview of a sample of one of these batches, as the inputs make it."""
        return self.inputs.preview(batch, place)

    @property
    def ends(self) -> Callable[..., Iterator[tuple[Sequence[Sample], Tensor]]] | None:
        """Return a function that runs this part's trajectories, or a share of them, to their ends.

        None where the inputs are no trajectories, or are a single one's.
        """
        walk = getattr(self.inputs, "ends", None)
        if walk is None or self.by != "source":
            return None

        def ends(share: Share = ALL) -> Iterator[tuple[Sequence[Sample], Tensor]]:
            for samples, latents in walk(share):
                if rows := self._rows(samples):
                    yield [samples[i] for i in rows], latents[rows]

        return ends

    def _of_part(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if rows := self._rows(batch.samples):
                yield batch if len(rows) == len(batch.samples) else batch.take(rows)

    def _rows(self, samples: Sequence[Sample]) -> list[int]:
        return [i for i, sample in enumerate(samples) if _key(sample, self.by) in self._keys]


def divided(inputs: Inputs, calibration: Inputs | None = None) -> tuple[Inputs, Inputs]:
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
    everything = as_inputs(inputs)
    return (
        Part(everything, samples, by, frozenset(keys) - held, "to learn from"),
        Part(everything, samples, by, held, "held out"),
    )


def samples_of(inputs: Iterable[Any]) -> list[Sample]:
    """Return the samples of some inputs in order, see :meth:`Inputs.known_samples`."""
    return list(as_inputs(inputs).known_samples())


@functools.lru_cache(maxsize=4096)
def permutation(n: int, key: str) -> list[int]:
    """Return the numbers below n in an order that depends on nothing but the key: the same in every process.

    >>> permutation(4, "block 0"), permutation(4, "block 1")
    ([0, 3, 1, 2], [2, 0, 3, 1])
    """
    return sorted(range(n), key=lambda i: hashlib.blake2b(f"{key}\0{i}".encode("utf-8", "surrogateescape")).digest())


def _key(sample: Sample, by: str) -> _Key:
    return sample.data, sample.source if by == "source" else sample.index
