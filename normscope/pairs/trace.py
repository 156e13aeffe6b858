"""One forward pass that finds the norm sites: what is called, in which order, how often, and where it stands."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normscope.batches import Batch
from normscope.errors import ModelError, count
from normscope.pairs.formulas import form_name, gain_and_shift
from normscope.pairs.kinds import NormKind
from normscope.pairs.library_norms import POINTWISE
from normscope.pairs.norms import ancestor_kind, kind_of, refusal
from normscope.pairs.placement import ADDITIONS, Addition, Ends, of_sites
from normscope.pairs.sites import NormSite, SkippedNorm
from normscope.pairs.spread import at_hand
from normscope.pairs.trials import identified
from normscope.state import left_as_found, run

NOT_CALLED = "not called"
_NORM_FUNCTIONS = {
    F.layer_norm,
    F.rms_norm,
    F.group_norm,
    F.batch_norm,
    F.instance_norm,
    F.local_response_norm,
    torch.layer_norm,
    torch.rms_norm,
    torch.group_norm,
    torch.batch_norm,
    torch.native_layer_norm,
    torch.native_group_norm,
}


@dataclass
class NormReport:
    """What one forward pass showed.

    Attributes:
        sites: the norm sites in the order of their first calls.
        skipped: norms that cannot be observed, and why.
        kinds: how each site's module normalizes.
        shapes: shape of each site's input at its first call.
        overwriting: names of the sites that change their own input, so that a hook behind them does not see it.
        keeps_state: whether the pass changed a buffer.
    """

    sites: list[NormSite]
    skipped: list[SkippedNorm]
    kinds: dict[str, NormKind] = field(repr=False)
    shapes: dict[str, torch.Size] = field(repr=False)
    overwriting: frozenset[str] = frozenset()
    keeps_state: bool = False


@dataclass
class _Call:
    """First call of a module: kept alive until the pass ends, so that no other tensor takes its place in memory."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    kind: NormKind | str
    additions_before: int
    overwrites: bool
    calls: int = 1

    @property
    def ends(self) -> Ends:
        return Ends(self.input, self.output, self.additions_before)


class _Input:
    """The input of a norm as it was before the norm was at work."""

    def __init__(self, x: Tensor) -> None:
        self.copy = x.detach().clone()
        self._given, self._version = x, _version(x)

    @property
    def changed(self) -> bool:
        """Whether the norm changed it: by torch's own count, and by its values, since ``x.data`` is not counted."""
        if _version(self._given) != self._version:
            return True
        return not (self._given.is_nested or torch.equal(self._given, self.copy))  # nested ones cannot be compared


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def find_norms(model: nn.Module, batch: Batch) -> NormReport:
    """Run ``model`` once on ``batch`` and list its norms in the order in which they are first called.

    Args:
        model: any module; its training flags and buffers, grad mode and the RNG state are left as found.
        batch: one batch of its inputs; the first sample alone is enough. The model runs on a copy.

    Raises:
        ModelError: if the model has no norm that is called and known, or if it is TorchScript.

    >>> from normscope.batches import as_batches
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> report = find_norms(model, next(as_batches([torch.zeros(2, 4)])))
    >>> [(site.name, site.kind, site.d) for site in report.sites]
    [('1', 'LayerNorm', 8)]
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError(
            "The model is TorchScript, in whole or in part, which hooks cannot enter; load it as a module."
        )
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps: compiled code calls no hook of its parts
    suspects = _suspects(model)
    watch = _FunctionWatch()
    with left_as_found(model) as buffers:
        with _calls_of(suspects, watch) as calls, _entered(model, watch), watch:
            run(model, batch)
        keeps_state = buffers.changed

    sites: list[NormSite] = []
    skipped: list[SkippedNorm] = []
    kinds: dict[str, NormKind] = {}
    for call in calls.values():
        if isinstance(call.kind, str):
            skipped.append(SkippedNorm(call.name, type(call.module).__name__, call.kind))
        else:
            kinds[call.name] = call.kind
            sites.append(_site(len(sites), call, call.kind))
    for name, module in suspects.items():
        if name not in calls:
            reason = "it does not take and return one tensor" if name in watch.tensorless else NOT_CALLED
            skipped.append(SkippedNorm(name, type(module).__name__, reason))
    skipped += [
        SkippedNorm(where or "(model)", function, "called as a function, which hooks on modules do not see")
        for where, function in watch.functional
    ]
    placements = of_sites({site.name: calls[site.name].ends for site in sites}, watch.additions)
    sites = [replace(site, placement=placements[site.name]) for site in sites]
    if not sites:
        raise ModelError(_no_sites(type(model).__name__, skipped))
    shapes = {site.name: calls[site.name].input.shape for site in sites}
    overwriting = frozenset(site.name for site in sites if calls[site.name].overwrites)
    return NormReport(sites, skipped, kinds, shapes, overwriting, keeps_state)


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a norm normalizes: the first among its positional, then its keyword arguments."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, Tensor)), None)


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a norm with ``x`` in the place of the tensor that it normalizes."""
    own = input_of(args, kwargs)
    return tuple(x if value is own else value for value in args), {
        name: x if value is own else value for name, value in kwargs.items()
    }


def _suspects(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that may normalize; what a known norm is built of is part of it, and no norm of its own."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parents = (name[: dot.start()] for dot in re.finditer(r"\.", name))
        if _is_norm(module) and not any(parent in found and kind_of(found[parent]) for parent in parents):
            found[name] = module
    return found


def _is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes, by the table or by its name.

    One that only holds a norm does not, nor does one with layers of its own, unless norm is what it is called: a
    RobertaPreLayerNormOutput is an output, an AdaGroupNorm a norm.
    """
    if ancestor_kind(module) is not None or refusal(module) is not None:
        return True
    name = type(module).__name__
    if not re.search("norm", name, re.IGNORECASE) or type(module).__module__.startswith("torch.nn.utils"):
        return False
    if any(_is_norm(child) for child in module.children()):
        return False
    layers = any(parameter.ndim > 1 for child in module.children() for parameter in child.parameters())
    return not layers or re.search("[nN]orm[^A-Z]*D?$", name) is not None


@contextlib.contextmanager
def _calls_of(suspects: dict[str, nn.Module], watch: _FunctionWatch) -> Iterator[dict[str, _Call]]:
    """Note the first call of each module, and tell the watch when one of them is at work."""
    calls: dict[str, _Call] = {}
    before: dict[str, list[_Input | None]] = {name: [] for name in suspects}  # the last is at work: it may call itself

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_of(args, kwargs)
            with watch.paused():
                before[name].append(None if x is None else _Input(x))
            watch.inside_norm += 1

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x, own = input_of(args, kwargs), before[name].pop()
            with watch.paused():
                overwrites = own is not None and own.changed
            if name in calls:
                calls[name].calls += 1
                calls[name].overwrites |= overwrites
            elif x is not None and own is not None and isinstance(output, Tensor):
                args, kwargs = with_input(args, kwargs, own.copy) if overwrites else (args, kwargs)
                # Now, while the input is what the norm saw: the network may go on to add to it in place.
                with watch.paused(), at_hand(module, args, kwargs) as (own_args, own_kwargs):
                    kind = _resolve(module, own_args, own_kwargs, output)
                calls[name] = _Call(name, module, x, output, kind, len(watch.additions), overwrites)
            else:
                watch.tensorless[name] = None
            watch.inside_norm -= 1

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in suspects.items():
            hooks.callback(module.register_forward_pre_hook(enter(name), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave(name), with_kwargs=True).remove)
        yield calls


@contextlib.contextmanager
def _entered(model: nn.Module, watch: _FunctionWatch) -> Iterator[None]:
    """Tell the watch which module is at work, so that a function can be reported with its place."""

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args: watch.path.append(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        watch.path.pop()

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(enter(name)).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        yield


class _FunctionWatch(TorchFunctionMode):
    """Sees every torch function: norms that are called as functions, and the additions of the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.inside_norm = 0
        self.on_pause = False
        self.path: list[str] = []
        self.tensorless: dict[str, None] = {}
        self.functional: dict[tuple[str, str], None] = {}
        self.additions: list[Addition] = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Look away from what normscope does itself."""
        self.on_pause = True
        yield
        self.on_pause = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on_pause:
            return func(*args, **(kwargs or {}))
        if func in _NORM_FUNCTIONS and not self.inside_norm:
            self.functional[(self.path[-1] if self.path else "", func.__name__)] = None
        elif func in ADDITIONS and not self.inside_norm:  # x − mean within a norm is no branch
            operands = tuple(value for value in args if isinstance(value, Tensor))
            if not any(isinstance(value, nn.Parameter) for value in operands):  # a bias or an embedding is no branch
                in_place = func.__name__.endswith("_") and not func.__name__.startswith("__")  # add_, but not __rsub__
                self.additions.append(Addition(operands, in_place))
        return func(*args, **(kwargs or {}))


def _resolve(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> NormKind | str:
    """Decide how a called module normalizes, by the table or by trial, or say why it is no norm site."""
    x = input_of(args, kwargs)
    assert x is not None  # noqa: S101 - as the module was called with a tensor
    known = kind_of(module) or refusal(module)
    if known is None:
        return identified(module, (args, kwargs), x, output, ancestor_kind(module))
    if isinstance(known, NormKind) and known.groups is not None:
        channels, features = known.channels(module, x), getattr(module, "num_features", None)
        if features not in (None, channels):  # as InstanceNorm allows where it has no weight
            return f"it was made for {features} channels and takes {channels}"
    return known


def _site(index: int, call: _Call, kind: NormKind) -> NormSite:
    x = call.input
    axes = (1,) if kind.groups is not None else kind.axes(call.module, x.ndim)
    return NormSite(
        index=index,
        name=call.name,
        kind=kind.name,
        normalized_shape=kind.token_shape(call.module, x),
        channel_axis=axes[0] if len(axes) == 1 else axes,
        channels=kind.channels(call.module, x),
        eps=kind.eps_of(call.module, x.dtype),
        affine=any(part is not None for part in gain_and_shift(call.module)),
        placement=None,
        calls=call.calls,
        tokens_per_sample=len(kind.rows(call.module, x)) * call.calls,
        centred=kind.centred,
        bounded=kind.bounded,
        grouped=kind.groups is not None,
        form=None if kind.form is None else form_name(kind.form),
    )


def _no_sites(network: str, skipped: list[SkippedNorm]) -> str:
    replaced = [norm.reason for norm in skipped if norm.reason.startswith(POINTWISE)]
    if replaced:
        curves = ", ".join(dict.fromkeys(reason[reason.find("(") + 1 : reason.rfind(")")] for reason in replaced))
        return (
            f"All {count(len(replaced), 'norm')} of this {network} were replaced ({curves}), and none is left to "
            "observe or to replace. Take the original's weights, or a swap of fewer sites."
        )
    if not skipped:
        return "The model calls no normalization layer, so that there is nothing to observe."
    seen = "; ".join(f"{norm.name} ({norm.kind}): {norm.reason}" for norm in skipped[:4])
    return f"The model calls no normalization layer that normscope knows. Skipped: {seen}."
