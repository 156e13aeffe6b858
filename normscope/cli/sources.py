"""From what the user named, models or capture files, to captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from normscope.cli.output import Output
from normscope.errors import DataError, UsageError

if TYPE_CHECKING:
    from normscope.models.base import LoadedModel
    from normscope.pairs.captures import Capture


@dataclass(frozen=True)
class Run:
    """How to run a network; the defaults are the command line's."""

    weights: str = "pretrained"
    data: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    verify: bool = False

    def load(self, name: str, output: Output) -> LoadedModel:
        """Load a model and say which."""
        from normscope.models.registry import load

        network = load(
            name,
            weights=self.weights,
            data=self.data,
            limit=self.limit,
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
            dtype=self.dtype,
        )
        output.introduce(network)
        return network

    def changed(self) -> list[str]:
        """Name the options that are not at their defaults."""
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) != f.default]


def named_or_embedded(names: Sequence[str] | None, output: Output) -> list[str]:
    """Return the names that were given; without any, those of the embedded models, and say so."""
    if names:
        return list(names)
    from normscope.models.registry import embedded_models

    embedded = embedded_models()
    output.remark(f"no model named: taking what is embedded, {', '.join(embedded)}")
    return embedded


def captures(names: Sequence[str] | None, run: Run, layers: str, output: Output) -> Iterator[Capture]:
    """Capture each model, or read each capture file.

    Raises:
        UsageError: if an option that only running a network can follow comes with a capture file.
        DataError: if a file is no capture.
    """
    for name in named_or_embedded(names, output):
        if _is_file(name):
            yield _from_file(name, run, layers, output)
        else:
            yield _from_model(name, run, layers, output)


def _is_file(name: str) -> bool:
    return Path(name).is_file() or Path(name).suffix == ".safetensors"


def _from_file(name: str, run: Run, layers: str, output: Output) -> Capture:
    from normscope.pairs.storage import load

    if changed := run.changed():
        raise UsageError(f"{name} is a capture file: nothing is run, so that {', '.join(changed)} can have no effect.")
    if not Path(name).is_file():
        raise DataError(f"There is no capture file {name}; `normscope capture MODEL -o {name}` writes one.")
    capture = load(name).only(layers)
    output.account(capture)
    return capture


def _from_model(name: str, run: Run, layers: str, output: Output) -> Capture:
    network = run.load(name, output)
    from normscope.pairs.hooks import capture

    seen = capture(
        network.module,
        output.tracked(network.inputs),
        layers=layers,
        about=network.about,
        seed=run.seed,
        verify=run.verify,
    )
    output.account(seen, network.inputs.unreadable)
    return seen
