"""Original and swapped network in lockstep: at each module all passes pause, and the module is fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.wrappers import named_modules, submodule
from normscope.norms.recognition import kind_at
from normscope.norms.sites import NormSite
from normscope.runtime.progress import Progress
from normscope.runtime.records import Record
from normscope.swaps.calibrate.closed_form import BLOCK, LayerSums, RefittedLayer, least_squares, ridge, slopes
from normscope.swaps.calibrate.linear_layers import MOST_NUMBERS, LinearLayer, rows
from normscope.swaps.calibrate.neighbours import CalledModule, Modulation, NextNorm, best_for_each_sample
from normscope.swaps.calibrate.paused_passes import Pause, advance_to, paused_passes
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.standalone import pointwise

STAGE = "calibrate"
_MOST_TOKENS = 4096  # of a site, for the search of α and s
_SLOPES = (0.1, 2.0)  # range of a post-norm's slope, in units of 1 / mean σ
_LEAST_GAIN = 1e-3  # share of the largest gain, below which a channel keeps its weights


@dataclass(frozen=True)
class CalibratedModule(Record):
    """Result of calibrating one module: relative L2 of its output, on the inputs that decide.

    Attributes:
        path: of the module.
        is_norm: True for a point-wise function; False for a linear layer.
        before: error before the fit, on the inputs from the network calibrated so far.
        after: error after the fit, which is undone unless it lowers the error.
        penalty: λ of a layer, as a share of the mean square of a centred feature; ∞ if only its bias was fitted; None
            for a function, and if the layer stayed as it was.
    """

    path: str
    is_norm: bool
    before: float
    after: float
    penalty: float | None = None


@dataclass(frozen=True)
class _Originals:
    """Original network at one module and batch, as rows; of a layer the input is that of the first batch, as it is."""

    input: Tensor | None
    output: Tensor


@dataclass
class Refitting:
    """Calibration of a swapped network, module by module."""

    original: nn.Module
    swapped: nn.Module  # a copy with point-wise functions, which is fitted in place
    sites: Mapping[str, NormSite]  # of the original
    batches: Sequence[Batch]
    n_learned: int  # number of batches to learn from; the others decide
    modules: list[CalibratedModule] = field(default_factory=list)  # results, in the order of calls

    def __post_init__(self) -> None:
        self._functions = {path: f for path, f in named_modules(self.swapped) if isinstance(f, PointwiseFunction)}
        self._originals: dict[str, list[_Originals]] = {}
        self._norm_inputs: dict[str, list[Tensor]] = {}  # in the swapped network, as rows
        self._conditions: dict[str, list[Tensor]] = {}  # inputs of layers that modulate, in the swapped network

    def run(self, called_modules: Sequence[CalledModule], progress: Progress) -> None:
        """Fit modules in the order of calls, and run the networks no further than these need."""
        fitted = [called for called in called_modules if not called.is_norm or called.path in self._functions]
        used = {path for called in fitted for path in _used(called)}
        self._called = {called.path: called for called in called_modules if called.path in used}
        paths = list(self._called)
        self._ahead = iter(paths)
        last_use = {path: number for number, called in enumerate(self._called.values()) for path in _used(called)}
        bases = {called.feeds.base for called in self._called.values() if called.feeds and called.feeds.base_is_output}
        self._modulating = {called.modulated.layer for called in self._called.values() if called.modulated}
        kept = [path for path in paths if path in bases | self._modulating]
        with (
            paused_passes(self.original, self.batches, paths, behind=True) as self._original_passes,
            paused_passes(self.swapped, self.batches, paths, behind=False, kept=kept) as self._passes,
        ):
            progress(STAGE, 0, len(paths))
            for number, (path, called) in enumerate(self._called.items()):
                originals, pauses = self._in_original(path), advance_to(self._passes, path)
                (self._at_norm if called.is_norm else self._at_layer)(called, pauses, originals)
                for past in [name for name in self._originals if last_use[name] <= number]:
                    del self._originals[past]
                    self._norm_inputs.pop(past, None)
                    self._conditions.pop(past, None)
                    for paused in self._passes:
                        paused.outputs.pop(past, None)
                progress(STAGE, number + 1, len(paths))

    def _in_original(self, path: str) -> list[_Originals]:
        """Return inputs and outputs of the original network at a module; run it forward to there if needed."""
        while path not in self._originals:
            called = self._called[next(self._ahead)]
            pauses = advance_to(self._original_passes, called.path)
            self._originals[called.path] = [self._kept(called, number, pause) for number, pause in enumerate(pauses)]
        return self._originals[path]

    def _kept(self, called: CalledModule, number: int, pause: Pause) -> _Originals:
        if called.is_norm:
            return _Originals(self._rows(called, number, pause.input), self._rows(called, number, pause.output))
        layer, valid = self._layer(self.original, called), self.batches[number].valid_at(called.path)
        output = layer.outputs(pause.input, pause.output, valid)
        return _Originals(None if number else pause.input.clone(), output.clone())

    def _rows(self, called: CalledModule, number: int, value: Tensor) -> Tensor:
        """Copy the input or output of a norm, ``(tokens, channels)``: the network may change its tensors."""
        return rows(value.movedim(called.channel_axis, -1), self.batches[number].valid_at(called.path)).clone()

    def _layer(self, network: nn.Module, called: CalledModule) -> LinearLayer:
        layer = LinearLayer.of(submodule(network, called.path))
        if layer is None:
            raise ModelError(f"{called.path} is a linear layer in the original, but not in the swapped network.")
        return layer

    def _at_norm(self, called: CalledModule, pauses: Sequence[Pause], originals: Sequence[_Originals]) -> None:
        path = called.path
        self._norm_inputs[path] = [self._rows(called, number, pause.input) for number, pause in enumerate(pauses)]
        function = self._functions.get(path)
        if function is None or function.activations:
            return
        pairs = list(zip(self._norm_inputs[path], (original.output for original in originals), strict=True))
        (x, y), validation = (
            tuple(torch.cat(side).float().reshape(-1, function.weight.numel()) for side in zip(*some, strict=True))
            for some in (pairs[: self.n_learned], pairs[self.n_learned :])
        )
        before, start = _error(function, *validation), parameter_values(function)
        every = max(1, -(-len(x) // _MOST_TOKENS))
        put_parameters(function, least_squares(function, x[::every].double().cpu(), y[::every].double().cpu()))
        after = _error(function, *validation)
        if not after < before:
            put_parameters(function, start)
        self.modules.append(CalibratedModule(path, True, before, min(before, after)))
        equally_long = all(batch.valid_at(path) is None for batch in self.batches)
        if equally_long and called.modulated is not None and called.modulated.layer in self._conditions:
            self._modulate(function, called, called.modulated, pauses)

    @torch.no_grad()
    def _modulate(
        self, function: PointwiseFunction, called: CalledModule, modulated: Modulation, pauses: Sequence[Pause]
    ) -> None:
        """Fit the layer that modulates the output of a function, and update its outputs in the passes."""
        layer, size = self._layer(self.swapped, self._called[modulated.layer]), function.weight.numel()
        channels, conditions = modulated.channels(size), self._conditions[modulated.layer]
        learned, validation = LayerSums(), LayerSums()
        for number, pause in enumerate(pauses):
            present = self._in_original(modulated.layer)[number].output[:, channels.to(pause.input.device)]
            scale, shift = present.chunk(2, dim=1)
            y = self._in_original(called.path)[number].output.reshape(len(scale), -1, size)
            output = function.applied(pause.input).reshape(y.shape)  # not called, to run no hooks
            best = best_for_each_sample(output, y * (1 + scale[:, None]) + shift[:, None], scale)
            (validation if number >= self.n_learned else learned).add(conditions[number].cpu(), [torch.cat(best, 1)])
        matrix, offset = layer.values
        refitted = ridge(learned, validation, matrix[channels], None if offset is None else offset[channels])
        self._report(modulated.layer, refitted)
        if refitted.penalty is None:
            return
        matrix[channels] = refitted.weight
        if offset is not None and refitted.bias is not None:
            offset[channels] = refitted.bias
        changed = torch.zeros(len(matrix), dtype=torch.bool).index_fill(0, channels, True)
        layer.put(matrix, offset, changed)
        for paused, condition in zip(self._passes, conditions, strict=True):
            output = paused.outputs[modulated.layer]  # its chunks are views, which nothing has read yet
            output[:, changed.to(output.device)] = layer.module.forward(condition)[:, changed.to(output.device)]

    def _at_layer(self, called: CalledModule, pauses: Sequence[Pause], originals: Sequence[_Originals]) -> None:
        if called.path in self._modulating:
            self._conditions[called.path] = [pause.input.clone() for pause in pauses]
        first = originals[0].input
        if first is not None and torch.equal(pauses[0].input, first):
            return  # no swapped norm comes before it
        layer, into = self._layer(self.swapped, called), self._target_of(called)
        matrix, offset = layer.values
        gain = torch.ones(len(matrix), dtype=torch.float64)
        if into is None:
            sums = self._summed(layer, called, pauses, lambda number: [originals[number].output])
        elif self._into_function(into):
            sums = self._towards_norm(layer, called, into, pauses)
        else:
            gain = into.gain

            def corrected(number: int) -> list[Tensor]:
                """Add the error of the residual stream so far to the layer's output in the original."""
                before, now = self._bases(into, number)
                error = before - now
                return [gain.to(error) * originals[number].output + error]

            sums = self._summed(layer, called, pauses, corrected)
        refitted = ridge(*sums, gain[:, None] * matrix, None if offset is None else gain * offset)
        if refitted.penalty is not None:
            bias = None if refitted.bias is None else refitted.bias / gain
            layer.put(refitted.weight / gain[:, None], bias, gain.abs() >= _LEAST_GAIN * gain.abs().max())
        self._report(called.path, refitted)

    def _report(self, path: str, refitted: RefittedLayer) -> None:
        self.modules.append(CalibratedModule(path, False, refitted.before, refitted.after, refitted.penalty))

    def _target_of(self, called: CalledModule) -> NextNorm | None:
        """Return the norm that a layer's output goes into, if that is a better target than the original's output."""
        into = called.feeds
        if into is None or (into.base is None and not self._into_function(into)):
            return None
        return into if into.base is None or into.base in self._norm_inputs else None

    def _into_function(self, into: NextNorm) -> bool:
        function = self._functions.get(into.path)
        return into.base_is_output and function is not None and not function.activations

    def _towards_norm(
        self, layer: LinearLayer, called: CalledModule, into: NextNorm, pauses: Sequence[Pause]
    ) -> tuple[LayerSums, LayerSums]:
        """Sums with x̂/θ − base as target: x̂ is the norm's own output, θ a slope for each channel."""
        originals = self._in_original(into.path)
        norm, channels = submodule(self.original, into.path), originals[0].output.shape[-1]
        kind = kind_at(norm, self.sites[into.path])
        if isinstance(kind, str):
            raise ModelError(f"The norm {into.path} cannot be calibrated: {kind}.")
        weight, bias = kind.gain_and_offset(norm, channels)

        def normalized(number: int) -> Tensor:
            return (originals[number].output.float() - bias) / weight.where(weight != 0, 1.0)

        inputs = [original.input for original in originals if original.input is not None]
        sigma = float(torch.cat([x.float().std(-1) for x in inputs]).mean())
        if into.base is None:
            return self._summed(layer, called, pauses, lambda number: [sigma * normalized(number)])
        learned, validation = self._summed(
            layer, called, pauses, lambda number: [normalized(number), self._bases(into, number)[1]]
        )
        slope = slopes(learned.with_own(layer.values[0])).clamp(*(bound / sigma for bound in _SLOPES))
        factors = torch.stack([1 / slope, -torch.ones_like(slope)])
        return learned.combined(factors), validation.combined(factors)

    def _summed(
        self,
        layer: LinearLayer,
        called: CalledModule,
        pauses: Sequence[Pause],
        targets: Callable[[int], Sequence[Tensor]],
    ) -> tuple[LayerSums, LayerSums]:
        """Sum over the tokens to learn from, and over those that decide."""
        both = LayerSums(), LayerSums()
        for numbers, sums in zip((range(self.n_learned), range(self.n_learned, len(pauses))), both, strict=True):
            waiting, tokens, size = list[tuple[Tensor, ...]](), 0, 0
            for number in numbers:
                batch_targets, first = targets(number), 0
                for h in layer.inputs_in_pieces(pauses[number].input, self.batches[number].valid_at(called.path)):
                    waiting.append((h, *(target[first : first + len(h)] for target in batch_targets)))
                    first, tokens, size = first + len(h), tokens + len(h), size + h.numel()
                    if tokens >= BLOCK or size >= MOST_NUMBERS:  # many small products take longer than few large ones
                        sums.add_joined(waiting)
                        waiting, tokens, size = [], 0, 0
            sums.add_joined(waiting)
        return both

    def _bases(self, into: NextNorm, number: int) -> tuple[Tensor, Tensor]:
        """Return the rows that the output of a layer is added to, in the original and in the swapped network."""
        assert into.base is not None  # noqa: S101 - checked by _target_of
        original = self._in_original(into.base)[number]
        if into.base_is_output:
            output = self._passes[number].outputs[into.base]
            return original.output, self._rows(self._called[into.base], number, output)
        assert original.input is not None  # noqa: S101 - the base is a norm
        return original.input, self._norm_inputs[into.base][number]


def _used(called: CalledModule) -> list[str]:
    """Return the paths whose inputs or outputs the fit of a module reads."""
    layer = None if called.modulated is None else called.modulated.layer
    norms = (None, None) if called.feeds is None else (called.feeds.path, called.feeds.base)
    return [called.path, *(path for path in (layer, *norms) if path is not None)]


def _error(function: PointwiseFunction, x: Tensor, y: Tensor) -> float:
    shift, bias = (None if p is None else p.detach().flatten() for p in (function.shift, function.bias))
    alpha, weight = function.alpha.detach().flatten(), function.weight.detach().flatten()
    output = pointwise(x, function.f, alpha, shift, weight, bias, behind=0).cpu().double()
    target = y.cpu().double()
    return float((output - target).norm() / target.norm())


def parameter_values(module: nn.Module) -> dict[str, Tensor]:
    return copies(dict(module.named_parameters()))


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


@torch.no_grad()
def put_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        module.get_parameter(name).copy_(value)
