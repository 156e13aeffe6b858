"""Output of a command: results on stdout and in files (JSON, CSV, tables); the rest on stderr."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from normscope.cli import options
from normscope.errors import DataError, UsageError, count, unknown
from normscope.runtime.files import check_writable, visible, whole_file
from normscope.runtime.processes import Process
from normscope.runtime.progress import is_one_step
from normscope.runtime.records import flat
from normscope.show.tables.glossary import typed

if TYPE_CHECKING:
    from rich.progress import TaskID

    from normscope.inputs.loaded_model import LoadedModel
    from normscope.norms.sites import NormSite, SkippedNorm
    from normscope.pairs.captures import Capture
    from normscope.runtime.progress import Progress
    from normscope.show.tables.table import TextTable

Row: TypeAlias = Mapping[str, Any]
_SUFFIXES = (".csv", ".tex", ".md", ".json", "")
_PIPE_WIDTH = 1000  # a table that goes to a file or a program is as wide as it needs to be
FIGURES = "outputs"  # folder of figures
_MOST_NAMED = 4  # inputs that are kept, in a remark
_SECONDS_TO_A_LINE, _SECONDS_BETWEEN_LINES = 10.0, 30.0


def _console(stderr: bool, shown: bool = True) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, quiet=not shown)


def print_error(sentence: str) -> None:
    """Print an error on stderr, after the number of the rank if it is not the first."""
    process = Process.current()
    rank = "" if process.is_first else f"rank {process.rank}: "
    _console(stderr=True).print(f"{rank}[bold red]Error:[/] {_harmless(sentence)}", soft_wrap=True)


def print_stop(sentence: str) -> None:
    """Print on stderr how to go on after a stop; only the first rank does."""
    if Process.current().is_first:
        _console(stderr=True).print(_harmless(sentence), soft_wrap=True)


def _harmless(text: str) -> str:
    """Escape control characters and markup in names that come from files; the text stays on one line."""
    return escape(visible(text))


def _print_words(console: Console, text: str, style: str = "") -> None:
    """Print sentences: a terminal breaks lines between words; a file or a program gets one line."""
    words = Text(visible(text), style=style, overflow="ignore")
    console.print(words, soft_wrap=not console.is_terminal, crop=False)


class Output:
    """A command's output; of several ranks only the first one prints and writes.

    Attributes:
        as_json: stdout contains one JSON document and nothing else.
        file: receives rows (.csv), tables (.tex, .md) or the document (.json, no suffix); stdout then contains its
            name.
        quiet: leave out progress and remarks; warnings stay.
        columns: headings of the tables' columns, separated by commas; None for all.
    """

    def __init__(
        self,
        output: options.TablesFile = None,
        columns: options.Columns = None,
        as_json: options.Json = False,
        quiet: options.Quiet = False,
    ) -> None:
        """Check the file before anything is run; UsageError if it cannot be written, or has another suffix."""
        self.as_json, self.quiet = as_json, quiet
        self.columns = None if columns is None else [typed(name.strip()) for name in columns.split(",")]
        self._left_out: list[TextTable] = []  # tables without any of the columns
        self._title = ""
        self._tables: list[tuple[str, TextTable]] = []
        self._warnings: set[str] = set()
        self._is_first = Process.current().is_first
        self._results = _console(stderr=False, shown=self._is_first and not as_json)
        self._remarks = _console(stderr=True, shown=self._is_first)
        self._lines = ProgressLines(self.remark)
        self._write_to(output)

    def figures_path(self, output: Path) -> Path:
        """Return the place for figures that an ``--output`` names; a file of another kind is that of the tables."""
        if output.suffix.lower() not in _SUFFIXES[:-1] or output.is_dir():
            return output
        self._write_to(output)
        return Path(FIGURES)

    def _write_to(self, output: Path | None) -> None:
        self.file = output
        self._suffix = "" if output is None else output.suffix.lower()
        if self._suffix not in _SUFFIXES:
            raise UsageError(
                f"--output {output} ends in {self._suffix}, but a result's file ends in .csv, .tex, .md or .json."
            )
        if output is not None:
            check_writable(output)

    def remark(self, text: str) -> None:
        """Print a remark on stderr, unless quiet."""
        if not self.quiet:
            _print_words(self._remarks, text)

    def warn(self, text: str) -> None:
        """Print a warning on stderr, also when quiet, once in a command."""
        if text not in self._warnings:
            self._warnings.add(text)
            _print_words(self._remarks, text, "yellow")

    def result(self, text: str) -> None:
        self._results.print(_harmless(text), soft_wrap=True)

    def table(self, *tables: TextTable) -> None:
        """Show tables to a person, or keep them for the file."""
        for table in tables:
            shown = table
            if self.columns is not None and any(table.headings):
                shown = table.only(self.columns)
                if len(shown.columns) <= (len(self.columns) > 1):  # no column, or only that of the sites
                    self._left_out.append(table)
                    continue
            self._tables.append((self._title, shown))
            if self.file is None:
                self._results.print(shown, crop=False)

    def sentences(self, text: str) -> None:
        if self.file is None:
            _print_words(self._results, text)

    def heading(self, about: Mapping[str, str]) -> None:
        """Print a line with network, weights and data above a table."""
        self.title("{model} · {weights} · {data}".format(**about))

    def title(self, text: str) -> None:
        self._title = text
        self.sentences(text)

    def document(self, document: dict[str, Any], rows: Sequence[Row] | None = None) -> None:
        """Print the result as JSON if requested, and write the file if one was given.

        ``rows`` are its table; without them, a .csv file gets the document.
        """
        if not self._is_first:
            return
        escaped = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
        text = json.dumps(document, indent=2, ensure_ascii=escaped, allow_nan=False) + "\n"
        if self.as_json:
            sys.stdout.write(text)
        if self.columns is not None and not self._tables:
            headings = dict.fromkeys(typed(name) for table in self._left_out for name in filter(None, table.headings))
            missing = next((name for name in self.columns if name not in headings), self.columns[0])
            self.warn(f"{unknown('column', missing, headings)} All columns are shown.")
            self.columns = None
            self.table(*self._left_out)
        if self.file is None:
            return
        if self._suffix == ".csv" and rows is not None:
            text = as_csv(rows)
        elif self._suffix in (".tex", ".md"):
            from normscope.show.tables.markup import as_latex, as_markdown

            text = (as_latex if self._suffix == ".tex" else as_markdown)(self._tables)
        with whole_file(self.file) as partial:
            partial.write_text(text, encoding="utf-8", newline="")
        if self.as_json:
            self.remark(f"wrote {self.file}")
        else:
            self.result(str(self.file))

    def introduce(self, network: LoadedModel) -> None:
        """Report network, weights and device; random weights are reported even when quiet."""
        from normscope.models.weights.devices import device_names

        module = network.module
        tensors = list(module.parameters()) or list(module.buffers())[:1]
        dtypes = list(dict.fromkeys(str(tensor.dtype) for tensor in tensors))
        where = f", on {' and '.join(device_names(module))} in {' and '.join(dtypes)}" if dtypes else ""
        line = f"{network.name}: {network.provenance.description}{where}"
        (self.warn if network.provenance.kind == "random" else self.remark)(line)

    def account(self, capture: Capture, layers: str | None = "all", unreadable: Sequence[str] = ()) -> None:
        """Report samples, sites, and the inputs, tokens and norms that a capture left out; DataError if all were."""
        self.remark(f"{capture.about['model']}: {count(capture.n_samples, 'sample')}, {capture.about['data']}")
        for line in unreadable:
            self.warn(f"unreadable, left out: {line}")
        if not any(stats.n_pairs for stats in capture.stats.values()):
            sites = count(len(capture.sites), "norm site")
            raise DataError(
                f"All tokens at {sites} of {capture.about['model']} contain a NaN or an infinity. Check the network's "
                "weights and inputs for them, and whether its dtype overflows."
            )
        for site in capture.sites:
            stats = capture.stats[site.name]
            if left_out := int(stats.nonfinite_tokens):
                tokens = f"{left_out:,} of {stats.n_tokens + left_out:,} tokens"
                self.warn(f"{site.name}: {tokens} contain a NaN or an infinity, and are in no sum")
        self.skipped(capture.skipped)
        self.chosen(capture.sites, layers)

    def skipped(self, norms: Iterable[SkippedNorm]) -> None:
        for norm in norms:
            self.warn(f"skipped {norm.name} ({norm.kind}): {norm.reason}")

    def chosen(self, sites: Sequence[NormSite], layers: str | None) -> None:
        """Report the sites that a number of layers selects."""
        from normscope.norms.sites import is_number

        if layers is None or is_number(layers):
            named = ", ".join(f"{site.index} {site.name}" for site in sites)
            self.remark(f"--layers {layers or len(sites)} selects, evenly over the depth: {named}")

    def kept_inputs(self, capture: Capture) -> None:
        if capture.inputs:
            shown = [f"the {kept.preview.kind} of {kept.name}" for kept in capture.inputs[:_MOST_NAMED]]
            more = [f"{len(capture.inputs) - _MOST_NAMED:,} more"] if len(capture.inputs) > _MOST_NAMED else []
            self.remark(f"kept to be looked at: {', '.join(shown + more)}")

    @contextlib.contextmanager
    def bars(self) -> Iterator[Progress]:
        """Show progress: bars on a terminal, lines now and then elsewhere, nothing when quiet."""
        if not self._remarks.is_terminal:
            yield self._lines
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bars(*columns, console=self._remarks, disable=self.quiet or not self._is_first, transient=True) as bars:
            tasks: dict[str, TaskID] = {}

            def progress(stage: str, completed: int, of: int | None) -> None:
                if is_one_step(stage):
                    self._lines(stage, completed, of)
                    return
                if stage not in tasks:
                    tasks[stage] = bars.add_task(_harmless(stage), total=of)
                bars.update(tasks[stage], completed=completed)

            yield progress


class ProgressLines:
    """Progress as lines: one for every half a minute of a stage, the first after 10 s.

    A stage that is one long step (its name ends in …) gets one line, when it begins.

    >>> clock = iter([0.0, 2.0, 10.0, 40.0, 50.0])
    >>> progress = ProgressLines(print, clock.__next__)
    >>> for completed in (0, 2, 10, 40, 50):
    ...     progress("samples", completed, 100)
    samples: 10 of 100, 0:01:30 left
    samples: 40 of 100, 0:01:00 left
    """

    def __init__(self, remark: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._remark, self._now = remark, now
        # Time and amount at the end of the first step, and the time of the next line.
        self._stages: dict[str, tuple[float | None, int, float]] = {}

    def __call__(self, stage: str, completed: int, of: int | None) -> None:
        now, is_new = self._now(), stage not in self._stages
        began, first, next_line = self._stages.get(stage, (None, 0, 0.0))
        if is_new or completed == 0:
            began, next_line = None, now + _SECONDS_TO_A_LINE
        elif began is None:  # the first step may have compiled loops, and predicts nothing
            began, first = now, completed
        writes = now >= next_line and completed != of
        self._stages[stage] = began, first, now + _SECONDS_BETWEEN_LINES if writes else next_line
        if is_new and is_one_step(stage):
            self._remark(stage)
        if not writes or is_one_step(stage):
            return
        amount = f"{completed:,}" if of is None else f"{completed:,} of {of:,}"
        if of is not None and began is not None and completed > first:
            amount += f", {timedelta(seconds=round((now - began) / (completed - first) * (of - completed)))} left"
        self._remark(f"{stage}: {amount}")


def skipped_as_json(captures: Iterable[Capture]) -> list[dict[str, str]]:
    """List the norms that were not observed, with the model that each belongs to."""
    return [{"model": capture.about["model"], **norm.as_dict()} for capture in captures for norm in capture.skipped]


def as_csv(rows: Sequence[Row]) -> str:
    r"""Return rows as CSV, quoted as in RFC 4180, with lines that end in \n.

    Columns are in the order in which rows first have them; a missing cell or None is empty. Numbers read back exactly.
    Names stay exact, even if a spreadsheet takes them for formulas (``=``, ``+``, ``-``, ``@``).

    >>> as_csv([{"site": "a,b", "alpha": 0.1}, {"site": "norm", "straight": True}])
    'site,alpha,straight\n"a,b",0.1,\nnorm,,true\n'
    """
    table = [flat(row) for row in rows]
    columns = dict.fromkeys(name for row in table for name in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)  # quotes a lone \r, as its lines end in \r\n
    if columns:
        writer.writeheader()
    for row in table:
        writer.writerow({name: str(cell).lower() if isinstance(cell, bool) else cell for name, cell in row.items()})
    return text.getvalue().replace("\r\n", "\n")
