"""Inputs to learn from, kept in memory, and apart from them those that decide what is kept of what was learned."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from normscope.errors import DataError
from normscope.inputs.batch import Batch, tensor_bytes, tensors_of
from normscope.inputs.entries import as_batches
from normscope.inputs.held_out import learned_and_held_out

MOST_BYTES = 2**30  # of inputs that are learned from
_MOST_JUDGED = 100  # samples that decide what is kept


def kept_in_memory(inputs: Iterable[Any]) -> tuple[list[Batch], int]:
    """Collect batches, in order, up to a gibibyte, and count the omitted samples.

    Raises:
        DataError: if there is no batch.
    """
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


def evenly(batches: Sequence[Batch], most: int) -> list[Batch]:
    """Select every second, third … sample of some batches up to a number; whole batches if they cannot be divided.

    Texts may be sorted by length: a few whole batches would be of a few lengths.

    >>> import torch
    >>> from normscope.inputs.batch import Sample
    >>> samples = [Sample("a", 0, number) for number in range(6)]
    >>> threes = [Batch((torch.zeros(3, 1),), samples=tuple(part)) for part in (samples[:3], samples[3:])]
    >>> [[sample.index for sample in batch.samples] for batch in evenly(threes, 3)]
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
    """Inputs to learn from, and, apart from them, inputs that decide what is kept.

    Attributes:
        learned: batches to learn from.
        judged: batches that decide what is kept; other sources, where there are several.
        left_out: samples that did not fit into memory.
    """

    learned: Sequence[Batch]
    judged: Sequence[Batch]
    left_out: int

    @classmethod
    def of(cls, inputs: Iterable[Any]) -> Pool:
        """Collect inputs, in order, up to a gibibyte, and divide them.

        Raises:
            DataError: if there are fewer than two samples.
        """
        kept, left_out = kept_in_memory(inputs)
        learned, judged = learned_and_held_out(kept)
        rest: list[Batch] = []
        while judged.n_samples > _MOST_JUDGED:
            batches = list(judged)
            more, judged = learned_and_held_out(batches)
            rest += more
        return cls([*learned, *rest], list(judged), left_out)

    def by_length(self) -> Pool:
        """Divide padded batches, so that each pass takes samples of about one length (:func:`by_length`)."""
        learned, judged = (
            [part for batch in batches for part in by_length(batch, len(batch.samples))]
            for batches in (self.learned, self.judged)
        )
        return Pool(learned, judged, self.left_out)

    @property
    def digest(self) -> str:
        """Hash of the inputs, by which a checkpoint recognizes them."""
        content = hashlib.blake2b(digest_size=16)
        for batch in (*self.learned, None, *self.judged):
            if batch is None:
                content.update(b"judged")
                continue
            for tensor in tensors_of(batch):
                content.update(tensor_bytes(tensor))
        return content.hexdigest()


_MUCH_LONGER, _LONGER = 1.3, 16  # than the shortest sample of a pass, by which factor and so many positions besides


def by_length(batch: Batch, most: int) -> list[Batch]:
    """Divide a padded batch into several, of samples of about one length, and cut off what is padding in all of each.

    Only where it is certain what is padding: where every tensor with several axes has the positions of ``valid``, as a
    tokenizer gives them. Other batches stay as they are.

    Args:
        batch: any.
        most: samples of a part.

    >>> import torch
    >>> from normscope.inputs.batch import Sample
    >>> valid = torch.arange(90) < torch.tensor([20, 90, 25, 30])[:, None]
    >>> texts = Batch((torch.ones(4, 90),), samples=tuple(Sample("a", 0, n) for n in range(4)), valid=valid)
    >>> [(batch.args[0].shape, [sample.index for sample in batch.samples]) for batch in by_length(texts, 8)]
    [(torch.Size([3, 30]), [0, 2, 3]), (torch.Size([1, 90]), [1])]
    """
    valid = batch.valid
    if valid is None or batch.valid_within or batch.forward is not None:
        return [batch]
    given = [tensor for tensor in tensors_of([batch.args, batch.kwargs]) if tensor.ndim > 1]
    nested = any(isinstance(value, (Mapping, tuple, list)) for value in (*batch.args, *batch.kwargs.values()))
    if nested or not given or any(tensor.shape != valid.shape for tensor in given):
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
    return [_cut(batch.take(part)) for part in parts]


def _cut(batch: Batch) -> Batch:
    """Leave out the positions that are padding in all samples."""
    if batch.valid is None:
        return batch
    data, shape = batch.valid.any(0).nonzero().flatten(), batch.valid.shape

    def cut(value: Any) -> Any:
        return value[:, data.to(value.device)] if isinstance(value, Tensor) and value.shape == shape else value

    kwargs = {name: cut(value) for name, value in batch.kwargs.items()}
    return replace(batch, args=tuple(map(cut, batch.args)), kwargs=kwargs, valid=cut(batch.valid))
