"""``normscope plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import normscope
from normscope.cli.options import figure_path, figure_suffix, figure_title
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import RunOptions, captures, check_by, check_sources, named_or_embedded, runs_networks
from normscope.runtime.files import check_writable

EXAMPLES = "Examples: normscope plot · normscope plot vit_b16 --layers 4 --format pdf · normscope plot seen.safetensors"

_OVERVIEW = "overview"
_VIEW = "scurves"


@runs_networks()
def plot(
    models: list[str] | None = None,
    *,
    layers: str = "4",
    func: str = "tanh,isru",
    color: str = "density,token,channel",
    figure_format: str | None = None,
    dpi: int = 200,
    style: str = "light",
    run: RunOptions,
    by: str | None = None,
    as_json: bool = False,
    as_csv: bool = False,
    output: Path = Path("outputs"),
    quiet: bool = False,
    xscale: str = "auto",
    share_axes: bool = False,
    width: float | None = None,
    title: str | None = None,
) -> None:
    """Draw the S-curves of a model's norms: all pairs, by token and by channel, under fitted curves.

    Two or more models also share one figure more: a row a model, and four norms across.
    """
    say = Output(as_json, quiet, as_csv=as_csv)
    names = named_or_embedded(models, say)
    suffix = figure_suffix(output, figure_format, names, by)
    from normscope.fits.fit import check_fit

    check_fit(func)

    from normscope.figures.axes import check_xscale
    from normscope.figures.scurves import rows_named
    from normscope.figures.style import style_named

    rows = rows_named(color)
    style_named(style)
    check_xscale(xscale)
    check_sources(names, run)
    check_by(by, names)
    for name in [*names, *([_OVERVIEW] if len(names) > 1 else [])]:
        check_writable(figure_path(output, suffix, name, _VIEW, []))
    look: dict[str, Any] = {
        "xscale": xscale,
        "share_axes": share_axes,
        "width": width,
        "title": title,
        "style": style,
    }
    figures: list[dict[str, Any]] = []
    seen, fits = [], []
    for capture in captures([(name, run) for name in names], layers, say, by):
        fitted = normscope.fit(capture, func)
        figure = normscope.plot(capture, fitted, rows=rows, **look)
        files = [entry["file"] for entry in figures]
        path = figure_path(output, suffix, figure_title(capture), _VIEW, files)
        normscope.save_figure(figure, path, capture, dpi)
        say.result(str(path))
        sites = [site.name for site in capture.sites]
        shown = {"file": str(path), "sites": sites, "fits": [fit.as_dict() for fit in fitted]}
        figures.append({**capture.about, **shown})
        seen.append(capture)
        fits.append(fitted)
    together = None
    if len(seen) > 1:
        files = [entry["file"] for entry in figures]
        path = figure_path(output, suffix, _OVERVIEW, _VIEW, files)
        overview = normscope.overview(seen, fits, **look)
        together = str(normscope.save_figure(overview, path, seen, dpi))
        say.result(together)
    drawn = [{"file": figure["file"], **fit_row} for figure in figures for fit_row in figure["fits"]]
    say.document({"figures": figures, "overview": together, "skipped": skipped_as_json(seen)}, drawn)
