"""A training over the whole of its schedule, of which the best state is kept."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, UsageError
from normscope.runtime.progress import Progress
from normscope.runtime.records import as_json
from normscope.runtime.sealed_files import read_checked, write_checked
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.reports import TrainingCheck

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
class TrainingState:
    """State of a healing, from which it resumes.

    Attributes:
        drift: least median so far, on the inputs that decide.
        most_p90: 90th percentile there with the start values, which no state that is kept exceeds.
        drifts: quantiles of the drift on the held-out inputs, at the start and after each stage.
        budget: seconds that the training may take; None with a number of steps, and until it begins.
        seconds: duration of the training until the last check.
        left_with: stage whose state the network was left with; empty until all is done.
        calibrated: parameters that calibration changed.
        best: trained parameters in the state of the least drift so far.
        trained: present :attr:`TrainedParameters.tensors`; empty before the first check.
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
        """Add a check, and keep the state if it is the best so far."""
        kept = drift < self.drift and p90 <= self.most_p90
        self.drift = drift if kept else self.drift
        self.checks.append(TrainingCheck(self.step, _finite(loss), _finite(drift), kept))
        return self.checks[-1]

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
    def of(cls, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TrainingState:
        """Make the state that :meth:`as_dict` and :attr:`tensors` described."""
        state = cls(**{**document, "checks": [TrainingCheck(**check) for check in document["checks"]]})
        groups = {"calibrated": state.calibrated, "best": state.best, "trained": state.trained}
        for full, value in tensors.items():
            group, _, name = full.partition("/")
            if group.startswith("moment."):
                state.moments.setdefault(group.removeprefix("moment."), {})[name] = value
            else:
                groups[group][name] = value
        return state


def rate_for(width: int, steps: float) -> float:
    """Return the largest learning rate for a number of channels and of steps.

    The first steps at a large rate lose what calibration has found; a short schedule does not win it back.

    >>> rate_for(64, 1700), rate_for(400, 1700), rate_for(64, 250)
    (0.001, 0.00025, 0.0005)
    """
    return min(MOST_RATE, _RATE_BY_WIDTH / width) * min(1.0, math.sqrt(steps / _LONG_SCHEDULE))


def train(
    state: TrainingState,
    trained: TrainedParameters,
    width: int,
    steps: int | None,
    gradients: Callable[[int], float],
    drift: Callable[[], tuple[float, float]],
    saved: Callable[[], None],
    progress: Progress,
    checked: Checked,
) -> None:
    """Run the rest of a schedule; the network is left in its best state.

    AdamW without weight decay, with a warm-up and a cosine to zero, and clipped gradients. A dozen times over the
    schedule the drift is measured, and the state kept if it is the least so far. Training never stops early, since
    much of the gain of such a schedule comes at its end. With a budget of seconds in place of steps, rate and checks
    follow the share of it that has passed.

    Args:
        state: changed as it goes.
        trained: the parameters.
        width: of the norms, see :func:`rate_for`.
        steps: of the whole schedule; None with ``state.budget``.
        gradients: adds the gradients of a step's number to the network's parameters, and returns the loss.
        drift: measures its median and 90th percentile, on the inputs that decide.
        saved: called after every check.
        progress: called after every step with the steps done and all of them, or the seconds.
        checked: called with each check.
    """
    optimizer = torch.optim.AdamW(trained.tensors.values(), lr=MOST_RATE, weight_decay=0.0, fused=True)
    if state.trained:
        trained.load(state.trained)
        _put_moments(optimizer, trained, state.moments)
    began, budget = time.monotonic() - state.seconds, state.budget or 0.0

    def passed(step: int) -> float:
        if steps is not None:
            return step / steps
        return min(1.0, (time.monotonic() - began) / budget) if budget > 0 else 1.0

    losses: list[float] = []
    for step in itertools.count(state.step):
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
        if after * CHECKS >= len(state.checks) + 1:
            state.step = step + 1
            check = state.check(*drift(), sum(losses) / len(losses))
            losses.clear()
            state.trained, state.seconds = copied(trained.tensors), time.monotonic() - began
            state.moments = _moments(optimizer, trained)
            if check.kept:
                state.best = copied(trained.parameters)
            saved()
            checked(check)
    trained.forget_gradients()
    restore(trained.parameters, state.best)


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


_FORMAT = "normscope-healing"
_VERSION = 5
_AGAIN = "remove it to begin anew, as `normscope heal --restart` does"
_ASKED = "asked"


def save_checkpoint(path: Path, asked: Mapping[str, Any], settings: Mapping[str, Any], state: TrainingState) -> None:
    """Write the state of a healing, whole or not at all; UsageError if the file cannot be written.

    ``asked`` is for :func:`check_asked`, and ``settings`` identify the network, the inputs and the options.
    """
    tensors = {name: value.cpu().contiguous() for name, value in state.tensors.items()}
    header = {"format": _FORMAT, "version": _VERSION, _ASKED: dict(asked), "settings": dict(settings)}
    write_checked(path, {**header, "course": state.as_dict()}, tensors)


def check_asked(path: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a healing with other options by name, before any work; no file is no checkpoint.

    Raises:
        UsageError: if the checkpoint is of another healing.
        DataError: if the file is damaged, or of another kind or version.
    """
    if not path.exists():
        return
    header, _ = read_checked(path, _FORMAT, (_VERSION,), _AGAIN)
    for name, before, value in _differing(header.get(_ASKED), asked):
        raise _of_another(path, f"its {name} is {before!r:.60}, not {value!r:.60}")


def load_checkpoint(path: Path, settings: Mapping[str, Any]) -> TrainingState | None:
    """Read a checkpoint of the same settings, with errors as of :func:`check_asked`; None if there is no file."""
    if not path.exists():
        return None
    header, tensors = read_checked(path, _FORMAT, (_VERSION,), _AGAIN)
    for name, before, value in _differing(header.get("settings"), settings):
        # A list of all sites, or a hash, would say nothing.
        plain = value is None or isinstance(value, (int, float))
        raise _of_another(path, f"its {name} is {before!r:.60}, not {value}" if plain else f"other {name}")
    try:
        return TrainingState.of(header["course"], tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"The checkpoint {path} is damaged: {type(error).__name__}: {error}; {_AGAIN}.") from error


def _differing(stored: Any, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    before = stored if isinstance(stored, dict) else {}
    return ((name, before.get(name), value) for name, value in settings.items() if before.get(name) != value)


def _of_another(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} is of another healing: {what}; {_AGAIN}, or name another.")


_LEAST_ALPHA = 1e-6  # in place of an α of nought, through which nothing could be learned


class TrainedParameters:
    """Parameters of a network as training moves them: weight · f(αx + s) + bias as (v/α) · f(α(x + c)) + bias.

    Where a norm is nearly a straight line, weight and α matter by their product alone. Trained directly, α falls and
    the weight grows, to 10⁵, until one step of α or s destroys the network. The slope v = weight · α, log α and
    c = s/α, a shift of x itself, stay moderate.

    Args:
        network: with point-wise functions that have a weight for each channel.
        names: of the parameters that are trained; of a function all of them together.

    Attributes:
        tensors: variables of the optimizer by parameter name: v for the weight, log α relative to its start for α, and
            c for the shift; other parameters as they are.

    >>> function = PointwiseFunction("tanh", 2, alpha=0.5)
    >>> trained = TrainedParameters(function, ["alpha", "weight", "bias"])
    >>> trained.tensors["weight"], trained.tensors["alpha"]
    (tensor([0.5000, 0.5000]), tensor([0.]))
    >>> trained.tensors["alpha"] += 1
    >>> trained.put()
    >>> [round(float(parameter.detach().max()), 3) for parameter in (function.alpha, function.weight)]
    [1.359, 0.368]
    """

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        of_network = dict(network.named_parameters())
        self.parameters: Mapping[str, nn.Parameter] = {name: of_network[name] for name in names}
        self.tensors: dict[str, Tensor] = dict(self.parameters)
        self._starts: list[tuple[str, Tensor]] = []  # prefixes of functions, and their α, whose signs stay
        for path, module in network.named_modules():
            prefix = f"{path}." if path else ""
            if isinstance(module, PointwiseFunction) and f"{prefix}alpha" in self.parameters:
                with torch.no_grad():
                    module.alpha[module.alpha == 0] = _LEAST_ALPHA
                start = module.alpha.detach().clone()
                self._starts.append((prefix, start))
                self.tensors[f"{prefix}weight"] = module.weight.detach() * start
                self.tensors[f"{prefix}alpha"] = torch.zeros_like(start)
                if self._has_shift(prefix):
                    self.tensors[f"{prefix}shift"] = self.parameters[f"{prefix}shift"].detach() / start

    def _has_shift(self, prefix: str) -> bool:
        """False for one shift of several α, too, which stays as it is."""
        shift = self.parameters.get(f"{prefix}shift")
        return shift is not None and shift.shape == self.parameters[f"{prefix}alpha"].shape

    @torch.no_grad()
    def put(self) -> None:
        """Give the network the values of the tensors."""
        for prefix, start in self._starts:
            weight, alpha, shift = (f"{prefix}{name}" for name in ("weight", "alpha", "shift"))
            self.parameters[alpha].copy_(start * self.tensors[alpha].exp())
            self.parameters[weight].copy_(self.tensors[weight] / self.parameters[alpha])
            if self._has_shift(prefix):
                self.parameters[shift].copy_(self.tensors[shift] * self.parameters[alpha])

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Give the tensors, and with them the network, other values."""
        for name, value in values.items():
            self.tensors[name].copy_(value)
        self.put()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Compute the gradients of v, log α and c from those of the network's parameters."""
        for prefix, _ in self._starts:
            weight, alpha = self.parameters[f"{prefix}weight"], self.parameters[f"{prefix}alpha"]
            if weight.grad is None or alpha.grad is None:
                continue
            # As log α grows, so does s = αc; the weight, v/α, falls.
            of_log = alpha * alpha.grad - (weight * weight.grad).sum_to_size(alpha.shape)
            if self._has_shift(prefix):
                shift = self.parameters[f"{prefix}shift"]
                of_shift = torch.zeros_like(shift) if shift.grad is None else shift.grad
                self.tensors[f"{prefix}shift"].grad = of_shift * alpha
                of_log = of_log + shift * of_shift
            self.tensors[f"{prefix}weight"].grad = weight.grad / alpha
            self.tensors[f"{prefix}alpha"].grad = of_log

    def forget_gradients(self) -> None:
        """Leave no gradient, neither in the network nor in the tensors."""
        for tensor in (*self.parameters.values(), *self.tensors.values()):
            tensor.grad = None
