"""A whole network with its own norms against the same one with others in their places."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Outputs
from normscope.runtime.network import call
from normscope.swaps.bench.single_norm import Only, every, first_line
from normscope.swaps.bench.timing import Measured, Sampler, in_turns, once, repeated
from normscope.swaps.bench.variants import Variant, compiled, computed, has_kernel, require_gradients
from normscope.swaps.replace import Swap
from normscope.swaps.reports import FUSED, NATIVE, PASSES, Case, Passes, Way

AT_LEAST, AT_MOST = 1, 10
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
        """What kernels compute forward, in an eager network."""
        return self.by_kernels("fused", PASSES[0])

    @property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """The ways that exist, those together that are timed in turns."""
        if not self.fused:
            return ("eager",), ("compile",)
        both: Way = "compile + fused"
        return ("eager", "fused"), ("compile",), *([(both,)] if self.by_kernels(both, PASSES[0]) else [])

    def any(self, ways: Sequence[Way], passes: Passes, only: Only) -> bool:
        """Whether any case of these is to be timed."""
        return any(only(self._case(one, way, passes)) for way in ways for one in self._of(way, passes))

    def measured(
        self, ways: Sequence[Way], passes: Passes, until: float, only: Only = every, rounds: int = AT_LEAST
    ) -> list[Measured]:
        """Time every variant: in turns, or, where each is compiled by itself, one after the other.

        Arguments are those of :meth:`normscope.swaps.bench.single_norm.NormBench.measured`, and ``rounds``, those in
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
        """What kernels compute in a way and pass, at one norm at least."""
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
