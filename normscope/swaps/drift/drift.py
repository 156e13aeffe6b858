"""Drift of a network's outputs after its norms are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch, taken_once
from normscope.inputs.held_out import divided, kept_in_memory, samples_of
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.norms.bound_inputs import unpacked
from normscope.pairs.ranks import ALONE, Ranks
from normscope.runtime.network import uncompiled
from normscope.runtime.progress import Progress, StageProgress, silent
from normscope.swaps.calibrate.calibrate import NEIGHBOURS, calibrated, check_not_calibrated
from normscope.swaps.drift.paired_passes import Configuration, Ends, PairedPasses
from normscope.swaps.drift.reports import DriftCalibration, DriftReport
from normscope.swaps.inits import CALIBRATED
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.quality import QualityFunction, QualityMeter
from normscope.swaps.reports import Drift

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

    Each batch runs through the network as it is, then once for each swap, from the same random numbers and buffers. The
    cumulative order is by the median drift of each site alone, the least first. (A greedy search that tries every
    remaining site at each step would take n²/2 passes for n sites instead of 2n.) A network under ``torch.compile``
    runs uncompiled. It is restored, also after an exception. Where memory ends with a batch, it runs in halves.

    With ``init="calibrated"``, every row is calibrated by itself before it is measured: from ``replacements`` on, with
    only its own sites swapped, on inputs other than those it is measured on (:func:`normscope.calibrate`).

    Args:
        model: the network, with its norms: the result of :func:`normscope.load`, or any module.
        batches: held-out inputs, as :func:`normscope.capture` takes them, which are iterated twice if ``cumulative``.
            None for a loaded model's own inputs.
        replacements: all modules to swap in, by path, from :func:`normscope.swaps.replace.replacements`.
        outputs: how to read the network's output; by default as the loaded model states, or the first tensor.
        ends: yields samples and latents ``(samples, …)`` at the end of trajectories, by the network as it is at the
            moment of each; they are compared with all sites swapped. Each of several ranks calls it with its own
            :class:`normscope.inputs.chunks.RankSampler`. By default those of a loaded model that runs on trajectories.
        func: name of the curve in the norms' place, for the rows.
        init: name of the start values, for the rows; ``calibrated`` calibrates here.
        learn: for ``calibrated``: inputs to learn from, other than the batches, at most a gibibyte in memory. None for
            a loaded model's calibration inputs; without these and without batches, a fourth of the sources among its
            inputs is measured on, and the others are learned from.
        refit: for ``calibrated``: ``neighbours``, or ``norms`` for the functions alone.
        one_at_a_time: also swap each site alone.
        cumulative: also swap one site after the other.
        most: largest number of samples for each site alone and for the cumulative order, evenly spaced over the
            inputs; None for all. Batches that can be iterated only once are used whole, as with all sites swapped.
        quality: function from the module, in eval mode and without gradients, to a number that grows or falls with
            its quality; called by the first rank with no site swapped and with all. Or a
            :class:`normscope.inputs.loaded_model.Task`; by default a loaded model's own, on the same batches.
        about: ``model``, ``weights`` and ``data`` of the report.
        progress: called after each pass with the stage, the samples run in all passes, and their total; for
            ``calibrated``, with the progress of the first calibration, and the number of calibrated sites in all rows.
        ranks: of :func:`normscope.pairs.ranks.process_group`, which divide the batches; with equal replacements.

    Returns:
        The report, the same on every rank, whatever their number. If batches name their ``part``, it has a row for the
        output with all sites swapped on each part.

    Raises:
        DataError: if there is no batch, if batches that are needed twice can be iterated only once, if ranks do not
            see the same, or if there are fewer than two samples to learn from.
        MemoryEndedError: if a single sample takes more memory than there is.
        ModelError: if the network raises, has no such modules, does not call what was swapped in, or cannot be
            calibrated.
        UsageError: if there is nothing to swap or to learn from, if batches are missing, if ``cumulative`` is asked for
            without ``one_at_a_time``, if ``quality`` returns no number, or if a replacement cannot be calibrated.

    >>> import torch
    >>> from normscope.swaps.pointwise import DyT
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> report = drift(model, [torch.randn(16, 4)], {"1": DyT(8)}, func="dyt", init="paper")
    >>> report.all.inputs, 0 < report.all.relative_l2.p50 < 2
    (16, True)
    >>> import normscope
    >>> network = normscope.load("demo_vit", limit=4)
    >>> modules = normscope.replacements(network, "dyt", normscope.capture(network), layers="final")
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
        learn, batches = _to_learn_from(model, learn, batches)
    else:
        check_not_calibrated(init, learn=learn is not None, refit=refit != NEIGHBOURS)
    if ends is None and isinstance(model, LoadedModel):
        ends = getattr(model.inputs if batches is None else batches, "ends", None)
    loaded = model
    model, batches, about, outputs = unpacked(model, batches, about, outputs)
    meter = QualityMeter(loaded, quality, batches, outputs, progress)
    if cumulative and not one_at_a_time:
        raise UsageError("The cumulative order requires one_at_a_time=True; otherwise pass cumulative=False.")
    sites = list(replacements)
    if taken_once(batches) and ((init == CALIBRATED and one_at_a_time) or (cumulative and len(sites) > 1)):
        once = "one_at_a_time=False and cumulative=False" if init == CALIBRATED else "cumulative=False"
        raise DataError(
            f"The batches can be iterated only once, and are needed several times; pass a list of batches, or {once}."
        )
    everything = Configuration("all", None, tuple(sites))
    alone = [Configuration("one", path, (path,)) for path in sites] if one_at_a_time else []
    chosen = _evenly_spaced(batches, most) if one_at_a_time else None
    n = len(sites)
    network, stage = uncompiled(model), ", ".join(filter(None, (about.get("model"), func, init))) or "samples"
    if init == CALIBRATED:
        _check_calibrated(replacements, ranks)
        kept, left_out = kept_in_memory(unpacked(network, learn)[1])
        calibration = DriftCalibration(str(getattr(learn, "description", None) or ""), refit, left_out=left_out)
        calibrations = n + (n if one_at_a_time else 0) + (sum(range(2, n)) if cumulative else 0)
        paired: PairedPasses = CalibratedPasses(
            *(network, batches, replacements, outputs),
            chosen=chosen,
            learn=kept,
            calibration=calibration,
            progress=progress,
            counter=StageProgress(progress, stage, calibrations),
        )
    else:
        samples, of = getattr(batches, "n_samples", None), None
        if samples is not None:
            few = samples if most is None else min(most, samples)
            of = 2 * samples + few * ((1 + n if one_at_a_time else 0) + (n if cumulative and n > 1 else 0))
        settings = {**about, "func": func, "init": init, "sites": sites, "number of samples": samples}
        counter = StageProgress(progress, stage, of, ranks.size)
        paired = PairedPasses(network, batches, replacements, outputs, ranks, counter.add, settings, chosen=chosen)

    def compared(configurations: Sequence[Configuration], ends: Ends | None = None) -> list[Drift]:
        return [replace(row, func=func, init=init) for row in paired.compared(configurations, ends)]

    report = DriftReport(func, init, sites, compared([everything, *alone], ends), about)
    if cumulative:
        order = report.least_harmful(n)
        first = next(row for row in report.by_site if row.site == order[0])
        more = [Configuration("cumulative", order[k - 1], tuple(order[:k])) for k in range(2, n + 1)]
        rows = [replace(first, swapped="cumulative"), *(compared(more) if more else [])]
        report = replace(report, rows=[*report.rows, *rows])
    if ranks.rank == 0:
        meter.add("original", network)
        with paired.swapped(sites):
            meter.add("swapped", network)
    meter.share_with(ranks)
    report = replace(report, quality=meter.quality, no_quality=meter.no_quality)
    return replace(report, calibration=paired.calibration) if isinstance(paired, CalibratedPasses) else report


def _evenly_spaced(batches: Iterable[Any], most: int | None) -> frozenset[tuple[str, int]] | None:
    """Return data set and index of at most ``most`` samples, the same on all ranks; None for all."""
    if most is None or taken_once(batches):
        return None
    samples = samples_of(batches)
    number = min(most, len(samples))
    chosen = (samples[i * len(samples) // number] for i in range(number))
    return frozenset((sample.data, sample.index) for sample in chosen)


@dataclass(kw_only=True)
class CalibratedPasses(PairedPasses):
    """Paired passes of swaps that are each calibrated by themselves, from the modules on, before they are measured."""

    learn: Sequence[Batch]
    calibration: DriftCalibration  # of the rows so far
    progress: Progress  # of the first calibration, which is the longest
    counter: StageProgress  # of the calibrated sites of all rows
    _everything: tuple[Mapping[str, nn.Module], Mapping[str, Tensor]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._start = self.modules

    def compared(self, configurations: Sequence[Configuration], ends: Ends | None = None) -> list[Drift]:
        """Calibrate each swap and compare; the first call begins with all sites, whose calibration is kept."""
        rows: list[Drift] = []
        for configuration in configurations:
            whole = len(configuration.paths) == len(self._start)
            self.modules, self.refitted = (whole and self._everything) or self._calibrated(configuration.paths)
            self._everything = self._everything or (self.modules, self.refitted)
            rows += super().compared([configuration], ends if configuration.swapped == "all" else None)
            self.modules, self.refitted = self._everything
        return rows

    def _calibrated(self, paths: Sequence[str]) -> tuple[Mapping[str, nn.Module], Mapping[str, Tensor]]:
        first, calibration = self._everything is None, self.calibration
        start = {path: self._start[path] for path in paths}
        progress = self.progress if first else silent
        modules, refitted, report = calibrated(
            self.model, start, self.learn, outputs=self.outputs, refit=calibration.refit, progress=progress
        )
        self.counter.add(len(paths))
        if first:
            calibration = replace(
                calibration,
                n_learned=report.n_learned,
                n_judged=report.n_judged,
                left_out=calibration.left_out + report.left_out,
                left=report.left,
            )
        self.calibration = replace(calibration, restored=calibration.restored + report.restored)
        return modules, refitted


def _to_learn_from(
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
            "init='calibrated' learns from other inputs than the drift is measured on: pass batches as learn=."
        )
    if learn is batches:
        raise UsageError("learn and batches are the same inputs; calibration has to learn from other inputs.")
    return learn, batches


def _check_calibrated(modules: Mapping[str, nn.Module], ranks: Ranks) -> None:
    for path, module in modules.items():
        if not isinstance(module, PointwiseFunction):
            kind = type(module).__name__
            raise UsageError(f"The replacement of {path} is a {kind}, and only point-wise functions can be calibrated.")
    if ranks.size > 1:
        raise UsageError(f"Calibration runs in one process, but {ranks.size} measure this drift.")
