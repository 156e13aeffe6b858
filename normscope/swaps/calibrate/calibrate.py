"""Calibration: a swapped network brought to what the original gives, in closed form and in one pass over the inputs.

Without gradients: where a norm stood, the layers beside it can take over much of what it did. Module by module, in the
order of calls and on the inputs that the network calibrated so far gives, each point-wise function is fitted to what
its norm gave, and each linear layer to what it gave in the original network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import UsageError, unknown
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel, Outputs, unpacked
from normscope.pairs.norms.formulas import gain_and_shift
from normscope.pairs.norms.trace import find_norms
from normscope.runtime.network import left_as_found
from normscope.runtime.progress import Progress, silent
from normscope.runtime.records import Record
from normscope.swaps.calibrate.closed_form import LayerSums, RefittedLayer, ridge, slopes
from normscope.swaps.calibrate.functions import channel_rows, least_squares
from normscope.swaps.calibrate.lockstep import Stop, all_to, stations, waiting_passes
from normscope.swaps.calibrate.neighbours import Neighbours, NextNorm, Station, neighbours_of, weight_of
from normscope.swaps.heal.lessons import Pool, output_errors
from normscope.swaps.kernels import eager
from normscope.swaps.kernels.parameters import Parameters
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import uncompiled

NORMS, NEIGHBOURS = "norms", "neighbours"
REFITS = (NORMS, NEIGHBOURS)
STAGE = "calibrate"
_MOST_TOKENS = 4096  # of a site, that α and s are searched on
_SLOPES = (0.1, 2.0)  # the range of a post-norm's slope, in units of 1 / mean σ
_LEAST_GAIN = 1e-3  # of the largest: through a smaller one, what a channel gives reaches nothing
# Of activations that all waiting passes hold at once; their number of inputs is cut to it.
MOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class CalibratedModule(Record):
    """What calibration did to one module: relative L2 of what it gives, on the inputs that decide.

    Attributes:
        path: of the module.
        is_norm: whether a point-wise function was fitted there; else a linear layer.
        before: with what was there, on the inputs that the network calibrated so far gives.
        after: with what was found; what was there stays where that is no better.
        penalty: λ of a layer, as a share of the mean square of a centred feature; None of a function, and where the
            layer stayed as it was.
    """

    path: str
    is_norm: bool
    before: float
    after: float
    penalty: float | None = None


@dataclass(frozen=True, repr=False)
class CalibrationReport(Record):
    """What a calibration did.

    Attributes:
        before: median relative L2 at the output with the start values, on the inputs that decide.
        after: the same after it.
        restored: whether the network was left with its start values, as the median had not fallen.
        modules: what was fitted, in the order of calls.
        left: why a linear layer beside a swapped norm was left as it is, by path.
        n_learned: samples that were learned from.
        n_judged: samples that decided on λ, and on what is kept.
        left_out: samples that did not fit into memory.
    """

    before: float
    after: float
    restored: bool
    modules: Sequence[CalibratedModule]
    left: Mapping[str, str]
    n_learned: int
    n_judged: int
    left_out: int

    def __repr__(self) -> str:
        return f"CalibrationReport: relative L2 {self.before:.3g} → {self.after:.3g}, {len(self.modules)} modules"


def calibrate(
    original: nn.Module | LoadedModel,
    swapped: nn.Module,
    learn: Iterable[Any] | None = None,
    *,
    outputs: Outputs | None = None,
    refit: str = NEIGHBOURS,
    progress: Progress = silent,
) -> CalibrationReport:
    """Fit a swapped network, in place and without gradients, to what the original gives.

    Each input passes once through both networks, and waits at each module until the module is fitted. A point-wise
    function gets the α, s, weight and bias with which it comes nearest to what its norm gave (least squares). A linear
    layer gets the weights, by ridge regression towards its own, with which it gives what it gave in the original; where
    its output is added to a residual stream, also what the stream has come to lack; where it is added to what a
    post-norm takes and a function stands there, what that function's straight part makes the norm's output of. A fourth
    of the inputs decides on λ and on what is kept. Functions without a weight and a bias for each channel get them.

    Args:
        original: the network: what :func:`normscope.load` returned, or any module; it stays as it is.
        swapped: a copy of the module with point-wise functions in the place of some norms (:func:`normscope.swap`).
        learn: batches, as :func:`normscope.capture` takes them; None for a loaded model's calibration, or where it has
            none its inputs.
        outputs: how to read what the networks return; by default as the loaded model says, or the first tensor.
        refit: ``neighbours``, the functions and the linear layers beside the swapped norms: those between which and a
            swapped norm no other norm of the residual stream is called; ``norms``, the functions alone.
        progress: called with the stage, what was done of it, and all of it.

    Returns:
        A :class:`CalibrationReport`. The result is never worse than the start values on the inputs that decide.

    Raises:
        UsageError: if no point-wise function stands in ``swapped``.
        DataError: if there are fewer than two samples.
        ModelError: if the order in which the network calls its modules depends on its input.

    >>> import copy, normscope
    >>> original = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    >>> x = torch.randn(64, 8, 4, generator=torch.Generator().manual_seed(0))
    >>> swapped = copy.deepcopy(original)
    >>> _ = normscope.swap(swapped, "tanh", normscope.capture(original, list(x)))
    >>> report = calibrate(original, swapped, list(x))
    >>> report.after < report.before, [module.path for module in report.modules]
    (True, ['1', '2'])
    """
    if refit not in REFITS:
        raise UsageError(unknown("refit", refit, REFITS))
    if isinstance(original, LoadedModel) and learn is None:
        learn = original.inputs if original.calibration is None else original.calibration
    module, learn, _, outputs = unpacked(original, learn, outputs=outputs)
    teacher, student = uncompiled(module), uncompiled(swapped)
    functions = {path: one for path, one in student.named_modules() if isinstance(one, PointwiseFunction)}
    if teacher is student or not functions:
        raise UsageError("Nothing was swapped: calibrate takes the original and a copy of it with norms replaced.")
    for one in functions.values():
        one.give_each_channel_its_own()
    pool = Pool.of(learn)
    first = pool.learned[0]
    near = neighbours_of(teacher, find_norms(teacher, first.first_sample()).sites, list(functions), first)
    learned = _that_fit(pool, near)
    left_out = pool.left_out + sum(len(batch.samples) for batch in pool.learned[len(learned) :])
    with left_as_found(teacher), left_as_found(student):
        before = _median(teacher, student, pool, outputs)
        start = {name: value.detach().clone() for name, value in student.named_parameters()}
        course = _Calibration(teacher, student, functions, [*learned, *pool.judged], len(learned))
        course.run([one for one in near.stations if one.is_norm or refit == NEIGHBOURS], progress)
        after = _median(teacher, student, pool, outputs)
        restored = not after < before
        if restored:
            _set(student, start)
    n_learned, n_judged = (sum(len(batch.samples) for batch in batches) for batches in (learned, pool.judged))
    return CalibrationReport(before, after, restored, course.found, near.left, n_learned, n_judged, left_out)


def _median(original: nn.Module, swapped: nn.Module, pool: Pool, outputs: Outputs) -> float:
    return float(output_errors(original, swapped, pool.judged, outputs).quantile(0.5, interpolation="higher"))


def _that_fit(pool: Pool, near: Neighbours) -> Sequence[Batch]:
    """The batches to learn from whose passes can wait at once."""
    left = MOST_BYTES - near.bytes_per_sample * sum(len(batch.samples) for batch in pool.judged)
    for number, batch in enumerate(pool.learned):
        left -= near.bytes_per_sample * len(batch.samples)
        if left < 0 and number:
            return pool.learned[:number]
    return pool.learned


class _Calibration:
    """Both networks in step, from module to module."""

    def __init__(
        self,
        original: nn.Module,
        swapped: nn.Module,
        functions: Mapping[str, PointwiseFunction],
        batches: Sequence[Batch],
        n_learned: int,
    ) -> None:
        self._original, self._swapped, self._functions = original, swapped, functions
        self._batches, self._n_learned = batches, n_learned
        self._of_original: dict[str, list[Stop]] = {}
        self._norm_inputs: dict[str, list[Tensor]] = {}  # of the swapped network
        self.found: list[CalibratedModule] = []

    def run(self, way: Sequence[Station], progress: Progress) -> None:
        """Go through all stations."""
        paths = [one.path for one in way]
        self._ahead = iter(paths)
        with (
            stations(self._original, paths, behind=True),
            stations(self._swapped, paths, behind=False),
            waiting_passes(self._original, self._batches) as self._originals,
            waiting_passes(self._swapped, self._batches) as self._passes,
        ):
            for number, station in enumerate(way, 1):
                wanted, there = self._wanted(station.path), all_to(self._passes, station.path)
                if station.is_norm:
                    self._at_norm(station.path, there, wanted)
                else:
                    self._at_layer(station, there, wanted)
                    del self._of_original[station.path]
                progress(STAGE, number, len(way))

    def _wanted(self, path: str) -> list[Stop]:
        """What the original does at a station; it goes ahead of the swapped network where that is asked for early."""
        while path not in self._of_original:
            there = next(self._ahead)
            self._of_original[there] = [stop.copied() for stop in all_to(self._originals, there)]
        return self._of_original[path]

    def _at_norm(self, path: str, there: Sequence[Stop], wanted: Sequence[Stop]) -> None:
        self._norm_inputs[path] = [stop.input.clone() for stop in there]
        function = self._functions.get(path)
        if function is None or function.activated:
            return
        pairs: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
        for number, (mine, theirs) in enumerate(zip(there, wanted, strict=True)):
            valid = self._batches[number].valid_at(path)
            x, y = (channel_rows(function, value, valid).float() for value in (mine.input, theirs.given))
            pairs[number >= self._n_learned].append((x, y))
        (x, y), judged = (tuple(torch.cat(part) for part in zip(*of_part, strict=True)) for of_part in pairs)
        before, start = _error(function, *judged), {name: one.clone() for name, one in function.named_parameters()}
        every = max(1, -(-len(x) // _MOST_TOKENS))
        _set(function, least_squares(function, x[::every].double().cpu(), y[::every].double().cpu()))
        after = _error(function, *judged)
        if not after < before:
            _set(function, start)
        self.found.append(CalibratedModule(path, True, before, min(before, after)))

    def _at_layer(self, station: Station, there: Sequence[Stop], wanted: Sequence[Stop]) -> None:
        if all(torch.equal(mine.input, theirs.input) for mine, theirs in zip(there, wanted, strict=True)):
            return  # nothing that was swapped comes before it
        layer, into = self._swapped.get_submodule(station.path), station.feeds
        if into is not None and into.base not in self._norm_inputs:
            into = None
        into_function = into is not None and into.of_output and into.path in self._functions
        learned, judged = LayerSums(), LayerSums()
        for number, (mine, theirs) in enumerate(zip(there, wanted, strict=True)):
            rows = _rows_of(self._batches[number].valid_at(station.path))
            targets = [rows(theirs.given)]
            if into is not None and into_function:
                targets = [self._normalized(into.path, number, rows), rows(self._base(into, number))]
            elif into is not None:
                short_of = rows(self._base_in_original(into, number)) - rows(self._base(into, number))
                targets = [into.gain.to(short_of) * targets[0] + short_of]
            (judged if number >= self._n_learned else learned).add(rows(mine.input), targets)
        weight, bias = weight_of(layer).detach().to("cpu", torch.float64), getattr(layer, "bias", None)
        if into is not None and into_function:
            slope = slopes(learned.with_own(weight))
            slope = slope.clamp(*(bound / self._mean_sigma(into.path) for bound in _SLOPES))
            factors = torch.stack([1 / slope, -torch.ones_like(slope)])
            learned, judged = learned.combined(factors), judged.combined(factors)
        gain = torch.ones(len(weight), dtype=torch.float64) if into is None or into_function else into.gain
        own_bias = None if bias is None else gain * bias.detach().to("cpu", torch.float64)
        refitted = ridge(learned, judged, gain[:, None] * weight, own_bias)
        _put(refitted, layer, gain)
        self.found.append(CalibratedModule(station.path, False, refitted.before, refitted.after, refitted.penalty))

    def _base(self, into: NextNorm, number: int) -> Tensor:
        """What a layer's output is added to, in the swapped network."""
        return self._passes[number].outputs[into.base] if into.of_output else self._norm_inputs[into.base][number]

    def _base_in_original(self, into: NextNorm, number: int) -> Tensor:
        stop = self._of_original[into.base][number]
        return stop.given if into.of_output else stop.input

    def _normalized(self, path: str, number: int, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """What a norm of the original gives, before its weight and bias."""
        weight, bias = gain_and_shift(self._original.get_submodule(path))
        y = rows(self._wanted(path)[number].given).float()
        y = y if bias is None else y - bias
        return y if weight is None else y / weight.where(weight != 0, 1.0)

    def _mean_sigma(self, path: str) -> float:
        every = [stop.input.flatten(0, -2).std(-1) for stop in self._of_original[path]]
        return float(torch.cat(every).mean())


def _rows_of(valid: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Bring values whose last axis numbers the channels to ``(tokens, channels)``, without padding."""

    def rows(value: Tensor) -> Tensor:
        if valid is not None and value.shape[:2] == valid.shape:
            value = value[valid.to(value.device)]
        return value.reshape(-1, value.shape[-1])

    return rows


def _error(function: PointwiseFunction, x: Tensor, y: Tensor) -> float:
    def flat(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter.detach().flatten()

    alpha, weight = function.alpha.detach().flatten(), function.weight.detach().flatten()
    parameters = Parameters(alpha, flat(function.shift), weight, flat(function.bias))
    formula = function.curve.function if function.table is None else function.table
    given, wanted = eager.pointwise(x, formula, parameters, 0).cpu().double(), y.cpu().double()
    return float((given - wanted).norm() / wanted.norm())


def _put(found: RefittedLayer, layer: nn.Module, gain: Tensor) -> None:
    """Give a layer the weights that were found for gain · layer; channels that reach nothing keep their own."""
    if found.penalty is None:
        return
    reached = gain.abs() >= _LEAST_GAIN * gain.abs().max()
    with torch.no_grad():
        weight = weight_of(layer)
        weight[reached] = (found.weight / gain[:, None])[reached].to(weight)
        if found.bias is not None:
            bias = layer.get_parameter("bias")
            bias[reached.to(bias.device)] = (found.bias / gain)[reached].to(bias)


@torch.no_grad()
def _set(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        module.get_parameter(name).copy_(value)
