"""``normscope swap``."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

import normscope
from normscope.cli import options, swapping
from normscope.cli.figure_files import PLOT_ONLY, Look
from normscope.cli.output import Output
from normscope.cli.running import RunOptions, check_models
from normscope.errors import count
from normscope.runtime.files import check_folder_writable, check_writable
from normscope.runtime.processes import Process
from normscope.show.tables.drift import swapped_table
from normscope.swaps.inits import published_name

if TYPE_CHECKING:
    from torch import nn

    from normscope.cli.swapping import SiteFits
    from normscope.swaps.calibrate.calibrate import CalibrationReport
    from normscope.swaps.reports import Quantiles
    from normscope.swaps.start import Start


@options.with_groups(
    "normscope swap demo_vit --func dyt -o demo_vit-dyt · normscope swap vit_b16 --layers final,pre-norm -o safe · "
    "normscope swap demo_dit --func best -o best · normscope swap minilm --init calibrated --keep 2 -o minilm-dyt",
    without=(*PLOT_ONLY, "figure_format", "sample", "workers", "verify", "columns"),
)
def swap(
    model: options.Model,
    output: options.SwapOutput,
    *,
    func: options.SwapFunc = "dyt",
    init: options.Init = "fit",
    refit: options.Refit = "neighbours",
    layers: options.SwappedLayers = "all",
    keep: options.Keep = None,
    max_drift: options.MaxDrift = None,
    per: options.SwapPer = "site",
    shift: options.SwapShift = None,
    run: RunOptions,
    look: Look,
    out: Output,
) -> None:
    """Replace a model's norms by point-wise functions, and write the model into a folder."""
    check_models([model])
    from normscope.runtime.spread import check_whole
    from normscope.swaps.quality import QualityMeter
    from normscope.swaps.start import starts
    from normscope.swaps.store.record import ALSO, FILES

    replacement = swapping.SwapChoice.of(func, init, per, shift)
    swapping.check_calibrated(init, refit, [replacement], run.device_map)
    swapping.check_kernels([replacement], run.device)
    func = replacement.func
    swapping.check_keep(keep, max_drift, layers)
    chooses = keep is not None or max_drift is not None
    figure = swapping.kept_norms_figure(output)
    process = Process.current()
    if process.is_first:
        check_folder_writable(output, FILES, ALSO)
        if chooses:
            check_writable(figure)
    network = run.load(model, out)
    check_whole(network.module, "Saving a swapped network", but=("spread",))  # before minutes of fitting
    with run.joined() as ranks:
        source = swapping.SwapSource(network, layers, run, out, ranks)
        fits = source.fits(replacement)
        modules = source.replacements(replacement, fits)
    if not process.is_first:
        raise typer.Exit
    calibrated = functools.lru_cache(maxsize=2)(lambda paths: _calibrated(source, modules, paths, refit, out))
    choice = None
    if chooses:
        after = (lambda paths: calibrated(tuple(paths))[1].after) if replacement.calibrated else None
        choice = source.keep(modules, keep, max_drift=max_drift, func=func, init=replacement.start, after=after)
    chosen = list(modules) if choice is None else choice.swapped
    swapped, report = calibrated(tuple(chosen)) if replacement.calibrated else (network.module, None)
    with out.bars() as progress:
        meter = QualityMeter(network, None, source.held_out, network.outputs, progress)
        meter.add("original", network.module)
        if report is None:
            normscope.Swap(network.module, {path: modules[path] for path in chosen})
        meter.add("swapped", swapped)
    all_starts = starts(replacement.curve, fits, replacement.begin)
    rows = [_row(start, fits, func) for start in all_starts if start.norm.name in chosen]
    for row in rows if report is not None else ():
        module = swapped.get_submodule(row["site"])
        if isinstance(module, normscope.PointwiseFunction):  # its weights are no longer γ times one number A
            medians = {name: tensor.median().item() for name, tensor in module.named_parameters()}
            row |= dict.fromkeys(("amplitude", "r2", "weights_by"))
            row |= {"alpha": medians["alpha"], "shift": medians.get("shift"), "straight": False}
    about = source.about
    folder = normscope.save_swapped(swapped, output, about, func=func, init=replacement.start or None, kept=choice)
    out.heading(about)
    out.table(swapped_table(rows))
    whole: dict[str, Any] = {**about, "folder": str(folder), "func": func, "init": init, "per": per}
    if report is not None:
        held_out_errors = _held_out_errors(source, swapped, report.measure, out)
        _print_calibration(report, out)
        whole |= {"refit": refit, "held_out": asdict(held_out_errors), "calibration": report.as_dict()}
        choice = choice and replace(choice, calibrated=held_out_errors)
    if choice is not None:
        swapping.print_kept_norms(choice, look.titled(f"{network.name} · {published_name(func)}"), figure, out)
        whole |= {"keep": choice.as_dict(), "figure": str(figure)}
    swapping.print_quality(meter.quality, meter.no_quality, func, replacement.start, out)
    whole["quality"] = meter.quality and meter.quality.as_dict()
    out.result(str(folder))
    if choice is not None:
        out.result(str(figure))
    swapping.print_loading(model, folder, out)
    left_out = [{"model": model, **norm.as_dict()} for norm in source.skipped]
    out.document({**whole, "sites": rows, "skipped": left_out})


def _calibrated(
    source: swapping.SwapSource, modules: Mapping[str, nn.Module], paths: Sequence[str], refit: str, out: Output
) -> tuple[nn.Module, CalibrationReport]:
    """Return a calibrated copy of the network with these sites swapped, and the report of its calibration."""
    network, swapped = source.network, copy.deepcopy(source.network.module)
    normscope.Swap(swapped, {path: copy.deepcopy(modules[path]) for path in paths})
    with out.bars() as progress:
        report = normscope.calibrate(
            network.module, swapped, source.learned, outputs=network.outputs, refit=refit, progress=progress
        )
    return swapped, report


def _held_out_errors(source: swapping.SwapSource, swapped: nn.Module, measure: str, out: Output) -> Quantiles:
    """Measure and print the drift of the calibrated network on held-out inputs."""
    from normscope.norms.bound_inputs import unpacked
    from normscope.runtime.network import restoring
    from normscope.swaps.distances import output_errors
    from normscope.swaps.reports import Quantiles

    original, held_out = source.network.module, source.held_out
    with restoring(original), restoring(swapped):
        errors = output_errors(original, swapped, unpacked(original, held_out)[1], source.network.outputs)
    quantiles = Quantiles.of(errors.tolist())
    out.result(
        f"calibrated, held out: {measure} at the output {quantiles.p50:.3g} in the median, {quantiles.p90:.3g} at the "
        f"90th percentile, on {held_out.description}"
    )
    return quantiles


def _print_calibration(report: CalibrationReport, out: Output) -> None:
    layers = sum(not module.is_norm and module.penalty is not None for module in report.modules)
    learned, judged = count(report.n_learned, "sample"), count(report.n_judged, "sample")
    out.result(
        f"calibrated on {learned}, {count(layers, 'linear layer')} refitted: median {report.measure} at the output "
        f"{report.before:.3g} → {report.after:.3g} on {judged} that decided, not held out"
    )
    swapping.print_left_out(report.left, report.left_out, out)
    if report.restored:
        out.warn(
            "the error did not fall in the median and at the 90th percentile: what was written has the start values"
        )


def _row(start: Start, fits: SiteFits, func: str) -> dict[str, Any]:
    """Describe the replacement of a site; of several channels, their medians."""
    from normscope.curves.known import FREE
    from normscope.fits.curve_fit import CurveFit

    curve_fits = [fit for fit in fits if isinstance(fit, CurveFit)]
    site_fits = [fit for fit in curve_fits if fit.function is start.curve and fit.norm is start.norm]
    r2 = [fit.r2 for fit in site_fits if not fit.degenerate]
    has_parameters = start.curve is not None and start.curve.name != FREE
    named = start.curve is not None and func.strip().lower() in (start.curve.name, *start.curve.aliases)
    return {
        "site": start.norm.name,
        "norm": start.norm.kind,
        "curve": func if named else start.func,
        "amplitude": float(start.amplitude.median()) if has_parameters else None,
        "alpha": float(start.alpha.median()) if has_parameters else None,
        "shift": float(start.shift.median()) if has_parameters and start.shift is not None else None,
        "r2": statistics.median(r2) if r2 else None,
        "straight": any(fit.doubt == "straight" for fit in site_fits) and start.alpha.numel() == 1,
        "weights_by": site_fits[0].weights_by if site_fits else None,
        "per_channel": start.alpha.numel() > 1,
    }
