"""How networks are run: the options that commands share, stated once."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from normscope.cli.options import (
    BatchSize,
    Data,
    Device,
    DeviceMap,
    Dtype,
    Guidance,
    Limit,
    Sample,
    Seed,
    Shuffle,
    Timesteps,
    Verify,
    Weights,
    Workers,
)
from normscope.processes import Place

if TYPE_CHECKING:
    from normscope.cli.output import Output
    from normscope.models.base import LoadedModel
    from normscope.pairs.captures import Capture
    from normscope.pairs.checkpoints import Checkpoints
    from normscope.pairs.ranks import Ranks
    from normscope.pairs.recorder import Observer

_PARAMETER = "run"


@dataclass(frozen=True)
class Run:
    """How to run a network: an option of the command line for each field, with its default, in the help's order."""

    weights: Weights = "pretrained"
    data: Data = None
    limit: Limit = None
    shuffle: Shuffle = False
    batch_size: BatchSize = 8
    workers: Workers = None
    sample: Sample = None
    seed: Seed = 0
    device: Device = "auto"
    device_map: DeviceMap = None
    dtype: Dtype = None
    guidance: Guidance = None
    timesteps: Timesteps = None
    verify: Verify = False

    def load(self, name: str, output: Output) -> LoadedModel:
        """Load a model and say which."""
        from normscope.loading import load

        network = load(
            name,
            weights=self.weights,
            data=self.data,
            limit=self.limit,
            batch_size=1 if self.batch_size == "auto" else self.batch_size,
            seed=self.seed,
            device=self.device,
            dtype=self.dtype,
            guidance=self.guidance,
            timesteps=self.timesteps,
            workers=self.workers,
            shuffle=self.shuffle,
            device_map=self.device_map,
        )
        output.introduce(network)
        if self.batch_size == "auto":
            self._fit_batches(network, output)
        return network

    def _fit_batches(self, network: LoadedModel, output: Output) -> None:
        from normscope.models.batch_sizes import fit_batches

        found = fit_batches(network)
        others = "" if Place.from_environment().alone else "; the smallest of all ranks' is taken"
        output.remark(f"{found}{others}")

    def capture(
        self,
        network: LoadedModel,
        layers: str,
        output: Output,
        ranks: Ranks,
        *,
        by_gamma: bool,
        per_channel: bool,
        diagonal: bool,
        observe: Observer | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> Capture:
        """Run a network on its inputs, with progress; see :func:`normscope.capture`."""
        from normscope.pairs.hooks import capture

        return capture(
            network.module,
            output.tracked(network.inputs, ranks.size),
            layers=layers,
            about=network.about,
            seed=self.seed,
            sample=self.sample,
            verify=self.verify,
            by_gamma=by_gamma,
            per_channel=per_channel,
            diagonal=diagonal,
            observe=observe,
            ranks=ranks,
            checkpoints=checkpoints,
        )

    @contextlib.contextmanager
    def joined(self) -> Iterator[Ranks]:
        """Join the processes that torchrun started, meanwhile; alone where it started none."""
        from normscope.models.devices import resolve_device
        from normscope.pairs.ranks import joined

        with joined(Place.from_environment(), resolve_device(self.device)) as ranks:
            yield ranks

    def changed(self) -> list[str]:
        """Name the options that are not at their defaults."""
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) != f.default]


def runs_networks(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of :class:`Run` in the place of its keyword-only parameter ``run``.

    Args:
        without: fields that have no effect on this command, or that it has options of its own for: no option is made
            of them, and ``run`` has their defaults.

    >>> @runs_networks(without=("data", "limit", "shuffle", "workers", "sample", "guidance", "timesteps", "verify"))
    ... def say(name: str, *, run: Run, loudly: bool = False) -> None:
    ...     print(name, run.weights, run.seed, loudly)
    >>> list(inspect.signature(say).parameters)
    ['name', 'weights', 'batch_size', 'seed', 'device', 'device_map', 'dtype', 'loudly']
    >>> say("demo_vit", seed=3)
    demo_vit pretrained 3 False
    """
    hints = get_type_hints(Run, include_extras=True)
    taken = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(Run)
        if f.name not in without
    ]
    names = [parameter.name for parameter in taken]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_a_run(*arguments: Any, **options: Any) -> None:
            run = Run(**{name: options.pop(name) for name in names if name in options})
            command(*arguments, run=run, **options)

        own = inspect.signature(command, eval_str=True)
        shown: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            shown += taken if parameter.name == _PARAMETER else [parameter]
        # Typer reads both.
        with_a_run.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        with_a_run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return with_a_run

    return decorated
