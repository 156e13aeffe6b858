"""Options for running networks, shared by the commands, captures of models by name, and signals that stop one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

import normscope
from normscope.cli import options
from normscope.errors import DataError, ModelError, UsageError, unknown
from normscope.models import registry
from normscope.runtime.processes import Process

if TYPE_CHECKING:
    from normscope.cli.output import Output
    from normscope.inputs.loaded_model import LoadedModel
    from normscope.pairs.captures import Capture
    from normscope.pairs.checkpoints import Checkpoints
    from normscope.pairs.ranks import Ranks

# Options that `normscope capture` alone has; commands that take captures do without them.
CAPTURE_ONLY = ("shuffle", "sample", "device_map", "workers", "verify", "guidance")
_SUM_OPTIONS = ("sample", "skip", "verify")  # options that normscope.load does not take
_BY = ("timestep",)


@dataclass(frozen=True)
class RunOptions:
    """Options for running a network: each field is an option, with its default, in the order of the help."""

    weights: options.Weights = "pretrained"
    data: options.Data = None
    limit: options.Limit = None
    shuffle: options.Shuffle = False
    sample: options.Sample = None
    skip: options.Skip = 0
    guidance: options.Guidance = None
    timesteps: options.Timesteps = None
    device: options.Device = "auto"
    device_map: options.DeviceMap = None
    dtype: options.Dtype = None
    batch_size: options.BatchSize = 8
    workers: options.Workers = None
    seed: options.Seed = 0
    verify: options.Verify = False

    def load(self, name: str, output: Output) -> LoadedModel:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _SUM_OPTIONS}
        network = normscope.load(name, **given)
        output.introduce(network)
        return network

    def capture(
        self,
        network: LoadedModel,
        layers: str | None,
        output: Output,
        ranks: Ranks,
        checkpoints: Checkpoints | None = None,
        **kept: Any,
    ) -> Capture:
        """Run a network on its inputs, with progress; ``kept`` names additional sums, see :class:`CaptureOptions`."""
        from normscope.pairs.capture import captured
        from normscope.pairs.recorder import CaptureOptions

        capture_options = CaptureOptions(self.seed, self.sample, self.verify, skip=self.skip, **kept)
        with output.bars() as progress:
            return captured(
                network, options=capture_options, layers=layers, progress=progress, ranks=ranks, checkpoints=checkpoints
            )

    def joined(self) -> AbstractContextManager[Ranks]:
        """Context in which the processes that torchrun started work together; a single process works alone."""
        from normscope.pairs.ranks import process_group

        return process_group(Process.current())


def named_or_embedded(names: Sequence[str] | None, output: Output) -> list[str]:
    """Return the given names; without any, report and return the embedded models that can be loaded."""
    if names:
        return list(names)
    loadable, left_out = [], []
    for name in registry.embedded_models():
        try:
            registry.loader_of(registry.find(name))
            loadable.append(name)
        except ModelError as error:
            left_out.append(f"left out: {error}")
    for line in (f"no model named: taking what is embedded, {', '.join(loadable)}", *left_out):
        output.remark(line)
    return loadable


def sources(models: Sequence[str] | None, run: RunOptions, by: str | None, output: Output) -> list[str]:
    """Return the models and captures that a command takes, all checked before the first is run."""
    names = named_or_embedded(models, output)
    check_sources(names, run)
    check_by(by, names)
    return names


def check_models(names: Sequence[str]) -> None:
    """Refuse names of no model, before the first is run: ModelError, and UsageError for a file's name."""
    for name in names:
        if options.is_file(name):
            raise UsageError(
                f"{name} names a file, not a model. `plot`, `fit`, `stats`, `gradient`, `compare` and `report` take "
                f"captures; --weights takes a file of weights."
            )
        entry = registry.find(name)
        if entry.family == "speech":  # torchaudio may be missing
            registry.loader_of(entry)


def check_sources(names: Sequence[str], run: RunOptions) -> None:
    """Refuse names of neither a model nor a capture file, and options that a file ignores, before the first is run."""
    changed = [f"--{f.name.replace('_', '-')}" for f in fields(run) if getattr(run, f.name) != f.default]
    for name in names:
        if not options.is_file(name):
            check_models([name])
            registry.check_diffusion(registry.find(name), guidance=run.guidance, timesteps=run.timesteps)
        elif changed:
            raise UsageError(
                f"{name} is a capture file: nothing is run, so that {', '.join(changed)} can have no effect."
            )
        elif not Path(name).is_file():
            raise DataError(f"There is no capture file {name}; `normscope capture MODEL -o {name}` writes one.")


def check_by(by: str | None, names: Sequence[str]) -> None:
    """Refuse, before the first model is run, to keep parts apart that a model does not have; UsageError."""
    if by is not None and by not in _BY:
        raise UsageError(unknown("part", by, _BY))
    for name in names if by else ():
        if not options.is_file(name) and registry.find(name).family not in ("diffusion", "your own"):
            raise _without_parts(name, by)


def _without_parts(name: str, by: str | None) -> UsageError:
    if options.is_file(name):
        return UsageError(f"{name} keeps no {by}s apart; `normscope capture MODEL --by {by} -o {name}` does.")
    return UsageError(f"{name} has no {by}s to keep apart; diffusion models have.")


def captures(
    models: Sequence[tuple[str, RunOptions]],
    layers: str | None,
    output: Output,
    by: str | None = None,
    after: Callable[[LoadedModel], object] | None = None,
    **kept: Any,
) -> Iterator[Capture]:
    """Capture each model or read each capture file, and yield it, or its parts if ``by`` names them.

    Models are captured with the additional sums ``kept``; a file has the sums that it was captured with. ``after`` is
    called with each captured model. Ranks divide the inputs of each model among them; then only the first rank receives
    the captures and models, and the others exit.

    Raises:
        DataError, UsageError: if a file is no capture, or has no such parts.
        typer.Exit: at the end, in all ranks but the first.
    """
    speaks = Process.current().is_first
    for name, run in models:
        if not options.is_file(name):
            with run.joined() as ranks:
                network = run.load(name, output)
                seen = run.capture(network, layers, output, ranks, by_part=by is not None, **kept)
                output.account(seen, layers, network.inputs.unreadable)
                if after and speaks:
                    after(network)
                del network  # before the next is loaded
        elif speaks:
            seen = normscope.load_capture(name).only(layers)
            output.account(seen, layers)
        if speaks:
            parts = [capture for title, capture in seen.parts.items() if title.startswith(f"{by} ")]
            if by and not parts:
                raise _without_parts(name, by)
            yield from parts if by else [seen]
    if not speaks:
        raise typer.Exit


@contextlib.contextmanager
def stopping_between_chunks(warn: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once a signal has asked to stop, which ``warn`` reports.

    A second signal interrupts at once. Under torchrun it changes nothing: torchrun repeats the signal that the terminal
    has already sent to all processes, and kills them after half a minute.
    """
    asked, launched = False, Process.current().launched

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and not launched:
            raise KeyboardInterrupt
        if not asked:
            asked = True
            with contextlib.suppress(Exception):  # the reader of stderr, such as tee, may have ended by the signal too
                warn("Finishing the batch." if launched else "Finishing the batch; once more to stop at once.")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
