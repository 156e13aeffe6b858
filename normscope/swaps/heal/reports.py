"""Reports of healing: how far training brought a swapped network back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from normscope.runtime.records import Record, Tabled, as_json
from normscope.swaps.drift.reports import Quality

START, SITES, BLOCKS, WHOLE = "start", "sites", "blocks", "whole"


@dataclass(frozen=True)
class TrainingInterval:
    """One interval of a training.

    Attributes:
        stage: ``sites``, ``blocks`` or ``whole``.
        step: steps of the stage by its end; of ``sites`` the number of sites tried.
        loss: mean training loss over its steps; of ``sites``, or where it was not finite, None.
        drift: median relative L2 at the output by its end, on the inputs that decide; None where it was not finite.
        kept: whether the drift fell, so that the steps were kept.
    """

    stage: str
    step: int
    loss: float | None
    drift: float | None
    kept: bool


@dataclass(frozen=True, repr=False)
class HealReport(Tabled, Record):
    """What a healing did: relative L2 at the output against the original, in quantiles over samples.

    Attributes:
        drifts: on the held-out inputs, which nothing else has seen: ``p10``, ``median`` and ``p90`` at the ``start``
            and after each stage, ``sites``, ``blocks``, ``whole``; ∞ where outputs were not finite.
        restored: whether the network was left with its start values, as training had not lowered the held-out median.
        points: the course: every interval of steps, and whether it was kept.
        steps: the steps asked for.
        n_learned: samples that were learned from.
        n_judged: samples that decided which steps are kept.
        n_held_out: samples that the drifts are of.
        left_out: samples to learn from that did not fit into memory.
        quality: how well the original does what it is for, and the swapped network with its start values and healed,
            on the held-out inputs; None where nothing tells.
        no_quality: why there is none; else empty.
        about: model, weights and data, which are the held-out inputs; empty of a module that is no loaded model.
    """

    drifts: Mapping[str, Mapping[str, float]]
    restored: bool
    points: Sequence[TrainingInterval]
    steps: int
    n_learned: int
    n_judged: int
    n_held_out: int
    left_out: int
    quality: Quality | None = None
    no_quality: str = ""
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"HealReport: relative L2 {self.before['median']:.3g} → {self.after['median']:.3g} in {self.steps} steps"

    @property
    def before(self) -> Mapping[str, float]:
        """Quantiles of the drift on the held-out inputs with the start values."""
        return self.drifts[START]

    @property
    def after(self) -> Mapping[str, float]:
        """The same, with what the network was left with."""
        return self.before if self.restored else self.drifts[list(self.drifts)[-1]]

    @property
    def closed(self) -> float:
        """Share of the median drift that is gone.

        >>> report = HealReport({"start": {"median": 0.5}, "whole": {"median": 0.1}}, False, [], 1, 1, 1, 1, 0)
        >>> report.closed
        0.8
        """
        return self.closed_after(None)

    def closed_after(self, stage: str | None) -> float:
        """Share of the median drift that was gone after a stage; None for what the network was left with."""
        left = (self.after if stage is None else self.drifts[stage])["median"]
        start = self.before["median"]
        if not math.isfinite(start):
            return 1.0 if math.isfinite(left) else 0.0
        return 1 - left / start if start else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds, with what is told of the network at its top level; a drift not finite is None."""
        document = super().as_dict()
        about, stages, points = (document.pop(name) for name in ("about", "drifts", "points"))
        del stages[START]
        of_all = {"before": self.before, "after": self.after, "closed": self.closed, "restored": self.restored}
        return {**about, **as_json(of_all), "stages": stages, **document, "points": points}
