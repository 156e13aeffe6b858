"""Networks that are spread over ranks (DTensors) or over devices (accelerate): gathered weights, and swaps."""

from __future__ import annotations

import contextlib
import copy
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.inputs.wrappers import class_of, submodule, synchronized, unwrapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Importing torch.distributed.tensor takes a third of a second; a script that has a DTensor has imported it.

_HOOK = "_hf_hook"  # accelerate's own name for what it attaches to a module
_SAME = 1e-5  # of Σx²: far above the roundings by which ranks with the same data may differ


def check_whole(model: nn.Module, action: str, but: Collection[str] = ()) -> None:
    """Raise ModelError if an action needs plain weights on one device, and a network has others.

    Weights may be ``wrapped`` by DDP or FSDP1, ``sharded`` over ranks, ``spread`` by accelerate, or ``quantized``;
    ``but`` names what the action supports.
    """
    name, method = class_of(model).__name__, getattr(unwrapped(model), "quantization_method", None)
    states = {
        "wrapped": (synchronized(model), f"DDP or FSDP1 wraps this {name} or a part of it"),
        "sharded": (any(map(is_sharded, model.parameters())), f"ranks share the weights of this {name}"),
        "spread": (is_spread(model), f"accelerate spreads this {name} over devices"),
        "quantized": (method is not None, f"this {name} is quantized ({getattr(method, 'value', method)})"),
    }
    before = "Do it before the network is wrapped or sharded."
    remedies = {"spread": "Load it without a device map.", "quantized": "Take the checkpoint that it was made from."}
    for state, (applies, reason) in states.items():
        if applies and state not in but:
            raise ModelError(f"{action} is not possible: {reason}. {remedies.get(state, before)}")


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor, even if each rank has all of it."""
    return hasattr(tensor, "full_tensor")


def is_spread(module: nn.Module) -> bool:
    """True if accelerate moves the weights or the arguments of a module.

    >>> is_spread(nn.LayerNorm(4))
    False
    """
    return any(hasattr(child, _HOOK) for child in module.modules())


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
    full: Tensor = sharded.full_tensor() if is_sharded(sharded) else tensor
    return full


def sharded_as(tensor: Tensor, like: Tensor, *, on_all: bool = False) -> Tensor:
    """Return a tensor that every rank has as a DTensor with the shards of another; without shards if ``on_all``."""
    from torch.distributed.tensor import DTensor, Replicate

    layout: Any = like
    placements = [p if p.is_shard() and not on_all else Replicate() for p in layout.placements]
    plain = DTensor.from_local(tensor, layout.device_mesh, [Replicate()] * len(placements), run_check=False)
    return plain.redistribute(placements=placements)


@contextlib.contextmanager
def gathered(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    within: nn.Module | None = None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Keep all weights of a module on its device within the block, and yield its arguments likewise.

    DTensors are gathered, for which all ranks of their mesh must call together. Accelerate brings the weights of the
    module, and of one ``within`` which it runs.

    Raises:
        ModelError: if accelerate gives no access to the weights.
    """
    with contextlib.ExitStack() as restored:
        spread = within is not None or is_spread(module)
        if spread:
            from accelerate.utils import align_module_device

            for child in dict.fromkeys((module if within is None else within, *module.modules())):
                restored.enter_context(align_module_device(child))
        for child in module.modules():
            tables: list[dict[str, Any]] = [child._parameters, child._buffers]
            for tensors in tables:
                for name, tensor in list(tensors.items()):
                    if tensor is not None and is_sharded(tensor):
                        restored.callback(tensors.__setitem__, name, tensor)
                        tensors[name] = whole(tensor.detach())
        weights = [*module.parameters(), *module.buffers()] if spread else []
        if any(tensor.is_meta for tensor in weights):
            raise ModelError(f"accelerate gives no access to the weights of a {type(module).__name__} it has put away.")

        def gather(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return whole(value).to(weights[0].device) if weights else whole(value)

        yield tuple(map(gather, args)), {key: gather(value) for key, value in (kwargs or {}).items()}


def hooked(model: nn.Module, path: str) -> tuple[nn.Module, str] | None:
    """Return the innermost module around a path that accelerate moves, or the one there, and its path; None if none."""
    names = path.split(".")
    for n in range(len(names), -1, -1):
        prefix = ".".join(names[:n])
        if hasattr(module := submodule(model, prefix), _HOOK):
            return module, prefix
    return None


@contextlib.contextmanager
def gathered_norm(model: nn.Module, path: str) -> Iterator[torch.device | None]:
    """Keep the weights of a norm :func:`gathered` between passes; yield the device where accelerate runs it, or None.

    >>> with gathered_norm(nn.Sequential(nn.LayerNorm(4)), "0") as device:
    ...     print(device)
    None
    """
    holder, _ = hooked(model, path) or (None, "")
    device = getattr(getattr(holder, _HOOK, None), "execution_device", None)
    with gathered(submodule(model, path), within=holder):
        yield None if device is None else torch.device(device)


def gathered_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a network, with the weights that accelerate keeps elsewhere in the CPU's memory."""
    state = model.state_dict()
    if is_spread(model):
        from accelerate.utils import align_module_device, has_offloaded_params

        for path, child in model.named_modules():
            if has_offloaded_params(child):
                with align_module_device(child, torch.device("cpu")):
                    tensors = child.state_dict(prefix=f"{path}." if path else "")
                    state |= {name: value for name, value in tensors.items() if not value.is_meta}
    return state


def shard_like(module: nn.Module, norm: nn.Module) -> nn.Module:
    """Make a module's parameters DTensors with the placements of a norm's; scalars lie on every rank. Return it."""
    layout = next(filter(is_sharded, norm.parameters()), None)
    if layout is not None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = sharded_as(parameter.detach(), layout, on_all=parameter.shape != layout.shape)
            setattr(module, name, nn.Parameter(sharded, parameter.requires_grad))
    return module


def move_like(model: nn.Module, path: str, module: nn.Module) -> Callable[[], object]:
    """Have accelerate move a module as it moves the one at ``path``, whose place it is to take; return the reverse.

    The module's weights stay on the device where it runs, or come and go with those of the block around it.
    """
    holder = hooked(model, path)
    if holder is None:
        return lambda: None
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    hook: Any = getattr(holder[0], _HOOK)
    if holder[1] == path:
        add_hook_to_module(module, AlignDevicesHook(hook.execution_device))
        return lambda: remove_hook_from_module(module)
    if not (hook.offload and hook.place_submodules):
        return lambda: None
    # Before it runs, the block reads all tensors below it from this map, by name.
    if not isinstance(hook.weights_map, ChainMap):
        hook.weights_map = ChainMap({}, hook.weights_map)
    below = path[len(holder[1]) :].removeprefix(".")
    named = (*module.named_parameters(prefix=below), *module.named_buffers(prefix=below))
    hook.weights_map.update({name: value.detach() for name, value in named})
    parameters = [(child, dict(child._parameters)) for child in module.modules()]

    def undo() -> None:
        for name, _ in named:
            del hook.weights_map[name]
        for child, tensors in parameters:
            child._parameters.update(tensors)

    return undo


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose weights are :func:`gathered`, without hooks of torch, accelerate or FSDP2."""
    twin = nn.Module.__new__(class_of(module))  # fully_shard's class refuses copies
    nn.Module.__init__(twin)
    hooks = [getattr(child, _HOOK) for child in module.modules() if hasattr(child, _HOOK)]
    # Accelerate's hooks refer to the weights of the whole network, and those of fully_shard to all of its group.
    memo: dict[int, Any] = {id(module): twin, **{id(hook): None for hook in hooks}}
    tables = [table for child in module.modules() for name, table in vars(child).items() if "_hooks" in name]
    memo |= {id(table): type(table)() for table in tables if isinstance(table, dict)}
    attributes = {n: value for n, value in vars(module).items() if "_hooks" not in n and "composable" not in n}
    vars(twin).update(copy.deepcopy(attributes, memo))
    for child in twin.modules():
        if child.__dict__.pop(_HOOK, hooks) is not hooks:
            for name in ("forward", "_old_forward"):
                child.__dict__.pop(name, None)
    return twin


def differing_inputs(model: nn.Module, inputs: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the inputs that differ between the ranks that run a network together, on the same data.

    Plain tensors do not show that ranks divide them, as transformers' tensor parallelism divides heads.
    """
    group = tensor_parallel_group(model)
    if group is None or not inputs:
        return set()
    least = torch.stack([whole(x.detach()).double().square().sum() for x in inputs.values()])
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    differ = (most - least > _SAME * most).tolist()
    return {name for name, differs in zip(inputs, differ, strict=True) if differs}


def tensor_parallel_group(model: nn.Module) -> ProcessGroup | None:
    """Return the ranks that run a network on the same data, by the meshes of its DTensors; None if there are none.

    The axes of a mesh up to the first that ``fully_shard`` divides parameters along are axes of the data.
    """
    fully_sharded = any(hasattr(type(child), "unshard") for child in model.modules())
    for parameter in filter(is_sharded, model.parameters()):
        layout: Any = parameter
        dividing = (axis for axis, placement in enumerate(layout.placements) if placement.is_shard())
        n_data = 1 + next(dividing, -1) if fully_sharded else 0
        if n_data < layout.device_mesh.ndim:
            group: ProcessGroup = layout.device_mesh.get_group(n_data)
            return group
    return None
