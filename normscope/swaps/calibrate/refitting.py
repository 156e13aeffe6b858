"""Both networks in step, from module to module, each fitted where all passes wait at it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.inputs.batch import Batch
from normscope.pairs.norms.recognition import kind_at
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.trace import input_of
from normscope.runtime.network import run
from normscope.runtime.progress import Progress
from normscope.runtime.records import Record
from normscope.swaps.calibrate.closed_form import BLOCK, LayerSums, RefittedLayer, least_squares, ridge, slopes
from normscope.swaps.calibrate.neighbours import (
    MOST_NUMBERS,
    CalledModule,
    LinearLayer,
    Modulation,
    NextNorm,
    best_for_each_sample,
    rows,
)
from normscope.swaps.kernels import eager
from normscope.swaps.kernels.eager import Parameters
from normscope.swaps.pointwise import PointwiseFunction

STAGE = "calibrate"
_MOST_TOKENS = 4096  # of a site, that α and s are searched on
_SLOPES = (0.1, 2.0)  # the range of a post-norm's slope, in units of 1 / mean σ
_LEAST_GAIN = 1e-3  # of the largest: through a smaller one, what a channel gives reaches nothing


@dataclass(frozen=True)
class CalibratedModule(Record):
    """Result of calibrating one module: relative L2 of its output, on the inputs that decide.

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
    """Input and output of a module of the original for one batch, as rows without padding."""

    input: Tensor | None
    taken: Tensor
    given: Tensor


@dataclass(frozen=True)
class _SharedSums:
    """Sums over the inputs of the layer before, to which a layer of the same inputs adds its targets alone."""

    kind: type[nn.Module] | None  # None of a convolution, which shares nothing
    inputs: Sequence[Tensor]
    versions: Sequence[int]
    sums: Sequence[LayerSums]

    @classmethod
    def of(cls, layer: LinearLayer, inputs: Sequence[Tensor], before: _SharedSums | None) -> _SharedSums:
        """Begin sums; queries, keys and values are often computed from one tensor, unless changed in place."""
        kind = type(layer.module) if layer.channel_axis == -1 else None
        versions = [0 if x.is_inference() else x._version for x in inputs]
        same = before is not None and before.kind is kind is not None and before.versions == versions
        if before is None or not same or any(x is not y for x, y in zip(inputs, before.inputs, strict=True)):
            return cls(kind, inputs, versions, (LayerSums(), LayerSums()))
        sums = [LayerSums(each.count, each.features, each.gram, share_inputs=True) for each in before.sums]
        return cls(kind, inputs, versions, sums)


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
        self._functions = {
            path: function for path, function in swapped.named_modules() if isinstance(function, PointwiseFunction)
        }
        self._batches, self._n_learned = batches, n_learned
        self._of_original: dict[str, list[_Passed]] = {}
        self._norm_inputs: dict[str, list[Tensor]] = {}  # of the swapped network, as rows
        self._conditions: dict[str, list[Tensor]] = {}  # what layers that modulate take, in the swapped network
        self._shared: _SharedSums | None = None
        self.modules: list[CalibratedModule] = []

    def run(self, way: Sequence[CalledModule], progress: Progress) -> None:
        """Go through all modules that something is done at, and no further.

        Raises:
            ModelError: if the order in which the network calls its modules depends on its input.
        """
        fitted = [called for called in way if not called.is_norm or called.path in self._functions]
        used = {path for called in fitted for path in _used(called)}
        way = [called for called in way if called.path in used]
        paths = [called.path for called in way]
        self._way = {called.path: called for called in way}
        self._ahead = iter(paths)
        last_use = {path: number for number, called in enumerate(way) for path in _used(called)}
        bases = {called.feeds.base for called in way if called.feeds is not None and called.feeds.of_output}
        self._modulating = {called.modulated.layer for called in way if called.modulated is not None}
        with (
            paused_at(self._original, paths, behind=True),
            paused_at(
                self._swapped, paths, behind=False, kept=[path for path in paths if path in bases | self._modulating]
            ),
            waiting_passes(self._original, self._batches) as self._originals,
            waiting_passes(self._swapped, self._batches) as self._passes,
        ):
            progress(STAGE, 0, len(way))
            for number, called in enumerate(way):
                originals, there = self._in_original(called.path), all_to(self._passes, called.path)
                if called.is_norm:
                    self._at_norm(called, there, originals)
                else:
                    self._at_layer(called, there, originals)
                for path in [path for path in self._of_original if last_use[path] <= number]:
                    self._forget(path)
                progress(STAGE, number + 1, len(way))

    def _forget(self, path: str) -> None:
        del self._of_original[path]
        self._norm_inputs.pop(path, None)
        self._conditions.pop(path, None)
        for waiting in self._passes:
            waiting.outputs.pop(path, None)

    def _in_original(self, path: str) -> list[_Passed]:
        """Inputs and outputs of the original network at a module; runs it forward to there if needed."""
        while path not in self._of_original:
            there = self._way[next(self._ahead)]
            stops = all_to(self._originals, there.path)
            self._of_original[there.path] = [self._passed(there, number, stop) for number, stop in enumerate(stops)]
        return self._of_original[path]

    def _passed(self, called: CalledModule, number: int, stop: PausedPass) -> _Passed:
        valid = self._batches[number].valid_at(called.path)
        if called.is_norm:
            return _Passed(None, self._rows(called, number, stop.input), self._rows(called, number, stop.output))
        # A layer whose first batch comes as in the original has nothing swapped before it.
        layer = self._layer(self._original, called)
        given = layer.outputs(stop.input, stop.output, valid)
        of = stop.output if isinstance(stop.output, Tensor) else stop.input
        return _Passed(stop.input.clone() if not number else None, given.new_zeros(0), _own(given, of))

    def _rows(self, called: CalledModule, number: int, value: Tensor | None) -> Tensor:
        """Copy the input or output of a norm, ``(tokens, channels)``: the network may change its tensors."""
        if value is None:
            raise ModelError(f"The norm {called.path} gave no tensor to compare with.")
        turned = value.movedim(called.channel_axis, -1) if called.channel_axis != -1 else value
        return _own(rows(turned, self._batches[number].valid_at(called.path)), value)

    def _layer(self, network: nn.Module, called: CalledModule) -> LinearLayer:
        layer = LinearLayer.of(network.get_submodule(called.path))
        if layer is None:
            raise ModelError(f"{called.path} of the swapped network is no layer of the kind that the original has.")
        return layer

    def _at_norm(self, called: CalledModule, there: Sequence[PausedPass], originals: Sequence[_Passed]) -> None:
        path = called.path
        self._norm_inputs[path] = [self._rows(called, number, stop.input) for number, stop in enumerate(there)]
        function = self._functions.get(path)
        if function is None or function.activated:
            return
        pairs = list(zip(self._norm_inputs[path], (passed.given for passed in originals), strict=True))
        channels = function.weight.numel()
        (x, y), judged = (
            tuple(torch.cat(part).float().reshape(-1, channels) for part in zip(*of_part, strict=True))
            for of_part in (pairs[: self._n_learned], pairs[self._n_learned :])
        )
        before, start = _error(function, *judged), {name: value.clone() for name, value in function.named_parameters()}
        every = max(1, -(-len(x) // _MOST_TOKENS))
        put_parameters(function, least_squares(function, x[::every].double().cpu(), y[::every].double().cpu()))
        after = _error(function, *judged)
        if not after < before:
            put_parameters(function, start)
        self.modules.append(CalibratedModule(path, True, before, min(before, after)))
        if called.modulated is None or called.modulated.layer not in self._conditions:
            return
        if all(batch.valid_at(path) is None for batch in self._batches):  # a batch's samples have as many tokens each
            self._modulate(function, called, called.modulated, there)

    @torch.no_grad()
    def _modulate(
        self, function: PointwiseFunction, called: CalledModule, modulated: Modulation, there: Sequence[PausedPass]
    ) -> None:
        """Fit the layer that modulates the output of a function, and update its outputs in the passes."""
        layer, size = self._layer(self._swapped, self._way[modulated.layer]), function.weight.numel()
        channels, conditions = modulated.channels(size), self._conditions[modulated.layer]
        learned, judged = LayerSums(), LayerSums()
        for number, stop in enumerate(there):
            present = self._in_original(modulated.layer)[number].given[:, channels.to(stop.input.device)]
            scale, shift = present.chunk(2, dim=1)
            y = self._in_original(called.path)[number].given.reshape(len(scale), -1, size)
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
        for waiting, condition in zip(self._passes, conditions, strict=True):
            output = waiting.outputs[modulated.layer]  # its parts are views, which nothing has read yet
            output[:, changed.to(output.device)] = layer.module.forward(condition)[:, changed.to(output.device)]

    def _at_layer(self, called: CalledModule, there: Sequence[PausedPass], originals: Sequence[_Passed]) -> None:
        if called.path in self._modulating:
            self._conditions[called.path] = [stop.input.clone() for stop in there]
        first = originals[0].input
        if first is not None and torch.equal(there[0].input, first):
            return  # nothing that was swapped comes before it
        layer, into = self._layer(self._swapped, called), self._target_of(called)
        own, offset = layer.matrix.detach().to("cpu", torch.float64), layer.offset
        gain = torch.ones(len(own), dtype=torch.float64)
        if into is None:
            sums = self._summed(layer, called, there, lambda number: [originals[number].given])
        elif self._into_function(into):
            sums = self._towards_norm(layer, called, into, there)
        else:
            gain = into.gain

            def kept_up(number: int) -> list[Tensor]:
                """Add the error of the residual stream so far to the layer's output in the original."""
                short_of = self._base_in_original(into, number) - self._base(into, number)
                return [gain.to(short_of) * originals[number].given + short_of]

            sums = self._summed(layer, called, there, kept_up)
        own_bias = None if offset is None else gain * offset.detach().to("cpu", torch.float64)
        refitted = ridge(*sums, gain[:, None] * own, own_bias)
        _put(refitted, layer, gain)
        self.modules.append(CalibratedModule(called.path, False, refitted.before, refitted.after, refitted.penalty))

    def _target_of(self, called: CalledModule) -> NextNorm | None:
        """Return the norm that a layer's output goes into, if that is a better target than the original's output."""
        into = called.feeds
        if into is None or (into.base is None and not self._into_function(into)):
            return None
        return into if into.base is None or into.base in self._norm_inputs else None

    def _into_function(self, into: NextNorm) -> bool:
        function = self._functions.get(into.path)
        return into.of_output and function is not None and not function.activated

    def _towards_norm(
        self, layer: LinearLayer, called: CalledModule, into: NextNorm, there: Sequence[PausedPass]
    ) -> tuple[LayerSums, LayerSums]:
        """Sums with x̂/θ less the base for a target: with the norm's own output x̂ at a slope θ for each channel."""
        normalized = self._normalized(into.path)
        sigma = float(torch.cat([passed.taken.float().std(-1) for passed in self._in_original(into.path)]).mean())
        if into.base is None:
            return self._summed(layer, called, there, lambda number: [sigma * normalized(number)])
        learned, judged = self._summed(
            layer, called, there, lambda number: [normalized(number), self._base(into, number)]
        )
        slope = slopes(learned.with_own(layer.matrix.detach().to("cpu", torch.float64)))
        slope = slope.clamp(*(bound / sigma for bound in _SLOPES))
        factors = torch.stack([1 / slope, -torch.ones_like(slope)])
        return learned.combined(factors), judged.combined(factors)

    def _summed(
        self,
        layer: LinearLayer,
        called: CalledModule,
        there: Sequence[PausedPass],
        targets: Callable[[int], Sequence[Tensor]],
    ) -> tuple[LayerSums, LayerSums]:
        """Sums over the tokens to learn from, and over those that decide; products of the same inputs are made once."""
        self._shared = _SharedSums.of(layer, [stop.input for stop in there], self._shared)
        learned, judged = self._shared.sums
        for numbers, sums in ((range(self._n_learned), learned), (range(self._n_learned, len(there)), judged)):
            waiting, tokens, size = list[tuple[Tensor, ...]](), 0, 0
            for number in numbers:
                of_batch, first = targets(number), 0
                for h in layer.inputs_in_pieces(there[number].input, self._batches[number].valid_at(called.path)):
                    waiting.append((h, *(target[first : first + len(h)] for target in of_batch)))
                    first, tokens, size = first + len(h), tokens + len(h), size + h.numel()
                    if tokens >= BLOCK or size >= MOST_NUMBERS:  # many small products take longer than few large ones
                        _add(waiting, sums)
                        tokens = size = 0
            _add(waiting, sums)
        return learned, judged

    def _base(self, into: NextNorm, number: int) -> Tensor:
        """Rows that the output of a layer is added to, in the swapped network."""
        assert into.base is not None  # noqa: S101 - as _target_of has seen
        if not into.of_output:
            return self._norm_inputs[into.base][number]
        return self._rows(self._way[into.base], number, self._passes[number].outputs[into.base])

    def _base_in_original(self, into: NextNorm, number: int) -> Tensor:
        assert into.base is not None  # noqa: S101 - as _target_of has seen
        passed = self._in_original(into.base)[number]
        return passed.given if into.of_output else passed.taken

    def _normalized(self, path: str) -> Callable[[int], Tensor]:
        """Normalized output of the original norm for a batch, with weight and bias undone."""
        norm, originals = self._original.get_submodule(path), self._in_original(path)
        kind = kind_at(norm, self._sites[path])
        if isinstance(kind, str):
            raise ModelError(f"The norm {path} cannot be calibrated: {kind}.")
        gain, offset = kind.gain_and_offset(norm, originals[0].given.shape[-1])
        gain = gain.where(gain != 0, 1.0)
        return lambda number: (originals[number].given.float() - offset) / gain


def _used(called: CalledModule) -> list[str]:
    """Return the paths whose inputs or outputs the fit of a module reads."""
    into = called.feeds
    layer = None if called.modulated is None else called.modulated.layer
    others = [layer, *((None, None) if into is None else (into.path, into.base))]
    return [called.path, *(path for path in others if path is not None)]


def _own(value: Tensor, of: Tensor) -> Tensor:
    """Return a tensor that shares no memory with the one that it was made of."""
    return value.clone() if value.untyped_storage().data_ptr() == of.untyped_storage().data_ptr() else value


def _error(function: PointwiseFunction, x: Tensor, y: Tensor) -> float:
    def flat(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter.detach().flatten()

    alpha, weight = function.alpha.detach().flatten(), function.weight.detach().flatten()
    parameters = Parameters(alpha, flat(function.shift), weight, flat(function.bias))
    formula = function.curve.function if function.table is None else function.table
    output, target = eager.pointwise(x, formula, parameters, 0).cpu().double(), y.cpu().double()
    return float((output - target).norm() / target.norm())


def _add(waiting: list[tuple[Tensor, ...]], sums: LayerSums) -> None:
    """Add inputs and targets to sums, and leave none waiting."""
    if waiting:
        h, *targets = (torch.cat(part) for part in zip(*waiting, strict=True))
        sums.add(h, targets)
        waiting.clear()


def _put(refitted: RefittedLayer, layer: LinearLayer, gain: Tensor) -> None:
    """Give a layer the weights fitted to gain · layer; channels that reach nothing keep their own."""
    if refitted.penalty is None:
        return
    reached = gain.abs() >= _LEAST_GAIN * gain.abs().max()
    _put_rows(layer, refitted.weight / gain[:, None], None if refitted.bias is None else refitted.bias / gain, reached)


def _put_rows(layer: LinearLayer, matrix: Tensor, offset: Tensor | None, channels: Tensor) -> None:
    """Give some channels of a layer weights and biases from the CPU, in float64."""
    device = layer.matrix.device
    there = None if offset is None else offset.float().to(device)
    layer.put(matrix.float().to(device), there, channels.to(device))


@torch.no_grad()
def put_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values into a module's parameters, by name."""
    for name, value in values.items():
        module.get_parameter(name).copy_(value)


@dataclass(frozen=True)
class PausedPass:
    """Forward pass that waits at a module.

    Attributes:
        path: of the module.
        input: what the module is called with.
        output: what it gave; None in front of it.
    """

    path: str
    input: Tensor
    output: Tensor | None = None


class _Abandoned(BaseException):
    """Raised within a pass that nobody goes on with; a BaseException, so that no network catches it."""


class WaitingPass:
    """One forward pass in a thread of its own. It runs only while :meth:`go_on` waits for it.

    Args:
        network: to run; :func:`paused_at` makes it stop.
        batch: what it is run on.

    >>> layer = nn.Linear(2, 2)
    >>> with paused_at(layer, [""], behind=False):
    ...     waiting = WaitingPass(layer, Batch((torch.zeros(1, 2),)))
    ...     stop = waiting.go_on()
    ...     _ = layer.bias.data.fill_(3.0)
    ...     _ = waiting.go_on()
    >>> stop.input, waiting.result
    (tensor([[0., 0.]]), tensor([[3., 3.]]))
    """

    def __init__(self, network: nn.Module, batch: Batch) -> None:
        self.network, self.batch = network, batch
        self.result: Any = None
        self.outputs: dict[str, Tensor] = {}  # of modules that :func:`paused_at` keeps
        self._stop: PausedPass | None = None
        self._error: BaseException | None = None
        self._go, self._here = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def go_on(self) -> PausedPass | None:
        """Run to the next module; None where the pass is at its end.

        Raises:
            NormscopeError: if the network fails.
        """
        if self._thread.is_alive():
            self._go.release()
        else:
            self._thread.start()
        self._here.acquire()
        if self._error is not None:
            raise self._error
        return self._stop

    def wait_at(self, stop: PausedPass) -> None:
        """Wait, in the pass's own thread, until somebody goes on with it."""
        self._stop = stop
        self._here.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End the pass where it waits."""
        if self._thread.is_alive():
            self._abandoned = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        _here.waiting_pass = self
        try:
            with torch.no_grad():
                self.result = run(self.network, self.batch)
        except _Abandoned:
            pass
        except BaseException as error:  # raised where the pass is waited for
            self._error = error
        self._stop = None
        self._here.release()


_here = threading.local()


def _of_this_thread() -> WaitingPass | None:
    return getattr(_here, "waiting_pass", None)


@contextlib.contextmanager
def paused_at(network: nn.Module, paths: Sequence[str], *, behind: bool, kept: Sequence[str] = ()) -> Iterator[None]:
    """Let every :class:`WaitingPass` of a network wait at some modules.

    Args:
        network: which is run by nobody else meanwhile.
        paths: of the modules.
        behind: whether it waits behind them; else in front of them.
        kept: those whose outputs a pass keeps.
    """
    with contextlib.ExitStack() as hooks:
        for path in paths:
            module = network.get_submodule(path)
            register = module.register_forward_hook if behind else module.register_forward_pre_hook
            hooks.callback(register(_pausing(path), with_kwargs=True).remove)
        for path in kept:
            hooks.callback(network.get_submodule(path).register_forward_hook(_keep_output(path)).remove)
        yield


def _pausing(path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor | None = None) -> None:
        waiting, given = _of_this_thread(), input_of(args, kwargs)
        if waiting is not None and given is not None:
            waiting.wait_at(PausedPass(path, given, output))

    return hook


def _keep_output(path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        waiting = _of_this_thread()
        if waiting is not None:
            waiting.outputs[path] = output

    return hook


@contextlib.contextmanager
def waiting_passes(network: nn.Module, batches: Sequence[Batch]) -> Iterator[list[WaitingPass]]:
    """Begin a pass of each batch, and leave none behind."""
    passes = [WaitingPass(network, batch) for batch in batches]
    try:
        yield passes
    finally:
        for waiting in passes:
            waiting.abandon()


def all_to(passes: Sequence[WaitingPass], path: str) -> list[PausedPass]:
    """Let every pass go on to its next module, which has to be this one.

    Raises:
        ModelError: if a pass comes to another module, as the order of calls depends on the input.
    """
    stops = []
    for number, waiting in enumerate(passes):
        stop = waiting.go_on()
        if stop is None or stop.path != path:
            there = "the end" if stop is None else stop.path
            raise ModelError(
                f"Batch {number} comes to {there} where the first one came to {path}: the network calls its modules in "
                "an order that depends on its input, so that it cannot be calibrated site by site."
            )
        stops.append(stop)
    return stops
