"""``normscope plot``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from normscope.errors import UsageError, unknown
from normscope.files import check_writable, file_stem

if TYPE_CHECKING:
    from normscope.pairs.captures import Capture

EXAMPLES = "Examples: normscope plot · normscope plot vit_b16 --layers 4 --format pdf · normscope plot seen.safetensors"

_OVERVIEW = "overview"
_FORMATS = ("png", "svg", "pdf")
Color = Annotated[
    str,
    typer.Option(
        help="Rows of the figure, separated by commas: density, token, channel; residual: E\\[y|x] less a fit."
    ),
]
Format = Annotated[
    str | None,
    typer.Option("--format", metavar="png|svg|pdf", help="Of the figure; by default png.", show_default=False),
]
Dpi = Annotated[int, typer.Option(min=20, max=1200, help="Dots per inch, also of the points within svg and pdf.")]
Theme = Annotated[str, typer.Option(metavar="light|dark", help="Of the figure.")]
Destination = Annotated[Path, typer.Option("--output", "-o", help="A folder; or, for one model, the figure's file.")]


def plot(
    models: Models = None,
    layers: Layers = "4",
    func: Func = "tanh,isru",
    color: Color = "density,token,channel",
    figure_format: Format = None,
    dpi: Dpi = 200,
    style: Theme = "light",
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
    output: Destination = Path("outputs"),
    quiet: Quiet = False,
) -> None:
    """Draw the S-curves of a model's norms: all pairs, by token and by channel, under fitted curves.

    Two or more models also share one figure more: a row a model, and four norms across.
    """
    say = Output(as_json, quiet, as_csv=as_csv)
    names = named_or_embedded(models, say)
    suffix = _suffix(output, figure_format, names, by)
    from normscope.fits.curves import curves_named
    from normscope.fits.fit import fit

    curves = [curve.name for curve in curves_named(func)]
    run = Run(weights, data, limit, batch_size, seed, device, dtype, verify, guidance, timesteps, sample)

    from normscope.figures.overview import overview
    from normscope.figures.scurves import plot as draw
    from normscope.figures.scurves import rows_named, save
    from normscope.figures.style import style_named

    rows = rows_named(color)
    style_named(style)
    check_sources(names, run)
    check_by(by, names)
    for name in [*names, *([_OVERVIEW] if len(names) > 1 else [])]:
        check_writable(_path(output, suffix, name, []))
    figures: list[dict[str, Any]] = []
    seen, fits = [], []
    for capture in captures(names, run, layers, say, by):
        fitted = fit(capture, curves)
        figure = draw(capture, fitted, color=rows, style=style)
        taken = [entry["file"] for entry in figures]
        path = save(figure, _path(output, suffix, _title(capture), taken), capture, dpi)
        say.result(str(path))
        sites = [site.name for site in capture.sites]
        shown = {"file": str(path), "sites": sites, "fits": [found.as_dict() for found in fitted]}
        figures.append({**capture.about, **shown})
        seen.append(capture)
        fits.append(fitted)
    together = None
    if len(seen) > 1:
        taken = [entry["file"] for entry in figures]
        together = str(save(overview(seen, fits, style=style), _path(output, suffix, _OVERVIEW, taken), seen, dpi))
        say.result(together)
    drawn = [{"file": figure["file"], **found} for figure in figures for found in figure["fits"]]
    say.document({"figures": figures, "overview": together, "skipped": skipped_as_json(seen)}, drawn)


def _suffix(output: Path, asked: str | None, names: list[str], by: str | None) -> str:
    """Decide on the format before anything is run."""
    if asked is not None and asked not in _FORMATS:
        raise UsageError(unknown("figure format", asked, _FORMATS))
    named = output.suffix.lower().removeprefix(".")
    if named not in _FORMATS:
        return asked or "png"
    if asked not in (None, named):
        raise UsageError(f"--output {output} ends in .{named}, but --format asks for {asked}.")
    if len(names) > 1:
        raise UsageError(f"--output {output} is one file, but there are {len(names)} models. Name a folder.")
    if by is not None:
        raise UsageError(f"--output {output} is one file, but --by {by} draws a figure for each. Name a folder.")
    return named


def _title(capture: Capture) -> str:
    return " ".join(capture.about[key] for key in ("model", "part") if key in capture.about)


def _path(output: Path, suffix: str, model: str, taken: list[str]) -> Path:
    """Name the figure's file after its model; two captures of one model do not overwrite each other."""
    if output.suffix.lower() == f".{suffix}":
        return output
    stem = f"{file_stem(model)}-scurves"
    names = (output / f"{stem}{number}.{suffix}" for number in ("", *(f"-{n}" for n in range(2, len(taken) + 2))))
    return next(path for path in names if str(path) not in taken)
