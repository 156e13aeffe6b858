"""``normscope plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import normscope
from normscope.cli.options import FigureFiles, Look, declared
from normscope.cli.output import FIGURES, Output, skipped_as_json
from normscope.cli.running import RunOptions, captures, sources
from normscope.runtime.files import check_writable
from normscope.tables.table import sink_sentence

_OVERVIEW, _VIEW, _COMPACT = "overview", "scurves", "compact"


@declared(
    "normscope plot · normscope plot vit_b16 --layers 4 -o vit_b16.pdf · normscope plot seen.safetensors",
    without=("verify", "columns"),
)
def plot(
    models: list[str] | None = None,
    *,
    layers: str | None = None,
    func: str = "tanh,isru",
    shift: bool = True,
    color: str = "density,token,channel",
    run: RunOptions,
    by: str | None = None,
    output: Path = Path(FIGURES),
    compact: bool = False,
    xscale: str = "linear",
    share_axes: bool = False,
    look: Look,
    say: Output,
) -> None:
    """Draw the S-curves of a model's norms: all pairs, by token and by channel, under fitted curves.

    Two or more models also share one figure, in rows of four norms; with --compact, only that one is drawn.
    """
    from normscope.figures.axes import check_xscale
    from normscope.figures.scurves import rows_named
    from normscope.figures.style import heading
    from normscope.fits.fit import check_fit

    check_fit(func)
    rows = rows_named(color)
    check_xscale(xscale)
    names = sources(models, run, by, say)
    if compact:
        files = FigureFiles(output, look, names if len(names) == 1 else [_OVERVIEW], [_COMPACT])
    else:
        files = FigureFiles(output, look, names, [_VIEW], by)
        if len(names) > 1:
            check_writable(files.path(_OVERVIEW, _VIEW))
    axes: dict[str, Any] = {"xscale": xscale, "share_axes": share_axes, **look.of_figure}
    seen, fits, figures = [], [], []
    for capture in captures([(name, run) for name in names], layers, say, by):
        fitted = normscope.fit(capture, func, shift=shift)
        if sink := sink_sentence(fitted):
            say.remark(sink)
        file = None
        if not compact:
            figure = normscope.plot(capture, fitted, rows=rows, **axes)
            file = files.save(figure, heading(capture.about), _VIEW, capture, say)
        sites = [site.name for site in capture.sites]
        figures.append({**capture.about, "file": file, "sites": sites, "fits": [fit.as_dict() for fit in fitted]})
        seen.append(capture)
        fits.append(fitted)
    together = None
    if compact or len(seen) > 1:
        title = heading(seen[0].about) if len(seen) == 1 else _OVERVIEW
        figure = normscope.figures.overview(seen, fits, layers="all", **axes)
        together = files.save(figure, title, _COMPACT if compact else _VIEW, seen, say)
    say.document({"figures": figures, "overview": together, "skipped": skipped_as_json(seen)})
