"""Linear layers beside the norms of a network, and where their outputs go."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normscope.inputs.batch import Batch, leaves
from normscope.inputs.wrappers import named_modules, submodule
from normscope.norms.recognition import input_of
from normscope.norms.sites import NormSite
from normscope.runtime.network import restoring, run
from normscope.swaps.calibrate.linear_layers import LinearLayer

_SAMPLES = 2  # of the pass that shows how layers and norms are connected
_COPIES = 4  # of input and output of the largest module, per waiting pass: both networks' streams, and copies
_SAME = 1e-2  # relative difference of equal sums, which the network computes in its own precision
_MOST_PARTS = 12  # of a layer's output that may modulate
_SHRINKAGE = 0.02  # of a sample's scale towards the present one, as a share of a channel's mean variance


@dataclass(frozen=True)
class NextNorm:
    """Norm whose input is base + gain · output of a layer.

    Attributes:
        path: of the norm.
        base: previous norm, whose input or output is the base; None if the norm alone receives the output.
        base_is_output: True if the base is that norm's output, as for post-norms; False for its input, the stream.
        gain: such as a layer scale, float64 ``(channels,)``; otherwise ones.
    """

    path: str
    base: str | None
    base_is_output: bool
    gain: Tensor


@dataclass(frozen=True)
class CalledModule:
    """Norm or linear layer, in the order of calls."""

    path: str
    is_norm: bool
    channel_axis: int = -1  # in its output
    feeds: NextNorm | None = None  # norm that the output of a layer goes into
    modulated: Modulation | None = None  # by the layer that scales and shifts the output of a norm


@dataclass(frozen=True)
class Neighbours:
    """Modules that a calibration visits."""

    called_modules: Sequence[CalledModule]
    left: dict[str, str]  # reason why a linear layer beside a swapped norm is left as it is, by path
    bytes_per_input_byte: float  # estimated memory of a batch's waiting passes through both networks

    def bytes_of(self, batches: Iterable[Batch]) -> int:
        return round(self.bytes_per_input_byte * sum(map(_size, batches)))


def neighbours_of(network: nn.Module, sites: Sequence[NormSite], swapped: Sequence[str], batch: Batch) -> Neighbours:
    """Find the linear layers beside swapped norms from one pass of the original over a few samples of a batch.

    A linear layer is beside a norm if no other norm of the residual stream is called between the two.
    """
    by_name = {site.name: site for site in sites if site.replaceable}
    streams = {name: site for name, site in by_name.items() if site.placement != "qk" and site.calls == 1}
    layers = {path: layer for path, module in named_modules(network) if (layer := LinearLayer.of(module)) is not None}
    few = batch.first(_SAMPLES)
    seen = _seen(network, [*layers, *by_name], few)
    calls = Counter(call.path for call in seen)
    owners = Counter(id(p) for module in network.modules() for p in module._parameters.values() if p is not None)
    called_modules: list[CalledModule] = []
    left: dict[str, str] = {}
    for number, call in enumerate(seen):
        if layer := layers.get(call.path):
            before, behind = (
                next((norm for norm in nearest_first if norm.path in streams), None)
                for nearest_first in (reversed(seen[:number]), seen[number + 1 :])
            )
            if not any(norm is not None and norm.path in swapped for norm in (before, behind)):
                continue
            if reason := _refusal(layer, call, calls[call.path], owners):
                left[call.path] = reason
                continue
            into = None
            if behind is not None and not call.derived:
                into = _next_norm(call, before, behind, streams[behind.path], layer.channel_axis)
            called_modules.append(CalledModule(call.path, False, layer.channel_axis, into))
        elif call.path in streams or (call.path in swapped and calls[call.path] == 1):
            axis, modulation = _channel_axis(by_name[call.path], call.input.ndim), None
            if next_layer := next((later for later in seen[number + 1 :] if later.path in layers), None):
                earlier = [(call.path, call.output) for call in reversed(seen[:number]) if call.path in layers]
                modulation = modulation_of(call.output, next_layer.input, earlier)
            called_modules.append(CalledModule(call.path, True, axis, modulated=modulation))
    left |= {path: "it is not called as a module" for path in layers if not calls[path]}
    largest = max((call.input.nbytes + call.output.nbytes for call in seen), default=0)
    return Neighbours(called_modules, left, _COPIES * largest / _size(few))


def _size(batch: Batch) -> int:
    """Return the bytes of a batch's tensors, or the number of its samples if it has none."""
    values = leaves((*batch.args, batch.kwargs), of_lists=batch.forward is not None)
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) or max(1, len(batch.samples))


def _channel_axis(site: NormSite, ndim: int) -> int:
    """Return the axis of a norm's channels, counted from the end; axis 1 for norms over groups of channels."""
    axis = site.channel_axis
    if isinstance(axis, tuple):
        axis = 1 if axis[0] > 0 else -1
    return axis if axis < 0 else axis - ndim


def _refusal(layer: LinearLayer, call: _ModuleCall, calls: int, owners: Counter[int]) -> str:
    """Return the reason why a linear layer cannot be refitted, or nothing."""
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
    if any(owners[id(parameter)] > 1 for parameter in (layer.module._parameters[layer.weight], layer.offset)):
        return "its weights are another module's too"
    if call.input.ndim < 1 - layer.channel_axis:
        return "it is called without an axis of samples"
    if call.derived and not call.same_input:
        return "its queries and keys are made of different inputs, and torch uses its weight without calling a module"
    return ""


@dataclass(frozen=True)
class _ModuleCall:
    path: str
    input: Tensor
    output: Tensor
    derived: bool = False  # True for attention, whose output is not the product of its weight
    same_input: bool = True  # True if query, key and value are one tensor


def _seen(network: nn.Module, paths: Sequence[str], batch: Batch) -> list[_ModuleCall]:
    """Run a network, and list the calls of some modules with copies of inputs and outputs."""
    calls: list[_ModuleCall] = []
    entered: list[tuple[Tensor, bool]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = input_of(args, kwargs)
        three = [*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)][:3]
        copy = torch.zeros(0) if x is None else x.detach().to("cpu", copy=True)
        entered.append((copy, all(value is x for value in three)))

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x, same_input = entered.pop()
            derived = isinstance(module, nn.MultiheadAttention)
            output = output[0] if derived else output
            if isinstance(output, Tensor):
                calls.append(_ModuleCall(path, x, output.detach().to("cpu", copy=True), derived, same_input))

        return hook

    with contextlib.ExitStack() as hooks:
        for path in paths:
            module = submodule(network, path)
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave(path)).remove)
        with restoring(network):
            run(network, batch)
    return calls


def _next_norm(
    call: _ModuleCall, before: _ModuleCall | None, behind: _ModuleCall, site: NormSite, channel_axis: int
) -> NextNorm | None:
    """Return the norm and the base to which the output of a layer is added; None if it is not just added.

    ``before`` and ``behind`` are the calls of the stream's norms around that of the layer, and ``site`` the latter.
    """
    shape = call.output.shape
    same_axis = behind.input.shape == shape and _channel_axis(site, len(shape)) == channel_axis
    if not same_axis or site.channels != shape[channel_axis]:
        return None
    output, x = (value.double().movedim(channel_axis, -1) for value in (call.output, behind.input))
    ones = torch.ones(output.shape[-1], dtype=torch.float64)
    if _is(x, output):  # a stream that begins here continues past a pre-norm
        return NextNorm(behind.path, None, True, ones) if site.placement in (None, "post-norm") else None
    if before is None:
        return None
    if before.output.shape == shape and _is(x - output, before.output.double().movedim(channel_axis, -1)):
        return NextNorm(behind.path, before.path, True, ones)
    if before.input.shape == shape:
        added = x - before.input.double().movedim(channel_axis, -1)
        over = tuple(range(output.ndim - 1))
        gain = (added * output).sum(over) / output.square().sum(over).clamp_min(torch.finfo(torch.float64).tiny)
        if bool(gain.any()) and _is(added, gain * output):  # a closed gate reveals nothing
            return NextNorm(behind.path, before.path, False, gain)
    return None


def _is(x: Tensor, expected: Tensor) -> bool:
    return bool((x - expected).norm() <= _SAME * expected.norm())


@dataclass(frozen=True)
class Modulation:
    """Modulation of a norm's output y: y · (1 + scale) + shift, from channels of a layer's output for the sample.

    ``layer`` is the path of the layer; ``scale`` and ``shift`` are the first channels of each.
    """

    layer: str
    scale: int
    shift: int

    def channels(self, size: int) -> Tensor:
        """Return the layer's channels of scale and shift, in this order, for a norm's number of channels."""
        return torch.cat([first + torch.arange(size) for first in (self.scale, self.shift)])


def modulation_of(output: Tensor, next_input: Tensor, layers: Sequence[tuple[str, Tensor]]) -> Modulation | None:
    """Find the modulation of a norm's output ``(samples, tokens, channels)`` by the input of the next layer.

    ``layers`` are paths and outputs of the linear layers that were called before.

    >>> y, modulation = torch.randn(2, 9, 4), torch.randn(2, 12)
    >>> modulation_of(y, y * (1 + modulation[:, None, 8:]) + modulation[:, None, :4], [("adaln", modulation)])
    Modulation(layer='adaln', scale=8, shift=0)
    """
    if output.ndim != 3 or output.shape != next_input.shape:
        return None
    size = output.shape[-1]
    for path, modulation in layers:
        channels = modulation.shape[-1]
        if modulation.ndim != 2 or len(modulation) != len(output) or channels % size or channels > _MOST_PARTS * size:
            continue
        parts = list(enumerate(modulation[:, None].chunk(channels // size, dim=-1)))
        for (first, scale), (second, shift) in itertools.permutations(parts, 2):
            if _is(output * (1 + scale) + shift, next_input):
                return Modulation(path, first * size, second * size)
    return None


def best_for_each_sample(output: Tensor, target: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Fit scale and shift of each sample and channel in output · (1 + scale) + shift to a target.

    ``output`` and ``target`` are ``(samples, tokens, channels)``. Scales of channels that hardly vary are shrunk
    towards the ``present`` ones. Returns float64 ``(samples, channels)``, on the CPU.
    """
    output, target, present = (value.cpu().double() for value in (output, target, present))
    centre, target_centre = output.mean(1), target.mean(1)
    around = output - centre[:, None]
    variance, covariance = around.square().mean(1), (around * (target - target_centre[:, None])).mean(1)
    weight = (_SHRINKAGE * variance.mean(0)).clamp_min(torch.finfo(torch.float64).tiny)
    slope = (covariance + weight * (1 + present)) / (variance + weight)
    return slope - 1, target_centre - slope * centre
