"""Healing: calibration, then training towards the original's outputs; the best of the states is kept."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError, UsageError, unknown
from normscope.inputs.batch import Batch, as_batches, taken_once, tensor_bytes
from normscope.inputs.held_out import Pool, by_length, divided, kept_in_memory, subsampled
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.inputs.wrappers import named_modules, submodule
from normscope.norms.bound_inputs import unpacked
from normscope.norms.sites import NormSite
from normscope.norms.trace import find_norms
from normscope.runtime.network import restoring, uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.runtime.spread import check_whole
from normscope.swaps.calibrate.calibrate import NEIGHBOURS, NORMS, calibrate
from normscope.swaps.calibrate.neighbours import neighbours_of
from normscope.swaps.calibrate.refitting import copies, parameter_values, put_parameters
from normscope.swaps.distances import OutputErrors, measure_of, output_errors
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.quality import QualityFunction, QualityMeter
from normscope.swaps.reports import Quantiles
from normscope.tools.heal.reports import CALIBRATED, START, TRAINED, HealReport
from normscope.tools.heal.training import (
    MOST_RATE,
    Checked,
    TrainedParameters,
    TrainingState,
    TrainingTargets,
    check_asked,
    drawn,
    rate_for,
    steps_of,
)

STEPS = 1700
SAMPLES_A_STEP = 64  # at least, if they can be run in one pass, unless they exceed _TOKENS_A_STEP
_TOKENS_A_STEP = 4096  # at a norm, so that a step of long inputs does not take a large part of the minutes
_SAMPLES_APART = 8  # at most, if they cannot be run in one pass
STAGE = "train"
CHECKS = 12  # of the drift, over the whole schedule
_WARM_UP = 0.03  # of the steps
_CLIP = 1.0
_MOST_CALIBRATED = 320  # samples: twice as many take twice the time, for a thirtieth less drift
ALL = "all"
TRAINS = (NORMS, NEIGHBOURS, ALL)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def heal(
    original: nn.Module | LoadedModel,
    swapped: nn.Module,
    learn: Iterable[Any] | None = None,
    held_out: Iterable[Any] | None = None,
    *,
    outputs: Outputs | None = None,
    calibrated: bool = True,
    train: str = ALL,
    steps: int | None = None,
    minutes: float | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    asked: Mapping[str, Any] | None = None,
    quality: QualityFunction | Task | None = None,
    progress: Progress = silent,
    checked: Checked | None = None,
) -> HealReport:
    """Train a swapped network, in place, towards the outputs of the original.

    First it is calibrated without gradients (:func:`normscope.calibrate`). Then AdamW trains it end to end. The loss is
    the relative L2 at the output (of logits, the root of their KL divergence) plus the mean relative L2 over the
    swapped sites. Point-wise functions get a weight and a bias for each channel, and are trained by their slope,
    weight · α, and log α. A fourth of the inputs to learn from decides which state is kept: start, calibrated, or at a
    check of the training. It is the one with the least median error, if its 90th percentile does not exceed the
    start's. The held-out inputs decide nothing: they only report the drift.

    Args:
        original: the network: the result of :func:`normscope.load`, or any module; it does not change.
        swapped: a copy of the module with other modules in place of some norms (:func:`normscope.swap`), in float32.
        learn: batches to learn from, as :func:`normscope.capture` takes them, which may run the original. At most a
            gibibyte of them is kept in memory, and at most four of the original's outputs. None for a loaded model's
            calibration inputs or, if it has none, three fourths of its inputs.
        held_out: batches of other sources, to report the drift; None for the other inputs of a loaded model.
        outputs: how to read the networks' outputs; by default as the loaded model states, or the first tensor.
        calibrated: calibrate first. A swap without point-wise functions, such as RMSNorm, is only trained.
        train: ``all``, every weight but embeddings; ``neighbours``, the functions and the linear layers beside them, as
            :func:`normscope.calibrate` defines them; ``norms``, the functions alone, which then also holds for
            calibration.
        steps: number of training steps, each of one batch or of several small ones; None for 1700.
        minutes: in place of steps: wall-clock time for everything, calibration and measuring included. The learning
            rate follows the elapsed share.
        seed: of the order of the batches.
        checkpoint: a safetensors file, written a dozen times, from which the same call resumes; None for none.
        asked: further identification of the checkpoint, as JSON; a call with other values does not resume from it.
        quality: measure of the original, and of the swapped network before and after, as for :func:`normscope.drift`;
            None for a loaded model's task, on the held-out inputs.
        progress: called with the stage, the amount done and the total.
        checked: called with each :class:`TrainingCheck`, a dozen times over the training.

    Returns:
        A :class:`HealReport`. Training flags, grad mode and RNG states are restored. On a CPU with the same
        number of threads, the same call with a number of steps gives the same bits, interrupted or not.

    Raises:
        UsageError: if nothing was swapped, if one of ``learn`` and ``held_out`` is missing, if options contradict one
            another, if the network is in half precision, if the checkpoint is of another healing, or if ``quality``
            returns no number.
        DataError: if there are too few inputs, or the checkpoint is damaged.
        ModelError: if the network calls its modules in an order that depends on its input, so it cannot be calibrated.

    >>> import copy, normscope
    >>> original = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    >>> x = torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(0))
    >>> swapped = copy.deepcopy(original)
    >>> _ = normscope.swap(swapped, "tanh", normscope.capture(original, list(x[:32])))
    >>> report = heal(original, swapped, list(x[:32]), list(x[32:]), steps=40)
    >>> report.after["median"] <= report.before["median"]
    True
    >>> network = normscope.load("demo_vit", limit=8, device="cpu")
    >>> swapped = copy.deepcopy(network.module)
    >>> _ = normscope.swap(swapped, "dyt", normscope.capture(network), layers="final")
    >>> heal(network, swapped, steps=1).n_held_out
    8
    """
    began = time.monotonic()
    if isinstance(original, LoadedModel) and learn is None and held_out is None:
        learn, held_out = divided(original.inputs, original.calibration)
    if learn is None or held_out is None:
        raise UsageError("Healing learns from some inputs and is judged by others: pass both, or a loaded model alone.")
    check_options(train, steps, minutes)
    module, batches, _, outputs = unpacked(original, learn, outputs=outputs)
    _, held_out, about, _ = unpacked(original, held_out)
    teacher, student = uncompiled(module), uncompiled(swapped)
    check_whole(student, "Healing")
    sites = swapped_sites(teacher, student)
    for name, parameter in student.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"{name} is in {parameter.dtype}, which loses small updates; heal in float32 and convert afterwards."
            )
        if parameter.is_meta:
            raise ModelError(f"{name} is on the meta device, which has no values to train.")
    reported = list(held_out) if taken_once(held_out) else held_out
    meter = QualityMeter(original, quality, reported, outputs, progress)
    path, asked = None if checkpoint is None else Path(checkpoint), dict(asked or {})
    if path is not None:
        check_asked(path, asked)
    meter.add("original", teacher)
    measuring = time.monotonic()
    meter.add("swapped", student)
    until = began + 60 * minutes - (time.monotonic() - measuring) if minutes else None  # the healed one follows
    learned, left_out = kept_in_memory(batches)
    options = {"calibrated": calibrated, "train": train, "seed": seed, "minutes": minutes}
    options["steps"] = STEPS if steps is None and minutes is None else steps
    healing = _Healing(
        teacher, student, sites, outputs, learned, reported, options, until, path, asked, progress, checked
    )
    with restoring(teacher), restoring(student):
        state = healing.run()
    meter.add("healed", student)
    return HealReport(
        state.drifts,
        state.left_with,
        state.checks,
        state.step,
        train,
        n_learned=sum(len(batch.samples) for batch in healing.pool.learned),
        n_judged=sum(len(batch.samples) for batch in healing.pool.validation),
        n_held_out=state.n_held_out,
        left_out=left_out,
        not_refitted=state.not_refitted,
        quality=meter.quality,
        no_quality=meter.no_quality,
        about=about,
        measure=measure_of(outputs.kind),
        before_training=state.before_training if math.isfinite(state.before_training) else None,
    )


def check_options(train: str, steps: int | None, minutes: float | None) -> None:
    """Refuse options that contradict one another; UsageError."""
    if train not in TRAINS:
        raise UsageError(unknown("set of trained weights", train, TRAINS))
    if steps is not None and minutes is not None:
        raise UsageError(f"{steps} steps and {minutes} minutes are two lengths of one training; pass one of them.")
    if steps is not None and steps < 1:
        raise UsageError(f"steps has to be at least 1, not {steps}.")
    if minutes is not None and not 0 < minutes < math.inf:
        raise UsageError(f"minutes has to be a time above 0, not {minutes}.")


def swapped_sites(original: nn.Module, swapped: nn.Module) -> list[str]:
    """Return the outermost paths at which a network has another module than the original; UsageError if none."""
    modules = dict(named_modules(original))
    sites: list[str] = []
    for name, module in named_modules(swapped):
        inside = any(name.startswith(f"{site}.") for site in sites)
        if not inside and (name not in modules or type(module) is not type(modules[name])):
            sites.append(name)
    if original is swapped or not sites:
        raise UsageError("Nothing was swapped: heal takes the original network and a copy of it with norms replaced.")
    return sites


@dataclass
class _Healing:
    """Both networks and all inputs, from stage to stage."""

    original: nn.Module
    swapped: nn.Module
    sites: Sequence[str]
    outputs: Outputs
    batches: Sequence[Batch]  # to learn from
    reported: Iterable[Any]  # held out
    options: Mapping[str, Any]
    until: float | None  # monotonic time at which a healing by minutes ends
    path: Path | None  # of the checkpoint
    asked: Mapping[str, Any]
    progress: Progress
    checked: Checked | None

    def __post_init__(self) -> None:
        self.pool = Pool.of(self.batches)
        self._validation_errors = OutputErrors(self.original, self.pool.by_length().validation, self.outputs)
        functions = [module for module in self.swapped.modules() if isinstance(module, PointwiseFunction)]
        for function in functions:
            function.expand_to_channels()
        self._calibrates = self.options["calibrated"] and bool(functions)
        self._parameters = dict(self.swapped.named_parameters())
        self._settings = {  # by which a checkpoint recognizes its healing
            "model": type(self.original).__name__,
            "sites": {name: repr(submodule(self.swapped, name)) for name in self.sites},
            **self.options,
            "weights": _digest(self.original.state_dict()),
            "start values": _digest(self.swapped.state_dict()),
            "inputs": self.pool.digest,
        }
        self._measuring = 0.0  # seconds of the measurements after training

    @cached_property
    def _norms(self) -> list[NormSite]:
        return find_norms(self.original, self.pool.learned[0].first_sample()).sites

    def run(self) -> TrainingState:
        """Run the remaining stages, and leave the network in the best of their states."""
        start = parameter_values(self.swapped)
        state = (self.path and TrainingState.load(self.path, self._settings)) or self._begun()
        if self._calibrates and CALIBRATED not in state.drifts:
            self._calibrate(state, start)
            self._save(state)
        put_parameters(self.swapped, state.tensors["calibrated"])
        if TRAINED not in state.drifts:
            names = self._trained_names()
            with _trainable(self.swapped, names):
                self._train(state, TrainedParameters(self.swapped, names))
            state.drifts[TRAINED] = _quantiles(self._held_out_errors())
            for group in [group for group in state.tensors if group not in (CALIBRATED, "best")]:
                del state.tensors[group]
            self._save(state)
        put_parameters(self.swapped, start)
        if state.left_with != START:
            put_parameters(self.swapped, state.tensors["calibrated"])
        if state.left_with == TRAINED:
            put_parameters(self.swapped, state.tensors["best"])
        return state

    def _save(self, state: TrainingState) -> None:
        if self.path is not None:
            state.save(self.path, self.asked, self._settings)

    def _begun(self) -> TrainingState:
        began = time.monotonic()
        errors = self._held_out_errors()
        if not len(errors):
            raise DataError("There is no held-out batch to report the drift of.")
        drift, p90 = self._drift()
        state = TrainingState(drift, p90, drift, {START: _quantiles(errors)}, len(errors))
        self._measuring = time.monotonic() - began
        return state

    def _calibrate(self, state: TrainingState, start: Mapping[str, Tensor]) -> None:
        refit = NORMS if self.options["train"] == NORMS else NEIGHBOURS
        both, learned = (self.original, self.swapped), subsampled(self.batches, _MOST_CALIBRATED)
        report = calibrate(*both, learned, outputs=self.outputs, refit=refit, progress=self.progress)
        state.not_refitted = dict(report.left)
        changed = {name: v for name, v in self._parameters.items() if not torch.equal(v, start[name])}
        state.tensors["calibrated"] = copies(changed)
        state.before_training, p90 = self._drift()
        state.keep_if_best(CALIBRATED, state.before_training, p90)
        state.drifts[CALIBRATED] = _quantiles(self._held_out_errors())

    def _targets(self) -> TrainingTargets:
        try:
            tokens = [norm.tokens_per_sample // norm.calls for norm in self._norms if norm.name in self.sites]
        except ModelError:  # other modules than known norms may be replaced
            tokens = []
        at_once = max(1, min(SAMPLES_A_STEP, _TOKENS_A_STEP // max([1, *tokens])))
        steps = steps_of(self.pool.learned, at_once, min(at_once, _SAMPLES_APART))
        return TrainingTargets(self.original, self.swapped, self.outputs, self.sites, steps)

    def _train(self, state: TrainingState, trained: TrainedParameters) -> None:
        """Run the rest of the schedule; the network is left in its best state.

        AdamW without weight decay, with warm-up, a cosine to zero, and clipped gradients. A dozen times over the
        schedule the drift is measured, and the state kept if it is the best so far. Training never stops early, since
        much of the gain comes at the end of the schedule. With a budget of seconds, rate and checks follow its elapsed
        share.
        """
        targets = self._targets()
        steps: int | None = self.options["steps"]
        if not state.tensors["best"]:
            state.tensors["best"] = copies(trained.parameters)
            if self.until is not None:
                state.budget = self.until - self._measuring - time.monotonic()
            self._save(state)
        optimizer = torch.optim.AdamW(trained.tensors.values(), lr=MOST_RATE, weight_decay=0.0, fused=True)
        if state.tensors["trained"]:
            trained.load(state.tensors["trained"])
            for group, values in state.tensors.items():
                for name, value in values.items() if group.startswith("moment.") else ():
                    tensor = trained.tensors[name]
                    optimizer.state[tensor][group.removeprefix("moment.")] = value.to(tensor.device, copy=True)
        began, budget = time.monotonic() - state.seconds, state.budget or 0.0

        def elapsed(step: int) -> float:
            if steps is not None:
                return step / steps
            return min(1.0, (time.monotonic() - began) / budget) if budget > 0 else 1.0

        width = max(math.prod(getattr(submodule(self.swapped, path), "normalized_shape", (1,))) for path in self.sites)
        losses: list[float] = []
        for step in itertools.count(state.step):
            if (share := elapsed(step)) >= 1:
                break
            expected = steps or (step + 1) / max(share, torch.finfo(torch.float32).tiny)
            warm_up = min(1.0, (share + 1 / expected) / _WARM_UP)
            for parameters in optimizer.param_groups:
                parameters["lr"] = rate_for(width, expected) * (warm_up * 0.5 * (1 + math.cos(math.pi * share)))
            trained.clear_gradients()
            losses.append(targets.gradients(drawn(self.options["seed"], step, number=len(targets.batches))))
            trained.convert_gradients()
            if math.isfinite(float(nn.utils.clip_grad_norm_(trained.tensors.values(), _CLIP))):
                optimizer.step()
                trained.put()
            after = elapsed(step + 1)
            self.progress(STAGE, *((step + 1, steps) if steps else (round(after * budget), round(budget))))
            if after * CHECKS >= len(state.checks) + 1:
                state.step = step + 1
                check = state.check(*self._drift(), sum(losses) / len(losses))
                losses.clear()
                state.tensors["trained"], state.seconds = copies(trained.tensors), time.monotonic() - began
                for name, tensor in trained.tensors.items():
                    for key, value in optimizer.state.get(tensor, {}).items():
                        state.tensors[f"moment.{key}"][name] = value.clone()
                if check.kept:
                    state.tensors["best"] = copies(trained.parameters)
                self._save(state)
                if self.checked is not None:
                    self.checked(check)
        trained.clear_gradients()
        put_parameters(self.swapped, state.tensors["best"])

    def _trained_names(self) -> list[str]:
        train = self.options["train"]
        if train == ALL:
            embeddings = {id(module.weight) for module in self.swapped.modules() if isinstance(module, _EMBEDDINGS)}
            return [name for name, parameter in self._parameters.items() if id(parameter) not in embeddings]
        paths = list(self.sites)
        if train == NEIGHBOURS:
            near = neighbours_of(self.original, self._norms, self.sites, self.pool.learned[0])
            paths += [called.path for called in near.called_modules if not called.is_norm]
        return [name for name in self._parameters if name.startswith(tuple(f"{path}." for path in paths))]

    def _drift(self) -> tuple[float, float]:
        """Return median and 90th percentile on the inputs that decide."""
        errors = _quantiles(self._validation_errors.of(self.swapped))
        return errors["median"], errors["p90"]

    def _held_out_errors(self) -> Tensor:
        batches = (alike for batch in as_batches(self.reported) for alike in by_length(batch, len(batch.samples)))
        return output_errors(self.original, self.swapped, batches, self.outputs)


def _quantiles(errors: Tensor) -> dict[str, float]:
    quantiles = Quantiles.of(errors.tolist())
    return {"p10": quantiles.p10, "median": quantiles.p50, "p90": quantiles.p90}


@contextlib.contextmanager
def _trainable(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Compute gradients of some parameters alone in the block; restore ``requires_grad`` afterwards."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = None


def _digest(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        content.update(name.encode())
        content.update(tensor_bytes(tensor))
    return content.hexdigest()
