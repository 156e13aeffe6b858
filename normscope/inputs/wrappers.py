"""Modules that wrap another one: compiled, distributed, checkpointed and adapted networks, and paths without them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_SYNCHRONIZING = (
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
)
# Attributes that contain the wrapped module, by class: a name alone, such as module, may be any network's own.
_WRAPPED = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    _SYNCHRONIZING[0]: "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    _SYNCHRONIZING[1]: "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "peft.peft_model.PeftModel": "base_model",
    "peft.mixed_model.PeftMixedModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers.

    >>> unwrapped(nn.DataParallel(nn.LayerNorm(4)))
    LayerNorm((4,), eps=1e-05, elementwise_affine=True)
    """
    while (name := wrapped_name(type(module))) is not None:
        module = getattr(module, name)
    return module


def named_modules(model: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once with its path, both without wrappers; otherwise as ``nn.Module.named_modules`` does.

    >>> [path for path, _ in named_modules(nn.DataParallel(nn.Sequential(nn.LayerNorm(4))))]
    ['', '0']
    """
    module, seen = unwrapped(model), set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        yield from named_modules(child, f"{path}.{name}" if path else name, seen)


def submodule(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path without wrappers, or at one that names them; AttributeError if there is none."""
    module = unwrapped(model)
    outer = model
    for name in path.split(".") if path else []:
        outer = (module if hasattr(module, name) else outer).get_submodule(name)
        module = unwrapped(outer)
    return module


def synchronized(model: nn.Module) -> bool:
    """True if DDP or FSDP1 wraps a network or a part of it, which train only the parameters that they were made with.

    >>> synchronized(nn.LayerNorm(4))
    False
    """
    names = {f"{base.__module__}.{base.__qualname__}" for child in model.modules() for base in type(child).__mro__}
    return not names.isdisjoint(_SYNCHRONIZING)


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module inside all wrappers, before ``fully_shard`` replaced it by a subclass."""
    return next(
        base for base in type(unwrapped(module)).__mro__ if not base.__module__.startswith("torch.distributed.")
    )


def wrapped_name(cls: type) -> str | None:
    """Return the attribute of a wrapping class that contains the wrapped module; None for other classes."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return next((_WRAPPED[name] for name in names if name in _WRAPPED), None)
