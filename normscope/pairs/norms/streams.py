"""Streams of tokens: the part of a network that each padding mask is for, followed through one forward pass.

A mask belongs to the tokens of the module that takes it under the name of a mask. Torch functions pass the arguments
that tokens come from on to their results; attention passes on those of its queries, not those of its keys.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch, tensors_of
from normscope.inputs.entries import Entries
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.inputs.splits import Chunk, Share
from normscope.pairs.norms.recognition import is_norm
from normscope.runtime.network import left_as_found, run, uncompiled

if TYPE_CHECKING:
    from normscope.inputs.entries import Forward

# The name of a mask begins as that of its tokens: src_key_padding_mask and src, pixel_attention_mask and pixel_values.
_MASK = re.compile(r"(?!global_)(?:(\w+?)_)?(?:key_)?(?:attention|padding)_mask|(pixel)_mask")
_OTHER_STREAMS = re.compile(r"(encoder|decoder|memory|tgt)(_\w+)?")
_NO_TOKENS = re.compile(rf"labels?|targets?|(token_type|position)_ids|{_OTHER_STREAMS.pattern}")
_ATTENTION = {"matmul", "__matmul__", "bmm", "einsum", "scaled_dot_product_attention", "multi_head_attention_forward"}

_Path = tuple[str | int, ...]  # of a tensor in (args, kwargs)
_Origins = frozenset[_Path]  # the arguments that the tokens of a tensor come from; none for those of weights
_WEIGHTS: _Origins = frozenset()


@dataclass(frozen=True)
class _Binding:
    """The masks among the arguments of a network.

    Attributes:
        of_output: the mask of the stream that the output belongs to; None where no mask is for it.
        within: masks of the parts of the network that have another one.
        of_padding: masks that are nonzero where padded.
        unbound: masks whose stream is not known, with the reason.
    """

    of_output: _Path | None = None
    within: Mapping[str, _Path | None] = field(default_factory=dict)
    of_padding: frozenset[_Path] = frozenset()
    unbound: Mapping[_Path, str] = field(default_factory=dict)

    def bound(self, batch: Batch, tensors: Mapping[_Path, Tensor]) -> Batch:
        """Return the batch with the masks among its arguments as ``valid`` and ``valid_within``."""
        for path, reason in self.unbound.items():
            if bool((tensors[path] == 0).any()) and bool((tensors[path] != 0).any()):
                raise DataError(
                    f"The mask {path[-1]!r} {tuple(tensors[path].shape)} cannot be bound to the tokens that it masks: "
                    f"{reason}. Pass normscope.Batch(args, kwargs, samples, valid=…), bool (samples, positions), and "
                    "valid_within={path of a module: …} for parts of the network with other tokens."
                )
        masks = {path: self._valid(path, tensors[path]) for path in {self.of_output, *self.within.values()} - {None}}
        within = {name: masks.get(path) for name, path in self.within.items()}
        return replace(batch, valid=masks.get(self.of_output), valid_within=within)

    def _valid(self, path: _Path, mask: Tensor) -> Tensor:
        if path in self.of_padding:
            return mask == 0
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise DataError(
                f"The {path[-1]} {tuple(mask.shape)} of samples and positions holds other values than 0 and 1, so that "
                "it does not tell which positions are padding. Pass them as the valid of a normscope.Batch."
            )
        return mask != 0


class _StreamWatch(TorchFunctionMode):
    """Follows the arguments of a network to the inputs of its modules."""

    def __init__(self, model: nn.Module, tensors: Mapping[_Path, Tensor], masks: set[_Path]) -> None:
        super().__init__()
        self._model, self._tensors, self._masks = model, tensors, masks
        self._origins = WeakTensorKeyDictionary()
        for buffer in model.buffers():
            self._origins[buffer] = _WEIGHTS
        for path, tensor in tensors.items():
            self._origins[tensor] = frozenset([path])
        self._running: list[_Origins] = [_WEIGHTS]
        self._at: dict[str, set[_Origins]] = {}  # the origins of each module's inputs
        self._norms = {name for name, module in model.named_modules() if is_norm(module)}
        self._taken: dict[_Path, list[tuple[int, bool, list[_Origins]]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = tensors_of([args, kwargs or {}])
        if func.__name__ in _ATTENTION:
            origins = self._known(operands[0])
        else:
            known = [(value.numel(), value.shape, self._known(value)) for value in operands]
            of_tokens = [one for one in known if one[2] and one[2] - self._masks]
            most = max(of_tokens, key=lambda one: one[0], default=None)
            same = [one[2] for one in of_tokens if most and one[1] == most[1]] or [one[2] or _WEIGHTS for one in known]
            origins = _WEIGHTS.union(*same) if any(one[2] is not None for one in known) or not known else None
            origins = origins - self._masks if most and origins else origins
        written = [args[0]] if func.__name__ == "__setitem__" else tensors_of([result])
        for value in written if origins is not None else ():
            self._origins[value] = origins
        return result

    def _known(self, value: Tensor) -> _Origins | None:
        known: _Origins | None = self._origins.get(value)
        return _WEIGHTS if known is None and isinstance(value, nn.Parameter) else known

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Note the inputs of the modules meanwhile."""
        with contextlib.ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    hooks.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = tensors_of([args, kwargs])
            # A function that torch does not show made what has no origin: of what the module around it was given.
            known = self._known(given[0]) if given else None
            origins = self._running[-1] if known is None else known
            self._running.append(origins)
            if given and given[0].is_floating_point() and (name in self._norms or module._parameters):
                self._at.setdefault(name, set()).add(origins)
            if any((self._known(value) or _WEIGHTS) & self._masks for value in given):
                with contextlib.suppress(TypeError, ValueError):  # a forward that is not written in Python
                    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
                    self.note(arguments | arguments.get("kwargs", {}), len(self._running))

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        origins = self._running.pop()
        for value in tensors_of([output]):
            if self._known(value) is None:
                self._origins[value] = origins

    def note(self, arguments: Mapping[str, Any], depth: int) -> None:
        """Note the masks among the arguments of one call, and the arguments that may be the tokens they mask."""
        named = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        for name, mask in named.items():
            match = _MASK.fullmatch(name)
            for path in (self._known(mask) or _WEIGHTS) & self._masks if match else ():
                given = self._tensors[path]
                valid = mask == 0 if "padding" in name else mask != 0
                inverted = torch.equal(valid, given == 0)
                if valid.shape != given.shape or not (inverted or torch.equal(valid, given != 0)):
                    continue
                tokens = {key: value for key, value in named.items() if not _MASK.fullmatch(key)}
                prefix = match[1] or match[2] if match else ""
                own = [value for key, value in tokens.items() if prefix and key.startswith(prefix)][:1]
                if not own and not _OTHER_STREAMS.fullmatch(prefix or ""):
                    own = [value for key, value in tokens.items() if not _NO_TOKENS.fullmatch(key)]
                    own = [value for value in own if value.shape[:2] == mask.shape] or own[:1]
                origins = [self._known(value) or _WEIGHTS for value in own]
                self._taken.setdefault(path, []).append((depth, inverted, origins))

    def binding(self, output: Any) -> _Binding:
        """Return the mask of each part of the network, now that it has run."""
        streams: dict[_Path, _Origins] = {}
        unbound: dict[_Path, str] = {}
        at_norms = _WEIGHTS.union(*(origins for name in self._norms for origins in self._at.get(name, ())))
        for path in sorted(self._masks, key=str):
            found = [
                (depth, {one for one in each if one & at_norms} or {*each})
                for depth, _, each in self._taken.get(path, ())
            ]
            sure = [(depth, one) for depth, each in found if len(each) == 1 for one in each]
            if sure:
                common = frozenset.intersection(*(one for _, one in sure)) or max(sure, key=lambda one: one[0])[1]
                streams[path] = common | {path}
            elif found or _MASK.fullmatch(str(path[-1])):
                unbound[path] = (
                    "several arguments may be these tokens" if any(found) else "no module takes it with its tokens"
                )

        def mask_of(origins: _Origins) -> _Path | None:
            return next((path for path, stream in streams.items() if stream & origins), None)

        at = {name: {mask_of(origins) for origins in each} for name, each in self._at.items()}
        for name in self._norms & at.keys():
            if len(at[name]) > 1:
                unbound |= dict.fromkeys(at[name] - {None}, f"the norm {name} takes other tokens as well")
        default = next(
            (mask_of(self._known(value) or _WEIGHTS) for value in tensors_of(output) if value.is_floating_point()), None
        )
        parts: dict[str, set[_Path | None]] = {}
        for name, each in at.items():
            for end in re.finditer(r"\.|$", name):
                parts.setdefault(name[: end.start()], set()).update(each)
        within: dict[str, _Path | None] = {}
        for name, each in at.items():
            ends = (name[: end.start()] for end in re.finditer(r"\.|$", name))
            largest = next((part for part in ends if len(parts[part]) == 1), name)
            within[largest] = next(iter(each))
        within = {name: path for name, path in within.items() if path != default and name}
        of_padding = frozenset(path for path, each in self._taken.items() if each[0][1])
        return _Binding(default, within, of_padding, unbound)


def _tensors_at(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    """Yield the tensors within arguments, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_at(each, (*path, key))


def _observed(model: nn.Module, batch: Batch) -> _Binding:
    """Run the first sample of a batch and bind the masks among its arguments."""
    n_samples = len(batch.samples)
    masks = {
        path
        for path, tensor in _tensors_at((batch.args, batch.kwargs))
        if tensor.ndim == 2 and len(tensor) == n_samples and (named := str(path[-1]))
        if _MASK.fullmatch(named) or not (re.search("ids$|label", named) or ((tensor != 0) & (tensor != 1)).any())
    }
    if not masks:
        return _Binding()
    first = batch.first_sample()
    watch = _StreamWatch(model, dict(_tensors_at((first.args, first.kwargs))), masks)
    with left_as_found(model), watch.hooked(), watch:
        output = run(model, first)
    if first.forward is not None and isinstance(first.args[0], Mapping):
        watch.note(first.args[0], -1)
    return watch.binding(output)


class _Binder:
    """Binds the masks of batch after batch, with one pass for each structure of arguments."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._bindings = uncompiled(model), dict[Any, _Binding]()

    def bound(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if batch.valid is not None or batch.valid_within:
                yield batch
                continue
            tensors = dict(_tensors_at((batch.args, batch.kwargs)))
            structure = frozenset((path, tensor.ndim) for path, tensor in tensors.items())
            if structure not in self._bindings:
                self._bindings[structure] = _observed(self._model, batch)
            yield self._bindings[structure].bound(batch, tensors)


class BoundEntries(Entries):
    """A user's own batches, with the masks among their arguments as ``valid`` and ``valid_within``."""

    def __iter__(self) -> Iterator[Batch]:
        binder = vars(self).setdefault("_binder", _Binder(self.model))
        return binder.bound(super().__iter__())


class BoundInputs:
    """Inputs that divide themselves, likewise."""

    def __init__(self, inputs: Any, model: nn.Module) -> None:
        vars(self).update(_inputs=inputs, _binder=_Binder(model))

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_inputs"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inputs, name, value)

    def __iter__(self) -> Iterator[Batch]:
        return self._binder.bound(self._inputs)

    def chunks(self, share: Share) -> Iterator[Chunk]:
        return (replace(chunk, batches=self._binder.bound(chunk.batches)) for chunk in self._inputs.chunks(share))

    def first_sample(self) -> Batch:
        return next(self._binder.bound([self._inputs.first_sample()]))


def unpacked(
    model: nn.Module | LoadedModel,
    batches: Iterable[Any] | None,
    about: Mapping[str, str] | None = None,
    outputs: Outputs | None = None,
    forward: Forward | None = None,
) -> tuple[nn.Module, Iterable[Any], dict[str, str], Outputs]:
    """Return a module, batches, what they say of themselves, and how outputs are read, of either way to pass them.

    Args:
        model: a module; or a loaded model, which has all of them. What is given besides takes the place of its own.
        batches: None for the loaded model's inputs.
        about: None for what the loaded model and the batches say.
        outputs: None for the loaded model's; of a module, the first tensor.
        forward: runs the module on an entry of the batches, see :func:`normscope.inputs.entries.as_batches`.

    Raises:
        UsageError: if there are no batches.

    >>> import normscope
    >>> module, batches, about, outputs = unpacked(normscope.load("demo_vit", device="cpu"), None)
    >>> about["data"], outputs.kind
    ('64 held-out digits', 'classes')
    """
    if isinstance(model, LoadedModel):
        batches = model.inputs if batches is None else batches
        described = {**model.about, "data": str(getattr(batches, "description", None) or "not named")}
        batches = _read_for(batches, model.module, forward)
        return model.module, batches, {**described, **(about or {})}, outputs or model.outputs
    if batches is None:
        raise UsageError(
            f"A {type(model).__name__} brings no batches: pass some after it, or pass what normscope.load returned."
        )
    return model, _read_for(batches, model, forward), dict(about or {}), outputs or Outputs()


def _read_for(batches: Iterable[Any], model: nn.Module, forward: Forward | None) -> Iterable[Any]:
    """Return inputs that divide themselves as they are, and others as what the network takes of them."""
    return BoundInputs(batches, model) if hasattr(batches, "chunks") else BoundEntries(batches, model, forward)
