"""Tensors that are mostly zero, kept in the CPU's memory without their zeros."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Blocks:
    """The blocks of a tensor that are not all zero, in the order of their first use; the other blocks take no memory.

    Attributes:
        shape: of the tensor, ``(groups, rows, columns)`` or ``(rows, columns)``; blocks run along its columns.
        rows: index into ``values`` of each block, int16 ``(groups, blocks + 1)``; 0 for a block of zeros. The last
            entry counts the rows in use.
        values: float64, int64, … ``(groups, 1 + blocks, elements of a block)``; row 0 is unused.
    """

    shape: torch.Size
    rows: Tensor
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor, length: int, empty: int) -> Blocks:
        """Cut a tensor up into blocks of ``length`` elements."""
        groups = tensor.shape[0] if tensor.ndim == 3 else 1
        flat = (tensor ^ empty if empty else tensor).mT.reshape(groups, -1)
        blocks = pad(flat, (0, -flat.shape[1] % length)).view(groups, -1, length)
        filled = blocks.any(2)
        rows = _untouched(torch.int16, groups, blocks.shape[1] + 1)
        values = _untouched(tensor.dtype, groups, blocks.shape[1] + 1, length)
        group, number = filled.nonzero(as_tuple=True)
        order = filled.cumsum(1)
        values[group, order[group, number]] = blocks[group, number]
        rows[group, number], rows[:, -1] = order[group, number].short(), order[:, -1]
        return cls(tensor.shape, rows, values)

    def tensor(self, empty: int) -> Tensor:
        """Return the whole tensor, whose zeros take no memory either."""
        groups, blocks, length = self.values.shape
        whole = _untouched(self.values.dtype, groups, blocks - 1, length)
        group, number = self.rows[:, :-1].nonzero(as_tuple=True)
        whole[group, number] = self.values[group, self.rows[group, number].long()]
        turned = torch.Size((*self.shape[:-2], self.shape[-1], self.shape[-2]))
        whole = whole.view(groups, -1)[:, : turned.numel() // groups].reshape(turned).mT
        return whole ^ empty if empty else whole


class Compacted:
    """A dataclass field whose tensor is kept as :class:`Blocks` in the CPU's memory and rebuilt at every access.

    A change to the tensor takes effect once it is assigned again.
    """

    def __init__(self, length: int, *, empty: int = 0, optional: bool = False) -> None:
        """Choose the elements of a block, the element that takes no memory, and whether the default is None."""
        self.length, self.empty, self.optional = length, empty, optional

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: object | None, kind: type) -> Any:
        if owner is not None:
            kept = owner.__dict__[self.name]
            return kept.tensor(self.empty) if isinstance(kept, Blocks) else kept
        if self.optional:
            return None
        raise AttributeError(self.name)  # dataclasses take this for a field without default

    def __set__(self, owner: object, value: Tensor | None) -> None:
        on_cpu = value is not None and value.device.type == "cpu"
        owner.__dict__[self.name] = Blocks.of(value, self.length, self.empty) if on_cpu else value


def blocks_of(owner: object, name: str) -> Blocks:
    """Return the blocks of a :class:`Compacted` field."""
    return cast("Blocks", owner.__dict__[name])


def _untouched(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return zeros that take memory page by page, once they are written."""
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take 2 MB for the first element
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
