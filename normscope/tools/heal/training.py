"""Training of a swapped network towards the original: targets, parameters, learning rate and checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch, joined, tensors_of
from normscope.inputs.held_out import by_length
from normscope.inputs.loaded_model import Outputs
from normscope.runtime.checked_files import read_checked, write_checked
from normscope.runtime.network import SavedBuffers, run
from normscope.swaps.distances import KL, kl_divergences, measure_of, output_by_sample
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import outputs_at
from normscope.tools.heal.reports import START, TRAINED, TrainingCheck

MOST_RATE = 1e-3
_RATE_BY_WIDTH = 0.1  # a step of Adam changes each weight by the rate, and a layer's output by that times its width
_LONG_SCHEDULE = 1000  # steps, above which the rate depends on the width alone
_LEAST_ALPHA = 1e-6  # in place of α = 0, which passes no gradient to the weight
_LEAST_KL = 1e-12  # below which only rounding is left
MOST_TARGET_BYTES = 4 * 2**30  # of targets kept in memory
_FORMAT, _VERSION = "normscope-healing", 7
_AGAIN = "remove it to begin anew, as `normscope heal --restart` does"

Values = dict[str, Tensor]  # by parameter name
Checked = Callable[[TrainingCheck], object]
Target = tuple[Tensor, Mapping[str, list[Tensor]]]  # outputs of the network, and of each call of a norm by its path


@dataclass
class TrainingState:
    """State of a healing, from which it resumes.

    Attributes:
        drift: least median so far, on the inputs that decide.
        most_p90: 90th percentile there with the start values, which no kept state exceeds.
        before_training: median there before the first training step.
        drifts, n_held_out, not_refitted, left_with, checks: as in :class:`normscope.tools.heal.reports.HealReport`.
        budget: seconds for the training; None with a number of steps, and before it begins.
        seconds: duration of the training until the last check.
        step: number of steps done.
        tensors: ``calibrated``: parameters that calibration changed; ``best``: trained parameters in the state of the
            least drift so far; ``trained``: present :attr:`TrainedParameters.tensors`; ``moment.NAME``: of the
            optimizer.
    """

    drift: float
    most_p90: float
    before_training: float
    drifts: dict[str, dict[str, float]]
    n_held_out: int
    not_refitted: dict[str, str] = field(default_factory=dict)
    left_with: str = START
    budget: float | None = None
    seconds: float = 0.0
    step: int = 0
    checks: list[TrainingCheck] = field(default_factory=list)
    tensors: defaultdict[str, Values] = field(default_factory=lambda: defaultdict(dict))

    def keep_if_best(self, stage: str, drift: float, p90: float) -> bool:
        """Keep the present state of a stage, and return True, if it is the best so far."""
        best = drift < self.drift and p90 <= self.most_p90
        if best:
            self.drift, self.left_with = drift, stage
        return best

    def check(self, drift: float, p90: float, loss: float) -> TrainingCheck:
        """Add a check, and keep the state if it is the best so far."""
        kept = self.keep_if_best(TRAINED, drift, p90)
        finite_loss, finite_drift = (value if math.isfinite(value) else None for value in (loss, drift))
        self.checks.append(TrainingCheck(self.step, finite_loss, finite_drift, kept))
        return self.checks[-1]

    def save(self, path: Path, asked: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Write a checkpoint, whole or not at all; UsageError if the file cannot be written.

        ``asked`` is for :func:`check_asked`, and ``settings`` identify the network, the inputs and the options.
        """
        tensors = {
            f"{group}/{name}": value.cpu().contiguous()
            for group, values in self.tensors.items()
            for name, value in values.items()
        }
        course = {name: value for name, value in vars(self).items() if name != "tensors"}
        course["checks"] = [asdict(check) for check in self.checks]
        header = {"format": _FORMAT, "version": _VERSION, "asked": dict(asked), "settings": dict(settings)}
        write_checked(path, {**header, "course": course}, tensors)

    @classmethod
    def load(cls, path: Path, settings: Mapping[str, Any]) -> TrainingState | None:
        """Read a checkpoint of the same settings, with errors as of :func:`check_asked`; None if there is no file."""
        if not path.exists():
            return None
        header, tensors = read_checked(path, _FORMAT, _VERSION, _AGAIN)
        for name, before, value in _differing(header.get("settings"), settings):
            short = value is None or isinstance(value, (int, float))  # unlike a list of sites, or a hash
            raise _different(path, f"its {name} is {before!r:.60}, not {value}" if short else f"other {name}")
        try:
            course = header["course"]
            state = cls(**{**course, "checks": [TrainingCheck(**check) for check in course["checks"]]})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"The checkpoint {path} is damaged: {type(error).__name__}: {error}; {_AGAIN}.") from error
        for full_name, value in tensors.items():
            group, _, name = full_name.partition("/")
            state.tensors[group][name] = value
        return state


def check_asked(path: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a healing with other options by name, before any work; the file may be missing."""
    if path.exists():
        header, _ = read_checked(path, _FORMAT, _VERSION, _AGAIN)
        for name, before, value in _differing(header.get("asked"), asked):
            raise _different(path, f"its {name} is {before!r:.60}, not {value!r:.60}")


def _differing(stored: Any, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    before = stored if isinstance(stored, dict) else {}
    return ((name, before.get(name), value) for name, value in settings.items() if before.get(name) != value)


def _different(path: Path, difference: str) -> UsageError:
    return UsageError(f"{path} is of another healing: {difference}; {_AGAIN}, or name another.")


def rate_for(width: int, steps: float) -> float:
    """Return the largest learning rate for a number of channels and of steps.

    The first steps at a large rate undo a part of calibration, which a short schedule does not regain.

    >>> rate_for(64, 1700), rate_for(400, 1700), rate_for(64, 250)
    (0.001, 0.00025, 0.0005)
    """
    return min(MOST_RATE, _RATE_BY_WIDTH / width) * min(1.0, math.sqrt(steps / _LONG_SCHEDULE))


class TrainedParameters:
    """Parameters of a network for training: weight · f(αx + s) + bias is written (v/α) · f(α(x + c)) + bias.

    For a nearly linear norm, only the product of weight and α matters. Trained directly, α falls and the weight grows
    to 10⁵, until one step of α or s destroys the network. The slope v = weight · α, log α and c = s/α stay moderate.

    Args:
        network: with point-wise functions that have a weight for each channel.
        names: of the trained parameters; of a function all or none.

    Attributes:
        parameters: the network's parameters, by name.
        tensors: variables of the optimizer by parameter name: v for the weight, log α relative to its start for α, c
            for the shift, and other parameters themselves.

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
        self.network = network
        self.parameters: Mapping[str, nn.Parameter] = {name: network.get_parameter(name) for name in names}
        self.tensors: dict[str, Tensor] = dict(self.parameters)
        self._starts: list[tuple[str, Tensor]] = []  # prefixes of functions, and their α
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
        """True if a function has a trained shift for each α; a shift that several α share is trained as it is."""
        shift = self.parameters.get(f"{prefix}shift")
        return shift is not None and shift.shape == self.parameters[f"{prefix}alpha"].shape

    @torch.no_grad()
    def put(self) -> None:
        for prefix, start in self._starts:
            weight, alpha, shift = (f"{prefix}{name}" for name in ("weight", "alpha", "shift"))
            self.parameters[alpha].copy_(start * self.tensors[alpha].exp())
            self.parameters[weight].copy_(self.tensors[weight] / self.parameters[alpha])
            if self._has_shift(prefix):
                self.parameters[shift].copy_(self.tensors[shift] * self.parameters[alpha])

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.tensors[name].copy_(value)
        self.put()

    @torch.no_grad()
    def convert_gradients(self) -> None:
        """Compute the gradients of v, log α and c from those of the network's parameters."""
        for prefix, _ in self._starts:
            weight, alpha = self.parameters[f"{prefix}weight"], self.parameters[f"{prefix}alpha"]
            if weight.grad is None or alpha.grad is None:
                continue
            # With log α, s = αc grows and the weight, v/α, falls.
            log_alpha_grad = alpha * alpha.grad - (weight * weight.grad).sum_to_size(alpha.shape)
            if self._has_shift(prefix):
                shift = self.parameters[f"{prefix}shift"]
                shift_grad = torch.zeros_like(shift) if shift.grad is None else shift.grad
                self.tensors[f"{prefix}shift"].grad = shift_grad * alpha
                log_alpha_grad = log_alpha_grad + shift * shift_grad
            self.tensors[f"{prefix}weight"].grad = weight.grad / alpha
            self.tensors[f"{prefix}alpha"].grad = log_alpha_grad

    def clear_gradients(self) -> None:
        for tensor in (*self.parameters.values(), *self.tensors.values()):
            tensor.grad = None


@dataclass
class TrainingTargets:
    """Targets from the original network for lists of batches, and gradients of the loss towards them.

    Targets are computed when first needed, and up to four gibibytes of them are kept. The sites are paths of swapped
    modules, which imitate their norms. The gradients of the batches of a list are summed.
    """

    original: nn.Module
    swapped: nn.Module
    outputs: Outputs
    sites: Sequence[str]
    batches: Sequence[Sequence[Batch]]

    def __post_init__(self) -> None:
        self._buffers = SavedBuffers(self.original), SavedBuffers(self.swapped)
        self._kept: dict[int, list[Target]] = {}
        self._bytes_left = MOST_TARGET_BYTES

    def targets(self, number: int) -> list[Target]:
        """Return copies of the original's outputs for a list of batches."""
        if number in self._kept:
            return self._kept[number]
        targets: list[Target] = []
        for batch in self.batches[number]:
            with outputs_at(self.original, self.sites) as site_outputs, torch.no_grad():
                output = self.outputs.read(run(self.original, batch), batch).clone()  # it may be a buffer
            self._buffers[0].restore()
            targets.append((output, site_outputs))
        size = sum(tensor.nbytes for tensor in tensors_of(targets))
        if size <= self._bytes_left:
            self._bytes_left -= size
            self._kept[number] = targets
        return targets

    def gradients(self, number: int) -> float:
        """Add the gradients of the loss on a list of batches, and return the loss.

        The loss is the relative L2 at the output, or the root of the KL divergence of logits, plus the mean relative L2
        at the sites, which contain far more information about an input than the few numbers of the output.
        """
        total, batches = 0.0, self.batches[number]
        samples = sum(len(batch.samples) for batch in batches)
        for batch, target in zip(batches, self.targets(number), strict=True):
            with torch.enable_grad():
                loss = self._loss(batch, target) * (len(batch.samples) / samples)
                loss.backward()  # type: ignore[no-untyped-call]
            self._buffers[1].restore()  # after the backward pass, which may use them
            total += float(loss.detach())
        return total

    def _loss(self, batch: Batch, target: Target) -> Tensor:
        with outputs_at(self.swapped, self.sites) as site_outputs:
            output = self.outputs.read(run(self.swapped, batch), batch)
        site_losses = [
            pooled_loss(site_output, original, batch.valid_at(path))
            for path, calls in target[1].items()
            for site_output, original in zip(site_outputs[path], calls, strict=True)
        ]
        kind = self.outputs.kind
        if measure_of(kind) == KL:
            (logits, valid), (original, _) = (output_by_sample(values, batch, kind) for values in (output, target[0]))
            loss = kl_divergences(logits, original, valid).mean().clamp_min(_LEAST_KL).sqrt()
        else:
            loss = pooled_loss(output, target[0], batch.valid)
        return loss + torch.stack(site_losses).mean() if site_losses else loss


def pooled_loss(output: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """Return the relative L2 of all samples and positions together.

    ``valid`` is the mask of data, which applies if it has the first axes ``(samples, positions)`` of the output.
    """
    if valid is not None and output.ndim > 2 and output.shape[:2] == valid.shape:
        data = valid.to(output.device)
        output, target = output[data], target[data]
    return torch.div(vector_norm(output - target), vector_norm(target).clamp_min(torch.finfo(torch.float32).tiny))


def steps_of(batches: Sequence[Batch], at_once: int, apart: int) -> list[list[Batch]]:
    """Divide batches among steps, in order; padded ones by length.

    A step has at least ``at_once`` samples if they can be joined and run in one pass, otherwise at most ``apart``.

    >>> from normscope.inputs.batch import Sample
    >>> ones = [Batch((torch.zeros(1, size),), samples=(Sample("a", 0, 0),)) for size in (3, 3, 3, 4, 3)]
    >>> [[batch.args[0].shape for batch in step] for step in steps_of(ones, 3, 2)]
    [[torch.Size([3, 3])], [torch.Size([1, 4]), torch.Size([1, 3])]]
    """
    steps: list[list[Batch]] = []
    for batch in (similar for padded in batches for similar in by_length(padded, apart)):
        last = steps[-1] if steps else []
        samples = sum(len(earlier.samples) for earlier in last)
        both = joined([*last, batch]) if len(last) == 1 and samples < at_once and batch.valid is None else []
        if len(both) == 1:
            steps[-1] = both
        elif last and samples + len(batch.samples) <= apart:
            last.append(batch)
        else:
            steps.append([batch])
    return steps


def drawn(seed: int, step: int, *, number: int) -> int:
    """Draw the target of a step: in each epoch all of them in a new order, determined by seed and step alone.

    >>> sorted(drawn(0, step, number=4) for step in range(4, 8))
    [0, 1, 2, 3]
    """
    key = hashlib.blake2b(f"{seed} {step // number}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key))
    return int(torch.randperm(number, generator=generator)[step % number])
