"""``normscope gradient``."""

from __future__ import annotations

from pathlib import Path

import normscope
from normscope.cli import options
from normscope.cli.figure_files import PLOT_ONLY, FigureFiles, Look
from normscope.cli.output import FIGURES, Output, skipped_as_json
from normscope.cli.running import CAPTURE_ONLY, RunOptions, captures, sources
from normscope.show.tables.gradient import gradient_tables


@options.with_groups(
    "normscope gradient demo_vit · normscope gradient vit_b16 --layers all --json · "
    "normscope gradient seen.safetensors -o gradient.pdf",
    without=(*CAPTURE_ONLY, *PLOT_ONLY),
)
def gradient(
    models: options.Models = None,
    *,
    layers: options.DrawnLayers = None,
    func: options.Func = "tanh,isru",
    shift: options.Shift = True,
    run: RunOptions,
    by: options.By = None,
    output: options.FigureOutput = Path(FIGURES),
    look: Look,
    out: Output,
) -> None:
    """Compare each norm's Jacobian with the curves' derivatives, and test the assumptions of DyT and DyISRU."""
    from normscope.fits.fit import check_fit

    check_fit(func)
    names = sources(models, run, by, out)
    files = FigureFiles(out.figures_path(output), look, names, ["gradient"], by)
    seen, rows, figures = [], [], []
    for capture in captures([(name, run) for name in names], layers, out, by, diagonal=True):
        fits = normscope.fit(capture, func, shift=shift)
        views = normscope.gradient(capture, fits)
        out.heading(capture.about)
        out.table(*gradient_tables(views))
        figure = normscope.figures.plot_gradient(capture, fits, **look.figure_options)
        file = files.save(figure, "gradient", capture, out)
        figures.append({**capture.about, "file": file, "sites": [site.name for site in capture.sites]})
        seen.append(capture)
        rows += [view.as_dict() for view in views]
    out.document({"gradient": rows, "figures": figures, "skipped": skipped_as_json(seen)}, rows)
