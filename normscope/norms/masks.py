"""Padding masks: the part of a network that each is for, by following its tokens through one forward pass.

A mask belongs to the tokens of the module that has a parameter with the name of a mask. The result of a torch function
originates from the same arguments as the tokens of its operands; the result of attention, as its queries.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Collection, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from normscope.errors import DataError
from normscope.inputs.batch import Batch, tensors_at, tensors_of
from normscope.inputs.wrappers import named_modules
from normscope.norms.recognition import is_norm
from normscope.runtime.network import restoring, run

REMEDY = "Pass normscope.Batch(args, kwargs, samples, valid=…), bool (samples, positions)."
INPUT = (
    "x|xs|i|in|h|hs|s|t|n|src|source|input|tok|token|text|txt|word|seq|sequence|sentence|audio|speech|signal|sig|wav"
    "|waveform|feat|feature|frame|mel|spec|fbank|utt|utterance|sample|data|valid|real|enc|encoder|batch"
)
# A mask is named after its tokens: src_key_padding_mask after src, pixel_attention_mask after pixel_values.
MASK = re.compile(r"(?!global_)(?:(\w+?)_)?(?:key_)?(?:attention|padding)_mask|(pixel)_mask")
_UNCLEAR_MASK = re.compile(rf"(?:(?:{INPUT}|key|pad|padding|non_?pad)s?_?)*masks?|valid|(?:is_|non_?)?pad(?:ding|s)?")
_OTHER_STREAM = re.compile(r"(encoder|decoder|memory|tgt)(_\w+)?")
_NO_TOKENS = re.compile(rf"labels?|targets?|(token_type|position)_ids|{MASK.pattern}|{_OTHER_STREAM.pattern}")
_ATTENTION = {"matmul", "__matmul__", "bmm", "einsum", "scaled_dot_product_attention", "multi_head_attention_forward"}

Path = tuple[Any, ...]  # of a tensor in (args, kwargs)
_Origins = frozenset[Path]  # arguments from which the tokens of a tensor originate; none for tokens made of weights
_LATENTS: _Origins = frozenset([()])  # of the result of attention for such tokens


class _Masks(NamedTuple):
    """Paths of masks among the arguments."""

    output: Path | None = None  # of the output's tokens
    within: Mapping[str, Path | None] = {}  # of parts of the network with other tokens
    inverted: frozenset[Path] = frozenset()  # zero for data
    unbound: frozenset[Path] = frozenset()  # of no single stream


class _StreamWatch(TorchFunctionMode):
    """Traces the arguments of a network to the inputs of its modules."""

    def __init__(self, model: nn.Module, tensors: Mapping[Path, Tensor], masks: frozenset[Path]) -> None:
        super().__init__()
        self._modules, self._tensors, self._masks = dict(named_modules(model)), tensors, masks
        self._origins: MutableMapping[Tensor, _Origins] = WeakTensorKeyDictionary()
        self._origins.update(dict.fromkeys(model.buffers(), frozenset()))
        self._origins.update({tensor: frozenset([path]) for path, tensor in tensors.items()})
        self._running: list[_Origins] = [frozenset()]
        self._at: dict[str, set[_Origins]] = {}  # of each module's inputs
        self._masked: dict[Path, list[set[_Origins]]] = {}  # of the possible tokens of a mask, call by call
        self._inverted: set[Path] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        operands = tensors_of([args, kwargs or {}])[: 1 if name in _ATTENTION else None]
        tokens = [(operand.shape, self._of(operand) - self._masks) for operand in operands]
        # Smaller operands scale or shift whole samples.
        largest = max((shape for shape, origins in tokens if origins), key=torch.Size.numel, default=None)
        passed = [origins for shape, origins in tokens if shape == largest] if largest else map(self._of, operands)
        origins = frozenset[Path]().union(*passed) or (_LATENTS if name in _ATTENTION else frozenset())
        for value in [args[0]] if name == "__setitem__" else tensors_of([result]):
            self._origins[value] = origins
        return result

    def _of(self, value: Tensor) -> _Origins:
        """Return the origins; of a tensor that no torch function made, those of the running module's input."""
        return self._origins.get(value, frozenset() if isinstance(value, nn.Parameter) else self._running[-1])

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the origins of a module's inputs; a forward pre-hook, but for the name."""
        inputs = tensors_of([args, kwargs])
        self._running.append(self._of(inputs[0]) if inputs else self._running[-1])
        if inputs and inputs[0].is_floating_point() and (module._parameters or is_norm(module)):
            self._at.setdefault(name, set()).add(self._running[-1])
        if any(self._of(value) & self._masks for value in inputs):
            with contextlib.suppress(TypeError, ValueError):  # forward is not written in Python
                arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
                self.note(arguments | arguments.get("kwargs", {}))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the origins of a module's output; a forward hook."""
        self._origins.update({value: self._of(value) for value in tensors_of([output])})
        self._running.pop()

    def note(self, arguments: Mapping[str, Any]) -> None:
        """Record the masks among the arguments of a call, and the arguments that may be the masked tokens."""
        named = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        for match in filter(None, map(MASK.fullmatch, named)):
            mask, prefix = named[match[0]], match[1] or match[2]
            tokens = [named[name] for name in named if prefix and name.startswith(prefix) and name != match[0]][:1]
            if not tokens and not _OTHER_STREAM.fullmatch(prefix or ""):
                tokens = [named[name] for name in named if not _NO_TOKENS.fullmatch(name)]
                tokens = [value for value in tokens if value.shape[:2] == mask.shape] or tokens[:1]
            for path in self._of(mask) & self._masks:
                data, argument = mask == 0 if "padding" in match[0] else mask != 0, self._tensors[path] != 0
                if torch.equal(data, argument) or torch.equal(data, ~argument):
                    self._inverted |= {path} if torch.equal(data, ~argument) else set()
                    self._masked.setdefault(path, []).append({self._of(value) - _LATENTS for value in tokens})

    def masks(self, output: Any) -> _Masks:
        """Return the mask of each part of the network, after the pass."""
        norms = [name for name in self._at if is_norm(self._modules[name])]
        normed = [origins for name in norms for origins in self._at[name]]
        streams: dict[Path, _Origins] = {}
        for path, calls in self._masked.items():
            tokens = [[origin for origin in call if any(origin & norm for norm in normed)] or [*call] for call in calls]
            joined = [(len(call), frozenset[Path]().union(*call)) for call in tokens]
            # Tokens that are added to one another are of one stream.
            sure = [
                origins for number, origins in joined if origins and (number == 1 or any(map(origins.issubset, normed)))
            ]
            if sure and frozenset.intersection(*sure):
                streams[path] = frozenset.intersection(*sure) | {path}

        def mask_of(origins: _Origins) -> Path | None:
            return next((path for path, stream in streams.items() if stream & origins), None)

        at = {name: {mask_of(origins) for origins in inputs} for name, inputs in self._at.items()}
        whole = next((mask_of(self._of(value)) for value in tensors_of(output) if value.is_floating_point()), None)
        within: dict[str, Path | None] = {}
        for prefix in filter(None, self._modules):  # outer modules come first
            inside = {mask for name in at if f"{name}.".startswith(f"{prefix}.") for mask in at[name]}
            if len(inside - {whole}) == len(inside) == 1 and not any(prefix.startswith(f"{top}.") for top in within):
                within[prefix] = inside.pop()
        named = {path for path in self._masks if path in self._masked or MASK.fullmatch(str(path[-1]))}
        torn = {path for name in norms if len(at[name]) > 1 for path in at[name] if path}
        return _Masks(whole, within, frozenset(self._inverted), frozenset(torn | named - streams.keys()))


def masks_of(model: nn.Module, batch: Batch, tensors: Mapping[Path, Tensor]) -> _Masks:
    """Identify the masks among the arguments of a batch, and the tokens that they mask, by its first sample."""
    n = len(batch.samples)
    tables = {path: tensor for path, tensor in tensors.items() if tensor.ndim == 2 and len(tensor) == n}
    flags = {path for path, table in tables.items() if bool((table == table.bool()).all())}
    flags -= {path for path in tables if re.search("ids$|label", str(path[-1]))}
    masks = frozenset(flags | {path for path in tables if MASK.fullmatch(str(path[-1]))})
    if not masks or not isinstance(model, nn.Module):  # find_norms refuses a torch.export.ExportedProgram
        return _Masks()
    first = batch.first_sample()
    watch = _StreamWatch(model, dict(tensors_at((first.args, first.kwargs))), masks)
    with restoring(model), contextlib.ExitStack() as hooks, watch:
        for name, module in named_modules(model):
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_pre_hook(partial(watch.enter, name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(watch.leave).remove)
        output = run(model, first)
    if first.forward is not None and first.args and isinstance(first.args[0], Mapping):
        watch.note(first.args[0])
    return watch.masks(output)


def refuse_unclear_masks(arguments: Mapping[str, Any]) -> None:
    """Raise DataError at a mask that cannot be bound to tokens: of pairs of positions, or of unclear polarity."""
    tensors = {str(name): value for name, value in arguments.items() if isinstance(value, Tensor) and value.ndim > 1}
    bound = any(MASK.fullmatch(name) and mask.ndim == 2 for name, mask in tensors.items())
    for name, mask in tensors.items():
        data, why = mask != 0, "its axes are not (samples, positions)"
        if MASK.fullmatch(name) and mask.ndim > 2:
            data = mask >= 0 if bool((mask < 0).any()) else ~data if "padding" in name else data
            data = data if "pixel" in name else data.flatten(1, -2).any(1)  # any query may attend to it
        elif bound or not _UNCLEAR_MASK.fullmatch(name.lower()) or not _one_each_position(mask, tensors.values()):
            continue
        else:
            why = "whether 1 or 0 is data is unclear"
        if bool(data.any()) and not bool(data.all()):
            raise DataError(f"The mask {name!r} {tuple(mask.shape)} seems to mark padding, but {why}. {REMEDY}")


def _one_each_position(mask: Tensor, tensors: Collection[Tensor]) -> bool:
    """True for 0 or 1, ``(samples, positions)``, with axes of one perhaps, of another tensor; not if causal."""
    size, data = max(mask.shape[1:]), (mask != 0).flatten(1)
    shapes = [value.shape for value in tensors if value is not mask]
    if data.shape[1] != size or not any(shape[0] == len(mask) and size in shape[1:] for shape in shapes):
        return False
    causal = len(data) == size and any(torch.equal(data, half(data)) for half in (torch.tril, torch.triu))
    return not causal and torch.equal(data.view(mask.shape).to(mask.dtype), mask)
