"""``normscope curves``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

import normscope
from normscope.cli.options import Look, check_plot, declared
from normscope.cli.output import Output
from normscope.runtime.processes import Place

EXAMPLES = "Examples: normscope curves · normscope curves --func tanh,mine=x/(1+abs(x)) --plot curves.pdf --width 5.5"


@declared(without=("figure_format",))
def curves(
    *,
    func: str = "all",
    plot: Path | None = None,
    look: Look,
    say: Output,
) -> None:
    """List the curves that are known, with their formulas; draw them."""
    if not Place.from_environment().speaks:
        raise typer.Exit
    check_plot(plot, [], None)
    from normscope.fits.curves.expressions import curves_named
    from normscope.tables.table import curves_table

    chosen = curves_named(func)
    say.result(curves_table(chosen))
    if plot is not None:
        figure = normscope.plot_curves(chosen, **look.of_figure)
        normscope.save_figure(figure, plot, {"curves": [curve.name for curve in chosen]}, look.dpi)
        say.result(str(plot))
    rows: list[dict[str, Any]] = [
        {"curve": curve.name, "aliases": list(curve.aliases), "formula": curve.formula, "source": curve.source}
        for curve in chosen
    ]
    say.document({"curves": rows}, rows)
