"""Healing: training a swapped network back towards the original's outputs; only steps that help are kept."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError, UsageError
from normscope.inputs.batch import Batch
from normscope.inputs.entries import as_batches, taken_once
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task, unpacked
from normscope.inputs.splits import divided
from normscope.runtime.network import left_as_found
from normscope.runtime.progress import Progress, silent
from normscope.swaps.calibrate.functions import least_squares
from normscope.swaps.heal.by_site import blocks_of, norm_pairs
from normscope.swaps.heal.lessons import Lesson, Pool, repeatable, tensor_bytes
from normscope.swaps.heal.reports import BLOCKS, SITES, START, WHOLE, HealReport
from normscope.swaps.heal.training import (
    Course,
    Stage,
    check_asked,
    load_checkpoint,
    restore,
    save_checkpoint,
    train,
)
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.quality.judge import Judge, QualityFunction
from normscope.swaps.replace import uncompiled

STEPS = 1700
_BLOCKS_ONE_IN = 10  # steps
_PASSES_A_STEP = 4  # forward: one of the original, and of the swapped one three, as gradients take twice the time
RATES = {BLOCKS: 1e-3, WHOLE: 1.5e-3}
_SHARES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


def heal(
    original: nn.Module | LoadedModel,
    swapped: nn.Module,
    learn: Iterable[Any] | None = None,
    held_out: Iterable[Any] | None = None,
    *,
    outputs: Outputs | None = None,
    steps: int = STEPS,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    asked: Mapping[str, Any] | None = None,
    quality: QualityFunction | Task | None = None,
    progress: Progress = silent,
) -> HealReport:
    """Train a swapped network, in place, until it gives what the original gives.

    In three stages: each site alone, by least squares on the original's inputs and outputs of that norm; the blocks
    that hold the sites, called as the original calls its own; end to end, on the output and those of the blocks. All
    weights are trained from the second stage on. A fourth of the inputs to learn from decides: a site's new values, or
    an interval of steps, are kept only if the median drift fell there. The held-out inputs only tell what came of it,
    and where their median did not fall either, the start values are what remains.

    Args:
        original: the network: what :func:`normscope.load` returned, or any module; it stays as it is.
        swapped: a copy of the module with other modules in the place of some norms (:func:`normscope.swap`), in
            float32.
        learn: batches to learn from, as :func:`normscope.capture` takes them; at most a gibibyte of them is kept in
            memory. They may run the original when they are taken. None for a loaded model's calibration, and
        held_out: batches that report the drift, of other sources; None for its inputs. One without calibration learns
            from three fourths of its inputs.
        outputs: how to read what the networks return; by default as the loaded model says, or the first tensor.
        steps: of the blocks, a tenth of them, and end to end. Each takes four batches.
        seed: of which batches each takes.
        checkpoint: a safetensors file that is written after every interval, and that the same call goes on from; None
            for none.
        asked: what else the checkpoint says of itself, as JSON takes it; a call that asks for something else does not
            go on from it.
        quality: a function of yours that says how well a network does what it is for, as :func:`normscope.drift` takes
            it: of the original, and of the swapped one with its start values and healed. None for what a loaded
            model's task says, on the held-out inputs.
        progress: called with the stage, what was done of it, and all of it.

    Returns:
        A :class:`HealReport`. Training flags, grad mode and RNG states are left as found. On a CPU with the same
        number of threads, the same call gives the same bits, interrupted or not.

    Raises:
        UsageError: if nothing was swapped, if one of ``learn`` and ``held_out`` is missing, if the network is in half
            precision, if the checkpoint is of another healing, or if ``quality`` returns no number.
        DataError: if there are too few inputs, or the checkpoint is damaged.

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
    if isinstance(original, LoadedModel) and learn is None and held_out is None:
        learn, held_out = divided(original.inputs, original.calibration)
    if learn is None or held_out is None:
        raise UsageError("Healing learns from some inputs and is judged by others: pass both, or a loaded model alone.")
    loaded = original
    module, learn, _, outputs = unpacked(original, learn, outputs=outputs)
    _, held_out, about, _ = unpacked(original, held_out)
    teacher, student = uncompiled(module), uncompiled(swapped)
    sites = swapped_sites(teacher, student)
    _check(student, steps)
    reported = list(held_out) if taken_once(held_out) else held_out
    judge = Judge.of(loaded, quality, reported, outputs, progress)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        check_asked(path, asked or {})
    for name, network in (("original", teacher), ("swapped", student)):
        judge.add(name, network)
    with left_as_found(teacher), left_as_found(student), _trainable(student) as parameters:
        pool = Pool.of(learn)
        blocks = repeatable(teacher, blocks_of(sites, teacher), pool.learned[0])
        lesson = Lesson(teacher, student, outputs, blocks)
        start = {name: value.detach().clone() for name, value in parameters.items()}
        settings = {
            "model": type(teacher).__name__,
            "sites": {name: repr(student.get_submodule(name)) for name in sites},
            "steps": steps,
            "seed": seed,
            "weights": _digest(teacher.state_dict()),
            "start values": _digest(student.state_dict()),
            "inputs": pool.digest,
        }

        def saved(course: Course) -> None:
            if path is not None:
                save_checkpoint(path, asked or {}, settings, course, parameters)

        course = load_checkpoint(path, settings, parameters) if path else None
        if course is None:
            course = _begun(lesson, pool, reported)
        if not course.done:
            _stages(lesson, sites, pool, reported, HealSettings(steps, seed), course, saved, progress)
        restored = not list(course.drifts.values())[-1]["median"] < course.drifts[START]["median"]
        if restored:
            restore(parameters, start)
        if not course.done:
            course.done, course.moments = True, {}
            saved(course)
    judge.add("healed", student)
    n_learned, n_judged = (sum(len(batch.samples) for batch in part) for part in (pool.learned, pool.judged))
    counts = (n_learned, n_judged, course.n_held_out, pool.left_out)
    return HealReport(course.drifts, restored, course.points, steps, *counts, judge.quality, judge.untold, about)


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


def passes_of_steps(steps: int) -> dict[str, int]:
    """Return how many forward passes of a step's batches the stages take as long as, where blocks hold the sites.

    >>> passes_of_steps(1700)
    {'blocks': 680, 'whole': 6120}
    """
    for_blocks = steps // _BLOCKS_ONE_IN
    return {BLOCKS: _PASSES_A_STEP * for_blocks, WHOLE: _PASSES_A_STEP * (steps - for_blocks)}


@dataclass(frozen=True)
class HealSettings:
    """The number of steps, and the seed that batches are drawn with."""

    steps: int
    seed: int


def _begun(lesson: Lesson, pool: Pool, reported: Iterable[Any]) -> Course:
    errors = lesson.errors(as_batches(reported))
    if not len(errors):
        raise DataError("There is no held-out batch to report the drift of.")
    return Course(_median(lesson, pool.judged), n_held_out=len(errors), drifts={START: _quantiles(errors)})


def _stages(
    lesson: Lesson,
    sites: Sequence[str],
    pool: Pool,
    reported: Iterable[Any],
    plan: HealSettings,
    course: Course,
    saved: Callable[[Course], None],
    progress: Progress,
) -> None:
    """Run the stages that are not done yet, and record the held-out drift after each."""
    parameters = dict(lesson.swapped.named_parameters())
    blocks = tuple(f"{block}." for block in lesson.blocks)
    within = {name: parameter for name, parameter in parameters.items() if name.startswith(blocks)}
    for_blocks = plan.steps // _BLOCKS_ONE_IN if within else 0

    def taught(stage: str, lessons: Callable[[list[Batch]], float]) -> Callable[[int], float]:
        return lambda step: lessons(pool.drawn(plan.seed, stage, step))

    by_blocks, whole = taught(BLOCKS, lesson.by_blocks), taught(WHOLE, lesson.whole)
    drift = functools.partial(_median, lesson, pool.judged)
    stages: dict[str, Callable[[], None]] = {SITES: lambda: _each_alone(lesson, sites, pool, course, drift, progress)}
    for stage in (
        Stage(BLOCKS, for_blocks, RATES[BLOCKS], within, by_blocks),
        Stage(WHOLE, plan.steps - for_blocks, RATES[WHOLE], parameters, whole),
    ):
        if stage.steps:
            stages[stage.name] = functools.partial(train, stage, course, drift, saved, progress)
    for name, run in stages.items():
        if name not in course.drifts:
            run()
            course.drifts[name] = _quantiles(lesson.errors(as_batches(reported)))
            saved(course)


def _each_alone(
    lesson: Lesson, sites: Sequence[str], pool: Pool, course: Course, drift: Callable[[], float], progress: Progress
) -> None:
    """Fit one site after the other to its norm, and keep the fit where the drift at the output fell."""
    course.enter(SITES)
    modules = {name: lesson.swapped.get_submodule(name) for name in sites}
    functions = {
        name: module
        for name, module in modules.items()
        if isinstance(module, PointwiseFunction) and not module.activated
    }
    pairs = norm_pairs(lesson.original, functions, pool.learned)
    for number, (name, (x, y)) in enumerate(pairs.items(), 1):
        parameters = dict(functions[name].named_parameters())
        before = {key: value.detach().clone() for key, value in parameters.items()}
        restore(parameters, least_squares(functions[name], x, y))
        course.step = number
        if not course.judge(drift(), None):
            restore(parameters, before)
        progress(SITES, number, len(pairs))


def _median(lesson: Lesson, batches: Sequence[Batch]) -> float:
    return _quantiles(lesson.errors(batches))["median"]


def _quantiles(errors: Tensor) -> dict[str, float]:
    # Between two samples there may be ∞ on one side, of which a line has no middle.
    at = "linear" if bool(errors.isfinite().all()) else "higher"
    return {name: float(errors.quantile(share, interpolation=at)) for name, share in _SHARES.items()}


@contextlib.contextmanager
def _trainable(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Yield all parameters with gradients on; ``requires_grad`` is put back afterwards."""
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.requires_grad_(True)
        yield dict(model.named_parameters())
    finally:
        for parameter, flag in wanted.items():
            parameter.requires_grad_(flag)
            parameter.grad = None


def _check(student: nn.Module, steps: int) -> None:
    if steps < 1:
        raise UsageError(f"steps is {steps}: it is a number of steps, at least 1.")
    for name, parameter in student.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"{name} is in {parameter.dtype}, in which small steps are lost; heal in float32 and convert then."
            )
        if parameter.is_meta:
            raise ModelError(f"{name} is on the meta device, which has no values to train.")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        content.update(name.encode())
        content.update(tensor_bytes(tensor))
    return content.hexdigest()
