"""Tensors that ranks hold in shards (DTensors): gathered where a norm is observed, and made in place of a norm's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.inputs.wrappers import class_of, synchronized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Importing torch.distributed.tensor takes a third of a second; a script that has a DTensor has imported it.


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor, even if each rank holds all of it."""
    return hasattr(tensor, "full_tensor")


def sharded_axes(tensor: Tensor) -> set[int]:
    """Return the axes along which ranks divide a DTensor."""
    placements: Any = getattr(tensor, "placements", ())
    return {placement.dim for placement in placements if placement.is_shard()}


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


def shard_like(module: nn.Module, norm: nn.Module) -> nn.Module:
    """Make a module's parameters DTensors with the placements of a norm's; scalars lie on every rank. Return it.

    All ranks of the norm's mesh must call together.
    """
    layout: Any = next(filter(is_sharded, norm.parameters()), None)
    if layout is not None:
        from torch.distributed.tensor import Replicate, distribute_tensor

        on_all = [Replicate()] * layout.device_mesh.ndim
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = layout.placements if parameter.shape == layout.shape else on_all
            sharded = distribute_tensor(parameter.detach(), layout.device_mesh, placements)
            setattr(module, name, nn.Parameter(sharded, parameter.requires_grad))
    return module


def of_shards(function: Callable[[Tensor], Tensor], x: Tensor, channel_axes: set[int]) -> Tensor:
    """Apply an elementwise function to this rank's shard of a DTensor, and return a DTensor of the same placement."""
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = x
    kept = [each if each.is_shard() and each.dim not in channel_axes else Replicate() for each in sharded.placements]
    sharded = sharded.redistribute(placements=kept)
    y = function(sharded.to_local())
    return DTensor.from_local(y, sharded.device_mesh, kept, run_check=False, shape=x.shape, stride=sharded.stride())


def tensor_parallel_group(model: nn.Module) -> ProcessGroup | None:
    """Return the ranks that run a network on the same data, by the meshes of its DTensors; None if there are none.

    The axes of a mesh up to the first that ``fully_shard`` divides parameters along are axes of the data.
    """
    fully_sharded = any(hasattr(type(part), "unshard") for part in model.modules())
    for parameter in filter(is_sharded, model.parameters()):
        layout: Any = parameter
        dividing = (axis for axis, placement in enumerate(layout.placements) if placement.is_shard())
        n_data = 1 + next(dividing, -1) if fully_sharded else 0
        if n_data < layout.device_mesh.ndim:
            group: ProcessGroup = layout.device_mesh.get_group(n_data)
            return group
    return None


def check_one_process(model: nn.Module, action: str) -> None:
    """Raise ModelError if ranks share a network: its weights are DTensors, or DDP or FSDP1 wraps a part of it."""
    if any(map(is_sharded, model.parameters())) or synchronized(model):
        raise ModelError(
            f"{action} runs in one process, on a whole network, and ranks share this {class_of(model).__name__}. Do it "
            "before the network is wrapped or sharded (DDP, FSDP, tensor parallelism)."
        )


def address(tensor: Tensor) -> tuple[int, int]:
    """Return the address and number of a tensor's elements, or of those in this rank's shard."""
    local: Any = tensor
    local = local.to_local() if is_sharded(tensor) else tensor
    return local.data_ptr(), local.numel()
