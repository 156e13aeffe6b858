"""``normscope gradient``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import normscope
from normscope.cli.options import figure_path, figure_suffix, figure_title
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import RunOptions, captures, check_by, check_sources, named_or_embedded, runs_networks
from normscope.runtime.files import check_writable
from normscope.tables.card import gradient_tables

EXAMPLES = (
    "Examples: normscope gradient demo_vit · normscope gradient vit_b16 --layers all --json · "
    "normscope gradient seen.safetensors -o gradient.pdf"
)

_VIEW = "gradient"


@runs_networks()
def gradient(
    models: list[str] | None = None,
    *,
    layers: str = "4",
    func: str = "tanh,isru",
    figure_format: str | None = None,
    dpi: int = 200,
    style: str = "light",
    run: RunOptions,
    by: str | None = None,
    as_json: bool = False,
    as_csv: bool = False,
    output: Path = Path("outputs"),
    quiet: bool = False,
    width: float | None = None,
    title: str | None = None,
) -> None:
    """Set each norm's Jacobian beside its curves' derivatives, and show whether what DyT and DyISRU assume holds."""
    say = Output(as_json, quiet, as_csv=as_csv)
    names = named_or_embedded(models, say)
    suffix = figure_suffix(output, figure_format, names, by)
    from normscope.figures.style import style_named
    from normscope.fits.fit import check_fit

    check_fit(func)
    style_named(style)
    check_sources(names, run)
    check_by(by, names)
    for name in names:
        check_writable(figure_path(output, suffix, name, _VIEW, []))
    seen: list[normscope.Capture] = []
    views: list[normscope.GradientView] = []
    figures: list[dict[str, Any]] = []
    for capture in captures([(name, run) for name in names], layers, say, by, diagonal=True):
        fits = normscope.fit(capture, func)
        of_capture = normscope.gradient(capture, fits)
        say.heading(capture.about)
        for table in gradient_tables(of_capture):
            say.result(table)
        path = figure_path(output, suffix, figure_title(capture), _VIEW, [entry["file"] for entry in figures])
        figure = normscope.plot_gradient(capture, fits, width=width, title=title, style=style)
        normscope.save_figure(figure, path, capture, dpi)
        say.result(str(path))
        figures.append({**capture.about, "file": str(path), "sites": [site.name for site in capture.sites]})
        seen.append(capture)
        views += of_capture
    rows = [view.as_dict() for view in views]
    say.document({"gradient": rows, "figures": figures, "skipped": skipped_as_json(seen)}, rows)
