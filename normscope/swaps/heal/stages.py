"""The stages of a healing: calibration, then training; the best of the states between is what is left."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, UsageError, unknown
from normscope.inputs.batch import Batch
from normscope.inputs.entries import as_batches
from normscope.inputs.loaded_model import Outputs
from normscope.inputs.pool import Pool, by_length, evenly, tensor_bytes
from normscope.pairs.norms.trace import find_norms
from normscope.runtime.progress import Progress
from normscope.swaps.calibrate.calibrate import NEIGHBOURS, NORMS, calibrate
from normscope.swaps.calibrate.neighbours import neighbours_of
from normscope.swaps.distances import OutputErrors, output_errors
from normscope.swaps.heal import training
from normscope.swaps.heal.targets import TrainingTargets, drawn, steps_of
from normscope.swaps.heal.training import (
    Checked,
    TrainedParameters,
    TrainingState,
    copied,
    load_checkpoint,
    restore,
    save_checkpoint,
)
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.reports import CALIBRATED, START, TRAINED

SAMPLES_A_STEP = 64  # at least, where they can be run in one pass
_SAMPLES_APART = 8  # where they cannot
_MOST_CALIBRATED = 320  # samples: twice as many texts take twice the time, for a thirtieth less drift
ALL = "all"
TRAINS = (NORMS, NEIGHBOURS, ALL)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_SHARES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


@dataclass(frozen=True)
class HealOptions:
    """Options of a healing.

    Attributes:
        calibrated: whether it is calibrated first.
        train: which weights are trained.
        steps: of the training; None where ``minutes`` say how many.
        minutes: that all of it may take; None where ``steps`` are given.
        seed: of the order of the batches.
    """

    calibrated: bool
    train: str
    steps: int | None
    minutes: float | None
    seed: int

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; UsageError."""
        if self.train not in TRAINS:
            raise UsageError(unknown("train", self.train, TRAINS))
        if self.steps is not None and self.minutes is not None:
            raise UsageError(f"{self.steps} steps and {self.minutes} minutes both say how long to train: give one.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps is {self.steps}: it is a number of steps, at least 1.")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UsageError(f"minutes is {self.minutes}: it is a time, more than 0.")


class Stages:
    """Both networks and all inputs, from stage to stage."""

    def __init__(
        self,
        original: nn.Module,
        swapped: nn.Module,
        sites: Sequence[str],
        outputs: Outputs,
        batches: Sequence[Batch],
        reported: Iterable[Any],
        options: HealOptions,
    ) -> None:
        self._original, self._swapped, self._sites, self._outputs = original, swapped, sites, outputs
        self._batches, self._reported, self._options = batches, reported, options
        self.pool = Pool.of(batches)
        self._judged = OutputErrors(original, self.pool.by_length().judged, outputs)
        functions = [module for module in swapped.modules() if isinstance(module, PointwiseFunction)]
        for function in functions:
            function.give_each_channel_its_own()
        widths = [math.prod(getattr(swapped.get_submodule(site), "normalized_shape", (1,))) for site in sites]
        self._width = max(widths)
        self._calibrates = options.calibrated and bool(functions)
        self._parameters = dict(swapped.named_parameters())
        self._measuring = 0.0  # seconds of what is measured once the training is over

    def run(
        self,
        path: Path | None,
        asked: Mapping[str, Any],
        until: float,
        progress: Progress,
        checked: Checked | None,
    ) -> TrainingState:
        """Run the stages that are not done yet, and leave the network in the best of their states.

        Args:
            path: of the checkpoint; None for none.
            asked: what the checkpoint says of itself besides.
            until: the monotonic time at which all of it is to end; ∞ where a number of steps is given.
            progress: called with the stage, what was done of it, and all of it.
            checked: called with each check.
        """
        start = copied(self._parameters)
        settings = self._settings()
        found = None if path is None else load_checkpoint(path, settings, self._parameters)
        state = found or self._begun()

        def saved() -> None:
            if path is not None:
                save_checkpoint(path, asked, settings, state)

        if self._calibrates and CALIBRATED not in state.drifts:
            self._calibrate(state, start, progress)
            saved()
        restore(self._parameters, state.calibrated)
        if not state.left_with:
            names = self._trained_names()
            with _trainable(self._swapped, names):
                self._train(state, names, until, saved, progress, checked)
            state.drifts[TRAINED] = self._held_out()
            high = state.drifts[START]["p90"]
            allowed = [stage for stage, drift in state.drifts.items() if stage == START or drift["p90"] <= high]
            state.left_with = min(allowed, key=lambda stage: state.drifts[stage]["median"])
            state.trained, state.moments = {}, {}
            saved()
        restore(self._parameters, start)
        if state.left_with != START:
            restore(self._parameters, state.calibrated)
        if state.left_with == TRAINED:
            restore(self._parameters, state.best)
        return state

    def _begun(self) -> TrainingState:
        began = time.monotonic()
        errors = self._held_out_errors()
        if not len(errors):
            raise DataError("There is no held-out batch to report the drift of.")
        state = TrainingState(*self._drift(), drifts={START: _quantiles(errors)}, n_held_out=len(errors))
        self._measuring = time.monotonic() - began
        return state

    def _calibrate(self, state: TrainingState, start: Mapping[str, Tensor], progress: Progress) -> None:
        refit = NORMS if self._options.train == NORMS else NEIGHBOURS
        learned = evenly(self._batches, _MOST_CALIBRATED)
        report = calibrate(
            self._original, self._swapped, learned, outputs=self._outputs, refit=refit, progress=progress
        )
        state.not_refitted = dict(report.left)
        state.calibrated = {
            name: value.detach().clone()
            for name, value in self._parameters.items()
            if not torch.equal(value, start[name])
        }
        state.drift, _ = self._drift()
        state.drifts[CALIBRATED] = self._held_out()

    def _train(
        self,
        state: TrainingState,
        names: Sequence[str],
        until: float,
        saved: Callable[[], None],
        progress: Progress,
        checked: Checked | None,
    ) -> None:
        of_steps = steps_of(self.pool.learned, SAMPLES_A_STEP, _SAMPLES_APART)
        targets = TrainingTargets(self._original, self._swapped, self._outputs, self._sites, of_steps)
        order = functools.partial(drawn, self._options.seed, number=len(targets))
        trained = TrainedParameters(self._swapped, names)
        if not state.best:
            state.best = copied(trained.parameters)
            if self._options.minutes is not None:
                state.budget = until - self._measuring - time.monotonic()
            saved()
        gradients = functools.partial(_gradients, targets, order)
        training.train(
            *(state, trained, self._width, self._options.steps, gradients, self._drift, saved, progress),
            checked or _nothing,
        )

    def _trained_names(self) -> list[str]:
        """Names of the parameters that are trained."""
        train = self._options.train
        if train == ALL:
            embeddings = {id(module.weight) for module in self._swapped.modules() if isinstance(module, _EMBEDDINGS)}
            return [
                name
                for name, parameter in self._parameters.items()
                if parameter.is_floating_point() and id(parameter) not in embeddings
            ]
        paths = list(self._sites)
        if train == NEIGHBOURS:
            first = self.pool.learned[0]
            norms = find_norms(self._original, first.first_sample()).sites
            near = neighbours_of(self._original, norms, self._sites, first)
            paths += [called.path for called in near.called_modules if not called.is_norm]
        return [name for name in self._parameters if name.startswith(tuple(f"{path}." for path in paths))]

    def _settings(self) -> dict[str, Any]:
        """Settings that identify a checkpoint."""
        return {
            "model": type(self._original).__name__,
            "sites": {name: repr(self._swapped.get_submodule(name)) for name in self._sites},
            **{option.name: getattr(self._options, option.name) for option in fields(self._options)},
            "weights": _digest(self._original.state_dict()),
            "start values": _digest(self._swapped.state_dict()),
            "inputs": self.pool.digest,
        }

    def _drift(self) -> tuple[float, float]:
        """Return median and 90th percentile on the inputs that decide."""
        found = _quantiles(self._judged.of(self._swapped))
        return found["median"], found["p90"]

    def _held_out(self) -> dict[str, float]:
        return _quantiles(self._held_out_errors())

    def _held_out_errors(self) -> Tensor:
        batches = (part for batch in as_batches(self._reported) for part in by_length(batch, len(batch.samples)))
        return output_errors(self._original, self._swapped, batches, self._outputs)


def _gradients(targets: TrainingTargets, order: Callable[[int], int], step: int) -> float:
    return targets.gradients(order(step))


def _nothing(*_: object) -> None:
    """Take notice of nothing."""


def _quantiles(errors: Tensor) -> dict[str, float]:
    # Between two samples there may be ∞ on one side, of which a line has no middle.
    at = "linear" if bool(errors.isfinite().all()) else "higher"
    return {name: float(errors.quantile(share, interpolation=at)) for name, share in _SHARES.items()}


@contextlib.contextmanager
def _trainable(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let some parameters alone have gradients; ``requires_grad`` is put back afterwards."""
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        yield
    finally:
        for parameter, flag in wanted.items():
            parameter.requires_grad_(flag)
            parameter.grad = None


def _digest(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        content.update(name.encode())
        content.update(tensor_bytes(tensor))
    return content.hexdigest()
