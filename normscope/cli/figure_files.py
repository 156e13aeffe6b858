"""Look of figures, and the files that they are written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import normscope
from normscope.cli import options
from normscope.errors import UsageError, unknown
from normscope.runtime.files import check_writable, file_stem

if TYPE_CHECKING:
    from normscope.cli.output import Output

PLOT_ONLY = ("dpi", "style", "labels", "font", "caption")  # options that `normscope plot` alone has
_FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Look:
    """Options for figures: each field is an option, with its default."""

    figure_format: options.FigureFormat = None
    dpi: options.Dpi = 200
    style: options.Style = "light"
    width: options.Width = None
    labels: options.Labels = "short"
    font: options.Font = None
    caption: options.Caption = None
    title: options.Title = None

    def titled(self, title: str) -> Look:
        """Return the same look with a title, unless it has one."""
        return self if self.title is not None else replace(self, title=title)

    @property
    def figure_options(self) -> dict[str, Any]:
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
        from normscope.show.figures.style import theme_of

        theme_of(self.look.figure_options)
        self.suffix = self._suffix()
        for title in self.titles:
            for view in self.views:
                check_writable(self.path(title, view))

    def save(self, figure: Any, view: str, shown: Any, out: Output, title: str = "") -> str:
        """Write a figure, report its file and return its name; two of one title do not overwrite each other.

        By default, the title is that of the capture shown.
        """
        from normscope.show.figures.sheet import PAGE_INCHES, heading

        path = self.path(title or heading(shown.about), view)
        normscope.figures.save_figure(figure, path, shown, self.look.dpi)
        self.written.append(str(path))
        out.result(str(path))
        if self.look.width and (height := figure.get_figheight()) > PAGE_INCHES:
            out.remark(
                f"{path} is {height:.1f} inches high, more than a page: --layers or a larger --width reduces that"
            )
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
        if self.by is not None or len(self.titles) * len(self.views) > 1:
            many = f"each {self.by or 'model'} has a figure" if len(self.views) == 1 else "each model has two"
            raise UsageError(f"{self.option} {output} is one file, but {many}. Name a folder.")
        return named
