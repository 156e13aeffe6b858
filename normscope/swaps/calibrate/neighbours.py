"""Linear layers beside the norms of a network, and where their outputs go."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from normscope.inputs.batch import Batch, leaves
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.trace import input_of
from normscope.runtime.network import left_as_found, run

_SAMPLES = 2  # that tell how layers and norms hang together
_HELD = 4  # times what goes in and out of the largest module: both networks' streams, and copies
# Of sums that the network itself takes in its own precision.
_SAME = 1e-2


@dataclass(frozen=True)
class NextNorm:
    """Norm whose input is base + gain · output of a layer.

    Attributes:
        path: of the norm.
        base: path of the norm before it, whose input or output is the base; None if nothing is added to the output, and
            only the norm takes it.
        of_output: whether the base is that norm's output, as behind post-norms; else its input, the residual stream.
        gain: one number a channel, such as a layer scale: float64 ``(channels,)``; ones without a scale.
    """

    path: str
    base: str | None
    of_output: bool
    gain: Tensor


@dataclass(frozen=True)
class CalledModule:
    """Norm or linear layer, in the order of calls.

    Attributes:
        path: of the module.
        is_norm: True for a norm.
        channel_axis: axis of its output that numbers the channels.
        feeds: norm that the output of a layer goes into, if found.
        modulated: layer that scales and shifts the output of a norm, if found.
    """

    path: str
    is_norm: bool
    channel_axis: int = -1
    feeds: NextNorm | None = None
    modulated: Modulation | None = None


@dataclass(frozen=True)
class Neighbours:
    """Modules that a calibration visits.

    Attributes:
        called_modules: norms and linear layers in the order of calls.
        left: reason why a linear layer beside a swapped norm is left as it is, by path.
        bytes_per_input_byte: about how many bytes a batch's passes through both networks occupy while they wait.
    """

    called_modules: Sequence[CalledModule]
    left: dict[str, str]
    bytes_per_input_byte: float

    def bytes_of(self, batches: Iterable[Batch]) -> int:
        """Estimate the memory of waiting passes: longer texts need more than shorter ones."""
        return round(self.bytes_per_input_byte * sum(map(_size, batches)))


def neighbours_of(network: nn.Module, sites: Sequence[NormSite], swapped: Sequence[str], batch: Batch) -> Neighbours:
    """Find the linear layers beside swapped norms from one pass of the original over a few samples of a batch.

    A linear layer is beside a norm if no other norm of the residual stream is called between the two.
    """
    streams = {site.name: site for site in sites if site.placement != "qk" and site.calls == 1}
    every = {path: LinearLayer.of(module) for path, module in network.named_modules()}
    layers = {path: layer for path, layer in every.items() if layer is not None}
    seen = _seen(network, [*layers, *(site.name for site in sites)], batch.first(_SAMPLES))
    calls = Counter(call.path for call in seen)
    owners = Counter(id(parameter) for module in network.modules() for parameter in module._parameters.values())
    called_modules: list[CalledModule] = []
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
                called_modules.append(CalledModule(call.path, False, layer.channel_axis, into))
        elif call.path in streams or (call.path in swapped and calls[call.path] == 1):
            site = next(site for site in sites if site.name == call.path)
            axis = _channel_axis(site, call.input.ndim)
            called_modules.append(CalledModule(call.path, True, axis, modulated=_modulation(seen, number, layers)))
    left |= {path: "it is not called as a module" for path in layers if not calls[path]}
    largest = max((call.input.nbytes + call.output.nbytes for call in seen), default=0)
    return Neighbours(called_modules, left, _HELD * largest / _size(batch.first(_SAMPLES)))


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
    derived: bool = False  # True if the output is computed from the weight's products, and is not these
    of_one: bool = True  # True if query, key and value are one tensor


def _seen(network: nn.Module, paths: Sequence[str], batch: Batch) -> list[_ModuleCall]:
    """Run a network, and list the calls of some modules with copies of inputs and outputs."""
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
    """Return the norm and the base to which the output of a layer is added; None if it is not just added."""
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
        if bool(gain.any()) and _is(added, gain * output):  # through a shut gate nothing can be seen
            return NextNorm(behind.path, before.path, False, gain)
    return None


def _modulation(seen: Sequence[_ModuleCall], number: int, layers: Container[str]) -> Modulation | None:
    """Find the layer that modulates the output of a norm before the next layer takes it."""
    behind = next((call for call in seen[number + 1 :] if call.path in layers), None)
    before = [(call.path, call.output) for call in reversed(seen[:number]) if call.path in layers]
    return None if behind is None else modulation_of(seen[number].output, behind.input, before)


def _is(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= _SAME * expected.norm())


_MOST_PARTS = 12  # that a layer's output is cut into
_SHRUNK = 0.02  # of a channel's mean variance, by which a sample's own scale is held to the present one


@dataclass(frozen=True)
class Modulation:
    """Modulation of a norm's output y: y · (1 + scale) + shift, both from the output of one layer for the sample.

    ``layer`` is its path; ``scale`` and ``shift`` are the first of its channels for each.
    """

    layer: str
    scale: int
    shift: int

    def channels(self, size: int) -> Tensor:
        """Return the layer's channels of scale and shift, in this order, for a norm's number of channels."""
        return torch.cat([first + torch.arange(size) for first in (self.scale, self.shift)])


def modulation_of(output: Tensor, taken: Tensor, layers: Sequence[tuple[str, Tensor]]) -> Modulation | None:
    """Find the modulation of a norm's output ``(samples, tokens, channels)`` by the input of the next layer.

    ``layers`` are paths and outputs of the linear layers that were called before.

    >>> y, given = torch.randn(2, 9, 4), torch.randn(2, 12)
    >>> modulation_of(y, y * (1 + given[:, None, 8:]) + given[:, None, :4], [("adaln", given)])
    Modulation(layer='adaln', scale=8, shift=0)
    """
    if output.ndim != 3 or output.shape != taken.shape:
        return None
    size = output.shape[-1]
    for path, given in layers:
        if given.ndim != 2 or len(given) != len(output) or given.shape[1] % size or given.shape[1] > _MOST_PARTS * size:
            continue
        parts = list(enumerate(given[:, None].chunk(given.shape[1] // size, dim=-1)))
        for (first, scale), (second, shift) in itertools.permutations(parts, 2):
            if _is(output * (1 + scale) + shift, taken):
                return Modulation(path, first * size, second * size)
    return None


def best_for_each_sample(given: Tensor, target: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and shift of each sample and channel that bring given · (1 + scale) + shift nearest to a target.

    ``given`` and ``target`` are ``(samples, tokens, channels)``. Scales of channels that hardly vary are shrunk towards
    the ``present`` ones. Scale and shift are float64 ``(samples, channels)``, on the CPU.
    """
    given, target, present = (value.cpu().double() for value in (given, target, present))
    centres = given.mean(1), target.mean(1)
    about = given - centres[0][:, None]
    spread, common = about.square().mean(1), (about * (target - centres[1][:, None])).mean(1)
    held = (_SHRUNK * spread.mean(0)).clamp_min(torch.finfo(torch.float64).tiny)
    slope = (common + held * (1 + present)) / (spread + held)
    return slope - 1, centres[1] - slope * centres[0]


# Of a convolution: what one of its outputs is computed from. The products of so many are as large as a layer may be.
MOST_FEATURES = 4096
MOST_NUMBERS = 2**24  # of what a convolution takes, at once: an image holds each as often as its kernel has places
_FLAT = ("Conv1D",)  # of transformers: a linear layer whose weight is (inputs, outputs)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LinearLayer:
    """Module as a linear map from rows ``(tokens, features)`` to rows ``(tokens, channels)``.

    Each group of a convolution in groups has features of its own: its input rows are ``(tokens, groups, features)``.
    ``weight`` and ``bias`` are names of parameters, and ``channel_axis`` numbers the channels of input and output.

    >>> convolution = nn.Conv1d(2, 5, 3, stride=2)
    >>> layer, x = LinearLayer.of(convolution), torch.randn(4, 2, 9)
    >>> rows = layer.inputs(x) @ layer.matrix.T + convolution.bias
    >>> torch.allclose(rows, layer.outputs(x, convolution(x)), atol=1e-6)
    True
    """

    module: nn.Module
    weight: str = "weight"
    bias: str | None = "bias"
    channel_axis: int = -1

    @classmethod
    def of(cls, module: nn.Module) -> LinearLayer | None:
        """View a module as a linear layer; None for other modules."""
        has_bias = "bias" if getattr(module, "bias", None) is not None else None
        if isinstance(module, nn.Linear):
            return cls(module, bias=has_bias)
        if isinstance(module, _CONVOLUTIONS):
            return cls(module, bias=has_bias, channel_axis=-1 - len(module.kernel_size))
        if isinstance(module, nn.MultiheadAttention):
            return cls(module, "in_proj_weight", "in_proj_bias" if module.in_proj_bias is not None else None)
        if type(module).__name__ in _FLAT and isinstance(getattr(module, "weight", None), nn.Parameter):
            return cls(module, bias=has_bias)
        return None

    @property
    def reason(self) -> str:
        """Reason why it cannot be refitted with any input, or nothing."""
        module = self.module
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is None:
            return "its queries, keys and values have weights of their own, which torch uses without calling a module"
        if not isinstance(module, _CONVOLUTIONS):
            return ""
        features = module.in_channels // module.groups * math.prod(module.kernel_size)
        if features > MOST_FEATURES:
            return f"it is a convolution over {features} numbers, more than {MOST_FEATURES}"
        if len(module.kernel_size) > 2 and math.prod(module.kernel_size) > 1:
            return "it is a convolution over three axes"
        return ""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weight and the bias, unless they are computed."""
        parameters = self.module._parameters
        return [p for p in (parameters.get(self.weight), parameters.get(self.bias or "")) if p is not None]

    @property
    def matrix(self) -> Tensor:
        """The weight as ``(channels, features)``."""
        weight = self.module.get_parameter(self.weight)
        return weight.T if type(self.module).__name__ in _FLAT else weight.flatten(1)

    @property
    def offset(self) -> Tensor | None:
        """The bias, ``(channels,)``; None where there is none."""
        return None if self.bias is None else self.module.get_parameter(self.bias)

    @torch.no_grad()
    def put(self, matrix: Tensor, offset: Tensor | None, channels: Tensor) -> None:
        """Set the weights ``(channels, features)`` and biases of the channels in a mask; None leaves the biases."""
        weight = self.module.get_parameter(self.weight)
        changed = torch.where(channels[:, None], matrix, self.matrix.to(matrix))
        weight.copy_(changed.T if type(self.module).__name__ in _FLAT else changed.reshape(weight.shape))
        if offset is not None and self.offset is not None:
            self.offset.copy_(torch.where(channels, offset, self.offset.to(offset)))

    def inputs(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the features of each valid output row: ``(tokens, features)``, or ``(tokens, groups, features)``."""
        module = self.module
        if not isinstance(module, _CONVOLUTIONS):
            return rows(self._samples_first(x), valid)
        unfolded = rows(self._unfolded(module, x), valid)
        return unfolded if module.groups == 1 else unfolded.reshape(len(unfolded), module.groups, -1)

    def inputs_in_pieces(self, x: Tensor, valid: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the features in pieces of whole samples, as a convolution repeats each number many times."""
        module = self.module
        size = math.prod(module.kernel_size) * x.numel() if isinstance(module, _CONVOLUTIONS) else 0
        if size <= MOST_NUMBERS:
            yield self.inputs(x, valid)
            return
        samples = max(1, MOST_NUMBERS * len(x) // size)
        for first in range(0, len(x), samples):
            some = slice(first, first + samples)
            yield self.inputs(x[some], None if valid is None else valid[some])

    def _unfolded(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
        """Unfold the inputs of a convolution, channel by channel: ``(samples, positions, numbers)``."""
        if math.prod(module.kernel_size) == 1 and not any(module._reversed_padding_repeated_twice):
            for axis, step in enumerate(module.stride, self.channel_axis + 1):
                x = x.movedim(axis, 0)[::step].movedim(0, axis)
            return x.flatten(self.channel_axis + 1).mT
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = functional.pad(x, module._reversed_padding_repeated_twice, mode)
        sizes = (module.kernel_size, module.dilation, module.stride)
        if len(module.kernel_size) == 1:
            x, sizes = x[..., None, :], tuple((1, *size) for size in sizes)  # type: ignore[assignment]
        kernel, dilation, stride = sizes
        return functional.unfold(x, kernel, dilation, 0, stride).mT

    def outputs(self, x: Tensor, output: Tensor | None, valid: Tensor | None = None) -> Tensor:
        """Return the output rows, ``(tokens, channels)``; for attention, its projection of x."""
        if isinstance(self.module, nn.MultiheadAttention):
            given = self.inputs(x, valid) @ self.matrix.T
            return given if self.offset is None else given + self.offset
        if output is None:
            raise ValueError(f"a {type(self.module).__name__} gave no tensor")
        return rows(output if self.channel_axis == -1 else output.flatten(self.channel_axis + 1).mT, valid)

    def _samples_first(self, x: Tensor) -> Tensor:
        turned = isinstance(self.module, nn.MultiheadAttention) and not self.module.batch_first and x.ndim == 3
        return x.transpose(0, 1) if turned else x


def rows(value: Tensor, valid: Tensor | None = None) -> Tensor:
    """Bring values ``(…, channels)`` to ``(tokens, channels)``, without padding if ``valid`` has their first axes."""
    if valid is not None and value.ndim > 2 and value.shape[:2] == valid.shape:
        value = value[valid.to(value.device)]
    return value.reshape(-1, value.shape[-1])
