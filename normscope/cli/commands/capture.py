"""``normscope capture`` and ``normscope merge``: captures in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import normscope
from normscope.cli import options
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import RunOptions, check_by, check_models, stopping_between_chunks
from normscope.errors import UsageError
from normscope.runtime.files import CHECKPOINT, check_writable
from normscope.runtime.processes import Process

if TYPE_CHECKING:
    from normscope.pairs.captures import Capture


@options.with_groups(
    "normscope capture demo_vit -o seen.safetensors · normscope plot seen.safetensors --layers all · "
    "torchrun --nproc-per-node=8 -m normscope capture vit_b16 --data images -o seen.safetensors --resume",
    without=("columns",),
)
def capture(
    model: options.Model,
    output: options.CaptureOutput,
    *,
    force: options.Force = False,
    layers: options.Layers = "all",
    run: RunOptions,
    checkpoint_every: options.CheckpointEvery = 300,
    resume: options.Resume = False,
    by_gamma: options.ByGamma = False,
    per_channel: options.PerChannel = False,
    diagonal: options.Diagonal = False,
    keep_inputs: options.KeepInputs = 0,
    by: options.By = None,
    out: Output,
) -> None:
    """Run a model and sum up all pairs of its norms in a file, which other commands accept in place of a model.

    Ctrl-C finishes the batch, keeps what was captured so far, and reports how to continue.
    """
    check_models([model])
    check_by(by, [model])
    _check_capture_file(output, force)
    process = Process.current()
    from normscope.pairs.checkpoints import Checkpoints

    folder = output.with_name(f"{output.name}{CHECKPOINT}")
    checkpoints = Checkpoints(folder, checkpoint_every, resume or process.restarts > 0)
    if process.is_first:
        checkpoints.check()
        if checkpoints.resume:
            resumes = checkpoints.exist
            out.remark(f"going on from {folder}" if resumes else "nothing to resume; starting from the beginning")
    with run.joined() as ranks:
        network = run.load(model, out)
        with stopping_between_chunks(out.warn) as checkpoints.stopping:
            seen = run.capture(
                network,
                layers,
                out,
                ranks,
                checkpoints,
                by_gamma=by_gamma,
                per_channel=per_channel,
                diagonal=diagonal,
                keep_inputs=keep_inputs,
                by_part=by is not None,
            )
    if not process.is_first:
        raise typer.Exit
    out.account(seen, layers, network.inputs.unreadable)
    out.kept_inputs(seen)
    if keep_inputs and not seen.inputs:
        out.warn("--keep-inputs kept none: no input is a picture, a recording or a text that can be shown")
    path = normscope.save_capture(seen, output)
    checkpoints.remove()
    _print(seen, path, {"unreadable": network.inputs.unreadable, "inputs": [kept.name for kept in seen.inputs]}, out)


@options.with_groups(
    "normscope capture demo_vit --data first/ -o first.safetensors · "
    "normscope merge first.safetensors second.safetensors -o both.safetensors · normscope plot both.safetensors",
    without=("columns",),
    first_rank_only=True,
)
def merge(files: options.Captures, output: options.MergeOutput, *, force: options.Force = False, out: Output) -> None:
    """Merge captures of one model from runs over different inputs, on different days or machines."""
    _check_capture_file(output, force)
    seen = normscope.merge_captures(files)
    out.account(seen)
    path = normscope.save_capture(seen, output)
    out.remark(f"merged {', '.join(files)}")
    _print(seen, path, {"merged": files}, out)


def _check_capture_file(path: Path, force: bool) -> None:
    """Raise UsageError if a capture cannot be written there, or would replace another kind of file without force."""
    from normscope.pairs.storage import check_suffix, is_capture

    check_writable(path)
    check_suffix(path)
    if path.exists() and not force and not is_capture(path):
        raise UsageError(
            f"Cannot write {path}: it exists, and is not a capture. Name another file, or replace it with --force."
        )


def _print(seen: Capture, path: Path, more: dict[str, Any], out: Output) -> None:
    out.result(str(path))
    sites = [
        {"name": name, "n_pairs": stats.n_pairs, "nonfinite_tokens": int(stats.nonfinite_tokens)}
        for name, stats in ((site.name, seen.stats[site.name]) for site in seen.sites)
    ]
    counts = {"n_samples": seen.n_samples, "parts": list(seen.parts), "sites": sites}
    out.document({**seen.about, "file": str(path), **more, **counts, "skipped": skipped_as_json([seen])})
