"""One forward pass that finds the norm sites: what is called, in which order, how often, and where it stands."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from normscope.errors import ModelError, count
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel
from normscope.pairs.norms.formulas import channel_vectors, form_name, gain_and_shift
from normscope.pairs.norms.kinds import NormKind
from normscope.pairs.norms.known import POINTWISE
from normscope.pairs.norms.placement import Ends, FunctionWatch, of_sites, version_of
from normscope.pairs.norms.recognition import ancestor_kind, identified, ignores_scale, is_norm, kind_of, refusal
from normscope.pairs.norms.sites import NormSite, SkippedNorm
from normscope.pairs.norms.streams import unpacked
from normscope.runtime.network import at_hand, heard_by, left_as_found, passes_by, run

NOT_CALLED = "not called"


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
        of_weights: names of the sites whose input is a parameter or made of such alone: no token of theirs is padding.
        positions: how many the mask of padding had for each sample, of the sites that there is a mask for.
    """

    sites: list[NormSite]
    skipped: list[SkippedNorm]
    kinds: dict[str, NormKind] = field(repr=False)
    shapes: dict[str, torch.Size] = field(repr=False)
    overwriting: frozenset[str] = frozenset()
    keeps_state: bool = False
    of_weights: frozenset[str] = frozenset()
    positions: dict[str, int] = field(default_factory=dict, repr=False)


@dataclass
class _FirstCall:
    """First call of a module: kept alive until the pass ends, so that no other tensor takes its place in memory."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    kind: NormKind | str
    additions_before: int
    overwrites: bool
    calls: int = 1
    of_weights: bool = False

    @property
    def ends(self) -> Ends:
        return Ends(self.input, self.output, self.additions_before)


class _Input:
    """The input of a norm as it was before the norm ran."""

    def __init__(self, x: Tensor) -> None:
        self.copy = x.detach().clone()
        self._given, self._version = x, version_of(x)

    @property
    def changed(self) -> bool:
        """Whether the norm changed it: by torch's own count, and by its values, since ``x.data`` is not counted."""
        if version_of(self._given) != self._version:
            return True
        x = self._given
        comparable = x.layout == torch.strided and not (x.is_nested or is_batchedtensor(x))
        return comparable and not torch.equal(x, self.copy)


def find_norms(model: nn.Module | LoadedModel, batch: Batch | None = None) -> NormReport:
    """Run ``model`` once on ``batch`` and list its norms in the order in which they are first called.

    Args:
        model: what :func:`normscope.load` returned, or any module; its training flags and buffers, grad mode and the
            RNG state are left as found.
        batch: one batch of its inputs; the first sample alone is enough, and is taken of a loaded model's inputs. The
            model runs on a copy.

    Raises:
        UsageError: if a module comes without a batch.
        ModelError: if the model has no norm that is called and known, or if it is TorchScript or of torch.export.

    >>> from normscope.inputs.entries import as_batches
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> report = find_norms(model, next(as_batches([torch.zeros(2, 4)])))
    >>> [(site.name, site.kind, site.d) for site in report.sites]
    [('1', 'LayerNorm', 8)]
    """
    if batch is None and isinstance(model, LoadedModel):
        batch = model.inputs.first_sample()
    model, batches, *_ = unpacked(model, None if batch is None else [batch])
    batch = next(iter(batches)) if batch is None else batch
    _refuse_what_hooks_cannot_enter(model)
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps: compiled code calls no hook of its parts
    named, weighing = _suspects(model)
    watch = FunctionWatch()
    with left_as_found(model) as buffers:
        with _calls_of(named, weighing, watch) as calls, _entered(model, watch), passes_by(watch.lock), watch:
            run(model, batch)
        keeps_state = buffers.changed

    sites: list[NormSite] = []
    skipped: list[SkippedNorm] = []
    kinds: dict[str, NormKind] = {}
    no_norms = _no_norms(calls, named)
    for call in (call for name, call in calls.items() if name not in no_norms):
        if isinstance(call.kind, str):
            skipped.append(SkippedNorm(call.name, type(call.module).__name__, call.kind))
        else:
            kinds[call.name] = call.kind
            sites.append(_site(len(sites), call, call.kind))
    for name, module in named.items():
        if name not in calls and name not in no_norms:
            reason = "it does not take and return one tensor" if name in watch.tensorless else NOT_CALLED
            skipped.append(SkippedNorm(name, type(module).__name__, reason))
    skipped += [
        SkippedNorm(where or "(model)", function, "called as a function, which hooks on modules do not see")
        for where, function in watch.functional
    ]
    placements = of_sites({site.name: calls[site.name].ends for site in sites}, watch.additions)
    sites = [replace(site, placement=placements[site.name]) for site in sites]
    if not sites:
        raise ModelError(_no_sites(type(model).__name__, skipped, len(watch.weights_normed)))
    shapes = {site.name: calls[site.name].input.shape for site in sites}
    overwriting = frozenset(site.name for site in sites if calls[site.name].overwrites)
    of_weights = frozenset(site.name for site in sites if calls[site.name].of_weights)
    masks = {site.name: batch.valid_at(site.name) for site in sites}
    positions = {name: mask.shape[1] for name, mask in masks.items() if mask is not None}
    return NormReport(sites, skipped, kinds, shapes, overwriting, keeps_state, of_weights, positions)


def _refuse_what_hooks_cannot_enter(model: nn.Module | torch.export.ExportedProgram) -> None:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(map(_is_scripted_norm, modules)):
        raise ModelError(
            "The model is TorchScript where it normalizes, which hooks cannot enter; load that part as a module."
        )
    if isinstance(model, torch.export.ExportedProgram) or any(map(_is_exported, modules)):
        raise ModelError(
            "The model is of torch.export, in whole or in part: its norms are calls of functions (torch.ops.aten), "
            "which hooks on modules do not see. Pass the module as it was before torch.export.export."
        )


def _is_scripted_norm(module: nn.Module) -> bool:
    graph = getattr(module, "inlined_graph", "") if isinstance(module, torch.jit.ScriptModule) else ""
    return re.search(r"aten::(\w*norm|rsqrt)\b", str(graph)) is not None


def _is_exported(module: nn.Module) -> bool:
    """Whether a module is a graph of torch's own operators; that of torch.fx.symbolic_trace calls modules."""
    if not isinstance(module, torch.fx.GraphModule) or any(is_norm(part) for part in module.modules()):
        return False
    targets = [node.target for node in module.graph.nodes]
    return any(isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" for target in targets)


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a norm normalizes: the first among its positional, then its keyword arguments."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, Tensor)), None)


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a norm with ``x`` in the place of the tensor that it normalizes."""
    normalized = input_of(args, kwargs)
    return tuple(x if value is normalized else value for value in args), {
        name: x if value is normalized else value for name, value in kwargs.items()
    }


def _suspects(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Modules that are norms by the table or by name; and others that learn what a norm learns, or a layer scale.

    What a known norm is built of is part of it, and no norm of its own.
    """
    named: dict[str, nn.Module] = {}
    weighing: dict[str, nn.Module] = {}
    for name, module in _hookable(model):
        if any(parent in named and kind_of(named[parent]) for parent in _parents(name)):
            continue
        if is_norm(module):
            named[name] = module
        elif channel_vectors(module):
            weighing[name] = module
    return named, weighing


def _hookable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [named for named in model.named_modules() if not isinstance(named[1], torch.jit.ScriptModule)]


def _parents(name: str) -> list[str]:
    return [name[: dot.start()] for dot in re.finditer(r"\.|^(?=.)", name)]


def _no_norms(calls: dict[str, _FirstCall], named: dict[str, nn.Module]) -> set[str]:
    """Names of suspects that are no norms: they only multiply by a weight, are part of a norm, or only hold one."""
    sites = {name for name, call in calls.items() if isinstance(call.kind, NormKind)}
    weigh_alone_or_part = {
        name for name in calls.keys() - named.keys() if name not in sites or sites & {*_parents(name)}
    }
    held = sites - named.keys() - weigh_alone_or_part
    holders = {name for site in held for name in _parents(site) if name in named and refusal(named[name]) is None}
    return weigh_alone_or_part | holders


@contextlib.contextmanager
def _calls_of(
    named: dict[str, nn.Module], weighing: dict[str, nn.Module], watch: FunctionWatch
) -> Iterator[dict[str, _FirstCall]]:
    """Note the first call of each suspect, and let the watch forget what those that are norms do inside."""
    calls: dict[str, _FirstCall] = {}
    suspects = {**named, **weighing}
    # The last one is running: it may call itself.
    before: dict[str, list[tuple[_Input | None, tuple[int, int], bool]]] = {name: [] for name in suspects}

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = input_of(args, kwargs)
            with watch.paused():
                # Without running statistics, torch refuses one sample of one position: pass it twice.
                sums_batch = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
                twice = x is not None and sums_batch and x.numel() == x.shape[1]
                before[name].append((None if x is None else _Input(x), watch.mark(), twice))
                return with_input(args, kwargs, torch.cat([x, x])) if x is not None and twice else None

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            x, (kept_input, mark, twice) = input_of(args, kwargs), before[name].pop()
            with watch.paused():
                overwrites = kept_input is not None and kept_input.changed
            if name in calls:
                calls[name].calls += 1
                calls[name].overwrites |= overwrites
                calls[name].of_weights &= x is not None and watch.is_weight(x)
            elif x is not None and kept_input is not None and isinstance(output, Tensor):
                args, kwargs = with_input(args, kwargs, kept_input.copy) if overwrites else (args, kwargs)
                # Now, while the input is what the norm saw: the network may go on to add to it in place.
                with watch.paused(), at_hand(module, args, kwargs) as (own_args, own_kwargs):
                    kind = _resolve(module, own_args, own_kwargs, output)
                call = _FirstCall(name, module, x, output, kind, mark[1], overwrites, of_weights=watch.is_weight(x))
                calls[name] = call
            else:
                watch.tensorless[name] = None
            if name in named or (name in calls and isinstance(calls[name].kind, NormKind)):
                watch.forget_since(mark)
            return output[:1] if twice else None

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in suspects.items():
            hooks.callback(module.register_forward_pre_hook(heard_by(watch.lock, enter(name)), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(heard_by(watch.lock, leave(name)), with_kwargs=True).remove)
        yield calls


@contextlib.contextmanager
def _entered(model: nn.Module, watch: FunctionWatch) -> Iterator[None]:
    """Tell the watch which module is running, so that a function can be reported with its place."""

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args: watch.path.append(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        watch.path.pop()

    with contextlib.ExitStack() as hooks:
        for name, module in _hookable(model):
            hooks.callback(module.register_forward_pre_hook(heard_by(watch.lock, enter(name))).remove)
            hooks.callback(module.register_forward_hook(heard_by(watch.lock, leave)).remove)
        yield


def _resolve(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> NormKind | str:
    """Decide how a called module normalizes, by the table or by trial, or say why it is no norm site."""
    x = input_of(args, kwargs)
    assert x is not None  # noqa: S101 - as the module was called with a tensor
    if x.is_nested:
        return "it takes a nested tensor, whose tokens cannot be told apart by sample"
    if is_batchedtensor(x):
        return "it is called within torch.vmap, where its tokens cannot be told apart by sample"
    known = kind_of(module) or refusal(module)
    if known is None:
        if not (is_norm(module) or ignores_scale(module, (args, kwargs), x)):
            return "it only weighs its input"
        return identified(module, (args, kwargs), x, output, ancestor_kind(module))
    if isinstance(known, NormKind) and known.groups is not None:
        channels, features = known.channels(module, x), getattr(module, "num_features", None)
        if features not in (None, channels):  # as InstanceNorm allows where it has no weight
            return f"it was made for {features} channels and takes {channels}"
    return known


def _site(index: int, call: _FirstCall, kind: NormKind) -> NormSite:
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


def _no_sites(network: str, skipped: list[SkippedNorm], weights_normed: int) -> str:
    replaced = [norm.reason for norm in skipped if norm.reason.startswith(POINTWISE)]
    if replaced:
        curves = ", ".join(dict.fromkeys(reason[reason.find("(") + 1 : reason.rfind(")")] for reason in replaced))
        return (
            f"All {count(len(replaced), 'norm')} of this {network} were replaced ({curves}), and none is left to "
            "observe or to replace. Take the original's weights, or a swap of fewer sites."
        )
    if not skipped:
        none = f"This {network} has no normalization of activations, so that there is nothing to observe or to replace."
        instead = f" It normalizes its weights instead, in {count(weights_normed, 'module')}."
        return none + (instead if weights_normed else "")
    seen = "; ".join(f"{norm.name} ({norm.kind}): {norm.reason}" for norm in skipped[:4])
    return f"The model calls no normalization layer that normscope knows. Skipped: {seen}."
