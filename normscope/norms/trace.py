"""One forward pass that finds the norm sites: their order, number of calls, kinds and placements."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from normscope.errors import ModelError, count
from normscope.inputs.batch import Batch, tensors_of
from normscope.inputs.loaded_model import LoadedModel
from normscope.inputs.wrappers import class_of, named_modules
from normscope.norms.bound_inputs import unpacked
from normscope.norms.formulas import gain_and_shift
from normscope.norms.functional import CalledNorm, Frame, FunctionWatch, inseparable
from normscope.norms.kinds import NormKind
from normscope.norms.recognition import (
    ancestor_kind,
    call_with,
    ignored,
    is_norm,
    kind_of,
    refusal,
)
from normscope.norms.sites import NormSite, PointwiseParameters, SkippedNorm, kind_of_site
from normscope.norms.trials import identified, is_small, normalizes_first, reproduced, shared, tried
from normscope.runtime.network import PassHooks, left_as_found, run, uncompiled
from normscope.runtime.spread import at_hand, copied, differing_inputs, is_sharded, whole

_Modules = dict[str, nn.Module]  # by path
NOT_CALLED = "not called"
NOT_ONE_TENSOR = "it does not take and return one tensor"
_DIFFERS = "it does something else in another of its calls"
ONLY_WEIGHS = "it only weighs its input"
ARGUMENTS_DIFFER = "some of its calls have other arguments, which change its output"
_DIVIDED = "ranks that share the network have different inputs of it: each has some of the heads, or other batches"

_ADDITIONS = {
    *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__),
    *(torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__rsub__),
    *(torch.addcmul, Tensor.addcmul, Tensor.addcmul_, torch.lerp, Tensor.lerp),
}
# Functions that a norm written by hand calls.
_BY_HAND = {"rsqrt", "sqrt", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "normalize"}
# Names in timm (q_norm), diffusers (norm_q, norm_added_k, q_rms_norm_t) and transformers (q_layernorm, qk_norm,
# q_layernorm.norms.0 of one head); a norm before the projection (pre_norm_q, q_a_layernorm) is none of them.
_QUERY_OR_KEY = re.compile(
    r"(^|[._])(q|k|qk|query|key)_?((layer|rms|img)_?)?norm\d*(_t|_und_for_gen)?(\.norms\.\d+)?$"
    r"|(^|\.)norm\d*_?((added|ip)_)?(q|k|query|key)$"
    r"|(^|\.)\w*att\w*\.((q|k)_ln|ln_(q|k))$",
    re.IGNORECASE,
)


@dataclass
class NormReport:
    """Results of one traced forward pass.

    Attributes:
        sites: the norm sites in the order of their first calls.
        skipped: norms that cannot be observed, and why.
        kinds: the kind of each site's norm.
        shapes: shape of each site's input at its first call; empty if its only token is the whole input.
        overwriting: names of the sites that change their own input, so that a hook behind them does not see it.
        keeps_state: whether the pass changed a buffer.
        of_weights: names of the sites whose input is computed from parameters alone: no token of theirs is padding.
        positions: the number of positions in the padding mask of a sample, for sites that have such a mask.
        norm_modules: paths of the norm modules, inside which nothing is a site.
        sequences: names of the norm functions that the forward of each other module calls, in order.
    """

    sites: list[NormSite]
    skipped: list[SkippedNorm]
    kinds: dict[str, NormKind] = field(repr=False)
    shapes: dict[str, torch.Size] = field(repr=False)
    overwriting: frozenset[str] = frozenset()
    keeps_state: bool = False
    of_weights: frozenset[str] = frozenset()
    positions: dict[str, int] = field(default_factory=dict, repr=False)
    norm_modules: frozenset[str] = frozenset()
    sequences: Mapping[str, Collection[tuple[str, ...]]] = field(default_factory=dict, repr=False)


def find_norms(model: nn.Module | LoadedModel, batch: Batch | None = None) -> NormReport:
    """Run ``model`` once on ``batch`` and list its norms, and point-wise functions in place of norms, by first call.

    Args:
        model: what :func:`normscope.load` returned, or any module; its training flags and buffers, grad mode and the
            RNG state are restored.
        batch: one batch of its inputs, of which it gets a copy. One sample is enough. By default the first sample of a
            loaded model's inputs.

    Raises:
        UsageError: if a module comes without a batch.
        ModelError: if the model calls no norm that is known, or if it is TorchScript or from torch.export.

    >>> from normscope.inputs.batch import as_batches
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> report = find_norms(model, next(as_batches([torch.zeros(2, 4)])))
    >>> [(site.name, site.kind, site.d) for site in report.sites]
    [('1', 'LayerNorm', 8)]
    """
    if batch is None and isinstance(model, LoadedModel):
        batch = model.inputs.first_sample()
    model, batches, *_ = unpacked(model, None if batch is None else [batch])
    batch = batch if isinstance(batch, Batch) else next(iter(batches))
    _refuse_what_hooks_cannot_enter(model)
    model = uncompiled(model)  # inside torch.compile: compiled code calls no hook of its parts
    named, weighing = _suspects(model)
    watch = _traced(model, batch, named, weighing)
    # Modules that only weigh, and those whose norms are sites of their own.
    weigh = {name for name, call in watch.calls.items() if call.kind == ONLY_WEIGHS}
    no_norms = weigh | (watch.with_sites - (watch.by_hand & named.keys()))
    called = [call for call in watch.calls.values() if call.is_site or call.name not in no_norms]
    called = sorted(called, key=lambda call: call.order)
    divided = differing_inputs(model, {call.name: call.input for call in called if call.is_site})
    for call in called:
        call.kind = _DIVIDED if call.name in divided else call.kind
    kinds = {call.name: call.kind for call in called if isinstance(call.kind, NormKind)}
    skipped = [SkippedNorm(call.name, call.class_name, str(call.kind)) for call in called if call.name not in kinds]
    for name in dict.fromkeys([*named, *watch.torn]):
        if name not in watch.calls.keys() | watch.within_norms | no_norms:
            reason = watch.torn.get(name, NOT_ONE_TENSOR if name in watch.tensorless else NOT_CALLED)
            skipped.append(SkippedNorm(name, type({**named, **weighing}[name]).__name__, reason))
    if not kinds:
        raise ModelError(_no_sites(class_of(model).__name__, skipped, len(watch.weights_normed)))
    calls_of_sites = [call for call in called if call.name in kinds]
    placements = _placements(calls_of_sites, watch.additions, watch.queries_and_keys)
    sites = [_site(index, call, kinds[call.name], placements[call.name]) for index, call in enumerate(calls_of_sites)]
    masks = {site.name: batch.valid_at(site.path) for site in sites}
    return NormReport(
        sites,
        skipped,
        kinds,
        {call.name: call.shape for call in calls_of_sites},
        frozenset(call.name for call in calls_of_sites if call.overwrites),
        watch.keeps_state,
        frozenset(call.name for call in calls_of_sites if call.of_weights),
        {name: mask.shape[1] for name, mask in masks.items() if mask is not None},
        frozenset((named.keys() | kinds.keys()) - watch.with_sites),
        watch.sequences,
    )


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a norm normalizes: the first among its positional, then its keyword arguments."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a norm with ``x`` in the place of the tensor that it normalizes."""
    normalized = input_of(args, kwargs)
    return tuple(x if value is normalized else value for value in args), {
        name: x if value is normalized else value for name, value in kwargs.items()
    }


def _refuse_what_hooks_cannot_enter(model: nn.Module | torch.export.ExportedProgram) -> None:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    scripted = [getattr(part, "inlined_graph", "") for part in modules if isinstance(part, torch.jit.ScriptModule)]
    if any(re.search(r"aten::(\w*norm|rsqrt)\b", str(graph)) for graph in scripted):
        raise ModelError(
            "The model is TorchScript where it normalizes, which hooks cannot enter; load that part as a module."
        )
    # Graphs of torch.export call operators; those of torch.fx.symbolic_trace call modules.
    graphs = [part for part in modules if isinstance(part, torch.fx.GraphModule)]
    graphs = [part for part in graphs if not any(map(is_norm, part.modules()))]
    targets = [node.target for part in graphs for node in part.graph.nodes]
    operators = any(isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" for target in targets)
    if isinstance(model, torch.export.ExportedProgram) or operators:
        raise ModelError(
            "The model is of torch.export, in whole or in part: its norms are calls of functions (torch.ops.aten), "
            "which hooks on modules do not see. Pass the module as it was before torch.export.export."
        )


@dataclass
class _FirstCall:
    """First call of a norm; its tensors stay alive until the pass ends, so that no other tensor has their address."""

    order: int
    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    kind: NormKind | str
    additions_before: int
    overwrites: bool = False
    of_weights: bool = False
    pointwise: PointwiseParameters | None = None
    calls: int = 0
    arguments: set[str] = field(default_factory=set)  # of all calls, those that change what the norm does

    @property
    def is_site(self) -> bool:
        return isinstance(self.kind, NormKind)

    @property
    def class_name(self) -> str:
        """Name of the module's class, or of the function."""
        return self.module.function if isinstance(self.module, CalledNorm) else type(self.module).__name__

    @property
    def shape(self) -> torch.Size:
        """Shape of the input, in which an axis may count samples; empty if the whole input is one token."""
        whole = isinstance(self.module, CalledNorm) and self.module.whole
        return torch.Size() if whole else self.input.shape


class _Addition(NamedTuple):
    """The operands of one addition, kept alive, and whether the first of them contains the sum afterwards."""

    operands: tuple[Tensor, ...]
    in_place: bool


class _TraceWatch(FunctionWatch):
    """Records the norms that are called as functions, the additions of the residual stream, and queries and keys.

    A norm function may be called on weights, as a weight-standardized convolution does: on a parameter, or on what
    functions made of parameters alone. Such a call normalizes no activations, and is no site.
    """

    def __init__(self, norms: Collection[str], torn: Mapping[str, str]) -> None:
        """Watch a network outside of its ``norms``; ``torn`` suspects are none, for the reasons given."""
        super().__init__(norms, PassHooks())
        self.torn, self.keeps_state = dict(torn), False
        self.signatures: dict[str, set[tuple[bool, int]]] = {}  # whether suspects return a tensor, and take how many
        self.calls: dict[str, _FirstCall] = {}  # of suspects and functions
        self.differing: set[str] = set()  # sites whose kind does not reproduce the output of a later call
        self.tensorless: set[str] = set()
        self.within_norms: set[str] = set()  # whose calls were forgotten
        self.with_sites: set[str] = set()  # suspects that are no sites, but in which there are some
        self.by_hand: set[str] = set()  # modules that compute the root of a statistic by themselves
        self.sequences: dict[str, set[tuple[str, ...]]] = {}  # of the functions that each module calls
        self.additions: list[_Addition] = []
        self.queries_and_keys: list[Tensor] = []
        self.weights_normed: set[str] = set()
        self.order = itertools.count()  # of the first calls of norms
        self._of_weights = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the functions that normscope itself calls, and the modules that a trial runs."""
        self._here.paused = True
        with self.hooks.paused():
            yield
        self._here.paused = False

    def mark(self) -> tuple[int, int]:
        """Return the number of calls of norms in this thread and of additions so far."""
        return len(self._here.norms_called), len(self.additions)

    def record(self, call: _FirstCall) -> None:
        """Count a call of a suspect or of a norm function."""
        self.calls[call.name] = call
        call.calls += 1
        self._here.norms_called.append(call.name)

    def kind_like(self, module: nn.Module) -> NormKind | None:
        """Return the kind of a site of the module's class, if there is one."""
        calls = (call for call in reversed(self.calls.values()) if type(call.module) is type(module))
        return next((call.kind for call in calls if isinstance(call.kind, NormKind)), None)

    def since(self, mark: tuple[int, int]) -> list[str]:
        """Return the names of the norms that this thread called since a mark."""
        return self._here.norms_called[mark[0] :]

    def forget_since(self, mark: tuple[int, int]) -> None:
        """Forget what a norm did inside: its x − mean is no branch, and what it calls no other norm."""
        for name in self.since(mark):
            self.calls[name].calls -= 1
            if not self.calls[name].calls:
                del self.calls[name]
                self.within_norms.add(name)
        del self._here.norms_called[mark[0] :], self.additions[mark[1] :]

    def called(self, name: str, norm_of_call: Callable[[], CalledNorm], x: Tensor, output: Any) -> None:
        """Record a call of a norm function, unless on weights."""
        if self.is_weight(x):
            self.weights_normed.add(self.frames[-1].path)
        elif name in self.calls:
            self.record(self.calls[name])
        else:
            norm = norm_of_call()
            _check_tokens_whole(name, norm.kind, norm, x)
            x = norm.laid_out(x)
            output = norm.laid_out(output) if isinstance(output, Tensor) else x  # native_layer_norm returns three
            self.record(_FirstCall(next(self.order), name, norm, x, output, norm.kind, len(self.additions)))

    def left(self, frame: Frame) -> None:
        """Record the norm functions that a forward called, in order."""
        self.sequences.setdefault(frame.path, set()).add(tuple(frame.functions))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._here.paused:
            return func(*args, **kwargs)
        operands = tuple(value for value in args if isinstance(value, Tensor))
        # A bias or an embedding is no branch.
        if func in _ADDITIONS and not any(isinstance(value, nn.Parameter) for value in operands):
            in_place = func.__name__.endswith("_") and not func.__name__.startswith("__")  # add_, but not __rsub__
            self.additions.append(_Addition(operands, in_place))
        elif func is F.scaled_dot_product_attention:
            self.queries_and_keys += [*args, *kwargs.values()][:2]
        elif getattr(func, "__name__", "") in _BY_HAND and not all(map(self.is_weight, operands)):
            self.by_hand.add(self.frames[-1].path)
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tensor):
            sources = tensors_of([args, kwargs])
            if sources and all(map(self.is_weight, sources)):
                self._of_weights[result] = _version(result)
        return result

    def is_weight(self, value: Tensor) -> bool:
        """True if a tensor is a parameter or computed from parameters alone, and was not written to since."""
        if isinstance(value, nn.Parameter):
            return True
        return value in self._of_weights and bool(self._of_weights[value] == _version(value))


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _changed(x: Tensor, before: Tensor, version: int | None) -> bool:
    """True if a tensor was written to; the version alone would miss changes through ``x.data``."""
    if _version(x) != version:
        return True
    comparable = x.layout == torch.strided and inseparable(x) is None
    return comparable and not torch.equal(x, before)


def _suspects(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return modules that are norms by the table or by name; and others that are as small as norms are.

    The parts of a known norm belong to it, and are no norms of their own.
    """
    named: dict[str, nn.Module] = {}
    weighing: dict[str, nn.Module] = {}
    for name, module in _hookable(model):
        if any(parent in named and kind_of(named[parent]) for parent in _parents(name)):
            continue
        if is_norm(module):
            named[name] = module
        elif is_small(module) and not any(is_norm(part) and list(part.parameters()) for part in module.modules()):
            weighing[name] = module
    return named, weighing


def _hookable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [named for named in named_modules(model) if not isinstance(named[1], torch.jit.ScriptModule)]


def _parents(name: str) -> list[str]:
    return [name[: dot.start()] for dot in re.finditer(r"\.|^(?=.)", name)]


def _traced(
    model: nn.Module, batch: Batch, named: _Modules, weighing: _Modules, torn: Mapping[str, str] | None = None
) -> _TraceWatch:
    """Run a network; once more if a suspect is a norm in some of its calls and does something else in the rest."""
    watch = _TraceWatch([name for name, module in named.items() if kind_of(module)], torn or {})
    with left_as_found(model) as buffers:
        with _followed(named, weighing, watch), watch.following(model), watch.hooks.running():
            run(model, batch, watch)
        watch.keeps_state = buffers.changed
    differing = dict.fromkeys(watch.differing, _DIFFERS) | {
        name: NOT_ONE_TENSOR
        for name, call in watch.calls.items()
        if call.is_site and len(watch.signatures.get(name, ())) > 1
    }
    return _traced(model, batch, named, weighing, {**(torn or {}), **differing}) if differing else watch


@contextlib.contextmanager
def _followed(named: _Modules, weighing: _Modules, watch: _TraceWatch) -> Iterator[None]:
    """Record the first call of each suspect, and let the watch forget what norms do inside."""
    suspects = {**named, **weighing}
    # Of the running calls, as a module may call itself: a copy of the input, its version, and the watch's mark.
    before: dict[str, list[tuple[Tensor | None, int | None, tuple[int, int]]]] = {name: [] for name in suspects}

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = input_of(args, kwargs)
            if x is not None:
                _check_tokens_whole(name, kind_of(module), module, x)
            with watch.paused():
                copy, version = (None, None) if x is None else (x.detach().clone(), _version(x))
                before[name].append((copy, version, watch.mark()))
                twice = x is not None and _lone_value(module, x)
                return with_input(args, kwargs, torch.cat([x, x])) if x is not None and twice else None

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            x, (copy, version, mark), call = input_of(args, kwargs), before[name].pop(), watch.calls.get(name)
            contains_sites = any(watch.calls[each].is_site for each in watch.since(mark) if each != name)
            returned = isinstance(output, Tensor)
            watch.signatures.setdefault(name, set()).add((returned, len(tensors_of([args, kwargs]))))
            if x is None or copy is None or not returned or name in watch.torn:
                if name in weighing and not returned and name not in watch.tensorless | watch.torn.keys():
                    with watch.paused(), at_hand(module, args, kwargs) as (own_args, own_kwargs):
                        if normalizes_first(module, (own_args, own_kwargs), input_of(own_args, own_kwargs), output):
                            watch.torn[name] = NOT_ONE_TENSOR
                watch.tensorless.add(name)
                call = None
            else:
                with watch.paused():
                    overwrites = _changed(x, copy, version)
                of_weights = watch.is_weight(x)
                # Now, while the input is what the norm saw: the network may go on to add to it in place.
                args, kwargs = with_input(args, kwargs, copy if overwrites else x)
                if call is None:
                    with watch.paused(), at_hand(module, args, kwargs) as (own_args, own_kwargs):
                        around_sites = contains_sites and not list(module.parameters())
                        kind: NormKind | str = ONLY_WEIGHS  # as are the sites within a module that learns nothing
                        if name in named or not around_sites:
                            kind = _resolve(
                                module, own_args, own_kwargs, whole(output, like=x), watch.kind_like(module)
                            )
                        pointwise = kind.pointwise(module) if isinstance(kind, NormKind) else None
                    call = _FirstCall(
                        next(watch.order), name, module, x, output, kind, mark[1], overwrites, of_weights, pointwise
                    )
                elif isinstance(call.kind, NormKind) and kind_of(module) is None and not inseparable(x):
                    with watch.paused(), at_hand(module, args, kwargs) as (own_args, own_kwargs):
                        own_x = input_of(own_args, own_kwargs)
                        if own_x is None or not reproduced(call.kind, module, own_x, whole(output, like=x)):
                            watch.differing.add(name)
                call.kind = inseparable(x) or call.kind  # its own calls with the parts came first
                if call.is_site:
                    with watch.paused():
                        call.arguments.add(_decisive(module, args, kwargs))
                    call.kind = ARGUMENTS_DIFFER if len(call.arguments) > 1 else call.kind
                call.overwrites |= overwrites
                call.of_weights &= of_weights
            is_site = call is not None and call.is_site
            if not is_site and contains_sites:
                watch.with_sites.add(name)
            elif is_site or name in named:
                watch.forget_since(mark)
            if call is not None:
                watch.record(call)
            return output[:1] if copy is not None and _lone_value(module, copy) else None

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in suspects.items():
            before_call, after_call = map(watch.hooks.limited, (enter(name), leave(name)))
            hooks.callback(module.register_forward_pre_hook(before_call, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after_call, with_kwargs=True).remove)
        yield


def _check_tokens_whole(name: str, kind: NormKind | str | None, module: nn.Module, x: Tensor) -> None:
    placements: Any = getattr(x, "placements", ())  # of a DTensor
    divided = {placement.dim for placement in placements if placement.is_shard()}
    if isinstance(kind, NormKind) and divided & {axis % x.ndim for axis in kind.axes(module, x.ndim)}:
        raise ModelError(
            f"The input {tuple(x.shape)} of the norm {name} is sharded along its channels, so that no rank sees a "
            "whole token; shard it along the batch or the sequence."
        )


def _lone_value(module: nn.Module, x: Tensor) -> bool:
    """True for one value per channel of a BatchNorm without running statistics, which torch accepts only twice."""
    over_batch = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
    return over_batch and x.numel() == x.shape[1]


def _resolve(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, like: NormKind | None
) -> NormKind | str:
    """Return the kind of a called module, by the table or by trial, or the reason why it is no norm site.

    ``like`` is the kind of another module of its class.
    """
    x = input_of(args, kwargs)
    assert x is not None  # noqa: S101 - as the module was called with a tensor
    if reason := inseparable(x):
        return reason
    known = kind_of(module) or refusal(module)
    if known is None:
        places = ignored(module, x) if len(tensors_of([args, kwargs])) > 1 else ()
        args = tuple(None if str(place) in places else value for place, value in enumerate(args))
        kwargs = {name: None if name in places else value for name, value in kwargs.items()}
        if like is not None and (same := shared(like, module, (args, kwargs), x, output)):
            return same
        if not is_norm(module):
            return tried(module, (args, kwargs), x, output) or ONLY_WEIGHS
        found = identified(module, (args, kwargs), x, output, ancestor_kind(module))
        fewer = (
            output.is_floating_point()
            and x.is_floating_point()
            and torch.finfo(output.dtype).eps > torch.finfo(x.dtype).eps
        )
        dtypes = f"it returns {str(output.dtype)[6:]} for {str(x.dtype)[6:]}, of too few digits to find its form"
        return dtypes if fewer and isinstance(found, str) else found
    if isinstance(known, NormKind) and known.groups is not None:
        channels, features = known.channels(module, x), getattr(module, "num_features", None)
        if features not in (None, channels):  # as InstanceNorm allows where it has no weight
            return f"it was made for {features} channels and takes {channels}"
    return known


def _decisive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return arguments beside tensors that change what a norm does, such as ``scale=2.0``; empty if none does."""
    named, results = list[str](), list[tuple[Tensor, Tensor]]()
    if len(args) + len(kwargs) == 1:
        return ""
    with torch.no_grad(), at_hand(module, args, kwargs) as own, contextlib.suppress(Exception):  # of code not ours
        signature, x = inspect.signature(module.forward), input_of(*own)
        for name, value in signature.bind(*own[0], **own[1]).arguments.items():
            default = signature.parameters[name].default
            if not isinstance(value, Tensor) and value is not (None if default is inspect.Parameter.empty else default):
                named.append(f"{name}={value!r:.60}")
        if x is None or not named:
            return ""
        twin, written, alone = copied(module).eval(), x.detach().clone(), x.detach().clone()
        for (own_args, own_kwargs), probe in ((with_input(*own, written), written), (call_with(twin, alone), alone)):
            results.append((twin(*own_args, **own_kwargs), probe))
        if all(itertools.starmap(torch.equal, zip(*results, strict=True))):
            return ""
    return ", ".join(named) if results else ""


def _site(index: int, call: _FirstCall, kind: NormKind, placement: str | None) -> NormSite:
    x = whole(call.input)
    axes = (1,) if kind.over_positions else kind.axes(call.module, x.ndim)
    return NormSite(
        index=index,
        name=call.name,
        kind=kind.name,
        normalized_shape=kind.token_shape(call.module, x),
        channel_axis=axes[0] if len(axes) == 1 else axes,
        channels=kind.channels(call.module, x),
        eps=kind.eps_of(call.module, x.dtype),
        affine=any(part is not None for part in gain_and_shift(call.module)),
        placement=placement,
        calls=call.calls,
        tokens_per_sample=len(kind.rows(call.module, x)) * call.calls,
        centred=kind.centred,
        bounded=kind.bounded,
        grouped=kind.groups is not None,
        form=None if kind.form is None else kind.form.name,
        pointwise=call.pointwise,
        called_with="".join(call.arguments),
    )


def _placements(
    calls: list[_FirstCall], additions: list[_Addition], queries_and_keys: list[Tensor]
) -> dict[str, str | None]:
    """Identify the placement of each site by its path, from the order of its first call and the additions.

    It is ``pre-norm``, ``post-norm``, ``qk``, ``final`` or None, beside the residual stream. Sites whose paths differ
    only in the numbers of their blocks share a placement: nothing is added after the last block of a post-norm network.
    """
    last_added: dict[tuple[int, int] | None, float] = {}
    for number, addition in enumerate(additions):
        for operand in filter(_identity, addition.operands):
            # What was added to in place is, from then on, the sum; only what comes later takes it as it is now.
            overwritten = addition.in_place and operand is addition.operands[0]
            before = last_added.get(_identity(operand), -1)
            last_added[_identity(operand)] = max(before, number if overwritten else math.inf)

    def of_call(call: _FirstCall) -> str | None:
        if _QUERY_OR_KEY.search(call.name):
            return "qk"
        for tensor, placement in ((call.input, "pre-norm"), (call.output, "post-norm")):
            if last_added.get(_identity(tensor), -1) >= call.additions_before:
                return placement
        return "qk" if _identity(call.output) in attended else None

    attended = set(map(_identity, queries_and_keys)) - {None}
    placements = {call.name: of_call(call) for call in calls}
    of_pattern = {kind_of_site(name): placement for name, placement in reversed(placements.items()) if placement}
    placements = {name: placement or of_pattern.get(kind_of_site(name)) for name, placement in placements.items()}
    repeated = Counter(map(kind_of_site, placements))
    if any(placements.values()):
        for name in reversed(placements):
            if placements[name] or repeated[kind_of_site(name)] > 1:
                break
            placements[name] = "final"
    return placements


def _identity(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address and size of a tensor or shard; None for one that torch.vmap made, which has no address."""
    try:
        local: Any = tensor
        local = local.to_local() if is_sharded(tensor) else tensor
        return local.data_ptr(), local.numel()
    except RuntimeError:
        return None


def _no_sites(network: str, skipped: list[SkippedNorm], weights_normed: int) -> str:
    if not skipped:
        none = f"This {network} has no normalization of activations, so that there is nothing to observe or to replace."
        instead = f" It normalizes its weights instead, in {count(weights_normed, 'module')}."
        return none + (instead if weights_normed else "")
    seen = "; ".join(f"{norm.name} ({norm.kind}): {norm.reason}" for norm in skipped[:4])
    return f"The model calls no normalization layer that normscope knows. Skipped: {seen}."
