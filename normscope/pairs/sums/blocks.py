"""Tensors that are mostly zero, kept in the CPU's memory without most of their zeros."""

from __future__ import annotations

import math
import mmap
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
        flat = (tensor ^ empty if empty else tensor).mT.reshape(groups, -1)
        blocks = flat.view(groups, -1, length)
        filled = blocks.any(2)
        rows = _untouched(torch.int16, groups, blocks.shape[1] + 1)
        values = _untouched(tensor.dtype, groups, blocks.shape[1] + 1, length)
        group, number = filled.nonzero(as_tuple=True)
        order = filled.cumsum(1)
        values[group, order[group, number]] = blocks[group, number]
        rows[group, number], rows[:, -1] = order[group, number].short(), order[:, -1]
        return cls(tensor.shape, rows, values, empty)

    def tensor(self) -> Tensor:
        """Return the whole tensor, whose zeros take no memory either."""
        groups, blocks, length = self.values.shape
        whole = _untouched(self.values.dtype, groups, blocks - 1, length)
        group, number = self.rows[:, :-1].nonzero(as_tuple=True)
        whole[group, number] = self.values[group, self.rows[group, number].long()]
        turned = torch.Size((*self.shape[:-2], self.shape[-1], self.shape[-2]))
        whole = whole.view(turned).mT
        return whole ^ self.empty if self.empty else whole


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
        """Take counts apart."""
        kept = cls(_untouched(torch.int16, *counts.shape), _untouched(torch.int64, *counts.shape))
        for part, values in ((kept.low, counts.short()), (kept.high, counts >> 16)):
            filled = values.nonzero(as_tuple=True)
            part[filled] = values[filled]
        return kept

    def tensor(self) -> Tensor:
        """Return the counts."""
        return (self.high << 16) + (self.low.long() & 0xFFFF)


class Compacted:
    """A dataclass field whose tensor is kept as :class:`Blocks` or :class:`Counts` in the CPU's memory and rebuilt at every access.

    A change to the tensor takes effect once it is assigned again.
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


def _untouched(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return zeros that take memory page by page, once they are written."""
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take 2 MB for the first element
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
