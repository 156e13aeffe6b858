"""Calibration: a swapped network brought to what the original gives, in closed form and in one pass over the inputs.

Without gradients: where a norm stood, the layers beside it can take over much of what it did. Module by module, in the
order of calls and on the inputs that the network calibrated so far gives, each point-wise function is fitted to what
its norm gave, and each linear layer to what it gave in the original network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from normscope.errors import UsageError, count, unknown
from normscope.inputs.batch import Batch
from normscope.inputs.held_out import Pool
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.norms.trace import find_norms
from normscope.runtime.network import left_as_found, uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.runtime.records import Record
from normscope.swaps.calibrate.neighbours import Neighbours, neighbours_of
from normscope.swaps.calibrate.refitting import CalibratedModule, Refitting, put_parameters
from normscope.swaps.distances import OutputErrors, measure_of, output_errors
from normscope.swaps.pointwise import PointwiseFunction

NORMS, NEIGHBOURS = "norms", "neighbours"
REFITS = (NORMS, NEIGHBOURS)
# Of activations that all waiting passes hold at once; their number of inputs is cut to it.
MOST_BYTES = 4 * 2**30
_QUANTILES = torch.tensor([0.5, 0.9], dtype=torch.float64)


@dataclass(frozen=True, repr=False)
class CalibrationReport(Record):
    """Result of a calibration.

    Attributes:
        before: median error at the output with the start values, on the inputs that decide.
        after: the same after it.
        restored: whether the network was left with its start values, as the median had not fallen, or the 90th
            percentile had risen.
        modules: what was fitted, in the order of calls.
        left: why a linear layer beside a swapped norm was left as it is, by path.
        n_learned: samples that were learned from.
        n_judged: samples that decided on λ, and on what is kept.
        left_out: samples that did not fit into memory.
        measure: of the errors: ``KL divergence`` of logits, ``relative L2`` of other outputs.
    """

    before: float
    after: float
    restored: bool
    modules: Sequence[CalibratedModule]
    left: Mapping[str, str]
    n_learned: int
    n_judged: int
    left_out: int
    measure: str

    def __repr__(self) -> str:
        return f"CalibrationReport: {self.measure} {self.before:.3g} → {self.after:.3g}, {len(self.modules)} modules"


def calibrate(
    original: nn.Module | LoadedModel,
    swapped: nn.Module,
    learn: Iterable[Any] | None = None,
    *,
    outputs: Outputs | None = None,
    refit: str = NEIGHBOURS,
    progress: Progress = silent,
) -> CalibrationReport:
    """Fit a swapped network, in place and without gradients, to what the original gives.

    Each input passes once through both networks, and waits at each module until the module is fitted. A point-wise
    function gets the α, s, weight and bias with which it comes nearest to what its norm gave (least squares). A linear
    layer gets the weights, by ridge regression towards its own, with which it gives what it gave in the original; where
    its output is added to a residual stream, also what the stream has come to lack; where it is added to what a
    post-norm takes and a function stands there, what that function's straight part makes the norm's output of. A fourth
    of the inputs decides on λ and on what is kept. Functions without a weight and a bias for each channel get them.

    Args:
        original: the network: what :func:`normscope.load` returned, or any module; it stays as it is.
        swapped: a copy of the module with point-wise functions in the place of some norms (:func:`normscope.swap`).
        learn: batches, as :func:`normscope.capture` takes them; None for a loaded model's calibration, or where it has
            none its inputs.
        outputs: how to read what the networks return; by default as the loaded model says, or the first tensor.
        refit: ``neighbours``, the functions and the linear layers beside the swapped norms: those between which and a
            swapped norm no other norm of the residual stream is called; ``norms``, the functions alone.
        progress: called with the stage, what was done of it, and all of it.

    Returns:
        A :class:`CalibrationReport`. The result is never worse than the start values on the inputs that decide.

    Raises:
        UsageError: if no point-wise function stands in ``swapped``.
        DataError: if there are fewer than two samples.
        ModelError: if the order in which the network calls its modules depends on its input.

    >>> import copy, torch, normscope
    >>> original = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    >>> x = torch.randn(64, 8, 4, generator=torch.Generator().manual_seed(0))
    >>> swapped = copy.deepcopy(original)
    >>> _ = normscope.swap(swapped, "tanh", normscope.capture(original, list(x)))
    >>> report = calibrate(original, swapped, list(x))
    >>> report.after < report.before, [module.path for module in report.modules]
    (True, ['1', '2'])
    """
    if refit not in REFITS:
        raise UsageError(unknown("refit", refit, REFITS))
    if isinstance(original, LoadedModel) and learn is None:
        learn = original.inputs if original.calibration is None else original.calibration
    module, learn, _, outputs = unpacked(original, learn, outputs=outputs)
    teacher, student = uncompiled(module), uncompiled(swapped)
    functions = {path: f for path, f in student.named_modules() if isinstance(f, PointwiseFunction)}
    if teacher is student or not functions:
        raise UsageError("Nothing was swapped: calibrate takes the original and a copy of it with norms replaced.")
    for function in functions.values():
        function.give_each_channel_its_own()
    pool = Pool.of(learn).by_length()
    first = pool.learned[0]
    sites = find_norms(teacher, first.first_sample()).sites
    near = neighbours_of(teacher, sites, list(functions), first)
    learned = _that_fit(pool, near)
    n_learned, n_judged = (sum(len(batch.samples) for batch in batches) for batches in (learned, pool.judged))
    left_out = pool.left_out + sum(len(batch.samples) for batch in pool.learned[len(learned) :])
    progress(_about_memory(near.bytes_of([*learned, *pool.judged]), n_learned + n_judged, left_out), 0, 1)
    with left_as_found(teacher), left_as_found(student):
        errors = OutputErrors(teacher, pool.judged, outputs)

        def judged() -> tuple[float, float]:
            """Return median and 90th percentile of the error at the output; ∞ for what is not finite."""
            median, high = errors.of(student).quantile(_QUANTILES, interpolation="higher").tolist()
            return median, high

        before, start = judged(), {name: value.detach().clone() for name, value in student.named_parameters()}
        refitting = Refitting(teacher, student, sites, [*learned, *pool.judged], len(learned))
        called_modules = [called for called in near.called_modules if called.is_norm or refit == NEIGHBOURS]
        refitting.run(called_modules, progress)
        fitted = {name: value.detach().clone() for name, value in student.named_parameters()}
        last = max(number for number, called in enumerate(called_modules) if called.is_norm)
        behind = tuple(f"{called.path}." for called in called_modules[last + 1 :])
        states = [fitted]
        if behind:
            as_they_were = {name: value for name, value in start.items() if name.startswith(behind)}
            of_first = partial(output_errors, teacher, student, pool.judged[:1], outputs)
            error_of_fitted = of_first()
            put_parameters(student, as_they_were)
            if not torch.equal(of_first(), error_of_fitted):  # else they do not reach the output, like a pooler
                states.append({**fitted, **as_they_were})
        best, after = start, before
        for state in states:
            put_parameters(student, state)
            error = judged()
            if error[0] < after[0] and error[1] <= before[1]:
                best, after = state, error
        put_parameters(student, best)
    measure, restored = measure_of(outputs.kind), best is start
    counts = n_learned, n_judged, left_out
    return CalibrationReport(before[0], after[0], restored, refitting.modules, near.left, *counts, measure)


def _about_memory(size: int, samples: int, left_out: int) -> str:
    """Name the stage of one step that reports, in advance, the memory that waiting passes need."""
    gigabytes = f"{size / 1e9:.2g} GB of memory"
    rest = f", and {count(left_out, 'sample')} left out, as inputs and activations get no more" if left_out else ""
    return f"passes of {count(samples, 'sample')} wait at each module, in about {gigabytes}{rest} …"


def _that_fit(pool: Pool, near: Neighbours) -> Sequence[Batch]:
    """Return the batches to learn from whose passes can wait at once."""
    left = MOST_BYTES - near.bytes_of(pool.judged)
    for number, batch in enumerate(pool.learned):
        left -= near.bytes_of([batch])
        if left < 0 and number:
            return pool.learned[:number]
    return pool.learned
