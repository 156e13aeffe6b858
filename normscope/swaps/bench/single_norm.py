"""One norm alone against what could take its place, on random values of the norm's real shape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.pairs.norms.trace import NormReport
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
from normscope.swaps.bench.variants import Variant, computed, fused, require_gradients
from normscope.swaps.place_hooks import unheard
from normscope.swaps.replace import module_at
from normscope.swaps.reports import COPY, FUSED, NATIVE, PASSES, Case, Passes, Way

AT_LEAST, AT_MOST = 4, 10
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
    """What one call takes: the norm's input, and the gradient of its output; of the input's shape both."""

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
        """Whether any case of these is to be timed."""
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
        samples = in_turns(kept_going, at_least=AT_LEAST, at_most=AT_MOST, until=until)
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
        """What is timed, after a first call, and the seconds of that call where it compiled."""
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
        candidates: what :func:`normscope.swaps.bench.variants.variants` made of it.
        norm: which one.
        where: a tensor whose device and dtype the buffers get.
    """
    native = module_at(model, norm.name)
    modules = {one.name: one.modules.get(norm.name) for one in candidates}
    modules[NATIVE] = native
    there = {name: unheard(module) for name, module in modules.items() if module is not None}
    notes = {one.name: one.note for one in candidates}
    missing = {name: notes[name] for name, module in modules.items() if module is None}
    generator = torch.Generator(where.device).manual_seed(_SEED)

    def noise() -> Tensor:
        return torch.randn(norm.shape, generator=generator, device=where.device, dtype=torch.float32).to(where.dtype)

    number, nbytes = 1, bytes_moved("forward", math.prod(norm.shape), where.element_size())
    if where.is_cuda:
        number = sets_beyond_cache(nbytes, cache_of(where.device))
    return NormBench(norm, there, missing, [Buffers(noise().requires_grad_(), noise()) for _ in range(number)])


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
