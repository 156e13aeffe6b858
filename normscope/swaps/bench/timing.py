"""Timings of a norm alone and of the whole network on CPU and CUDA, and verdicts relative to the native norm."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as clock  # synchronizes with CUDA

from normscope.curves.expressions import split_names
from normscope.errors import ModelError, first_line
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Outputs
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.trace import NormReport
from normscope.runtime.launches import TRITON
from normscope.runtime.network import call
from normscope.swaps.kernels import choice
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import HOOKS, PRE_HOOKS, Swap, module_at, replacements
from normscope.swaps.reports import (
    BESIDE,
    COPY,
    FASTER,
    FUSED,
    INCONCLUSIVE,
    NATIVE,
    NOT_RUN,
    PASSES,
    SLOWER,
    TOO_FEW,
    Case,
    Passes,
    Timing,
    Way,
)
from normscope.swaps.start import RMS_NORM

IDENTITY = "identity"
AT_LEAST, NORM_AT_LEAST, AT_MOST = 1, 4, 10  # samples: of the network, of the norm alone, of either
_COMPILED_PASSES = 10
# Three samples that all lie below three others are one draw in twenty where nothing differs; two are one in six.
LEAST_SAMPLES = 3
_BLOCK_SECONDS = 0.02  # per sample of a short call: a hundred times the overhead of clock and loop

Run = Callable[[], object]
Sampler = Callable[[], list[float]]
Only = Callable[[Case], bool]
Name = TypeVar("Name", bound=Hashable)
BufferSet = TypeVar("BufferSet")


def blocks(run: Run) -> list[float]:
    """Time a short call with torch.utils.benchmark, on all threads: seconds per call, one sample per block."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return list(timer.blocked_autorange(min_run_time=_BLOCK_SECONDS).times)


def repeated(run: Run, number: int = 1, clock: Callable[[], float] = clock) -> float:
    """Return the seconds of ``number`` calls together, without warm-up.

    >>> repeated(lambda: None, 3, iter([3.0, 5.0]).__next__)
    2.0
    """
    begun = clock()
    for _ in range(number):
        run()
    return clock() - begun


def in_turns(
    samplers: Mapping[Name, Sampler],
    *,
    at_least: int,
    at_most: int,
    until: float = math.inf,
    settled: Callable[[Mapping[Name, Sequence[float]]], bool] = lambda samples: False,
    now: Callable[[], float] = time.monotonic,
) -> dict[Name, list[float]]:
    """Sample in rounds, each of which begins with another sampler; return the samples by name.

    After ``at_least`` rounds, none begins if the samples are ``settled``, or if it would end after ``until`` on the
    clock ``now``, taking as long as the longest.

    >>> in_turns({"a": lambda: [1.0], "b": lambda: [2.0, 3.0]}, at_least=2, at_most=2)
    {'a': [1.0, 1.0], 'b': [2.0, 3.0, 2.0, 3.0]}
    """
    names = list(samplers)
    samples: dict[Name, list[float]] = {name: [] for name in names}
    longest = 0.0
    for number in range(at_most if names else 0):
        begun = now()
        if number >= at_least and (begun + longest > until or settled(samples)):
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name] += samplers[name]()
        longest = max(longest, now() - begun)
    return samples


def flushed(run: Run, milliseconds: int = 100) -> list[float]:
    """Time calls by triton.testing.do_bench, which clears the L2 cache before each: seconds, one sample per call.

    All calls together take about ``milliseconds``, after a warm-up of a quarter of that.
    """
    from triton.testing import do_bench

    times = do_bench(run, warmup=milliseconds // 4, rep=milliseconds, return_mode="all")
    return [time / 1e3 for time in times]


def sets_beyond_cache(nbytes: int, cache: int) -> int:
    """Return the number of buffer sets of ``nbytes`` that are together larger than four times the cache; at least 4.

    >>> sets_beyond_cache(50_000_000, 60_000_000), sets_beyond_cache(1_000_000_000, 60_000_000)
    (5, 4)
    """
    return max(4, math.floor(4 * cache / nbytes) + 1)


def replayed(run: Callable[[BufferSet], object], sets: Sequence[BufferSet]) -> list[float]:
    """Time replays of a CUDA graph of calls, which include no launch from Python: seconds per call of each replay.

    Each call takes the next of the buffer sets, and its result is kept until that set's next turn, so that neither
    inputs nor outputs are still in the cache if there are as many as :func:`sets_beyond_cache` returns.
    """
    from triton.testing import do_bench_cudagraph

    turns, kept = itertools.cycle(sets), deque[object](maxlen=len(sets))
    times = do_bench_cudagraph(lambda: kept.append(run(next(turns))), return_mode="all")
    return [time / 1e3 for time in times]


def bytes_moved(passes: Passes, elements: int, itemsize: int) -> int:
    """Return the least bytes that a norm moves: x and y forward, x, y, dy and dx forward + backward, each once.

    >>> bytes_moved("forward", 1000, 4), bytes_moved("forward + backward", 1000, 2)
    (8000, 8000)
    """
    return (2 if passes == "forward" else 4) * elements * itemsize


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Return minimum, median, p20 and p80 of one sample or more; the interval from p20 to p80 of a few spans all.

    >>> quantiles([3.0, 1.0, 2.0])
    {'minimum': 1.0, 'median': 2.0, 'p20': 1.0, 'p80': 3.0}
    """
    ordered, last = sorted(samples), len(samples) - 1
    median = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    p20, p80 = ordered[math.floor(0.2 * last)], ordered[math.ceil(0.8 * last)]
    return {"minimum": ordered[0], "median": median, "p20": p20, "p80": p80}


def judged(rows: Sequence[Timing]) -> list[Timing]:
    """Add quantiles and GB/s, and compare each row with the native norm and the copy of the same run."""
    rows = [_measured(row) for row in rows]
    copies = {(row.dtype, row.timer): row.gb_per_s for row in rows if row.variant == COPY}
    natives = {_setting(row, row.way): row for row in rows if row.variant == NATIVE}
    result = []
    for row in rows:
        copy, native = copies.get((row.dtype, row.timer)), natives.get(_setting(row, BESIDE.get(row.way, row.way)))
        if row.gb_per_s is not None and copy is not None:
            row = replace(row, share_of_copy=row.gb_per_s / copy)
        if row.median is not None and row.variant not in (NATIVE, COPY) and native and native.median is not None:
            row = replace(row, ratio=row.median / native.median, verdict=_verdict(row, native))
        result.append(row)
    return result


def settled(rows: Sequence[Timing]) -> bool:
    """True if further samples are unlikely to change a verdict: each row is faster or slower than the native norm."""
    return not any(row.verdict in (INCONCLUSIVE, TOO_FEW) for row in judged(rows))


def _measured(row: Timing) -> Timing:
    if not row.samples:
        return replace(row, verdict=NOT_RUN)
    times = quantiles(row.samples)
    # The identity is an empty CUDA graph, whose replays a clock may not see.
    rate = None if row.nbytes is None or times["median"] == 0 else row.nbytes / times["median"] / 1e9
    return replace(row, gb_per_s=rate, **times)  # type: ignore[arg-type]


def _setting(case: Case, way: str) -> tuple[str, ...]:
    return way, case.scope, case.passes, case.dtype, case.timer


def _verdict(row: Timing, native: Timing) -> str:
    if _below(row, native):
        word = FASTER
    elif _below(native, row):
        word = SLOWER
    else:
        return INCONCLUSIVE
    return word if min(len(row.samples), len(native.samples)) >= LEAST_SAMPLES else TOO_FEW


def _below(left: Timing, right: Timing) -> bool:
    """True if minimum and interval are below, and with the interval the median."""
    return bool(left.minimum < right.minimum and left.p80 < right.p20)  # type: ignore[operator]


def every(case: Case) -> bool:
    """Select each case."""
    return True


@dataclass(frozen=True)
class Variant:
    """Replacements of the norms: ``native`` for the norms themselves, ``rmsnorm``, ``identity``, or a curve."""

    name: str
    modules: dict[str, nn.Module]  # by module path; none for ``native``
    note: str = ""  # the norms that it cannot replace, and why


def variants(model: nn.Module, sites: Sequence[NormSite], curves: str | Sequence[str]) -> list[Variant]:
    """Make replacements on the norms' device and in their dtype: native, rmsnorm, identity and the curves.

    The network stays as it is; ``curves`` are names, or names separated by commas.

    Raises:
        UsageError: if there is no such curve, or if it has to be fitted (``free``, ``best``).
    """
    asked = split_names(curves) if isinstance(curves, str) else curves
    names = dict.fromkeys((RMS_NORM, IDENTITY, *(name.strip().lower() for name in asked)))
    names.pop(NATIVE, None)
    result = [Variant(NATIVE, {})]
    for name in names:
        modules: dict[str, nn.Module] = {}
        reasons: list[str] = []
        for site in sites:
            try:
                modules |= replacements(model, name, [site], init="paper")
            except ModelError as error:
                reasons.append(str(error))
        note = f"{len(reasons)} of {len(sites)} norms left as they are: {reasons[0]}" if reasons else ""
        result.append(Variant(name, modules, note))
    return result


def compiled(module: nn.Module) -> nn.Module:
    """Compile a module for the one shape that it is timed with."""
    return cast(nn.Module, torch.compile(module, dynamic=False))  # typed as any callable, whatever it was made of


def fused(name: str, module: nn.Module, shape: Sequence[int], passes: Passes) -> dict[str, nn.Module]:
    """Return modules that compute a replacement in one kernel, by name.

    The replacement itself, if :func:`has_kernel`; and Liger's DyT (github.com/linkedin/Liger-Kernel) on CUDA, if it is
    installed.
    """
    modules = {name: module} if has_kernel(module, shape, passes) else {}
    if not (isinstance(module, PointwiseFunction) and module.curve.name == "tanh" and find_spec("liger_kernel")):
        return modules
    if not module.weight.is_cuda or module.channel_axis != -1 or module.weight.ndim != 1 or module.shift is not None:
        return modules
    layer: nn.Module = import_module("liger_kernel.transformers.dyt").LigerDyT(
        module.weight.numel(), beta=module.bias is not None, init_alpha=module.alpha.detach().item()
    )
    return {**modules, f"{name}, Liger": layer.to(module.weight.device, module.weight.dtype)}


def has_kernel(module: nn.Module, shape: Sequence[int], passes: Passes, way: Way = "fused") -> bool:
    """True if normscope's kernels compute a module on its device, in its dtype, for an input of this shape.

    The CPU's loop computes the forward pass alone, and not under torch.compile.

    Raises:
        UsageError: if ``NORMSCOPE_KERNELS`` is invalid, or asks for kernels that cannot run here.
    """
    if not isinstance(module, PointwiseFunction) or module.curve.function_name not in choice.CURVES:
        return False
    what = (module.curve.function_name, module.alpha.device, module.alpha.dtype)
    if choice.by_kernels(*what):
        return True
    return (way, passes) == ("fused", "forward") and choice.loop_for(*what, math.prod(shape)) is not None


@contextlib.contextmanager
def computed(way: Way) -> Iterator[None]:
    """Context in which networks are computed in a way: by kernels if it is fused, and compiled if it says so."""
    with contextlib.ExitStack() as choices:
        if way not in FUSED:
            choices.enter_context(choice.plain_torch())
        elif way == "compile + fused":
            choices.enter_context(choice.asking_for(TRITON))
        if way in ("eager", "fused"):
            choices.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def require_gradients(module: nn.Module) -> list[torch.Tensor]:
    """Make every parameter require gradients, and return the parameters."""
    return [parameter.requires_grad_() for parameter in module.parameters() if parameter.is_floating_point()]


@dataclass(frozen=True)
class Norm:
    """A norm's class and input shape, the number of norms in the network that share them, and the first one's path."""

    name: str
    kind: str
    shape: tuple[int, ...]
    sites: int


class Buffers(NamedTuple):
    """Arguments of one call: the norm's input and the gradient of its output, of one shape."""

    x: Tensor
    dy: Tensor


Call = Callable[[Buffers], object]
_Module = Callable[[Tensor], Tensor]


def distinct(report: NormReport) -> list[Norm]:
    """Return the classes and shapes of a network's norms, in the order of their first calls."""
    names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for site in report.sites:
        names.setdefault((site.kind, tuple(report.shapes[site.name])), []).append(site.name)
    return [Norm(alike[0], kind, shape, len(alike)) for (kind, shape), alike in names.items()]


def commonest(report: NormReport) -> Norm:
    """Return the most common class and shape of a network's norms; of equally common ones, the first called."""
    return max(distinct(report), key=lambda norm: norm.sites)


class NormBench:
    """The norm alone and its replacements, on random values of the device and dtype of ``where``.

    Attributes:
        modules: the native norm's copy and its replacements, by variant, all with gradients required.
        buffers: one set; on CUDA as many as are together larger than four times the L2 cache.
    """

    def __init__(self, model: nn.Module, candidates: Sequence[Variant], norm: Norm, where: Tensor) -> None:
        modules = {variant.name: variant.modules.get(norm.name) for variant in candidates}
        modules[NATIVE] = module_at(model, norm.name)
        self.norm = norm
        self.modules = {name: _without_hooks(module) for name, module in modules.items() if module is not None}
        self._missing = {variant.name: variant.note for variant in candidates if modules[variant.name] is None}
        generator = torch.Generator(where.device).manual_seed(0)

        def noise() -> Tensor:
            return torch.randn(norm.shape, generator=generator, device=where.device).to(where.dtype)

        number, nbytes = 1, bytes_moved("forward", math.prod(norm.shape), where.element_size())
        if where.is_cuda:
            number = sets_beyond_cache(nbytes, torch.cuda.get_device_properties(where.device).L2_cache_size)
        self.buffers = [Buffers(noise().requires_grad_(), noise()) for _ in range(number)]

    @property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """The ways that exist; those that are compared, and so timed in turns, are together."""
        return (("eager", "fused") if self._of("fused", PASSES[0]) else ("eager",)), ("compile",)

    def cases(self, ways: Sequence[Way], passes: Passes, only: Only = every) -> list[tuple[Timing, _Module | None]]:
        """Return an empty row for each case of some ways, with its module; None for a variant without a module."""
        chosen: list[tuple[Timing, _Module | None]] = []
        for way in ways:
            chosen += [(self._row(name, way, passes), module) for name, module in self._of(way, passes).items()]
            if way not in FUSED:
                chosen += [(self._row(name, way, passes, note), None) for name, note in self._missing.items()]
        if "eager" in ways and passes == PASSES[0]:
            chosen.append((self._row(COPY, "eager", passes), torch.clone))
        return [(row, module) for row, module in chosen if only(row)]

    def measured(self, cases: Sequence[tuple[Timing, _Module | None]], until: float) -> list[Timing]:
        """Time cases in turns, ``until`` as in :func:`normscope.swaps.bench.timing.in_turns`."""
        rows: list[Timing] = []
        samplers: dict[Timing, Sampler] = {}
        for row, module in cases:
            if module is None:
                rows.append(row)
                continue
            try:
                with computed(row.way):
                    run, seconds = self._prepared(module, row.way, row.passes)
            except Exception as error:  # of a compiler, or of a norm in a dtype that it does not take
                rows.append(replace(row, note=_reason(error)))
                continue
            row, once = replace(row, compile_seconds=seconds), functools.partial(run, self.buffers[0])
            if self.buffers[0].x.is_cuda:
                samplers[replace(row, timer="do_bench")] = functools.partial(flushed, once)
                samplers[replace(row, timer="graph")] = functools.partial(replayed, run, self.buffers)
            else:
                samplers[replace(row, timer="blocks")] = functools.partial(blocks, once)
        return rows + _sampled(samplers, NORM_AT_LEAST, until)

    def seconds(self, variant: str, way: Way, passes: Passes, number: int) -> float:
        """Time ``number`` calls of one variant together, after an untimed call."""
        run, _ = self._prepared(self.modules[variant], way, passes)
        return repeated(lambda: run(self.buffers[0]), number)

    def _of(self, way: Way, passes: Passes) -> dict[str, nn.Module]:
        if way not in FUSED:
            return self.modules
        kernels = [fused(*named, self.norm.shape, passes) for named in self.modules.items()]
        return {name: kernel for of_module in kernels for name, kernel in of_module.items()}

    def _prepared(self, module: _Module, way: Way, passes: Passes) -> tuple[Call, float | None]:
        """Return the timed call, after a first run, and the seconds of that run if it compiled."""
        called = torch.compile(module, fullgraph=True, dynamic=False) if way == "compile" else module
        parameters = require_gradients(module) if isinstance(module, nn.Module) else []

        def both(buffers: Buffers) -> object:
            with torch.enable_grad():
                y = called(buffers.x)
                return torch.autograd.grad(y, [buffers.x, *parameters], buffers.dy, allow_unused=True)

        run: Call = (lambda buffers: called(buffers.x)) if passes == "forward" else both
        first = repeated(lambda: run(self.buffers[0]))
        return run, first if way == "compile" else None

    def _row(self, variant: str, way: Way, passes: Passes, note: str = "") -> Timing:
        x = self.buffers[0].x
        nbytes = bytes_moved(passes, x.numel(), x.element_size())
        dtype = str(x.dtype).removeprefix("torch.")
        return Timing(variant, way, "norm", passes, dtype, "", self.norm.shape, self.norm.sites, nbytes, note=note)


def _without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy that does not run the hooks of the network, nor copy what they refer to."""
    hooks = [getattr(part, name) for part in module.modules() for name in (*PRE_HOOKS, *HOOKS)]
    return copy.deepcopy(module, {id(registered): OrderedDict() for registered in hooks})


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] if isinstance(error, ModelError) else first_line(error)


def _sampled(samplers: Mapping[Timing, Sampler], at_least: int, until: float, warm: bool = False) -> list[Timing]:
    """Sample rows in turns. A row that fails, for example in a CUDA graph, gets a note, and the others are timed."""
    failed: dict[Timing, str] = {}

    def sample(row: Timing) -> list[float]:
        if row in failed:
            return []
        try:
            with computed(row.way):
                return samplers[row]()
        except Exception as error:
            failed[row] = _reason(error)
            return []

    def filled(samples: Mapping[Timing, Sequence[float]]) -> list[Timing]:
        return [
            replace(row, note=failed[row]) if row in failed else replace(row, samples=tuple(times))
            for row, times in samples.items()
        ]

    if warm:
        for row in samplers:
            sample(row)
    turns = {row: functools.partial(sample, row) for row in samplers}
    enough = (lambda samples: settled(filled(samples))) if until < math.inf else (lambda samples: False)
    return filled(in_turns(turns, at_least=at_least, at_most=AT_MOST, until=until, settled=enough))


_Pass = Callable[[Batch], object]


@dataclass(frozen=True)
class ModelBench:
    """The whole network, in the dtype that is timed, and its variants."""

    model: nn.Module
    batch: Batch
    outputs: Outputs
    candidates: Sequence[Variant]
    shapes: Mapping[str, Sequence[int]]  # of each norm's input
    warm: bool  # run each variant once before it is timed

    @property
    def fused(self) -> list[Variant]:
        """The variants that kernels compute, forward, in an eager network."""
        return self.by_kernels("fused", PASSES[0])

    @property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """The ways that exist; those that are timed in turns are together."""
        if not self.fused:
            return ("eager",), ("compile",)
        both: Way = "compile + fused"
        return ("eager", "fused"), ("compile",), *([(both,)] if self.by_kernels(both, PASSES[0]) else [])

    def cases(self, ways: Sequence[Way], passes: Passes, only: Only = every) -> list[tuple[Timing, Variant]]:
        """Return an empty row for each case of some ways, with its variant."""
        of_ways = [
            (self._row(variant, way, passes), variant)
            for way in ways
            for variant in (self.by_kernels(way, passes) if way in FUSED else self.candidates)
        ]
        return [(row, variant) for row, variant in of_ways if only(row)]

    def measured(self, cases: Sequence[tuple[Timing, Variant]], until: float, rounds: int = AT_LEAST) -> list[Timing]:
        """Time cases: in turns, at least ``rounds`` times, or each compiled by itself."""
        rows: list[Timing] = []
        samplers: dict[Timing, Sampler] = {}
        for row, variant in cases:
            if not variant.modules and variant.name != NATIVE:
                rows.append(row)
            elif row.way in ("eager", "fused"):
                samplers[row] = functools.partial(self._sample, variant, row.passes)
            else:
                rows.append(self._compiled(variant, row))
        return rows + _sampled(samplers, rounds, until, self.warm)

    def seconds(self, variant: Variant, passes: Passes, number: int) -> float:
        """Time ``number`` passes with one variant together, after an untimed pass."""
        with self._swapped_in(variant, self.model, passes) as run:
            run(self.batch.copied())
            batches = iter([self.batch.copied() for _ in range(number)])
            return repeated(lambda: run(next(batches)), number)

    def by_kernels(self, way: Way, passes: Passes) -> list[Variant]:
        """Return the variants that kernels compute in a way and pass for at least one norm."""
        return [
            variant
            for variant in self.candidates
            if any(has_kernel(module, self.shapes[name], passes, way) for name, module in variant.modules.items())
        ]

    def _sample(self, variant: Variant, passes: Passes) -> list[float]:
        with self._swapped_in(variant, self.model, passes) as run:
            return [_timed(run, self.batch)]

    def _compiled(self, variant: Variant, row: Timing) -> Timing:
        """Compile the network anew, and time its first pass apart."""
        torch._dynamo.reset()
        called = compiled(self.model)
        try:
            with computed(row.way), self._swapped_in(variant, called, row.passes) as run:
                compile_seconds = _timed(run, self.batch)
                samples = tuple(_timed(run, self.batch) for _ in range(_COMPILED_PASSES))
        except Exception as error:
            return replace(row, note=_reason(error))
        finally:
            torch._dynamo.reset()
        return replace(row, samples=samples, compile_seconds=compile_seconds)

    @contextlib.contextmanager
    def _swapped_in(self, variant: Variant, called: nn.Module, passes: Passes) -> Iterator[_Pass]:
        """Swap the variant in, and yield a function that runs the network; restore everything afterwards."""
        with Swap(self.model, variant.modules), contextlib.ExitStack() as restored:
            if passes == "forward":
                yield lambda batch: call(called, batch)
                return
            for parameter in self.model.parameters():
                restored.callback(parameter.requires_grad_, parameter.requires_grad)
            parameters = require_gradients(self.model)
            yield lambda batch: self._both(called, batch, parameters)

    def _both(self, called: nn.Module, batch: Batch, parameters: Sequence[Tensor]) -> object:
        with torch.enable_grad():
            output = self.outputs.read(call(called, batch), batch)
            return torch.autograd.grad(output.float().square().sum(), parameters, allow_unused=True)

    def _row(self, variant: Variant, way: Way, passes: Passes) -> Timing:
        values = (*self.batch.args, *self.batch.kwargs.values())
        shape = next((tuple(value.shape) for value in values if isinstance(value, Tensor)), ())
        dtype = next((part.dtype for part in self.model.parameters() if part.is_floating_point()), torch.float32)
        name, sites = str(dtype).removeprefix("torch."), len(self.shapes if variant.name == NATIVE else variant.modules)
        return Timing(variant.name, way, "model", passes, name, "passes", shape, sites, note=variant.note)


def _timed(run: _Pass, batch: Batch) -> float:
    """Time one pass over a copy of the batch, which the network may modify; copying is not timed."""
    copied = batch.copied()
    return repeated(lambda: run(copied))
