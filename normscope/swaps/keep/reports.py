"""The report of what to keep: norms put back one after another, and what each was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from normscope.errors import count
from normscope.runtime.records import Record, Tabled
from normscope.swaps.drift.reports import Quality, Quantiles


@dataclass(frozen=True)
class KeepStep(Record):
    """The network once one norm more is back in its place, all others of the chosen sites swapped.

    Attributes:
        site: the norm that came back in this step; None of the first, with all sites swapped.
        kept: how many norms are back.
        swapped: how many sites are swapped.
        error: at the output, over the inputs that the choice was made on.
        held_out: the same over held-out inputs; None where there were none, and of steps that were not taken.
        worked_on: the median that ``after`` gave, once what is swapped was calibrated for example; None where it was
            not asked.
    """

    site: str | None
    kept: int
    swapped: int
    error: Quantiles
    held_out: Quantiles | None = None
    worked_on: float | None = None


@dataclass(frozen=True, repr=False)
class KeepReport(Tabled, Record):
    """Which norms of a network to leave as they are, and what each is worth.

    Attributes:
        sites: paths of all sites, in the network's order.
        kept: those of the norms to keep, in the order in which they were put back: the one that was worth most first.
        steps: one for each number of norms kept, from none on; the last ones may have been tried and not taken.
        n_chosen_on: number of samples that the choice was made on.
        func: what takes the norms' place.
        init: with which start values.
        about: ``model``, ``weights`` and ``data`` in words, as far as they were told.
        quality: how well the network does what it is for, on held-out inputs: ``original``, and by the number of norms
            kept, ``0 kept``, ``1 kept``, …; None where nothing tells.
        measure: of all errors: ``KL divergence`` of logits, ``relative L2`` of other outputs.
    """

    sites: Sequence[str]
    kept: Sequence[str]
    steps: Sequence[KeepStep]
    n_chosen_on: int
    func: str = ""
    init: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    quality: Quality | None = None
    measure: str = "relative L2"

    def __repr__(self) -> str:
        medians = f"{self.steps[0].error.p50:.3g} → {self.taken[-1].error.p50:.3g}"
        return f"KeepReport: {count(len(self.kept), 'norm')} of {len(self.sites)} kept, {self.measure} {medians}"

    @property
    def swapped(self) -> list[str]:
        """Paths of the sites that stay swapped, in the network's order."""
        return [path for path in self.sites if path not in self.kept]

    @property
    def taken(self) -> Sequence[KeepStep]:
        """The steps up to the number of norms that are kept."""
        return self.steps[: len(self.kept) + 1]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds, with what was told of the network at its top level."""
        document = super().as_dict()
        return {**document.pop("about"), **document}
