"""``normscope compare``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import normscope
from normscope.cli.options import figure_suffix
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import RunOptions, captures, check_by, check_sources, named_or_embedded, runs_networks
from normscope.runtime.files import check_writable

if TYPE_CHECKING:
    from normscope.fits.views.comparison import Comparison

EXAMPLES = (
    "Examples: normscope compare monday.safetensors tuesday.safetensors · normscope compare demo_vit demo_wav2vec2 · "
    "normscope compare vit_b16 --weights step100.pt --weights step200.pt"
)

_FIGURE = "comparison"


@runs_networks(without=("weights",))
def compare(
    models: list[str] | None = None,
    *,
    func: str = "tanh,isru",
    layers: str = "all",
    weights: list[str] | None = None,
    run: RunOptions,
    by: str | None = None,
    figure_format: str | None = None,
    dpi: int = 200,
    style: str = "light",
    as_json: bool = False,
    as_csv: bool = False,
    output: Path = Path("outputs"),
    quiet: bool = False,
    width: float | None = None,
    title: str | None = None,
) -> None:
    """Compare models, captures, or the checkpoints of a training with the first of them: site by site, in one figure.

    Sites are matched by name, or, where the networks are built differently, by placement and relative depth.
    """
    say = Output(as_json, quiet, as_csv=as_csv)
    names = named_or_embedded(models, say)
    path = _path(output, figure_format)
    from normscope.fits.views.comparison import check_curves, check_number, compared

    curves = check_curves(func)
    sources = [(name, replace(run, weights=checkpoint)) for name in names for checkpoint in weights or ["pretrained"]]

    from normscope.figures.style import style_named
    from normscope.tables.fit import comparison_table, matching_lines

    style_named(style)
    for name, options in sources:
        check_sources([name], options)
    check_by(by, names)
    if by is None:
        check_number(len(sources))
    check_writable(path)
    seen = list(captures(sources, layers, say, by))
    comparison = compared(seen, [normscope.fit(capture, curves) for capture in seen])
    for line in matching_lines(comparison):
        say.sentences(line)
    say.result(comparison_table(comparison.rows))
    drawn = normscope.plot_comparison(seen, comparison.fits, width=width, title=title, style=style)
    figure = normscope.save_figure(drawn, path, seen, dpi)
    say.result(str(figure))
    rows = [row.as_dict() for row in comparison.rows]
    say.document(_document(comparison, figure, rows), rows)


def _path(output: Path, asked: str | None) -> Path:
    """Decide on the figure's file before anything is run."""
    suffix = figure_suffix(output, asked, [], None)
    return output if output.suffix.lower() == f".{suffix}" else output / f"{_FIGURE}.{suffix}"


def _document(comparison: Comparison, figure: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    of_each = [
        {"capture": number, **capture.about, "samples": capture.n_samples, "seed": capture.seed}
        for number, capture in enumerate(comparison.captures, 1)
    ]
    return {
        "figure": str(figure),
        "compared": of_each,
        "sites": rows,
        "unmatched": comparison.unmatched(),
        "skipped": skipped_as_json(comparison.captures),
    }
