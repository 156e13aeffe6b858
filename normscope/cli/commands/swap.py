"""``normscope swap``."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import normscope
from normscope.cli.options import AsCsv, AsJson, Model, Quiet
from normscope.cli.output import Output
from normscope.cli.running import RunOptions, check_models, runs_networks
from normscope.cli.swapping import (
    CALIBRATED,
    How,
    Learner,
    OneFunc,
    Per,
    Refit,
    Shift,
    Sites,
    StartOrCalibrated,
    check_calibrated,
    check_kernels,
)
from normscope.errors import count
from normscope.runtime.files import check_folder_writable
from normscope.runtime.processes import Place
from normscope.tables.table import swapped_table

if TYPE_CHECKING:
    from torch import nn

    from normscope.fits.curve_fit import CurveFit
    from normscope.pairs.norms.sites import NormSite
    from normscope.swaps.start import Start

EXAMPLES = (
    "Examples: normscope swap demo_vit --func dyt -o demo_vit-dyt · "
    "normscope swap vit_b16 --func dyisru --sites final,pre-norm -o safe · normscope swap demo_dit --func best -o best"
)
Folder = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write; --weights takes it.")]


@runs_networks(without=("sample", "device_map", "verify"))
def swap(
    model: Model,
    output: Folder,
    *,
    func: OneFunc = "dyt",
    init: StartOrCalibrated = "fit",
    refit: Refit = "neighbours",
    sites: Sites = "all",
    per: Per = "site",
    shift: Shift = None,
    run: RunOptions,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    quiet: Quiet = False,
) -> None:
    """Put point-wise functions in the place of a model's norms, and write the model: its weights and what is where."""
    say = Output(as_json, quiet, as_csv=as_csv)
    check_models([model])
    from normscope.swaps.record import FILES
    from normscope.swaps.start import starts

    calibrated = init == CALIBRATED
    how = How.of(func, "fit" if calibrated else init, per, shift)
    place = Place.from_environment()
    check_calibrated(calibrated, refit, how, place)
    check_kernels([how], run.device)
    if place.speaks:
        check_folder_writable(output, FILES)
    network = run.load(model, say)
    with run.joined() as ranks:
        learner = Learner.of(network, sites, run.seed, say, ranks)
        fits = learner.fits(how, say)
        modules = learner.replacements(how, fits, say)
    if not place.speaks:
        raise typer.Exit
    rows = [_row(start, fits) for start in starts(how.asked, fits, how.begin) if start.norm.name in modules]
    original = copy.deepcopy(network.module) if calibrated else network.module
    normscope.Swap(network.module, modules)
    report = None
    if calibrated:
        with say.bars() as progress:
            report = normscope.calibrate(
                original, network.module, learner.learned, outputs=network.outputs, refit=refit, progress=progress
            )
        rows = [{**row, **_now(modules[row["site"]])} for row in rows]
    about = learner.about
    start = CALIBRATED if calibrated else how.start or None
    folder = normscope.save_swapped(network.module, output, about, func=func, init=start)
    say.heading(about)
    say.result(swapped_table(rows))
    if report is not None:
        _tell(report, say)
    say.result(str(folder))
    remark_on_loading(model, str(folder), say)
    whole: dict[str, Any] = {**about, "folder": str(folder), "func": func, "init": init, "per": per}
    if report is not None:
        whole |= {"refit": refit, "calibration": report.as_dict()}
    left_out = [{"model": model, **norm.as_dict()} for norm in learner.skipped]
    say.document({**whole, "sites": rows, "skipped": left_out}, [{**whole, **row} for row in rows])


def _now(module: nn.Module) -> dict[str, Any]:
    """The α and s that a module has after calibration; its weights are no longer γ times one number A."""
    if not isinstance(module, normscope.PointwiseFunction):
        return {}
    shift = None if module.shift is None else module.shift.median().item()
    return {"amplitude": None, "alpha": module.alpha.median().item(), "shift": shift, "r2": None}


def _tell(report: normscope.CalibrationReport, say: Output) -> None:
    layers = sum(not one.is_norm and one.penalty is not None for one in report.modules)
    learned, judged = count(report.n_learned, "sample"), count(report.n_judged, "sample")
    say.result(
        f"calibrated on {learned}, {count(layers, 'linear layer')} refitted: median relative L2 at the output "
        f"{report.before:.3g} → {report.after:.3g}, on {judged} that decided"
    )
    if report.left:
        path, reason = next(iter(report.left.items()))
        others = f", and {count(len(report.left) - 1, 'other')}" if len(report.left) > 1 else ""
        say.remark(f"not refitted: {path} ({reason}){others}")
    if report.left_out:
        say.warn(f"{count(report.left_out, 'sample')} did not fit into memory, and nothing was learned from them")
    if report.restored:
        say.warn("the drift did not fall: what was written has the start values")


def remark_on_loading(model: str, folder: str, say: Output) -> None:
    """Say how the folder is loaded; a network of the user's own is loaded by its name."""
    by_name = model.startswith("py:")
    call = f"normscope.load({model!r}, weights={folder!r})" if by_name else f"normscope.load_swapped({folder!r})"
    say.remark(f"--weights {folder} takes it in every command; in Python, {call}")


def _row(start: Start, fits: Sequence[CurveFit] | Sequence[NormSite]) -> dict[str, Any]:
    """Describe what was put at one site; where each channel has numbers of its own, by their medians."""
    from normscope.fits.curves.known import FREE

    of_site = [
        one
        for one in fits
        if isinstance(one, normscope.CurveFit) and one.function is start.curve and one.norm is start.norm
    ]
    r2 = [one.r2 for one in of_site if not one.degenerate]
    has_parameters = start.curve is not None and start.curve.name != FREE
    return {
        "site": start.norm.name,
        "norm": start.norm.kind,
        "curve": start.curve.name if start.curve else "rmsnorm",
        "amplitude": float(start.amplitude.median()) if has_parameters else None,
        "alpha": float(start.alpha.median()) if has_parameters else None,
        "shift": float(start.shift.median()) if has_parameters and start.shift is not None else None,
        "r2": statistics.median(r2) if r2 else None,
        "per_channel": start.alpha.numel() > 1,
    }
