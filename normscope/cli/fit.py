"""``normscope fit``."""

from __future__ import annotations

from normscope.cli.options import (
    AsCsv,
    AsJson,
    BatchSize,
    By,
    Data,
    Device,
    Dtype,
    Func,
    Guidance,
    JsonFile,
    Layers,
    Limit,
    Models,
    Quiet,
    Sample,
    Seed,
    Timesteps,
    Verify,
    Weights,
)
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.sources import Run, captures, check_by, check_sources, named_or_embedded

EXAMPLES = (
    "Examples: normscope fit --func isru · normscope fit vit_b16 --weights vit.safetensors --json · "
    "normscope fit demo_dit --by timestep"
)


def fit(
    models: Models = None,
    func: Func = "tanh,isru",
    layers: Layers = "all",
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
    by: By = None,
    verify: Verify = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    output: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Fit y ≈ A·f(αx) to every norm's pairs, by least squares over all of them."""
    say = Output(as_json, quiet, output, as_csv=as_csv)
    from normscope.figures.tables import fits_table
    from normscope.fits.curves import curves_named
    from normscope.fits.fit import fit as fit_curves

    curves = [curve.name for curve in curves_named(func)]
    run = Run(weights, data, limit, batch_size, seed, device, dtype, verify, guidance, timesteps, sample)
    names = named_or_embedded(models, say)
    check_sources(names, run)
    check_by(by, names)
    seen, fits = [], []
    for capture in captures(names, run, layers, say, by):
        own = fit_curves(capture, curves)
        say.result("{model} · {weights} · {data}".format(**capture.about))
        say.result(fits_table(own))
        seen.append(capture)
        fits += own
    rows = [found.as_dict() for found in fits]
    say.document({"fits": rows, "skipped": skipped_as_json(seen)}, rows)
