"""Reports of drift, and of the choice of norms to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from normscope.errors import UsageError, count
from normscope.runtime.records import Record
from normscope.swaps.reports import END, OUTPUT, AboutNetwork, Drift, Quality, Quantiles


@dataclass(frozen=True)
class DriftCalibration(Record):
    """Inputs that each row of a drift was calibrated on; it is measured on others.

    Attributes:
        data: the inputs in words, or empty.
        refit: ``neighbours`` or ``norms``, as in :func:`normscope.calibrate`.
        n_learned: number of samples to learn from.
        n_judged: number of samples that decided what was kept.
        left_out: number of samples that did not fit into memory.
        restored: number of rows with their start values, as calibration did not lower the drift where it is decided.
        left: reason why a linear layer was left as it was, by path, with all sites swapped.
    """

    data: str
    refit: str
    n_learned: int = 0
    n_judged: int = 0
    left_out: int = 0
    restored: int = 0
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_words(self) -> str:
        """One line of text.

        >>> DriftCalibration("digits", "norms", 36, 12).in_words
        'by itself, functions alone, on 48 other samples than it is measured on (12 of them decided)'
        """
        alone = ", functions alone" if self.refit == "norms" else ""
        samples = count(self.n_learned + self.n_judged, "other sample")
        return f"by itself{alone}, on {samples} than it is measured on ({self.n_judged} of them decided)"


@dataclass(frozen=True, repr=False)
class DriftReport(AboutNetwork):
    """Effect of one swap on a network's outputs.

    Attributes:
        func, init: as in each :class:`Drift`.
        sites: paths of the swapped sites, in the network's order.
        rows: all measurements.
        about: ``model``, ``weights`` and ``data`` in words, if known.
        quality: quality at the network's task on the same inputs, with no site swapped and with all; or None.
        no_quality: reason why there is none.
        calibration: inputs that every row was calibrated on, with ``init="calibrated"``.
    """

    func: str
    init: str
    sites: Sequence[str]
    rows: Sequence[Drift]
    about: Mapping[str, str] = field(default_factory=dict)
    quality: Quality | None = None
    no_quality: str = ""
    calibration: DriftCalibration | None = None

    def __repr__(self) -> str:
        name = " ".join(filter(None, ("DriftReport", self.func, self.init)))
        kl = "" if self.all.kl is None else f"KL {self.all.kl.p50:.3g}, "
        return f"{name}: {count(len(self.sites), 'site')} swapped, {kl}relative L2 {self.all.relative_l2.p50:.3g}"

    @property
    def start_in_words(self) -> str:
        """The init, and the number of samples of a calibration."""
        calibration = self.calibration
        if calibration is None:
            return self.init
        alone = " (functions alone)" if calibration.refit == "norms" else ""
        return f"{self.init}{alone} on {count(calibration.n_learned + calibration.n_judged, 'other sample')}"

    @property
    def all(self) -> Drift:
        """The output with all sites swapped."""
        return next(row for row in self.rows if row.swapped == "all" and row.at == OUTPUT and not row.part)

    @property
    def by_part(self) -> list[Drift]:
        """The output with all sites swapped, for each part of the data, in the order in which they came."""
        return [row for row in self.rows if row.swapped == "all" and row.at == OUTPUT and row.part]

    @property
    def end(self) -> Drift | None:
        """The ends of trajectories with all sites swapped; None where none were run."""
        return next((row for row in self.rows if row.at == END), None)

    @property
    def at_sites(self) -> list[Drift]:
        """The output of each site with all sites swapped, in the network's order."""
        return [row for row in self.rows if row.swapped == "all" and row.at in self.sites]

    @property
    def by_site(self) -> list[Drift]:
        """The network's output with each site swapped alone, in the network's order; may be empty."""
        return [row for row in self.rows if row.swapped == "one"]

    @property
    def cumulative(self) -> list[Drift]:
        """The network's output with one site, two sites, … swapped; may be empty."""
        return [row for row in self.rows if row.swapped == "cumulative"]

    def least_harmful(self, number: int) -> list[str]:
        """Return the paths of the sites with the least median error when each is swapped alone, the least first.

        Raises:
            UsageError: if there are not so many sites, or if no site was swapped alone.
        """
        if not self.by_site:
            raise UsageError("The least harmful sites are known only if each was swapped alone: one_at_a_time=True.")
        if not 1 <= number <= len(self.sites):
            raise UsageError(f"number is {number}; it has to be from 1 to {len(self.sites)}, the number of sites.")
        medians = {row.site: row.error.p50 for row in self.by_site}
        return sorted(self.sites, key=lambda path: (math.isnan(medians[path]), medians[path]))[:number]


@dataclass(frozen=True)
class KeepStep(Record):
    """Error of the network with one norm more restored.

    Attributes:
        site: path of the norm restored in this step; None for the first, with all sites swapped.
        kept: number of norms restored.
        swapped: number of sites that are swapped.
        error: at the output, over the inputs for the choice.
        held_out: error over held-out inputs; None without any, and for steps that were not taken.
        worked_on: median error that ``after`` returned, for example after a calibration; or None.
    """

    site: str | None
    kept: int
    swapped: int
    error: Quantiles
    held_out: Quantiles | None = None
    worked_on: float | None = None


@dataclass(frozen=True, repr=False)
class KeepReport(AboutNetwork):
    """Norms of a network to keep, and the error with each number of them kept.

    Attributes:
        sites: paths of all sites, in the network's order.
        kept: paths of the norms to keep, the most valuable first.
        steps: one for each number of norms kept, beginning with none; the last ones may not have been taken.
        n_chosen_on: number of samples that the choice was made on.
        func: curve in the norms' place.
        init: start values.
        about: ``model``, ``weights`` and ``data`` in words, if known.
        quality: quality at the network's task on held-out inputs: ``original``, ``0 kept``, ``1 kept``, …; or None.
        measure: of all errors: ``KL divergence`` of logits, ``relative L2`` of other outputs.
        calibrated: error over held-out inputs once the rest is swapped and calibrated, as ``normscope swap`` does.
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
    calibrated: Quantiles | None = None

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
