"""Hooks of a norm that is swapped: what stands in its place hears them, through torch's own dicts of hooks."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normscope.errors import ModelError

# Where torch keeps the hooks of a module, and beside them what it knows of some of these.
_HOOKS: dict[str, tuple[str, ...]] = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
}
_DICTS = [name for kind, options in _HOOKS.items() for name in (kind, *options)]


def check_hooks(path: str, norm: nn.Module, module: nn.Module, places: int) -> None:
    """Refuse hooks that cannot be heard together, and warn of those that stay with the norm.

    Args:
        path: of the norm.
        norm: that is swapped.
        module: what is put in its place.
        places: of how many norms that takes the place.

    Raises:
        ModelError: if that are several and this one has hooks, or if the backward hooks of the two are of two kinds.
    """
    if places > 1 and any(getattr(norm, kind) for kind in _HOOKS):
        raise ModelError(
            f"The {type(module).__name__} for {path!r} takes {places} norms' places, and that norm has hooks, which "
            "would hear the others too; give each norm a module of its own."
        )
    if norm._backward_hooks and module._backward_hooks and norm._is_full_backward_hook != module._is_full_backward_hook:
        raise ModelError(
            f"Of the norm {path!r} and the {type(module).__name__} for its place one has full backward hooks and the "
            "other has not, and torch calls one kind alone; register them with register_full_backward_hook."
        )
    for hook in (hook for kind in _HOOKS for hook in getattr(norm, kind).values() if _serves(hook, norm)):
        warnings.warn(
            f"The hook {_name_of(hook)} of the norm {path!r} works on the norm's own tensors: it stays with the norm, "
            "and what is swapped in does not call it.",
            stacklevel=3,  # the line that swaps
        )


def unheard(module: nn.Module) -> nn.Module:
    """Return a copy of a module, to be called by itself: the hooks of the network that it is from do not hear it."""
    hooks = [getattr(part, name) for part in module.modules() for name in _DICTS]
    return copy.deepcopy(module, {id(known): OrderedDict() for known in hooks})


class PlaceHooks:
    """The hooks of a place, in the norm's own dicts, which the norm and what stands for it share until :meth:`part`.

    Args:
        norm: that is swapped.
        module: what is put in its place; it may come with hooks of its own.
    """

    def __init__(self, norm: nn.Module, module: nn.Module) -> None:
        self.norm, self.module = norm, module
        self._own = {name: getattr(module, name) for name in _DICTS}
        self._full = norm._is_full_backward_hook, module._is_full_backward_hook
        brings_them = bool(module._backward_hooks) and not norm._backward_hooks
        self._kept: list[tuple[dict[int, Any], int, Any]] = []  # hooks of the norm alone: where, by which key, and what
        self._added: list[RemovableHandle] = []  # of those that the module came with
        for kind, options in _HOOKS.items():
            self._keep(getattr(norm, kind))
            self._add(kind, options)
        for name in self._own:
            setattr(module, name, getattr(norm, name))
        module._is_full_backward_hook = self._full[brings_them]

    def part(self) -> None:
        """Give each its own again: the norm also what was registered at its place in the meantime."""
        for handle in self._added:
            handle.remove()
        for hooks, key, hook in self._kept:
            if key in hooks:
                hooks[key] = hook
        if self.norm._backward_hooks:
            self.norm._is_full_backward_hook = self.module._is_full_backward_hook
        for name, hooks in self._own.items():
            setattr(self.module, name, hooks)
        self.module._is_full_backward_hook = self._full[True]

    def _keep(self, hooks: dict[int, Any]) -> None:
        """Leave hooks of the norm's own tensors to the norm, in their place among the others."""
        for key, hook in hooks.items():
            if _serves(hook, self.norm):
                hooks[key] = _OfOne(self.norm, True, {key: hook}, key)
                self._kept.append((hooks, key, hook))

    def _add(self, kind: str, options: Sequence[str]) -> None:
        """Let the hooks that the module came with follow the norm's."""
        for key in getattr(self.module, kind):
            beside = {option: getattr(self.norm, option) for option in options}
            handle = RemovableHandle(getattr(self.norm, kind), extra_dict=list(beside.values()))
            getattr(self.norm, kind)[handle.id] = _OfOne(self.norm, False, getattr(self.module, kind), key)
            for option, marked in beside.items():
                if key in getattr(self.module, option):
                    marked[handle.id] = True
            self._added.append(handle)


class _OfOne:
    """A hook, among those that a norm shares with what stands in its place, that one of the two alone calls.

    Args:
        norm: the norm; None in a copy of the network, which it is not in.
        is_norms: whether it is the norm that calls it.
        hooks: where the hook itself is, as long as nobody removes it.
        key: of it there.
    """

    def __init__(
        self, norm: nn.Module | None, is_norms: bool, hooks: Mapping[int, Callable[..., Any]], key: int
    ) -> None:
        self.norm = None if norm is None else weakref.ref(norm)
        self.is_norms, self.hooks, self.key = is_norms, hooks, key

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        by_norm = self.norm is not None and module is self.norm()
        hook = self.hooks.get(self.key) if by_norm == self.is_norms else None
        return None if hook is None else hook(module, *call)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the norm out of copies and pickles of the network that it was taken out of."""
        return _OfOne, (None, self.is_norms, {} if self.is_norms else self.hooks, self.key)


def _serves(hook: object, norm: nn.Module) -> bool:
    """Return whether a hook works on the norm's own tensors: a method of it, or named after the one it computes."""
    if getattr(hook, "__self__", None) is norm:
        return True
    names = (getattr(hook, name, None) for name in ("name", "_tensor_name"))  # weight_norm, spectral_norm; pruning
    return any(isinstance(name, str) and isinstance(getattr(norm, name, None), Tensor) for name in names)


def _name_of(hook: object) -> str:
    return getattr(hook, "__qualname__", "") or type(hook).__qualname__
