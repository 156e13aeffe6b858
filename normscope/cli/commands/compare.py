"""``normscope compare``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import normscope
from normscope.cli import options
from normscope.cli.figure_files import PLOT_ONLY, FigureFiles, Look
from normscope.cli.output import FIGURES, Output, skipped_as_json
from normscope.cli.running import CAPTURE_ONLY, RunOptions, captures, check_by, check_sources, named_or_embedded


@options.with_groups(
    "normscope compare monday.safetensors tuesday.safetensors · normscope compare demo_vit demo_wav2vec2 · "
    "normscope compare vit_b16 --weights step100.pt --weights step200.pt",
    without=(*CAPTURE_ONLY, *PLOT_ONLY, "figure_format"),
)
def compare(
    models: options.Models = None,
    *,
    func: options.Func = "tanh,isru",
    shift: options.Shift = True,
    layers: options.Layers = "all",
    weights: options.ComparedWeights = None,
    run: RunOptions,
    by: options.By = None,
    output: options.FigureOutput = Path(FIGURES),
    look: Look,
    out: Output,
) -> None:
    """Compare models, captures, or the checkpoints of a training with the first of them: site by site, in one figure.

    Sites are matched by name or, if most names differ, by placement and relative depth.
    """
    names = named_or_embedded(models, out)
    from normscope.fits.comparison import check_curves, check_number, compared
    from normscope.show.tables.fit import comparison_table, matching_lines

    curves = check_curves(func)
    runs = [(name, replace(run, weights=checkpoint)) for name in names for checkpoint in weights or ["pretrained"]]
    for name, run_options in runs:
        check_sources([name], run_options)
    check_by(by, names)
    if by is None:
        check_number(len(runs))
    files = FigureFiles(out.figures_path(output), look, ["comparison"], [""])
    seen = list(captures(runs, layers, out, by))
    comparison = compared(seen, [normscope.fit(capture, curves, shift=shift) for capture in seen])
    for line in matching_lines(comparison):
        out.sentences(line)
    out.table(comparison_table(comparison.rows))
    drawn = normscope.figures.plot_comparison(seen, comparison.fits, **look.figure_options)
    rows = [row.as_dict() for row in comparison.rows]
    document = {
        "figure": files.save(drawn, "", seen, out, "comparison"),
        "compared": [
            {"capture": number, **capture.about, "samples": capture.n_samples, "seed": capture.seed}
            for number, capture in enumerate(comparison.captures, 1)
        ],
        "sites": rows,
        "unmatched": comparison.unmatched(),
        "skipped": skipped_as_json(comparison.captures),
    }
    out.document(document, rows)
