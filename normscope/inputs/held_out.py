"""Inputs divided into those to learn from and those held out, as iterables or kept in memory."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from normscope.errors import DataError, count
from normscope.inputs.batch import Batch, Sample, as_batches, taken_once, tensor_bytes, tensors_of
from normscope.inputs.chunks import ALL, Chunk, Inputs, LeftOut, RankSampler, as_inputs
from normscope.inputs.previews import Preview

MOST_BYTES = 2**30  # of inputs that are learned from
_MOST_VALIDATION = 100  # samples that decide what is kept
_BLOCK = 4  # consecutive sources, one of which is held out
_MUCH_LONGER, _LONGER = 1.3, 16  # factor and positions by which samples of one pass may exceed the shortest

_Key = tuple[str, str | int]


class Part(Inputs):
    """Some of the samples of other inputs, in the inputs' own chunks.

    Attributes:
        inputs: all of them.
        by: unit of the division: ``source`` or ``sample``.
    """

    description = ""
    n_samples = 0

    def __init__(self, inputs: Inputs, samples: Sequence[Sample], by: str, keys: frozenset[_Key], role: str) -> None:
        self.inputs, self.by, self._keys = inputs, by, keys
        self.n_samples = sum(_key(sample, by) in keys for sample in samples)
        one_source = "" if by == "source" else ", all of one source"
        self.description = f"{inputs.description} · {self.n_samples} of {len(samples)} samples {role}{one_source}"

    @property
    def left_out(self) -> LeftOut:
        """Unreadable and truncated inputs of the latest iteration, in this part and the others."""
        return self.inputs.left_out

    @left_out.setter
    def left_out(self, left_out: LeftOut) -> None:
        self.inputs.left_out = left_out

    def __iter__(self) -> Iterator[Batch]:
        return self._select(self.inputs)

    def chunks(self, sampler: RankSampler) -> Iterator[Chunk]:
        """Yield the chunks of one rank, also those without a sample of this part."""
        chunks = self.inputs.chunks(sampler)
        return (replace(chunk, batches=self._select(chunk.batches)) for chunk in chunks)

    def known_samples(self) -> Iterator[Sample]:
        return (sample for sample in self.inputs.known_samples() if _key(sample, self.by) in self._keys)

    def preview(self, batch: Batch, index: int) -> Preview | None:
        return self.inputs.preview(batch, index)

    @property
    def ends(self) -> Callable[..., Iterator[tuple[Sequence[Sample], Tensor]]] | None:
        """Function that walks this part's trajectories to their ends; None for other inputs or a single trajectory."""
        walk = getattr(self.inputs, "ends", None)
        if walk is None or self.by != "source":
            return None

        def ends(sampler: RankSampler = ALL) -> Iterator[tuple[Sequence[Sample], Tensor]]:
            for samples, latents in walk(sampler):
                if rows := self._rows(samples):
                    yield [samples[i] for i in rows], latents[rows]

        return ends

    def _select(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if rows := self._rows(batch.samples):
                yield batch if len(rows) == len(batch.samples) else batch.take(rows)

    def _rows(self, samples: Sequence[Sample]) -> list[int]:
        return [i for i, sample in enumerate(samples) if _key(sample, self.by) in self._keys]


def divided(inputs: Inputs, calibration: Inputs | None = None) -> tuple[Inputs, Inputs]:
    """Return inputs to learn from and to judge by: a loaded model's calibration and inputs, or two parts of the latter.

    DataError as for :func:`learned_and_held_out`.
    """
    return learned_and_held_out(inputs) if calibration is None else (calibration, inputs)


def learned_and_held_out(inputs: Iterable[Any]) -> tuple[Part, Part]:
    """Divide inputs: one source of every four is held out, and the last one where there are fewer than four.

    Its place among the four varies pseudo-randomly, so that periodic data are sampled evenly. A single source is
    divided by samples, which the descriptions report. Unreadable samples are in neither part.

    Raises:
        DataError: if there are fewer than two samples, or if the inputs can be iterated only once.

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
            f"The inputs are {count(len(keys), 'sample')}; at least two are needed, to learn and to measure."
        )
    blocks = (keys[first : first + _BLOCK] for first in range(0, len(keys) - _BLOCK + 1, _BLOCK))
    held = frozenset([block[permutation(_BLOCK, f"held out\0{n}")[0]] for n, block in enumerate(blocks)] or keys[-1:])
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
    """Return the numbers below n in an order that depends on the key alone.

    >>> permutation(4, "block 0"), permutation(4, "block 1")
    ([0, 3, 1, 2], [2, 0, 3, 1])
    """
    return sorted(range(n), key=lambda i: hashlib.blake2b(f"{key}\0{i}".encode("utf-8", "surrogateescape")).digest())


def _key(sample: Sample, by: str) -> _Key:
    return sample.data, sample.source if by == "source" else sample.index


def kept_in_memory(inputs: Iterable[Any]) -> tuple[list[Batch], int]:
    """Collect batches, in order, up to a gibibyte, and count the omitted samples; DataError if there is no batch."""
    kept: list[Batch] = []
    size = left_out = 0
    for batch in as_batches(inputs):
        size += sum(tensor.nbytes for tensor in tensors_of(batch))
        if kept and size > MOST_BYTES:
            left_out += len(batch.samples)
        else:
            kept.append(batch)
    if not kept:
        raise DataError("There is no batch to learn from.")
    return kept, left_out


def subsampled(batches: Sequence[Batch], most: int) -> list[Batch]:
    """Select every second, third … sample of some batches up to a number; whole batches if they cannot be divided.

    Texts may be sorted by length: a few whole batches would be of a few lengths.

    >>> import torch
    >>> samples = [Sample("a", 0, number) for number in range(6)]
    >>> threes = [Batch((torch.zeros(3, 1),), samples=tuple(part)) for part in (samples[:3], samples[3:])]
    >>> [[sample.index for sample in batch.samples] for batch in subsampled(threes, 3)]
    [[0, 2], [4]]
    """
    taken, first = list[Batch](), 0
    stride = math.ceil(sum(len(batch.samples) for batch in batches) / most)
    for number, batch in enumerate(batches):
        rows = range(-first % stride, len(batch.samples), stride)
        first += len(batch.samples)
        if not batch.divisible:
            taken += [batch] if number % stride == 0 else []
        elif rows:
            taken.append(batch if stride == 1 else batch.take(list(rows)))
    return taken


@dataclass(frozen=True)
class Pool:
    """Inputs in memory: batches to learn from, and batches of other sources that decide on the result."""

    learned: Sequence[Batch]
    validation: Sequence[Batch]
    left_out: int  # samples beyond MOST_BYTES

    @classmethod
    def of(cls, inputs: Iterable[Any]) -> Pool:
        """Collect inputs, in order, up to a gibibyte, and divide them; DataError for fewer than two samples."""
        kept, left_out = kept_in_memory(inputs)
        learned, validation = learned_and_held_out(kept)
        remainder: list[Batch] = []
        while validation.n_samples > _MOST_VALIDATION:
            more, validation = learned_and_held_out(list(validation))
            remainder += more
        return cls([*learned, *remainder], list(validation), left_out)

    def by_length(self) -> Pool:
        """Divide padded batches, so that each pass takes samples of about one length (:func:`by_length`)."""
        learned, validation = (
            [divided for batch in batches for divided in by_length(batch, len(batch.samples))]
            for batches in (self.learned, self.validation)
        )
        return Pool(learned, validation, self.left_out)

    @property
    def digest(self) -> str:
        """Hash of the inputs, by which a checkpoint recognizes them."""
        content = hashlib.blake2b(digest_size=16)
        for name, batches in ((b"", self.learned), (b"judged", self.validation)):
            content.update(name)
            for tensor in (tensor for batch in batches for tensor in tensors_of(batch)):
                content.update(tensor_bytes(tensor))
        return content.hexdigest()


def by_length(batch: Batch, most: int) -> list[Batch]:
    """Divide a padded batch into parts of at most ``most`` samples of about one length, without their common padding.

    Batches whose tensors with several axes do not all have the shape of ``valid`` stay as they are.

    >>> import torch
    >>> valid = torch.arange(90) < torch.tensor([20, 90, 25, 30])[:, None]
    >>> texts = Batch((torch.ones(4, 90),), samples=tuple(Sample("a", 0, n) for n in range(4)), valid=valid)
    >>> [(batch.args[0].shape, [sample.index for sample in batch.samples]) for batch in by_length(texts, 8)]
    [(torch.Size([3, 30]), [0, 2, 3]), (torch.Size([1, 90]), [1])]
    """
    valid = batch.valid
    if valid is None or batch.valid_within or batch.forward is not None:
        return [batch]
    tensors = [tensor for tensor in tensors_of([batch.args, batch.kwargs]) if tensor.ndim > 1]
    nested = any(isinstance(value, (Mapping, tuple, list)) for value in (*batch.args, *batch.kwargs.values()))
    if nested or not tensors or any(tensor.shape != valid.shape for tensor in tensors):
        return [batch]
    lengths = valid.sum(1)
    most = math.ceil(len(lengths) / math.ceil(len(lengths) / most))  # so that parts are about equally large
    parts: list[list[int]] = []
    for index in lengths.argsort(stable=True).tolist():
        last = parts[-1] if parts else []
        if last and len(last) < most and lengths[index] <= _MUCH_LONGER * lengths[last[0]] + _LONGER:
            last.append(index)
        else:
            parts.append([index])

    def cut(rows: list[int]) -> Batch:
        positions, shape = valid[rows].any(0).nonzero().flatten(), valid[rows].shape
        return batch.take(rows).each(lambda x: x[:, positions.to(x.device)] if x.shape == shape else x)

    return list(map(cut, parts))
