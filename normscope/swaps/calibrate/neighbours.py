"""Which linear layers stand beside the norms of a network, and what becomes of what they give."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normscope.inputs.batch import Batch
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.trace import input_of
from normscope.runtime.network import left_as_found, run

_SAMPLES = 2  # that tell how layers and norms hang together
_HELD = 4  # times what goes in and out of the largest module: both networks' streams, and copies
# Of sums that the network itself takes in its own precision.
_SAME = 1e-2
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FLAT = ("Conv1D",)  # of transformers: a linear layer whose weight is (inputs, outputs)


@dataclass(frozen=True)
class NextNorm:
    """The norm whose input a layer's output goes into: that input is base + gain · output.

    Attributes:
        path: of the norm.
        base: of the norm before it, whose input or output the base is.
        of_output: whether the base is that norm's output, as behind post-norms; else its input, the residual stream.
        gain: one number a channel, as a layer scale has it: float64 ``(channels,)``; ones where there is none.
    """

    path: str
    base: str
    of_output: bool
    gain: Tensor


@dataclass(frozen=True)
class Station:
    """A norm or a linear layer, in the order of calls.

    Attributes:
        path: of the module.
        is_norm: which of the two it is.
        feeds: the norm that the output of a layer goes into, where that could be told.
    """

    path: str
    is_norm: bool
    feeds: NextNorm | None = None


@dataclass(frozen=True)
class Neighbours:
    """What a calibration goes through.

    Attributes:
        stations: norms and linear layers in the order of calls.
        left: why a linear layer beside a swapped norm is left as it is, by path.
        bytes_per_sample: about what one sample's passes through both networks hold while they wait.
    """

    stations: Sequence[Station]
    left: dict[str, str]
    bytes_per_sample: int


def neighbours_of(network: nn.Module, sites: Sequence[NormSite], swapped: Sequence[str], batch: Batch) -> Neighbours:
    """Run a network once and tell its linear layers from how their outputs lie between the norms.

    A linear layer is beside a norm if no other norm of the residual stream is called between the two.

    Args:
        network: the original.
        sites: all its norm sites.
        swapped: paths of those that are swapped.
        batch: an input; its first samples are enough.
    """
    streams = [site.name for site in sites if site.placement != "qk" and site.calls == 1]
    layers = {path: module for path, module in network.named_modules() if _weight_of(module) is not None}
    convolutions = [path for path, module in network.named_modules() if isinstance(module, _CONVOLUTIONS)]
    seen = _seen(network, [*layers, *convolutions, *(site.name for site in sites)], batch.first(_SAMPLES))
    calls = Counter(call.path for call in seen)
    owners = Counter(id(parameter) for layer in layers.values() for parameter in layer.parameters(recurse=False))
    stations: list[Station] = []
    left: dict[str, str] = {}
    for number, call in enumerate(seen):
        if call.path in layers or call.path in convolutions:
            if not any(path in swapped for path in _stream_norms_around(seen, number, streams)):
                continue
            layer = layers.get(call.path)
            reason = "it is a convolution" if layer is None else _refusal(layer, calls[call.path], owners)
            if reason:
                left[call.path] = reason
            else:
                stations.append(Station(call.path, False, _next_norm(seen, number, streams)))
        elif call.path in streams or (call.path in swapped and calls[call.path] == 1):
            stations.append(Station(call.path, True))
    left |= {path: "it is not called as a module" for path in layers if not calls[path]}
    largest = max((call.input.nbytes + call.output.nbytes for call in seen), default=0)
    return Neighbours(stations, left, _HELD * largest // max(1, min(_SAMPLES, len(batch.samples))))


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a linear layer as ``(outputs, inputs)``, a view of its own."""
    weight = _weight_of(layer)
    if weight is None:
        raise TypeError(f"{type(layer).__name__} is no linear layer")
    return weight


def _weight_of(module: nn.Module) -> Tensor | None:
    if isinstance(module, nn.Linear):
        return module.weight
    weight = getattr(module, "weight", None)
    return weight.T if type(module).__name__ in _FLAT and isinstance(weight, nn.Parameter) else None


def _refusal(layer: nn.Module, calls: int, owners: Counter[int]) -> str:
    """Say why a linear layer cannot be refitted; empty where it can."""
    weight = weight_of(layer)
    if not weight.is_floating_point():
        return f"its weight is in {weight.dtype}"
    if weight.is_meta:
        return "its weight is on the meta device"
    if parametrize.is_parametrized(layer) or "weight" not in layer._parameters:
        return "its weight is computed from other tensors"
    if calls > 1:
        return f"it is called {calls} times in one pass"
    if any(owners[id(parameter)] > 1 for parameter in layer.parameters(recurse=False)):
        return "its weights are another layer's too"
    return ""


@dataclass(frozen=True)
class _ModuleCall:
    path: str
    input: Tensor
    output: Tensor


def _seen(network: nn.Module, paths: Sequence[str], batch: Batch) -> list[_ModuleCall]:
    """Run a network, and list the calls of some modules with copies of what they took and gave."""
    calls: list[_ModuleCall] = []
    taken: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = input_of(args, kwargs)
        taken.append(torch.zeros(0) if given is None else given.detach().to("cpu", copy=True))

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            given = taken.pop()
            if isinstance(output, Tensor):
                calls.append(_ModuleCall(path, given, output.detach().to("cpu", copy=True)))

        return hook

    with contextlib.ExitStack() as hooks:
        for path in paths:
            module = network.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave(path)).remove)
        with left_as_found(network):
            run(network, batch)
    return calls


def _stream_norms_around(seen: Sequence[_ModuleCall], number: int, streams: Sequence[str]) -> Iterator[str]:
    """Yield the norm of the residual stream before a call and the one behind it."""
    for calls in (reversed(seen[:number]), seen[number + 1 :]):
        norm = next((call.path for call in calls if call.path in streams), None)
        if norm is not None:
            yield norm


def _next_norm(seen: Sequence[_ModuleCall], number: int, streams: Sequence[str]) -> NextNorm | None:
    """Find out what the output of a layer is added to before the next norm; None where it is not just added."""
    behind = next((call for call in seen[number + 1 :] if call.path in streams), None)
    before = next((call for call in reversed(seen[:number]) if call.path in streams), None)
    output = seen[number].output.double()
    if behind is None or before is None or behind.input.shape != output.shape:
        return None
    x, ones = behind.input.double(), torch.ones(output.shape[-1], dtype=torch.float64)
    if before.output.shape == output.shape and _is(x - output, before.output.double()):
        return NextNorm(behind.path, before.path, True, ones)
    if before.input.shape == output.shape:
        added = x - before.input.double()
        rows = tuple(range(output.ndim - 1))
        gain = (added * output).sum(rows) / output.square().sum(rows).clamp_min(torch.finfo(torch.float64).tiny)
        if bool(gain.any()) and _is(added, gain * output):  # a gate that is shut says nothing of what it lets through
            return NextNorm(behind.path, before.path, False, gain)
    return None


def _is(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _SAME * other.norm())
