"""Swap of a network's norms for point-wise functions, and its reverse."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normscope.curves.known import Curve
from normscope.errors import ModelError, count, first_few, warn
from normscope.inputs.batch import tensors_of
from normscope.inputs.loaded_model import LoadedModel, module_of
from normscope.inputs.wrappers import class_of, submodule
from normscope.norms.formulas import gain_and_shift
from normscope.norms.kinds import NormKind
from normscope.norms.recognition import kind_at
from normscope.norms.sites import Layers, NormSite
from normscope.runtime.network import uncompiled
from normscope.runtime.spread import check_whole, gathered_norm, move_like, shard_like, whole
from normscope.swaps.behaviour import behave_like
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.standalone import InPlaceOfNorm, RMSNorm
from normscope.swaps.start import Fits, Start, norms_of, only, starts

if TYPE_CHECKING:
    from normscope.swaps.calibrate.calibrate import CalibrationReport

PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks"),
)
_Hooks = tuple[nn.Module, nn.Module, dict[str, set[int]]]  # norm, replacement, and the hooks of the norm by attribute
_SWAPPED = ("sharded", "spread", "quantized")  # networks that can be, unlike those of DDP and FSDP1


class Swap:
    """Replacement of some of a network's modules; a context manager that restores the originals.

    The network changes at once, until the end of ``with`` or :meth:`undo`. The originals are restored as the same,
    unchanged objects, so ``state_dict`` and outputs are restored to the bit. Calls of a norm from outside the module
    tree, for example from a plain list, still reach the norm.

    A norm's hooks move to its replacement, with a warning, and back when the swap is undone; their handles stay valid.
    Hooks that the replacement has itself are inactive meanwhile. A norm keeps its pre-hooks if one of them computes the
    norm's own tensors, as pruning and :func:`torch.nn.utils.weight_norm` do.

    ``refitted`` contains values of other parameters by name.

    Attributes:
        model: the network.
        modules: the replacements, by module path.
        calibration: the report of the calibration, or None. Refitted layers get their own weights back with the norms.

    Raises:
        ModelError: if the network has no such module, or is itself the norm; if one module replaces several norms that
            have hooks.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> with Swap(model, {"1": PointwiseFunction("tanh", 8)}) as swap:
    ...     print(swap, model[1])
    Swap: tanh in place of 1 norm of Sequential PointwiseFunction(tanh, 8)
    >>> type(model[1]).__name__
    'LayerNorm'
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        refitted: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.modules = model, dict(modules)
        self.calibration: CalibrationReport | None = None
        inner = uncompiled(model)
        check_whole(inner, "A swap", but=_SWAPPED)
        if "" in self.modules:
            raise ModelError(f"The {type(inner).__name__} is itself the norm; put it into an nn.Sequential to swap it.")
        norms = {path: module_at(inner, path) for path in self.modules}
        replaced = {id(norm): (path, norm, self.modules[path]) for path, norm in norms.items()}
        changed = [(inner.get_parameter(name), value) for name, value in (refitted or {}).items()]
        self._hooks = _hooks_to_move(replaced.values())
        for norm, module, tables in self._hooks:
            _exchange_hooks(norm, module, tables)
        self._moved = [move_like(inner, path, module) for path, _, module in replaced.values()]
        self._places: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []  # parent, name, norm and replacement
        for parent in list(inner.modules()):  # a norm that several parents have is replaced in each
            for name, child in list(parent._modules.items()):
                if id(child) in replaced:
                    self._places.append((parent, name, *replaced[id(child)][1:]))
        for parent, name, norm, module in self._places:
            module.train(norm.training)
            if isinstance(module, InPlaceOfNorm):
                full_name = f"{type(norm).__module__}.{type(norm).__qualname__}"
                module.in_place_of = getattr(norm, "in_place_of", "") or full_name
            _put(parent, name, module)
        self._refitted = [(parameter, parameter.detach().clone()) for parameter, _ in changed]  # with their old values
        with torch.no_grad():
            for parameter, value in changed:
                parameter.copy_(value)

    def undo(self) -> None:
        """Restore the network's own modules; further calls do nothing.

        Raises:
            ModelError: if a replacement has been replaced in the meantime; nothing is restored then.
        """
        for parent, name, _, module in self._places:
            if parent._modules.get(name) is not module:
                raise ModelError(f"{name!r} has been replaced again since: undo the later swap first.")
        for parent, name, norm, _ in self._places:
            _put(parent, name, norm)
        for norm, module, tables in self._hooks:
            _exchange_hooks(norm, module, tables)
            for name, ids in tables.items():  # hooks registered since then stay with the replacement
                hooks = getattr(norm, name)
                getattr(module, name).update({number: hooks.pop(number) for number in hooks.keys() - ids})
        for move_back in self._moved:
            move_back()
        with torch.no_grad():
            for parameter, value in self._refitted:
                parameter.copy_(value)
        self._places, self._hooks, self._moved, self._refitted = [], [], [], []

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        modules = self.modules.values()
        names = dict.fromkeys(m.curve.name if isinstance(m, PointwiseFunction) else type(m).__name__ for m in modules)
        state = "" if self._places else ", undone"
        network = type(uncompiled(self.model)).__name__
        return f"Swap: {', '.join(names)} in place of {count(len(modules), 'norm')} of {network}{state}"


def replacements(
    model: nn.Module | LoadedModel,
    curve: str | Curve,
    fits: Fits,
    *,
    layers: Layers = "all",
    init: str = "fit",
) -> dict[str, nn.Module]:
    """Make the modules that :func:`normscope.swap` puts in, by module path, without a swap.

    Arguments and errors are those of :func:`normscope.swap`; a calibrated swap begins with ``fit``.

    >>> import normscope
    >>> network = normscope.load("demo_vit", limit=4)
    >>> replacements(network, "dyt", normscope.capture(network), layers="final")
    {'norm': PointwiseFunction(tanh, 64)}
    """
    inner, chosen = uncompiled(module_of(model)), norms_of(fits, layers)
    check_whole(inner, "A swap", but=_SWAPPED)
    norms = {norm.name: module_at(inner, norm.name) for norm in chosen}
    where = model_tensor(inner)
    modules = {}
    for start in starts(curve, only(fits, chosen), init):
        norm = norms[start.norm.name]
        if start.curve is None:
            check_whole(norm, f"A swap for {start.func}", but=("spread",))
        with gathered_norm(inner, start.norm.name) as device:
            module = replacement(norm, start, where if device is None else torch.empty_like(where, device=device))
        modules[start.norm.name] = shard_like(module, norm)
    return modules


def replacement(norm: nn.Module, start: Start, where: Tensor) -> nn.Module:
    """Make the replacement of a norm, with the norm's weight and bias; ModelError if it cannot be replaced.

    A norm without a weight gets a module with the device and dtype of ``where``.
    """
    site = start.norm
    if isinstance(norm, PointwiseFunction):
        raise ModelError(f"{site.name} is a point-wise function already; undo that swap first.")
    kind = kind_at(norm, site)
    if isinstance(kind, str):
        raise ModelError(f"The norm {site.name} ({type(norm).__name__}) cannot be replaced: {kind}.")
    own_gain, own_shift = gain_and_shift(norm)
    sized = [tensor for tensor in (own_gain, own_shift, getattr(norm, "running_mean", None)) if tensor is not None]
    shape = getattr(norm, "normalized_shape", ())
    widths = {tensor.numel() for tensor in sized} | {math.prod(shape if isinstance(shape, Iterable) else [shape])}
    if widths - {1, site.channels}:
        raise ModelError(
            f"The norm {site.name} ({type(norm).__name__}) has {max(widths)} channels, but {site.channels} in the "
            "capture, which is of another network."
        )
    gain, offset = kind.gain_and_offset(norm, site.channels)
    like = model_tensor(norm, where)
    shape, axis = _channels_of(site, kind)
    bias = own_shift is not None or bool(offset.any())
    elementwise = own_gain is not None or bias or bool((gain != gain[0]).any())
    if start.curve is None:
        if kind.groups is not None or kind.activation is not None or not kind.bounded:
            raise ModelError(f"{start.func} cannot take the place of {site.name}: it is a {site.kind}.")
        elementwise = elementwise or bool(gain[0] != 1)
        module: InPlaceOfNorm = RMSNorm(
            shape, eps=site.eps, channel_axis=axis, elementwise_affine=elementwise, bias=bias
        )
    else:
        module = PointwiseFunction(
            start.curve,
            shape,
            channel_axis=axis,
            alpha=start.alpha,
            shift=start.shift,
            elementwise_affine=elementwise or start.amplitude.numel() > 1,
            bias=bias,
        )
    module = module.to(like.device, like.dtype)
    behave_like(module, norm, site.name, like)
    weight = gain.cpu().double() * start.amplitude
    with torch.no_grad():
        for name, values in (("weight", weight), ("bias", offset)):
            parameter = getattr(module, name)
            if parameter is not None:
                parameter.copy_((values if parameter.numel() > 1 else values[:1]).reshape(parameter.shape))
    if not all(bool(parameter.isfinite().all()) for parameter in module.parameters()):
        largest = f"weight {weight.abs().max():.3g}, α {start.alpha.abs().max():.3g}"
        raise ModelError(f"The start values of {site.name} ({largest}) do not fit into {like.dtype}.")
    if isinstance(module, PointwiseFunction) and kind.activation is not None:
        module.also_activate(norm)
    return module


def module_at(model: nn.Module, path: str) -> nn.Module:
    """Return a module by its path; ModelError if there is none."""
    try:
        return submodule(model, path)
    except AttributeError as error:
        raise ModelError(
            f"The {class_of(model).__name__} has no module {path!r}; were the fits made of another network?"
        ) from error


@contextlib.contextmanager
def outputs_at(network: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Record copies of the outputs of modules at some paths, call by call, while the block runs the network."""
    outputs: dict[str, list[Tensor]] = {path: [] for path in paths}

    def copying(path: str, module: nn.Module, args: Any, result: Any) -> None:
        like = next(iter(tensors_of(args)), None)
        outputs[path].extend(whole(y, like).clone() for y in tensors_of(result) if y.is_floating_point())

    with contextlib.ExitStack() as hooks:
        for path in outputs:
            hooks.callback(module_at(network, path).register_forward_hook(partial(copying, path)).remove)
        yield outputs


def model_tensor(module: nn.Module, otherwise: Tensor | None = None) -> Tensor:
    """Return an empty tensor with the device and dtype of a replacement of ``module``."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    floating = (tensor for tensor in tensors if tensor.is_floating_point())
    like = next(floating, torch.zeros(()) if otherwise is None else otherwise)
    return torch.empty((), dtype=like.dtype, device=like.device)


def _hooks_to_move(replaced: Collection[tuple[str, nn.Module, nn.Module]]) -> list[_Hooks]:
    """Return the norms that have hooks, with their replacements, and warn of them."""
    hooked: dict[str, _Hooks] = {}
    for path, norm, module in replaced:
        movable = HOOKS if _has_tensor_hooks(norm) else (*PRE_HOOKS, *HOOKS)
        if not any(getattr(norm, name) for name in movable):
            continue
        uses = sum(used is module for *_, used in replaced)
        if uses > 1:
            raise ModelError(
                f"The {type(module).__name__} for {path!r} replaces {uses} norms, and the hooks of that norm would run "
                "for the others too; use one module per norm."
            )
        hooked[path] = norm, module, {name: set(getattr(norm, name)) for name in movable}
    if hooked:
        warn(f"Hooks of the norms {first_few(list(hooked))} run for their replacements until the swap is undone.")
    return list(hooked.values())


def _has_tensor_hooks(norm: nn.Module) -> bool:
    """True if a pre-hook computes the norm's own tensors: a method of the norm, weight_norm's or pruning's."""
    for hook in norm._forward_pre_hooks.values():
        tensors = (getattr(hook, name, None) for name in ("name", "_tensor_name"))
        if getattr(hook, "__self__", None) is norm or any(isinstance(name, str) for name in tensors):
            return True
    return False


def _exchange_hooks(norm: nn.Module, module: nn.Module, names: Iterable[str]) -> None:
    """Exchange hooks of two modules; handles refer to dictionaries of hooks, which stay the same objects."""
    for name in (*names, "_is_full_backward_hook"):  # a flag, without which torch calls no full backward hook
        value = getattr(norm, name)
        setattr(norm, name, getattr(module, name))
        setattr(module, name, value)


def _put(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Set a child, and rebind a module that torch.compile made of the child before."""
    parent._modules[name] = module
    if name == "_orig_mod":
        parent._initialize()  # type: ignore[operator]


def _channels_of(site: NormSite, kind: NormKind) -> tuple[tuple[int, ...], int]:
    """Return the sizes of the channel axes, and the channel axis."""
    if kind.over_positions:
        return (site.channels,), -kind.unbatched_axes if kind.unbatched_axes else 1
    if isinstance(site.channel_axis, int):
        return (site.channels,), site.channel_axis
    if site.channel_axis != tuple(range(-len(site.channel_axis), 0)):
        raise ModelError(f"The norm {site.name} cannot be replaced: its axes {site.channel_axis} are not the last.")
    return (site.channels // site.d, site.d) if kind.heads else site.normalized_shape, -1
