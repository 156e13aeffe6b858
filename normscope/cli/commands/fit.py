"""``normscope fit``."""

from __future__ import annotations

from typing import Any

import normscope
from normscope.cli import options
from normscope.cli.figure_files import PLOT_ONLY, FigureFiles, Look
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import CAPTURE_ONLY, RunOptions, captures, sources
from normscope.errors import UsageError, unknown

_LEVELS = ("site", "channel", "token")
_CURVES = "tanh,isru"


@options.with_groups(
    "normscope fit --func isru · normscope fit vit_b16 --func all -o fits.csv · normscope fit demo_dit --by timestep · "
    "normscope fit demo_vit --per channel --json · normscope fit seen.safetensors --pool kind --func best",
    without=(*CAPTURE_ONLY, *PLOT_ONLY, "figure_format"),
)
def fit(
    models: options.Models = None,
    *,
    func: options.Func = _CURVES,
    per: options.Per = "site",
    pool: options.Pool = None,
    amplitude: options.Amplitude = "free",
    theory: options.Theory = False,
    alpha: options.Alpha = None,
    shift: options.FitShift = None,
    weights_by: options.WeightsBy = "pairs",
    layers: options.Layers = "all",
    run: RunOptions,
    by: options.By = None,
    plot: options.Plot = None,
    look: Look,
    out: Output,
) -> None:
    """Fit y ≈ A·f(αx + s) to every norm's pairs, by least squares over all of them, with 95% intervals."""
    from normscope.fits.fit import check_fit
    from normscope.fits.layerwise import layerwise
    from normscope.fits.saturation import with_modules
    from normscope.fits.scale import token_slopes
    from normscope.show.tables.fit import channels_table, fits_table, layerwise_line, slopes_table

    if per not in _LEVELS:
        raise UsageError(unknown("level", per, _LEVELS))
    if plot and (per != "site" or pool):
        raise UsageError("--plot draws the fits of each site by itself; leave --per and --pool out.")
    form = {"amplitude": amplitude, "theory": theory, "alpha": alpha, "shift": True if shift is None else shift}
    by_token = per == "token"
    chosen = (func, pool, weights_by, amplitude, theory, alpha, shift)
    if by_token and chosen != (_CURVES, None, "pairs", "free", False, None, None):
        raise UsageError(
            "--per token fits no curve, as each token is a line, exactly; leave out --func, --pool, --weights-by, "
            "--amplitude, --theory, --alpha and --shift."
        )
    how: dict[str, Any] = {"per": "site" if by_token else per, "pool": pool, "weights_by": weights_by, **form}
    check_fit(func, **how)
    names = sources(models, run, by, out)
    files = FigureFiles(plot, look, names, ["depth"], by, "--plot") if plot else None
    sums: dict[str, Any] = {"by_gamma": weights_by == "gamma", "per_channel": per == "channel"}
    seen, rows, summaries = [], [], []
    for capture in captures([(name, run) for name in names], layers, out, by, **sums):
        out.heading(capture.about)
        seen.append(capture)
        if by_token:
            for site in capture.sites:
                if site.pointwise is not None:
                    out.remark(f"left out {site.name} ({site.kind}): a point-wise function, which normalizes no token")
            slopes = token_slopes(capture)
            out.table(slopes_table(slopes))
            rows += [row.as_dict() for row in slopes]
            continue
        fits = normscope.fit(capture, func, **how)
        shown = with_modules(capture, fits) if per == "site" and pool is None else fits
        out.table(channels_table(fits) if per == "channel" else fits_table(shown))
        rows += [fit.as_dict() for fit in shown]
        summary = layerwise(fits) if per == "site" and pool is None else None
        if summary is not None and summary.sites > 1:
            out.sentences(layerwise_line(summary))
            summaries.append({"model": capture.about["model"], **summary.as_dict()})
        if files:
            figure = normscope.figures.plot_depth(capture, fits, **look.figure_options)
            files.save(figure, "depth", capture, out)
    document = {"slopes": rows} if by_token else {"fits": rows, "layerwise": summaries}
    out.document({**document, "skipped": skipped_as_json(seen)}, rows)
