"""Timings of a network's norms and their replacements: the norm alone, and the whole network."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.fits.curves.expressions import split_names
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Outputs
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.trace import NormReport
from normscope.runtime.network import call
from normscope.swaps.bench.timing import (
    Measured,
    Sampler,
    blocks,
    bytes_moved,
    flushed,
    in_turns,
    once,
    repeated,
    replayed,
    sets_beyond_cache,
)
from normscope.swaps.kernels import choice
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import HOOKS, PRE_HOOKS, Swap, module_at, replacements
from normscope.swaps.reports import COPY, FUSED, NATIVE, PASSES, Case, Passes, Way
from normscope.swaps.start import RMS_NORM

IDENTITY = "identity"
AT_LEAST, NORM_AT_LEAST, AT_MOST = 1, 4, 10  # samples: of the network, of the norm alone, of either


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
            choices.enter_context(choice.asking_for(choice.TRITON))
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
Only = Callable[[Case], bool]


def every(case: Case) -> bool:
    """Time each case."""
    return True


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
            values = torch.randn(norm.shape, generator=generator, device=where.device, dtype=torch.float32)
            return values.to(where.dtype)

        number, nbytes = 1, bytes_moved("forward", math.prod(norm.shape), where.element_size())
        if where.is_cuda:
            number = sets_beyond_cache(nbytes, torch.cuda.get_device_properties(where.device).L2_cache_size)
        self.buffers = [Buffers(noise().requires_grad_(), noise()) for _ in range(number)]

    @property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """The ways that exist; those that are compared, and so timed in turns, are together."""
        return (("eager", "fused") if self._of("fused", PASSES[0]) else ("eager",)), ("compile",)

    def cases(
        self, ways: Sequence[Way], passes: Passes, only: Only = every
    ) -> list[tuple[Case, Callable[[Tensor], Tensor] | None]]:
        """Return the cases of some ways with their modules; None for a variant without a module."""
        chosen = []
        for way in ways:
            modules: dict[str, Callable[[Tensor], Tensor] | None] = {**self._of(way, passes)}
            if way not in FUSED:
                modules |= dict.fromkeys(self._missing)
            chosen += [(self._case(name, way, passes), module) for name, module in modules.items()]
        if "eager" in ways and passes == PASSES[0]:
            chosen.append((self._case(COPY, "eager", passes), torch.clone))
        return [(case, module) for case, module in chosen if only(case)]

    def measured(self, ways: Sequence[Way], passes: Passes, until: float, only: Only = every) -> list[Measured]:
        """Time the cases of some ways in turns, ``until`` as in :func:`normscope.swaps.bench.timing.in_turns`."""
        rows: list[Measured] = []
        samplers: dict[Measured, Sampler] = {}
        for case, module in self.cases(ways, passes, only):
            if module is None:
                rows.append(Measured(case, note=self._missing[case.variant]))
                continue
            try:
                with computed(case.way):
                    run, seconds = self._prepared(module, case.way, passes)
            except Exception as error:  # of a compiler, or of a norm in a dtype that it does not take
                rows.append(Measured(case, note=first_line(error)))
                continue
            for timer, sampler in self._timers(run):
                samplers[Measured(dataclasses.replace(case, timer=timer), compile_seconds=seconds)] = sampler
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

    def _prepared(self, module: Callable[[Tensor], Tensor], way: Way, passes: Passes) -> tuple[Call, float | None]:
        """Return the timed call, after a first run, and the seconds of that run if it compiled."""
        called = torch.compile(module, fullgraph=True, dynamic=False) if way == "compile" else module
        parameters = require_gradients(module) if isinstance(module, nn.Module) else []

        def both(buffers: Buffers) -> object:
            with torch.enable_grad():
                y = called(buffers.x)
                return torch.autograd.grad(y, [buffers.x, *parameters], buffers.dy, allow_unused=True)

        run: Call = (lambda buffers: called(buffers.x)) if passes == "forward" else both
        [first] = once(lambda: run(self.buffers[0]))
        return run, first if way == "compile" else None

    def _timers(self, run: Call) -> list[tuple[str, Sampler]]:
        if self.buffers[0].x.is_cuda:
            on_gpu: list[tuple[str, Sampler]] = [("do_bench", lambda: flushed(lambda: run(self.buffers[0])))]
            return [*on_gpu, ("graph", lambda: replayed(run, self.buffers))]
        return [("blocks", lambda: blocks(lambda: run(self.buffers[0])))]

    def _case(self, variant: str, way: Way, passes: Passes) -> Case:
        x = self.buffers[0].x
        nbytes = bytes_moved(passes, x.numel(), x.element_size())
        dtype = str(x.dtype).removeprefix("torch.")
        return Case(variant, way, "norm", passes, dtype, "", self.norm.shape, self.norm.sites, nbytes)


def _without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy that does not run the hooks of the network, nor copy what they refer to."""
    hooks = [getattr(part, name) for part in module.modules() for name in (*PRE_HOOKS, *HOOKS)]
    return copy.deepcopy(module, {id(registered): OrderedDict() for registered in hooks})


def first_line(error: Exception) -> str:
    """Return the name of an error and the first line of its message."""
    line = str(error).strip().partition("\n")[0]
    return line if isinstance(error, ModelError) else f"{type(error).__name__}: {line}"


def _sampled(samplers: Mapping[Measured, Sampler], at_least: int, until: float, warm: bool = False) -> list[Measured]:
    """Sample rows in turns. A row that fails, for example in a CUDA graph, gets a note, and the others are timed."""
    failed: dict[Measured, str] = {}

    def sample(row: Measured) -> list[float]:
        if row in failed:
            return []
        try:
            with computed(row.case.way):
                return samplers[row]()
        except Exception as error:
            failed[row] = first_line(error)
            return []

    if warm:
        for row in samplers:
            sample(row)
    turns = {row: functools.partial(sample, row) for row in samplers}
    return [
        dataclasses.replace(row, note=failed[row]) if row in failed else dataclasses.replace(row, samples=tuple(times))
        for row, times in in_turns(turns, at_least=at_least, at_most=AT_MOST, until=until).items()
    ]


_COMPILED_PASSES = 10
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

    def cases(self, ways: Sequence[Way], passes: Passes, only: Only = every) -> list[tuple[Case, Variant]]:
        """Return the cases of some ways with their variants."""
        of_ways = [
            (self._case(variant, way, passes), variant)
            for way in ways
            for variant in (self.by_kernels(way, passes) if way in FUSED else self.candidates)
        ]
        return [(case, variant) for case, variant in of_ways if only(case)]

    def measured(
        self, ways: Sequence[Way], passes: Passes, until: float, only: Only = every, rounds: int = AT_LEAST
    ) -> list[Measured]:
        """Time the cases of some ways: in turns, at least ``rounds`` times, or each compiled by itself."""
        rows: list[Measured] = []
        samplers: dict[Measured, Sampler] = {}
        for case, variant in self.cases(ways, passes, only):
            if not variant.modules and variant.name != NATIVE:
                rows.append(Measured(case, note=variant.note))
            elif "eager" in ways:
                samplers[Measured(case, note=variant.note)] = functools.partial(self._sample, variant, case)
            else:
                rows.append(self._compiled(variant, case))
        return rows + _sampled(samplers, rounds, until, self.warm)

    def seconds(self, variant: Variant, passes: Passes, number: int) -> float:
        """Time ``number`` passes with one variant together, after an untimed pass."""
        with self._placed(variant, self.model, passes) as run:
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

    def _sample(self, variant: Variant, case: Case) -> list[float]:
        with self._placed(variant, self.model, case.passes) as run:
            return _timed(run, self.batch)

    def _compiled(self, variant: Variant, case: Case) -> Measured:
        """Compile the network anew, and time its first pass apart."""
        torch._dynamo.reset()
        called = compiled(self.model)
        try:
            with computed(case.way), self._placed(variant, called, case.passes) as run:
                [compile_seconds] = _timed(run, self.batch)
                samples = tuple(seconds for _ in range(_COMPILED_PASSES) for seconds in _timed(run, self.batch))
        except Exception as error:
            return Measured(case, note=first_line(error))
        finally:
            torch._dynamo.reset()
        return Measured(case, samples, compile_seconds, variant.note)

    @contextlib.contextmanager
    def _placed(self, variant: Variant, called: nn.Module, passes: Passes) -> Iterator[_Pass]:
        """Swap the variant in, and yield a function that runs the network; restore everything afterwards."""
        with Swap(self.model, variant.modules):
            if passes == "forward":
                yield lambda batch: call(called, batch)
                return
            required_before = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
            try:
                parameters = require_gradients(self.model)
                yield lambda batch: self._both(called, batch, parameters)
            finally:
                for parameter, required in required_before.items():
                    parameter.requires_grad_(required)

    def _both(self, called: nn.Module, batch: Batch, parameters: Sequence[Tensor]) -> object:
        with torch.enable_grad():
            output = self.outputs.read(call(called, batch), batch)
            return torch.autograd.grad(output.float().square().sum(), parameters, allow_unused=True)

    def _case(self, variant: Variant, way: Way, passes: Passes) -> Case:
        values = (*self.batch.args, *self.batch.kwargs.values())
        shape = next((tuple(value.shape) for value in values if isinstance(value, Tensor)), ())
        dtype = next((part.dtype for part in self.model.parameters() if part.is_floating_point()), torch.float32)
        name, sites = str(dtype).removeprefix("torch."), len(self.shapes if variant.name == NATIVE else variant.modules)
        return Case(variant.name, way, "model", passes, name, "passes", shape, sites)


def _timed(run: _Pass, batch: Batch) -> list[float]:
    """Time one pass over a copy of the batch, which the network may modify; copying is not timed."""
    copied = batch.copied()
    return once(lambda: run(copied))
