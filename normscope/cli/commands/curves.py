"""``normscope curves``."""

from __future__ import annotations

import normscope
from normscope.cli import options
from normscope.cli.figure_files import PLOT_ONLY, FigureFiles, Look
from normscope.cli.output import Output


@options.with_groups(
    "normscope curves · normscope curves --func tanh,mine=x/(1+abs(x)) --plot curves.pdf --width 5.5",
    without=(*PLOT_ONLY, "figure_format", "title", "columns"),
    first_rank_only=True,
)
def curves(*, func: options.Func = "all", plot: options.Plot = None, look: Look, out: Output) -> None:
    """List the built-in curves and their formulas; draw them."""
    from normscope.curves.expressions import curves_named
    from normscope.show.tables.catalogs import curves_table

    files = FigureFiles(plot, look, ["curves"], [""], option="--plot") if plot else None
    chosen = curves_named(func)
    out.table(curves_table(chosen))
    if files:
        figure = normscope.figures.plot_curves(chosen, **look.figure_options)
        files.save(figure, "", {"curves": [curve.name for curve in chosen]}, out, "curves")
    rows = [
        {"curve": curve.name, "aliases": list(curve.aliases), "formula": curve.formula, "source": curve.source}
        for curve in chosen
    ]
    out.document({"curves": rows}, rows)
