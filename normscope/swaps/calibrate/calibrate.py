"""Calibration of a swapped network in closed form, and swap(), which can begin with it.

The layers beside a replaced norm can take over much of its effect. Modules are fitted in the order of calls, on inputs
from the network calibrated so far: each point-wise function to its norm, each linear layer to itself in the original.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normscope.curves.known import Curve
from normscope.errors import UsageError, count, unknown
from normscope.inputs.batch import Batch
from normscope.inputs.held_out import Pool
from normscope.inputs.loaded_model import LoadedModel, Outputs, module_of
from normscope.inputs.wrappers import named_modules
from normscope.norms.bound_inputs import unpacked
from normscope.norms.sites import Layers
from normscope.norms.trace import find_norms
from normscope.runtime.network import restoring, uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.runtime.records import Record
from normscope.runtime.spread import check_whole
from normscope.swaps.calibrate.neighbours import Neighbours, neighbours_of
from normscope.swaps.calibrate.refitting import CalibratedModule, Refitting, parameter_values, put_parameters
from normscope.swaps.distances import OutputErrors, measure_of, output_errors
from normscope.swaps.inits import CALIBRATED
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import Swap, replacements
from normscope.swaps.start import RMS_NORM, Fits

NORMS, NEIGHBOURS = "norms", "neighbours"
REFITS = (NORMS, NEIGHBOURS)
MOST_BYTES = 4 * 2**30  # of activations in waiting passes, which limits the number of inputs
_QUANTILES = torch.tensor([0.5, 0.9], dtype=torch.float64)


@dataclass(frozen=True, repr=False)
class CalibrationReport(Record):
    """Result of a calibration.

    Attributes:
        before: median error at the output with the start values, on the inputs that decide, which are not held out.
        after: median error on the same inputs after calibration; on held-out ones it is larger.
        restored: True if the network has its start values, as the median did not fall or the 90th percentile rose.
        modules: fitted modules, in the order of calls.
        left: reason why a linear layer beside a swapped norm was left as it is, by path.
        n_learned: number of samples to learn from.
        n_judged: number of samples that decided on λ, and on the state to keep.
        left_out: number of samples that did not fit into memory.
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
        errors = f"{self.before:.3g} → {self.after:.3g} on {count(self.n_judged, 'sample')} that decided, not held out"
        return f"CalibrationReport: {self.measure} {errors}, {len(self.modules)} modules"


def calibrate(
    original: nn.Module | LoadedModel,
    swapped: nn.Module,
    learn: Iterable[Any] | None = None,
    *,
    outputs: Outputs | None = None,
    refit: str = NEIGHBOURS,
    progress: Progress = silent,
) -> CalibrationReport:
    """Fit a swapped network to the original, in place and without gradients.

    Each input passes once through both networks, and pauses at each module until that is fitted. A point-wise function
    gets the α, s, weight and bias that fit its norm's output best (least squares). A linear layer gets weights by ridge
    regression towards its own. A fourth of the inputs decides on λ and on the state to keep. Functions get a weight
    and a bias for each channel. The target of a linear layer is

    - its output in the original;
    - if this is added to a residual stream, plus the error of the stream so far;
    - if it is added to the input of a replaced post-norm, the input whose linear part yields the norm's output.

    Args:
        original: the network: the result of :func:`normscope.load`, or any module; it does not change.
        swapped: a copy of the module with point-wise functions in place of some norms (:func:`normscope.swap`).
        learn: batches, as :func:`normscope.capture` takes them; None for a loaded model's calibration inputs or, if it
            has none, its inputs.
        outputs: how to read the networks' outputs; by default as the loaded model states, or the first tensor.
        refit: ``neighbours``, the functions and the linear layers beside swapped norms, with no other norm of the
            residual stream in between; or ``norms``, the functions alone.
        progress: called with the stage, the amount done and the total.

    Returns:
        A :class:`CalibrationReport`. The result is never worse than the start values on the inputs that decide.

    Raises:
        UsageError: if ``swapped`` contains no point-wise function.
        DataError: if there are fewer than two samples.
        ModelError: if the order in which the network calls its modules depends on its input.

    >>> import copy, torch, normscope
    >>> _ = torch.manual_seed(0)
    >>> original = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    >>> x = torch.randn(64, 8, 4)
    >>> swapped = copy.deepcopy(original)
    >>> _ = normscope.swap(swapped, "tanh", normscope.capture(original, list(x)))
    >>> report = calibrate(original, swapped, list(x))
    >>> report.after < report.before, [module.path for module in report.modules]
    (True, ['1', '2'])
    """
    if refit not in REFITS:
        raise UsageError(unknown("set of refitted weights", refit, REFITS))
    if isinstance(original, LoadedModel) and learn is None:
        learn = original.inputs if original.calibration is None else original.calibration
    module, learn, _, outputs = unpacked(original, learn, outputs=outputs)
    teacher, student = uncompiled(module), uncompiled(swapped)
    check_whole(teacher, "Calibration")
    functions = {path: f for path, f in named_modules(student) if isinstance(f, PointwiseFunction)}
    if teacher is student or not functions:
        raise UsageError("Nothing was swapped: calibrate takes the original and a copy of it with norms replaced.")
    for function in functions.values():
        function.expand_to_channels()
    pool = Pool.of(learn).by_length()
    first = pool.learned[0]
    sites = find_norms(teacher, first.first_sample()).sites
    near = neighbours_of(teacher, sites, list(functions), first)
    learned = _within_memory(pool, near)
    n_learned, n_judged = (sum(len(batch.samples) for batch in batches) for batches in (learned, pool.validation))
    left_out = pool.left_out + sum(len(batch.samples) for batch in pool.learned[len(learned) :])
    gigabytes = near.bytes_of([*learned, *pool.validation]) / 1e9
    samples = count(n_learned + n_judged, "sample")
    omitted = f", and {count(left_out, 'sample')} left out, as inputs and activations get no more" if left_out else ""
    progress(f"passes of {samples} wait at each module, in about {gigabytes:.2g} GB of memory{omitted} …", 0, 1)
    with restoring(teacher), restoring(student):
        errors = OutputErrors(teacher, pool.validation, outputs)

        def validation_error() -> tuple[float, float]:
            """Return median and 90th percentile of the error at the output."""
            median, high = errors.of(student).quantile(_QUANTILES, interpolation="higher").tolist()
            return median, high

        before, start = validation_error(), parameter_values(student)
        refitting = Refitting(
            teacher, student, {site.name: site for site in sites}, [*learned, *pool.validation], len(learned)
        )
        called_modules = [called for called in near.called_modules if called.is_norm or refit == NEIGHBOURS]
        refitting.run(called_modules, progress)
        states = [parameter_values(student)]
        last = max(number for number, called in enumerate(called_modules) if called.is_norm)
        if behind := tuple(f"{called.path}." for called in called_modules[last + 1 :]):
            # Layers behind the last norm may do better as they were, unless they do not reach the output (a pooler).
            first_errors = partial(output_errors, teacher, student, pool.validation[:1], outputs)
            fitted_error = first_errors()
            unfitted = {name: value for name, value in start.items() if name.startswith(behind)}
            put_parameters(student, unfitted)
            if not torch.equal(first_errors(), fitted_error):
                states.append({**states[0], **unfitted})
        best, after = start, before
        for state in states:
            put_parameters(student, state)
            error = validation_error()
            if error[0] < after[0] and error[1] <= before[1]:
                best, after = state, error
        put_parameters(student, best)
    counts = n_learned, n_judged, left_out
    measure, restored = measure_of(outputs.kind), best is start
    return CalibrationReport(before[0], after[0], restored, refitting.modules, near.left, *counts, measure)


def _within_memory(pool: Pool, near: Neighbours) -> Sequence[Batch]:
    """Return the batches to learn from whose passes can wait at once."""
    left = MOST_BYTES - near.bytes_of(pool.validation)
    for number, batch in enumerate(pool.learned):
        left -= near.bytes_of([batch])
        if left < 0 and number:
            return pool.learned[:number]
    return pool.learned


def swap(
    model: nn.Module | LoadedModel,
    curve: str | Curve,
    fits: Fits,
    *,
    layers: Layers = "all",
    init: str = "fit",
    learn: Iterable[Any] | None = None,
    refit: str = NEIGHBOURS,
    outputs: Outputs | None = None,
    progress: Progress = silent,
) -> Swap:
    """Replace each norm of a network by a point-wise function, in place.

    The function's weight is γ·A and its bias β, from the trained weight and bias of the norm. The norm's hooks move
    to it (see :class:`Swap`). Only ``init="calibrated"`` changes anything else: functions, and the linear layers beside
    them, are fitted to the network's outputs (see :func:`normscope.calibrate`).

    Args:
        model: the network that was captured, on any device: the result of :func:`normscope.load`, or any module.
        curve: ``dyt`` (tanh), ``dyisru`` (isru), ``derf`` (erf with shift), any other curve; ``free`` for E[y|x]
            itself, ``best`` for each site's best curve, ``identity`` (linear) for a straight line; or, not point-wise,
            ``rmsnorm`` for the norm without centring.
        fits: the result of :func:`normscope.fit`, one per site or channel; or the capture, which is then fitted, with
            weights γ² if it has them; for ``paper`` and ``rmsnorm``, norm sites.
        layers: a selection of norms, as of :func:`normscope.capture`, or placements (``"pre-norm"``, ``"final"``).
        init: ``fit``; ``theory``: A and α that follow from the norm, of a capture; ``paper``: A = 1, α = 0.5, s = 0,
            where the papers begin training; ``calibrated``: ``fit``, then calibration.
        learn: for ``calibrated``: batches to learn from, as :func:`normscope.capture` takes them; None for a loaded
            model's calibration inputs or, if it has none, its inputs.
        refit: for ``calibrated``: ``neighbours``, or ``norms`` for the functions alone.
        outputs: for ``calibrated``: how to read the network's output; by default as the loaded model states, or the
            first tensor.
        progress: for ``calibrated``: called with the stage, the amount done and the total.

    Returns:
        A :class:`Swap`: as a context manager it restores the network afterwards, refitted layers included.

    Raises:
        UsageError: if there is no such curve, site, init or fit; if there is nothing to learn from; or if an option of
            ``calibrated`` is passed with another init.
        ModelError: if the network does not have the sites, or a norm cannot be replaced.

    >>> import normscope
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> x = [torch.randn(64, 4, generator=torch.Generator().manual_seed(0))]
    >>> seen = normscope.capture(model, x)
    >>> with swap(model, "dyt", seen):
    ...     print(model[1])
    PointwiseFunction(tanh, 8)
    >>> with swap(model, "dyt", seen, init="calibrated", learn=x) as calibrated:
    ...     print([module.path for module in calibrated.calibration.modules])
    ['1', '2']
    """
    module = module_of(model)
    if init != CALIBRATED:
        check_not_calibrated(init, learn=learn is not None, refit=refit != NEIGHBOURS, outputs=outputs is not None)
        return Swap(module, replacements(model, curve, fits, layers=layers, init=init))
    if curve == RMS_NORM:
        raise UsageError(f"There is no calibrated start of {curve}: point-wise functions alone are calibrated.")
    if learn is None and not isinstance(model, LoadedModel):
        raise UsageError(
            f"init='calibrated' learns from inputs, and a {type(module).__name__} has none: pass batches as learn=."
        )
    start = replacements(model, curve, fits, layers=layers)
    modules, refitted, report = calibrated(model, start, learn, outputs=outputs, refit=refit, progress=progress)
    swapped = Swap(module, modules, refitted=refitted)
    swapped.calibration = report
    return swapped


def check_not_calibrated(init: str, **passed: bool) -> None:
    """Raise UsageError if an option of ``calibrated`` was passed with another init."""
    for name in [name for name, given in passed.items() if given]:
        raise UsageError(f"{name} requires init='calibrated'; with init={init!r} nothing is calibrated.")


def calibrated(
    model: nn.Module | LoadedModel, modules: Mapping[str, nn.Module], learn: Iterable[Any] | None, **options: Any
) -> tuple[dict[str, nn.Module], dict[str, Tensor], CalibrationReport]:
    """Calibrate a swap in a copy of the network; ``options`` are those of :func:`normscope.calibrate`.

    Returns:
        Modules by path, changed values of other parameters by name, and the report.
    """
    original = uncompiled(module_of(model))
    check_whole(original, "Calibration")
    student = copy.deepcopy(original)
    swapped = Swap(student, {path: copy.deepcopy(module) for path, module in modules.items()})
    report = calibrate(model, student, learn, **options)
    swapped.undo()
    now = dict(student.named_parameters())
    changed = {name: now[name].detach() for name, old in original.named_parameters() if not torch.equal(now[name], old)}
    return swapped.modules, changed, report
