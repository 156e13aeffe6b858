"""The command line: arguments in, tables and files out. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from normscope.cli.commands import (
    capture,
    compare,
    curves,
    fit,
    gradient,
    heal,
    layers,
    merge,
    models,
    plot,
    report,
    stats,
    swap,
    swap_bench,
)
from normscope.cli.options import OUTPUT, PANELS
from normscope.cli.output import print_error, print_stop
from normscope.cli.process import StreamError, flush_streams, guard_streams
from normscope.errors import NormscopeError, StoppedError

_INTERRUPTED = 130


def _without_types(params: list[Any]) -> list[Any]:
    """Name no type in the help beside a flag or an argument."""
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        elif param.is_flag and param.metavar is None:
            param.metavar = ""
    return params


class _InPanels(TyperCommand):
    """Sorts the options of the help into panels."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = _without_types(super().get_params(ctx))
        for param in params:
            if param.param_type_name == "option" and getattr(param, "rich_help_panel", None) is None:
                param.rich_help_panel = OUTPUT
        return sorted(params, key=lambda param: PANELS.index(param.rich_help_panel or PANELS[0]))


class _Group(TyperGroup):
    """Turns what normscope raises on purpose into one sentence and an exit status."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StoppedError as stopped:
            print_stop(str(stopped))
            raise typer.Exit(stopped.exit_status) from None
        except NormscopeError as error:
            print_error(str(error))
            raise typer.Exit(error.exit_status) from None
        except KeyboardInterrupt:
            print_error("Interrupted; no file was left half written.")
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    name="normscope",
    cls=_Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="See what the normalization layers of a pretrained network really do.",
    epilog="Exit status: 0 done, 2 usage, 3 model or weights, 4 data, 5 device, 130 interrupted, 141 closed pipe.",
)
for _module in (
    *(plot, fit, stats, gradient, report, compare, swap_bench, swap, heal, capture, merge, layers, curves, models),
):
    _name = _module.__name__.rpartition(".")[2]
    app.command(_name.replace("_", "-"), cls=_InPanels, epilog=_module.EXAMPLES)(getattr(_module, _name))


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"normscope {version('normscope')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its status."""
    # OpenMP's threads, spinning while they wait, slow a busy machine down 40-fold; torch reads this when imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever backend a notebook or a shell has set
    # torch.compile is timed on a CPU too, for which no CUDA is missed.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_of_cuda_home)
    try:
        status = _run()
    except KeyboardInterrupt:  # before a command was entered, or while its last output was written
        status = _INTERRUPTED
    # The interpreter takes a while to exit: an interruption then would take away the status that the command earned.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def _is_not_of_cuda_home(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("No CUDA runtime is found")


def _run() -> int | str | None:
    status: int | str | None = None
    try:
        guard_streams()
        try:
            app()
        except SystemExit as done:
            status = done.code
        flush_streams()
    except StreamError as error:
        status = error.exit_status
        if error.sentence:
            with contextlib.suppress(StreamError):  # standard error may be no better
                print_error(error.sentence)
    return status
