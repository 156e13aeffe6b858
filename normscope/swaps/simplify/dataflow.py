"""Data flow of one forward pass: from each norm back to the parameters that write its input, and on to its readers.

A dispatch mode records the ATen operators, into which every library's layers are decomposed; a norm site is one
operator. A *place* is a value and the axis that numbers its channels. The mean of a value over its channels is a
linear function of the means at its sources, if :meth:`DataFlow.sources` contains no reason against it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from normscope.inputs.batch import Batch, tensors_of
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.trace import input_of
from normscope.runtime.network import left_as_found, run

PARAMETER, BUFFER, INPUT, NORM = "parameter", "buffer", "input", "norm"
_LEAVES = (PARAMETER, BUFFER)
# Operators that rearrange or average positions and leave the channels as they are.
_REARRANGED = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze", "masked_fill", "constant_pad_nd"),
    *("expand", "repeat", "select", "slice", "split", "split_with_sizes", "unbind", "cat", "stack", "index"),
    *("index_select", "flip", "roll", "clone", "_to_copy", "detach", "alias", "lift_fresh", "mean", "avg_pool2d"),
    *("_adaptive_avg_pool2d", "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
}
_ZEROING = {"masked_fill", "constant_pad_nd"}  # of some positions, behind which β is not the same everywhere
_LINEAR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "convolution": 0}  # number of the operand that is the input


@dataclass(eq=False)
class Value:
    """A tensor of the pass that is computed from floating-point tensors.

    Attributes:
        operator: that computed it; or ``parameter``, ``buffer``, ``input``, ``norm``.
        name: of the parameter, buffer or norm site; otherwise the path of the module that called the operator.
        tensor: kept alive, so that no other tensor has its identity.
        operands: floating-point tensors among the operator's arguments.
        call: the operator with its arguments, and the number of the value among its results.
        readers: values computed from it.
        returned: True if the network returns it.
    """

    operator: str
    name: str
    tensor: Tensor
    operands: Sequence[Value] = ()
    call: tuple[Any, tuple[Any, ...], Mapping[str, Any], int] | None = None
    readers: list[Value] = field(default_factory=list)
    returned: bool = False

    @property
    def in_words(self) -> str:
        """Its operator and module, or its name."""
        if self.operator == INPUT:
            return "the network's input"
        if self.operator in (*_LEAVES, NORM):
            return f"the {self.operator} {self.name}"
        return f"{self.operator} in {self.name or 'the network itself'}"


Place = tuple[Value, int]


class Reader(NamedTuple):
    """Linear layer that reads a norm: the name of its weight, the weight's axis of inputs, and zero padding."""

    weight: str
    axis: int
    padded: bool


class BlockedError(Exception):
    """Raised with the reason why a norm cannot be rewritten."""


class DataFlow:
    """Operators of one forward pass of a network, and the rules along which they pass means over channels.

    Attributes:
        scales: places of the writers behind each layer scale, by the name of its parameter.
    """

    def __init__(self, network: nn.Module, sites: Sequence[NormSite], batch: Batch) -> None:
        """Run the network on a batch, of which one sample is enough."""
        self._sites = {site.name: site for site in sites}
        self._recorder = _Recorder(network)
        self._sources: dict[Place, list[Place | str]] = {}
        self.scales: dict[str, frozenset[Place]] = {}
        with left_as_found(network), self._recorder.watching(network, self._sites):
            output = run(network, batch)
        for tensor in tensors_of(output):
            if tensor.is_floating_point():
                self._recorder.of(tensor).returned = True

    def writers(self, site: NormSite) -> frozenset[Place]:
        """Return the parameters and buffers that write the input of a norm, each with its axis of channels.

        Raises:
            BlockedError: if anything else writes it, or if anything but centring norms reads what they write.
        """
        writers: set[Place] = set()
        for call in self._recorder.norms[site.name]:
            axis = self._channel_axis(site, call)
            writers |= self._written_by((call.operands[0], axis))[0]
        for place in writers:
            self._check_readers(place)
        return frozenset(writers)

    def linear_readers(self, site: NormSite) -> list[Reader]:
        """Return the linear layers that read the output of a norm.

        Raises:
            BlockedError: if anything else reads it, or one of them also reads anything else.
        """
        calls = self._recorder.norms[site.name]
        left = deque((call, self._channel_axis(site, call)) for call in calls)
        layers: dict[Value, tuple[Value, int]] = {}
        while left:
            value, axis = left.popleft()
            if value.returned:
                raise BlockedError("the network returns its output")
            for reader in value.readers:
                if weight := _contracted(reader, value, axis):
                    layers[reader] = self._parameter(*weight)
                    continue
                onward = self._onward(value, axis, reader)
                if reader.operator not in _REARRANGED - _ZEROING or len(reader.operands) > 1 or not onward:
                    raise BlockedError(f"{reader.in_words} reads its output")
                left.extend(onward)
        for weight, _ in layers.values():
            if not set(_uses(weight)) <= layers.keys():
                raise BlockedError(f"{weight.name} also reads other values")
        found = {Reader(weight.name, axis, _is_padded(reader)) for reader, (weight, axis) in layers.items()}
        return sorted(found)

    def sources(self, value: Value, axis: int) -> list[Place | str]:
        """Return the places whose means over channels make the mean of a value, and reasons why it has others."""
        if (value, axis) not in self._sources:
            self._sources[value, axis] = self._sources_of(value, axis)
        return self._sources[value, axis]

    def _sources_of(self, value: Value, axis: int) -> list[Place | str]:
        operands, size, behind = value.operands, value.tensor.shape[axis], axis - value.tensor.ndim
        aligned = [(each, each.tensor.ndim + behind) for each in operands if _spans(each, behind, size)]
        other: list[Place | str] = [f"{value.in_words} writes to its stream"]
        if value.operator in _LEAVES:
            return []
        if value.operator in ("add", "sub"):
            same = f"{value.in_words} adds the same number to every channel"
            return [*aligned, *([same] if len(aligned) < 2 else [])]
        if value.operator in ("mul", "div"):
            if len(aligned) == 1 and (value.operator == "mul" or aligned[0][0] is operands[0]):
                return [*aligned]
            scaled = self._scaled(aligned) if value.operator == "mul" and len(aligned) == 2 else None
            return [scaled] if scaled else [f"{value.in_words} multiplies each channel by another factor, as adaLN does"]
        if value.operator in ("mm", "bmm", "addmm", "baddbmm"):
            first = _LINEAR[value.operator]
            bias: list[Place | str] = [*aligned[:1]] if first and _spans(operands[0], behind, size) else []
            product = {-1: operands[first + 1], -2: operands[first]}.get(behind)
            return [*bias, (product, axis)] if product else other
        if value.operator == "convolution":
            _, weight, *bias_of = operands
            is_whole = axis == 1 and _groups(value) == 1
            return [(weight, int(_is_transposed(value))), *((part, 0) for part in bias_of)] if is_whole else other
        if value.operator == "embedding":
            return [(operands[0], 1)] if behind == -1 else other
        if value.operator in _REARRANGED:
            carried = [
                (each, a) for each in operands for a in range(each.tensor.ndim) if _carried(value, each, a) == axis
            ]
            whole = {each for each, _ in carried} == {*operands}
            return [*carried] if whole else [f"{value.in_words} takes some of the channels"]
        return other

    def _scaled(self, factors: Sequence[Place]) -> Place | None:
        """Return the place that a layer scale multiplies, if nothing but the scale reads it and its writers."""
        for (scale, _), scaled in (factors, factors[::-1]):
            vector = scale
            while vector.operator in _REARRANGED and len(vector.operands) == 1:
                vector = vector.operands[0]
            if vector.operator != PARAMETER or vector.tensor.numel() != scaled[0].tensor.shape[scaled[1]]:
                continue
            with contextlib.suppress(BlockedError):
                writers, places = self._written_by(scaled)
                if all(len(value.readers) == 1 and not value.returned for value, _ in (*places, (vector, 0))):
                    self.scales[vector.name] = writers
                    return scaled
        return None

    def _written_by(self, place: Place) -> tuple[frozenset[Place], set[Place]]:
        """Walk back from a place; return the parameters and buffers that write it, and all places on the way."""
        left, places = deque([place]), {place}
        while left:
            for source in self.sources(*left.popleft()):
                if isinstance(source, str):
                    raise BlockedError(source)
                if source not in places:
                    places.add(source)
                    left.append(source)
        return frozenset(place for place in places if place[0].operator in _LEAVES), places

    def _check_readers(self, place: Place) -> None:
        """Walk on from a writer to every norm that subtracts its mean; BlockedError at any other reader."""
        left, places = deque([place]), {place}
        while left:
            value, axis = left.popleft()
            if value.returned:
                raise BlockedError("the network returns its stream")
            for reader in value.readers:
                onward = self._onward(value, axis, reader)
                if reader.operator in _REARRANGED and not (reader.readers or reader.returned):
                    continue  # only its shape matters
                if not onward and not self._subtracts_mean(reader, value, axis):
                    raise BlockedError(f"{reader.in_words} reads its stream")
                left.extend(set(onward) - places)
                places.update(onward)

    def _onward(self, value: Value, axis: int, reader: Value) -> list[Place]:
        """Return the places of a reader to which the mean over channels of a value passes."""
        size, shape = value.tensor.shape[axis], reader.tensor.shape
        return [(reader, n) for n in range(len(shape)) if shape[n] == size and (value, axis) in self.sources(reader, n)]

    def _subtracts_mean(self, reader: Value, value: Value, axis: int) -> bool:
        if reader.operator == "native_layer_norm":
            return reader.operands[0] is value and axis == value.tensor.ndim - 1 and len(reader.call[1][1]) == 1  # type: ignore[index]
        if reader.operator != NORM:
            return False
        site = self._sites[reader.name]
        token = site.form is not None and site.centred and not site.grouped and isinstance(site.channel_axis, int)
        return token and self._channel_axis(site, reader) == axis

    def _channel_axis(self, site: NormSite, call: Value) -> int:
        if not isinstance(site.channel_axis, int):
            raise BlockedError("it normalizes over several axes")
        return site.channel_axis % call.operands[0].tensor.ndim

    def _parameter(self, value: Value, axis: int) -> tuple[Value, int]:
        """Return the parameter that a weight is a view of, and its axis."""
        while value.operator in _REARRANGED and len(value.operands) == 1:
            source = self.sources(value, axis)[0]
            if isinstance(source, str):
                raise BlockedError(source)
            value, axis = source
        if value.operator != PARAMETER:
            raise BlockedError(f"{value.in_words} reads its output")
        return value, axis


class _Recorder(TorchDispatchMode):
    """Records every operator on floating-point tensors; those within a norm site as one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.norms: dict[str, list[Value]] = {}
        self._values: dict[int, Value] = {}
        self._path: list[str] = []  # of the running modules
        self._within = 0  # number of running norms
        for kind, named in ((PARAMETER, network.named_parameters()), (BUFFER, network.named_buffers())):
            for name, tensor in named:
                self._add(Value(kind, name, tensor))

    def of(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; a tensor that no operator made is the network's input."""
        return self._values.get(id(tensor)) or self._add(Value(INPUT, "", tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._within:
            return func(*args, **kwargs)
        operands = [self.of(tensor) for tensor in tensors_of([args, kwargs]) if tensor.is_floating_point()]
        result = func(*args, **kwargs)
        operator = func.overloadpacket.__name__.rstrip("_")
        for number, tensor in enumerate(tensors_of([result])):
            if operands:
                where = self._path[-1] if self._path else ""
                self._add(Value(operator, where, tensor, operands, (func, args, kwargs, number)))
        return result

    @contextlib.contextmanager
    def watching(self, network: nn.Module, sites: Iterable[str]) -> Iterator[None]:
        """Record the operators of the block."""
        norms = set(sites)

        def enter(name: str) -> Any:
            def hook(module: nn.Module, args: Any) -> None:
                self._path.append(name)
                self._within += name in norms

            return hook

        def leave(name: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                self._path.pop()
                self._within -= name in norms
                if name in norms and not self._within:
                    value = self._add(Value(NORM, name, output, [self.of(input_of(args, kwargs))]))  # type: ignore[arg-type]
                    self.norms.setdefault(name, []).append(value)

            return hook

        with contextlib.ExitStack() as hooks:
            for name, module in network.named_modules():
                hooks.callback(module.register_forward_pre_hook(enter(name)).remove)
                hooks.callback(module.register_forward_hook(leave(name), with_kwargs=True).remove)
            with self:
                yield

    def _add(self, value: Value) -> Value:
        self._values[id(value.tensor)] = value
        for operand in dict.fromkeys(value.operands):
            operand.readers.append(value)
        return value


def _spans(value: Value, behind: int, size: int) -> bool:
    """True if a value has channels at an axis counted from the end, and is not broadcast there."""
    return value.tensor.ndim >= -behind and value.tensor.shape[behind] == size


def _carried(value: Value, operand: Value, axis: int) -> int | None:
    """Return the axis along which a rearranged value has the channels of an operand, by running it on their numbers."""
    func, args, kwargs, number = value.call  # type: ignore[misc]
    size = operand.tensor.shape[axis]
    if size not in value.tensor.shape:
        return None

    def numbers(tensor: Tensor, axis: int) -> Tensor:
        behind = tensor.ndim - axis - 1
        return torch.arange(1, size + 1, dtype=tensor.dtype, device=tensor.device).view(size, *[1] * behind)

    def substitute(part: Any) -> Any:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            return part
        filled = torch.zeros(part.shape, dtype=part.dtype, device=part.device)
        return filled + numbers(part, axis) if part is operand.tensor else filled

    with torch.no_grad():
        result = tensors_of([func(*tree_map(substitute, args), **tree_map(substitute, kwargs))])[number]
    for place, length in enumerate(result.shape):
        if length == size > 1 and bool(((result == 0) | torch.isclose(result, numbers(result, place))).all()):
            return place
    return None


def _contracted(reader: Value, value: Value, axis: int) -> Place | None:
    """Return the weight of a linear layer that sums over the channels of its input, and the axis that it sums over."""
    if reader.operator not in _LINEAR:
        return None
    first = _LINEAR[reader.operator]
    if reader.operands[first] is not value:
        return None
    weight = reader.operands[first + 1]
    if reader.operator == "convolution":
        return (weight, 1 - _is_transposed(reader)) if axis == 1 and _groups(reader) == 1 else None
    return (weight, weight.tensor.ndim - 2) if axis == value.tensor.ndim - 1 else None


def _uses(value: Value) -> Iterator[Value]:
    """Yield the readers of a value, behind all rearrangements."""
    for reader in value.readers:
        if reader.operator in _REARRANGED:
            yield from _uses(reader)
        else:
            yield reader


def _groups(convolution: Value) -> int:
    return int(convolution.call[1][8])  # type: ignore[index]


def _is_transposed(convolution: Value) -> bool:
    return bool(convolution.call[1][6])  # type: ignore[index]


def _is_padded(layer: Value) -> bool:
    return layer.operator == "convolution" and any(layer.call[1][4])  # type: ignore[index]
