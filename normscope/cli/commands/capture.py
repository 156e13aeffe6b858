"""``normscope capture``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

import normscope
from normscope.cli.options import declared
from normscope.cli.output import Output, check_capture_file, pairs_as_json, skipped_as_json
from normscope.cli.process import stopping_between_chunks
from normscope.cli.running import RunOptions, check_by, check_models
from normscope.errors import UsageError
from normscope.runtime.files import CHECKPOINT
from normscope.runtime.processes import Place

if TYPE_CHECKING:
    from normscope.inputs.loaded_model import LoadedModel
    from normscope.pairs.captures import Capture
    from normscope.pairs.ranks import Checkpoints
    from normscope.pairs.storage import RawPairs

EXAMPLES = (
    "Examples: normscope capture demo_vit -o seen.safetensors · normscope plot seen.safetensors --layers all · "
    "torchrun --nproc-per-node=8 -m normscope capture vit_b16 --data images -o seen.safetensors --resume"
)


@declared()
def capture(
    model: str,
    output: Path,
    *,
    force: bool = False,
    layers: str = "all",
    raw: bool = False,
    checkpoint_every: float = 300,
    resume: bool = False,
    run: RunOptions,
    by_gamma: bool = False,
    per_channel: bool = False,
    diagonal: bool = False,
    keep_inputs: int = 0,
    by: str | None = None,
    say: Output,
) -> None:
    """Run a model and keep what its norms did, in a file that other commands take in place of a model.

    Ctrl-C finishes the batch, keeps what was captured so far, and says how to go on.
    """
    check_models([model])
    check_by(by, [model])
    check_capture_file(output, force)
    place = Place.from_environment()
    _check_raw(raw, resume, place)
    from normscope.pairs.ranks import Checkpoints
    from normscope.pairs.storage import RawPairs

    pairs = RawPairs(output.with_name(f"{output.stem}-raw")) if raw else None
    kept = Checkpoints(output.with_name(f"{output.name}{CHECKPOINT}"), checkpoint_every, resume or place.restarts > 0)
    if place.speaks:
        _check_kept(kept, raw, say)
    try:
        network = run.load(model, say)
        if pairs:
            _announce(pairs, network, layers, run.sample, say)
        with run.joined() as ranks, stopping_between_chunks(say.warn, raw) as kept.stopping:
            seen = run.capture(
                network,
                layers,
                say,
                ranks,
                None if raw else kept,
                by_gamma=by_gamma,
                per_channel=per_channel,
                diagonal=diagonal,
                keep_inputs=keep_inputs,
                by_part=by is not None,
                observe=pairs.add if pairs else None,
            )
        if not place.speaks:
            raise typer.Exit
        say.account(seen, network.inputs.unreadable)
        say.chosen(seen.sites, layers)
        say.kept_inputs(seen)
        if keep_inputs and not seen.inputs:
            say.warn("--keep-inputs kept none: no input is a picture, a recording or a text that can be shown")
        path = _saved(seen, output, kept)
        folder = pairs.finish(seen) if pairs else None
    finally:
        if pairs:
            pairs.discard()
    say.result(str(path))
    sites = pairs_as_json(seen)
    document = {
        **seen.about,
        "file": str(path),
        "raw": str(folder) if folder else None,
        "n_samples": seen.n_samples,
        "unreadable": network.inputs.unreadable,
        "parts": list(seen.parts),
        "inputs": [kept_input.name for kept_input in seen.inputs],
        "sites": sites,
        "skipped": skipped_as_json([seen]),
    }
    say.document(document, [{**seen.about, "file": str(path), **site} for site in sites])


def _check_raw(raw: bool, resume: bool, place: Place) -> None:
    """Refuse raw pairs of several runs or ranks, as one process writes them in one go; UsageError."""
    if raw and not place.alone:
        raise UsageError(f"--raw needs a single process, and torchrun started {place.ranks}; drop --raw or torchrun.")
    if raw and resume:
        raise UsageError("--raw writes all pairs in one go, so there is nothing to resume; drop --raw or --resume.")


def _check_kept(kept: Checkpoints, raw: bool, say: Output) -> None:
    """Report whether the run resumes a checkpoint; refuse to start over beside one."""
    if raw:
        return
    kept.check()
    if kept.resume:
        say.remark(f"going on from {kept.folder}" if kept.exist else "nothing to resume; starting from the beginning")


def _saved(seen: Capture, output: Path, kept: Checkpoints) -> Path:
    """Write the capture, and remove what is no longer needed."""
    try:
        path = normscope.save_capture(seen, output)
    except UsageError as error:
        if not kept.exist:
            raise
        raise UsageError(
            f"{error} {kept.folder} stays as it was at the last checkpoint: --resume goes on from it."
        ) from error
    kept.remove()
    return path


def _announce(pairs: RawPairs, network: LoadedModel, layers: str, sample: int | None, say: Output) -> None:
    """Report the size of the raw pairs."""
    from normscope.pairs.norms.sites import select
    from normscope.pairs.storage import raw_bytes

    sites = select(normscope.find_norms(network).sites, layers)
    samples = network.inputs.n_samples
    size = raw_bytes(sites, samples or 1, sample)
    each = "in all" if samples else "for each sample"
    amount = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
    say.warn(
        f"the raw pairs of {len(sites)} norm sites will take about {amount} {each} in {pairs.folder}, if all samples "
        "are as long as the first"
    )
