"""keep(): which norms to leave as they are, chosen by what each is worth in the partly swapped network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch
from normscope.inputs.held_out import Pool, evenly
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.pairs.norms.streams import unpacked
from normscope.runtime.network import uncompiled
from normscope.runtime.progress import Progress, StageProgress, silent
from normscope.swaps.distances import Configuration, measure_of
from normscope.swaps.drift.paired_passes import PairedPasses
from normscope.swaps.quality.measures import Judge, QualityFunction
from normscope.swaps.replace import Swap
from normscope.swaps.reports import OUTPUT, Drift, KeepReport, KeepStep, Quantiles

MOST_SAMPLES = 48  # that a choice is made on: norms differ by more than a median over these is uncertain
STAGE, HELD_OUT = "keep", "keep, held out"

# From the paths that stay swapped to the median error at the output once these were worked on.
After = Callable[[Sequence[str]], float]


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
    """Choose which norms to keep: from all swapped, put back the one that lowers the drift most, and again.

    What a norm is worth depends on which others are swapped. So each step tries every norm that is still swapped, with
    all that came back before it in their places, and takes the one with the least median error at the output, the KL
    divergence of logits and the relative L2 of everything else:
    n passes a step for n sites, over at most 48 samples (:data:`MOST_SAMPLES`). The network is left as found.

    Args:
        model: the network, with its norms: the result of :func:`normscope.load`, or any module.
        batches: inputs to choose on, as :func:`normscope.capture` takes them; None for a loaded model's calibration, or
            without one its inputs.
        replacements: modules to swap in, by path, from :func:`normscope.replacements`.
        number: number of norms to keep; or
        max_drift: the median error to stay at or below, with as few norms as possible.
        held_out: inputs to report on; not used in choosing.
        outputs: how to read the network's output; by default as the loaded model says, or the first tensor.
        quality: measure on the held-out inputs, as for :func:`normscope.drift`.
        after: function such as a calibration, from the paths that stay swapped to the median error that it leaves,
            which ``max_drift`` then bounds. Norms come back in the same order; their number is found by trying 0, 1,
            3, 7, … and then halves between.
        func: curve in the norms' place, and
        init: start values, for the report, as
        about: ``model``, ``weights`` and ``data``.
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
    sites = list(replacements or ())
    _check(sites, number, max_drift)
    loaded = model
    if batches is None and isinstance(model, LoadedModel):
        batches = model.inputs if model.calibration is None else model.calibration
    network, batches, about, outputs = unpacked(model, batches, about, outputs)
    pool = Pool.of(batches)
    few = evenly([*pool.learned, *pool.judged], MOST_SAMPLES)
    search = _Search(uncompiled(network), few, replacements or {}, outputs, progress)
    if number is not None:
        chosen, tried = number, {} if after is None else {number: after(search.swapped(number))}
    else:
        assert max_drift is not None  # noqa: S101  # as was checked
        chosen, tried = _fewest(search, max_drift, after)
    search.step(chosen)
    kept = search.order[:chosen]
    steps = [replace(step, worked_on=tried.get(step.kept)) for step in search.steps]
    n_chosen_on, measure = sum(len(batch.samples) for batch in few), measure_of(outputs.kind)
    report = KeepReport(sites, kept, steps, n_chosen_on, func, init, about, measure=measure)
    if held_out is None:
        return report
    return _on_held_out(report, loaded, held_out, replacements or {}, outputs, quality, progress)


def _check(sites: Sequence[str], number: int | None, max_drift: float | None) -> None:
    if not sites:
        raise UsageError("There is nothing to swap: the replacements name no module.")
    if (number is None) == (max_drift is None):
        raise UsageError("Say how many norms to keep, or which drift to stay at or below: one of the two.")
    if number is not None and not 1 <= number < len(sites):
        raise UsageError(f"{number} norms cannot be kept of {len(sites)}: take 1 to {len(sites) - 1}.")
    if max_drift is not None and not 0 <= max_drift < math.inf:
        raise UsageError(f"The drift to stay at or below is {max_drift}; it is an error at the output, 0 or more.")


class _Search:
    """The order in which norms come back, found as far as it is asked for.

    Attributes:
        order: paths of the norms that came back so far.
        steps: one more than these.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Sequence[Batch],
        modules: Mapping[str, nn.Module],
        outputs: Outputs,
        progress: Progress,
    ) -> None:
        if not batches:
            raise DataError("There is no batch to choose on.")
        self._sites, self.order = list(modules), list[str]()
        counter = StageProgress(progress, STAGE, None)
        self._passes = PairedPasses(network, batches, modules, outputs, advance=counter.add)
        (everything,) = self._moved([Configuration("one", self._sites[0], tuple(self._sites))])
        self.steps = [KeepStep(None, 0, len(self._sites), _error(everything))]

    def swapped(self, kept: int) -> list[str]:
        """Paths that stay swapped where so many norms are kept."""
        self.step(kept)
        return [path for path in self._sites if path not in self.order[:kept]]

    def step(self, kept: int) -> KeepStep:
        """Put norms back until so many are, and tell how far the output is moved then."""
        while len(self.order) < kept:
            left = [path for path in self._sites if path not in self.order]
            if len(left) == 1:
                self._put_back(left[0], Quantiles.of([0.0] * self.steps[-1].error.n), 0)
                continue
            without = [Configuration("one", path, tuple(site for site in left if site != path)) for path in left]
            best = min(self._moved(without), key=lambda row: _error(row).p50)
            assert best.site is not None  # noqa: S101  # as configured
            self._put_back(best.site, _error(best), len(left) - 1)
        return self.steps[kept]

    def _moved(self, configurations: Sequence[Configuration]) -> list[Drift]:
        rows = self._passes.compared(configurations).rows("", "", self._sites)
        return [row for row in rows if row.at == OUTPUT and not row.part]

    def _put_back(self, path: str, moved: Quantiles, left: int) -> None:
        self.order.append(path)
        self.steps.append(KeepStep(path, len(self.order), left, moved))


def _error(row: Drift) -> Quantiles:
    return row.relative_l2 if row.kl is None else row.kl


def _fewest(search: _Search, most: float, after: After | None) -> tuple[int, dict[int, float]]:
    """Find the fewest norms that keep the drift at or below a bound, and what was tried of what works on the others."""
    n, tried = search.steps[0].swapped, dict[int, float]()

    def drift(kept: int) -> float:
        if after is None:
            return search.step(kept).error.p50
        if kept not in tried:
            tried[kept] = after(search.swapped(kept))
        return tried[kept]

    low, high, stride = -1, 0, 1  # of low it is known, or trivial, that it is too few
    while not drift(high) <= most:
        if high == n - 1:
            raise UsageError(
                f"With one of {n} norms swapped, {search.swapped(high)[0]}, the median error at the output is "
                f"{drift(high):.3g}, and it was to be {most:g} at most: no norm can be swapped. Allow more drift."
            )
        low, high = high, min(n - 1, high + stride)
        stride *= 1 if after is None else 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if drift(middle) <= most else (middle, high)
    return high, tried


def _on_held_out(
    report: KeepReport,
    model: nn.Module | LoadedModel,
    held_out: Iterable[Any],
    modules: Mapping[str, nn.Module],
    outputs: Outputs,
    quality: QualityFunction | Task | None,
    progress: Progress,
) -> KeepReport:
    """Measure drift and quality for each number of norms up to those kept."""
    judge = Judge(model, quality, held_out, outputs, progress)
    module, held_out, _, outputs = unpacked(model, held_out, None, outputs)
    network, order = uncompiled(module), report.kept
    left = [tuple(path for path in report.sites if path not in order[:kept]) for kept in range(len(order) + 1)]
    counter = StageProgress(progress, HELD_OUT, None)
    passes = PairedPasses(network, held_out, modules, outputs, advance=counter.add)
    rows = passes.compared([Configuration("one", paths[0], paths) for paths in left]).rows("", "", report.sites)
    moved = [_error(row) for row in rows if row.at == OUTPUT and not row.part]
    judge.add("original", network)
    for kept, paths in enumerate(left):
        with Swap(network, {path: modules[path] for path in paths}):
            judge.add(f"{kept} kept", network)
    taken = [replace(step, held_out=own) for step, own in zip(report.taken, moved, strict=True)]
    return replace(report, steps=[*taken, *report.steps[len(taken) :]], quality=judge.quality)
