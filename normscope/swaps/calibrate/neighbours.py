"""Which linear layers stand beside the norms of a network, and what becomes of what they give."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normscope.inputs.batch import Batch, leaves
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.trace import input_of
from normscope.runtime.network import left_as_found, run
from normscope.swaps.calibrate.linear_layers import LinearLayer
from normscope.swaps.calibrate.modulation import Modulation, modulation_of

_SAMPLES = 2  # that tell how layers and norms hang together
_HELD = 4  # times what goes in and out of the largest module: both networks' streams, and copies
# Of sums that the network itself takes in its own precision.
_SAME = 1e-2


@dataclass(frozen=True)
class NextNorm:
    """The norm whose input a layer's output goes into: that input is base + gain · output.

    Attributes:
        path: of the norm.
        base: of the norm before it, whose input or output the base is; None where nothing is added to the output, and
            nothing but the norm takes it.
        of_output: whether the base is that norm's output, as behind post-norms; else its input, the residual stream.
        gain: one number a channel, as a layer scale has it: float64 ``(channels,)``; ones where there is none.
    """

    path: str
    base: str | None
    of_output: bool
    gain: Tensor


@dataclass(frozen=True)
class Station:
    """A norm or a linear layer, in the order of calls.

    Attributes:
        path: of the module.
        is_norm: which of the two it is.
        channel_axis: the axis of what it gives that numbers the channels.
        feeds: the norm that the output of a layer goes into, where that could be told.
        modulated: what scales and shifts the output of a norm, likewise.
    """

    path: str
    is_norm: bool
    channel_axis: int = -1
    feeds: NextNorm | None = None
    modulated: Modulation | None = None


@dataclass(frozen=True)
class Neighbours:
    """What a calibration goes through.

    Attributes:
        stations: norms and linear layers in the order of calls.
        left: why a linear layer beside a swapped norm is left as it is, by path.
        held: about how many bytes a batch's passes through both networks hold while they wait, for each of its own.
    """

    stations: Sequence[Station]
    left: dict[str, str]
    held: float

    def bytes_of(self, batches: Iterable[Batch]) -> int:
        """About what passes hold while they wait: longer texts more than shorter ones."""
        return round(self.held * sum(map(_size, batches)))


def neighbours_of(network: nn.Module, sites: Sequence[NormSite], swapped: Sequence[str], batch: Batch) -> Neighbours:
    """Run a network once and tell its linear layers from how their outputs lie between the norms.

    A linear layer is beside a norm if no other norm of the residual stream is called between the two.

    Args:
        network: the original.
        sites: all its norm sites.
        swapped: paths of those that are swapped.
        batch: an input; its first samples are enough.
    """
    streams = {site.name: site for site in sites if site.placement != "qk" and site.calls == 1}
    every = {path: LinearLayer.of(module) for path, module in network.named_modules()}
    layers = {path: layer for path, layer in every.items() if layer is not None}
    seen = _seen(network, [*layers, *(site.name for site in sites)], batch.first(_SAMPLES))
    calls = Counter(call.path for call in seen)
    owners = Counter(id(parameter) for module in network.modules() for parameter in module._parameters.values())
    stations: list[Station] = []
    left: dict[str, str] = {}
    for number, call in enumerate(seen):
        if call.path in layers:
            if not any(path in swapped for path in _stream_norms_around(seen, number, streams)):
                continue
            layer = layers[call.path]
            reason = _refusal(layer, call, calls[call.path], owners)
            if reason:
                left[call.path] = reason
            else:
                into = None if call.derived else _next_norm(seen, number, streams, layer.channel_axis)
                stations.append(Station(call.path, False, layer.channel_axis, into))
        elif call.path in streams or (call.path in swapped and calls[call.path] == 1):
            site = next(site for site in sites if site.name == call.path)
            axis = _channel_axis(site, call.input.ndim)
            stations.append(Station(call.path, True, axis, modulated=_modulation(seen, number, layers)))
    left |= {path: "it is not called as a module" for path in layers if not calls[path]}
    largest = max((call.input.nbytes + call.output.nbytes for call in seen), default=0)
    return Neighbours(stations, left, _HELD * largest / _size(batch.first(_SAMPLES)))


def _size(batch: Batch) -> int:
    """The bytes of a batch's tensors; the number of its samples where it has none."""
    values = leaves((*batch.args, batch.kwargs), of_lists=batch.forward is not None)
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) or max(1, len(batch.samples))


def _channel_axis(site: NormSite, ndim: int) -> int:
    """The axis, counted from the end, that numbers a norm's channels; axis 1 of norms over groups of channels."""
    axis = site.channel_axis
    if isinstance(axis, tuple):
        axis = 1 if axis[0] > 0 else -1
    return axis if axis < 0 else axis - ndim


def _refusal(layer: LinearLayer, call: _ModuleCall, calls: int, owners: Counter[int]) -> str:
    """Say why a linear layer cannot be refitted; empty where it can."""
    if parametrize.is_parametrized(layer.module) or layer.weight not in layer.module._parameters:
        return "its weight is computed from other tensors"
    if reason := layer.reason:
        return reason
    if not layer.matrix.is_floating_point():
        return f"its weight is in {layer.matrix.dtype}"
    if layer.matrix.is_meta:
        return "its weight is on the meta device"
    if calls > 1:
        return f"it is called {calls} times in one pass"
    if any(owners[id(parameter)] > 1 for parameter in layer.parameters):
        return "its weights are another module's too"
    if call.input.ndim < 1 - layer.channel_axis:
        return "it is called without an axis of samples"
    if call.derived and not call.of_one:
        return "its queries and keys are made of different inputs, and torch uses its weight without calling a module"
    return ""


@dataclass(frozen=True)
class _ModuleCall:
    path: str
    input: Tensor
    output: Tensor
    derived: bool = False  # whether the output is made of what the weight gives, and is not that itself
    of_one: bool = True  # whether one tensor is all that it takes


def _seen(network: nn.Module, paths: Sequence[str], batch: Batch) -> list[_ModuleCall]:
    """Run a network, and list the calls of some modules with copies of what they took and gave."""
    calls: list[_ModuleCall] = []
    taken: list[tuple[Tensor, bool]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = input_of(args, kwargs)
        three = [*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)][:3]
        of_one = all(value is given for value in three)
        taken.append((torch.zeros(0) if given is None else given.detach().to("cpu", copy=True), of_one))

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            given, of_one = taken.pop()
            derived = isinstance(module, nn.MultiheadAttention)
            output = output[0] if derived else output
            if isinstance(output, Tensor):
                calls.append(_ModuleCall(path, given, output.detach().to("cpu", copy=True), derived, of_one))

        return hook

    with contextlib.ExitStack() as hooks:
        for path in paths:
            module = network.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave(path)).remove)
        with left_as_found(network):
            run(network, batch)
    return calls


def _stream_norms_around(seen: Sequence[_ModuleCall], number: int, streams: Container[str]) -> Iterator[str]:
    """Yield the norm of the residual stream before a call and the one behind it."""
    for calls in (reversed(seen[:number]), seen[number + 1 :]):
        norm = next((call.path for call in calls if call.path in streams), None)
        if norm is not None:
            yield norm


def _next_norm(
    seen: Sequence[_ModuleCall], number: int, streams: Mapping[str, NormSite], channel_axis: int
) -> NextNorm | None:
    """Find out what the output of a layer is added to before the next norm; None where it is not just added."""
    behind = next((call for call in seen[number + 1 :] if call.path in streams), None)
    before = next((call for call in reversed(seen[:number]) if call.path in streams), None)
    shape = seen[number].output.shape
    if behind is None or behind.input.shape != shape:
        return None
    site = streams[behind.path]
    if _channel_axis(site, len(shape)) != channel_axis or site.channels != shape[channel_axis]:
        return None
    output, x = (value.double().movedim(channel_axis, -1) for value in (seen[number].output, behind.input))
    ones = torch.ones(output.shape[-1], dtype=torch.float64)
    if _is(x, output):  # a stream that begins here goes on past a pre-norm
        return NextNorm(behind.path, None, True, ones) if site.placement in (None, "post-norm") else None
    if before is None:
        return None
    if before.output.shape == shape and _is(x - output, before.output.double().movedim(channel_axis, -1)):
        return NextNorm(behind.path, before.path, True, ones)
    if before.input.shape == shape:
        added = x - before.input.double().movedim(channel_axis, -1)
        over = tuple(range(output.ndim - 1))
        gain = (added * output).sum(over) / output.square().sum(over).clamp_min(torch.finfo(torch.float64).tiny)
        if bool(gain.any()) and _is(added, gain * output):  # a gate that is shut says nothing of what it lets through
            return NextNorm(behind.path, before.path, False, gain)
    return None


def _modulation(seen: Sequence[_ModuleCall], number: int, layers: Container[str]) -> Modulation | None:
    """Find out what modulates the output of a norm before the next layer takes it."""
    behind = next((call for call in seen[number + 1 :] if call.path in layers), None)
    if behind is None:
        return None
    before = [(call.path, call.output) for call in reversed(seen[:number]) if call.path in layers]
    return modulation_of(seen[number].output, behind.input, before)


def _is(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _SAME * other.norm())
