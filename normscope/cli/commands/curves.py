"""``normscope curves``."""

from __future__ import annotations

from pathlib import Path

import normscope
from normscope.cli.options import FigureFiles, Look, declared
from normscope.cli.output import Output


@declared(
    "normscope curves · normscope curves --func tanh,mine=x/(1+abs(x)) --plot curves.pdf --width 5.5",
    without=("figure_format", "dpi", "style", "title"),
    first_rank_only=True,
)
def curves(*, func: str = "all", plot: Path | None = None, look: Look, say: Output) -> None:
    """List the built-in curves and their formulas; draw them."""
    from normscope.curves.expressions import curves_named
    from normscope.tables.table import curves_table

    files = FigureFiles(plot, look, ["curves"], [""], option="--plot") if plot else None
    chosen = curves_named(func)
    say.table(curves_table(chosen))
    if files:
        figure = normscope.figures.plot_curves(chosen, **look.of_figure)
        files.save(figure, "curves", "", {"curves": [curve.name for curve in chosen]}, say)
    rows = [
        {"curve": curve.name, "aliases": list(curve.aliases), "formula": curve.formula, "source": curve.source}
        for curve in chosen
    ]
    say.document({"curves": rows}, rows)
