"""``normscope swap-bench``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import normscope
from normscope.cli.options import figure_path, figure_suffix
from normscope.cli.output import Output
from normscope.cli.running import RunOptions, check_models, named_or_embedded, runs_networks
from normscope.cli.swapping import CALIBRATED, How, Learner, Wanted, check_calibrated, check_kernels, tell_what_stayed
from normscope.errors import DeviceError, UsageError, count
from normscope.models import registry
from normscope.runtime.files import check_writable
from normscope.runtime.processes import Place

if TYPE_CHECKING:
    import torch
    from torch import nn

    from normscope.inputs.loaded_model import LoadedModel
    from normscope.swaps.drift.paired_passes import KeptEnds
    from normscope.swaps.reports import BenchReport, DriftReport, PublishedReport

EXAMPLES = (
    "Examples: normscope swap-bench · normscope swap-bench demo_dit --func dyt,free,rmsnorm --init fit,paper · "
    "normscope swap-bench vit_b16 --sites least:8 · normscope swap-bench llama_7b --device cuda"
)
_VIEWS = ("drift", "speed")
_MANY_CALIBRATIONS = 8
_PUBLISHED = "llama_7b"
CURVES = "dyt,dyisru,derf"


@runs_networks(without=("sample", "device_map", "verify"))
def swap_bench(
    models: list[str] | None = None,
    *,
    func: str = CURVES,
    init: str = "fit",
    refit: str = "neighbours",
    sites: str = "all",
    per: str = "site",
    shift: bool | None = None,
    full: bool = False,
    quick: bool = False,
    all_samples: bool = False,
    seconds: float | None = None,
    figure_format: str | None = None,
    dpi: int = 200,
    style: str = "light",
    run: RunOptions,
    as_json: bool = False,
    output: Path = Path("outputs"),
    quiet: bool = False,
    width: float | None = None,
    title: str | None = None,
) -> None:
    """Replace norms by point-wise functions: how far the outputs move on held-out inputs, and how fast it is."""
    say = Output(as_json, quiet)
    from normscope.figures.style import style_named
    from normscope.models.weights.devices import resolve_device
    from normscope.swaps.bench.bench import in_words

    suffix = figure_suffix(output, figure_format, [], None)
    if output.suffix.lower() == f".{suffix}":
        raise UsageError(f"--output {output} is one file, but each model has {len(_VIEWS)} figures. Name a folder.")
    style_named(style)
    there = resolve_device(run.device)
    where = in_words(there)
    say.result(f"on {where}" if there.type == "cuda" else f"on {where}; no number here is of a GPU")
    names = named_or_embedded(models, say)
    check_models(names)
    _check_published(names, there)
    if quick:
        func, seconds = _quickly(func, full, seconds)
    wanted = Wanted.of(func, init, per, shift, refit)
    check_kernels(wanted.ways, run.device)
    place = Place.from_environment()
    check_calibrated(CALIBRATED in wanted.inits, refit, wanted.ways, place)
    for name, view in itertools.product(names if place.speaks else (), _VIEWS):
        check_writable(figure_path(output, suffix, name, view, []))
    if not place.alone:
        say.remark(f"{place.ranks} ranks divide the drift; speed is of the first alone, while the others wait")
    drifts, speeds, tables = [], [], []
    figures: list[dict[str, str]] = []
    for learner, moved in _drifts(names, sites, wanted, all_samples, run, say):
        network = learner.network
        speed = _speed(network, wanted, run, full, seconds, say)
        if network.name == _PUBLISHED:
            tables.append(_published(network, wanted, say).as_dict())
        files = [entry["file"] for entry in figures]
        paths = {view: figure_path(output, suffix, network.name, view, files) for view in _VIEWS}
        drift = normscope.plot_drift(moved, learner.norms, width=width, title=title, style=style)
        normscope.save_figure(drift, paths["drift"], moved[0].about, dpi)
        timings = normscope.plot_speed(speed, width=width, title=title, style=style)
        normscope.save_figure(timings, paths["speed"], speed.about, dpi)
        for view, path in paths.items():
            say.result(str(path))
            figures.append({"model": network.name, "view": view, "file": str(path)})
        drifts += [report.as_dict() for report in moved]
        speeds.append(speed.as_dict())
    document = {"device": where, "drift": drifts, "speed": speeds, "figures": figures}
    say.document({**document, "published": tables} if tables else document)


def _quickly(func: str, full: bool, seconds: float | None) -> tuple[str, float]:
    """The curve and the seconds of ``--quick``; UsageError where other options ask for more."""
    from normscope.fits.curves.expressions import split_names

    if full or seconds is not None:
        raise UsageError(f"--quick takes the fewest timings; leave {'--full' if full else '--seconds'} out.")
    if func == CURVES:
        return "dyt", 0.0
    if len(split_names(func)) > 1:
        raise UsageError(f"--quick takes one curve, and --func {func} names several.")
    return func, 0.0


def _check_published(names: Sequence[str], there: torch.device) -> None:
    """Refuse what cannot be repeated here, before seven billion weights are made."""
    from normscope.swaps.bench.bench import why_not

    if _PUBLISHED in names and (reason := why_not(there)):
        raise DeviceError(reason)


def _drifts(
    names: Sequence[str], sites: str, wanted: Wanted, all_samples: bool, run: RunOptions, say: Output
) -> Iterator[tuple[Learner, list[DriftReport]]]:
    """Measure the drift of each model; ranks divide its inputs among them, and the first alone gets what they found.

    Raises:
        typer.Exit: at the end, of all ranks but the first.
    """
    speaks = Place.from_environment().speaks
    with run.joined() as ranks:
        for name in names:
            ranks.told(name)  # the others wait here: none loads the next network while the first times this one
            learner = Learner.of(run.load(name, say), sites, run.seed, say, ranks)
            _remark_on_cost(learner, wanted, say)
            moved = _drift(learner, wanted, all_samples, say)
            if speaks:
                yield learner, moved
    if not speaks:
        raise typer.Exit


def _remark_on_cost(learner: Learner, wanted: Wanted, say: Output) -> None:
    """Print how many calibrations there will be, and how to get by with fewer."""
    ways = [how for how in wanted.ways if how.calibrated]
    sites = learner.least or len(learner.norms)
    each = f" for each of {len(ways)} curves" if len(ways) > 1 else ""
    if ways and (rows := 1 + sites + max(0, sites - 2)) > _MANY_CALIBRATIONS:
        say.remark(f"{rows} calibrations{each}: all sites, each alone, and each number of them; --sites 4 takes fewer")


def _drift(learner: Learner, wanted: Wanted, all_samples: bool, say: Output) -> list[DriftReport]:
    """Measure drift for each function and start, on inputs that nothing was fitted to."""
    from normscope.swaps.drift.drift import MOST_SAMPLES
    from normscope.swaps.drift.paired_passes import KeptEnds
    from normscope.tables.drift import drift_tables

    ends = getattr(learner.held_out, "ends", None)
    ends = None if ends is None else KeptEnds(ends)
    # All before the first pass: what cannot be swapped in should fail at once, not after minutes of drift.
    replacements = [(how, learner.replacements(how, learner.fits(how, say), say)) for how in wanted.ways]
    most = None if all_samples else MOST_SAMPLES
    reports = [_drift_of(learner, how, modules, wanted.refit, ends, most, say) for how, modules in replacements]
    say.heading(reports[0].about)
    if reports[0].by_site and (number := reports[0].by_site[0].inputs) < reports[0].all.inputs:
        say.remark(f"each site alone and the cumulative order: on {count(number, 'sample')}; --all-samples takes all")
    for table in drift_tables(reports):
        say.result(table)
    if not any(report.quality for report in reports):
        say.result(f"No quality: {reports[0].no_quality}.")
    _tell_of_calibration(reports, say)
    return reports


def _tell_of_calibration(reports: Sequence[DriftReport], say: Output) -> None:
    done = [(report, report.calibration) for report in reports if report.calibration is not None]
    for _, first in done[:1]:
        say.remark(f"calibrated on {first.data}; measured on {reports[0].about['data']}")
        tell_what_stayed(first.left, first.left_out, say)
    for report, calibration in done:
        if calibration.restored:
            rows = count(calibration.restored, "row")
            say.warn(f"{report.func}: {rows} with the start values, as calibration did not lower the drift there")


def _drift_of(
    learner: Learner,
    how: How,
    modules: Mapping[str, nn.Module],
    refit: str,
    ends: KeptEnds | None,
    most: int | None,
    say: Output,
) -> DriftReport:
    calibration: dict[str, Any] = {"learn": learner.learned, "refit": refit} if how.calibrated else {}
    with say.bars() as progress:
        return normscope.drift(
            learner.network,
            learner.held_out,
            modules,
            ends=ends,
            func=how.func,
            init=how.start,
            **calibration,
            most=most,
            progress=progress,
            ranks=learner.ranks,
        )


def _speed(
    network: LoadedModel, wanted: Wanted, run: RunOptions, full: bool, seconds: float | None, say: Output
) -> BenchReport:
    """Time the network; for an embedded one, which is tiny, its full-size sibling with random weights."""
    from normscope.models.weights.devices import KEEP, dtype_name
    from normscope.swaps.bench.bench import BUDGET
    from normscope.tables.speed import speed_tables

    if sibling := registry.find(network.name).sibling:
        say.remark(f"{network.name} is tiny: speed is that of {sibling}, of the same norms, with random weights")
        size = int(RunOptions.batch_size if run.batch_size == "auto" else run.batch_size)
        of_sibling = replace(run, weights="random", data=None, limit=size, batch_size=size, shuffle=False)
        network = of_sibling.load(sibling, say)
    if not full and seconds != 0:
        limit = BUDGET if seconds is None else seconds
        say.remark(f"timing {network.name} takes about {limit:.0f} s; --quick takes the fewest timings")
    dtypes = None if full or run.dtype in (None, KEEP) else [dtype_name(run.dtype)]
    with say.bars() as progress:
        report = normscope.bench(
            network, curves=wanted.curves, dtypes=dtypes, full=full, budget=seconds, progress=progress
        )
    say.heading(report.about)
    for table in speed_tables(report):
        say.result(table)
    return report


def _published(network: LoadedModel, wanted: Wanted, say: Output) -> PublishedReport:
    from normscope.swaps.bench.bench import published
    from normscope.tables.speed import published_table

    with say.bars() as progress:
        report = published(network.module, wanted.curves, outputs=network.outputs, progress=progress)
    say.result(published_table(report))
    return report
