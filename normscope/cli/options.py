"""Table of all options, the options for figures, and the files that figures are written to."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import normscope
from normscope.cli.running import check_names, models_like
from normscope.errors import UsageError, unknown
from normscope.runtime.files import check_writable, file_stem
from normscope.runtime.processes import Place
from normscope.swaps.inits import INITS
from normscope.tables.glossary import headings, typed, unknown_column

if TYPE_CHECKING:
    from normscope.cli.output import Output

# The panels of a command's help, in order.
MODEL, DATA, DIFFUSION, FIT, SWAP, RUNNING, FIGURE, OUTPUT = PANELS = (
    *("Model", "Data", "Diffusion", "Fit", "Swap", "Running", "Figure", "Output"),
)
_ARGUMENTS = ""
_CURVES = "tanh (dyt), isru (dyisru), erf, derf, linear (identity), free (E\\[y|x]), or a formula, 'mine=x/(1+abs(x))'"
_SITES = "names, globs, ranges (4-11, 4-4), kinds (LayerNorm), pre-norm, post-norm, qk, final"
_REFITTED = "neighbours, the functions and the linear layers beside them; or norms, the functions alone"
_OF_TABLES = "a file of the tables (.tex, .md) or of their rows (.csv, .json)"
_INITS = "; ".join(f"{name}, {init.help}" for name, init in INITS.items())
# One row per parameter of a command, in the order of the help: its metavar, two spaces, and its help; flags have no
# metavar. A row whose name begins with a command is for that command and for the commands that _LIKE maps to it.
_LIKE = {"heal": "swap", "simplify": "swap", "swap_bench": "swap", "gradient": "plot"}
_ROWS: dict[str, dict[str, str]] = {
    _ARGUMENTS: {
        "models": "MODEL|FILE  Models (`normscope models` lists them) or captures; by default the embedded models.",
        "swap_bench.models": "MODEL  Models (`normscope models` lists them); by default the embedded ones.",
        "model": "MODEL  A model; `normscope models` lists them.",
        "file": "RUN.jsonl  The file that a `normscope.Probe` wrote.",
        "files": "FILE  Captures of one model, of different inputs.",
    },
    MODEL: {
        "layers": f"N|LIST|all  N sites, evenly over the depth; or {_SITES}.",
        "plot.layers": f"N|LIST|all  N sites, evenly over the depth, by default at most 4; or {_SITES}.",
        "swap.layers": f"N|LIST|all  N norms, evenly over the depth; or {_SITES}; or least:8 (by harm).",
        "weights": "NAME|FILE|DIR  pretrained, random, a safetensors or torch file, or a folder of `normscope swap`.",
        "compare.weights": "NAME|FILE|DIR  pretrained, random, a file or a swap's folder; again for each to compare.",
    },
    DATA: {
        "data": "PATH  Images, audio, text or latents, as the model takes; by default its own inputs.",
        "limit": "N  Take at most N samples; of a diffusion model, trajectories.",
        "shuffle": "Take the inputs in an order drawn with --seed, before --limit.",
        "sample": "N  Take only N tokens of each sample at every norm, drawn uniformly: faster, and less exact.",
        "skip": "N  Leave out the first N tokens of each sample: attention sinks, class tokens.",
    },
    DIFFUSION: {
        "guidance": "NUMBER  Scale of classifier-free guidance, 1 for none; by default the model's own.",
        "timesteps": "N|LIST  A number of timesteps, evenly along the trajectory; or a list: 980,500,0.",
        "by": "timestep  Keep the timesteps apart.",
    },
    FIT: {
        "func": f"CURVES  Curves, separated by commas: {_CURVES}, …; all; best, of all.",
        "per": "LEVEL  One fit per site, per channel, or per token (its line, exactly).",
        "pool": "PARTS  Fit sites together: of a placement, of a kind (blocks.*.norm1), or all.",
        "amplitude": "HOW  free: A is fitted; theory: the curve tends to √d or √(d−1).",
        "theory": "Fit nothing: A as in theory, α from the mean slope of the tokens' lines.",
        "alpha": "NUMBER  Fix α; 1 is the ablation without α.",
        "shift": "Fit s in f(αx + s), or not; by default it is, but for --theory and --advise.",
        "weights_by": "HOW  pairs: all count alike; gamma: by γ² (what the next layer sees); x: evenly over x.",
        "advise": "Recommend start values for a training without norms, per kind of site.",
    },
    SWAP: {
        "swap.func": f"CURVE  In place of the norms: {_CURVES}, …; best, each site's own; rmsnorm.",
        "swap_bench.func": f"CURVES  In place of the norms, by commas: {_CURVES}, …; best; rmsnorm.",
        "steps": "N  Training steps of one batch each; 1700 without --minutes.",
        "minutes": "M  In place of --steps: minutes of calibration, training and measuring together.",
        "train": f"WHAT  Trained weights: all but embeddings; {_REFITTED}.",
        "swap.init": f"START  Start values: {_INITS}.",
        "swap_bench.init": f"START  Start values, or several, separated by commas: {_INITS}.",
        "refit": f"WHAT  What calibrated may change: {_REFITTED}.",
        "keep": "N  Leave N of these norms in place: those that are worth most in the partly swapped network.",
        "max_drift": "D  Leave as few of these norms as keep the median error at the output at or below D.",
        "swap.per": "LEVEL  One A and α per site, or per channel.",
        "swap.shift": "Fit s in f(αx + s), or not; by default it is.",
        "full": "Also time the whole network compiled, and forward + backward.",
        "quick": "Take the fewest timings.",
        "all_samples": "Measure each site alone and the cumulative order on all samples, not on 16 of them.",
        "restart": "Discard what an interrupted healing left beside the folder, and start again.",
    },
    RUNNING: {
        "device": "DEVICE  auto, cpu, cuda, cuda:1 …, mps.",
        "device_map": "auto  Spread a network too large for one device over GPUs, memory and disk (needs accelerate).",
        "dtype": "DTYPE  float32, bfloat16, float16, or keep, which converts nothing; by default float32, and keep for "
        "py:, quantized weights and a billion parameters or more.",
        "batch_size": "N  Samples per forward pass, at most; halved where memory ends.",
        "heal.batch_size": "N  Samples per forward pass, at most; by default 16, and for py: its own batches.",
        "workers": "N  Processes that read inputs, 0 for none but this one; by default as many as suit the device.",
        "seed": "N  Of random weights, default inputs, --shuffle and drawn samples.",
        "verify": "Recompute every norm's true output from y, and fail where it differs.",
        "checkpoint_every": "SECONDS  How often to save what was captured so far, in FILE.checkpoint.",
        "resume": "Continue from what an unfinished run saved, if there is any.",
    },
    FIGURE: {
        "color": "ROWS  Rows of the figure: density, token, channel, residual (E\\[y|x] less a fit).",
        "figure_format": "png|svg|pdf  Of the figure; by default png.",
        "dpi": "N  Dots per inch; at least 300 of the points within svg and pdf.",
        "style": "light|dark  Of the figure.",
        "plot": "PATH  Draw it into this .png, .svg or .pdf, or into a folder.",
        "compact": "Draw panels alone, in one figure: rows of four norms for each model.",
        "xscale": "SCALE  Of x: linear, which ends where the curve saturates; asinh or symlog, with every pair.",
        "share_axes": "Give all panels of a figure the same axes and colours, to compare them.",
        "width": "INCHES  Of the figure; a paper's text has 5.5 or so.",
        "labels": "none|short|full  Above each panel: short names and R², or everything.",
        "font": "FAMILY  Of all letters in the figure, such as 'Times New Roman'.",
        "caption": "txt|tex  Write what all panels share into a caption beside the figure, not below the panels.",
        "title": "TEXT|none  Above the figure; none leaves out names, weights and data, which the file itself holds "
        "still.",
    },
    OUTPUT: {
        "output": f"FILE  In place of the terminal, {_OF_TABLES}.",
        "plot.output": "PATH  A folder; or, for one model, the figure's file.",
        "gradient.output": f"PATH  A folder for figures, or the figure's file; or {_OF_TABLES}.",
        "timeline.output": f"PATH  A folder for figures, or a figure's file; or {_OF_TABLES} at every step.",
        "compare.output": f"PATH  A folder for the figure, or its file; or {_OF_TABLES}.",
        "report.output": "PATH  A folder, or the report's file, FILE.html.",
        "swap.output": "DIR  The folder to write; --weights takes it.",
        "swap_bench.output": "DIR  A folder for the figures, two per model.",
        "capture.output": "FILE  The capture's file (safetensors).",
        "merge.output": "FILE  The file of all of them (safetensors).",
        "report.keep_inputs": "N  Inputs that readers of the report can see, with σ of every token; by default 2.",
        "swap_bench": "FILE  Also show the drift and speed that `normscope swap-bench --json` printed into it.",
        "timeline": "RUN.jsonl  Also show the timeline of a training, which a `normscope.Probe` wrote.",
        "force": "Replace the output file even if it is not a capture.",
        "by_gamma": "Also keep sums weighted by γ², for `fit --weights-by gamma`.",
        "per_channel": "Also keep sums per channel, for `fit --per channel`.",
        "channels": "Also report the channels that set σ and those that produce output, by a second pass over inputs.",
        "diagonal": "Also keep sums of the diagonal of each norm's Jacobian, for `gradient`.",
        "keep_inputs": "N  Also keep previews of N inputs, for `report`; everybody who has the file can see them.",
        "columns": "NAMES  Columns of the tables, separated by commas, as their headings: site,alpha,r2.",
        "as_json": "Print one JSON document on stdout, and nothing else there.",
        "quiet": "No progress and no remarks; warnings stay.",
    },
}
_NAMES = {
    "as_json": ["--json"],
    "figure_format": ["--format"],
    "shift": ["--shift/--no-shift"],
    "output": ["--output", "-o"],
    "quiet": ["--quiet", "-q"],
}
# Options of several commands that only one of them lists in its help.
_LISTED_BY = {
    **dict.fromkeys(("shuffle", "sample", "skip", "workers", "seed", "device_map", "verify"), "capture"),
    **dict.fromkeys(("figure_format", "dpi", "style", "labels", "font", "caption", "title"), "plot"),
}
_LARGEST = 2**63 - 1


def _path(text: str) -> Path:
    if not text:  # pathlib takes it for the current folder
        raise UsageError("--data is empty; name a file or a folder.")
    return Path(text)


def _between(least: int, most: float = _LARGEST, unit: str = "") -> Callable[[Any], Any]:
    """Refuse other numbers, and nan; a callback, as the help shows min= and max= at length."""

    def check(number: float | None) -> float | None:
        if number is None or least <= number <= most:
            return number
        too_small = not number > least and most >= _LARGEST
        allowed = f"at least {least}" if too_small else f"from {least} to {most}"
        raise typer.BadParameter(f"{number} is not {allowed}{unit}.")

    return check


def _columns(context: typer.Context, text: str | None) -> str | None:
    command = str(context.info_name)
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if (wrong := unknown_column(command, [*filter(None, names)] or names)) is not None:
        raise typer.BadParameter(unknown("column", typed(wrong), map(typed, headings(command))))
    return text


_PARSERS: dict[str, Callable[[str], Any]] = {"data": _path}
_CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("limit", "sample", "steps", "batch_size", "heal.batch_size"), _between(1)),
    **dict.fromkeys(("workers", "skip", "keep_inputs", "report.keep_inputs"), _between(0)),
    "checkpoint_every": _between(0, math.inf, " seconds"),
    "dpi": _between(20, 1200),
    "seed": _between(-(2**63)),
    "width": _between(2, 100, " inches"),
}
_CHECKS |= {"columns": _columns, "models": check_names, "model": check_names}
_SHOWN_DEFAULTS = {"compare.weights": "pretrained"}


def declared(
    examples: str = "", *, without: Collection[str] = (), first_rank_only: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the parameters of a command as Typer options, by the table of options.

    Parameters called ``run``, ``look`` and ``say`` stand for groups: the parameters of their classes replace them.

    Args:
        examples: last lines of the command's help.
        without: options of the groups that the command lacks. Its own parameters precede those of a group.
        first_rank_only: of several ranks, only the first runs the command.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        groups = {name: parameters.pop(name).annotation for name in _GROUPS if name in parameters}
        members: dict[str, list[str]] = {}
        for group, options in groups.items():
            shared = inspect.signature(options, eval_str=True).parameters
            members[group] = [name for name in shared if name not in (*without, *parameters)]
            parameters |= {name: shared[name] for name in members[group]}
        shared_names = {name for names in members.values() for name in names}
        declarations = [
            _declaration(command.__name__, parameter, parameter.name in shared_names)
            for parameter in parameters.values()
        ]
        in_order = [parameter for _, parameter in sorted(declarations, key=lambda pair: pair[0])]

        @functools.wraps(command)
        def with_groups(*arguments: Any, **given: Any) -> None:
            if first_rank_only and not Place.from_environment().speaks:
                raise typer.Exit
            for group, names in members.items():
                given[group] = groups[group](**{name: given.pop(name) for name in names if name in given})
            if "run" in groups and "say" in groups:  # before torch is imported, which takes seconds
                chosen = given.get("models") or [given.get("model") or "the embedded models"]
                given["say"].remark(f"loading {', '.join(chosen)} …")
            command(*arguments, **given)

        with_groups.__signature__ = inspect.Signature(in_order)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in in_order}
        epilog = [f"Example{'s' * (' · ' in examples)}: {examples}"]
        epilog += [text for group, (lister, text) in _MORE.items() if group in groups and command.__name__ != lister]
        with_groups.epilog = "\n\n".join(epilog)  # type: ignore[attr-defined]
        return with_groups

    return decorated


_GROUPS = ("run", "look", "say")
# Where the options of a group are listed that the other commands hide.
_MORE = {
    "run": (
        "capture",
        "More options of models: `normscope capture -h`; of diffusion models: -h after the name of one.",
    ),
    "look": ("plot", "More options of figures: `normscope plot -h`."),
}


def _declaration(
    command: str, parameter: inspect.Parameter, shared: bool
) -> tuple[tuple[bool, int], inspect.Parameter]:
    """Return the position of a parameter in the help, and the parameter as Typer reads it."""
    name, required = parameter.name, parameter.default is parameter.empty
    rows = [(panel, key) for panel, of_panel in _ROWS.items() for key in of_panel]
    keys = (f"{command}.{name}", f"{_LIKE.get(command)}.{name}", name)
    panel, key = next(row for key in keys for row in rows if row[1] == key)
    metavar, _, text = _ROWS[panel][key].rpartition("  ")
    look: dict[str, Any] = {
        "metavar": metavar or None,
        "help": text,
        "show_default": _SHOWN_DEFAULTS.get(key, parameter.default is not None),
    }
    kind = parameter.annotation
    if panel != _ARGUMENTS:
        names = _NAMES.get(name, [f"--{name.replace('_', '-')}"])  # Typer itself would add --no-…
        kind = Any if key in _PARSERS else kind
        look |= {"callback": _CHECKS.get(key), "parser": _PARSERS.get(key), "rich_help_panel": panel}
        look["hidden"] = shared and _LISTED_BY.get(name, command) != command
        declaration = typer.Option(*names, **look)
    else:
        complete = None if name.startswith("file") else models_like
        declaration = typer.Argument(**look, callback=_CHECKS.get(name), autocompletion=complete)
    position = (panel != _ARGUMENTS and not required, rows.index((panel, key)))
    return position, parameter.replace(annotation=Annotated[kind, declaration], kind=parameter.KEYWORD_ONLY)


_FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Look:
    """Options for figures: each field is an option, with its default."""

    figure_format: str | None = None
    dpi: int = 200
    style: str = "light"
    width: float | None = None
    labels: str = "short"
    font: str | None = None
    caption: str | None = None
    title: str | None = None

    @property
    def of_figure(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("figure_format", "dpi")}


@dataclass
class FigureFiles:
    """Files of the figures that a command draws: one for each title and view in a folder, or a single file.

    Raises:
        UsageError: before anything is run, if there is no such format or style, if ``output`` is a file of another
            format, or one file where several figures are drawn, or if they cannot be written there.
    """

    output: Path
    look: Look
    titles: Sequence[str]
    views: Sequence[str]
    by: str | None = None
    option: str = "--output"
    written: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        from normscope.figures.style import theme_of

        theme_of(self.look.of_figure)
        self.suffix = self._suffix()
        for title in self.titles:
            for view in self.views:
                check_writable(self.path(title, view))

    def save(self, figure: Any, title: str, view: str, shown: Any, say: Output) -> str:
        """Write a figure, report its file and return its name; two of one title do not overwrite each other."""
        path = self.path(title, view)
        normscope.figures.save_figure(figure, path, shown, self.look.dpi)
        self.written.append(str(path))
        say.result(str(path))
        return str(path)

    def path(self, title: str, view: str) -> Path:
        """Return the file of the next figure of this title and view; of further views, one beside a single file."""
        if self.output.suffix.lower() == f".{self.suffix}":
            return self.output if view in self.views else self.output.with_stem(f"{self.output.stem}-{view}")
        stem, numbers = "-".join(filter(None, (file_stem(title), view))), range(2, len(self.written) + 2)
        names = (self.output / f"{stem}{number}.{self.suffix}" for number in ("", *(f"-{n}" for n in numbers)))
        return next(path for path in names if str(path) not in self.written)

    def _suffix(self) -> str:
        asked, output = self.look.figure_format, self.output
        if asked is not None and asked not in _FORMATS:
            raise UsageError(unknown("figure format", asked, _FORMATS))
        named = output.suffix.lower().removeprefix(".")
        if named not in _FORMATS:
            if named and not output.is_dir():
                endings = ", ".join(f".{ending}" for ending in _FORMATS)
                raise UsageError(
                    f"{self.option} {output} ends in .{named}, but a figure's file ends in one of {endings}. To name a "
                    "folder with a dot, make it first."
                )
            return asked or "png"
        if asked not in (None, named):
            raise UsageError(f"{self.option} {output} ends in .{named}, but --format asks for {asked}.")
        many = "" if self.by is None else f"--by {self.by} draws a figure for each"
        if len(self.views) > 1:
            many = f"each model has {len(self.views)} figures"
        if len(self.titles) > 1:
            many = f"there are {len(self.titles)} models"
        if many:
            raise UsageError(f"{self.option} {output} is one file, but {many}. Name a folder.")
        return named
