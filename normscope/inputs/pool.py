"""Inputs to learn from, kept in memory, and apart from them those that decide what is kept of what was learned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.errors import DataError
from normscope.inputs.batch import Batch, tensors_of
from normscope.inputs.entries import as_batches
from normscope.inputs.splits import learned_and_held_out

MOST_BYTES = 2**30  # of inputs that are learned from
_MOST_JUDGED = 100  # samples that decide what is kept


def kept_in_memory(inputs: Iterable[Any]) -> tuple[list[Batch], int]:
    """Take batches, in order, up to a gibibyte of them; and count the samples that were left out.

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
        """Take inputs, in order, up to a gibibyte, and divide them.

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


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, in order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
