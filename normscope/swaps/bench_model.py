"""A whole network with its own norms against the same one with others in their places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch
from normscope.outputs import Outputs
from normscope.speeds import NATIVE, Case, Passes, Way
from normscope.swaps.bench_norm import first_line
from normscope.swaps.replace import Swap
from normscope.swaps.speed import Measured
from normscope.swaps.timing import Run, Sampler, in_turns, once, repeated
from normscope.swaps.variants import Variant, require_gradients

AT_LEAST, AT_MOST = 1, 10
_COMPILED_PASSES = 10
_TIMER = "passes"


@dataclass(frozen=True)
class ModelBench:
    """The network and what is put into it.

    Attributes:
        model: in the dtype that is timed.
        batch: likewise.
        outputs: how to read what the network returns.
        made: the variants.
        sites: how many norms there are.
        warm: whether a pass of each goes before those that are timed.
    """

    model: nn.Module
    batch: Batch
    outputs: Outputs
    made: Sequence[Variant]
    sites: int
    warm: bool

    def measured(self, way: Way, passes: Passes, until: float) -> list[Measured]:
        """Time every variant: in turns, or, where each is compiled by itself, one after the other.

        Arguments are those of :meth:`normscope.swaps.bench_norm.NormBench.measured`.
        """
        there = [one for one in self.made if one.modules or one.name == NATIVE]
        missing = [Measured(self._case(one, way, passes), note=one.note) for one in self.made if one not in there]
        if way == "compile":
            return missing + [self._compiled(one, passes) for one in there]
        rows, samplers = missing, dict[str, Sampler]()
        for one in there:
            failure = self._failure(one, passes) if self.warm else None
            if failure is None:
                samplers[one.name] = self._sampler(one, passes)
            else:
                rows.append(Measured(self._case(one, way, passes), note=failure))
        samples = in_turns(samplers, at_least=AT_LEAST, at_most=AT_MOST, until=until)
        timed = [one for one in there if one.name in samples]
        return rows + [Measured(self._case(one, way, passes), samples[one.name], note=one.note) for one in timed]

    def seconds(self, one: Variant, passes: Passes, number: int) -> float:
        """Time so many passes with one variant together, after one that is not timed."""
        with self._placed(one, self.model, passes) as run:
            run()
            return repeated(run, number)

    def _sampler(self, one: Variant, passes: Passes) -> Sampler:
        def sample() -> list[float]:
            with self._placed(one, self.model, passes) as run:
                return once(run)

        return sample

    def _failure(self, one: Variant, passes: Passes) -> str | None:
        """Run it once, untimed; say why it cannot, where it cannot: not every network runs in every dtype."""
        try:
            self._sampler(one, passes)()
        except Exception as error:
            return first_line(error)
        return None

    def _compiled(self, one: Variant, passes: Passes) -> Measured:
        """Compile the network anew, and time its first pass apart."""
        torch._dynamo.reset()
        case = self._case(one, "compile", passes)
        called = torch.compile(self.model, dynamic=False)
        assert isinstance(called, nn.Module)  # noqa: S101 - of a module, torch makes a module
        try:
            with self._placed(one, called, passes) as run:
                [compile_seconds] = once(run)
                samples = [seconds for _ in range(_COMPILED_PASSES) for seconds in once(run)]
        except Exception as error:
            return Measured(case, note=first_line(error))
        finally:
            torch._dynamo.reset()
        return Measured(case, samples, compile_seconds, one.note)

    @contextlib.contextmanager
    def _placed(self, one: Variant, called: nn.Module, passes: Passes) -> Iterator[Run]:
        """Put the variant in, and give what runs the network; everything is as it was afterwards."""
        with Swap(self.model, one.modules):
            if passes == "forward":
                yield lambda: _call(called, self.batch)
                return
            found = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
            try:
                parameters = require_gradients(self.model)
                yield lambda: self._both(called, parameters)
            finally:
                for parameter, required in found.items():
                    parameter.requires_grad_(required)

    def _both(self, called: nn.Module, parameters: Sequence[Tensor]) -> object:
        with torch.enable_grad():
            output = self.outputs.read(_call(called, self.batch), self.batch)
            return torch.autograd.grad(output.float().square().sum(), parameters, allow_unused=True)

    def _case(self, one: Variant, way: Way, passes: Passes) -> Case:
        values = (*self.batch.args, *self.batch.kwargs.values())
        shape = next((tuple(value.shape) for value in values if isinstance(value, Tensor)), ())
        dtype = next((part.dtype for part in self.model.parameters() if part.is_floating_point()), torch.float32)
        name, sites = str(dtype).removeprefix("torch."), self.sites if one.name == NATIVE else len(one.modules)
        return Case(one.name, way, "model", passes, name, _TIMER, shape, sites)


def _call(called: nn.Module, batch: Batch) -> Any:
    return called(*batch.args, **batch.kwargs)
