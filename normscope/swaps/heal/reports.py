"""Reports of healing: how far training brought a swapped network back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from normscope.runtime.records import Record, Tabled, as_json
from normscope.swaps.drift.reports import Quality

START, CALIBRATED, TRAINED = "start", "calibrated", "trained"


@dataclass(frozen=True)
class TrainingCheck:
    """How far a training had come at one step.

    Attributes:
        step: how many steps were done.
        loss: mean training loss of the steps since the check before; None where it was not finite.
        drift: median error at the output, on the inputs that decide; None where it was not finite.
        kept: whether this state was kept: none before was as near, and the 90th percentile is not above the start's.
    """

    step: int
    loss: float | None
    drift: float | None
    kept: bool


@dataclass(frozen=True, repr=False)
class HealReport(Tabled, Record):
    """What a healing did: the error at the output against the original, in quantiles over samples.

    Attributes:
        drifts: on the held-out inputs, which nothing else has seen: ``p10``, ``median`` and ``p90`` at the ``start``
            and after each stage, ``calibrated`` and ``trained``; ∞ where outputs were not finite.
        left_with: the stage whose state the network was left with: that of the least held-out median, of those whose
            90th percentile is not above the start's.
        checks: the course of the training.
        steps: how many steps it took.
        train: which weights were trained: ``norms``, ``neighbours`` or ``all``.
        n_learned: samples that were learned from.
        n_judged: samples that decided which state is kept.
        n_held_out: samples that the drifts are of.
        left_out: samples to learn from that did not fit into memory.
        not_refitted: why a layer beside a swapped norm was not calibrated, by path.
        quality: how well the original does what it is for, and the swapped network with its start values and healed,
            on the held-out inputs; None where nothing tells.
        no_quality: why there is none; else empty.
        about: model, weights and data, which are the held-out inputs; empty of a module that is no loaded model.
        measure: of all errors: ``KL divergence`` of logits, in nats, the mean over a sample's positions; ``relative
            L2`` of other outputs.
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

    _properties: ClassVar[tuple[str, ...]] = ("restored",)

    def __repr__(self) -> str:
        return (
            f"HealReport: {self.measure} {self.before['median']:.3g} → {self.after['median']:.3g} in {self.steps} steps"
        )

    @property
    def restored(self) -> bool:
        """Whether the network was left with its start values, as nothing had lowered the held-out median."""
        return self.left_with == START

    @property
    def before(self) -> Mapping[str, float]:
        """Quantiles of the drift on the held-out inputs with the start values."""
        return self.drifts[START]

    @property
    def after(self) -> Mapping[str, float]:
        """The same, with what the network was left with."""
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
        """Return what JSON holds, with what is told of the network at its top level; a drift not finite is None."""
        document = super().as_dict()
        about, stages, checks = (document.pop(name) for name in ("about", "drifts", "checks"))
        del stages[START]
        of_all = {"before": self.before, "after": self.after, "closed": self.closed}
        return {**about, **as_json(of_all), "stages": stages, **document, "checks": checks}
