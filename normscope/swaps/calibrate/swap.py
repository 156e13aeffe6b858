"""swap(): put point-wise functions in the place of a network's norms, with start values or calibrated."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.fits.curves.known import Curve
from normscope.inputs.loaded_model import LoadedModel, Outputs, module_of
from normscope.pairs.norms.sites import Layers
from normscope.runtime.network import copied, uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.swaps.calibrate.calibrate import NEIGHBOURS, CalibrationReport, calibrate
from normscope.swaps.inits import CALIBRATED
from normscope.swaps.replace import Swap, replacements
from normscope.swaps.start import RMS_NORM, Fits


def swap(
    model: nn.Module | LoadedModel,
    curve: str | Curve,
    fits: Fits,
    *,
    sites: Layers = "all",
    init: str = "fit",
    learn: Iterable[Any] | None = None,
    refit: str = NEIGHBOURS,
    outputs: Outputs | None = None,
    progress: Progress = silent,
) -> Swap:
    """Put one point-wise function in the place of each norm of a network, in place.

    The trained weight and bias of each norm are kept: the function's weight is γ·A and its bias β. Hooks of a norm
    hear what stands in its place, see :class:`Swap`. Nothing else is touched but where ``init`` is ``calibrated``: then
    functions, and the linear layers beside them, are fitted to what the network gave, see :func:`normscope.calibrate`.

    Args:
        model: the network that was captured, on any device: what :func:`normscope.load` returned, or any module.
        curve: ``dyt`` (tanh), ``dyisru`` (isru), ``derf`` (erf with shift), any other curve; ``free`` for E[y|x]
            itself, ``best`` for each site's best curve, ``identity`` (linear) for a straight line, or ``rmsnorm`` for
            the norm without centring.
        fits: what :func:`normscope.fit` made of the network's capture, one a site or one a channel; the capture itself,
            which is then fitted with s, and with the weights γ² where it was taken ``by_gamma``; or norm sites alone
            for ``paper`` and ``rmsnorm``, which need no fit.
        sites: which of them: as ``layers`` of :func:`normscope.capture`, and placements (``"pre-norm"``, ``"final"``).
        init: ``fit``; ``theory``: A and α as they follow from the norm, of a capture; ``paper``: A = 1, α = 0.5, s = 0,
            which the papers begin training with; ``calibrated``: ``fit``, and from there all that can be had without a
            gradient.
        learn: of ``calibrated``: batches to learn from, as :func:`normscope.capture` takes them; None for a loaded
            model's calibration, or where it has none its inputs.
        refit: of ``calibrated``: ``neighbours``, or ``norms`` for the functions alone.
        outputs: of ``calibrated``: how to read what the network returns; by default as the loaded model says, or the
            first tensor.
        progress: of ``calibrated``: called with the stage, what was done of it, and all of it.

    Returns:
        A :class:`Swap`: use it in a ``with`` statement to have the network back afterwards, refitted layers too.

    Raises:
        UsageError: if there is no such curve, site, init or fit; if there is nothing to learn from, or what only a
            calibration takes was passed without one.
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
        given = {"learn": learn is not None, "refit": refit != NEIGHBOURS, "outputs": outputs is not None}
        if names := [name for name, there in given.items() if there]:
            raise UsageError(f"With init={init!r} nothing is calibrated: {names[0]} goes with init='calibrated' alone.")
        return Swap(module, replacements(model, curve, fits, sites=sites, init=init))
    if curve == RMS_NORM:
        raise UsageError("There is no calibrated start of rmsnorm: point-wise functions alone are calibrated.")
    if learn is None and not isinstance(model, LoadedModel):
        raise UsageError(
            f"init='calibrated' learns from inputs, and a {type(module).__name__} brings none: pass learn=, batches as "
            "normscope.capture takes them, or swap in what normscope.load returned."
        )
    start = replacements(model, curve, fits, sites=sites)
    modules, refitted, report = calibrated(model, start, learn, outputs=outputs, refit=refit, progress=progress)
    swapped = Swap(module, modules, refitted=refitted)
    swapped.calibration = report
    return swapped


def calibrated(
    model: nn.Module | LoadedModel,
    modules: Mapping[str, nn.Module],
    learn: Iterable[Any] | None,
    *,
    outputs: Outputs | None,
    refit: str,
    progress: Progress,
) -> tuple[dict[str, nn.Module], dict[str, Tensor], CalibrationReport]:
    """Calibrate a swap in a copy of the network; see :func:`normscope.calibrate`.

    Returns:
        Modules by path, the values of other parameters by name, and the report.
    """
    original = uncompiled(module_of(model))
    student = copied(original)
    swapped = Swap(student, {path: copy.deepcopy(module) for path, module in modules.items()})
    report = calibrate(model, student, learn, outputs=outputs, refit=refit, progress=progress)
    swapped.undo()
    now = dict(student.named_parameters())
    changed = {name: now[name].detach() for name, old in original.named_parameters() if not torch.equal(now[name], old)}
    return swapped.modules, changed, report
