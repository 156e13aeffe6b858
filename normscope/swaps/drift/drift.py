"""Drift: how far a network's outputs move when something else takes the place of its norms."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from normscope.errors import DataError, UsageError, unknown
from normscope.inputs.entries import taken_once
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.inputs.pool import kept_in_memory
from normscope.inputs.splits import divided, samples_of
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.ranks import ALONE, Ranks
from normscope.runtime.network import uncompiled
from normscope.runtime.progress import Progress, StageProgress, is_one_step, silent
from normscope.swaps.calibrate.calibrate import NEIGHBOURS, REFITS
from normscope.swaps.distances import Configuration, Tallies
from normscope.swaps.drift.paired_passes import Ends, PairedPasses
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.quality.measures import Judge, QualityFunction
from normscope.swaps.replace import CALIBRATED, Calibration, calibrated
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
        model: the network, with its norms: what :func:`normscope.load` returned, or any module.
        batches: held-out inputs, as :func:`normscope.capture` takes them; each is taken while the network is as it
            was. A few numbers per input are kept. Gone through twice where ``cumulative``. None for a loaded model's
            own inputs.
        replacements: what takes the place of which norm, by module path, as
            :func:`normscope.swaps.replace.replacements` makes it; all sites that are swapped at once.
        outputs: how to read what the network returns, and what it is; a loaded model says it.
        ends: yields the samples and latents ``(samples, …)`` at the end of trajectories, by the network as it is at
            the moment of each; they are compared with all sites swapped. Of several ranks each calls it with its own
            :class:`normscope.inputs.splits.Share`. Trajectories that a loaded model is run on have them.
        func: what takes the norms' place, and
        init: with which start values: both stand in every row; ``calibrated`` is done here.
        learn: of ``calibrated``: inputs to learn from, other ones than the batches; at most a gibibyte of them is kept
            in memory. None for a loaded model's calibration; where it has none, and no batches are passed, one source
            of each four of its inputs is measured on, and the others are learned from.
        refit: of ``calibrated``: ``neighbours``, or ``norms`` for the functions alone.
        one_at_a_time: whether each site is also swapped alone.
        cumulative: whether sites are also swapped one after the other.
        most: largest number of samples for each site alone and for the cumulative order, evenly spaced over the
            inputs; None for all. Batches that can be iterated only once are taken whole, as they are with all sites
            swapped.
        quality: a function of yours that says how well the network does what it is for: from the module, in eval mode
            and without gradients, to a number. It is called with no site swapped and with all, by the first rank. None
            for a loaded model's own task, on the same batches: accuracy by labels, perplexity, …; see
            :class:`normscope.inputs.loaded_model.Task`, which can be given, too.
        about: what the report says of itself: ``model``, ``weights``, ``data``.
        progress: called after each of the :func:`passes` that samples run through, with what is swapped in, how many
            samples have run, those of all passes counted, and how many there are; of ``calibrated``, how many sites
            were calibrated, those of all rows counted.
        ranks: the processes that divide the batches among them; see :func:`normscope.pairs.ranks.joined`. The same
            replacements have to be on all of them.

    Returns:
        The report, the same on every rank, whatever their number. Where batches name their ``part``, the output with
        all sites swapped is there for each part, too.

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
    judge = Judge.of(loaded, quality, batches, outputs, progress)
    if cumulative and not one_at_a_time:
        raise UsageError("The cumulative order follows from each site alone: leave one_at_a_time on, or both off.")
    sites = list(replacements)
    if init == CALIBRATED and one_at_a_time and taken_once(batches):
        raise DataError(
            "The batches can be iterated only once, and every calibrated row is measured on all of them; pass a list "
            "of batches, or one_at_a_time=False and cumulative=False."
        )
    if cumulative and len(sites) > 1 and taken_once(batches):
        raise DataError(
            "The batches can be iterated only once, and the cumulative order is known after the first time; pass a "
            "list of batches, or cumulative=False."
        )
    everything = Configuration("all", None, tuple(sites))
    alone = [Configuration("one", path, (path,)) for path in sites] if one_at_a_time else []
    samples = getattr(batches, "n_samples", None)
    rows_wanted = {"one_at_a_time": one_at_a_time, "cumulative": cumulative}
    chosen = _evenly_spaced(batches, most) if one_at_a_time else None
    network, stage = uncompiled(model), stage_of(about, func, init)
    comparison: PairedPasses | CalibratedPasses
    if init == CALIBRATED:
        all_of_them = calibrations(len(sites), **rows_wanted)
        comparison = CalibratedPasses(
            *(network, batches, replacements, outputs, ranks, learn, refit),
            progress=progress,
            stage=stage,
            of=all_of_them,
            chosen=chosen,
        )
    else:
        asked = {**about, "func": func, "init": init, "sites": sites, "number of samples": samples}
        of = None if samples is None else passes(samples, len(sites), most, **rows_wanted)
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
    done = comparison.calibration if isinstance(comparison, CalibratedPasses) else None
    return replace(report, quality=judge.quality, no_quality=judge.untold, calibration=done)


def stage_of(about: Mapping[str, str], func: str, init: str) -> str:
    """Return what :func:`drift` calls its stage where it reports progress.

    >>> stage_of({"model": "demo_vit"}, "dyt", "fit"), stage_of({}, "", "")
    ('demo_vit, dyt, fit', 'samples')
    """
    return ", ".join(filter(None, (about.get("model"), func, init))) or "samples"


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
    """Swap one site after the other; what the first alone does is known already."""
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
        calibration: what the rows so far were calibrated on; that of all sites comes first.
    """

    calibration: DriftCalibration | None = None
    _everything: PairedPasses | None = None

    def __init__(
        self,
        network: nn.Module,
        batches: Iterable[Any],
        modules: Mapping[str, nn.Module],
        outputs: Outputs,
        ranks: Ranks,
        learn: Iterable[Any] | None,
        refit: str,
        *,
        progress: Progress,
        stage: str,
        of: int,
        chosen: Container[tuple[str, int]] | None,
    ) -> None:
        """Keep what to swap and to measure, and as much of the inputs to learn from as memory has room for.

        See :func:`normscope.swaps.drift.drift.drift`; ``of`` is how many sites all rows have, see :func:`calibrations`.
        """
        _check(modules, refit, ranks)
        self._network, self._batches, self._modules, self._outputs = network, batches, modules, outputs
        self._data = str(getattr(learn, "description", None) or "")
        self._learn, self._left_out = kept_in_memory(unpacked(network, learn)[1])
        self._refit, self._progress, self._chosen = refit, progress, chosen
        self._counter = StageProgress(progress, stage, of)

    def compared(self, wanted: Sequence[Configuration], ends: Ends | None = None) -> Tallies:
        """Calibrate each of some swaps and compare, as :meth:`PairedPasses.compared` does.

        Args:
            wanted: the swaps; the first call has that of all sites first.
            ends: of trajectories, compared with all sites swapped.
        """
        tallies = Tallies(wanted)
        for number, done in enumerate(wanted):
            everything = len(done.paths) == len(self._modules)
            passes = self._everything if everything else None
            if passes is None:
                found, both = self._calibrated(done), (self._network, self._batches)
                passes = PairedPasses(
                    *both, found.modules, self._outputs, ALONE, _unheard, {}, found.refitted, self._chosen
                )
                self._everything = passes if everything else self._everything
            tallies.take(number, passes.compared([done], ends if done.swapped == "all" else None))
        return tallies

    @contextlib.contextmanager
    def swapped(self, paths: Sequence[str]) -> Iterator[None]:
        """Swap all sites meanwhile, as they were calibrated together."""
        assert self._everything is not None  # noqa: S101 - compared() begins with all sites
        with self._everything.swapped(paths):
            yield

    def _calibrated(self, done: Configuration) -> Calibration:
        sites, reached = len(done.paths), 0

        def told(stage: str, at: int, of: int | None) -> None:
            nonlocal reached
            if is_one_step(stage):
                if self.calibration is None:  # later ones take no more memory than that of all sites
                    self._progress(stage, at, of)
                return
            now = math.floor(sites * at / (of or at or 1))
            self._counter.add(now - reached)
            reached = now

        modules = {path: self._modules[path] for path in done.paths}
        found = calibrated(self._network, modules, self._learn, outputs=self._outputs, refit=self._refit, progress=told)
        report, before = found.report, self.calibration
        if before is None:
            before = DriftCalibration(
                self._data,
                self._refit,
                report.n_learned,
                report.n_judged,
                self._left_out + report.left_out,
                0,
                report.left,
            )
        self.calibration = replace(before, restored=before.restored + report.restored)
        return found


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


def _unheard(number: int) -> None:
    """Count nothing: sites are counted, and not the samples that they are measured on."""
