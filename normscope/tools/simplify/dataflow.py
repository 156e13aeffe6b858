"""Data flow of one forward pass: from each norm back to the parameters that write its input, and on to its readers.

A dispatch mode records the ATen operators that every library's layers consist of; a norm site counts as one operator.
A *stream* is a value and the axis of its channels. Its mean over channels is computed from those of other streams, its
sources. Sources are found by running linear operators again on chosen values.
Values that the data select, and modules that branch on the data or were not called, are unknown writers and readers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from normscope.errors import ModelError
from normscope.inputs.batch import Batch, tensors_of
from normscope.inputs.wrappers import named_modules, submodule
from normscope.norms.recognition import input_of
from normscope.norms.sites import NormSite
from normscope.runtime.network import restoring, run

PARAMETER, BUFFER, INPUT, NORM, BRANCHING = "parameter", "buffer", "input", "norm", "module"
CONSTANT, OF_INPUTS, OF_WEIGHTS, ACTIVATION = 0, 1, 2, 3  # dependence of a value; activations depend on both
_LEAVES = (PARAMETER, BUFFER)
_AVERAGING = {"mean", "avg_pool2d", "_adaptive_avg_pool2d", "upsample_bicubic2d", "upsample_bilinear2d"}
# Operators that rearrange or average positions.
_REARRANGING = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "repeat", "select"),
    *("slice", "split", "split_with_sizes", "unbind", "index", "index_select", "flip", "roll", "clone", "_to_copy"),
    *("detach", "alias", *_AVERAGING),
}
_PRODUCTS = {"mm", "bmm", "addmm", "convolution"}
# Operators that are linear in each operand, or affine.
_LINEAR = {
    *(*_REARRANGING, *_PRODUCTS, "add", "sub", "mul", "div", "neg", "cat", "stack", "embedding"),
    *("masked_fill", "constant_pad_nd"),
}

Writer = tuple[str, int]  # name of a parameter or buffer, and its axis of channels
Reader = tuple[str, int, bool]  # name of a linear layer's weight, its axis of inputs, and whether a bias can hold β


class BlockedError(Exception):
    """Raised with the reason why a norm cannot be rewritten."""


@dataclass(eq=False)
class Value:
    """A tensor of the pass.

    Attributes:
        operator: that computed it; or ``parameter``, ``buffer``, ``input``, ``norm``, or a ``module`` that branches.
        name: of the parameter, buffer or norm site; otherwise the path of the module that called the operator.
        tensor: kept alive, so that no other tensor has its identity.
        operands: floating-point tensors among the operator's arguments.
        call: the operator with its arguments, and the number of the value among its results.
        readers: values computed from it.
        returned: True if the network returns it.
        depends: on the inputs' numbers and masks, on weights, on both or neither.
        selected: True if indices or masks that were computed from activations select its elements.
        number: of values that were recorded before it.
    """

    operator: str
    name: str
    tensor: Tensor
    operands: Sequence[Value] = ()
    call: tuple[Any, tuple[Any, ...], Mapping[str, Any], int] | None = None
    readers: list[Value] = field(default_factory=list)
    returned: bool = False
    depends: int = CONSTANT
    selected: bool = False
    number: int = 0

    @property
    def is_float(self) -> bool:
        return self.tensor.is_floating_point() or self.tensor.is_complex()

    @property
    def in_words(self) -> str:
        """Its name, or its operator and module."""
        named = f"the {self.operator} {self.name}" if self.call is None else f"{self.operator} in {self.name}"
        return named if self.name else f"{self.operator} of the network"

    @torch.no_grad()
    def again(self, changed: Mapping[Value, Tensor]) -> Tensor:
        """Run the operator again, with other tensors for some operands, and noise for others that vary with inputs."""
        func, args, kwargs, number = self.call  # type: ignore[misc]
        tensors = {id(value.tensor): _noise(value.tensor) for value in self.operands if value.depends & OF_INPUTS}
        tensors |= {id(mask): _noise(mask) for mask in args[1:2] if self.operator == "masked_fill"}
        tensors |= {id(operand.tensor): tensor for operand, tensor in changed.items()}

        def substitute(leaf: Any) -> Any:
            return tensors.get(id(leaf), leaf).clone() if isinstance(leaf, Tensor) else leaf  # it may work in place

        return tensors_of([func(*tree_map(substitute, args), **tree_map(substitute, kwargs))])[number]


Stream = tuple[Value, int]


@dataclass(frozen=True)
class Entry:
    """A stream that enters a module, which is called once, as its first floating-point tensor."""

    module: str  # its path
    value: Value
    within: range  # numbers of the values that the module computes
    axis: int = 0  # of the channels, counted from the last

    def leads_to(self, reader: Value, stream: Stream) -> bool:
        """True if a reader within the module reads its argument as this stream."""
        value, axis = stream
        return value is self.value and axis == self.axis + value.tensor.ndim and reader.number in self.within


class DataFlow:
    """Operators of one forward pass of a network, and the means over channels that they pass on.

    Attributes:
        scales: writers that each layer scale multiplies, by the name of its parameter.
    """

    def __init__(self, network: nn.Module, sites: Sequence[NormSite], batch: Batch) -> None:
        """Run the network on a batch, of which one sample is enough."""
        self.scales: dict[str, frozenset[Writer]] = {}
        self._sites = {site.name: site for site in sites}
        self._sources_of = functools.cache(self._find_sources)
        recorder = _Recorder(network)
        with restoring(network) as buffers:
            try:
                with recorder.watching(network, self._sites):
                    output = run(network, batch)
            except ModelError as error:
                if "HigherOrderOperator" not in str(error):
                    raise
                name = type(network).__name__
                raise ModelError(f"{name} has a branch on data (torch.cond), which hides readers.") from error
            recorder.mark_returned(network, output)
            if recorder.state_read and buffers.changed:
                recorder.branching.setdefault("", f"{recorder.state_read} of buffers that it changes")
        self._calls, self._unused, self._branching = recorder.norms, list(recorder.unused(network)), recorder.branching
        self._entries = [entry for entry in recorder.entries.values() if entry is not None]

    def writers(self, site: NormSite, entry: Entry | None = None) -> frozenset[Writer]:
        """Return the parameters and buffers that write the input of a norm, if the stream has no mean at an entry.

        Raises:
            BlockedError: if anything else writes it, or if anything but norms that subtract the mean reads the stream.
        """
        self._check_paths(site, centring=True)
        streams: set[Stream] = set()
        for call in self._calls[site.name]:
            stream = call.operands[0], self._channel_axis(site, call)
            if entry is None or not entry.leads_to(call, stream):
                streams |= self._behind(stream, entry)
        for stream in _leaves(streams):
            self._norms_behind(stream)
        return _named(streams)

    def entries(self, names: Iterable[str]) -> Iterator[tuple[Entry, dict[str, frozenset[Writer]]]]:
        """Yield entries at which one subtraction of the mean serves several norms, and the writers of each by its name.

        Entries that reach more norms come first, and inner ones before outer ones; each norm is yielded once.
        """
        reached, left = [], set(names)
        for entry in reversed(self._entries if left else ()):
            for axis in range(-entry.value.tensor.ndim, 0):
                with contextlib.suppress(BlockedError):
                    norms = self._norms_behind((entry.value, axis + entry.value.tensor.ndim), entry)
                    reached.append((replace(entry, axis=axis), norms))
        for entry, norms in sorted(reached, key=lambda pair: -len(pair[1])):
            served = {}
            for name in norms & left if len(norms & left) > 1 else ():
                with contextlib.suppress(BlockedError):
                    served[name] = self.writers(self._sites[name], entry)
            if len(served) > 1:
                yield entry, served
                left -= served.keys()

    def linear_readers(self, site: NormSite) -> list[Reader]:
        """Return the linear layers that read the output of a norm.

        Raises:
            BlockedError: if anything else reads it, or if one of them also reads other values.
        """
        self._check_paths(site, centring=False)
        layers, readers = self._layers_behind(site), set()
        for layer, weight in layers.items():
            (parameter, axis), *more = _leaves(self._behind(weight)) or [weight]
            if more:
                raise BlockedError(f"{layer.in_words} reads its output, and several parameters write its weight")
            if parameter.operator != PARAMETER or not set(_uses(parameter)) <= layers.keys():
                raise BlockedError(f"{layer.in_words} reads its output, and its weight is not for that alone")
            padding = layer.call[1][4] if layer.operator == "convolution" else ()  # type: ignore[index]
            readers.add((parameter.name, axis, not any(padding)))
        if not readers:
            raise BlockedError("no layer reads its output")
        return sorted(readers)

    def is_normalized_again(self, site: NormSite) -> bool:
        """True if linear layers without bias read a norm, and norms of tokens read these alone (arXiv 2407.09577)."""
        self._check_paths(site, centring=False)
        left = list(self._layers_behind(site))
        linear = bool(left) and all(layer.operator in ("mm", "bmm") for layer in left)
        for value in left:
            again = [reader for reader in value.readers if reader.operator in _REARRANGING - _AVERAGING]
            norms = [self._sites[reader.name] for reader in value.readers if reader.operator == NORM]
            linear &= len(again) + len(norms) == len(value.readers) and not value.returned
            linear &= all(norm.form in ("layer_norm", "rms_norm") and not norm.grouped for norm in norms)
            left += again
        return linear

    def _layers_behind(self, site: NormSite) -> dict[Value, Stream]:
        """Return the linear layers that read the output of a norm, with their weights, or raise BlockedError."""
        left = [(call, self._channel_axis(site, call)) for call in self._calls[site.name]]
        layers: dict[Value, Stream] = {}
        for value, axis in left:
            if value.returned:
                raise BlockedError("the network returns its output")
            for reader in sorted(value.readers, key=lambda reader: reader.operator != BRANCHING):
                if weight := _weight_of(reader, value, axis):
                    layers[reader] = weight
                elif onward := self._onward(value, axis, reader) if reader.operator in _REARRANGING else None:
                    left += onward
                else:
                    raise BlockedError(f"{reader.in_words} reads its output")
        return layers

    def _check_paths(self, site: NormSite, *, centring: bool) -> None:
        """Raise BlockedError if other inputs may lead to other readers or writers of a norm's width, or of its slices.

        Other LayerNorms do no harm to centring, but they may share the layers that γ would be folded into.
        """
        if "" in self._branching:
            raise BlockedError(f"the network branches on its data ({self._branching['']})")
        for words, shape, is_norm in self._unused:
            divides = any(size % site.channels == 0 or (size > 1 and site.channels % size == 0) for size in shape)
            if divides and not (centring and is_norm):
                harm = "share its readers" if is_norm else "read or write its stream"
                raise BlockedError(f"{words}, and may {harm} on other inputs")

    def _behind(self, stream: Stream, entry: Entry | None = None) -> set[Stream]:
        """Walk back from a stream to parameters, buffers and an entry; return all streams on the way, or raise."""
        left, streams = [stream], {stream}
        for value, axis in left:
            sources, reason = self._sources_of(value, axis)
            if reason:
                raise BlockedError(reason)
            sources = [source for source in sources if entry is None or not entry.leads_to(value, source)]
            left += [source for source in sources if source not in streams]
            streams.update(sources)
        return streams

    def _norms_behind(self, stream: Stream, entry: Entry | None = None) -> set[str]:
        """Walk on from a writer or entry to norms that subtract its mean; return their names, or raise BlockedError."""
        left, streams, norms = [stream], {stream}, set()
        for value, axis in left:
            if value.returned:
                raise BlockedError("the network returns its stream")
            for reader in value.readers:
                if entry is not None and value is entry.value and reader.number not in entry.within:
                    continue
                is_shape_alone = reader.operator in _REARRANGING and not (reader.readers or reader.returned)
                onward = self._onward(value, axis, reader)
                if self._subtracts_mean(reader, value, axis):
                    norms.add(reader.name)
                elif not (onward or is_shape_alone):
                    raise BlockedError(f"{reader.in_words} reads its stream")
                left += [following for following in onward if following not in streams]
                streams.update(onward)
        return norms

    def _onward(self, value: Value, axis: int, reader: Value) -> list[Stream]:
        """Return the streams of a reader to which the mean over channels of a value passes."""
        following = [(reader, n) for n in range(reader.tensor.ndim)]
        return [stream for stream in following if (value, axis) in self._sources_of(*stream)[0]]

    def _find_sources(self, value: Value, axis: int) -> tuple[list[Stream], str]:
        """Return the sources of a stream, and the reason why there are others, or nothing."""
        if value.operator in _LEAVES:
            return [], ""
        if value.selected:
            return [], f"{value.in_words} selects values by the data"
        if value.operator in _LINEAR and value.tensor.is_floating_point():
            streams = [(source, n) for source in dict.fromkeys(value.operands) for n in _carried(source, value, axis)]
            streams = streams or self._scaled(value, axis)
            none = {operand: torch.zeros_like(operand.tensor) for operand, _ in streams}
            if streams and not bool(value.again(none).any()):
                return streams, ""
            reason = "does not keep the mean over channels"
            if value.operator == "mul":
                reason = "multiplies channels by different factors, as gates and adaLN do"
            return streams, f"{value.in_words} {reason}"
        return [], f"{value.in_words} writes to its stream"

    def _scaled(self, product: Value, axis: int) -> list[Stream]:
        """Return the stream that a layer scale multiplies, if nothing else reads the scale or anything behind it."""
        behind = axis - product.tensor.ndim
        factors = product.operands if product.operator == "mul" else ()
        for scale, scaled in (factors, factors[::-1]) if len(factors) == 2 else ():
            vector, size = scale, product.tensor.shape[axis]
            while vector.operator in _REARRANGING and vector.operands:
                vector = vector.operands[0]
            if vector.operator == PARAMETER and vector.tensor.numel() == size == scaled.tensor.shape[behind]:
                stream = (scaled, scaled.tensor.ndim + behind)
                with contextlib.suppress(BlockedError):
                    streams = self._behind(stream)
                    values = (vector, *(value for value, _ in streams))
                    if all(len(value.readers) == 1 and not value.returned for value in values):
                        self.scales[vector.name] = _named(streams)
                        return [stream]
        return []

    def _subtracts_mean(self, reader: Value, value: Value, axis: int) -> bool:
        if reader.operator == "native_layer_norm":
            return reader.operands[0] is value and value.tensor.shape[axis:] == tuple(reader.call[1][1])  # type: ignore[index]
        site = self._sites[reader.name] if reader.operator == NORM else None
        token = site is not None and site.form == "layer_norm" and not site.grouped
        return token and self._channel_axis(site, reader) == axis  # type: ignore[arg-type]

    def _channel_axis(self, site: NormSite, call: Value) -> int:
        if not isinstance(site.channel_axis, int):
            raise BlockedError("it normalizes over several axes")
        return site.channel_axis % call.tensor.ndim


class _Recorder(TorchDispatchMode):
    """Records every operator; those within a norm site as one.

    Attributes:
        norms: calls of each site.
        entries: of the modules; None for one that is called again or returns its argument.
        branching: the operator whose result Python code reads, by the path of the module that may then branch.
        state_read: an operator by which Python code reads a result that depends on no inputs.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norms: dict[str, list[Value]] = {}
        self.entries: dict[str, Entry | None] = {}
        self.branching: dict[str, str] = {}
        self.state_read = ""
        self._values: dict[int, Value] = {}
        self._path = [""]  # of the running modules
        self._entered: list[list[tuple[Value, int]]] = []  # what the running modules took, and the next number then
        self._number = 0  # of recorded values
        self._within = 0  # number of running norms
        self._called: set[nn.Module] = set()
        for kind, named in ((PARAMETER, network.named_parameters()), (BUFFER, network.named_buffers())):
            for name, tensor in named:
                self._add(Value(kind, name, tensor, depends=OF_WEIGHTS * tensor.is_floating_point()))

    def of(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; a tensor that no operator made is the network's input."""
        depends = ACTIVATION if tensor.is_floating_point() else OF_INPUTS
        return self._values.get(id(tensor)) or self._add(Value(INPUT, "", tensor, depends=depends))

    def unused(self, network: nn.Module) -> Iterator[tuple[str, torch.Size, bool]]:
        """Yield modules that were not called and matrices that were not read, in words, with their parameters' shapes.

        Left out are vectors of called modules, as mask tokens for training. True: LayerNorms within called modules.
        """
        for path, module in named_modules(network):
            parent, tensors = path.rpartition(".")[0], dict(module.named_parameters(recurse=False))
            unread = {name: tensor for name, tensor in tensors.items() if not self.of(tensor).readers}
            is_called = module in self._called
            is_norm = isinstance(module, nn.LayerNorm) and submodule(network, parent) in self._called
            for name, tensor in unread.items() if path not in self.norms else ():
                if not is_called or tensor.squeeze().ndim > 1:
                    some = is_called or len(unread) < len(tensors)
                    words = f"{path or 'the network'} {f'did not use {name}' if some else 'was not called'}"
                    yield words, tensor.shape, is_norm

    def mark_returned(self, network: nn.Module, output: Any) -> None:
        """Mark what a network returns, objects' attributes among it, and activations that its modules keep."""
        for tensor in tensors_of(output):
            self.of(tensor).returned = True
        returned = {id(tensor): tensor for tensor in tensors_of(output)}
        try:
            copy.deepcopy(output, returned)  # notes the identity of all that it copies
        except Exception as error:
            raise ModelError(f"Tensors may hide in the {type(output).__name__} that it returned: {error}.") from error
        states = ("_parameters", "_buffers", "_modules")
        kept = [value for module in network.modules() for name, value in vars(module).items() if name not in states]
        returned |= {id(tensor): tensor for tensor in tensors_of(kept)}
        for value in self._values.values():
            value.returned |= value.call is not None and id(value.tensor) in returned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._within:
            return func(*args, **kwargs)
        values = [self.of(tensor) for tensor in tensors_of([args, kwargs])]
        operator, path = func.overloadpacket.__name__.rstrip("_"), self._path[-1]
        operands = [value for value in values if value.is_float and operator[-5:] != "_like"]  # but its shape
        selected = any(value.depends == ACTIVATION and not value.is_float for value in values)
        depends = ACTIVATION * (torch.Tag.nondeterministic_seeded in func.tags) | _dependence(values)
        result = func(*args, **kwargs)
        for number, tensor in enumerate(tensors_of([result])):
            call = (func, args, kwargs, number)
            self._add(Value(operator, path, tensor, operands, call, depends=depends, selected=selected))
            if tensor._base is not None and any(tensor is value.tensor for value in values):  # written through a view
                whole = [self.of(tensor._base), *operands]
                self._add(Value(f"in-place {operator}", path, tensor._base, whole, call, depends=depends))
        deciding, read = _deciding(func, values), operator.replace("_local_scalar_dense", "item")
        if _dependence(deciding) == ACTIVATION:
            self.branching.setdefault(path, read)
        elif deciding and not _dependence(deciding) & OF_INPUTS:
            self.state_read = read
        return result

    @contextlib.contextmanager
    def watching(self, network: nn.Module, norms: Iterable[str]) -> Iterator[None]:
        """Record the operators of the block."""

        def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            self._path.append(name)
            self._within += name in norms
            self._called.add(module)
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            self._entered.append([(self.of(x), self._number) for x in tensors[:1]])

        def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._path.pop()
            for value, start in self._entered.pop():
                is_returned = any(value.tensor is tensor for tensor in tensors_of([output]))
                unique = name and not is_returned and name not in self.entries
                self.entries[name] = Entry(name, value, range(start, self._number)) if unique else None
            self._within -= name in norms
            if name in norms and not self._within:
                source = self.of(input_of(args, kwargs))  # type: ignore[arg-type]
                call = Value(NORM, name, output, [source], depends=source.depends)
                self.norms.setdefault(name, []).append(self._add(call))
            elif name and name in self.branching:
                self._hide(name, module, [args, kwargs], output)

        with contextlib.ExitStack() as hooks:
            for name, module in named_modules(network):
                entered, left = functools.partial(enter, name), functools.partial(leave, name)
                hooks.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(left, with_kwargs=True).remove)
            hooks.enter_context(self)
            yield

    def _hide(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Let a module that branches read its inputs and parameters, and write its output, in an unknown way."""
        tensors = tensors_of([inputs, output, list(module.parameters()), list(module.buffers())])
        operands = [value for value in map(self.of, tensors) if value.is_float]
        for tensor in tensors_of([output]):
            named = f"{name}, which branches on its data ({self.branching[name]}),"
            self._add(Value(BRANCHING, named, tensor, operands, depends=ACTIVATION))
        if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):  # on which its caller may branch
            self.branching.setdefault(self._path[-1], self.branching[name])

    def _add(self, value: Value) -> Value:
        self._values[id(value.tensor)] = value
        value.number = self._number
        self._number += 1
        for operand in dict.fromkeys(value.operands):
            operand.readers.append(value)
        return value


def _dependence(values: Iterable[Value]) -> int:
    return functools.reduce(lambda depends, value: depends | value.depends, values, CONSTANT)


def _deciding(func: Any, values: Sequence[Value]) -> Sequence[Value]:
    """Return the operands whose elements become a Python number or the shape of a result."""
    if func.overloadpacket.__name__ in ("index", "masked_select"):
        return [value for value in values[1:] if value.tensor.dtype in (torch.bool, torch.uint8)]
    return values if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*func.tags} else []


def _noise(tensor: Tensor) -> Tensor:
    """Return fixed positive numbers, or some of a mask, in the shape of a tensor, equal ones where it is expanded."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    noise = 0.5 + torch.rand(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (noise > 1 if tensor.dtype == torch.bool else noise.to(tensor)).expand(tensor.shape)


def _carried(operand: Value, value: Value, axis: int) -> list[int]:
    """Return the axis of an operand whose numbers an operator carries, each times the same factor, to an axis."""
    tensor, size = operand.tensor, value.tensor.shape[axis]
    numbers = torch.arange(1, size + 1)
    noise, base = _noise(tensor), None
    for n in range(tensor.ndim):
        if tensor.shape[n] == size > 1 and value.tensor.numel():
            base = value.again({operand: torch.zeros_like(tensor)}) if base is None else base
            changed = noise.narrow(n, 0, 1) * along(numbers.to(tensor), n, tensor.ndim)
            response = value.again({operand: changed}) - base
            factors = response / along(numbers.to(response), axis, response.ndim)
            unequal, largest = (factors - factors.narrow(axis, 0, 1)).abs().max(), factors.abs().max()
            if largest > 0 and unequal <= largest * torch.finfo(factors.dtype).eps ** 0.5:
                return [n]
    return []


def _weight_of(layer: Value, value: Value, axis: int) -> Stream | None:
    """Return the weight of a linear layer, and its axis that is summed with the channels of the layer's input."""
    if layer.operator == "convolution":
        weight, is_transposed = layer.operands[1], layer.call[1][6]  # type: ignore[index]
        is_summed = axis == 1 and weight.tensor.shape[1] == value.tensor.shape[1] and not is_transposed  # one group
        return (weight, 1) if is_summed and layer.operands[0] is value else None
    if layer.operator in _PRODUCTS and layer.operands[-2] is value and axis == value.tensor.ndim - 1:
        return layer.operands[-1], value.tensor.ndim - 2
    return None


def _uses(value: Value) -> Iterator[Value]:
    """Yield the readers of a value, behind all rearrangements."""
    for reader in value.readers:
        yield from _uses(reader) if reader.operator in _REARRANGING else [reader]


def _leaves(streams: Iterable[Stream]) -> list[Stream]:
    return [(value, axis) for value, axis in streams if value.operator in _LEAVES]


def _named(streams: Iterable[Stream]) -> frozenset[Writer]:
    return frozenset((value.name, axis) for value, axis in _leaves(streams))


def along(vector: Tensor, axis: int, ndim: int) -> Tensor:
    """Return a vector as a tensor that broadcasts along one of ``ndim`` axes."""
    return vector.reshape([-1 if n == axis else 1 for n in range(ndim)])
