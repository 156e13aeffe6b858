"""Drift: how far a network's outputs move when something else takes the place of its norms."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from normscope.errors import DataError, UsageError, unknown
from normscope.inputs.batch import taken_once
from normscope.inputs.held_out import divided, kept_in_memory, samples_of
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.ranks import ALONE, Ranks
from normscope.runtime.network import uncompiled
from normscope.runtime.progress import Progress, StageProgress, is_one_step, silent
from normscope.swaps.calibrate.calibrate import NEIGHBOURS, REFITS
from normscope.swaps.calibrate.swap import calibrated
from normscope.swaps.distances import Configuration, Tallies
from normscope.swaps.drift.paired_passes import Ends, PairedPasses
from normscope.swaps.inits import CALIBRATED
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.quality.measures import Judge, QualityFunction
from normscope.swaps.reports import Drift, DriftCalibration, DriftReport

MOST_SAMPLES = 16  # for each site alone and for the cumulative order


def drift(
    model: nn.Module | LoadedModel,
    batches: Iterable[Any] | None = None,
    replacements: Mapping[str, nn.Module] | None = None,
    *,
    outputs: Outputs | None = None,
    ends: Ends | None = None,
    func: str = "",
    init: str = "",
    learn: Iterable[Any] | None = None,
    refit: str = NEIGHBOURS,
    one_at_a_time: bool = True,
    cumulative: bool = True,
    most: int | None = MOST_SAMPLES,
    quality: QualityFunction | Task | None = None,
    about: Mapping[str, str] | None = None,
    progress: Progress = silent,
    ranks: Ranks = ALONE,
) -> DriftReport:
    """Measure how far the outputs move with all sites swapped, with each alone, and with more and more of them.

    Each batch runs through the network as it is, and again for each of these, from the same state of torch's random
    numbers and with the buffers that the network was found with. The cumulative order is by the median that each site
    alone moves the output, the least first: a greedy search that tries every remaining site at each step would take
    n²/2 passes for n sites in place of 2n, and is not made. A network under ``torch.compile`` runs uncompiled. It is
    left as found, also after an exception. Where memory ends with a batch, it runs in halves.

    With ``init="calibrated"`` every one of these swaps is calibrated by itself, from ``replacements`` on and with its
    own sites alone swapped, on inputs to learn from, before it is measured on the others
    (:func:`normscope.calibrate`): a calibration a row. The network itself has its norms and weights meanwhile.

    Args:
        model: the network, with its norms: the result of :func:`normscope.load`, or any module.
        batches: held-out inputs, as :func:`normscope.capture` takes them; each is taken while the network is as it
            was, and all of them twice if ``cumulative``. None for a loaded model's own inputs.
        replacements: all modules to swap in, by path, from :func:`normscope.swaps.replace.replacements`.
        outputs: how to read the network's output; by default as the loaded model says, or the first tensor.
        ends: yields samples and latents ``(samples, …)`` at the end of trajectories, by the network as it is at the
            moment of each; they are compared with all sites swapped. Each of several ranks calls it with its own
            :class:`normscope.inputs.chunks.Share`. By default those of a loaded model that runs on trajectories.
        func: curve in the norms' place, and
        init: start values, as named in every row; ``calibrated`` calibrates here.
        learn: for ``calibrated``: inputs to learn from, other than the batches, at most a gibibyte in memory. None for
            a loaded model's calibration; without one and without batches, one source in four of its inputs is measured
            on, and the others are learned from.
        refit: for ``calibrated``: ``neighbours``, or ``norms`` for the functions alone.
        one_at_a_time: whether each site is also swapped alone.
        cumulative: whether sites are also swapped one after the other.
        most: largest number of samples for each site alone and for the cumulative order, evenly spaced over the
            inputs; None for all. Batches that can be iterated only once are taken whole, as they are with all sites
            swapped.
        quality: function from the module, in eval mode and without gradients, to a number that grows or falls with
            its quality; called by the first rank with no site swapped and with all. Or a
            :class:`normscope.inputs.loaded_model.Task`; by default a loaded model's own, on the same batches.
        about: ``model``, ``weights`` and ``data`` of the report.
        progress: called after each of the :func:`passes` with the stage, the samples run in all passes, and their
            final number; for ``calibrated``, with the number of calibrated sites in all rows.
        ranks: processes that divide the batches, see :func:`normscope.pairs.ranks.joined`; with equal replacements.

    Returns:
        The report, the same on every rank, whatever their number. If batches name their ``part``, it has a row for the
        output with all sites swapped on each part.

    Raises:
        DataError: if there is no batch, if batches that are needed twice can be iterated only once, or if ranks do not
            see the same, or if there are fewer than two samples to learn from.
        MemoryEndedError: if a single sample takes more memory than there is.
        ModelError: if the network raises, has no such modules, does not call what was swapped in, or cannot be
            calibrated.
        UsageError: if there is nothing to swap, a module comes without batches, if a cumulative order is asked for
            without each site alone, if ``quality`` returns no number, or if there is nothing to calibrate, or to learn
            from.

    >>> import torch
    >>> from normscope.swaps.pointwise import DyT
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> report = drift(model, [torch.randn(16, 4)], {"1": DyT(8)}, func="dyt", init="paper")
    >>> report.all.inputs, 0 < report.all.relative_l2.p50 < 2
    (16, True)
    >>> import normscope
    >>> network = normscope.load("demo_vit", limit=4)
    >>> modules = normscope.replacements(network, "dyt", normscope.capture(network), sites="final")
    >>> drift(network, replacements=modules).about["data"]
    'the first 4 of 64 held-out digits'
    >>> images = torch.cat([batch.args[0] for batch in network.inputs])
    >>> report = drift(network, replacements=modules, quality=lambda module: float(module(images).mean()))
    >>> sorted(report.quality.scores)
    ['original', 'swapped']
    """
    if not replacements:
        raise UsageError("There is nothing to swap: the replacements name no module.")
    if init == CALIBRATED:
        learn, batches = to_learn_from(model, learn, batches)
    elif learn is not None or refit != NEIGHBOURS:
        name = "learn" if learn is not None else "refit"
        raise UsageError(f"With init={init!r} nothing is calibrated: {name} goes with init='calibrated' alone.")
    if ends is None and isinstance(model, LoadedModel):
        ends = getattr(model.inputs if batches is None else batches, "ends", None)
    loaded = model
    model, batches, about, outputs = unpacked(model, batches, about, outputs)
    judge = Judge(loaded, quality, batches, outputs, progress)
    if cumulative and not one_at_a_time:
        raise UsageError("The cumulative order follows from each site alone: leave one_at_a_time on, or both off.")
    sites = list(replacements)
    if taken_once(batches) and ((init == CALIBRATED and one_at_a_time) or (cumulative and len(sites) > 1)):
        once = "one_at_a_time=False and cumulative=False" if init == CALIBRATED else "cumulative=False"
        raise DataError(
            f"The batches can be iterated only once, and are needed several times; pass a list of batches, or {once}."
        )
    everything = Configuration("all", None, tuple(sites))
    alone = [Configuration("one", path, (path,)) for path in sites] if one_at_a_time else []
    chosen = _evenly_spaced(batches, most) if one_at_a_time else None
    rounds = {"one_at_a_time": one_at_a_time, "cumulative": cumulative}
    network, stage = uncompiled(model), ", ".join(filter(None, (about.get("model"), func, init))) or "samples"
    comparison: PairedPasses | CalibratedPasses
    if init == CALIBRATED:
        _check(replacements, refit, ranks)
        counter = StageProgress(progress, stage, calibrations(len(sites), **rounds))
        passes_with = partial(PairedPasses, network, batches, outputs=outputs, ranks=ALONE, chosen=chosen)
        comparison = CalibratedPasses(network, replacements, learn, outputs, refit, passes_with, progress, counter)
    else:
        samples = getattr(batches, "n_samples", None)
        asked = {**about, "func": func, "init": init, "sites": sites, "number of samples": samples}
        of = None if samples is None else passes(samples, len(sites), most, **rounds)
        counter = StageProgress(progress, stage, of, ranks.size)
        comparison = PairedPasses(network, batches, replacements, outputs, ranks, counter.add, asked, chosen=chosen)
    rows = comparison.compared([everything, *alone], ends).rows(func, init, sites)
    report = DriftReport(func, init, sites, rows, about)
    if cumulative:
        report = replace(report, rows=[*rows, *_cumulative(comparison, report)])
    if ranks.rank == 0:
        judge.add("original", network)
        with comparison.swapped(sites):
            judge.add("swapped", network)
    judge.settle(ranks)
    calibration = comparison.calibration if isinstance(comparison, CalibratedPasses) else None
    return replace(report, quality=judge.quality, no_quality=judge.untold, calibration=calibration)


def passes(
    samples: int, sites: int, most: int | None = None, *, one_at_a_time: bool = True, cumulative: bool = True
) -> int:
    """Return the number of passes of single samples in :func:`drift`, trajectories aside: the end of a progress bar.

    >>> passes(100, 25), passes(100, 25, 16), passes(100, 25, one_at_a_time=False, cumulative=False)
    (5300, 1016, 200)
    """
    rounds = [sites] * one_at_a_time + [sites - 1] * (cumulative and sites > 1)
    return 2 * samples + (samples if most is None else min(most, samples)) * sum(1 + swaps for swaps in rounds)


def _evenly_spaced(batches: Iterable[Any], most: int | None) -> frozenset[tuple[str, int]] | None:
    """Return data set and index of at most ``most`` samples; None for all.

    All ranks choose the same, however the batches are divided among them.
    """
    if most is None or taken_once(batches):
        return None
    samples = samples_of(batches)
    number = min(most, len(samples))
    chosen = (samples[i * len(samples) // number] for i in range(number))
    return frozenset((sample.data, sample.index) for sample in chosen)


def _cumulative(comparison: PairedPasses | CalibratedPasses, report: DriftReport) -> list[Drift]:
    """Swap one site after another; the row of the first alone exists already."""
    order = report.least_harmful(len(report.sites))
    first = next(row for row in report.by_site if row.site == order[0])
    more = [Configuration("cumulative", order[n - 1], tuple(order[:n])) for n in range(2, len(order) + 1)]
    rows = comparison.compared(more).rows(report.func, report.init, report.sites) if more else []
    return [replace(first, swapped="cumulative"), *rows]


def calibrations(sites: int, *, one_at_a_time: bool = True, cumulative: bool = True) -> int:
    """Return how many sites :func:`drift` calibrates, those of all rows counted: what a progress bar ends at.

    >>> calibrations(4), calibrations(4, one_at_a_time=False, cumulative=False)  # 4, four times 1, 2 and 3
    (13, 4)
    """
    return sites + (sites if one_at_a_time else 0) + (sum(range(2, sites)) if cumulative else 0)


class CalibratedPasses:
    """A network with and without its norms, each swap calibrated by itself before it is measured.

    Attributes:
        calibration: inputs that the rows so far were calibrated on; that of all sites comes first.
    """

    calibration: DriftCalibration | None = None
    _everything: PairedPasses | None = None

    def __init__(
        self,
        network: nn.Module,
        modules: Mapping[str, nn.Module],
        learn: Iterable[Any] | None,
        outputs: Outputs,
        refit: str,
        passes_with: Callable[..., PairedPasses],
        progress: Progress,
        counter: StageProgress,
    ) -> None:
        """Keep the swap, and as much of the inputs to learn from as memory has room for.

        Arguments are those of :func:`drift`; ``passes_with`` makes the passes with given modules, and ``counter``
        counts the calibrated sites of all rows.
        """
        self._network, self._modules, self._outputs, self._refit = network, modules, outputs, refit
        self._data = str(getattr(learn, "description", None) or "")
        self._learn, self._left_out = kept_in_memory(unpacked(network, learn)[1])
        self._passes_with, self._progress, self._counter = passes_with, progress, counter

    def compared(self, configurations: Sequence[Configuration], ends: Ends | None = None) -> Tallies:
        """Calibrate each of some swaps and compare, as :meth:`PairedPasses.compared` does; all sites come first."""
        tallies = Tallies(configurations)
        for number, done in enumerate(configurations):
            everything = len(done.paths) == len(self._modules)
            passes = self._everything if everything else None
            if passes is None:
                modules, refitted = self._calibrated(done)
                passes = self._passes_with(modules, refitted=refitted)
                self._everything = passes if everything else self._everything
            tallies.take(number, passes.compared([done], ends if done.swapped == "all" else None))
        return tallies

    @contextlib.contextmanager
    def swapped(self, paths: Sequence[str]) -> Iterator[None]:
        """Swap all sites meanwhile, as they were calibrated together."""
        assert self._everything is not None  # noqa: S101 - compared() begins with all sites
        with self._everything.swapped(paths):
            yield

    def _calibrated(self, done: Configuration) -> tuple[dict[str, nn.Module], dict[str, Tensor]]:
        sites, reached = len(done.paths), 0

        def told(stage: str, at: int, of: int | None) -> None:
            nonlocal reached
            if not is_one_step(stage):
                now = math.floor(sites * at / (of or at or 1))
                self._counter.add(now - reached)
                reached = now
            elif self.calibration is None:  # later calibrations take no more memory than that of all sites
                self._progress(stage, at, of)

        start = {path: self._modules[path] for path in done.paths}
        modules, refitted, report = calibrated(
            *(self._network, start, self._learn), outputs=self._outputs, refit=self._refit, progress=told
        )
        before = self.calibration or DriftCalibration(
            self._data,
            self._refit,
            report.n_learned,
            report.n_judged,
            self._left_out + report.left_out,
            0,
            report.left,
        )
        self.calibration = replace(before, restored=before.restored + report.restored)
        return modules, refitted


def to_learn_from(
    model: nn.Module | LoadedModel, learn: Iterable[Any] | None, batches: Iterable[Any] | None
) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """Return the inputs of the calibration, and those of the drift."""
    if learn is None and isinstance(model, LoadedModel):
        if model.calibration is not None:
            learn = model.calibration
        elif batches is None:
            learn, batches = divided(model.inputs)
    if learn is None:
        raise UsageError(
            "init='calibrated' learns from other inputs than the drift is measured on: pass learn=, batches as "
            "normscope.capture takes them."
        )
    if learn is batches:
        raise UsageError("The drift is measured on other inputs than calibration learns from; both are the same here.")
    return learn, batches


def _check(modules: Mapping[str, nn.Module], refit: str, ranks: Ranks) -> None:
    if refit not in REFITS:
        raise UsageError(unknown("refit", refit, REFITS))
    for path, module in modules.items():
        if not isinstance(module, PointwiseFunction):
            raise UsageError(
                f"What takes the place of {path} is a {type(module).__name__}: point-wise functions alone are "
                "calibrated."
            )
    if ranks.size > 1:
        raise UsageError(f"Calibration runs in one process, and {ranks.size} measure this drift.")
