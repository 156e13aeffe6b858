"""``normscope curves``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

import normscope
from normscope.cli.options import check_plot
from normscope.cli.output import Output
from normscope.runtime.processes import Place

EXAMPLES = "Examples: normscope curves · normscope curves --func tanh,mine=x/(1+abs(x)) --plot curves.pdf --width 5.5"


def curves(
    func: str = "all",
    dpi: int = 200,
    style: str = "light",
    as_json: bool = False,
    as_csv: bool = False,
    output: Path | None = None,
    quiet: bool = False,
    plot: Path | None = None,
    width: float | None = None,
    title: str | None = None,
) -> None:
    """List the curves that are known, with their formulas; draw them."""
    if not Place.from_environment().speaks:
        raise typer.Exit
    say = Output(as_json, quiet, output, as_csv=as_csv)
    check_plot(plot, [], None)
    from normscope.fits.curves.expressions import curves_named
    from normscope.tables.table import curves_table

    chosen = curves_named(func)
    say.result(curves_table(chosen))
    if plot is not None:
        figure = normscope.plot_curves(chosen, width=width, title=title, style=style)
        normscope.save_figure(figure, plot, {"curves": [curve.name for curve in chosen]}, dpi)
        say.result(str(plot))
    rows: list[dict[str, Any]] = [
        {"curve": curve.name, "aliases": list(curve.aliases), "formula": curve.formula, "source": curve.source}
        for curve in chosen
    ]
    say.document({"curves": rows}, rows)
