"""``normscope plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import normscope
from normscope.cli import options
from normscope.cli.figure_files import FigureFiles, Look
from normscope.cli.output import FIGURES, Output, skipped_as_json
from normscope.cli.running import CAPTURE_ONLY, RunOptions, captures, sources
from normscope.runtime.files import check_writable
from normscope.show.tables.card import sink_sentence

_OVERVIEW, _VIEW, _COMPACT = "overview", "scurves", "compact"


@options.with_groups(
    "normscope plot · normscope plot vit_b16 --layers 4 -o vit_b16.pdf · normscope plot seen.safetensors",
    without=(*CAPTURE_ONLY, "columns"),
)
def plot(
    models: options.Models = None,
    *,
    layers: options.DrawnLayers = None,
    func: options.Func = "tanh,isru",
    shift: options.Shift = True,
    color: options.Color = "density,token,channel",
    run: RunOptions,
    by: options.By = None,
    output: options.PlotOutput = Path(FIGURES),
    compact: options.Compact = False,
    xscale: options.Xscale = "linear",
    share_axes: options.ShareAxes = False,
    look: Look,
    out: Output,
) -> None:
    """Draw the S-curves of a model's norms: all pairs, by token and by channel, under fitted curves.

    Two or more models also share one figure, in rows of four norms; with --compact, only that one is drawn.
    """
    from normscope.fits.fit import check_fit
    from normscope.show.figures.axes import check_xscale
    from normscope.show.figures.scurves import rows_named
    from normscope.show.figures.sheet import heading

    check_fit(func)
    rows_named(color)  # before anything runs
    check_xscale(xscale)
    names = sources(models, run, by, out)
    if compact:
        files = FigureFiles(output, look, names if len(names) == 1 else [_OVERVIEW], [_COMPACT])
    else:
        files = FigureFiles(output, look, names, [_VIEW], by)
        if len(names) > 1:
            check_writable(files.path(_OVERVIEW, _VIEW))
    axes: dict[str, Any] = {"xscale": xscale, "share_axes": share_axes, **look.figure_options}
    seen, fits, figures = [], [], []
    for capture in captures([(name, run) for name in names], layers, out, by):
        fitted = normscope.fit(capture, func, shift=shift)
        if sink := sink_sentence(fitted):
            out.remark(sink)
        file = None
        if not compact:
            figure = normscope.plot(capture, fitted, color=color, **axes)
            file = files.save(figure, _VIEW, capture, out)
        sites = [site.name for site in capture.sites]
        figures.append({**capture.about, "file": file, "sites": sites, "fits": [fit.as_dict() for fit in fitted]})
        seen.append(capture)
        fits.append(fitted)
    together = None
    if compact or len(seen) > 1:
        title = heading(seen[0].about) if len(seen) == 1 else _OVERVIEW
        figure = normscope.figures.overview(seen, fits, layers="all", **axes)
        together = files.save(figure, _COMPACT if compact else _VIEW, seen, out, title)
    out.document({"figures": figures, "overview": together, "skipped": skipped_as_json(seen)})
