"""``normscope capture`` and ``normscope merge``: captures in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import normscope
from normscope.cli import options
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.process import stopping_between_chunks
from normscope.cli.running import RunOptions, check_by, check_models
from normscope.errors import UsageError
from normscope.runtime.files import CHECKPOINT, check_writable
from normscope.runtime.processes import Place

if TYPE_CHECKING:
    from normscope.pairs.captures import Capture


_OF_RESULTS = (".csv", ".json", ".md", ".tex", ".html", ".png", ".pdf", ".svg")


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
    say: Output,
) -> None:
    """Run a model and sum up all pairs of its norms in a file, which other commands accept in place of a model.

    Ctrl-C finishes the batch, keeps what was captured so far, and reports how to continue.
    """
    check_models([model])
    check_by(by, [model])
    _check_capture_file(output, force)
    place = Place.from_environment()
    from normscope.pairs.ranks import Checkpoints

    kept = Checkpoints(output.with_name(f"{output.name}{CHECKPOINT}"), checkpoint_every, resume or place.restarts > 0)
    if place.speaks:
        kept.check()
        if kept.resume:
            start = f"going on from {kept.folder}" if kept.exist else "nothing to resume; starting from the beginning"
            say.remark(start)
    sums: dict[str, Any] = {"by_gamma": by_gamma, "per_channel": per_channel, "diagonal": diagonal}
    sums |= {"keep_inputs": keep_inputs, "by_part": by is not None}
    with run.joined() as ranks:
        network = run.load(model, say)
        with stopping_between_chunks(say.warn) as kept.stopping:
            seen = run.capture(network, layers, say, ranks, kept, **sums)
    if not place.speaks:
        raise typer.Exit
    say.account(seen, layers, network.inputs.unreadable)
    say.kept_inputs(seen)
    if keep_inputs and not seen.inputs:
        say.warn("--keep-inputs kept none: no input is a picture, a recording or a text that can be shown")
    path = normscope.save_capture(seen, output)
    kept.remove()
    more = {
        "unreadable": network.inputs.unreadable,
        "inputs": [kept_input.name for kept_input in seen.inputs],
    }
    _tell(seen, path, more, say)


@options.with_groups(
    "normscope capture demo_vit --data first/ -o first.safetensors · "
    "normscope merge first.safetensors second.safetensors -o both.safetensors · normscope plot both.safetensors",
    without=("columns",),
    first_rank_only=True,
)
def merge(files: options.Captures, output: options.MergeOutput, *, force: options.Force = False, say: Output) -> None:
    """Merge captures of one model from runs over different inputs, on different days or machines."""
    _check_capture_file(output, force)
    seen = normscope.merge_captures(files)
    say.account(seen)
    path = normscope.save_capture(seen, output)
    say.remark(f"merged {', '.join(files)}")
    _tell(seen, path, {"merged": files}, say)


def _check_capture_file(path: Path, force: bool) -> None:
    """Raise UsageError if a capture cannot be written there, or would replace another kind of file without force."""
    check_writable(path)
    if path.suffix.lower() in _OF_RESULTS:
        raise UsageError(f"{path} ends in {path.suffix}, but a capture's file ends in .safetensors.")
    if path.exists() and not force:
        from normscope.pairs.storage import is_capture

        if not is_capture(path):
            raise UsageError(
                f"Cannot write {path}: it exists, and is not a capture. Name another file, or replace it with --force."
            )


def _tell(seen: Capture, path: Path, more: dict[str, Any], say: Output) -> None:
    say.result(str(path))
    counted = ((site.name, seen.stats[site.name]) for site in seen.sites)
    sites = [
        {"name": name, "n_pairs": stats.n_pairs, "nonfinite_tokens": int(stats.nonfinite_tokens)}
        for name, stats in counted
    ]
    document = {
        **seen.about,
        "file": str(path),
        **more,
        "n_samples": seen.n_samples,
        "parts": list(seen.parts),
        "sites": sites,
    }
    say.document({**document, "skipped": skipped_as_json([seen])})
