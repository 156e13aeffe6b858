"""The options and arguments of all commands, and groups of options that commands share."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from typer import Argument, Option

from normscope.errors import UsageError, unknown
from normscope.models import registry
from normscope.runtime.processes import Process
from normscope.show.tables.glossary import headings, typed, unknown_column
from normscope.swaps.inits import INITS

_MORE_OPTIONS = "More options of models: `normscope capture -h`; of diffusion models: -h after the name of one."


def with_groups(
    examples: str, *, without: Collection[str] = (), first_rank_only: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each parameter of a command that is annotated with a class by the parameters of the class.

    Args:
        examples: last lines of the command's help.
        without: options of the classes that the command lacks. Its own parameters precede those of a class.
        first_rank_only: of several ranks, only the first runs the command.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        parameters: dict[str, inspect.Parameter] = {}
        groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
        declared = inspect.signature(command, eval_str=True).parameters
        for name, parameter in declared.items():
            if get_origin(parameter.annotation) is Annotated:
                parameters[name] = parameter
            else:
                shared = inspect.signature(parameter.annotation, eval_str=True).parameters
                members = [member for member in shared if member not in (*without, *declared)]
                groups[name] = parameter.annotation, members
                parameters |= {member: shared[member] for member in members}

        @functools.wraps(command)
        def run(**given: Any) -> None:
            if first_rank_only and not Process.current().is_first:
                raise typer.Exit
            for name, (group, members) in groups.items():
                given[name] = group(**{member: given.pop(member) for member in members})
            if "run" in groups:  # before torch is imported, which takes seconds
                chosen = given.get("models") or [given.get("model") or "the embedded models"]
                given["out"].remark(f"loading {', '.join(chosen)} …")
            command(**given)

        in_order = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters.values()]
        run.__signature__ = inspect.Signature(in_order)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in in_order}
        more = _MORE_OPTIONS if "run" in groups and command.__name__ != "capture" else ""
        lines = (*examples.split(" · "), more)  # Typer joins the lines of a paragraph
        run.epilog = "Examples:\n\n" + "\n\n".join(lines)  # type: ignore[attr-defined]
        return run

    return decorated


def _number(
    kind: type[int] | type[float], least: float | None = None, most: float = math.inf, unit: str = ""
) -> Callable[[Any], float]:
    """Return a parser of numbers that refuses those out of range, and nan if there is a range."""

    def parse(text: Any) -> float:
        try:
            number = kind(text)
        except ValueError:
            noun = "whole number" if kind is int else "number"
            raise typer.BadParameter(f"{text!r} is not a {noun}{unit and f' of {unit}'}.") from None
        if least is None or least <= number <= most:
            return number
        allowed = f"at least {least}" if most >= _LARGEST and not number > least else f"from {least} to {most}"
        raise typer.BadParameter(f"{number} is not {allowed}{unit and f' {unit}'}.")

    return parse


_LARGEST = 2**63 - 1
_FLOAT = _number(float)
_COUNT, _POSITIVE = _number(int, 0, _LARGEST), _number(int, 1, _LARGEST)


def _path(text: Any) -> Path:
    if (problem := {"": "it is empty", "-": "streams are not supported"}.get(text)) is not None:
        raise typer.BadParameter(f"{problem}; name a file or a folder.")
    return Path(text)


def _columns(context: typer.Context, text: str | None) -> str | None:
    command = str(context.info_name)
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if (wrong := unknown_column(command, [*filter(None, names)] or names)) is not None:
        raise typer.BadParameter(unknown("column", typed(wrong), map(typed, headings(command))))
    return text


def _check_least(layers: str) -> str:
    if layers.startswith(LEAST) and not re.fullmatch(LEAST + r"[1-9]\d{0,5}", layers):
        raise UsageError(f"--layers {layers} is not understood; least:8 takes the eight least harmful.")
    return layers


def _check_names(names: str | list[str] | None) -> str | list[str] | None:
    """Refuse names of neither a model nor a file, before torch is imported; ModelError."""
    for name in [names] if isinstance(names, str) else names or ():
        if Path(name).suffix == ".py" and ":" not in name:
            raise UsageError(f"{name} is code, not a model: py:{name}:FUNCTION names a function in it that makes one.")
        if not is_file(name):
            registry.find(name)
    return names


def is_file(name: str) -> bool:
    """True if a name is that of a file, not of a model."""
    return Path(name).is_file() or Path(name).suffix == ".safetensors"


def _models_like(incomplete: str) -> list[tuple[str, str]]:
    """Complete the name of a model or of a capture in a shell."""
    entries = [(entry.name, entry.description) for entry in registry.list_models() if ":" not in entry.name]
    files = [(str(path), "a capture") for path in Path().glob(f"{incomplete or '*'}*.safetensors")]
    return [(name, help_) for name, help_ in [*entries, *files] if name.startswith(incomplete)]


LEAST = "least:"  # before the number of norms of --layers that harm least
CAPTURES = "MODEL|FILE"  # of the commands that take captures in place of models
_ModelArgument = functools.partial(Argument, callback=_check_names, autocompletion=_models_like)
Models = Annotated[
    list[str] | None,
    _ModelArgument(
        metavar=CAPTURES, help="Models (`normscope models` lists them) or captures; by default the embedded models."
    ),
]
OnlyModels = Annotated[
    list[str] | None,
    _ModelArgument(metavar="MODEL", help="Models (`normscope models` lists them); by default the embedded ones."),
]
Model = Annotated[str, _ModelArgument(metavar="MODEL", help="A model; `normscope models` lists them.")]
RunFile = Annotated[Path, Argument(metavar="RUN.jsonl", parser=_path, help="The file that a `normscope.Probe` wrote.")]
Captures = Annotated[list[str], Argument(metavar="FILE", help="Captures of one model, of different inputs.")]

# The panels of a command's help, in order.
MODEL, DATA, DIFFUSION, FIT, SWAP, RUNNING, FIGURE, OUTPUT = PANELS = (
    *("Model", "Data", "Diffusion", "Fit", "Swap", "Running", "Figure", "Output"),
)
_model, _data, _diffusion, _fit, _swap, _running, _figure, _output = (
    functools.partial(Option, rich_help_panel=panel) for panel in PANELS
)

_SITES = "names, globs, ranges (4-11, 4-4), kinds (LayerNorm), pre-norm, post-norm, qk, final"
_LayersOption = functools.partial(_model, "--layers", metavar="N|LIST|all")
Layers = Annotated[str, _LayersOption(help=f"N sites, evenly over the depth; or {_SITES}.")]
DrawnLayers = Annotated[
    str | None, _LayersOption(help=f"N sites, evenly over the depth, by default at most 4; or {_SITES}.")
]
SwappedLayers = Annotated[
    str,
    _LayersOption(callback=_check_least, help=f"N norms, evenly over the depth; or {_SITES}; or least:8 (by harm)."),
]
_WeightsOption = functools.partial(_model, "--weights", metavar="NAME|FILE|DIR")
Weights = Annotated[
    str, _WeightsOption(help="pretrained, random, a safetensors or torch file, or a folder of `normscope swap`.")
]
ComparedWeights = Annotated[
    list[str] | None,
    _WeightsOption(
        help="pretrained, random, a file or a swap's folder; again for each to compare.", show_default="pretrained"
    ),
]

# Only the help of `normscope capture` lists the options that are hidden here.
Data = Annotated[
    Path | None,
    _data("--data", metavar="PATH", parser=_path, help="Images, audio, text or latents; by default the model's own."),
]
Limit = Annotated[
    int | None,
    _data("--limit", metavar="N", parser=_POSITIVE, help="Take at most N samples; of a diffusion model, trajectories."),
]
Shuffle = Annotated[bool, _data("--shuffle", help="Shuffle the inputs by --seed, before --limit.", hidden=True)]
Sample = Annotated[
    int | None,
    _data(
        "--sample", metavar="N", parser=_POSITIVE, help="Use N random tokens of each sample: faster, and less exact."
    ),
]
Skip = Annotated[
    int,
    _data(
        "--skip",
        metavar="N",
        parser=_COUNT,
        help="Leave out the first N tokens of each sample: attention sinks, class tokens.",
        hidden=True,
    ),
]

Guidance = Annotated[
    float | None,
    _diffusion(
        "--guidance",
        metavar="NUMBER",
        parser=_FLOAT,
        help="Scale of classifier-free guidance, 1 for none; by default the model's own.",
    ),
]
Timesteps = Annotated[
    str | None,
    _diffusion("--timesteps", metavar="N|LIST", help="N timesteps, evenly along the trajectory; or a list: 980,500,0."),
]
By = Annotated[str | None, _diffusion("--by", metavar="timestep", help="Keep the sums of each timestep separately.")]

_CURVES = "tanh (dyt), isru (dyisru), erf, derf, linear (identity), free (E\\[y|x]), or a formula, 'mine=x/(1+abs(x))'"
Func = Annotated[
    str, _fit("--func", metavar="CURVES", help=f"Curves, separated by commas: {_CURVES}, …; all; best, of all.")
]
Per = Annotated[
    str, _fit("--per", metavar="LEVEL", help="One fit per site, per channel, or per token (its line, exactly).")
]
Pool = Annotated[
    str | None,
    _fit("--pool", metavar="PARTS", help="Fit sites together: of a placement, of a kind (blocks.*.norm1), or all."),
]
Amplitude = Annotated[
    str, _fit("--amplitude", metavar="HOW", help="free: A is fitted; theory: the curve tends to √d or √(d−1).")
]
Theory = Annotated[
    bool, _fit("--theory", help="Fit nothing: A from theory, α from the mean slope of the tokens' lines.")
]
Alpha = Annotated[
    float | None, _fit("--alpha", metavar="NUMBER", parser=_FLOAT, help="Fix α; 1 is the ablation without α.")
]
_SHIFT = "Fit the shift s in f(αx + s), the default, or not"
Shift = Annotated[bool, _fit("--shift/--no-shift", help=f"{_SHIFT}.")]
FitShift = Annotated[bool | None, _fit("--shift/--no-shift", help=f"{_SHIFT}; --theory fits none.")]
WeightsBy = Annotated[
    str,
    _fit(
        "--weights-by", metavar="HOW", help="Weights: pairs, equal; gamma, γ² (what the next layer sees); x, even in x."
    ),
]

_REFITTED = "neighbours, the functions and the linear layers beside them; or norms, the functions alone"
_STARTS = "; ".join(f"{name}, {init.help}" for name, init in INITS.items())
SwapFunc = Annotated[
    str, _swap("--func", metavar="CURVE", help=f"In place of the norms: {_CURVES}, …; best, each site's own; rmsnorm.")
]
SwapFuncs = Annotated[
    str, _swap("--func", metavar="CURVES", help=f"In place of the norms, by commas: {_CURVES}, …; best; rmsnorm.")
]
Steps = Annotated[
    int | None,
    _swap("--steps", metavar="N", parser=_POSITIVE, help="Training steps of one batch each; 1700 without --minutes."),
]
Minutes = Annotated[
    float | None,
    _swap("--minutes", metavar="M", parser=_FLOAT, help="Minutes in all, calibration included; replaces --steps."),
]
Train = Annotated[str, _swap("--train", metavar="WHAT", help=f"Trained weights: all but embeddings; {_REFITTED}.")]
Init = Annotated[str, _swap("--init", metavar="START", help=f"Start values: {_STARTS}.")]
Inits = Annotated[
    str, _swap("--init", metavar="START", help=f"Start values, or several, separated by commas: {_STARTS}.")
]
Refit = Annotated[str, _swap("--refit", metavar="WHAT", help=f"What calibrated may change: {_REFITTED}.")]
Keep = Annotated[
    int | None,
    _swap("--keep", metavar="N", parser=_POSITIVE, help="Keep N norms, those whose return lowers the error most."),
]
MaxDrift = Annotated[
    float | None,
    _swap(
        "--max-drift",
        metavar="D",
        parser=_number(float, 0),
        help="Keep the fewest norms for which the median error is at most D.",
    ),
]
SwapPer = Annotated[str, _swap("--per", metavar="LEVEL", help="One A and α per site, or per channel.")]
SwapShift = Annotated[bool | None, _swap("--shift/--no-shift", help=f"{_SHIFT}.")]
Full = Annotated[bool, _swap("--full", help="Also time the whole network compiled, and forward + backward.")]
Quick = Annotated[bool, _swap("--quick", help="Take as few timings as possible.")]
Restart = Annotated[bool, _swap("--restart", help="Discard the progress of an interrupted healing, and start again.")]

Device = Annotated[str, _running("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 …, mps.")]
DeviceMap = Annotated[
    str | None,
    _running(
        "--device-map",
        metavar="auto",
        help="Spread a network too large for one device over GPUs, memory and disk (needs accelerate).",
        hidden=True,
    ),
]
Dtype = Annotated[
    str | None,
    _running(
        "--dtype",
        metavar="DTYPE",
        help="float32, bfloat16, float16, or keep, which converts nothing; by default float32, and keep for py:, "
        "quantized weights and a billion parameters or more.",
    ),
]
_BatchSizeOption = functools.partial(_running, "--batch-size", metavar="N", parser=_POSITIVE)
BatchSize = Annotated[
    int, _BatchSizeOption(help="Samples per forward pass, at most; halved if memory ends.", hidden=True)
]
HealBatchSize = Annotated[
    int | None, _BatchSizeOption(help="Samples per forward pass, at most; by default 16, and for py: its own batches.")
]
Workers = Annotated[
    int | None,
    _running(
        "--workers",
        metavar="N",
        parser=_COUNT,
        help="Processes that read inputs; 0 for none but this one; the default depends on the device.",
    ),
]
Seed = Annotated[
    int,
    _running(
        "--seed",
        metavar="N",
        parser=_number(int, -(2**63), _LARGEST),
        help="Seed of random weights, default inputs, --shuffle and drawn samples.",
        hidden=True,
    ),
]
Verify = Annotated[bool, _running("--verify", help="Recompute every norm's output from y, and fail if it differs.")]
CheckpointEvery = Annotated[
    float,
    _running(
        "--checkpoint-every",
        metavar="SECONDS",
        parser=_number(float, 0, unit="seconds"),
        help="Time between checkpoints in FILE.checkpoint.",
    ),
]
Resume = Annotated[bool, _running("--resume", help="Continue from the checkpoint of an unfinished run, if any.")]

Color = Annotated[
    str, _figure("--color", metavar="ROWS", help="Rows: density, token, channel, residual (E\\[y|x] less a fit).")
]
FigureFormat = Annotated[str | None, _figure("--format", metavar="png|svg|pdf", help="File format; by default png.")]
Dpi = Annotated[
    int,
    _figure(
        "--dpi",
        metavar="N",
        parser=_number(int, 20, 1200),
        help="Dots per inch; at least 300 of the points within svg and pdf.",
    ),
]
Style = Annotated[str, _figure("--style", metavar="light|dark", help="Background of the figure.")]
Plot = Annotated[
    Path | None,
    _figure("--plot", metavar="PATH", parser=_path, help="Draw it into this .png, .svg or .pdf, or into a folder."),
]
Compact = Annotated[
    bool, _figure("--compact", help="Draw one figure of bare panels, four norms to a row for each model.")
]
Xscale = Annotated[
    str, _figure("--xscale", metavar="SCALE", help="Scale of x: linear; or asinh, which shows all pairs.")
]
ShareAxes = Annotated[
    bool, _figure("--share-axes", help="Give all panels of a figure the same axes and colours, to compare them.")
]
Width = Annotated[
    float | None,
    _figure("--width", metavar="INCHES", parser=_number(float, 2, 100, "inches"), help="5.5 for a NeurIPS text."),
]
Labels = Annotated[
    str,
    _figure("--labels", metavar="none|short|full", help="Headings of panels: short names and R²; or full, with paths."),
]
Font = Annotated[str | None, _figure("--font", metavar="FAMILY", help="Font of all text, such as 'Times New Roman'.")]
Caption = Annotated[str | None, _figure("--caption", metavar="txt|tex", help="Write a caption file beside the figure.")]
Title = Annotated[
    str | None,
    _figure("--title", metavar="TEXT|none", help="Title of the figure; none also leaves out names, weights and data."),
]

_OF_TABLES = "a file of the tables (.tex, .md) or of their rows (.csv, .json)"

_output_to = functools.partial(_output, "--output", "-o", parser=_path)
TablesFile = Annotated[Path | None, _output_to(metavar="FILE", help=f"Instead of the terminal, {_OF_TABLES}.")]
PlotOutput = Annotated[Path, _output_to(metavar="PATH", help="A folder; or, for one model, the figure's file.")]
FigureOutput = Annotated[
    Path, _output_to(metavar="PATH", help=f"A folder for figures, or the figure's file; or {_OF_TABLES}.")
]
ReportOutput = Annotated[Path, _output_to(metavar="PATH", help="A folder, or the report's file, FILE.html.")]
SwapOutput = Annotated[Path, _output_to(metavar="DIR", help="The folder to write; --weights takes it.")]
BenchOutput = Annotated[Path, _output_to(metavar="DIR", help="A folder for the figures, two per model.")]
CaptureOutput = Annotated[Path, _output_to(metavar="FILE", help="The capture's file (safetensors).")]
MergeOutput = Annotated[Path, _output_to(metavar="FILE", help="The file of all of them (safetensors).")]
ShownInputs = Annotated[
    int | None,
    _output(
        "--keep-inputs",
        metavar="N",
        parser=_COUNT,
        help="Inputs that the report shows, with σ of every token; by default 2.",
    ),
]
SwapResults = Annotated[
    Path | None,
    _output(
        "--swap-bench",
        metavar="FILE",
        parser=_path,
        help="Also show drift and speed, as `swap-bench --json` printed them.",
    ),
]
TimelineFile = Annotated[
    Path | None,
    _output(
        "--timeline",
        metavar="RUN.jsonl",
        parser=_path,
        help="Also show the timeline of a training, from a `normscope.Probe`.",
    ),
]
Force = Annotated[bool, _output("--force", help="Replace the output file even if it is not a capture.")]
ByGamma = Annotated[bool, _output("--by-gamma", help="Also keep sums weighted by γ², for `fit --weights-by gamma`.")]
PerChannel = Annotated[bool, _output("--per-channel", help="Also keep sums per channel, for `fit --per channel`.")]
Channels = Annotated[
    bool, _output("--channels", help="Also report the channels that set σ, or produce output (a second pass).")
]
Eps = Annotated[
    float | None,
    _model("--eps", metavar="EPS", parser=_number(float, 0, 1e300), help="An eps to compare with each norm's own."),
]
Sites = Annotated[bool, _output("--sites", help="Also print the numbers of every site, a table per question.")]
Diagonal = Annotated[
    bool, _output("--diagonal", help="Also keep sums of the diagonal of each norm's Jacobian, for `gradient`.")
]
KeepInputs = Annotated[
    int,
    _output(
        "--keep-inputs",
        metavar="N",
        parser=_COUNT,
        help="Also keep previews of N inputs, for `report`; anyone with the file can see them.",
    ),
]
Columns = Annotated[
    str | None,
    _output("--columns", metavar="NAMES", callback=_columns, help="Columns of the tables, as headings: site,alpha,r2."),
]
Json = Annotated[bool, _output("--json", help="Print one JSON document on stdout, and nothing else.")]
Quiet = Annotated[bool, _output("--quiet", "-q", help="Print warnings only, no progress and no remarks.")]
