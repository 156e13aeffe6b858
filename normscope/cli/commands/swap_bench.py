"""``normscope swap-bench``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import normscope
from normscope.cli import options, swapping
from normscope.cli.figure_files import PLOT_ONLY, FigureFiles, Look
from normscope.cli.output import FIGURES, Output
from normscope.cli.running import RunOptions, check_models, named_or_embedded
from normscope.errors import UsageError, count
from normscope.runtime.processes import Process

if TYPE_CHECKING:
    from normscope.inputs.loaded_model import LoadedModel
    from normscope.swaps.drift.reports import DriftReport
    from normscope.tools.bench.reports import BenchReport

_MANY_CALIBRATIONS = 8
# Models with the norms of the embedded ones, in full size. LV60K is pre-norm, with LayerNorms before its encoder.
_FULL_SIZE = {"demo_vit": "vit_b16", "demo_wav2vec2": "wav2vec2_large_lv60k", "demo_dit": "dit_xl"}


@options.with_groups(
    "normscope swap-bench · normscope swap-bench demo_dit --func dyt,free,rmsnorm --init fit,paper · "
    "normscope swap-bench vit_b16 --layers least:8",
    without=("sample", "workers", "verify", "columns", *PLOT_ONLY),
)
def swap_bench(
    models: options.OnlyModels = None,
    *,
    func: options.SwapFuncs = "dyt,dyisru",
    init: options.Inits = "fit",
    refit: options.Refit = "neighbours",
    layers: options.SwappedLayers = "all",
    per: options.SwapPer = "site",
    shift: options.SwapShift = None,
    full: options.Full = False,
    quick: options.Quick = False,
    run: RunOptions,
    output: options.BenchOutput = Path(FIGURES),
    look: Look,
    out: Output,
) -> None:
    """Replace norms by point-wise functions; measure the output error on held-out inputs, and the speed."""
    # torch.utils.benchmark warns of a CUDA toolkit without a GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from normscope.models.weights.devices import resolve_device
    from normscope.tools.bench.bench import in_words

    names = named_or_embedded(models, out)
    check_models(names)
    timed = run.device_map is None
    if quick and full:
        raise UsageError("--quick takes the fewest timings; leave --full out.")
    if not timed and (full or quick):
        raise UsageError(f"Under --device-map nothing is timed: leave {'--full' if full else '--quick'} out.")
    choices = swapping.swap_choices(func, init, per, shift)
    curves = list(dict.fromkeys(choice.func for choice in choices if choice.func not in ("free", "best")))
    swapping.check_calibrated(init, refit, choices, run.device_map)
    swapping.check_kernels(choices, run.device)
    process = Process.current()
    files = FigureFiles(output, look, names if process.is_first else [], ["drift", *(["speed"] if timed else [])])
    device = resolve_device(run.device)
    where = in_words(device)
    out.result(f"on {where}" if device.type == "cuda" else f"on {where}; no number here is of a GPU")
    if not process.alone:
        out.remark(f"{process.ranks} ranks divide the drift; speed is of the first alone, while the others wait")
    if not timed:
        out.result("No speed: under --device-map the transfers between devices are what would be timed.")
    drifts, speeds = [], []
    figures: list[dict[str, str]] = []
    with run.joined() as ranks:
        for name in names:
            ranks.gather(name)  # the other ranks wait: none loads the next network while the first times this one
            network = run.load(name, out)
            source = swapping.SwapSource(network, layers, run, out, ranks)
            _remark_on_calibrations(source, choices, out)
            reports = _drift(source, choices, refit, out)
            if not process.is_first:
                continue
            drifts += [report.as_dict() for report in reports]
            drift_figure = normscope.figures.plot_drift(reports, source.norms, **look.figure_options)
            views = [("drift", drift_figure, reports[0].about)]
            if timed:
                speed = _speed(network, curves, run, full, quick, out)
                speeds.append(speed.as_dict())
                views.append(("speed", normscope.figures.plot_speed(speed, **look.figure_options), speed.about))
            for view, figure, about in views:
                file = files.save(figure, view, about, out, network.name)
                figures.append({"model": network.name, "view": view, "file": file})
    if not process.is_first:
        raise typer.Exit
    out.document({"device": where, "drift": drifts, "speed": speeds, "figures": figures})


def _remark_on_calibrations(source: swapping.SwapSource, choices: Sequence[swapping.SwapChoice], out: Output) -> None:
    """Print the number of calibrations, and how to reduce it."""
    calibrated = [choice for choice in choices if choice.calibrated]
    sites = source.least or len(source.norms)
    for_curves = f" for each of {len(calibrated)} curves" if len(calibrated) > 1 else ""
    if calibrated and (rows := 1 + sites + max(0, sites - 2)) > _MANY_CALIBRATIONS:
        out.remark(
            f"{rows} calibrations{for_curves}: all sites, each alone, and each number of them; --layers 4 takes fewer"
        )


def _drift(
    source: swapping.SwapSource, choices: Sequence[swapping.SwapChoice], refit: str, out: Output
) -> list[DriftReport]:
    """Measure drift for each function and start, on inputs that nothing was fitted to."""
    from normscope.show.tables.drift import drift_tables
    from normscope.swaps.drift.paired_passes import KeptEnds

    walk = getattr(source.held_out, "ends", None)
    ends = None if walk is None else KeptEnds(walk)
    # A replacement that is not possible fails before the first pass, not after minutes of drift.
    replacements = [(choice, source.replacements(choice, source.fits(choice))) for choice in choices]
    reports = []
    for choice, modules in replacements:
        calibration: dict[str, Any] = {"learn": source.learned, "refit": refit} if choice.calibrated else {}
        with out.bars() as progress:
            settings = {"func": choice.func, "init": choice.start, "ends": ends, **calibration}
            report = normscope.drift(
                source.network, source.held_out, modules, **settings, progress=progress, ranks=source.ranks
            )
            reports.append(report)
    out.heading(reports[0].about)
    if reports[0].by_site and (number := reports[0].by_site[0].inputs) < reports[0].all.inputs:
        out.remark(f"each site alone and the cumulative order: on {count(number, 'sample')}")
    out.table(*drift_tables(reports))
    if not any(report.quality for report in reports):
        out.result(f"No quality: {reports[0].no_quality}.")
    _print_calibration(reports, out)
    return reports


def _print_calibration(reports: Sequence[DriftReport], out: Output) -> None:
    calibrated = [(report, report.calibration) for report in reports if report.calibration is not None]
    for _, first in calibrated[:1]:
        out.remark(f"calibrated on {first.data}; measured on {reports[0].about['data']}")
        swapping.print_left_out(first.left, first.left_out, out)
    for report, calibration in calibrated:
        if calibration.restored:
            rows = count(calibration.restored, "row")
            out.warn(f"{report.func}: {rows} with the start values, as calibration did not lower the drift there")


def _speed(
    network: LoadedModel, curves: Sequence[str], run: RunOptions, full: bool, quick: bool, out: Output
) -> BenchReport:
    """Time the network; in place of an embedded one, which is tiny, its full-size sibling with random weights."""
    from normscope.tools.bench.table import speed_tables

    if sibling := _FULL_SIZE.get(network.name):
        out.remark(f"{network.name} is tiny: speed is that of {sibling}, of the same norms, with random weights")
        size = run.batch_size
        sibling_run = replace(run, weights="random", data=None, limit=size, batch_size=size, shuffle=False)
        network = sibling_run.load(sibling, out)
    if not quick:
        out.remark(f"timing {network.name} takes a while; --quick takes the fewest timings")
    with out.bars() as progress:
        report = normscope.bench(network, curves=curves, full=full, quick=quick, progress=progress)
    out.heading(report.about)
    out.table(*speed_tables(report))
    return report
