"""Padding that lengths mark: a batch is divided into samples of one length, which are cut to it.

Behind strided convolutions a norm sees fewer positions than the input has, by a rule that only the network knows. Cut
samples have no padding at any norm, and no convolution or GroupNorm mixes any into them.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch, ForwardSignature, tensors_at, tensors_of
from normscope.norms.masks import INPUT, REMEDY, refuse_unclear_masks
from normscope.runtime.network import call, restoring, run

# lengths, ilens, wav_lens, input_signal_length; what comes before names the tensor that the lengths are of.
_LENGTH = re.compile(r"(?:(\w+?)_|([a-z]{0,3}))(?:seq_?)?len(?:s|gths?)?")
# Names of counts of other things too: lengths if the largest is the size of an axis.
_COUNT = re.compile(
    r"(?:(\w+?)_)??(?:(?:n|nb|num)_?(?:frames|tokens|steps)|(?:frame|token)_?(?:num|count)s?"
    "|sizes?|percent(?:age)?s?|durations?)"
)
# Without a tensor of that name, lengths of the first tensor; or of something else: targets of a loss, prompts, caches.
_OF_INPUT = re.compile(f"(^|_)(|{INPUT})s?(_|$)")
_OF_ANOTHER = re.compile(
    "(target|tgt|label|y|o|out|output|decoder|memory|prompt|prefix|context|question|query|past|cache|cu|max|min|focal|wave"
    "|path)s?(_|$)"
)
_TARGET = re.compile("(target|tgt|label|y|o|out|output|decoder)s?(_|$)")
_AHEAD = re.compile("right_context|look_?ahead")  # an attribute of torchaudio's Emformer

Cuts = tuple[tuple[int, ...], int]  # axis of the positions of each length; positions that the first needs beyond it


class _Length(NamedTuple):
    """Lengths of the samples of a tensor ``(samples, …)``: numbers of positions, or shares of all."""

    name: str
    values: Tensor  # (samples,) or (samples, 1)
    of: Tensor
    relative: bool
    named: bool  # after the tensor, or after inputs in general

    def along(self, axis: int) -> list[int]:
        """Return the number of positions of each sample along an axis of the tensor."""
        size, values = self.of.shape[axis], self.values.flatten().tolist()
        return [min(round(value * size), size) if self.relative else round(value) for value in values]


def unpadded(batch: Batch, model: nn.Module, parameters: Sequence[str], cache: dict[object, Any]) -> Iterator[Batch]:
    """Yield batches of samples without padding; the batch itself if there are no lengths, or no sample is shorter.

    ``parameters`` are those of ``model.forward``; ``cache`` keeps arguments and axes from batch to batch.

    Raises:
        DataError: if the samples cannot be divided or cut, or something else among the arguments marks padding.
    """
    named = _named(batch, model, parameters, cache)
    lengths, samples = _lengths(named), len(batch.samples)
    axes: tuple[int, ...] = ()
    if not all(
        any({size} == {*length.along(axis)} for axis, size in enumerate(length.of.shape) if axis) for length in lengths
    ):
        if all(tensor is not lengths[0].values for tensor in tensors_of((batch.args, batch.kwargs))):
            raise _refusal(lengths[0], "it is no tensor of the batch")
        if len(lengths[0].values) != samples or (samples > 1 and not batch.divisible):
            raise _refusal(lengths[0], "the batch cannot be divided by samples")
        structure = tuple((length.name, length.of.ndim) for length in lengths)
        if structure not in cache:
            with restoring(model):
                cache[structure] = _axes(batch, model, lengths)
        axes, ahead = cache[structure]
    if not axes:
        refuse_unclear_masks(named)
        yield batch
        return
    if unclear := [length for length in lengths if not length.named]:
        raise _refusal(unclear[0], "of which argument is unclear")
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, (first, *further) in enumerate(zip(*map(_Length.along, lengths, axes), strict=True)):
        rows.setdefault((first + ahead, *further), []).append(row)
    yield from (_cut(batch, lengths, axes, numbers).take(alike) for numbers, alike in rows.items())


def _named(batch: Batch, model: nn.Module, parameters: Sequence[str], cache: dict[object, Any]) -> dict[str, Any]:
    """Return the arguments by name: by key, by parameter, or as the network is called with them."""
    user = batch.forward is not None
    entry = batch.args[0] if user and len(batch.args) == 1 else batch.args
    arguments: dict[str, Any] = {} if user else dict(zip(parameters, entry, strict=False))
    arguments.update(entry if isinstance(entry, Mapping) else {}, **batch.kwargs)
    if isinstance(entry, Tensor) or not (user or (len(entry) > 1 and not parameters)) or _lengths(arguments):
        return arguments
    tensors = dict(tensors_at((batch.args, batch.kwargs)))
    structure = (type(entry), *tensors)
    if structure in cache:
        return arguments | {name: tensors[path] for name, path in cache[structure].items()}
    called = _called_with(batch, model)
    for name, value in called.items():
        listed = [tensor for tensor in value if isinstance(tensor, Tensor)] if isinstance(value, (list, tuple)) else []
        sizes = [len(tensor) for tensor in listed if tensor.is_floating_point() and tensor.ndim]
        if len({*sizes}) > 1 == len({tensor.shape[1:] for tensor in listed}):
            raise DataError(
                f"The argument {name!r} is a list of tensors of unequal lengths, {sizes!r:.60}, which the network may "
                "pad. Pass them one at a time, x[None], with forward=lambda model, x: model([*x])."
            )
    paths = {name: path for name, value in called.items() for path, tensor in tensors.items() if tensor is value}
    unnamed = [value for name, value in called.items() if name not in paths]
    marked = any(re.search("len|mask|pad", name) or _COUNT.fullmatch(name) for name in called)
    if not any(isinstance(value, (list, tuple)) or (marked and isinstance(value, Tensor)) for value in unnamed):
        cache[structure] = paths
    return arguments | called


def _called_with(batch: Batch, model: nn.Module) -> dict[str, Any]:
    """Return the arguments with which the network, or parts of it, are called, by name."""
    named: dict[str, Any] = {}
    running: list[nn.Module] = []
    originals: dict[int, Tensor] = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (names := ForwardSignature.of(module).positional) is not None:  # else a wrapper, which passes them on
            given = {} if running else {**dict(zip(names, args, strict=False)), **kwargs}
            named.update({name: originals.get(id(value), value) for name, value in given.items()} | named)
            running.append(module)

    def end(module: nn.Module, *_: Any) -> None:
        if running and running[-1] is module:
            running.pop()

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        copies = map(id, tensors_of((args, kwargs)))
        originals.update(zip(copies, tensors_of((batch.args, batch.kwargs)), strict=True))
        return call(module, replace(batch, args=args, kwargs=kwargs))

    with restoring(model), contextlib.ExitStack() as hooks:
        for module in (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)):
            hooks.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(end, always_call=True).remove)
        run(model, replace(batch, forward=forward))
    return named


def _lengths(arguments: Mapping[str, Any]) -> list[_Length]:
    """Return the lengths among named arguments, with the tensor that they are of: of their name, or the first."""
    named = {str(name).lower(): value for name, value in arguments.items()}
    matches = {name: _LENGTH.fullmatch(name) or _COUNT.fullmatch(name) for name in named}
    tokens = {
        name: value
        for name, value in named.items()
        if isinstance(value, Tensor) and value.ndim > 1 and "mask" not in name and not _LENGTH.fullmatch(name)
    }
    lengths = []
    for name, match in matches.items():
        values = _numbers(named[name]) if match else None
        if match is None or values is None:
            continue
        stem = next(filter(None, match.groups()), "")
        akin = [tokens[key] for key in tokens if stem and (key.startswith(stem) or (key[1:] and stem.startswith(key)))]
        akin = akin or [tokens[key] for key in tokens if _TARGET.match(stem) and _TARGET.match(key)]
        named_after = bool(akin or match.re is _COUNT or _OF_INPUT.search(stem))
        akin = akin or ([] if _OF_ANOTHER.match(stem) else [*tokens.values()])
        least, most = float(values.min()), float(values.max())
        relative = values.is_floating_point() and most < 1.001  # as sums of rounded shares are
        tensors = [of for of in akin if len(of) == len(values)]
        counts = 0 < least <= most < math.inf and (relative or bool((values == values.round()).all()))
        together = any(float(values.sum()) in of.shape for of in akin)  # samples one after another in one axis
        if match.re is _COUNT:
            tensors = [of for of in tensors if least < most and (most > 0.999 if relative else most in of.shape[1:])]
        elif not (counts and tensors) and named_after and akin and least != most and not together:
            why = "no tensor has as many samples" if counts else "not every one is a positive whole number or share"
            raise _refusal(_Length(name, values, akin[0], relative, named_after), why)
        lengths += [_Length(name, values, of, relative, named_after) for of in tensors if counts][:1]
    return lengths


def _numbers(value: Any) -> Tensor | None:
    """Return one number for each sample as a tensor ``(samples,)`` or ``(samples, 1)``; None for anything else."""
    if isinstance(value, (list, tuple, np.ndarray)):
        with contextlib.suppress(TypeError, ValueError):  # of texts, of lists of unequal lengths
            value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.is_complex():
        return None
    return value if value.numel() and value.ndim and value.shape[1:].numel() == 1 else None


def _cut(batch: Batch, lengths: Sequence[_Length], axes: Sequence[int], numbers: Sequence[int]) -> Batch:
    """Return a batch with the first positions of the tensors of some lengths, and of others with as many (masks)."""
    cuts = list(zip(lengths, axes, numbers, strict=False))

    def changed(tensor: Tensor) -> Tensor:
        for length, axis, number in cuts:
            if tensor is length.of:
                return tensor.narrow(axis, 0, min(number, tensor.shape[axis]))
            if tensor is length.values:
                return torch.ones_like(tensor) if length.relative else tensor
        first = int(tensor.ndim > 0 and len(tensor) == len(batch.samples))
        for (length, axis, number), along in itertools.product(cuts, range(first, tensor.ndim)):
            if tensor.shape[along] == length.of.shape[axis] > number:
                tensor = tensor.narrow(along, 0, number)
        return tensor

    return batch.each(changed, of_lists=batch.forward is not None)


def _axes(batch: Batch, model: nn.Module, lengths: Sequence[_Length]) -> Cuts:
    """Find the axes by passes of the shortest sample: layers refuse fewer features. No axes if these are no lengths."""
    shortest = int(lengths[0].values.argmin())

    def outputs(axes: Sequence[int], ahead: int = 0) -> list[Tensor]:
        first, *further = (along[shortest] for along in map(_Length.along, lengths, axes))
        return tensors_of([run(model, _cut(batch, lengths, axes, (first + ahead, *further)).take([shortest]))])

    beyond: dict[tuple[int, ...], list[int]] = {}  # number of positions behind the longest sample
    for axes in itertools.product(*(range(1, length.of.ndim) for length in lengths)):
        with contextlib.suppress(ModelError):
            outputs(axes)
            beyond[axes] = [
                length.of.shape[axis] - max(length.along(axis)) for length, axis in zip(lengths, axes, strict=True)
            ]
    fitting = [axes for axes, left in beyond.items() if min(left) >= 0]
    fitting = [axes for axes in fitting if not any(beyond[axes])] or fitting
    if not beyond or len(fitting) > 1:
        raise _refusal(lengths[0], "its axis is ambiguous" if beyond else "the network does not run on shorter samples")
    if not fitting:
        if lengths[0].named and len({*lengths[0].values.flatten().tolist()}) > 1:
            raise _refusal(lengths[0], "it exceeds every axis of its tensor")
        return (), 0

    def complete(ahead: int) -> bool:
        first, *later = outputs(fitting[0], ahead)
        return bool(first.shape[fitting[0][0]] >= max(lengths.max() for lengths in later if lengths.ndim == 1))

    attributes = itertools.chain(*(vars(module).items() for module in model.modules()))
    if not any(_AHEAD.search(name) for name, value in attributes if isinstance(value, int) and value):
        return fitting[0], 0
    return fitting[0], bisect.bisect_left(range(beyond[fitting[0]][0]), True, key=complete)


def _refusal(length: _Length, why: str) -> DataError:
    values = length.values.tolist()
    return DataError(f"The argument {length.name!r}, {values!r:.60}, seems to mark padding, but {why}. {REMEDY}")
