"""One forward pass that finds the norm sites: what is called, in which order, how often, and where it stands."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from normscope.errors import ModelError, count
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel
from normscope.pairs.norms.formulas import channel_vectors, form_name, gain_and_shift
from normscope.pairs.norms.kinds import NormKind
from normscope.pairs.norms.known import POINTWISE
from normscope.pairs.norms.recognition import ancestor_kind, identified, ignores_scale, is_norm, kind_of, refusal
from normscope.pairs.norms.sites import NormSite, SkippedNorm
from normscope.pairs.norms.streams import unpacked
from normscope.runtime.network import at_hand, heard_by, left_as_found, passes_by, run

ADDITIONS = {
    *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__),
    *(torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__rsub__),
    *(torch.addcmul, Tensor.addcmul, Tensor.addcmul_, torch.lerp, Tensor.lerp),
}

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
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_NORM_OPERATORS = re.compile(r"aten\.(_?native_|_fused_|cudnn_|miopen_)?(batch|group|instance|layer|rms)_norm\b")
# As timm (q_norm), diffusers (norm_q, norm_added_k, q_rms_norm_t) and transformers (q_layernorm, qk_norm,
# q_layernorm.norms.0 of one head) say; a norm before the projection (pre_norm_q, q_a_layernorm) is none of them.
_QUERY_OR_KEY = re.compile(
    r"(^|[._])(q|k|qk|query|key)_?((layer|rms|img)_?)?norm\d*(_t|_und_for_gen)?(\.norms\.\d+)?$"
    r"|(^|\.)norm\d*_?((added|ip)_)?(q|k|query|key)$"
    r"|(^|\.)\w*att\w*\.((q|k)_ln|ln_(q|k))$",
    re.IGNORECASE,
)


class Ends(NamedTuple):
    """Input and output of a site's first call, of any shape and still alive, and how many additions came before it."""

    input: Tensor
    output: Tensor
    additions_before: int


class Addition(NamedTuple):
    """The operands of one addition of a forward pass, still alive, and whether the first of them took the sum."""

    operands: tuple[Tensor, ...]
    in_place: bool


def of_sites(ends: dict[str, Ends], additions: list[Addition]) -> dict[str, str | None]:
    """Tell the placement of each site.

    Args:
        ends: for each module path, in the order of first calls, what its first call took and gave.
        additions: every addition of the forward pass, in order.

    Returns:
        ``pre-norm``, ``post-norm``, ``qk``, ``final`` or None (beside the residual stream) for each path. Sites whose
        paths differ only in the numbers of their blocks share a placement: nothing is added after the last block of a
        post-norm network, and its norm is post-norm all the same.
    """
    last_added: dict[tuple[int, int] | None, float] = {}
    for number, addition in enumerate(additions):
        for operand in filter(_identity, addition.operands):
            # What was added to in place is, from then on, the sum; only what comes later takes it as it is now.
            overwritten = addition.in_place and operand is addition.operands[0]
            before = last_added.get(_identity(operand), -1)
            last_added[_identity(operand)] = max(before, number if overwritten else math.inf)
    placements = {name: _of_site(name, end, last_added) for name, end in ends.items()}
    by_pattern = {_pattern(name): known for name, known in reversed(placements.items()) if known is not None}
    placements = {name: placement or by_pattern.get(_pattern(name)) for name, placement in placements.items()}
    repeated = Counter(_pattern(name) for name in placements)
    if any(placements.values()):
        for name in reversed(placements):
            if placements[name] or repeated[_pattern(name)] > 1:
                break
            placements[name] = "final"
    return placements


def _of_site(name: str, end: Ends, last_added: dict[tuple[int, int] | None, float]) -> str | None:
    def added(tensor: Tensor) -> bool:
        return last_added.get(_identity(tensor), -1) >= end.additions_before

    if _QUERY_OR_KEY.search(name):
        return "qk"
    if added(end.input):
        return "pre-norm"
    return "post-norm" if added(end.output) else None


def _identity(tensor: Tensor) -> tuple[int, int] | None:
    """Return where a tensor lies and how large it is; None of one that torch.vmap made, which lies nowhere."""
    try:
        return tensor.data_ptr(), tensor.numel()
    except RuntimeError:
        return None


def _pattern(name: str) -> str:
    """A path without the numbers of its blocks; the 1 of ``norm1`` is no such number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name)


class FunctionWatch(TorchFunctionMode):
    """Sees every torch function: norms that are called as functions, and the additions of the residual stream.

    A norm function may be called on weights (a weight-standardized convolution calls batch_norm): on a parameter, or on
    what functions made of parameters alone. That is no norm of activations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_pause = False
        self.lock = threading.RLock()  # identifies the watched pass
        self.path: list[str] = []
        self.tensorless: dict[str, None] = {}
        self.functional: dict[tuple[str, str], None] = {}
        self.additions: list[Addition] = []
        self.weights_normed: dict[str, None] = {}
        self._of_weights = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what normscope itself calls."""
        self.on_pause = True
        yield
        self.on_pause = False

    def mark(self) -> tuple[int, int]:
        """Return how many norms and additions were seen until now."""
        return len(self.functional), len(self.additions)

    def forget_since(self, mark: tuple[int, int]) -> None:
        """Forget what went on inside a norm: its x − mean is no branch, and the function it calls no other norm."""
        for key in list(self.functional)[mark[0] :]:
            del self.functional[key]
        del self.additions[mark[1] :]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.on_pause:
            return func(*args, **kwargs)
        operands = tuple(value for value in args if isinstance(value, Tensor))
        if func in _NORM_FUNCTIONS or (isinstance(func, _OPERATORS) and _NORM_OPERATORS.match(str(func))):
            where = self.path[-1] if self.path else ""
            if self.is_weight(operands[0] if operands else kwargs["input"]):
                self.weights_normed[where] = None
            else:
                self.functional[(where, func.__name__.partition(".")[0])] = None  # without an operator's overload
        # A bias or an embedding is no branch.
        elif func in ADDITIONS and not any(isinstance(value, nn.Parameter) for value in operands):
            in_place = func.__name__.endswith("_") and not func.__name__.startswith("__")  # add_, but not __rsub__
            self.additions.append(Addition(operands, in_place))
        result = func(*args, **kwargs)
        # Outside of every module it is the batch that is copied, which may be a parameter.
        if self.path and isinstance(result, Tensor):
            made_of = list(_tensors_in((*args, *kwargs.values())))
            if made_of and all(map(self.is_weight, made_of)):
                self._of_weights[result] = version_of(result)
        return result

    def is_weight(self, value: Tensor) -> bool:
        """True if a tensor is a parameter or computed from parameters alone, and was not written to since."""
        if isinstance(value, nn.Parameter):
            return True
        return value in self._of_weights and bool(self._of_weights[value] == version_of(value))


def version_of(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from (
            each for each in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(each, Tensor)
        )


NOT_CALLED = "not called"


@dataclass
class NormReport:
    """Results of one traced forward pass.

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
        """True if the norm changed it, by torch's version counter and by value: ``x.data`` is not counted."""
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

    >>> from normscope.inputs.batch import as_batches
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
    """True if a module is a graph of torch's operators; one of torch.fx.symbolic_trace calls modules."""
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
