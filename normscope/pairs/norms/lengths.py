"""Padding that lengths mark: a batch is divided into samples of one length, which are cut to it.

Behind strided convolutions a norm sees fewer positions than the input has, by a rule that only the network knows. Cut
samples have no padding at any norm, and no convolution or GroupNorm mixes any into them.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch, ForwardSignature, tensors_of
from normscope.runtime.network import left_as_found, run

# lengths, ilens, wav_lens, input_signal_length; what comes before names the tensor that the lengths are of.
_LENGTH = re.compile(r"(?:(\w+?)_|([a-z]{0,3}))(?:seq_?)?len(?:s|gths?)?")
# Without a tensor of that name, lengths of the first tensor; or of something else: targets of a loss, prompts, caches.
_OF_INPUT = re.compile(
    "(^|_)(|x|xs|i|in|h|hs|s|t|n|src|source|input|tok|token|text|txt|word|seq|sequence|sentence|audio|speech|signal|sig|wav"
    "|waveform|feat|feature|frame|mel|spec|fbank|utt|utterance|sample|data|valid|real|enc|encoder|batch)s?(_|$)"
)
_OF_ANOTHER = re.compile(
    "(target|tgt|label|y|o|out|output|decoder|memory|prompt|prefix|context|question|query|past|cache|cu|max|min|focal|wave"
    "|path)s?(_|$)"
)
_AHEAD = re.compile("right_context|look_?ahead")  # an attribute of torchaudio's Emformer

Cuts = tuple[tuple[int, ...], int]  # axis of the positions of each length; positions that the first needs beyond it


class _Length(NamedTuple):
    """Lengths of the samples of a tensor ``(samples, …)``: numbers of positions, or shares of all."""

    name: str
    values: Tensor
    of: Tensor
    relative: bool
    named: bool  # after the tensor, or after inputs in general

    def along(self, axis: int) -> list[int]:
        """Return the number of positions of each sample along an axis of the tensor."""
        return [round(value * (self.of.shape[axis] if self.relative else 1)) for value in self.values.tolist()]


def divided(batch: Batch, model: nn.Module, parameters: Sequence[str], known: dict[object, Cuts]) -> Iterator[Batch]:
    """Yield batches of samples without padding; the batch itself if there are no lengths, or no sample is shorter.

    ``parameters`` are those of ``model.forward``; ``known`` keeps the axes from batch to batch.

    Raises:
        DataError: if the samples cannot be divided or cut.
    """
    entry, samples = batch.args if batch.forward is None else batch.args[0], len(batch.samples)
    named = dict(zip(parameters, entry, strict=False)) if isinstance(entry, (tuple, list)) else entry
    if not isinstance(named, Mapping):  # an object, or a tensor
        named = {} if isinstance(named, Tensor) or type(named) in known else _called_with(batch, model)
        known[type(entry)] = (), 0
    lengths = _lengths({**named, **batch.kwargs})
    if all(any({size} == {*each.along(axis)} for axis, size in enumerate(each.of.shape) if axis) for each in lengths):
        yield batch
        return
    if all(tensor is not lengths[0].values for tensor in tensors_of((batch.args, batch.kwargs))):
        raise _refusal(lengths[0], "it is no tensor of the batch")
    if len(lengths[0].values) != samples or (samples > 1 and not batch.divisible):
        raise _refusal(lengths[0], "the batch cannot be divided by samples")
    structure = tuple((length.name, length.of.ndim) for length in lengths)
    if structure not in known:
        with left_as_found(model):
            known[structure] = _axes(batch, model, lengths)
    axes, ahead = known[structure]
    if axes and (unclear := [length for length in lengths if not length.named]):
        raise _refusal(unclear[0], "of which argument is unclear")
    rows: dict[tuple[int, ...], list[int]] = {} if axes else {(): [*range(samples)]}
    for row, (first, *others) in enumerate(zip(*map(_Length.along, lengths, axes), strict=True)):
        rows.setdefault((first + ahead, *others), []).append(row)
    yield from (_cut(batch, lengths, axes, numbers).take(alike) for numbers, alike in rows.items())


def _called_with(batch: Batch, model: nn.Module) -> dict[str, Any]:
    """Return the arguments that a user's function passes to the network, or to parts of it, by name."""
    named: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = zip(ForwardSignature.of(module).positional or (), args, strict=False)
        named.update({**dict(given), **kwargs, **named})  # of the outermost module

    with left_as_found(model), contextlib.ExitStack() as hooks:
        for part in (part for part in model.modules() if not isinstance(part, torch.jit.ScriptModule)):
            hooks.callback(part.register_forward_pre_hook(note, with_kwargs=True).remove)
        run(model, batch)
    return named


def _lengths(arguments: Mapping[str, Any]) -> list[_Length]:
    """Return the lengths among named arguments, with the tensor that they are of: of their name, or the first."""
    tensors = {str(name).lower(): value for name, value in arguments.items() if isinstance(value, Tensor)}
    for name, value in arguments.items():
        if isinstance(value, (list, tuple)) and value and all(type(number) is int for number in value):
            tensors[str(name).lower()] = torch.tensor(value)
    tokens = {name: value for name, value in tensors.items() if value.ndim > 1 and "mask" not in name}
    lengths = []
    for name, match in zip(tensors, map(_LENGTH.fullmatch, tensors), strict=True):
        if match is None or (values := tensors[name]).ndim != 1:
            continue
        stem = match[1] or match[2] or ""
        akin = [tokens[key] for key in tokens if stem and (key.startswith(stem) or (key[1:] and stem.startswith(key)))]
        named = bool(akin or _OF_INPUT.search(stem))
        akin = akin or ([] if _OF_ANOTHER.match(stem) else [*tokens.values()])
        relative = values.is_floating_point() and bool((values <= 1).all())
        counts = bool((values > 0).all()) and (relative or bool((values == values.round()).all()))
        lengths += [_Length(name, values, of, relative, named) for of in akin if counts and len(of) == len(values)][:1]
    return lengths


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
        first, *others = (along[shortest] for along in map(_Length.along, lengths, axes))
        return tensors_of([run(model, _cut(batch, lengths, axes, (first + ahead, *others)).take([shortest]))])

    beyond: dict[tuple[int, ...], list[int]] = {}  # number of positions behind the longest sample
    for axes in itertools.product(*(range(1, length.of.ndim) for length in lengths)):
        with contextlib.suppress(ModelError):
            outputs(axes)
            beyond[axes] = [
                each.of.shape[axis] - max(each.along(axis)) for each, axis in zip(lengths, axes, strict=True)
            ]
    fitting = [axes for axes, left in beyond.items() if min(left) >= 0]
    fitting = [axes for axes in fitting if not any(beyond[axes])] or fitting
    if not beyond or len(fitting) > 1:
        raise _refusal(lengths[0], "its axis is ambiguous" if beyond else "the network does not run on shorter samples")
    if not fitting:
        return (), 0

    def complete(ahead: int) -> bool:
        first, *rest = outputs(fitting[0], ahead)
        return bool(first.shape[fitting[0][0]] >= max(lengths.max() for lengths in rest if lengths.ndim == 1))

    attributes = itertools.chain(*(vars(part).items() for part in model.modules()))
    if not any(_AHEAD.search(name) for name, value in attributes if isinstance(value, int) and value):
        return fitting[0], 0
    return fitting[0], bisect.bisect_left(range(beyond[fitting[0]][0]), True, key=complete)


def _refusal(length: _Length, why: str) -> DataError:
    return DataError(
        f"The argument {length.name!r}, {length.values.tolist()!r:.60}, seems to mark padding, but {why}. Pass "
        "normscope.Batch(args, kwargs, samples, valid=…), bool (samples, positions)."
    )
