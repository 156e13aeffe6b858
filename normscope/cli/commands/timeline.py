"""``normscope timeline``."""

from __future__ import annotations

from pathlib import Path

import normscope
from normscope.cli import options
from normscope.cli.figure_files import PLOT_ONLY, FigureFiles, Look
from normscope.cli.output import FIGURES, Output

_VIEW, _SCURVES = "timeline", "scurves"


@options.with_groups(
    "normscope timeline run.jsonl · normscope timeline run.jsonl --layers '*.norm1' -o run.pdf · "
    "normscope timeline run.jsonl -o run.csv",
    without=(*PLOT_ONLY, "figure_format"),
)
def timeline(
    file: options.RunFile,
    *,
    layers: options.Layers = "all",
    output: options.FigureOutput = Path(FIGURES),
    look: Look,
    out: Output,
) -> None:
    """Show how norms and point-wise functions change while a network trains, from the file of a probe.

    A table of the first and the last step, and two figures: numbers by step and depth, and S-curves of up to four
    sites. If the probe kept captures, also ceilings, and the intervals of the last step.
    """
    from normscope.curves.known import BY_NAME
    from normscope.show.tables.fit import fits_table
    from normscope.tools.probe.table import timeline_tables

    files = FigureFiles(out.figures_path(output), look, [file.stem], [_VIEW])
    run = normscope.load_timeline(file).only(layers)
    norms = [site.name for site in run.sites if not site.curve]
    curves = [name for name in run.curves if name in BY_NAME]
    captures = list(map(run.capture_of, run.ends))
    kept = captures if norms and curves and None not in captures else ()
    fits = [normscope.fit(normscope.load_capture(path).only(norms), curves) for path in filter(None, kept)]
    out.heading(run.about)
    out.table(*timeline_tables(run, fits))
    if fits:
        out.title(f"step {run.steps[-1]:,}, from its capture")
        out.table(fits_table(fits[-1]))
    figures = {
        _VIEW: normscope.figures.plot_timeline(run, **look.figure_options),
        _SCURVES: normscope.figures.plot_scurves_by_step(run, **look.figure_options),
    }
    saved = [files.save(figure, view, run.about, out, file.stem) for view, figure in figures.items()]
    document = {
        **run.about,
        "curves": run.curves,
        "steps": run.steps.tolist(),
        "sites": list(run.rows(run.ends)),
        "fits": [fit.as_dict() for step_fits in fits[-1:] for fit in step_fits],
        "figures": saved,
    }
    out.document(document, list(run.rows(range(len(run.steps)))) if out.file else [])
