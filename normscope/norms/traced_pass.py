"""One traced forward pass: the first calls of norms, by hooks and as functions, and the additions between them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from normscope.errors import ModelError
from normscope.inputs.batch import Batch, tensors_of
from normscope.inputs.wrappers import named_modules
from normscope.norms.functional import CalledNorm, Frame, FunctionWatch, inseparable
from normscope.norms.kinds import NormKind
from normscope.norms.recognition import (
    ancestor_kind,
    call_with,
    ignored,
    input_of,
    is_norm,
    kind_of,
    refusal,
    with_input,
)
from normscope.norms.sites import PointwiseParameters
from normscope.norms.trials import identified, is_small, normalizes_first, reproduced, shared, tried
from normscope.runtime.network import PassHooks, restoring, run
from normscope.runtime.spread import copied, gathered, whole

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
NOT_ONE_TENSOR = "it does not take and return one tensor"
_DIFFERS = "it does something else in another of its calls"
_ARGUMENTS_DIFFER = "some of its calls have other arguments, which change its output"
_ONLY_WEIGHS = "it only weighs its input"

_ADDITIONS = {
    *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__),
    *(torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__rsub__),
    *(torch.addcmul, Tensor.addcmul, Tensor.addcmul_, torch.lerp, Tensor.lerp),
}
# Functions that a norm written by hand calls.
_BY_HAND = {"rsqrt", "sqrt", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "normalize"}


@dataclass
class TracedCall:
    """First call of a norm; its tensors stay alive until the pass ends, so that no other tensor has their address."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    kind: NormKind | str
    additions_before: int
    overwrites: bool = False
    on_weight: bool = False
    pointwise: PointwiseParameters | None = None
    calls: int = 0
    arguments: set[str] = field(default_factory=set)  # of all calls, those that change what the norm does

    @property
    def is_site(self) -> bool:
        return isinstance(self.kind, NormKind)


class TracedPass(FunctionWatch):
    """A forward pass that records the norms, the additions of the residual stream, and queries and keys.

    A norm function may be called on weights, as a weight-standardized convolution does: on a parameter, or on what
    functions made of parameters alone. Such a call normalizes no activations, and is no site.

    Attributes:
        named: suspects that are norms by the table or by name.
        suspects: these, and modules as small as norms are.
        calls: the first calls of suspects and functions, by name, in order.
        torn: suspects that are no norms, and why.
        tensorless: suspects that did not take and return one tensor in some call.
        within_norms: suspects that were called inside of norms alone.
        with_sites: suspects that are no sites, but contain some.
        by_hand: modules that compute the root of a statistic by themselves.
        sequences: names of the functions that each module calls.
        additions: operands of each addition, kept alive, and whether the first of them contains the sum afterwards.
        keeps_state: whether the pass changed a buffer.
    """

    def __init__(self, model: nn.Module, torn: Mapping[str, str]) -> None:
        """Prepare for a network in which the ``torn`` suspects are no norms, for the reasons given."""
        self.named, unnamed = _suspects(model)
        super().__init__([name for name, module in self.named.items() if kind_of(module)], PassHooks())
        self.suspects, self.torn = {**self.named, **unnamed}, dict(torn)
        self.calls: dict[str, TracedCall] = {}
        self.tensorless: set[str] = set()
        self.within_norms: set[str] = set()
        self.with_sites: set[str] = set()
        self.by_hand: set[str] = set()
        self.sequences: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        self.additions: list[tuple[tuple[Tensor, ...], bool]] = []
        self.queries_and_keys: list[Tensor] = []
        self.weights_normed: set[str] = set()
        self.keeps_state = False
        self._differing: set[str] = set()  # sites whose kind does not reproduce the output of a later call
        # A copy of the input of each running call, and the numbers of calls and additions before it.
        self._running: dict[str, list[tuple[Tensor | None, tuple[int, int]]]] = defaultdict(list)
        self._weights = WeakTensorKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, torn: Mapping[str, str] = MappingProxyType({})) -> TracedPass:
        """Run a network; once more if a suspect is a norm in some of its calls and does something else in the rest."""
        traced = cls(model, torn)
        with restoring(model) as buffers:
            with traced.following(model), traced.hooks.running():
                run(model, batch, traced)
            traced.keeps_state = buffers.changed
        sites = {name for name, call in traced.calls.items() if call.is_site}
        differing = dict.fromkeys(traced._differing, _DIFFERS)
        differing |= dict.fromkeys(traced.tensorless & sites, NOT_ONE_TENSOR)
        return cls.of(model, batch, {**torn, **differing}) if differing else traced

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follow the calls of suspects, and of the network's modules, in the block."""
        with contextlib.ExitStack() as hooks:
            for name, module in self.suspects.items():
                begin, end = (self.hooks.limited(partial(hook, name)) for hook in (self._begin, self._end))
                hooks.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(end, with_kwargs=True).remove)
            hooks.enter_context(super().following(model))
            yield

    @property
    def weighing(self) -> set[str]:
        """Suspects that only weigh their input, and modules whose norms are sites of their own."""
        weighing = {name for name, call in self.calls.items() if call.kind == _ONLY_WEIGHS}
        return weighing | (self.with_sites - (self.by_hand & self.named.keys()))

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Ignore the functions that normscope itself calls; the modules that it runs are copies without hooks."""
        self._here.paused = True
        yield
        self._here.paused = False

    def _record(self, call: TracedCall) -> None:
        """Count a call of a suspect or of a norm function."""
        self.calls[call.name] = call
        call.calls += 1
        self._here.norms_called.append(call.name)

    def called(self, name: str, norm_of_call: Callable[[], CalledNorm], x: Tensor, output: Any) -> None:
        """Record a call of a norm function, unless on weights."""
        if self.is_weight(x):
            self.weights_normed.add(self.frames[-1].path)
        elif name in self.calls:
            self._record(self.calls[name])
        else:
            norm = norm_of_call()
            _check_tokens_whole(name, norm.kind, norm, x)
            x = norm.laid_out(x)
            output = norm.laid_out(output) if isinstance(output, Tensor) else x  # native_layer_norm returns three
            self._record(TracedCall(name, norm, x, output, norm.kind, len(self.additions)))

    def left(self, frame: Frame) -> None:
        """Record the norm functions that a forward called, in order."""
        self.sequences[frame.path].add(tuple(frame.functions))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._here.paused:
            return func(*args, **kwargs)
        operands = tuple(value for value in args if isinstance(value, Tensor))
        # A bias or an embedding is no branch.
        if func in _ADDITIONS and not any(isinstance(value, nn.Parameter) for value in operands):
            in_place = func.__name__.endswith("_") and not func.__name__.startswith("__")  # add_, but not __rsub__
            self.additions.append((operands, in_place))
        elif func is F.scaled_dot_product_attention:
            self.queries_and_keys += [*args, *kwargs.values()][:2]
        elif getattr(func, "__name__", "") in _BY_HAND and not all(map(self.is_weight, operands)):
            self.by_hand.add(self.frames[-1].path)
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tensor):
            sources = tensors_of([args, kwargs])
            if sources and all(map(self.is_weight, sources)):
                self._weights[result] = _version(result)
        return result

    def is_weight(self, value: Tensor) -> bool:
        """True if a tensor is a parameter or computed from parameters alone, and was not written to since."""
        if isinstance(value, nn.Parameter):
            return True
        return value in self._weights and bool(self._weights[value] == _version(value))

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        x = input_of(args, kwargs)
        if x is not None:
            _check_tokens_whole(name, kind_of(module), module, x)
        with self._paused():
            mark = len(self._here.norms_called), len(self.additions)
            self._running[name].append((None if x is None else x.detach().clone(), mark))
            twice = x is not None and _lone_value(module, x)
            return with_input(args, kwargs, torch.cat([x, x])) if x is not None and twice else None

    def _end(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        x, (copy, (n_called, n_additions)) = input_of(args, kwargs), self._running[name].pop()
        inside = [inner for inner in self._here.norms_called[n_called:] if inner != name]
        contains_sites = any(self.calls[inner].is_site for inner in inside)
        call = None
        if x is not None and copy is not None and name not in self.torn:
            with self._paused():
                overwrites = x.layout == torch.strided and inseparable(x) is None and not torch.equal(x, copy)
                # Now, while the input is what the norm saw: the network may go on to add to it in place.
                args, kwargs = with_input(args, kwargs, copy if overwrites else x)
                with gathered(module, args, kwargs) as inputs:
                    if isinstance(output, Tensor):
                        call = self._observed(name, module, inputs, x, output, n_additions, contains_sites)
                        call.overwrites |= overwrites
                    elif name not in self.named.keys() | self.tensorless and normalizes_first(
                        module, inputs, input_of(*inputs), output
                    ):
                        self.torn[name] = NOT_ONE_TENSOR
        if call is None:
            self.tensorless.add(name)
        is_site = call is not None and call.is_site
        if not is_site and contains_sites:
            self.with_sites.add(name)
        elif is_site or name in self.named:  # its x − mean is no branch, and what it calls no other norm
            self._forget(n_called, n_additions)
        if call is not None:
            self._record(call)
        return output[:1] if copy is not None and _lone_value(module, copy) else None

    def _forget(self, n_called: int, n_additions: int) -> None:
        """Forget the calls of norms in this thread and the additions since there were as many as these."""
        for name in self._here.norms_called[n_called:]:
            self.calls[name].calls -= 1
            if not self.calls[name].calls:
                del self.calls[name]
                self.within_norms.add(name)
        del self._here.norms_called[n_called:], self.additions[n_additions:]

    def _observed(
        self, name: str, module: nn.Module, args: _Arguments, x: Tensor, output: Tensor, before: int, around_sites: bool
    ) -> TracedCall:
        """Return the record of a suspect's calls, with one more that took and returned a tensor.

        ``args`` are its arguments with whole tensors on its device; there were ``before`` additions before it.
        """
        call, result = self.calls.get(name), whole(output, like=x)
        if call is None:
            kind: NormKind | str = _ONLY_WEIGHS  # as are the sites within a module that learns nothing
            if name in self.named or not around_sites or list(module.parameters()):
                same_class = (call.kind for call in reversed(self.calls.values()) if type(call.module) is type(module))
                kind = _resolve(module, *args, result, next((k for k in same_class if isinstance(k, NormKind)), None))
            pointwise = kind.pointwise(module) if isinstance(kind, NormKind) else None
            call = TracedCall(name, module, x, output, kind, before, pointwise=pointwise)
            call.on_weight = True
        elif isinstance(call.kind, NormKind) and kind_of(module) is None and not inseparable(x):
            whole_x = input_of(*args)
            if whole_x is None or not reproduced(call.kind, module, whole_x, result):
                self._differing.add(name)
        call.kind = inseparable(x) or call.kind  # its own calls with the parts came first
        call.on_weight &= self.is_weight(x)
        if call.is_site:
            call.arguments.add(_decisive(module, *args))
            call.kind = _ARGUMENTS_DIFFER if len(call.arguments) > 1 else call.kind
        return call


def _suspects(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return modules that are norms by the table or by name; and others that are as small as norms are.

    The parts of a known norm belong to it, and are no norms of their own.
    """
    named: dict[str, nn.Module] = {}
    unnamed: dict[str, nn.Module] = {}
    for name, module in named_modules(model):
        around = [name[: dot.start()] for dot in re.finditer(r"\.|^(?=.)", name)]
        if isinstance(module, torch.jit.ScriptModule) or any(kind_of(named[p]) for p in around if p in named):
            continue
        if is_norm(module):
            named[name] = module
        elif is_small(module) and not any(is_norm(child) and list(child.parameters()) for child in module.modules()):
            unnamed[name] = module
    return named, unnamed


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


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
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor, like: NormKind | None
) -> NormKind | str:
    """Return the kind of a called module, by the table or by trial, or the reason why it is no norm site.

    ``like`` is the kind of another module of its class.
    """
    x = input_of(args, kwargs)
    assert x is not None  # noqa: S101 - as the module was called with a tensor
    if reason := inseparable(x):
        return reason
    listed = kind_of(module) or refusal(module)
    if listed is None:
        places = ignored(module, x) if len(tensors_of([args, kwargs])) > 1 else ()
        args = tuple(None if str(position) in places else value for position, value in enumerate(args))
        kwargs = {name: None if name in places else value for name, value in kwargs.items()}
        if like is not None and (same := shared(like, module, (args, kwargs), x, output)):
            return same
        if not is_norm(module):
            return tried(module, (args, kwargs), x, output) or _ONLY_WEIGHS
        kind = identified(module, (args, kwargs), x, output, ancestor_kind(module))
        floating = output.is_floating_point() and x.is_floating_point()
        if isinstance(kind, str) and floating and torch.finfo(output.dtype).eps > torch.finfo(x.dtype).eps:
            return f"it returns {str(output.dtype)[6:]} for {str(x.dtype)[6:]}, of too few digits to find its form"
        return kind
    if isinstance(listed, NormKind) and listed.groups is not None:
        channels, features = listed.channels(module, x), getattr(module, "num_features", None)
        if features not in (None, channels):  # as InstanceNorm allows where it has no weight
            return f"it was made for {features} channels and takes {channels}"
    return listed


def _decisive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return arguments beside tensors that change what a norm does, such as ``scale=2.0``; empty if none does."""
    named, results = list[str](), list[tuple[Tensor, Tensor]]()
    if len(args) + len(kwargs) == 1:
        return ""
    with torch.no_grad(), contextlib.suppress(Exception):  # of code not ours
        signature, x = inspect.signature(module.forward), input_of(args, kwargs)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            default = signature.parameters[name].default
            if not isinstance(value, Tensor) and value is not (None if default is inspect.Parameter.empty else default):
                named.append(f"{name}={value!r:.60}")
        if x is None or not named:
            return ""
        twin, written, alone = copied(module).eval(), x.detach().clone(), x.detach().clone()
        for (own_args, own_kwargs), probe in (
            (with_input(args, kwargs, written), written),
            (call_with(twin, alone), alone),
        ):
            results.append((twin(*own_args, **own_kwargs), probe))
        if all(itertools.starmap(torch.equal, zip(*results, strict=True))):
            return ""
    return ", ".join(named) if results else ""
