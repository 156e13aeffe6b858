"""Drift: how far a network's outputs move when something else takes the place of its norms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from normscope.errors import DataError, UsageError
from normscope.inputs.entries import taken_once
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.ranks import ALONE, Ranks
from normscope.runtime.network import uncompiled
from normscope.runtime.progress import Progress, StageProgress, silent
from normscope.swaps.calibrate.calibrate import NEIGHBOURS
from normscope.swaps.drift.calibrated_passes import CalibratedPasses, calibrations, to_learn_from
from normscope.swaps.drift.distances import Configuration
from normscope.swaps.drift.paired_passes import Ends, PairedPasses
from normscope.swaps.drift.reports import Drift, DriftReport
from normscope.swaps.quality.judge import Judge, QualityFunction
from normscope.swaps.replace import CALIBRATED


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
    quality: QualityFunction | Task | None = None,
    about: Mapping[str, str] | None = None,
    progress: Progress = silent,
    ranks: Ranks = ALONE,
) -> DriftReport:
    """Measure how far the outputs move with all sites swapped, with each alone, and with more and more of them.

    Each batch runs through the network as it is, and again for each of these, from the same state of torch's random
    numbers and with the buffers that the network was found with. The cumulative order is by the median that each site
    alone moves the output, the least first: a greedy search that tries every remaining site at each step would take
    n²/2 passes for n sites in place of 2n, and is not made. Where a network is so small that the code around it takes
    longer, several of these run as one batch; that changes the rounding of sums, and nothing else. A network under
    ``torch.compile`` runs uncompiled. It is left as found, also after an exception. Where memory ends with a batch, it
    runs in halves.

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
    if cumulative and len(sites) > 2 and taken_once(batches):
        raise DataError(
            "The batches can be iterated only once, and the cumulative order is known after the first time; pass a "
            "list of batches, or cumulative=False."
        )
    everything = Configuration("all", None, tuple(sites))
    alone = [Configuration("one", path, (path,)) for path in sites] if one_at_a_time else []
    samples = getattr(batches, "n_samples", None)
    rows_wanted = {"one_at_a_time": one_at_a_time, "cumulative": cumulative}
    network, stage = uncompiled(model), stage_of(about, func, init)
    comparison: PairedPasses | CalibratedPasses
    if init == CALIBRATED:
        all_of_them = calibrations(len(sites), **rows_wanted)
        comparison = CalibratedPasses(
            *(network, batches, replacements, outputs, ranks, learn, refit),
            progress=progress,
            stage=stage,
            of=all_of_them,
        )
    else:
        asked = {**about, "func": func, "init": init, "sites": sites, "number of samples": samples}
        of = None if samples is None else samples * passes(len(sites), **rows_wanted)
        counter = StageProgress(progress, stage, of, ranks.size)
        comparison = PairedPasses(network, batches, replacements, outputs, ranks, counter.add, asked)
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


def passes(sites: int, *, one_at_a_time: bool = True, cumulative: bool = True) -> int:
    """Return how many times :func:`drift` runs each sample, trajectories aside: what a progress bar ends at.

    >>> passes(25), passes(25, one_at_a_time=False, cumulative=False)
    (51, 2)
    """
    more = sites - 2 + 1 if cumulative and sites > 2 else 0
    return 2 + (sites if one_at_a_time else 0) + more


def _cumulative(comparison: PairedPasses | CalibratedPasses, report: DriftReport) -> list[Drift]:
    """Swap one site after the other; what the first alone and all together do is known already."""
    order = report.least_harmful(len(report.sites))
    first = next(row for row in report.by_site if row.site == order[0])
    last = replace(report.all, site=order[-1], frames=None)
    between = [Configuration("cumulative", order[number - 1], tuple(order[:number])) for number in range(2, len(order))]
    between_rows = comparison.compared(between).rows(report.func, report.init, report.sites) if between else []
    known = [first, *between_rows, last] if len(order) > 1 else [first]
    return [replace(row, swapped="cumulative") for row in known]
