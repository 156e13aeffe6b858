"""A training in intervals that are kept only if the drift fell, and the checkpoint that it resumes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, UsageError
from normscope.runtime.progress import Progress
from normscope.runtime.records import as_json
from normscope.runtime.sealed_files import read_checked, write_checked
from normscope.swaps.heal.reports import START, TrainingInterval

_INTERVALS = 12  # of a stage
_WARM_UP = 0.08  # of a stage's steps
_CLIP = 1.0
_SLOWER = 0.7  # is the learning rate after steps that were taken back
_LEAST_RATE = 2.0**-6  # of the learning rate, after which a stage ends

Saved = Callable[["Course"], None]


@dataclass
class Course:
    """The state of a training, all that it resumes from besides the network's parameters.

    Attributes:
        drift: of the network as it is, on the inputs that decide.
        stage: the stage under way, or the last one.
        step: of the stage.
        rate: what the learning rate is multiplied by.
        points: what was, in order.
        drifts: quantiles of the drift on the held-out inputs, before the first stage and after each.
        n_held_out: number of the held-out samples.
        done: whether all is done.
        moments: of the optimizer, by parameter name and its own name for them.
    """

    drift: float
    stage: str = ""
    step: int = 0
    rate: float = 1.0
    points: list[TrainingInterval] = field(default_factory=list)
    drifts: dict[str, dict[str, float]] = field(default_factory=dict)
    n_held_out: int = 0
    done: bool = False
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def enter(self, stage: str) -> None:
        """Begin a stage, unless it is the one under way."""
        if self.stage != stage:
            self.stage, self.step, self.rate, self.moments = stage, 0, 1.0, {}

    def judge(self, drift: float, loss: float | None) -> bool:
        """Add a point, and say whether the drift fell."""
        kept = drift < self.drift
        self.drift = drift if kept else self.drift
        finite_loss = loss if loss is not None and math.isfinite(loss) else None
        self.points.append(
            TrainingInterval(self.stage, self.step, finite_loss, drift if math.isfinite(drift) else None, kept)
        )
        return kept

    def as_dict(self) -> dict[str, Any]:
        """Everything but the moments; an infinite drift stays one, since the training goes on from it."""
        stored = {name: value for name, value in vars(self).items() if name != "moments"}
        return stored | {"points": as_json(self.points)}

    @classmethod
    def of(cls, document: Mapping[str, Any], moments: dict[str, dict[str, Tensor]]) -> Course:
        """Make the course that :meth:`as_dict` described."""
        points = [TrainingInterval(**point) for point in document["points"]]
        return cls(**{**document, "points": points}, moments=moments)


@dataclass(frozen=True)
class Stage:
    """One stage of a training.

    Attributes:
        name: ``blocks`` or ``whole``.
        steps: at most so many.
        rate: largest learning rate.
        parameters: what is trained, by name.
        gradients: adds the gradients of a step of this number, and returns the loss.
    """

    name: str
    steps: int
    rate: float
    parameters: Mapping[str, nn.Parameter]
    gradients: Callable[[int], float]


def train(stage: Stage, course: Course, drift: Callable[[], float], saved: Saved, progress: Progress) -> None:
    """Run a stage, from where the course stands; the best parameters remain.

    Adam with a warm-up and a cosine to zero, gradients clipped. After each interval the drift decides: where it did
    not fall, parameters and moments are what they were before, and the learning rate is lowered.

    Args:
        stage: what to do.
        course: changed as it goes.
        drift: measures it, on the inputs that decide.
        saved: called after every interval.
        progress: called with the stage's name, the steps done and all of them, after every step.
    """
    course.enter(stage.name)
    optimizer = torch.optim.Adam(stage.parameters.values(), lr=stage.rate)
    _put(optimizer, stage.parameters, course.moments)
    length = max(1, math.ceil(stage.steps / _INTERVALS))
    while course.step < stage.steps and course.rate >= _LEAST_RATE:
        before = {name: parameter.detach().clone() for name, parameter in stage.parameters.items()}
        losses = []
        for step in range(course.step, min(course.step + length, stage.steps)):
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * course.rate * _schedule(step, stage.steps)
            optimizer.zero_grad()
            losses.append(stage.gradients(step))
            if not math.isfinite(float(nn.utils.clip_grad_norm_(stage.parameters.values(), _CLIP))):
                continue  # there is no direction to go
            optimizer.step()
            progress(stage.name, step + 1, stage.steps)
        course.step = min(course.step + length, stage.steps)
        if course.judge(drift(), sum(losses) / len(losses)):
            course.moments = _moments(optimizer, stage.parameters)
        else:
            course.rate *= _SLOWER
            restore(stage.parameters, before)
            _put(optimizer, stage.parameters, course.moments)
        saved(course)
    optimizer.zero_grad()


@torch.no_grad()
def restore(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Give parameters other values."""
    for name, value in values.items():
        parameters[name].copy_(value)


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / max(1.0, _WARM_UP * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }


def _put(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    moments: Mapping[str, Mapping[str, Tensor]],
) -> None:
    optimizer.state.clear()
    for name, of_parameter in moments.items():
        optimizer.state[parameters[name]] = {key: value.clone() for key, value in of_parameter.items()}


_FORMAT = "normscope-healing"
_VERSION = 3
_AGAIN = "remove it to begin anew, as `normscope heal --restart` does"
_ASKED = "asked"


def save_checkpoint(
    path: Path,
    asked: Mapping[str, Any],
    settings: Mapping[str, Any],
    course: Course,
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Write the state of a training, whole or not at all.

    Args:
        path: of the file.
        asked: what :func:`check_asked` compares.
        settings: what was trained, of what and on what; only the same goes on from it.
        course: where it stands.
        parameters: of the network, by name.

    Raises:
        UsageError: if it cannot be written there.
    """
    tensors = {f"parameter/{name}": value.detach().cpu().contiguous().clone() for name, value in parameters.items()}
    for name, moments in course.moments.items():
        tensors |= {f"moment/{key}/{name}": value.cpu().contiguous().clone() for key, value in moments.items()}
    header = {"format": _FORMAT, "version": _VERSION, _ASKED: dict(asked), "settings": dict(settings)}
    write_checked(path, {**header, "course": course.as_dict()}, tensors)


def check_asked(path: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a healing with other options, before any work; no file is no checkpoint.

    Args:
        path: of the file.
        asked: what tells one healing from others before a network is loaded: options, by name.

    Raises:
        UsageError: if the checkpoint is of another training.
        DataError: if the file is damaged, or of another kind or version.
    """
    if not path.exists():
        return
    header, _ = read_checked(path, _FORMAT, (_VERSION,), _AGAIN)
    for name, before, value in _differing(header.get(_ASKED), asked):
        raise _of_another(path, f"its {name} is {before!r:.60}, not {value!r:.60}")


def load_checkpoint(path: Path, settings: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> Course | None:
    """Restore a network from a checkpoint, and return the course; None where there is no file.

    Raises:
        UsageError: if the checkpoint is of another training.
        DataError: if the file is damaged, or of another kind or version.
    """
    if not path.exists():
        return None
    header, tensors = read_checked(path, _FORMAT, (_VERSION,), _AGAIN)
    check_settings(path, header.get("settings"), settings)
    try:
        course = Course.of(header["course"], _stored_moments(tensors, parameters))
        for quantiles in (course.drifts[START], *course.drifts.values()):
            if not all(isinstance(quantiles[name], float) for name in ("p10", "median", "p90")):
                raise TypeError(f"a drift is {quantiles}")
        values = {name: tensors[f"parameter/{name}"] for name in parameters}
        for name, value in values.items():
            if value.shape != parameters[name].shape or value.dtype != parameters[name].dtype:
                raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"The checkpoint {path} is damaged: {type(error).__name__}: {error}; {_AGAIN}.") from error
    restore(parameters, values)
    return course


def check_settings(path: Path, stored: Any, settings: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with other settings; UsageError that names the first that differs."""
    for name, before, value in _differing(stored, settings):
        # A list of all sites, or a hash, would say nothing.
        what = f"its {name} is {before!r:.60}, not {value}" if isinstance(value, int) else f"other {name}"
        raise _of_another(path, what)


def _differing(stored: Any, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    known = stored if isinstance(stored, dict) else {}
    return ((name, known.get(name), value) for name, value in wanted.items() if known.get(name) != value)


def _of_another(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} is of another healing: {what}; {_AGAIN}, or name another.")


def _stored_moments(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    moments: dict[str, dict[str, Tensor]] = {}
    for full, value in tensors.items():
        kind, _, rest = full.partition("/")
        if kind == "moment":
            key, _, name = rest.partition("/")
            where = value.device if key == "step" else parameters[name].device
            moments.setdefault(name, {})[key] = value.to(where)
    return moments
