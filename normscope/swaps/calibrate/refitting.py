"""Both networks in step, from module to module, each fitted where all passes wait at it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.inputs.batch import Batch
from normscope.pairs.norms.recognition import kind_at
from normscope.pairs.norms.sites import NormSite
from normscope.runtime.progress import Progress
from normscope.runtime.records import Record
from normscope.swaps.calibrate.closed_form import BLOCK, LayerSums, RefittedLayer, ridge, slopes
from normscope.swaps.calibrate.functions import least_squares
from normscope.swaps.calibrate.linear_layers import MOST_NUMBERS, LinearLayer, rows
from normscope.swaps.calibrate.lockstep import Stop, WaitingPass, all_to, stations, waiting_passes
from normscope.swaps.calibrate.modulation import Modulation, best_for_each_sample
from normscope.swaps.calibrate.neighbours import NextNorm, Station
from normscope.swaps.kernels import eager
from normscope.swaps.kernels.eager import Parameters
from normscope.swaps.pointwise import PointwiseFunction

STAGE = "calibrate"
_MOST_TOKENS = 4096  # of a site, that α and s are searched on
_SLOPES = (0.1, 2.0)  # the range of a post-norm's slope, in units of 1 / mean σ
_LEAST_GAIN = 1e-3  # of the largest: through a smaller one, what a channel gives reaches nothing


@dataclass(frozen=True)
class CalibratedModule(Record):
    """What calibration did to one module: relative L2 of what it gives, on the inputs that decide.

    Attributes:
        path: of the module.
        is_norm: whether a point-wise function was fitted there; else a linear layer.
        before: with what was there, on the inputs that the network calibrated so far gives.
        after: with what was found; what was there stays where that is no better.
        penalty: λ of a layer, as a share of the mean square of a centred feature, ∞ where its bias alone was fitted;
            None of a function, and where the layer stayed as it was.
    """

    path: str
    is_norm: bool
    before: float
    after: float
    penalty: float | None = None


@dataclass(frozen=True)
class _Passed:
    """What the original did at a module, with one batch: rows without padding, and what it took as it was given."""

    input: Tensor | None
    taken: Tensor
    given: Tensor


class _Taken:
    """What a layer is called with, to know it again: as queries, keys and values are often made of one tensor."""

    def __init__(self, layer: LinearLayer, inputs: Sequence[Tensor]) -> None:
        self._kind = type(layer.module) if layer.channel_axis == -1 else None
        self._inputs, self._versions = inputs, [0 if one.is_inference() else one._version for one in inputs]

    def is_same(self, other: _Taken) -> bool:
        """Whether the rows of another layer of the same kind are the same, as nothing has changed them in place."""
        tensors = all(mine is theirs for mine, theirs in zip(self._inputs, other._inputs, strict=True))
        return self._kind is not None and self._kind is other._kind and tensors and self._versions == other._versions


class Refitting:
    """Both networks in step, from module to module.

    Args:
        original: the network.
        swapped: a copy with point-wise functions; it is fitted in place.
        sites: the original's norm sites.
        batches: what both run on.
        n_learned: how many of the batches are learned from; the others decide.

    Attributes:
        modules: what was fitted, in the order of calls.
        results_of_original: what the original returned of the batches that decide.
    """

    def __init__(
        self,
        original: nn.Module,
        swapped: nn.Module,
        sites: Sequence[NormSite],
        batches: Sequence[Batch],
        n_learned: int,
    ) -> None:
        self._original, self._swapped = original, swapped
        self._sites = {site.name: site for site in sites}
        self._functions = {path: one for path, one in swapped.named_modules() if isinstance(one, PointwiseFunction)}
        self._batches, self._n_learned = batches, n_learned
        self._of_original: dict[str, list[_Passed]] = {}
        self._norm_inputs: dict[str, list[Tensor]] = {}  # of the swapped network, as rows
        self._conditions: dict[str, list[Tensor]] = {}  # what layers that modulate take, in the swapped network
        self._sums: tuple[_Taken, LayerSums, LayerSums] | None = None  # of the layer before
        self.modules: list[CalibratedModule] = []
        self.results_of_original: list[Any] = []

    def run(self, way: Sequence[Station], progress: Progress) -> None:
        """Go through all stations at which there is something to do, and no further.

        Raises:
            ModelError: if the order in which the network calls its modules depends on its input.
        """
        fitted = [one for one in way if not one.is_norm or one.path in self._functions]
        used = {path for one in fitted for path in _used(one)}
        way = [one for one in way if one.path in used]
        paths = [one.path for one in way]
        self._way = {one.path: one for one in way}
        self._ahead = iter(paths)
        last_use = {path: number for number, one in enumerate(way) for path in _used(one)}
        bases = {one.feeds.base for one in way if one.feeds is not None and one.feeds.of_output}
        self._modulating = {one.modulated.layer for one in way if one.modulated is not None}
        with (
            stations(self._original, paths, behind=True),
            stations(
                self._swapped, paths, behind=False, kept=[path for path in paths if path in bases | self._modulating]
            ),
            waiting_passes(self._original, self._batches) as self._originals,
            waiting_passes(self._swapped, self._batches) as self._passes,
        ):
            progress(STAGE, 0, len(way))
            for number, station in enumerate(way):
                wanted, there = self._wanted(station.path), all_to(self._passes, station.path)
                if station.is_norm:
                    self._at_norm(station, there, wanted)
                else:
                    self._at_layer(station, there, wanted)
                for path in [path for path in self._of_original if last_use[path] <= number]:
                    self._forget(path)
                progress(STAGE, number + 1, len(way))
            self.results_of_original = [_to_the_end(one) for one in self._originals[self._n_learned :]]

    def _forget(self, path: str) -> None:
        del self._of_original[path]
        self._norm_inputs.pop(path, None)
        self._conditions.pop(path, None)
        for one in self._passes:
            one.outputs.pop(path, None)

    def _wanted(self, path: str) -> list[_Passed]:
        """What the original does at a station; it goes ahead of the swapped network where that is asked for early."""
        while path not in self._of_original:
            there = self._way[next(self._ahead)]
            stops = all_to(self._originals, there.path)
            self._of_original[there.path] = [self._passed(there, number, stop) for number, stop in enumerate(stops)]
        return self._of_original[path]

    def _passed(self, station: Station, number: int, stop: Stop) -> _Passed:
        valid = self._batches[number].valid_at(station.path)
        if station.is_norm:
            return _Passed(None, self._rows(station, number, stop.input), self._rows(station, number, stop.output))
        # A layer whose first batch comes as in the original has nothing swapped before it.
        layer = self._layer(self._original, station)
        given = layer.outputs(stop.input, stop.output, valid)
        of = stop.output if isinstance(stop.output, Tensor) else stop.input
        return _Passed(stop.input.clone() if not number else None, given.new_zeros(0), _own(given, of))

    def _rows(self, station: Station, number: int, value: Tensor | None) -> Tensor:
        """A copy of what goes in or out at a norm, ``(tokens, channels)``: the network may change its tensors."""
        if value is None:
            raise ModelError(f"The norm {station.path} gave no tensor to compare with.")
        turned = value.movedim(station.channel_axis, -1) if station.channel_axis != -1 else value
        return _own(rows(turned, self._batches[number].valid_at(station.path)), value)

    def _layer(self, network: nn.Module, station: Station) -> LinearLayer:
        layer = LinearLayer.of(network.get_submodule(station.path))
        if layer is None:
            raise ModelError(f"{station.path} of the swapped network is no layer of the kind that the original has.")
        return layer

    def _at_norm(self, station: Station, there: Sequence[Stop], wanted: Sequence[_Passed]) -> None:
        path = station.path
        self._norm_inputs[path] = [self._rows(station, number, stop.input) for number, stop in enumerate(there)]
        function = self._functions.get(path)
        if function is None or function.activated:
            return
        pairs = list(zip(self._norm_inputs[path], (one.given for one in wanted), strict=True))
        channels = function.weight.numel()
        (x, y), judged = (
            tuple(torch.cat(part).float().reshape(-1, channels) for part in zip(*of_part, strict=True))
            for of_part in (pairs[: self._n_learned], pairs[self._n_learned :])
        )
        before, start = _error(function, *judged), {name: one.clone() for name, one in function.named_parameters()}
        every = max(1, -(-len(x) // _MOST_TOKENS))
        put_parameters(function, least_squares(function, x[::every].double().cpu(), y[::every].double().cpu()))
        after = _error(function, *judged)
        if not after < before:
            put_parameters(function, start)
        self.modules.append(CalibratedModule(path, True, before, min(before, after)))
        if station.modulated is None or station.modulated.layer not in self._conditions:
            return
        if all(batch.valid_at(path) is None for batch in self._batches):  # a batch's samples have as many tokens each
            self._modulate(function, station, station.modulated, there)

    @torch.no_grad()
    def _modulate(
        self, function: PointwiseFunction, station: Station, modulated: Modulation, there: Sequence[Stop]
    ) -> None:
        """Fit what gives each sample its scale and shift behind a function, and give the passes what it gives now."""
        layer, size = self._layer(self._swapped, self._way[modulated.layer]), function.weight.numel()
        channels, conditions = modulated.channels(size), self._conditions[modulated.layer]
        learned, judged = LayerSums(), LayerSums()
        for number, stop in enumerate(there):
            present = self._wanted(modulated.layer)[number].given[:, channels.to(stop.input.device)]
            scale, shift = present.chunk(2, dim=1)
            y = self._wanted(station.path)[number].given.reshape(len(scale), -1, size)
            given = function.forward(stop.input).reshape(y.shape)  # past the hooks of its place
            best = best_for_each_sample(given, y * (1 + scale[:, None]) + shift[:, None], scale)
            (judged if number >= self._n_learned else learned).add(conditions[number].cpu(), [torch.cat(best, 1)])
        matrix, offset = layer.matrix.detach().cpu().double(), layer.offset
        offset = None if offset is None else offset.detach().cpu().double()
        refitted = ridge(learned, judged, matrix[channels], None if offset is None else offset[channels])
        self.modules.append(CalibratedModule(modulated.layer, False, refitted.before, refitted.after, refitted.penalty))
        if refitted.penalty is None:
            return
        matrix[channels] = refitted.weight
        if offset is not None and refitted.bias is not None:
            offset[channels] = refitted.bias
        changed = torch.zeros(len(matrix), dtype=torch.bool).index_fill(0, channels, True)
        _put_rows(layer, matrix, offset, changed)
        for one, condition in zip(self._passes, conditions, strict=True):
            output = one.outputs[modulated.layer]  # its parts are views, which nothing has read yet
            output[:, changed.to(output.device)] = layer.module.forward(condition)[:, changed.to(output.device)]

    def _at_layer(self, station: Station, there: Sequence[Stop], wanted: Sequence[_Passed]) -> None:
        if station.path in self._modulating:
            self._conditions[station.path] = [stop.input.clone() for stop in there]
        first = wanted[0].input
        if first is not None and torch.equal(there[0].input, first):
            return  # nothing that was swapped comes before it
        layer, into = self._layer(self._swapped, station), self._target_of(station)
        own, offset = layer.matrix.detach().to("cpu", torch.float64), layer.offset
        gain = torch.ones(len(own), dtype=torch.float64)
        if into is None:
            sums = self._summed(layer, station, there, lambda number: [wanted[number].given])
        elif self._into_function(into):
            sums = self._towards_norm(layer, station, into, there)
        else:
            gain = into.gain
            sums = self._summed(layer, station, there, lambda number: [self._kept_up(into, number, wanted)])
        own_bias = None if offset is None else gain * offset.detach().to("cpu", torch.float64)
        refitted = ridge(*sums, gain[:, None] * own, own_bias)
        _put(refitted, layer, gain)
        self.modules.append(CalibratedModule(station.path, False, refitted.before, refitted.after, refitted.penalty))

    def _target_of(self, station: Station) -> NextNorm | None:
        """The norm that a layer's output goes into, where that says more than the output of the original's."""
        into = station.feeds
        if into is None or (into.base is None and not self._into_function(into)):
            return None
        return into if into.base is None or into.base in self._norm_inputs else None

    def _into_function(self, into: NextNorm) -> bool:
        function = self._functions.get(into.path)
        return into.of_output and function is not None and not function.activated

    def _kept_up(self, into: NextNorm, number: int, wanted: Sequence[_Passed]) -> Tensor:
        """What a layer gave, through its gain, and what the stream that it is added to has come to lack."""
        short_of = self._base_in_original(into, number) - self._base(into, number)
        return into.gain.to(short_of) * wanted[number].given + short_of

    def _towards_norm(
        self, layer: LinearLayer, station: Station, into: NextNorm, there: Sequence[Stop]
    ) -> tuple[LayerSums, LayerSums]:
        """Sums with x̂/θ less the base for a target: with the norm's own output x̂ at a slope θ for each channel."""
        normalized = self._normalized(into.path)
        sigma = self._mean_sigma(into.path)
        if into.base is None:
            return self._summed(layer, station, there, lambda number: [sigma * normalized(number)])
        learned, judged = self._summed(
            layer, station, there, lambda number: [normalized(number), self._base(into, number)]
        )
        slope = slopes(learned.with_own(layer.matrix.detach().to("cpu", torch.float64)))
        slope = slope.clamp(*(bound / sigma for bound in _SLOPES))
        factors = torch.stack([1 / slope, -torch.ones_like(slope)])
        return learned.combined(factors), judged.combined(factors)

    def _summed(
        self,
        layer: LinearLayer,
        station: Station,
        there: Sequence[Stop],
        targets: Callable[[int], Sequence[Tensor]],
    ) -> tuple[LayerSums, LayerSums]:
        """Sums over the tokens to learn from, and over those that decide; products of the same inputs are made once."""
        taken = _Taken(layer, [stop.input for stop in there])
        same = self._sums if self._sums is not None and self._sums[0].is_same(taken) else None
        learned, judged = (LayerSums(one) for one in (same[1:] if same is not None else (None, None)))
        for numbers, sums in ((range(self._n_learned), learned), (range(self._n_learned, len(there)), judged)):
            waiting: list[tuple[Tensor, ...]] = []  # few products of many tokens take less time than many of few
            for number in numbers:
                wanted, first = targets(number), 0
                for h in layer.inputs_in_pieces(there[number].input, self._batches[number].valid_at(station.path)):
                    waiting.append((h, *(target[first : first + len(h)] for target in wanted)))
                    first += len(h)
                    _add(waiting, sums)
            _add(waiting, sums, rest=True)
        self._sums = (taken, learned, judged)
        return learned, judged

    def _base(self, into: NextNorm, number: int) -> Tensor:
        """What the output of a layer is added to, in the swapped network."""
        assert into.base is not None  # noqa: S101 - as _target_of has seen
        if not into.of_output:
            return self._norm_inputs[into.base][number]
        return self._rows(self._way[into.base], number, self._passes[number].outputs[into.base])

    def _base_in_original(self, into: NextNorm, number: int) -> Tensor:
        assert into.base is not None  # noqa: S101 - as _target_of has seen
        passed = self._wanted(into.base)[number]
        return passed.given if into.of_output else passed.taken

    def _normalized(self, path: str) -> Callable[[int], Tensor]:
        """What a norm of the original gives for a batch, before its weight and bias, whatever it does with them."""
        norm, wanted = self._original.get_submodule(path), self._wanted(path)
        kind = kind_at(norm, self._sites[path])
        if isinstance(kind, str):
            raise ModelError(f"The norm {path} cannot be calibrated: {kind}.")
        gain, offset = kind.gain_and_offset(norm, wanted[0].given.shape[-1])
        gain = gain.where(gain != 0, 1.0)
        return lambda number: (wanted[number].given.float() - offset) / gain

    def _mean_sigma(self, path: str) -> float:
        return float(torch.cat([one.taken.float().std(-1) for one in self._wanted(path)]).mean())


def _to_the_end(one: WaitingPass) -> Any:
    while one.go_on() is not None:
        pass
    return copy.deepcopy(one.result)  # it may hold a buffer, which the next pass fills


def _used(station: Station) -> list[str]:
    """Paths of which a station reads what happened there."""
    into = station.feeds
    layer = None if station.modulated is None else station.modulated.layer
    others = [layer, *((None, None) if into is None else (into.path, into.base))]
    return [station.path, *(path for path in others if path is not None)]


def _own(value: Tensor, of: Tensor) -> Tensor:
    """A tensor that shares no memory with the one that it was made of."""
    return value.clone() if value.untyped_storage().data_ptr() == of.untyped_storage().data_ptr() else value


def _error(function: PointwiseFunction, x: Tensor, y: Tensor) -> float:
    def flat(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter.detach().flatten()

    alpha, weight = function.alpha.detach().flatten(), function.weight.detach().flatten()
    parameters = Parameters(alpha, flat(function.shift), weight, flat(function.bias))
    formula = function.curve.function if function.table is None else function.table
    given, wanted = eager.pointwise(x, formula, parameters, 0).cpu().double(), y.cpu().double()
    return float((given - wanted).norm() / wanted.norm())


def _add(waiting: list[tuple[Tensor, ...]], sums: LayerSums, *, rest: bool = False) -> None:
    """Add inputs and targets to sums, once they fill a block or are the rest, and leave none waiting."""
    inputs = [h for h, *_ in waiting]
    full = sum(map(len, inputs)) >= BLOCK or sum(h.numel() for h in inputs) >= MOST_NUMBERS
    if waiting and (rest or full):
        h, *wanted = (torch.cat(part) for part in zip(*waiting, strict=True))
        sums.add(h, wanted)
        waiting.clear()


def _put(found: RefittedLayer, layer: LinearLayer, gain: Tensor) -> None:
    """Give a layer the weights that were found for gain · layer; channels that reach nothing keep their own."""
    if found.penalty is None:
        return
    reached = gain.abs() >= _LEAST_GAIN * gain.abs().max()
    _put_rows(layer, found.weight / gain[:, None], None if found.bias is None else found.bias / gain, reached)


def _put_rows(layer: LinearLayer, matrix: Tensor, offset: Tensor | None, channels: Tensor) -> None:
    """Give some channels of a layer what was found for them on the CPU, in float64."""
    device = layer.matrix.device
    there = None if offset is None else offset.float().to(device)
    layer.put(matrix.float().to(device), there, channels.to(device))


@torch.no_grad()
def put_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values into a module's parameters, by name."""
    for name, value in values.items():
        module.get_parameter(name).copy_(value)
