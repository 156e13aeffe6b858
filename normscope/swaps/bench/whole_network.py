"""A network's norms against their replacements: variants to time, the norm alone, and the whole network."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar, cast

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
    cache_of,
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
    """One thing that takes the norms' places.

    Attributes:
        name: ``native`` for the norms themselves, ``rmsnorm``, ``identity``, or a curve as it was asked for.
        modules: what goes where, by module path; none for ``native``.
        note: which norms it cannot replace, and why.
    """

    name: str
    modules: dict[str, nn.Module]
    note: str = ""


def variants(model: nn.Module, sites: Sequence[NormSite], curves: str | Sequence[str]) -> list[Variant]:
    """Make the norms' replacements, on the norms' device and in their dtype: native, rmsnorm, identity, the curves.

    Args:
        model: the network; nothing is put in.
        sites: its norm sites.
        curves: names, or names separated by commas.

    Raises:
        UsageError: if there is no such curve, or if it is one that has to be fitted (``free``, ``best``).
    """
    asked = split_names(curves) if isinstance(curves, str) else curves
    names = dict.fromkeys((RMS_NORM, IDENTITY, *(name.strip().lower() for name in asked)))
    names.pop(NATIVE, None)
    return [Variant(NATIVE, {}), *(_variant(model, sites, name) for name in names)]


def compiled(module: nn.Module) -> nn.Module:
    """Compile a module for the one shape that it is timed with."""
    return cast(nn.Module, torch.compile(module, dynamic=False))  # typed as any callable, whatever it was made of


def fused(name: str, module: nn.Module, shape: Sequence[int], passes: Passes) -> dict[str, nn.Module]:
    """Return modules that do in one kernel what a replacement does, by what they are called; only ways that exist.

    The replacement itself, where :func:`has_kernel` says so; Liger's DyT (github.com/linkedin/Liger-Kernel) on CUDA,
    where it is installed.
    """
    return ({name: module} if has_kernel(module, shape, passes) else {}) | _ligers(name, module)


def has_kernel(module: nn.Module, shape: Sequence[int], passes: Passes, way: Way = "fused") -> bool:
    """True if normscope's kernels compute a module on its device, in its dtype, for an input of this shape.

    The CPU's loop does forward alone, and not under torch.compile.

    Raises:
        UsageError: if ``NORMSCOPE_KERNELS`` says nothing that there is, or asks for kernels that cannot run here.
    """
    if not isinstance(module, PointwiseFunction) or module.curve.function_name not in choice.CURVES:
        return False
    what = (module.curve.function_name, module.alpha.device, module.alpha.dtype)
    if choice.by_kernels(*what):
        return True
    return (way, passes) == ("fused", "forward") and choice.loop_for(*what, math.prod(shape)) is not None


@contextlib.contextmanager
def computed(way: Way) -> Iterator[None]:
    """Compute networks within the block as a way says.

    Point-wise functions by kernels where it is fused, else by plain torch; parts that were compiled before as they are
    where it is compiled, else by plain torch as well. In a compiled network, kernels are there only if asked for.
    """
    with contextlib.ExitStack() as choices:
        if way not in FUSED:
            choices.enter_context(choice.plain_torch())
        elif way == "compile + fused":
            choices.enter_context(choice.asking_for(choice.TRITON))
        if way in ("eager", "fused"):
            choices.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _ligers(name: str, module: nn.Module) -> dict[str, nn.Module]:
    if not (isinstance(module, PointwiseFunction) and module.curve.name == "tanh" and find_spec("liger_kernel")):
        return {}
    if not module.weight.is_cuda or module.channel_axis != -1 or module.weight.ndim != 1 or module.shift is not None:
        return {}
    layer: nn.Module = import_module("liger_kernel.transformers.dyt").LigerDyT(
        module.weight.numel(), beta=module.bias is not None, init_alpha=module.alpha.detach().item()
    )
    return {f"{name}, Liger": layer.to(module.weight.device, module.weight.dtype)}


def _variant(model: nn.Module, sites: Sequence[NormSite], name: str) -> Variant:
    modules: dict[str, nn.Module] = {}
    reasons: list[str] = []
    for site in sites:
        try:
            modules |= replacements(model, name, [site], init="paper")
        except ModelError as error:
            reasons.append(str(error))
    note = f"{len(reasons)} of {len(sites)} norms left as they are: {reasons[0]}" if reasons else ""
    return Variant(name, modules, note)


def require_gradients(module: nn.Module) -> list[torch.Tensor]:
    """Let every parameter require gradients, and return them."""
    return [parameter.requires_grad_() for parameter in module.parameters() if parameter.is_floating_point()]


_SEED = 0


@dataclass(frozen=True)
class Norm:
    """The norm that is timed: the commonest class and shape of a network.

    Attributes:
        name: module path of the first of them.
        kind: its class in the table of norms.
        shape: of its input.
        sites: how many norms of the network have this class and shape.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sites: int


@dataclass(frozen=True)
class Buffers:
    """Arguments of one call: the norm's input and the gradient of its output, of one shape."""

    x: Tensor
    dy: Tensor


Call = Callable[[Buffers], object]
Only = Callable[[Case], bool]
Key = TypeVar("Key", bound=Hashable)


def every(case: Case) -> bool:
    """Time each case."""
    return True


def commonest(report: NormReport) -> Norm:
    """The class and shape that most norms of a network have; of several equally common, the first called."""
    counted = Counter((site.kind, tuple(report.shapes[site.name])) for site in report.sites)
    (kind, shape), number = counted.most_common(1)[0]
    first = next(site for site in report.sites if (site.kind, tuple(report.shapes[site.name])) == (kind, shape))
    return Norm(first.name, kind, shape, number)


@dataclass(frozen=True)
class NormBench:
    """The modules that are timed, and the buffers that they are timed on.

    Attributes:
        norm: which.
        modules: the native norm's copy and its replacements, by variant, all with gradients required.
        missing: why a variant has no module here.
        buffers: one set, or on CUDA as many as are larger together than four times the L2 cache.
    """

    norm: Norm
    modules: dict[str, nn.Module]
    missing: dict[str, str]
    buffers: list[Buffers]

    @property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """The ways that exist, those together that are compared and so timed in turns."""
        return (("eager", "fused") if self._of("fused", PASSES[0]) else ("eager",)), ("compile",)

    def any(self, ways: Sequence[Way], passes: Passes, only: Only) -> bool:
        """True if any of these cases is to be timed."""
        names = {way: [COPY, *self._of(way, passes), *self.missing] for way in ways}
        return any(only(self._case(name, way, passes, "")) for way in ways for name in names[way])

    def measured(self, ways: Sequence[Way], passes: Passes, until: float, only: Only = every) -> list[Measured]:
        """Time every variant in turns.

        Args:
            ways: some of ``eager``, ``compile`` and ``fused``.
            passes: which.
            until: as of :func:`normscope.swaps.bench.timing.in_turns`.
            only: whether a case is timed.
        """

        def wanted(name: str, way: Way) -> bool:
            return only(self._case(name, way, passes, ""))

        plain = [way for way in ways if way not in FUSED]
        missing = [(name, way, why) for way in plain for name, why in self.missing.items() if wanted(name, way)]
        rows = [self._not_run(name, way, passes, why) for name, way, why in missing]
        ready: dict[tuple[Way, str], tuple[Call, float | None]] = {}
        theirs = [(way, *named) for way in ways for named in self._of(way, passes).items()]
        modules = {(way, name): module for way, name, module in theirs if wanted(name, way)}
        for (way, name), module in modules.items():
            try:
                with computed(way):
                    ready[way, name] = self._prepared(module, way, passes)
            except Exception as error:  # of a compiler, or of a norm in a dtype that it does not take
                rows.append(self._not_run(name, way, passes, first_line(error)))
        if "eager" in ways and passes == PASSES[0] and wanted(COPY, "eager"):
            ready["eager", COPY] = (lambda buffers: buffers.x.clone()), None
        samplers = {(*key, timer): one for key, (run, _) in ready.items() for timer, one in self._timers(key[0], run)}
        failed: dict[tuple[Way, str, str], str] = {}
        kept_going = {key: _noting(key, one, failed) for key, one in samplers.items()}
        samples = in_turns(kept_going, at_least=NORM_AT_LEAST, at_most=AT_MOST, until=until)
        for key, times in samples.items():
            way, name, timer = key
            case, why = self._case(name, way, passes, timer), failed.get(key, "")
            rows.append(Measured(case, () if why else times, ready[way, name][1], why))
        return rows

    def seconds(self, variant: str, way: Way, passes: Passes, number: int) -> float:
        """Time so many calls of one variant together, after one that is not timed."""
        run, _ = self._prepared(self.modules[variant], way, passes)
        return repeated(lambda: run(self.buffers[0]), number)

    def _of(self, way: Way, passes: Passes) -> dict[str, nn.Module]:
        if way not in FUSED:
            return self.modules
        kernels = [fused(*named, self.norm.shape, passes) for named in self.modules.items()]
        return {called: kernel for found in kernels for called, kernel in found.items()}

    def _prepared(self, module: nn.Module, way: Way, passes: Passes) -> tuple[Call, float | None]:
        """Return the timed call, after a first run, and the seconds of that run if it compiled."""
        called = torch.compile(module, fullgraph=True, dynamic=False) if way == "compile" else module
        run = _step(called, require_gradients(module), passes)
        [first] = once(lambda: run(self.buffers[0]))
        return run, first if way == "compile" else None

    def _timers(self, way: Way, run: Call) -> list[tuple[str, Sampler]]:
        timers: dict[str, Sampler] = {"blocks": lambda: blocks(lambda: run(self.buffers[0]))}
        if self.buffers[0].x.is_cuda:
            timers = {
                "do_bench": lambda: flushed(lambda: run(self.buffers[0])),
                "graph": lambda: replayed(run, self.buffers),
            }
        return [(timer, _computed(way, sampler)) for timer, sampler in timers.items()]

    def _not_run(self, variant: str, way: Way, passes: Passes, why: str) -> Measured:
        return Measured(self._case(variant, way, passes, ""), note=why)

    def _case(self, variant: str, way: Way, passes: Passes, timer: str) -> Case:
        x = self.buffers[0].x
        nbytes = bytes_moved(passes, x.numel(), x.element_size())
        dtype = str(x.dtype).removeprefix("torch.")
        return Case(variant, way, "norm", passes, dtype, timer, self.norm.shape, self.norm.sites, nbytes)


def norm_bench(model: nn.Module, candidates: Sequence[Variant], norm: Norm, where: Tensor) -> NormBench:
    """Copy the norm and its replacements, and fill the buffers with random values.

    Args:
        model: the network, in the dtype that is timed; it is left as it is.
        candidates: what :func:`normscope.swaps.bench.whole_network.variants` made of it.
        norm: which one.
        where: a tensor whose device and dtype the buffers get.
    """
    native = module_at(model, norm.name)
    modules = {one.name: one.modules.get(norm.name) for one in candidates}
    modules[NATIVE] = native
    there = {name: _without_hooks(module) for name, module in modules.items() if module is not None}
    notes = {one.name: one.note for one in candidates}
    missing = {name: notes[name] for name, module in modules.items() if module is None}
    generator = torch.Generator(where.device).manual_seed(_SEED)

    def noise() -> Tensor:
        return torch.randn(norm.shape, generator=generator, device=where.device, dtype=torch.float32).to(where.dtype)

    number, nbytes = 1, bytes_moved("forward", math.prod(norm.shape), where.element_size())
    if where.is_cuda:
        number = sets_beyond_cache(nbytes, cache_of(where.device))
    return NormBench(norm, there, missing, [Buffers(noise().requires_grad_(), noise()) for _ in range(number)])


def _without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy that does not run the hooks of the network, nor copy what they refer to."""
    hooks = [getattr(part, name) for part in module.modules() for name in (*PRE_HOOKS, *HOOKS)]
    return copy.deepcopy(module, {id(registered): OrderedDict() for registered in hooks})


def first_line(error: Exception) -> str:
    """The name of an error and the first line of its message."""
    line = str(error).strip().partition("\n")[0]
    return line if isinstance(error, ModelError) else f"{type(error).__name__}: {line}"


def _computed(way: Way, sampler: Sampler) -> Sampler:
    def sample() -> list[float]:
        with computed(way):
            return sampler()

    return sample


def _noting(key: Key, sampler: Sampler, failed: dict[Key, str]) -> Sampler:
    """Let the others be timed where one cannot: not all that runs can be captured in a CUDA graph."""

    def sample() -> list[float]:
        if key in failed:
            return []
        try:
            return sampler()
        except Exception as error:
            failed[key] = first_line(error)
            return []

    return sample


def _step(module: Callable[..., Tensor], parameters: Sequence[Tensor], passes: Passes) -> Call:
    if passes == "forward":
        return lambda buffers: module(buffers.x)

    def both(buffers: Buffers) -> object:
        with torch.enable_grad():
            y = module(buffers.x)
            return torch.autograd.grad(y, [buffers.x, *parameters], buffers.dy, allow_unused=True)

    return both


_COMPILED_PASSES = 10
_TIMER = "passes"

_Pass = Callable[[Batch], object]


@dataclass(frozen=True)
class ModelBench:
    """The network and what is put into it.

    Attributes:
        model: in the dtype that is timed.
        batch: likewise.
        outputs: how to read what the network returns.
        candidates: the variants.
        shapes: of the input of each norm.
        warm: whether a pass of each goes before those that are timed.
    """

    model: nn.Module
    batch: Batch
    outputs: Outputs
    candidates: Sequence[Variant]
    shapes: Mapping[str, Sequence[int]]
    warm: bool

    @property
    def fused(self) -> list[Variant]:
        """Return the modules that kernels compute, forward, in an eager network."""
        return self.by_kernels("fused", PASSES[0])

    @property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """The ways that exist, those together that are timed in turns."""
        if not self.fused:
            return ("eager",), ("compile",)
        both: Way = "compile + fused"
        return ("eager", "fused"), ("compile",), *([(both,)] if self.by_kernels(both, PASSES[0]) else [])

    def any(self, ways: Sequence[Way], passes: Passes, only: Only) -> bool:
        """True if any of these cases is to be timed."""
        return any(only(self._case(one, way, passes)) for way in ways for one in self._of(way, passes))

    def measured(
        self, ways: Sequence[Way], passes: Passes, until: float, only: Only = every, rounds: int = AT_LEAST
    ) -> list[Measured]:
        """Time every variant: in turns, or, where each is compiled by itself, one after the other.

        Arguments are those of :meth:`normscope.swaps.bench.whole_network.NormBench.measured`, and ``rounds``, those in
        turns that are taken whatever the time.
        """
        every_case = [(one, self._case(one, way, passes)) for way in ways for one in self._of(way, passes)]
        cases = [(one, case) for one, case in every_case if only(case)]
        there = [(one, case) for one, case in cases if one.modules or one.name == NATIVE]
        rows = [Measured(case, note=one.note) for one, case in cases if (one, case) not in there]
        if "eager" not in ways:
            return rows + [self._compiled(one, case) for one, case in there]
        samplers: dict[Case, Sampler] = {}
        for one, case in there:
            failure = self._failure(one, case) if self.warm else None
            if failure is None:
                samplers[case] = self._sampler(one, case)
            else:
                rows.append(Measured(case, note=failure))
        samples = in_turns(samplers, at_least=rounds, at_most=AT_MOST, until=until)
        return rows + [Measured(case, samples[case], note=one.note) for one, case in there if case in samples]

    def seconds(self, one: Variant, passes: Passes, number: int) -> float:
        """Time so many passes with one variant together, after one that is not timed."""
        with self._placed(one, self.model, passes) as run:
            run(self.batch.copied())
            batches = iter([self.batch.copied() for _ in range(number)])
            return repeated(lambda: run(next(batches)), number)

    def _of(self, way: Way, passes: Passes) -> Sequence[Variant]:
        return self.by_kernels(way, passes) if way in FUSED else self.candidates

    def by_kernels(self, way: Way, passes: Passes) -> list[Variant]:
        """Return the modules that kernels compute in a way and pass, at one norm at least."""
        return [
            one
            for one in self.candidates
            if any(has_kernel(module, self.shapes[name], passes, way) for name, module in one.modules.items())
        ]

    def _sampler(self, one: Variant, case: Case) -> Sampler:
        def sample() -> list[float]:
            with computed(case.way), self._placed(one, self.model, case.passes) as run:
                return _timed(run, self.batch)

        return sample

    def _failure(self, one: Variant, case: Case) -> str | None:
        """Run it once, untimed, and return why it fails, if it does: not every network runs in every dtype."""
        try:
            self._sampler(one, case)()
        except Exception as error:
            return first_line(error)
        return None

    def _compiled(self, one: Variant, case: Case) -> Measured:
        """Compile the network anew, and time its first pass apart."""
        torch._dynamo.reset()
        called = compiled(self.model)
        try:
            with computed(case.way), self._placed(one, called, case.passes) as run:
                [compile_seconds] = _timed(run, self.batch)
                samples = [seconds for _ in range(_COMPILED_PASSES) for seconds in _timed(run, self.batch)]
        except Exception as error:
            return Measured(case, note=first_line(error))
        finally:
            torch._dynamo.reset()
        return Measured(case, samples, compile_seconds, one.note)

    @contextlib.contextmanager
    def _placed(self, one: Variant, called: nn.Module, passes: Passes) -> Iterator[_Pass]:
        """Put the variant in, and give what runs the network; everything is as it was afterwards."""
        with Swap(self.model, one.modules):
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

    def _case(self, one: Variant, way: Way, passes: Passes) -> Case:
        values = (*self.batch.args, *self.batch.kwargs.values())
        shape = next((tuple(value.shape) for value in values if isinstance(value, Tensor)), ())
        dtype = next((part.dtype for part in self.model.parameters() if part.is_floating_point()), torch.float32)
        name, sites = str(dtype).removeprefix("torch."), len(self.shapes) if one.name == NATIVE else len(one.modules)
        return Case(one.name, way, "model", passes, name, _TIMER, shape, sites)


def _timed(run: _Pass, batch: Batch) -> list[float]:
    """Time one pass over a copy of the batch, which the network may change; the copy is not timed."""
    lent = batch.copied()
    return once(lambda: run(lent))
