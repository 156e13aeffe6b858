"""Report of a healing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from normscope.runtime.records import as_json
from normscope.swaps.reports import AboutNetwork, Quality

START, CALIBRATED, TRAINED = "start", "calibrated", "trained"


@dataclass(frozen=True)
class TrainingCheck:
    """State of a training at one step.

    Attributes:
        step: number of steps done.
        loss: mean training loss since the check before; None if it was not finite.
        drift: median error at the output, on the inputs that decide; None if it was not finite.
        kept: True if this state is the best so far, and its 90th percentile is not above the start's.
    """

    step: int
    loss: float | None
    drift: float | None
    kept: bool


@dataclass(frozen=True, repr=False)
class HealReport(AboutNetwork):
    """Result of a healing: the error at the output against the original, in quantiles over samples.

    Attributes:
        drifts: ``p10``, ``median`` and ``p90`` on the held-out inputs, at the ``start`` and after each stage,
            ``calibrated`` and ``trained``; ∞ for outputs that were not finite. ``trained`` is the best state of the
            training; if no check was ``kept``, that is the state before the first step.
        left_with: stage that the network is in: the least median on the inputs that decide, whose 90th percentile is
            not above the start's. The held-out drifts have no part in it.
        checks: the course of the training.
        steps: number of training steps.
        train: trained weights: ``norms``, ``neighbours`` or ``all``.
        n_learned: number of samples to learn from.
        n_judged: number of samples that decided which state is kept.
        n_held_out: number of held-out samples.
        left_out: number of samples to learn from that did not fit into memory.
        not_refitted: reason why a layer beside a swapped norm was not calibrated, by path.
        quality: quality at the network's task of ``original``, ``swapped`` and ``healed``, on the held-out inputs.
        no_quality: reason why there is none.
        about: model, weights and held-out data; empty for a plain module.
        measure: of all errors: ``KL divergence`` of logits, in nats, or ``relative L2`` of other outputs.
        before_training: median error on the inputs that decide, before the first step; None if it was not finite.
    """

    drifts: Mapping[str, Mapping[str, float]]
    left_with: str
    checks: Sequence[TrainingCheck]
    steps: int
    train: str
    n_learned: int
    n_judged: int
    n_held_out: int
    left_out: int
    not_refitted: Mapping[str, str] = field(default_factory=dict)
    quality: Quality | None = None
    no_quality: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    measure: str = "relative L2"
    before_training: float | None = None

    _properties: ClassVar[tuple[str, ...]] = ("restored",)

    def __repr__(self) -> str:
        return (
            f"HealReport: {self.measure} {self.before['median']:.3g} → {self.after['median']:.3g} in {self.steps} steps"
        )

    @property
    def restored(self) -> bool:
        """True if the network has its start values, because no state was better on the inputs that decide."""
        return self.left_with == START

    @property
    def training_kept(self) -> bool:
        """True if a state of the training was kept; otherwise ``trained`` in the drifts is the state before it."""
        return any(check.kept for check in self.checks)

    @property
    def before(self) -> Mapping[str, float]:
        """Quantiles of the drift on the held-out inputs with the start values."""
        return self.drifts[START]

    @property
    def after(self) -> Mapping[str, float]:
        """Quantiles of the drift on the held-out inputs at the stage that the network was left in."""
        return self.drifts[self.left_with]

    @property
    def closed(self) -> float:
        """Share of the median drift that is gone.

        >>> drifts = {"start": {"median": 0.5}, "trained": {"median": 0.1}}
        >>> HealReport(drifts, "trained", [], 1, "all", 1, 1, 1, 0).closed
        0.8
        """
        return self.closed_after(self.left_with)

    def closed_after(self, stage: str) -> float:
        """Share of the median drift that was gone after a stage."""
        left, start = self.drifts[stage]["median"], self.before["median"]
        if not math.isfinite(start):
            return 1.0 if math.isfinite(left) else 0.0
        return 1 - left / start if start else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON, with the description of the network at its top level."""
        document = super().as_dict()
        stages = document.pop("drifts")
        del stages[START]
        summary = {"before": self.before, "after": self.after, "closed": self.closed}
        return {**document, **as_json(summary), "stages": stages}
