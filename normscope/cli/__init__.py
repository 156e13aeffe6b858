"""The command line: arguments in, tables and files out. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import platform
import re
import sys
import traceback
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import normscope
from normscope.cli.commands.capture import capture, merge
from normscope.cli.commands.check import check
from normscope.cli.commands.compare import compare
from normscope.cli.commands.curves import curves
from normscope.cli.commands.fit import fit
from normscope.cli.commands.gradient import gradient
from normscope.cli.commands.heal import heal
from normscope.cli.commands.layers import layers
from normscope.cli.commands.models import models
from normscope.cli.commands.plot import plot
from normscope.cli.commands.report import report
from normscope.cli.commands.simplify import simplify
from normscope.cli.commands.stats import stats
from normscope.cli.commands.swap import swap
from normscope.cli.commands.swap_bench import swap_bench
from normscope.cli.commands.timeline import timeline
from normscope.cli.options import CAPTURES, DIFFUSION, OUTPUT, PANELS
from normscope.cli.output import print_error, print_stop
from normscope.cli.running import CAPTURE_ONLY
from normscope.errors import NormscopeError, StoppedError, UsageError
from normscope.models.registry import is_diffusion

_FULL_DISK, _INTERRUPTED, _CLOSED_PIPE = 2, 130, 141  # the last as a shell reports a program that SIGPIPE ended
_CAPTURE_ONLY = {f"--{name.replace('_', '-')}" for name in CAPTURE_ONLY}
_REPORTED = ("torch", "torchaudio", "timm", "diffusers", "transformers", "numpy", "numba", "triton", "matplotlib")
_TYPER_CLOSED_PIPE = 1  # exit status of Typer and rich where the reader of the output has gone


def _without_types(params: list[Any]) -> list[Any]:
    """Remove the types of flags and arguments from the help."""
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        elif param.is_flag and param.metavar is None:
            param.metavar = ""
    return params


class _InPanels(TyperCommand):
    """Command whose help has its options in panels; that of diffusion models only after the name of one."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = _without_types(super().get_params(ctx))
        for param in params:
            if param.param_type_name == "option" and getattr(param, "rich_help_panel", None) is None:
                param.rich_help_panel = OUTPUT
            if getattr(param, "rich_help_panel", None) == DIFFUSION:
                param.hidden = not ctx.meta.get(DIFFUSION)
            elif param.param_type_name == "option" and self.name == capture.__name__:
                param.hidden = False
        return sorted(params, key=lambda param: PANELS.index(param.rich_help_panel or PANELS[0]))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[DIFFUSION] = any(map(is_diffusion, args))
        options = {name for param in self.params for name in param.opts}
        left_out = {arg.partition("=")[0] for arg in args} & _CAPTURE_ONLY - options
        if left_out and any(param.metavar == CAPTURES for param in self.params):
            named = " and ".join(sorted(left_out))
            raise UsageError(
                f"{self.name} has no {named}; `normscope capture` has, and writes a file that {self.name} takes."
            )
        if "--device-map" in left_out and "--device" in options:
            raise UsageError(f"{self.name} takes a network on one device; leave --device-map out.")
        aliased = args if "--sites" in options else [re.sub("^--sites(?==|$)", "--layers", arg) for arg in args]
        return super().parse_args(ctx, aliased)


class _Group(TyperGroup):
    """Commands whose NormscopeErrors become one sentence and an exit status."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StoppedError as stopped:
            print_stop(str(stopped))
            raise typer.Exit(stopped.exit_status) from None
        except NormscopeError as error:
            if os.environ.get("NORMSCOPE_DEBUG") == "1":
                traceback.print_exc()
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
    epilog="Exit status: 0 done, 2 usage, 3 model or weights, 4 data, 5 device, 130 interrupted, 141 closed pipe. "
    "NORMSCOPE_DEBUG=1 prints the traceback of an error.",
)
for _command in (
    *(plot, fit, stats, check, gradient, report, compare, timeline, swap_bench, swap, heal, simplify),
    *(capture, merge, layers, curves, models),
):
    app.command(_command.__name__.replace("_", "-"), cls=_InPanels, epilog=_command.epilog)(_command)  # type: ignore[attr-defined]


def _print_version(asked: bool) -> None:
    if not asked:
        return
    import torch

    libraries = []
    for name in _REPORTED:
        with suppress(metadata.PackageNotFoundError):
            libraries.append(f"{name} {metadata.version(name)}")
    devices = ["cpu", *map(torch.cuda.get_device_name, range(torch.cuda.device_count()))]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    print(f"normscope {normscope.__version__}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(libraries))
    print(f"Devices: {', '.join(devices)}")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and devices.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its status."""
    # Idle OpenMP threads that spin slow a busy machine down 40-fold; torch reads this variable when imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever backend a notebook or a shell has set
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    if sys.stdout is None:  # a command's results would be lost
        print_error("Standard output is closed; give it a file or a pipe.")
        sys.exit(UsageError.exit_status)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # α, where the encoding is not UTF-8
    status: int | str | None = None
    try:
        try:
            app()
        except SystemExit as left:
            status = _CLOSED_PIPE if left.code == _TYPER_CLOSED_PIPE else left.code
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        # The interpreter writes the rest of the buffer at its end, and would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _CLOSED_PIPE if isinstance(error, BrokenPipeError) else _FULL_DISK
        if status == _FULL_DISK:
            print_error(f"Cannot write to standard output: {error.strerror or error}.")
    except KeyboardInterrupt:  # before a command was entered, or while its last output was written
        status = _INTERRUPTED
    sys.exit(status)
