"""``normscope fit``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import normscope
from normscope.cli.options import Look, check_plot, declared
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import RunOptions, captures, family_of, sources
from normscope.errors import UsageError, unknown

if TYPE_CHECKING:
    from normscope.fits.curve_fit import CurveFit
    from normscope.pairs.captures import Capture

EXAMPLES = (
    "Examples: normscope fit --func isru · normscope fit vit_b16 --func all --csv · "
    "normscope fit demo_dit --by timestep · normscope fit demo_vit --per channel --json · "
    "normscope fit seen.safetensors --pool kind --func best"
)

LEVELS = ("site", "channel", "token")
CURVES = "tanh,isru"


@declared(without=("figure_format", "dpi", "style"))
def fit(
    models: list[str] | None = None,
    *,
    func: str = CURVES,
    per: str = "site",
    pool: str | None = None,
    amplitude: str = "free",
    theory: bool = False,
    alpha: float | None = None,
    shift: bool | None = None,
    weights_by: str = "pairs",
    advise: bool = False,
    layers: str = "all",
    run: RunOptions,
    by: str | None = None,
    plot: Path | None = None,
    look: Look,
    say: Output,
) -> None:
    """Fit y ≈ A·f(αx + s) to every norm's pairs, by least squares over all of them, with honest intervals."""
    from normscope.fits.fit import check_fit

    if per not in LEVELS:
        raise UsageError(unknown("level", per, LEVELS))
    of_tokens = per == "token"
    if plot and (per != "site" or pool or advise):
        raise UsageError("--plot draws the fits of each site by itself; leave --per, --pool and --advise out.")
    if advise and (per != "site" or pool):
        raise UsageError("--advise takes the fits of each site by itself; leave --per and --pool out.")
    form = {"amplitude": amplitude, "theory": theory, "alpha": alpha, "shift": shift}
    if of_tokens and (func, pool, weights_by, *form.values()) != (CURVES, None, "pairs", "free", False, None, None):
        raise UsageError(
            "--per token fits no curve, as each token is a line, exactly; leave out --func, --pool, --weights-by, "
            "--amplitude, --theory, --alpha and --shift."
        )
    how: dict[str, Any] = {"per": "site" if of_tokens else per, "pool": pool, "weights_by": weights_by, **form}
    check_fit(func, **how)
    names = sources(models, run, by, say)
    check_plot(plot, names, by)
    seen, rows, summaries = [], [], []
    for capture in captures(
        [(name, run) for name in names], layers, say, by, by_gamma=weights_by == "gamma", per_channel=per == "channel"
    ):
        say.heading(capture.about)
        seen.append(capture)
        if of_tokens:
            rows += _slopes(capture, say)
        elif advise:
            rows += _advice(capture, func, how, say)
        else:
            fits, summary = _fits(capture, func, how, say)
            rows += [fit.as_dict() for fit in fits]
            if plot:
                figure = normscope.plot_depth(capture, fits, **look.of_figure)
                say.result(str(normscope.save_figure(figure, plot, capture)))
            summaries += summary
    if advise:
        from normscope.fits.advice import NOTE

        document: dict[str, Any] = {"note": NOTE, "advice": rows}
    else:
        document = {"slopes": rows} if of_tokens else {"fits": rows, "layerwise": summaries}
    say.document({**document, "skipped": skipped_as_json(seen)}, rows)


def _fits(capture: Capture, func: str, how: dict[str, Any], say: Output) -> tuple[list[CurveFit], list[dict[str, Any]]]:
    from normscope.tables.fit import channels_table, fits_table, layerwise_line

    fits = normscope.fit(capture, func, **how)
    say.result(channels_table(fits) if how["per"] == "channel" else fits_table(fits))
    summary = normscope.layerwise(fits) if how["per"] == "site" and how["pool"] is None else None
    if summary is None or summary.sites < 2:
        return fits, []
    say.sentences(layerwise_line(summary))
    return fits, [{"model": capture.about["model"], **summary.as_dict()}]


def _advice(capture: Capture, func: str, how: dict[str, Any], say: Output) -> list[dict[str, Any]]:
    from normscope.tables.fit import advice_table

    advice = normscope.advise(normscope.fit(capture, func, **how), capture.sites, family=family_of(capture))
    say.result(advice_table(advice))
    return [row.as_dict() for row in advice]


def _slopes(capture: Capture, say: Output) -> list[dict[str, Any]]:
    from normscope.tables.fit import slopes_table

    slopes = normscope.token_slopes(capture)
    say.result(slopes_table(slopes))
    return [row.as_dict() for row in slopes]
