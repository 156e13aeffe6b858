"""``normscope gradient``."""

from __future__ import annotations

from pathlib import Path

import normscope
from normscope.cli import options
from normscope.cli.figure_files import OF_PLOT, FigureFiles, Look
from normscope.cli.output import FIGURES, Output, skipped_as_json
from normscope.cli.running import OF_CAPTURE, RunOptions, captures, sources
from normscope.show.tables.card import gradient_tables


@options.with_groups(
    "normscope gradient demo_vit · normscope gradient vit_b16 --layers all --json · "
    "normscope gradient seen.safetensors -o gradient.pdf",
    without=(*OF_CAPTURE, *OF_PLOT),
)
def gradient(
    models: options.Models = None,
    *,
    layers: options.DrawnLayers = None,
    func: options.Func = "tanh,isru",
    shift: options.Shift = True,
    run: RunOptions,
    by: options.By = None,
    output: options.GradientOutput = Path(FIGURES),
    look: Look,
    say: Output,
) -> None:
    """Compare each norm's Jacobian with the curves' derivatives, and test the assumptions of DyT and DyISRU."""
    from normscope.fits.fit import check_fit
    from normscope.show.figures.style import heading

    check_fit(func)
    names = sources(models, run, by, say)
    files = FigureFiles(say.place_of_figures(output), look, names, ["gradient"], by)
    seen, rows, figures = [], [], []
    for capture in captures([(name, run) for name in names], layers, say, by, diagonal=True):
        fits = normscope.fit(capture, func, shift=shift)
        views = normscope.gradient(capture, fits)
        say.heading(capture.about)
        for table in gradient_tables(views):
            say.table(table)
        figure = normscope.figures.plot_gradient(capture, fits, **look.of_figure)
        file = files.save(figure, heading(capture.about), "gradient", capture, say)
        figures.append({**capture.about, "file": file, "sites": [site.name for site in capture.sites]})
        seen.append(capture)
        rows += [view.as_dict() for view in views]
    say.document({"gradient": rows, "figures": figures, "skipped": skipped_as_json(seen)}, rows)
