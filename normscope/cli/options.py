"""The options that commands share, and where a command that draws writes its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from normscope.errors import UsageError, unknown
from normscope.runtime.files import check_writable, file_stem

if TYPE_CHECKING:
    from normscope.pairs.captures import Capture


def _path(text: str) -> Path:
    if not text:  # pathlib takes it for the current folder
        raise UsageError("--data is empty; name a file or a folder.")
    return Path(text)


# The panels of a command's help, in its order; an option that names none is of the last.
MODEL, DATA, FIT, SWAP, RUNNING, OUTPUT = PANELS = ("Model", "Data", "Fit", "Swap", "Running", "Output")


def _of_64_bits(number: int | None) -> int | None:
    if number is not None and not -(2**63) <= number < 2**63:
        raise typer.BadParameter(f"{number} takes more than 64 bits.")
    return number


def at_least(least: int, most: int | None = None) -> Callable[[int | None], int | None]:
    """Refuse numbers that are too small or too large; a callback, as the help shows min= and max= at length."""

    def check(number: int | None) -> int | None:
        if number is not None and (number < least or (most is not None and number > most)):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise typer.BadParameter(f"{number} is not {allowed}.")
        return _of_64_bits(number)

    return check


def seconds_asked(number: float | None) -> float | None:
    """Refuse what is no time; a callback."""
    if number is not None and not number >= 0:  # nan among others, which is no least of a range either
        raise typer.BadParameter(f"{number} is no number of seconds.")
    return number


def inches(number: float | None) -> float | None:
    """Refuse widths that no figure has; a callback."""
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


Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|FILE",
        help="Models (`normscope models` lists them) or capture files; without any, the embedded models.",
        show_default=False,
    ),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model; `normscope models` lists them.")]
Weights = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE|DIR",
        rich_help_panel=MODEL,
        help="pretrained, random, a safetensors or torch file, or a folder that `normscope swap` wrote.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        parser=_path,
        metavar="PATH",
        rich_help_panel=DATA,
        help="A file or folder of images, audio, text or latents, as the model takes; by default its own inputs.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=at_least(1),
        rich_help_panel=DATA,
        help="Take at most so many samples; of a diffusion model, trajectories.",
        show_default=False,
    ),
]
BatchSize = Annotated[
    Any,  # int | Literal["auto"], which Typer refuses to read
    typer.Option(
        parser=_size,
        metavar="N|auto",
        rich_help_panel=RUNNING,
        help="Samples per forward pass, at most; auto doubles them until memory ends.",
    ),
]
OwnBatchSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=at_least(1),
        rich_help_panel=RUNNING,
        help="Samples per forward pass, at most; by default 16, and of py: as its batches are.",
        show_default=False,
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=at_least(1),
        rich_help_panel=DATA,
        help="Take only so many tokens of each sample at every norm, drawn uniformly: faster, and less exact.",
        show_default=False,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=_of_64_bits,
        rich_help_panel=RUNNING,
        help="Of random weights, default inputs, --shuffle and drawing samples.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE", rich_help_panel=RUNNING, help="Where the network runs: auto, cpu, cuda, cuda:1 …, mps."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        rich_help_panel=RUNNING,
        help="Of weights and inputs: float32, bfloat16, float16 (fp32, bf16, fp16); keep converts no weights. "
        "By default float32, and of py: keep.",
        show_default=False,
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="auto",
        rich_help_panel=RUNNING,
        help="Spread a network that one device has no room for over GPUs, memory and disk (needs accelerate).",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=at_least(0),
        rich_help_panel=RUNNING,
        help="Processes that read inputs, 0 for none but this one; by default as many as suit the device.",
        show_default=False,
    ),
]
Shuffle = Annotated[
    bool,
    typer.Option(
        "--shuffle", rich_help_panel=DATA, help="Take the inputs in an order drawn with --seed, before --limit."
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        rich_help_panel=DATA,
        help="Scale of classifier-free guidance along a diffusion model's trajectory, 1 for none; by default its own.",
        show_default=False,
    ),
]
Timesteps = Annotated[
    str | None,
    typer.Option(
        metavar="N|LIST",
        rich_help_panel=DATA,
        help="Of a diffusion model: a number of timesteps evenly along its trajectory, or a list: '980,500,0', '980,'.",
        show_default=False,
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        metavar="timestep", rich_help_panel=DATA, help="Keep a diffusion model's timesteps apart.", show_default=False
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        rich_help_panel=RUNNING,
        help="Recompute every norm's true output from y, and fail where it differs.",
    ),
]
Func = Annotated[
    str,
    typer.Option(
        metavar="CURVES",
        rich_help_panel=FIT,
        help="Curves, separated by commas: tanh (dyt), isru (dyisru), erf, derf (erf with a shift), …; all; free, "
        "E\\[y|x] itself; best, of all; or your own formula of x, 'mine=x/(1+abs(x))'.",
    ),
]
ByGamma = Annotated[
    bool,
    typer.Option("--by-gamma", help="Also keep sums weighted by γ², for `fit --weights-by gamma`."),
]
PerChannel = Annotated[
    bool,
    typer.Option("--per-channel", help="Also keep sums per channel, for `fit --per channel`."),
]
Diagonal = Annotated[
    bool,
    typer.Option(
        "--diagonal",
        help="Also keep sums of the diagonal of each norm's Jacobian, for `gradient`.",
    ),
]
Layers = Annotated[
    str,
    typer.Option(
        metavar="N|LIST|all",
        rich_help_panel=MODEL,
        help="A number of sites along the depth, of all kinds; indices, ranges, names, globs ('0,4-7,*.norm1'); all.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout, and nothing else there."),
]
AsCsv = Annotated[
    bool,
    typer.Option("--csv", help="Print the table's rows as CSV on stdout, and nothing else there."),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the result to this file: tables as .tex or .md, rows as .csv or .parquet, all as .json or .yaml.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks; warnings stay.")]


_FORMATS = ("png", "svg", "pdf")
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="png|svg|pdf",
        help="Of the figure; by default png.",
        show_default=False,
    ),
]
Dpi = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=at_least(20, 1200),
        help="Dots per inch, also of the points within svg and pdf.",
    ),
]
Theme = Annotated[str, typer.Option(metavar="light|dark", help="Of the figure.")]
Width = Annotated[
    float | None,
    typer.Option(
        metavar="INCHES",
        callback=inches,
        help="Of the figure; a paper's text has 5.5 or so.",
        show_default=False,
    ),
]
Title = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|none",
        help="Above the figure; none leaves out names, weights and data, which the file itself holds still.",
        show_default=False,
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw it into this .png, .svg or .pdf.", show_default=False),
]
Destination = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="PATH", help="A folder; or, for one model, the figure's file."),
]


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
            known = ", ".join(f".{ending}" for ending in _FORMATS)
            raise UsageError(
                f"--output {output} ends in .{named}, but a figure's file ends in one of {known}. To name a folder "
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
