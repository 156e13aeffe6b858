"""Launches of the Triton kernels, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from normscope.swaps.kernels import loops
from normscope.swaps.kernels.parameters import Parameters, channel_axes

FORWARD_TILE, BACKWARD_TILE = 2048, 1024  # elements, so that no register is spilled
COLUMNS = 128  # of a tile, at most
PROGRAMS = 4  # of the backward pass, per multiprocessor


def forward(x: Tensor, parameters: Parameters, curve: str, behind: int) -> Tensor:
    """Return weight · f(αx + s) + bias in one pass over x, with x's shape and dtype, and the strides of empty_like(x).

    Arguments are those of :func:`normscope.swaps.operators.pointwise`. x has any strides, and is copied first unless it
    is contiguous.
    """
    axes = channel_axes(x, parameters, behind)
    if x.numel() == 0:
        return torch.empty_like(x)
    rows = _rows(x, axes, parameters)
    y = torch.empty_like(rows)
    arguments = _arguments(rows, parameters, curve, FORWARD_TILE)
    programs = triton.cdiv(len(rows), arguments["block_rows"]) * arguments["blocks"]
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        loops.forward[(programs,)](rows, y, **arguments)
    return _restored(y, x, axes)


def backward(dy: Tensor, x: Tensor, parameters: Parameters, curve: str, behind: int) -> list[Tensor | None]:
    """Return the gradients of :func:`forward` by x, α, s, weight and bias, where ``dy`` is that by its output.

    The same inputs on the same device give the same bits.
    """
    axes = channel_axes(x, parameters, behind)
    if x.numel() == 0:
        return [torch.empty_like(x), *(None if p is None else torch.zeros_like(p) for p in parameters)]
    rows = _rows(x, axes, parameters)
    dx = torch.empty_like(rows)
    arguments = _arguments(rows, parameters[:3], curve, BACKWARD_TILE)
    blocks = arguments["blocks"]
    at_once = PROGRAMS * (torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1)
    programs = max(1, min(triton.cdiv(len(rows), arguments["block_rows"]), at_once // blocks))
    partial_sums = x.new_empty((len(parameters), programs, rows.shape[1]), dtype=torch.float32)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        loops.backward[(programs * blocks,)](
            _rows(dy, axes, parameters), rows, dx, partial_sums=partial_sums, programs=programs, **arguments
        )
    sums = partial_sums.sum(1, dtype=torch.float64)
    gradients = [
        None if p is None else (row.sum() if p.numel() == 1 else row).view(p.shape).to(p.dtype, copy=True)
        for row, p in zip(sums, parameters, strict=True)
    ]
    return [_restored(dx, x, axes), *gradients]


def _rows(tensor: Tensor, axes: tuple[int, int], parameters: Parameters) -> Tensor:
    """Return a tensor as contiguous rows of channels, or of one element if all parameters are single numbers."""
    channels = max(1, *(p.numel() for p in parameters if p is not None))
    moved = tensor.movedim(*_moves(tensor, axes))
    return moved.reshape(tensor.numel() // channels, channels).contiguous()


def _restored(rows: Tensor, x: Tensor, axes: tuple[int, int]) -> Tensor:
    """Return rows in x's shape, with the strides of ``torch.empty_like(x)``."""
    source, last = _moves(x, axes)
    y = rows.view(x.movedim(source, last).shape).movedim(last, source)
    return y if y.stride() == torch.empty_like(x, device="meta").stride() else torch.empty_like(x).copy_(y)


def _moves(x: Tensor, axes: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the channel axes, and the last axes, to which they are moved."""
    number = axes[1] - axes[0]
    return tuple(range(*axes)), tuple(range(x.ndim - number, x.ndim))


def _arguments(rows: Tensor, parameters: Sequence[Tensor | None], curve: str, tile: int) -> dict[str, Any]:
    """Return the arguments that both kernels take beside tensors of x's shape; the backward pass takes no bias."""
    channels = rows.shape[1]
    block_channels = min(triton.next_power_of_2(channels), COLUMNS)
    arguments: dict[str, Any] = {}
    for name, p in zip(("alpha", "shift", "weight", "bias"), parameters, strict=False):
        arguments[name] = None if p is None else p.contiguous()
        arguments[f"{name}_each"] = p is not None and p.numel() > 1
    sizes = {"rows": len(rows), "channels": channels, "blocks": triton.cdiv(channels, block_channels)}
    block = {"block_rows": tile // block_channels, "block_channels": block_channels}
    return {**arguments, **sizes, **block, "curve": curve, "precise": rows.dtype == torch.float32}
