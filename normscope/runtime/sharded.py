"""Tensors that ranks hold in shards (DTensors), gathered where a norm is observed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

# Importing torch.distributed.tensor takes a third of a second; a script that has a DTensor has imported it.


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor, even if each rank holds all of it."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return all of a DTensor, on every rank of its mesh, which must call together; a plain tensor as it is.

    A plain tensor that has the shape of this rank's shard of ``like`` is a shard of the same placement.
    """
    sharded: Any = tensor
    if like is not None and is_sharded(like) and not is_sharded(tensor):
        from torch.distributed.tensor import DTensor

        layout: Any = like
        if tensor.shape == layout.to_local().shape:
            sharded = DTensor.from_local(
                tensor, layout.device_mesh, layout.placements, shape=like.shape, stride=layout.stride()
            )
    gathered: Tensor = sharded.full_tensor() if is_sharded(sharded) else tensor
    return gathered


@contextlib.contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Replace the DTensors among a module's parameters and buffers by all of them in the block."""
    with contextlib.ExitStack() as restored:
        for part in module.modules():
            tables: list[dict[str, Any]] = [part._parameters, part._buffers]
            for tensors in tables:
                for name, tensor in list(tensors.items()):
                    if tensor is not None and is_sharded(tensor):
                        restored.callback(tensors.__setitem__, name, tensor)
                        tensors[name] = whole(tensor.detach())
        yield


def address(tensor: Tensor) -> tuple[int, int]:
    """Return the address and number of a tensor's elements, or of those in this rank's shard."""
    local: Any = tensor
    local = local.to_local() if is_sharded(tensor) else tensor
    return local.data_ptr(), local.numel()
