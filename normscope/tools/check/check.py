"""Check whether a network's norms survive another arithmetic, another eps, or another function in their place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from normscope.errors import UsageError
from normscope.inputs.loaded_model import LoadedModel
from normscope.inputs.wrappers import unwrapped
from normscope.norms.bound_inputs import unpacked
from normscope.norms.sites import Layers
from normscope.pairs.capture import captured
from normscope.pairs.captures import Capture
from normscope.runtime.progress import Progress, silent
from normscope.tools.check.affine import gamma, mean
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.growth import growth, spikes
from normscope.tools.check.logits import logits
from normscope.tools.check.pointwise import pointwise
from normscope.tools.check.precision import bfloat16, epsilon, float16, fp8, int8
from normscope.tools.check.reports import Answer, CheckReport

QUESTIONS: tuple[Callable[[Evidence], Answer], ...] = (
    *(float16, bfloat16, int8, fp8, epsilon),
    *(mean, gamma, pointwise, logits, growth, spikes),
)


def check(
    model: nn.Module | LoadedModel | Capture,
    batches: Iterable[Any] | None = None,
    *,
    layers: Layers = "all",
    eps: float | None = None,
    about: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> CheckReport:
    """Answer whether a network's norms survive float16, int8, another eps, no mean, or a point-wise function.

    Args:
        model: a network, as of :func:`normscope.capture`; or a capture, for which questions about weights are omitted.
        batches: inputs; None for a loaded model's own.
        layers: sites to check, see :func:`normscope.norms.sites.select`.
        eps: an eps whose effect to report, beside 1e-5, 1e-6 and 1e-12.
        about: ``model``, ``weights`` and ``data`` in words, as of :func:`normscope.capture`.
        progress: as of :func:`normscope.capture`.

    Returns:
        A :class:`CheckReport`, with one answer per question.

    Raises:
        UsageError: if ``eps`` is negative or not finite; and, with DataError and ModelError, as
            :func:`normscope.capture`.

    >>> import normscope
    >>> report = check(normscope.load("demo_vit", limit=8))
    >>> report.about["model"]
    'demo_vit'
    """
    if eps is not None and not 0 <= eps < math.inf:
        raise UsageError(f"eps has to be a number of at least 0, not {eps}.")
    if isinstance(model, Capture):
        return check_capture(model.only(layers), eps=eps)
    seen = captured(model, batches, layers=layers, about=about, progress=progress)
    return check_capture(seen, model, batches, eps=eps)


def check_capture(
    capture: Capture,
    model: nn.Module | LoadedModel | None = None,
    batches: Iterable[Any] | None = None,
    *,
    eps: float | None = None,
) -> CheckReport:
    """Answer from a capture, and from the network that was captured and its batches, if they are there."""
    evidence = Evidence(capture, eps=eps)
    if model is not None:
        module, inputs, *_ = unpacked(model, batches)
        evidence = Evidence(capture, unwrapped(module), None if inputs.taken_once else inputs, eps)
    if any(evidence.norms()):
        return CheckReport([question(evidence) for question in QUESTIONS], capture.about)
    sentence = f"there is no norm with pairs{evidence.left_out((), '')}"
    return CheckReport([Answer("norms", "omitted", sentence)], capture.about)
