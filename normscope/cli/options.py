"""The table of all options, and where a command that draws writes its figures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from normscope.errors import UsageError, unknown
from normscope.runtime.files import check_writable, file_stem

if TYPE_CHECKING:
    from normscope.pairs.captures import Capture

# The panels of a command's help, in order.
MODEL, DATA, FIT, SWAP, RUNNING, OUTPUT = PANELS = ("Model", "Data", "Fit", "Swap", "Running", "Output")
_ARGUMENTS = ""
# One row per parameter of a command: its metavar, two spaces, and its help; flags have no metavar. A row whose name
# begins with a command is for that command and for those that follow it in _LIKE.
_LIKE = {"heal": "swap", "swap_bench": "swap", "gradient": "plot"}
_ROWS: dict[str, dict[str, str]] = {
    _ARGUMENTS: {
        "models": "MODEL|FILE  Models (`normscope models` lists them) or capture files; without any, the embedded "
        "models.",
        "swap_bench.models": "MODEL  Models (`normscope models` lists them); without any, the embedded ones.",
        "model": "MODEL  A model; `normscope models` lists them.",
        "files": "FILE  Captures of one model, of different inputs.",
    },
    MODEL: {
        "layers": "N|LIST|all  A number of sites along the depth, of all kinds; indices, ranges, names, globs "
        "('0,4-7,*.norm1'); all.",
        "weights": "NAME|FILE|DIR  pretrained, random, a safetensors or torch file, or a folder that `normscope "
        "swap` wrote.",
        "compare.weights": "NAME|FILE|DIR  pretrained, random, a safetensors or torch file, a swap's folder; again for "
        "each to compare.",
    },
    DATA: {
        "data": "PATH  A file or folder of images, audio, text or latents, as the model takes; by default its own "
        "inputs.",
        "limit": "N  Take at most so many samples; of a diffusion model, trajectories.",
        "shuffle": "Take the inputs in an order drawn with --seed, before --limit.",
        "sample": "N  Take only so many tokens of each sample at every norm, drawn uniformly: faster, and less exact.",
        "guidance": "NUMBER  Scale of classifier-free guidance along a diffusion model's trajectory, 1 for none; by "
        "default its own.",
        "timesteps": "N|LIST  Of a diffusion model: a number of timesteps evenly along its trajectory, or a list: "
        "'980,500,0', '980,'.",
        "by": "timestep  Keep a diffusion model's timesteps apart.",
    },
    FIT: {
        "func": "CURVES  Curves, separated by commas: tanh (dyt), isru (dyisru), erf, derf (erf with a shift), …; all; "
        "free, E\\[y|x] itself; best, of all; or your own formula of x, 'mine=x/(1+abs(x))'.",
        "per": "LEVEL  One fit a site, a channel, or a token (its line, exactly).",
        "pool": "PARTS  Fit sites together: of a placement, of a kind (blocks.*.norm1), or all.",
        "amplitude": "HOW  free: A is fitted; theory: it is such that the curve tends to √d or √(d−1).",
        "theory": "Fit nothing: A as in theory, α from the mean slope of the tokens' lines.",
        "alpha": "NUMBER  Fix α; 1 is the ablation without α.",
        "shift": "Fit s in f(αx + s) of every curve, or of none; else of derf alone.",
        "weights_by": "HOW  pairs: all count alike; gamma: by γ² (what the next layer sees); x: evenly over x.",
        "advise": "Say where to start a norm-free training, kind by kind of site (-o advice.yaml).",
    },
    SWAP: {
        "swap.func": "CURVE  One curve: dyt (tanh), dyisru (isru), derf, identity, …; free, E\\[y|x] itself; best, "
        "each site's own; rmsnorm, the norm without centring; or your own formula of x, 'mine=x/(1+abs(x))'.",
        "swap_bench.func": "CURVES  What takes the norms' place, separated by commas: dyt (tanh), dyisru (isru), derf, "
        "identity, …; rmsnorm; free, E\\[y|x] itself; best, each site's own; or your own formula of x.",
        "swap.init": "START  Where to start: fit, this network's own fits; calibrated, from there all that follows "
        "without training, in the linear layers beside the norms too; theory, A and α in theory; paper, A = 1 and "
        "α = 0.5.",
        "swap_bench.init": "START  Where to start, or several with commas: fit, own fits; calibrated, from there all "
        "that follows without training, for each row by itself; theory, A and α in theory; paper, A = 1, α = 0.5.",
        "refit": "WHAT  What calibrated may change: neighbours, the functions and the linear layers beside them; or "
        "norms, the functions alone.",
        "sites": "N|LIST  Which norms: all; pre-norm, post-norm, qk, final; indices, ranges, names, globs; a number; "
        "or least:8, those that move the output least.",
        "keep": "N  Leave so many of these norms as they are: those that are worth most in the partly swapped network.",
        "max_drift": "D  Leave as few of these norms as keep the median error at the output (relative L2; KL "
        "divergence of logits) at or below D, on inputs to learn from.",
        "swap.per": "LEVEL  One A and α a site, or one for each channel.",
        "swap.shift": "Fit s in f(αx + s), or not; by default it is.",
        "steps": "N  Of the training, each of one batch; 1700 where --minutes are not given.",
        "minutes": "M  In place of --steps: wall-clock minutes of calibration, training and measuring together.",
        "train": "WHAT  Which weights are trained: all, but those of embeddings; neighbours, the functions and the "
        "linear layers beside them; or norms, the functions alone, which then are calibrated alone too.",
    },
    RUNNING: {
        "batch_size": "N|auto  Samples per forward pass, at most; auto doubles them until memory ends.",
        "heal.batch_size": "N  Samples per forward pass, at most; by default 16, and of py: as its batches are.",
        "workers": "N  Processes that read inputs, 0 for none but this one; by default as many as suit the device.",
        "seed": "N  Of random weights, default inputs, --shuffle and drawing samples.",
        "device": "DEVICE  Where the network runs: auto, cpu, cuda, cuda:1 …, mps.",
        "device_map": "auto  Spread a network that one device has no room for over GPUs, memory and disk (needs "
        "accelerate).",
        "dtype": "DTYPE  Of weights and inputs: float32, bfloat16, float16 (fp32, bf16, fp16); keep converts no "
        "weights. By default float32, and of py: keep.",
        "verify": "Recompute every norm's true output from y, and fail where it differs.",
        "full": "Time the whole matrix: whole networks compiled and backward, in every dtype.",
        "quick": "One curve, dyt or that of --func, and the fewest timings there are.",
        "all_samples": "Drift of each site alone and in cumulative order on all samples, not on 16 of them.",
        "seconds": "SECONDS  For each model's speed; by default 15, and of --full no limit.",
        "checkpoint_every": "SECONDS  How often to keep what was captured so far, in FILE's .checkpoint folder, until "
        "the file is written.",
        "resume": "Go on from what an unfinished run kept, if there is one; else from the start.",
        "restart": "Discard what an interrupted healing left beside the folder, and begin anew.",
    },
    OUTPUT: {
        "as_json": "Print one JSON document on stdout, and nothing else there.",
        "as_csv": "Print the table's rows as CSV on stdout, and nothing else there.",
        "output": "FILE  Write the result to this file: tables as .tex or .md, rows as .csv or .parquet, all as .json "
        "or .yaml.",
        "plot.output": "PATH  A folder; or, for one model, the figure's file.",
        "compare.output": "PATH  A folder, or the figure's file.",
        "report.output": "PATH  A folder, or the page's file, FILE.html.",
        "swap.output": "DIR  The folder to write; --weights takes it.",
        "swap_bench.output": "DIR  A folder for the figures, two of each model.",
        "capture.output": "FILE  The capture's file (safetensors).",
        "merge.output": "FILE  The file of all of them (safetensors).",
        "quiet": "No progress and no remarks; warnings stay.",
        "force": "Replace the output file even if it is not a capture.",
        "raw": "Also write every pair of the chosen layers, into FILE's -raw folder.",
        "by_gamma": "Also keep sums weighted by γ², for `fit --weights-by gamma`.",
        "per_channel": "Also keep sums per channel, for `fit --per channel`.",
        "diagonal": "Also keep sums of the diagonal of each norm's Jacobian, for `gradient`.",
        "keep_inputs": "N  Also keep of N inputs a thumbnail, the envelope of the waveform or the text, and σ of every "
        "token, for `report`. The file then shows them to whoever has it.",
        "report.keep_inputs": "N  How many inputs the page shows to whoever has it: thumbnails, envelopes of waveforms "
        "or texts, with σ of every token; 0 for none. By default 2 of a model, and of a file those that it has.",
        "swap_bench": "FILE  Also show the drift and speed that `normscope swap-bench --json` printed into it.",
        "color": "ROWS  Rows of the figure, separated by commas: density, token, channel; residual: E\\[y|x] "
        "less a fit.",
        "xscale": "SCALE  Of x: linear, asinh, or auto, which is asinh where 99 % of the pairs lie in under a tenth of "
        "the width.",
        "share_axes": "Give all panels of a figure the same axes and colours, to compare them.",
        "figure_format": "png|svg|pdf  Of the figure; by default png.",
        "dpi": "N  Dots per inch, also of the points within svg and pdf.",
        "style": "light|dark  Of the figure.",
        "plot": "FILE  Draw it into this .png, .svg or .pdf.",
        "width": "INCHES  Of the figure; a paper's text has 5.5 or so.",
        "title": "TEXT|none  Above the figure; none leaves out names, weights and data, which the file itself holds "
        "still.",
    },
}
_NAMES = {
    "as_json": ["--json"],
    "as_csv": ["--csv"],
    "figure_format": ["--format"],
    "shift": ["--shift/--no-shift"],
    "output": ["--output", "-o"],
    "quiet": ["--quiet", "-q"],
}


def _path(text: str) -> Path:
    if not text:  # pathlib takes it for the current folder
        raise UsageError("--data is empty; name a file or a folder.")
    return Path(text)


def _of_64_bits(number: int | None) -> int | None:
    if number is not None and not -(2**63) <= number < 2**63:
        raise typer.BadParameter(f"{number} takes more than 64 bits.")
    return number


def _at_least(least: int, most: int | None = None) -> Callable[[int | None], int | None]:
    """Refuse numbers that are too small or too large; a callback, as the help shows min= and max= at length."""

    def check(number: int | None) -> int | None:
        if number is not None and (number < least or (most is not None and number > most)):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise typer.BadParameter(f"{number} is not {allowed}.")
        return _of_64_bits(number)

    return check


def _seconds(number: float | None) -> float | None:
    if number is not None and not number >= 0:  # also refuses nan, which min= would accept
        raise typer.BadParameter(f"{number} is no number of seconds.")
    return number


def _inches(number: float | None) -> float | None:
    if number is not None and not 2 <= number <= 100:
        raise typer.BadParameter(f"{number:g} is not from 2 to 100 inches.")
    return number


def _size(text: str | int) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        size = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor auto.") from None
    if size < 1:
        raise typer.BadParameter(f"{size} is less than 1.")
    _of_64_bits(size)
    return size


_PARSERS: dict[str, Callable[[str], Any]] = {"data": _path, "batch_size": _size}
_CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("limit", "sample", "steps", "heal.batch_size"), _at_least(1)),
    **dict.fromkeys(("workers", "keep_inputs", "report.keep_inputs"), _at_least(0)),
    **dict.fromkeys(("seconds", "checkpoint_every"), _seconds),
    "dpi": _at_least(20, 1200),
    "seed": _of_64_bits,
    "width": _inches,
}
_SHOWN_DEFAULTS = {"compare.weights": "pretrained"}


def declared(command: Callable[..., None]) -> Callable[..., None]:
    """Give the parameters of a command, which have plain types, the options of the table; Typer reads them there.

    >>> def models(quiet: bool = False) -> None: ...
    >>> inspect.signature(declared(models)).parameters["quiet"].annotation.__metadata__[0].help[:26]
    'No progress and no remarks'
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        parameter.replace(annotation=_declaration(command.__name__, parameter))
        for parameter in signature.parameters.values()
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _declaration(command: str, parameter: inspect.Parameter) -> Any:
    name = parameter.name
    keys = (f"{command}.{name}", f"{_LIKE.get(command)}.{name}", name)
    key, panel = next((key, panel) for key in keys for panel, rows in _ROWS.items() if key in rows)
    metavar, _, text = _ROWS[panel][key].rpartition("  ")
    look: dict[str, Any] = {
        "metavar": metavar or None,
        "help": text,
        "show_default": _SHOWN_DEFAULTS.get(key, parameter.default is not None),
    }
    if panel == _ARGUMENTS:
        return Annotated[parameter.annotation, typer.Argument(**look)]
    flag = [f"--{name.replace('_', '-')}"]  # Typer would add --no-…
    names = _NAMES.get(name, flag)
    parser = _PARSERS.get(key)
    option = typer.Option(*names, **look, rich_help_panel=panel, callback=_CHECKS.get(key), parser=parser)
    return Annotated[Any if parser else parameter.annotation, option]


_FORMATS = ("png", "svg", "pdf")


def figure_suffix(output: Path, asked: str | None, names: list[str], by: str | None) -> str:
    """Decide on the format before anything is run.

    Raises:
        UsageError: if there is no such format, if ``output`` is a file of another, or if it is one file where several
            figures are asked for.
    """
    if asked is not None and asked not in _FORMATS:
        raise UsageError(unknown("figure format", asked, _FORMATS))
    named = output.suffix.lower().removeprefix(".")
    if named not in _FORMATS:
        if named and not output.is_dir():
            endings = ", ".join(f".{ending}" for ending in _FORMATS)
            raise UsageError(
                f"--output {output} ends in .{named}, but a figure's file ends in one of {endings}. To name a folder "
                "with a dot, make it first."
            )
        return asked or "png"
    if asked not in (None, named):
        raise UsageError(f"--output {output} ends in .{named}, but --format asks for {asked}.")
    if len(names) > 1:
        raise UsageError(f"--output {output} is one file, but there are {len(names)} models. Name a folder.")
    if by is not None:
        raise UsageError(f"--output {output} is one file, but --by {by} draws a figure for each. Name a folder.")
    return named


def check_plot(plot: Path | None, names: list[str], by: str | None) -> None:
    """Refuse, before anything is run, a file that no figure of one capture can be written to; UsageError."""
    if plot is not None:
        if plot.suffix.lower().removeprefix(".") not in _FORMATS:
            raise UsageError(f"--plot {plot} names no figure: its file ends in .png, .svg or .pdf.")
        if len(names) > 1 or by is not None:
            many = f"there are {len(names)} models" if len(names) > 1 else f"--by {by} makes several captures"
            raise UsageError(f"--plot {plot} is one file, but {many}. Give one at a time.")
        check_writable(plot)


def figure_title(capture: Capture) -> str:
    """Name what a figure of this capture shows: the model, and the part of its data if it is one."""
    return " ".join(capture.about[key] for key in ("model", "part") if key in capture.about)


def figure_path(output: Path, suffix: str, title: str, view: str, used: list[str]) -> Path:
    """Name the figure's file after its model and view; two captures of one model do not overwrite each other."""
    if output.suffix.lower() == f".{suffix}":
        return output
    stem = f"{file_stem(title)}-{view}"
    names = (output / f"{stem}{number}.{suffix}" for number in ("", *(f"-{n}" for n in range(2, len(used) + 2))))
    return next(path for path in names if str(path) not in used)
