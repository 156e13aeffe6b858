"""Tensors that are mostly zero, kept in the CPU's memory without most of their zeros."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of a tensor that are not all zero, in the order of their first use; the other blocks take no memory.

    Attributes:
        shape: of the tensor, ``(groups, rows, columns)`` or ``(rows, columns)``; blocks run along its columns.
        rows: index into ``values`` of each block, int16 ``(groups, blocks + 1)``; 0 for a block of zeros. The last
            entry counts the rows in use.
        values: ``(groups, 1 + blocks, elements of a block)``; row 0 is unused.
        empty: the element that takes no memory, 0 or the largest int64; ``values`` hold the differing bits.
    """

    shape: torch.Size
    rows: Tensor
    values: Tensor
    empty: int

    @classmethod
    def of(cls, tensor: Tensor, length: int, empty: int) -> Blocks:
        """Cut a tensor up into blocks of ``length`` elements."""
        groups = tensor.shape[0] if tensor.ndim == 3 else 1
        if empty:
            tensor = torch.bitwise_xor(tensor, empty, out=zeros(tensor.shape, tensor.dtype))
        blocks = tensor.mT.reshape(groups, -1, length)
        filled = blocks.any(2)
        rows = zeros((groups, blocks.shape[1] + 1), torch.int16)
        values = zeros((groups, blocks.shape[1] + 1, length), tensor.dtype)
        group, number = filled.nonzero(as_tuple=True)
        rows[:, -1] = in_use = filled.sum(1)
        row = torch.arange(1, len(group) + 1) - (in_use.cumsum(0) - in_use)[group]
        values[group, row], rows[group, number] = blocks[group, number], row.short()
        return cls(tensor.shape, rows, values, empty)

    @property
    def nbytes(self) -> int:
        """Memory that is taken once all blocks are in use."""
        return self.rows.nbytes + self.values.nbytes

    def tensor(self) -> Tensor:
        """Return the whole tensor, whose zeros take no memory either."""
        groups, blocks, length = self.values.shape
        whole = zeros((groups, blocks - 1, length), self.values.dtype)
        group, number = self.rows[:, :-1].nonzero(as_tuple=True)
        whole[group, number] = self.values[group, self.rows[group, number].long()]
        turned = torch.Size((*self.shape[:-2], self.shape[-1], self.shape[-2]))
        whole = whole.view(turned).mT
        return whole.bitwise_xor_(self.empty) if self.empty else whole


@dataclass(frozen=True)
class Counts:
    """Counts ``low + 65,536 · high``, most of which are zero or small.

    Attributes:
        low: bits of uint16 numbers, as int16.
        high: int64, of the same shape; its zeros take no memory.
    """

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, counts: Tensor) -> Counts:
        """Split counts."""
        kept = cls(zeros(counts.shape, torch.int16), zeros(counts.shape, torch.int64))
        filled = counts.nonzero(as_tuple=True)
        kept.low[filled] = counts[filled].short()
        large = (counts >= 1 << 16).nonzero(as_tuple=True)
        kept.high[large] = counts[large] >> 16
        return kept

    @property
    def nbytes(self) -> int:
        """Memory that is taken once all counts are large."""
        return self.low.nbytes + self.high.nbytes

    def tensor(self) -> Tensor:
        """Return the counts, whose zeros take no memory either."""
        counts = zeros(self.low.shape, torch.int64)
        small, large = (part.nonzero(as_tuple=True) for part in (self.low, self.high))
        counts[small] = self.low[small].long() & 0xFFFF
        counts[large] += self.high[large] << 16
        return counts


class Compacted:
    """A dataclass field whose tensor is rebuilt at every access.

    In the CPU's memory it is kept as :class:`Blocks` or :class:`Counts`; elsewhere, as it is. A change to the tensor
    takes effect once it is assigned again.
    """

    def __init__(self, length: int = 0, *, empty: int = 0, optional: bool = False) -> None:
        """Choose the elements of a block (0: counts), the one that takes no memory, and whether the default is None."""
        self.length, self.empty, self.optional = length, empty, optional

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: object | None, kind: type) -> Any:
        if owner is not None:
            kept = owner.__dict__[self.name]
            return kept.tensor() if isinstance(kept, (Blocks, Counts)) else kept
        if self.optional:
            return None
        raise AttributeError(self.name)  # dataclasses take this for a field without default

    def __set__(self, owner: object, value: Tensor | None) -> None:
        kept: Any = value
        if value is not None and value.device.type == "cpu":
            kept = Blocks.of(value, self.length, self.empty) if self.length else Counts.of(value)
        owner.__dict__[self.name] = kept


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros; in the CPU's memory, a page takes memory once it is written."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take 2 MB for the first element
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
