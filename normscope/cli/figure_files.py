"""Where a command that draws writes its figures, and the options that say so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.errors import UsageError, unknown
from normscope.files import file_stem

if TYPE_CHECKING:
    from normscope.pairs.captures import Capture

_FORMATS = ("png", "svg", "pdf")
Format = Annotated[
    str | None,
    typer.Option("--format", metavar="png|svg|pdf", help="Of the figure; by default png.", show_default=False),
]
Dpi = Annotated[int, typer.Option(min=20, max=1200, help="Dots per inch, also of the points within svg and pdf.")]
Theme = Annotated[str, typer.Option(metavar="light|dark", help="Of the figure.")]
Destination = Annotated[Path, typer.Option("--output", "-o", help="A folder; or, for one model, the figure's file.")]


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
            known = ", ".join(f".{own}" for own in _FORMATS)
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


def figure_title(capture: Capture) -> str:
    """Name what a figure of this capture shows: the model, and the part of its data if it is one."""
    return " ".join(capture.about[key] for key in ("model", "part") if key in capture.about)


def figure_path(output: Path, suffix: str, title: str, view: str, taken: list[str]) -> Path:
    """Name the figure's file after its model and view; two captures of one model do not overwrite each other."""
    if output.suffix.lower() == f".{suffix}":
        return output
    stem = f"{file_stem(title)}-{view}"
    names = (output / f"{stem}{number}.{suffix}" for number in ("", *(f"-{n}" for n in range(2, len(taken) + 2))))
    return next(path for path in names if str(path) not in taken)
