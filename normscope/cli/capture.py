"""``normscope capture``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.options import (
    AsCsv,
    AsJson,
    BatchSize,
    ByGamma,
    Data,
    Device,
    Dtype,
    Guidance,
    Layers,
    Limit,
    Model,
    PerChannel,
    Quiet,
    Sample,
    Seed,
    Timesteps,
    Verify,
    Weights,
)
from normscope.cli.output import Output, pairs_as_json, skipped_as_json
from normscope.cli.sources import Run, check_models
from normscope.files import check_writable

if TYPE_CHECKING:
    from normscope.models.base import LoadedModel
    from normscope.pairs.raw import RawPairs

EXAMPLES = "Examples: normscope capture demo_vit -o seen.safetensors · normscope plot seen.safetensors --layers all"

File = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The capture's file (safetensors).")]
Raw = Annotated[
    bool, typer.Option("--raw", help="Also write every pair of the chosen layers, into FILE's -raw folder.")
]


def capture(
    model: Model,
    output: File,
    layers: Layers = "all",
    raw: Raw = False,
    weights: Weights = "pretrained",
    data: Data = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    sample: Sample = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    guidance: Guidance = None,
    timesteps: Timesteps = None,
    verify: Verify = False,
    by_gamma: ByGamma = False,
    per_channel: PerChannel = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    quiet: Quiet = False,
) -> None:
    """Run a model and keep what its norms did, in a file that other commands take in place of a model."""
    say = Output(as_json, quiet, as_csv=as_csv)
    check_models([model])
    check_writable(output)
    run = Run(weights, data, limit, batch_size, seed, device, dtype, verify, guidance, timesteps, sample)
    from normscope.pairs.hooks import capture as observe
    from normscope.pairs.raw import RawPairs
    from normscope.pairs.storage import save

    pairs = RawPairs(output.with_name(f"{output.stem}-raw")) if raw else None
    try:
        network = run.load(model, say)
        if pairs:
            _announce(pairs, network, layers, sample, say)
        seen = observe(
            network.module,
            say.tracked(network.inputs),
            layers=layers,
            about=network.about,
            seed=seed,
            sample=sample,
            verify=verify,
            by_gamma=by_gamma,
            per_channel=per_channel,
            observe=pairs.add if pairs else None,
        )
        say.account(seen, network.inputs.unreadable)
        path = save(seen, output)
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
        "parts": list(seen.parts),
        "sites": sites,
        "skipped": skipped_as_json([seen]),
    }
    say.document(document, [{**seen.about, "file": str(path), **site} for site in sites])


def _announce(pairs: RawPairs, network: LoadedModel, layers: str, sample: int | None, say: Output) -> None:
    """Say how large the raw pairs will be."""
    from normscope.pairs.raw import raw_bytes
    from normscope.pairs.selection import select
    from normscope.pairs.trace import find_norms

    first = next(iter(network.inputs)).first_sample()
    sites = select(find_norms(network.module, first).sites, layers)
    samples = network.inputs.n_samples
    size = raw_bytes(sites, samples or 1, sample)
    each = "in all" if samples else "for each sample"
    told = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
    say.warn(
        f"the raw pairs of {len(sites)} norm sites will take about {told} {each} in {pairs.folder}, if all samples are "
        "as long as the first"
    )
