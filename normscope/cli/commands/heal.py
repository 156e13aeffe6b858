"""``normscope heal``."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import normscope
from normscope.cli import options, swapping
from normscope.cli.figure_files import PLOT_ONLY, Look
from normscope.cli.output import Output
from normscope.cli.running import RunOptions, check_models
from normscope.runtime.files import check_folder_writable, check_writable
from normscope.swaps.inits import CALIBRATED, published_name

if TYPE_CHECKING:
    from normscope.tools.heal.reports import TrainingCheck

_BATCH_SIZE = 16
_WITHOUT = ("figure_format", "sample", "device_map", "dtype", "workers", "verify", "columns", "guidance", "title")
# Options that do not identify the network and its data, or that this command does not have.
_MACHINE = ("device", "workers", "batch_size", "sample", "device_map", "dtype", "verify")


@options.with_groups(
    "normscope heal demo_vit --func dyisru -o healed · normscope heal minilm --data texts.txt --minutes 6 "
    "-o healed · normscope heal demo_dit --func dyt --steps 200 -o healed --json",
    without=(*PLOT_ONLY, *_WITHOUT),
)
def heal(
    model: options.Model,
    output: options.SwapOutput,
    *,
    func: options.SwapFunc = "dyt",
    steps: options.Steps = None,
    minutes: options.Minutes = None,
    train: options.Train = "all",
    init: options.Init = CALIBRATED,
    layers: options.SwappedLayers = "all",
    keep: options.Keep = None,
    per: options.SwapPer = "site",
    shift: options.SwapShift = None,
    batch_size: options.HealBatchSize = None,
    restart: options.Restart = False,
    run: RunOptions,
    look: Look,
    out: Output,
) -> None:
    """Swap a model's norms, calibrate it, and train it towards the original's outputs."""
    swapping.check_alone("Healing takes its steps", more=": normscope heal …")
    check_models([model])
    from normscope.pairs.ranks import ALONE
    from normscope.swaps.store.record import ALSO, FILES
    from normscope.tools.heal.heal import STEPS, check_options
    from normscope.tools.heal.reports import TRAINED
    from normscope.tools.heal.table import healing_table
    from normscope.tools.heal.training import check_asked

    replacement = swapping.SwapChoice.of(func, init, per, shift)
    swapping.check_kernels([replacement], run.device)
    if minutes is None and steps is None:
        steps = STEPS
    check_options(train, steps, minutes)
    swapping.check_keep(keep, None, layers)
    check_folder_writable(output, FILES, ALSO)
    checkpoint, drawn = (output.with_name(output.name + end) for end in (".healing.safetensors", "-healing.png"))
    drawn_choice = swapping.kept_norms_figure(output)
    for path in (checkpoint, drawn, drawn_choice):
        check_writable(path)
    asked = {"model": model, "func": func, "steps": steps, "minutes": minutes, "train": train, "init": init}
    asked |= {"sites": layers, "keep": keep, "per": per, "shift": shift, "batch size": batch_size}
    network_options = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in _MACHINE}
    asked |= {name: str(value) if isinstance(value, Path) else value for name, value in network_options.items()}
    if not restart:
        check_asked(checkpoint, asked)
    # The batches of a py: network are taken as they are, which is what the default of all commands means.
    at_once = batch_size or (RunOptions.batch_size if model.startswith("py:") else _BATCH_SIZE)
    network = replace(run, batch_size=at_once, dtype="float32").load(model, out)  # half precision swallows small steps
    source = swapping.SwapSource(network, layers, run, out, ALONE)
    if init == CALIBRATED and not replacement.calibrated:
        out.remark(f"{replacement.func} begins as it is: point-wise functions alone are calibrated")
    modules = source.replacements(replacement, source.fits(replacement))
    choice = None if keep is None else source.keep(modules, keep, func=func, init=replacement.init)
    swapped = copy.deepcopy(network.module)
    normscope.Swap(swapped, modules if choice is None else {path: modules[path] for path in choice.swapped})
    if checkpoint.exists():
        if restart:
            checkpoint.unlink()
        out.remark(f"discarded {checkpoint}, to begin anew" if restart else f"going on from {checkpoint}")
    try:
        with out.bars() as progress:
            report = normscope.heal(
                network,
                swapped,
                source.learned,
                source.held_out,
                calibrated=replacement.calibrated,
                train=train,
                steps=steps,
                minutes=minutes,
                seed=run.seed,
                checkpoint=checkpoint,
                asked=asked,
                progress=progress,
                checked=lambda check: _remark_on(check, out),
            )
    except KeyboardInterrupt:
        if checkpoint.exists():
            out.warn(f"the same command goes on from {checkpoint}, which has the state of the last check")
        raise
    out.heading(source.about)
    kept = replacement.init if report.restored else replacement.start
    healed = report.steps if report.left_with == TRAINED else None
    folder = normscope.save_swapped(
        swapped, output, source.about, func=func, init=kept or None, healed=healed, kept=choice
    )
    whole: dict[str, Any] = {**source.about, "held_out": source.held_out.description, "func": func}
    whole |= {"init": replacement.start, "per": per, "sites": len(source.norms)}
    look = look.titled(f"{network.name} · {published_name(func)}")
    figure = normscope.figures.plot_healing(report, **look.figure_options)
    normscope.figures.save_figure(figure, drawn, whole)
    checkpoint.unlink(missing_ok=True)
    written = [folder, drawn]
    if choice is not None:
        swapping.print_kept_norms(choice, look, drawn_choice, out)
        whole["keep"] = choice.as_dict()
        written.append(drawn_choice)
    out.table(healing_table(report))
    swapping.print_left_out(report.not_refitted, report.left_out, out)
    if report.restored:
        out.warn("the drift did not fall: what was written has the start values")
    elif report.left_with != TRAINED:
        out.warn("training did not lower the drift: what was written is calibrated alone")
    swapping.print_quality(report.quality, report.no_quality, func, replacement.init, out)
    for path in written:
        out.result(str(path))
    swapping.print_loading(model, folder, out)
    out.document({**report.as_dict(), **whole, "folder": str(folder), "figure": str(drawn)})


def _remark_on(check: TrainingCheck, out: Output) -> None:
    values = {"loss": check.loss, "drift on validation inputs": check.drift}
    shown = [f"{name} {value:.4f}" for name, value in values.items() if value is not None]
    out.remark(f"step {check.step:,}: {', '.join(shown + ([] if check.kept else ['state not kept']))}")
