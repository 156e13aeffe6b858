"""keep(): the choice of norms to leave as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from normscope.errors import DataError, UsageError
from normscope.inputs.held_out import Pool, subsampled
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.norms.bound_inputs import unpacked
from normscope.runtime.network import uncompiled
from normscope.runtime.progress import Progress, StageProgress, silent
from normscope.swaps.distances import measure_of
from normscope.swaps.drift.paired_passes import Configuration, PairedPasses
from normscope.swaps.drift.reports import KeepReport, KeepStep
from normscope.swaps.quality import QualityFunction, QualityMeter
from normscope.swaps.replace import Swap
from normscope.swaps.reports import OUTPUT, Quantiles

MOST_SAMPLES = 48  # for the choice: norms differ by more than the uncertainty of a median over these
STAGE, HELD_OUT = "keep", "keep, held out"

After = Callable[[Sequence[str]], float]  # from the paths that stay swapped to a median error at the output


def keep(
    model: nn.Module | LoadedModel,
    batches: Iterable[Any] | None = None,
    replacements: Mapping[str, nn.Module] | None = None,
    *,
    number: int | None = None,
    max_drift: float | None = None,
    held_out: Iterable[Any] | None = None,
    outputs: Outputs | None = None,
    quality: QualityFunction | Task | None = None,
    after: After | None = None,
    func: str = "",
    init: str = "",
    about: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> KeepReport:
    """Choose norms to keep, greedily: from all swapped, restore the norm whose return lowers the drift most, and again.

    The value of a norm depends on which others are swapped, so each step tries every norm that is still swapped. It
    restores the one that leaves the least median error at the output: KL divergence of logits, relative L2 of other
    outputs. For n sites, a step takes n passes over at most 48 samples (:data:`MOST_SAMPLES`).

    Args:
        model: the network, with its norms: the result of :func:`normscope.load`, or any module.
        batches: inputs to choose on, as :func:`normscope.capture` takes them; None for a loaded model's calibration
            inputs or, if it has none, its inputs.
        replacements: modules to swap in, by path, from :func:`normscope.replacements`.
        number: number of norms to keep; or
        max_drift: the median error to stay at or below, with as few norms as possible.
        held_out: inputs to report on; not used in choosing.
        outputs: how to read the network's output; by default as the loaded model states, or the first tensor.
        quality: measure on the held-out inputs, as for :func:`normscope.drift`.
        after: function such as a calibration, from the paths that stay swapped to the median error that it leaves,
            which ``max_drift`` then bounds. The order of norms is the same; their number is found by trying 0, 1, 3,
            7, … and then by bisection.
        func: curve in the norms' place, for the report.
        init: start values, for the report.
        about: ``model``, ``weights`` and ``data`` of the report.
        progress: called with the stage, the samples run and, if known, their number.

    Returns:
        A :class:`KeepReport`.

    Raises:
        UsageError: if there is nothing to swap, if not one of ``number`` and ``max_drift`` is given, if all norms or
            none are to be kept, or if the drift is too large as long as any norm is swapped.
        DataError: if there is no batch, or fewer than two samples.
        ModelError: if the network raises, or does not call what was swapped in.

    >>> import normscope, torch
    >>> network = normscope.load("demo_vit", limit=8, device="cpu")
    >>> modules = normscope.replacements(network, "dyt", normscope.capture(network, network.calibration))
    >>> report = keep(network, network.calibration, modules, number=1)
    >>> len(report.kept), len(report.swapped), report.steps[1].error.p50 < report.steps[0].error.p50
    (1, 16, True)
    """
    modules = replacements or {}
    sites = list(modules)
    _check(sites, number, max_drift)
    loaded = model
    if batches is None and isinstance(model, LoadedModel):
        batches = model.inputs if model.calibration is None else model.calibration
    network, batches, about, outputs = unpacked(model, batches, about, outputs)
    pool = Pool.of(batches)
    few = subsampled([*pool.learned, *pool.validation], MOST_SAMPLES)
    if not few:
        raise DataError("There is no batch to choose on.")
    network, counter = uncompiled(network), StageProgress(progress, STAGE, None)
    search = _Search(PairedPasses(network, few, modules, outputs, advance=counter.add), sites)
    if number is not None:
        chosen, tried = number, {} if after is None else {number: after(search.swapped(number))}
    else:
        chosen, tried = _fewest(search, math.inf if max_drift is None else max_drift, after)
    search.step(chosen)
    steps = [replace(step, worked_on=tried.get(step.kept)) for step in search.steps]
    n_chosen_on, measure = sum(len(batch.samples) for batch in few), measure_of(outputs.kind)
    report = KeepReport(sites, search.order[:chosen], steps, n_chosen_on, func, init, about, measure=measure)
    if held_out is None:
        return report
    meter = QualityMeter(loaded, quality, held_out, outputs, progress)
    _, held_out, _, outputs = unpacked(loaded, held_out, None, outputs)
    swapped, counter = [search.swapped(kept) for kept in range(chosen + 1)], StageProgress(progress, HELD_OUT, None)
    errors = _errors(PairedPasses(network, held_out, modules, outputs, advance=counter.add), swapped)
    meter.add("original", network)
    for kept, paths in enumerate(swapped):
        with Swap(network, {path: modules[path] for path in paths}):
            meter.add(f"{kept} kept", network)
    taken = [replace(step, held_out=error) for step, error in zip(report.taken, errors, strict=True)]
    return replace(report, steps=[*taken, *report.steps[len(taken) :]], quality=meter.quality)


def _check(sites: Sequence[str], number: int | None, max_drift: float | None) -> None:
    if not sites:
        raise UsageError("There is nothing to swap: the replacements name no module.")
    if (number is None) == (max_drift is None):
        raise UsageError("Pass a number of norms to keep, or max_drift: one of the two.")
    if number is not None and not 1 <= number < len(sites):
        raise UsageError(f"{number} norms cannot be kept of {len(sites)}: take 1 to {len(sites) - 1}.")
    if max_drift is not None and not 0 <= max_drift < math.inf:
        raise UsageError(f"max_drift is {max_drift}; it is an error at the output, 0 or more.")


class _Search:
    """Greedy search for the order in which norms are restored, continued as far as needed.

    Attributes:
        order: paths of the norms restored so far.
        steps: one for each number of norms restored, from none on.
    """

    def __init__(self, passes: PairedPasses, sites: Sequence[str]) -> None:
        self._passes, self._sites, self.order = passes, sites, list[str]()
        (everything,) = _errors(passes, [sites])
        self.steps = [KeepStep(None, 0, len(sites), everything)]

    def swapped(self, kept: int) -> list[str]:
        """Return the paths that stay swapped with a number of norms kept."""
        self.step(kept)
        return [path for path in self._sites if path not in self.order[:kept]]

    def step(self, kept: int) -> KeepStep:
        """Restore norms up to a number, and return the step with the error then."""
        while len(self.order) < kept:
            left = [path for path in self._sites if path not in self.order]
            if len(left) == 1:
                errors = [Quantiles.of([0.0] * self.steps[-1].error.n)]
            else:
                errors = _errors(self._passes, [[site for site in left if site != path] for path in left])
            error, path = min(zip(errors, left, strict=True), key=lambda pair: pair[0].p50)
            self.order.append(path)
            self.steps.append(KeepStep(path, len(self.order), len(left) - 1, error))
        return self.steps[kept]


def _errors(passes: PairedPasses, swapped: Sequence[Sequence[str]]) -> list[Quantiles]:
    """Return the errors at the output with each of several sets of sites swapped."""
    rows = passes.compared([Configuration("one", None, tuple(paths)) for paths in swapped])
    return [row.error for row in rows if row.at == OUTPUT and not row.part]


def _fewest(search: _Search, most: float, after: After | None) -> tuple[int, dict[int, float]]:
    """Return the smallest number of norms that keeps the drift within a bound, and the errors ``after`` returned."""
    n, tried = search.steps[0].swapped, dict[int, float]()

    def drift(kept: int) -> float:
        if after is None:
            return search.step(kept).error.p50
        if kept not in tried:
            tried[kept] = after(search.swapped(kept))
        return tried[kept]

    low, high, stride = -1, 0, 1  # low is too few
    while not drift(high) <= most:
        if high == n - 1:
            raise UsageError(
                f"With {search.swapped(high)[0]} alone swapped, the median error at the output is {drift(high):.3g}, "
                f"above {most:g}: no norm can be swapped. Allow more drift."
            )
        low, high = high, min(n - 1, high + stride)
        stride *= 1 if after is None else 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if drift(middle) <= most else (middle, high)
    return high, tried
