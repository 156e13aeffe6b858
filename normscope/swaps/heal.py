"""Healing: train a swapped network back towards the original's outputs, in steps that are kept only if they helped."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch, as_batches
from normscope.errors import DataError, ModelError, UsageError
from normscope.healings import BLOCKS, SITES, START, WHOLE, HealReport
from normscope.outputs import Outputs
from normscope.pairs.state import left_as_found
from normscope.swaps.alone import blocks_of, least_squares, norm_pairs
from normscope.swaps.checkpoints import load_checkpoint, save_checkpoint
from normscope.swaps.course import Course, Progress, Stage, restore, train
from normscope.swaps.matching import output_errors
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.pool import Pool, tensor_bytes
from normscope.swaps.replace import uncompiled
from normscope.swaps.teaching import Lesson, repeatable

STEPS = 900
_BLOCKS_ONE_IN = 6  # steps
RATES = {BLOCKS: 1e-3, WHOLE: 1.5e-3}
_SHARES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


def heal(
    original: nn.Module,
    swapped: nn.Module,
    learn: Iterable[Any],
    held_out: Iterable[Any],
    *,
    outputs: Outputs | None = None,
    steps: int = STEPS,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> HealReport:
    """Train a swapped network, in place, until it gives what the original gives.

    In three stages: each site alone, by least squares on the original's inputs and outputs of that norm; the blocks
    that hold the sites, called as the original calls its own; end to end, on the output and those of the blocks. All
    weights are trained from the second stage on. A fourth of the inputs to learn from decides: a site's new values, or
    an interval of steps, are kept only if the median drift fell there. The held-out inputs only tell what came of it,
    and where their median did not fall either, the start values are what remains.

    Args:
        original: the network; it stays as it is.
        swapped: a copy of it with other modules in the place of some norms (:func:`normscope.swap`), in float32.
        learn: batches to learn from, as :func:`normscope.capture` takes them; at most a gibibyte of them is kept in
            memory. They may run the original when they are taken.
        held_out: batches that report the drift, of other sources.
        outputs: how to read what the networks return; by default the first tensor.
        steps: of the blocks, a sixth of them, and end to end. Each takes four batches.
        seed: of which batches each takes.
        checkpoint: a safetensors file that is written after every interval, and that the same call goes on from; None
            for none.
        progress: called with the stage, what was done of it, and all of it.

    Returns:
        A :class:`HealReport`. Training flags, grad mode and RNG states are left as found. On a CPU with the same
        number of threads, the same call gives the same bits, interrupted or not.

    Raises:
        UsageError: if nothing was swapped, if the network is in half precision, or if the checkpoint is of another
            healing.
        DataError: if there are too few inputs, or the checkpoint is damaged.

    >>> import copy, normscope
    >>> original = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    >>> x = torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(0))
    >>> swapped = copy.deepcopy(original)
    >>> _ = normscope.swap(swapped, "tanh", normscope.capture(original, list(x[:32])))
    >>> report = heal(original, swapped, list(x[:32]), list(x[32:]), steps=40)
    >>> report.after["median"] <= report.before["median"]
    True
    """
    outputs = outputs or Outputs()
    teacher, student = uncompiled(original), uncompiled(swapped)
    sites = swapped_sites(teacher, student)
    _check(student, steps)
    with left_as_found(teacher), left_as_found(student):
        pool, reported = Pool.of(learn), list(as_batches(held_out))
        if not reported:
            raise DataError("There is no held-out batch to report the drift of.")
        parameters = dict(student.named_parameters())
        start = {name: value.detach().clone() for name, value in parameters.items()}
        path = None if checkpoint is None else Path(checkpoint)
        settings = {
            "model": type(teacher).__name__,
            "sites": {name: repr(student.get_submodule(name)) for name in sites},
            "steps": steps,
            "seed": seed,
            "weights": _digest(teacher.state_dict()),
            "start values": _digest(student.state_dict()),
            "inputs": pool.digest,
        }
        course = load_checkpoint(path, settings, parameters) if path else None
        told = functools.partial(_quantiles, teacher, student, reported, outputs)
        if course is None:
            course = Course(_median(teacher, student, pool.judged, outputs), drifts={START: told()})

        def saved(course: Course) -> None:
            if path is not None:
                save_checkpoint(path, settings, course, parameters)

        if not course.done:
            with _trainable(student):
                _stages(teacher, student, sites, pool, outputs, steps, seed, course, told, saved, progress)
        after = list(course.drifts.values())[-1]
        restored = not after["median"] < course.drifts[START]["median"]
        if restored:
            restore(parameters, start)
        if not course.done:
            course.done, course.moments = True, {}
            saved(course)
    n_learned, n_judged, n_held_out = (
        sum(len(batch.samples) for batch in part) for part in (pool.learned, pool.judged, reported)
    )
    return HealReport(course.drifts, restored, course.points, steps, n_learned, n_judged, n_held_out, pool.left_out)


def swapped_sites(original: nn.Module, swapped: nn.Module) -> list[str]:
    """Return the paths at which a network has another module than the original, and not for a part of it alone.

    Raises:
        UsageError: if there are none, or if they are the same module.
    """
    own = dict(original.named_modules())
    sites: list[str] = []
    for name, module in swapped.named_modules():
        inside = any(name.startswith(f"{site}.") for site in sites)
        if not inside and (name not in own or type(module) is not type(own[name])):
            sites.append(name)
    if original is swapped or not sites:
        raise UsageError("Nothing was swapped: heal takes the original network and a copy of it with norms replaced.")
    return sites


def _stages(
    teacher: nn.Module,
    student: nn.Module,
    sites: Sequence[str],
    pool: Pool,
    outputs: Outputs,
    steps: int,
    seed: int,
    course: Course,
    told: Callable[[], dict[str, float]],
    saved: Callable[[Course], None],
    progress: Progress | None,
) -> None:
    progress = progress or (lambda *_: None)
    drift = functools.partial(_median, teacher, student, pool.judged, outputs)
    parameters = dict(student.named_parameters())
    blocks = repeatable(teacher, blocks_of(sites, teacher), pool.learned[0])
    lesson = Lesson(teacher, student, outputs, blocks)
    within = {name: own for name, own in parameters.items() if any(name.startswith(f"{block}.") for block in blocks)}
    for_blocks = steps // _BLOCKS_ONE_IN if blocks else 0
    trained = [
        Stage(BLOCKS, for_blocks, RATES[BLOCKS], within, lambda n: lesson.by_blocks(pool.drawn(seed, BLOCKS, n))),
        Stage(WHOLE, steps - for_blocks, RATES[WHOLE], parameters, lambda n: lesson.whole(pool.drawn(seed, WHOLE, n))),
    ]
    if SITES not in course.drifts:
        _each_alone(teacher, student, sites, pool, course, drift, progress)
        course.drifts[SITES] = told()
        saved(course)
    for stage in trained:
        if stage.name not in course.drifts and stage.steps:
            train(stage, course, drift, saved, progress)
            course.drifts[stage.name] = told()
            saved(course)


def _each_alone(
    teacher: nn.Module,
    student: nn.Module,
    sites: Sequence[str],
    pool: Pool,
    course: Course,
    drift: Callable[[], float],
    progress: Progress,
) -> None:
    """Give one site after the other what fits its norm best, and keep it where the drift at the output fell."""
    course.enter(SITES)
    modules = {name: student.get_submodule(name) for name in sites}
    functions = {
        name: module
        for name, module in modules.items()
        if isinstance(module, PointwiseFunction) and module.activation is None
    }
    pairs = norm_pairs(teacher, functions, pool.learned)
    for number, (name, (x, y)) in enumerate(pairs.items(), 1):
        own = dict(functions[name].named_parameters())
        before = {key: value.detach().clone() for key, value in own.items()}
        restore(own, least_squares(functions[name], x, y))
        course.step = number
        if not course.judge(drift(), None):
            restore(own, before)
        progress(SITES, number, len(pairs))


def _median(teacher: nn.Module, student: nn.Module, batches: Sequence[Batch], outputs: Outputs) -> float:
    return _quantiles(teacher, student, batches, outputs)["median"]


def _quantiles(teacher: nn.Module, student: nn.Module, batches: Sequence[Batch], outputs: Outputs) -> dict[str, float]:
    errors = output_errors(teacher, student, batches, outputs)
    # Between two samples there may be ∞ on one side, of which a line has no middle.
    at = "linear" if bool(errors.isfinite().all()) else "higher"
    return {name: float(errors.quantile(share, interpolation=at)) for name, share in _SHARES.items()}


@contextlib.contextmanager
def _trainable(model: nn.Module) -> Iterator[None]:
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.requires_grad_(True)
        yield
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
