"""Healing: training a swapped network back towards the original's outputs; the best of its states is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normscope.errors import ModelError, UsageError
from normscope.inputs.entries import taken_once
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.inputs.pool import kept_in_memory
from normscope.inputs.splits import divided
from normscope.pairs.norms.streams import unpacked
from normscope.runtime.network import left_as_found, uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.swaps.distances import measure_of
from normscope.swaps.heal.stages import ALL, HealOptions, Stages
from normscope.swaps.heal.training import Checked, check_asked
from normscope.swaps.quality.measures import Judge, QualityFunction
from normscope.swaps.reports import HealReport

STEPS = 1700


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
    """Train a swapped network, in place, until it gives what the original gives.

    First it is calibrated (:func:`normscope.calibrate`), which takes no gradient. From there AdamW trains it end to
    end: the loss is the relative L2 at the output, or of logits the root of their KL divergence, plus the mean over the
    swapped sites of the relative L2 of what they give. Point-wise functions are trained by their slope, weight · α,
    and log α, and have a weight and a bias for each channel afterwards. A fourth of the inputs to learn from decides:
    of all states, the start and the calibrated one among them, the one with the least median error there is kept, if
    its 90th percentile is not above the start's. The network is left with the stage that did best on the held-out
    inputs by the same rule.

    Args:
        original: the network: what :func:`normscope.load` returned, or any module; it stays as it is.
        swapped: a copy of the module with other modules in the place of some norms (:func:`normscope.swap`), in
            float32.
        learn: batches to learn from, as :func:`normscope.capture` takes them; at most a gibibyte of them is kept in
            memory, and at most four of what the original gives for them. They may run the original when they are
            taken. None for a loaded model's calibration, and
        held_out: batches that report the drift, of other sources; None for its inputs. One without calibration learns
            from three fourths of its inputs.
        outputs: how to read what the networks return; by default as the loaded model says, or the first tensor.
        calibrated: whether to calibrate first. Only point-wise functions are: of a network that has none in its norms'
            places, an RMSNorm for example, training is all there is.
        train: ``all``, every weight but those of embeddings; ``neighbours``, the functions and the linear layers beside
            them, as :func:`normscope.calibrate` takes them; ``norms``, the functions alone, calibrated alone too.
        steps: of the training, each of one batch to learn from, or of several small ones; None for 1700.
        minutes: in place of steps: wall-clock time that all of it may take, calibration and measuring included; the
            clock is read before every step, and the learning rate follows the share of the time that has passed.
        seed: of the order of the batches.
        checkpoint: a safetensors file that is written a dozen times, and that the same call goes on from; None for
            none.
        asked: what else the checkpoint says of itself, as JSON takes it; a call that asks for something else does not
            go on from it.
        quality: a function of yours that says how well a network does what it is for, as :func:`normscope.drift` takes
            it: of the original, and of the swapped one with its start values and healed. None for what a loaded
            model's task says, on the held-out inputs.
        progress: called with the stage, what was done of it, and all of it.
        checked: called with each :class:`TrainingCheck`, a dozen times over the training.

    Returns:
        A :class:`HealReport`. Training flags, grad mode and RNG states are left as found. On a CPU with the same
        number of threads, the same call with a number of steps gives the same bits, interrupted or not.

    Raises:
        UsageError: if nothing was swapped, if one of ``learn`` and ``held_out`` is missing, if options contradict one
            another, if the network is in half precision, if the checkpoint is of another healing, or if ``quality``
            returns no number.
        DataError: if there are too few inputs, or the checkpoint is damaged.
        ModelError: if the network cannot be calibrated, as it calls its modules in an order that depends on its input.

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
    >>> _ = normscope.swap(swapped, "dyt", normscope.capture(network), sites="final")
    >>> heal(network, swapped, steps=1).n_held_out
    8
    """
    began = time.monotonic()
    if isinstance(original, LoadedModel) and learn is None and held_out is None:
        learn, held_out = divided(original.inputs, original.calibration)
    if learn is None or held_out is None:
        raise UsageError("Healing learns from some inputs and is judged by others: pass both, or a loaded model alone.")
    loaded = original
    module, learn, _, outputs = unpacked(original, learn, outputs=outputs)
    _, held_out, about, _ = unpacked(original, held_out)
    teacher, student = uncompiled(module), uncompiled(swapped)
    sites = swapped_sites(teacher, student)
    options = HealOptions(calibrated, train, STEPS if steps is None and minutes is None else steps, minutes, seed)
    _check(student)
    reported = list(held_out) if taken_once(held_out) else held_out
    judge = Judge.of(loaded, quality, reported, outputs, progress)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        check_asked(path, asked or {})
    for name, network in (("original", teacher), ("swapped", student)):
        judging = time.monotonic()
        judge.add(name, network)
    until = judging - time.monotonic() + (began + 60 * minutes if minutes else math.inf)
    batches, left_out = kept_in_memory(learn)
    stages = Stages(teacher, student, sites, outputs, batches, reported, options)
    with left_as_found(teacher), left_as_found(student):
        state = stages.run(path, asked or {}, until, progress, checked)
    judge.add("healed", student)
    pool = stages.pool
    n_learned, n_judged = (sum(len(batch.samples) for batch in part) for part in (pool.learned, pool.judged))
    return HealReport(
        state.drifts,
        state.left_with,
        state.checks,
        state.step,
        options.train,
        n_learned,
        n_judged,
        state.n_held_out,
        left_out,
        state.not_refitted,
        judge.quality,
        judge.untold,
        about,
        measure_of(outputs.kind),
    )


def swapped_sites(original: nn.Module, swapped: nn.Module) -> list[str]:
    """The outermost paths at which a network has another module than the original.

    Raises:
        UsageError: if there are none, or if they are the same module.
    """
    modules = dict(original.named_modules())
    sites: list[str] = []
    for name, module in swapped.named_modules():
        inside = any(name.startswith(f"{site}.") for site in sites)
        if not inside and (name not in modules or type(module) is not type(modules[name])):
            sites.append(name)
    if original is swapped or not sites:
        raise UsageError("Nothing was swapped: heal takes the original network and a copy of it with norms replaced.")
    return sites


def _check(student: nn.Module) -> None:
    for name, parameter in student.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"{name} is in {parameter.dtype}, in which small steps are lost; heal in float32 and convert then."
            )
        if parameter.is_meta:
            raise ModelError(f"{name} is on the meta device, which has no values to train.")
