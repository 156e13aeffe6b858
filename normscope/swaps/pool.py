"""The inputs of a training: taken once while the original is in place, kept in memory up to a bound, drawn by seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normscope.batches import Batch, as_batches
from normscope.errors import DataError
from normscope.splits import learned_and_held_out

MOST_BYTES = 2**30  # of inputs that are learned from
BATCHES_A_STEP = 4
_MOST_JUDGED = 100  # samples that decide which steps are kept


@dataclass(frozen=True)
class Pool:
    """Inputs to learn from, divided again: what decides which steps are kept is learned from by none of them.

    Attributes:
        learned: batches to take steps on.
        judged: batches that decide which steps are kept; other sources, where there are several.
        left_out: samples that did not fit into memory.
    """

    learned: Sequence[Batch]
    judged: Sequence[Batch]
    left_out: int

    @classmethod
    def of(cls, inputs: Iterable[Any]) -> Pool:
        """Take inputs, in order, up to a gibibyte, and divide them.

        Raises:
            DataError: if there are fewer than two samples.
        """
        taken: list[Batch] = []
        size = left_out = 0
        for batch in as_batches(inputs):
            size += sum(tensor.nbytes for tensor in _tensors(batch))
            if taken and size > MOST_BYTES:
                left_out += len(batch.samples)
            else:
                taken.append(batch)
        if not taken:
            raise DataError("There is no batch to learn from.")
        learned, judged = learned_and_held_out(taken)
        rest: list[Batch] = []
        while judged.n_samples > _MOST_JUDGED:
            own = list(judged)
            more, judged = learned_and_held_out(own)
            rest += more
        return cls([*learned, *rest], list(judged), left_out)

    def drawn(self, seed: int, stage: str, step: int) -> list[Batch]:
        """Draw the batches of a step: the same for the same seed, stage and step, whatever was drawn before."""
        key = hashlib.blake2b(f"{seed} {stage} {step}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key))
        chosen = torch.randperm(len(self.learned), generator=generator)[:BATCHES_A_STEP]
        return joined([self.learned[number] for number in chosen.tolist()])

    @property
    def digest(self) -> str:
        """Hash of the inputs, by which a checkpoint knows them again."""
        content = hashlib.blake2b(digest_size=16)
        for batch in (*self.learned, None, *self.judged):
            if batch is None:
                content.update(b"judged")
                continue
            for tensor in _tensors(batch):
                content.update(tensor_bytes(tensor))
        return content.hexdigest()


def joined(batches: Sequence[Batch]) -> list[Batch]:
    """Make one batch of several where their tensors allow it; else leave them as they are.

    >>> from normscope.batches import Sample
    >>> one = Batch((torch.zeros(1, 3),), samples=(Sample("a", 0, 0),))
    >>> [len(batch.samples) for batch in joined([one, one])]
    [2]
    """
    try:
        args = tuple(_joined(values, batches) for values in zip(*(batch.args for batch in batches), strict=True))
        if len({frozenset(batch.kwargs) for batch in batches}) > 1:
            return list(batches)
        kwargs = {name: _joined([batch.kwargs[name] for batch in batches], batches) for name in batches[0].kwargs}
        valid = _joined([batch.valid for batch in batches], batches)
    except ValueError:
        return list(batches)
    samples = tuple(sample for batch in batches for sample in batch.samples)
    return [replace(batches[0], args=args, kwargs=kwargs, samples=samples, valid=valid, part="")]


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return what a tensor holds, of whatever dtype, in order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _joined(values: Sequence[Any], batches: Sequence[Batch]) -> Any:
    """Join one argument of several batches; ValueError where that cannot be done."""
    first = values[0]
    if all(isinstance(value, Tensor) for value in values) and first.ndim:
        whole = [len(value) == len(batch.samples) for value, batch in zip(values, batches, strict=True)]
        if all(whole) and len({(value.shape[1:], value.dtype, value.device) for value in values}) == 1:
            return torch.cat(list(values))
        if len({value.shape for value in values}) == 1 and all(bool((value == first).all()) for value in values):
            if any(whole):
                raise ValueError
            return first
        raise ValueError
    if any(isinstance(value, (Tensor, Mapping)) for value in values) or any(value != first for value in values):
        raise ValueError
    return first


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors of a batch or of its arguments."""
    if isinstance(value, Batch):
        return _tensors([value.args, value.kwargs, value.valid])
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for own in values for tensor in _tensors(own)]
