"""Hooks of a norm that is swapped: what stands in its place hears them, through torch's own dicts of hooks."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
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
    """Refuse hooks that cannot be shared, and warn of those that stay with the norm.

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
    if module._backward_hooks and norm._is_full_backward_hook not in (None, module._is_full_backward_hook):
        raise ModelError(
            f"The norm {path!r} or the {type(module).__name__} for its place has full backward hooks and the other "
            "has not, and torch calls one kind alone; register them with register_full_backward_hook."
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
    """The hooks of a place, in dicts that the norm lends to what stands there, until :meth:`part`.

    They are torch's own, which handles know. The norm has dicts of its own meanwhile, for where it is still called: of
    links to the hooks that it had, so that it does not hear what is registered at its place.

    Args:
        norm: that is swapped.
        module: what is put in its place; it may come with hooks of its own.
    """

    def __init__(self, norm: nn.Module, module: nn.Module) -> None:
        self.norm, self.module = norm, module
        self._lent = {name: getattr(norm, name) for name in _DICTS}
        self._own = {name: getattr(module, name) for name in _DICTS}
        self._own_full = module._is_full_backward_hook
        self._added: list[RemovableHandle] = []  # of the hooks that the module came with
        self._links = {name: OrderedDict(lent) for name, lent in self._lent.items()}
        self._known = {kind: list(self._lent[kind]) for kind in _HOOKS}
        for kind in _HOOKS:
            for key, hook in self._lent[kind].items():
                self._links[kind][key] = _Link(self._lent[kind], key)
                if _serves(hook, norm):
                    self._lent[kind][key] = _Idle(hook)
            for key in self._own[kind]:
                handle = RemovableHandle(self._lent[kind], extra_dict=[self._lent[name] for name in _HOOKS[kind]])
                _link(self._lent, handle.id, self._own, kind, key)
                self._added.append(handle)
        for name in _DICTS:
            setattr(module, name, self._lent[name])
            setattr(norm, name, self._links[name])
        if norm._is_full_backward_hook is not None:
            module._is_full_backward_hook = norm._is_full_backward_hook

    def part(self) -> None:
        """Give each its own again: the norm also what was registered in the meantime, at its place or on itself."""
        for handle in self._added:
            handle.remove()
        for kind, options in _HOOKS.items():
            lent, links = self._lent[kind], self._links[kind]
            for key in self._known[kind]:
                if key in lent and key not in links:  # taken from the norm itself
                    for name in (kind, *options):
                        self._lent[name].pop(key, None)
                elif isinstance(lent.get(key), _Idle):
                    lent[key] = lent[key].hook
            for key in links:
                if key not in self._known[kind]:
                    _link(self._lent, key, self._links, kind, key)
        for name in _DICTS:
            setattr(self.norm, name, self._lent[name])
            setattr(self.module, name, self._own[name])
        if self.norm._backward_hooks and self.norm._is_full_backward_hook is None:
            self.norm._is_full_backward_hook = self.module._is_full_backward_hook
        self.module._is_full_backward_hook = self._own_full


class _Link:
    """A hook that is kept in another dict, as long as nobody removes it there."""

    def __init__(self, hooks: Mapping[int, Callable[..., Any]], key: int) -> None:
        self.hooks, self.key = hooks, key

    def __call__(self, *call: Any) -> Any:
        hook = self.hooks.get(self.key)
        if isinstance(hook, _Idle):
            hook = hook.hook
        return None if hook is None else hook(*call)


class _Idle:
    """The place of a hook that stays with the norm, in a dict that the norm has lent; in a copy it is empty."""

    def __init__(self, hook: Callable[..., Any] | None) -> None:
        self.hook = hook

    def __call__(self, *call: Any) -> None:
        """Do nothing: what calls it is not the norm."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Idle, (None,)  # a method of the norm would bring the norm along


def _link(to: Mapping[str, Any], as_key: int, of: Mapping[str, Any], kind: str, key: int) -> None:
    """Add a link to a hook, with the options that it was registered with."""
    to[kind][as_key] = _Link(of[kind], key)
    for option in _HOOKS[kind]:
        if key in of[option]:
            to[option][as_key] = True


def _serves(hook: object, norm: nn.Module) -> bool:
    """Return whether a hook works on the norm's own tensors: a method of it, or named after the one it computes."""
    if getattr(hook, "__self__", None) is norm:
        return True
    names = (getattr(hook, name, None) for name in ("name", "_tensor_name"))  # weight_norm, spectral_norm; pruning
    return any(isinstance(name, str) and isinstance(getattr(norm, name, None), Tensor) for name in names)


def _name_of(hook: object) -> str:
    return getattr(hook, "__qualname__", "") or type(hook).__qualname__
