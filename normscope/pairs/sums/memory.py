"""Tensors on the CPU whose pages of zeros take no memory: most bins of a site contain no pair."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the CPU, a page takes memory once something else is written to it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take 2 MB for the first element
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def zeros_like(values: Tensor) -> Tensor:
    """Return :func:`zeros` of the shape and strides of contiguous values, or of a contiguous tensor's ``mT``."""
    if values.is_contiguous():
        return zeros(values.shape, values.dtype, values.device)
    return zeros(values.mT.shape, values.dtype, values.device).mT


def without_empty_pages(values: Tensor) -> Tensor:
    """Copy values on the CPU, so that pages of zeros take no memory."""
    if values.device.type != "cpu":
        return values
    copy, filled = zeros_like(values), values != 0
    copy[filled] = values[filled]
    return copy
