"""A training over the whole of its schedule, of which the best state is kept."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.runtime.progress import Progress
from normscope.runtime.records import as_json
from normscope.swaps.heal.reports import TrainingCheck
from normscope.swaps.heal.trained_parameters import TrainedParameters

STAGE = "train"
CHECKS = 12  # of the drift, over the whole schedule
MOST_RATE = 1e-3
_RATE_BY_WIDTH = 0.1  # a step of Adam moves each weight by the rate, and what a layer gives by that times its width
_LONG_SCHEDULE = 1000  # steps, from which on the rate is that of the width alone
_WARM_UP = 0.03  # of the steps
_CLIP = 1.0

Values = dict[str, Tensor]  # by parameter name
Checked = Callable[[TrainingCheck], object]


@dataclass
class Course:
    """The state of a healing, all that it resumes from.

    Attributes:
        drift: the least median so far, on the inputs that decide.
        most_p90: the 90th percentile there with the start values, which no state that is kept exceeds.
        drifts: quantiles of the drift on the held-out inputs, at the start and after each stage.
        n_held_out: number of the held-out samples.
        not_refitted: why a layer beside a swapped norm was not calibrated, by path.
        budget: seconds that the training may take; None where its number of steps is given, and until it begins.
        seconds: that it took until the last check.
        step: number of steps done.
        checks: what they found, in order.
        left_with: the stage whose state the network was left with; empty until all is done.
        calibrated: what calibration changed.
        best: what is trained, in the state of the least drift so far.
        trained: the :attr:`TrainedParameters.tensors` as they are now; none before the first check.
        moments: of the optimizer, by its own name for them.
    """

    drift: float
    most_p90: float = math.inf
    drifts: dict[str, dict[str, float]] = field(default_factory=dict)
    n_held_out: int = 0
    not_refitted: dict[str, str] = field(default_factory=dict)
    budget: float | None = None
    seconds: float = 0.0
    step: int = 0
    checks: list[TrainingCheck] = field(default_factory=list)
    left_with: str = ""
    calibrated: Values = field(default_factory=dict)
    best: Values = field(default_factory=dict)
    trained: Values = field(default_factory=dict)
    moments: dict[str, Values] = field(default_factory=dict)

    def check(self, drift: float, p90: float, loss: float) -> TrainingCheck:
        """Add a check, which says whether the state is the best so far."""
        kept = drift < self.drift and p90 <= self.most_p90
        self.drift = drift if kept else self.drift
        found = TrainingCheck(self.step, _finite(loss), _finite(drift), kept)
        self.checks.append(found)
        return found

    @property
    def tensors(self) -> Values:
        """All tensors, by names that tell what they are."""
        groups = {"calibrated": self.calibrated, "best": self.best, "trained": self.trained}
        groups |= {f"moment.{key}": values for key, values in self.moments.items()}
        return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}

    def as_dict(self) -> dict[str, Any]:
        """Everything but the tensors; an infinite drift stays one, since the training goes on from it."""
        held = {"calibrated", "best", "trained", "moments"}
        stored = {name: value for name, value in vars(self).items() if name not in held}
        return stored | {"checks": as_json(self.checks)}

    @classmethod
    def of(cls, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Course:
        """Make the course that :meth:`as_dict` and :attr:`tensors` described."""
        course = cls(**{**document, "checks": [TrainingCheck(**check) for check in document["checks"]]})
        groups = {"calibrated": course.calibrated, "best": course.best, "trained": course.trained}
        for full, value in tensors.items():
            group, _, name = full.partition("/")
            if group.startswith("moment."):
                course.moments.setdefault(group.removeprefix("moment."), {})[name] = value
            else:
                groups[group][name] = value
        return course


def rate_for(width: int, steps: float) -> float:
    """The largest learning rate for a network of so many channels, over so many steps.

    The first steps at a large rate lose what calibration has found; a short schedule does not win it back.

    >>> rate_for(64, 1700), rate_for(400, 1700), rate_for(64, 250)
    (0.001, 0.00025, 0.0005)
    """
    return min(MOST_RATE, _RATE_BY_WIDTH / width) * min(1.0, math.sqrt(steps / _LONG_SCHEDULE))


def train(
    course: Course,
    trained: TrainedParameters,
    width: int,
    steps: int | None,
    gradients: Callable[[int], float],
    drift: Callable[[], tuple[float, float]],
    saved: Callable[[], None],
    progress: Progress,
    checked: Checked,
) -> None:
    """Go through the rest of a schedule, from where the course stands; the network is left in its best state.

    AdamW without weight decay, its rate rising for the first steps and then falling to nought along a cosine, gradients
    clipped. A dozen times over the schedule the drift is measured, and the state kept if it is the least so far; it is
    never stopped early, since much of what such a schedule gains comes at its end. With a budget of seconds in place of
    steps, rate and checks follow the share of it that has passed.

    Args:
        course: changed as it goes; it says which state is the best to begin with.
        trained: what is trained.
        width: of the norms, see :func:`rate_for`.
        steps: of the whole schedule; None where ``course.budget`` says how many seconds it may take.
        gradients: adds those of the step of this number to the network's parameters, and returns the loss.
        drift: measures its median and 90th percentile, on the inputs that decide.
        saved: called after every check.
        progress: called after every step with the stage's name, and the steps done and all of them, or the seconds.
        checked: called with each check.
    """
    optimizer = torch.optim.AdamW(trained.tensors.values(), lr=MOST_RATE, weight_decay=0.0, fused=True)
    if course.trained:
        trained.load(course.trained)
        _put_moments(optimizer, trained, course.moments)
    began, budget = time.monotonic() - course.seconds, course.budget or 0.0

    def passed(step: int) -> float:
        if steps is not None:
            return step / steps
        return min(1.0, (time.monotonic() - began) / budget) if budget > 0 else 1.0

    losses: list[float] = []
    for step in itertools.count(course.step):
        if (share := passed(step)) >= 1:
            break
        expected = steps or (step + 1) / max(share, torch.finfo(torch.float32).tiny)
        for group in optimizer.param_groups:
            group["lr"] = rate_for(width, expected) * _schedule(share, share + 1 / expected)
        trained.forget_gradients()
        losses.append(gradients(step))
        trained.take_gradients()
        if math.isfinite(float(nn.utils.clip_grad_norm_(trained.tensors.values(), _CLIP))):  # else nowhere to go
            optimizer.step()
            trained.put()
        after = passed(step + 1)
        progress(STAGE, *((step + 1, steps) if steps else (round(after * budget), round(budget))))
        if after * CHECKS >= len(course.checks) + 1:
            course.step = step + 1
            check = course.check(*drift(), sum(losses) / len(losses))
            losses.clear()
            course.trained, course.seconds = copied(trained.tensors), time.monotonic() - began
            course.moments = _moments(optimizer, trained)
            if check.kept:
                course.best = copied(trained.parameters)
            saved()
            checked(check)
    trained.forget_gradients()
    restore(trained.parameters, course.best)


def copied(values: Mapping[str, Tensor]) -> Values:
    """Copy tensors, by name."""
    return {name: value.detach().clone() for name, value in values.items()}


@torch.no_grad()
def restore(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Give parameters other values."""
    for name, value in values.items():
        parameters[name].copy_(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _schedule(share: float, after: float) -> float:
    """Share of the largest rate, from the share of the schedule before a step and after it."""
    return min(1.0, after / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))


def _moments(optimizer: torch.optim.Optimizer, trained: TrainedParameters) -> dict[str, Values]:
    moments: dict[str, Values] = {}
    for name, tensor in trained.tensors.items():
        for key, value in optimizer.state.get(tensor, {}).items():
            moments.setdefault(key, {})[name] = value.clone()
    return moments


def _put_moments(
    optimizer: torch.optim.Optimizer, trained: TrainedParameters, moments: Mapping[str, Mapping[str, Tensor]]
) -> None:
    for key, values in moments.items():
        for name, value in values.items():
            tensor = trained.tensors[name]
            optimizer.state[tensor][key] = value.to(tensor.device, copy=True)
