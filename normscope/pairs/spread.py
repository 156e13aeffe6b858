"""Networks that accelerate has spread: a norm's weights may be on another device, or on none until it runs.

A hook on a module runs after accelerate has taken its weights away again, and before it moved what the module is called
with; what is computed of both brings them together here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from normscope.errors import ModelError

_HOOK = "_hf_hook"  # accelerate's own name for what it attaches to a module

ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


def is_spread(module: nn.Module) -> bool:
    """Whether accelerate moves the weights of a module, or what it is called with.

    >>> is_spread(nn.LayerNorm(4))
    False
    """
    return any(hasattr(part, _HOOK) for part in module.modules())


def check_whole(model: nn.Module) -> None:
    """Raise ModelError if accelerate has spread a network whose modules are to be replaced."""
    if is_spread(model):
        raise ModelError(
            f"This {type(model).__name__} is spread by accelerate, and norms are replaced in a network on one device "
            "alone. Load it without a device map."
        )


@contextlib.contextmanager
def at_hand(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Have the weights of a module on a device meanwhile, and what it was called with on the same one.

    Args:
        module: a norm; nothing is done where it is not spread.
        args: positional arguments that it was called with; those that are tensors are moved.
        kwargs: keyword arguments, likewise.

    Raises:
        ModelError: if its weights are on no device even then.
    """
    if not is_spread(module):
        yield args, kwargs
        return
    from accelerate.utils import align_module_device

    with contextlib.ExitStack() as aligned:
        for part in module.modules():
            aligned.enter_context(align_module_device(part))
        own = [*module.parameters(), *module.buffers()]
        if any(tensor.is_meta for tensor in own):
            raise ModelError(f"accelerate gives no access to the weights of a {type(module).__name__} it has put away.")

        def moved(value: Any) -> Any:
            return value.to(own[0].device) if own and isinstance(value, Tensor) else value

        yield tuple(map(moved, args)), {key: moved(value) for key, value in kwargs.items()}


def with_weights_at_hand(module: nn.Module, hook: ForwardHook) -> ForwardHook:
    """Return a forward hook for a module that runs with its weights :func:`at_hand`."""
    if not is_spread(module):
        return hook

    def brought_together(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with at_hand(module, args, kwargs) as (own_args, own_kwargs):
            hook(module, own_args, own_kwargs, output)

    return brought_together


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose weights are :func:`at_hand`, without what accelerate attached to it."""
    hooks = [getattr(part, _HOOK) for part in module.modules() if hasattr(part, _HOOK)]
    twin = copy.deepcopy(module, {id(hook): None for hook in hooks})  # each holds the weights of the whole network
    for part in twin.modules():
        if part.__dict__.pop(_HOOK, hooks) is not hooks:
            for name in ("forward", "_old_forward"):
                part.__dict__.pop(name, None)
    return twin
