"""``normscope fit``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import normscope
from normscope.cli.options import (
    FIT,
    AsCsv,
    AsJson,
    By,
    Func,
    JsonFile,
    Layers,
    Models,
    PlotFile,
    Quiet,
    Title,
    Width,
    check_plot,
)
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import (
    RunOptions,
    captures,
    check_by,
    check_sources,
    family_of,
    named_or_embedded,
    runs_networks,
)
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

Per = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        rich_help_panel=FIT,
        help="One fit a site, a channel, or a token (its line, exactly).",
    ),
]
Pool = Annotated[
    str | None,
    typer.Option(
        metavar="PARTS",
        rich_help_panel=FIT,
        help="Fit sites together: of a placement, of a kind (blocks.*.norm1), or all.",
        show_default=False,
    ),
]
Amplitude = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        rich_help_panel=FIT,
        help="free: A is fitted; theory: it is such that the curve tends to √d or √(d−1).",
    ),
]
Theory = Annotated[
    bool,
    typer.Option(
        "--theory", rich_help_panel=FIT, help="Fit nothing: A as in theory, α from the mean slope of the tokens' lines."
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", rich_help_panel=FIT, help="Fix α; 1 is the ablation without α.", show_default=False),
]
Shift = Annotated[
    bool | None,
    typer.Option(
        "--shift/--no-shift",
        rich_help_panel=FIT,
        help="Fit s in f(αx + s) of every curve, or of none; else of derf alone.",
        show_default=False,
    ),
]
WeightsBy = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        rich_help_panel=FIT,
        help="pairs: all count alike; gamma: by γ² (what the next layer sees); x: evenly over x.",
    ),
]
Advise = Annotated[
    bool,
    typer.Option(
        "--advise",
        rich_help_panel=FIT,
        help="Say where to start a norm-free training, kind by kind of site (-o advice.yaml).",
    ),
]


@runs_networks()
def fit(
    models: Models = None,
    *,
    func: Func = CURVES,
    per: Per = "site",
    pool: Pool = None,
    amplitude: Amplitude = "free",
    theory: Theory = False,
    alpha: Alpha = None,
    shift: Shift = None,
    weights_by: WeightsBy = "pairs",
    advise: Advise = False,
    layers: Layers = "all",
    run: RunOptions,
    by: By = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    output: JsonFile = None,
    quiet: Quiet = False,
    plot: PlotFile = None,
    width: Width = None,
    title: Title = None,
) -> None:
    """Fit y ≈ A·f(αx + s) to every norm's pairs, by least squares over all of them, with honest intervals."""
    say = Output(as_json, quiet, output, as_csv=as_csv)
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
    names = named_or_embedded(models, say)
    check_plot(plot, names, by)
    check_sources(names, run)
    check_by(by, names)
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
            rows += [one.as_dict() for one in fits]
            if plot:
                figure = normscope.plot_depth(capture, fits, width=width, title=title)
                say.result(str(normscope.save_figure(figure, plot, capture)))
            summaries += summary
    if advise:
        from normscope.fits.views.advice import NOTE

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
    return [one.as_dict() for one in advice]


def _slopes(capture: Capture, say: Output) -> list[dict[str, Any]]:
    from normscope.tables.fit import slopes_table

    slopes = normscope.token_slopes(capture)
    say.result(slopes_table(slopes))
    return [one.as_dict() for one in slopes]
