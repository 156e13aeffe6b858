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
from normscope.tools.check.epsilon import epsilon
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.growth import growth, spikes
from normscope.tools.check.logits import logits
from normscope.tools.check.pointwise import pointwise
from normscope.tools.check.precision import bfloat16, float16
from normscope.tools.check.quantization import fp8, int8
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
    _check_eps(eps)
    if isinstance(model, Capture):
        return _answers(Evidence(model.only(layers), eps=eps))
    module, bound, described, _ = unpacked(model, batches, about)
    seen = captured(module, bound, layers=layers, about=described, progress=progress)
    return _answers(Evidence.of(seen, unwrapped(module), eps=eps, batches=bound))


def check_capture(capture: Capture, network: LoadedModel | None = None, *, eps: float | None = None) -> CheckReport:
    """Answer from a capture, and from the loaded model that was captured, if it is there."""
    _check_eps(eps)
    if network is None:
        return _answers(Evidence(capture, eps=eps))
    module, bound, *_ = unpacked(network, None)
    return _answers(Evidence.of(capture, unwrapped(module), eps=eps, batches=bound))


def _check_eps(eps: float | None) -> None:
    if eps is not None and not 0 <= eps < math.inf:
        raise UsageError(f"eps has to be a number of at least 0, not {eps}.")


def _answers(evidence: Evidence) -> CheckReport:
    """Answer all questions from the same evidence."""
    if any(evidence.norms()):
        return CheckReport([question(evidence) for question in QUESTIONS], evidence.capture.about)
    sentence = f"there is no norm with pairs{evidence.left_out((), '')}"
    return CheckReport([Answer("norms", "omitted", sentence)], evidence.capture.about)
