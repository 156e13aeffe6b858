"""Reports of drift: how far a swap moved a network's outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from normscope.errors import UsageError, count
from normscope.runtime.records import Record, Tabled

OUTPUT, END = "output", "end of trajectory"
Swapped = Literal["all", "one", "cumulative"]


@dataclass(frozen=True)
class Quantiles:
    """How values are distributed over inputs.

    Between two of them a quantile is interpolated, as numpy does by default; it is infinite where either is.

    Attributes:
        min: the smallest.
        p10: quantile 0.1.
        p50: the median.
        p90: quantile 0.9.
        max: the largest.
        n: number of values; of none, all of these are NaN.
    """

    min: float
    p10: float
    p50: float
    p90: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Take the quantiles of some values, among which may be infinite ones.

        >>> Quantiles.of([3.0, 1.0, 2.0]).p50, Quantiles.of([1.0, 2.0, math.inf]).p90
        (2.0, inf)
        """
        ordered = sorted(values)
        smallest, p10, p50, p90, largest = (_quantile(ordered, share) for share in (0.0, 0.1, 0.5, 0.9, 1.0))
        return cls(smallest, p10, p50, p90, largest, len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * share
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]  # between which numpy has NaN where one is ∞
    if math.isinf(low) or math.isinf(high):
        return low if low == high or math.isinf(low) else high
    return low + (high - low) * (place - math.floor(place))


@dataclass(frozen=True)
class Drift(Record):
    """How far one place of a network moved when something else took the place of some of its norms.

    An input whose swapped values are not finite counts as the worst in the order of the quantiles: infinitely far,
    with a cosine of −∞. No mean is taken over inputs.

    Attributes:
        func: what took the norms' place.
        init: with which start values; empty where there are none, as of an RMSNorm.
        swapped: ``all`` the sites; ``one`` alone; or ``cumulative``: those up to this one, the least harmful first.
        site: the one, or the one added last; None for all.
        sites_swapped: number of sites swapped.
        at: where it was measured: ``output``, a site's path, or ``end of trajectory``.
        part: the part of the data, ``timestep 980`` for example; empty for all of it.
        inputs: number of inputs that were compared, those among them that are not finite included.
        nonfinite: how many of them gave a NaN or an infinity once the norms were swapped.
        left_out: number of further inputs at which the original itself is not finite, or zero throughout.
        relative_l2: ‖swapped − original‖ / ‖original‖ over all that belongs to an input.
        cosine: of the angle between the two.
        kl: KL(original ‖ swapped) of the softmaxes, in nats; of tokens, an input's mean over its positions. None for
            what is no logits.
        top1: share of the answers (inputs; of tokens, positions) where the largest logit is the same.
        top5: share of the answers where the original's largest is among the swapped's five largest, as top-5 accuracy
            counts it, with the original for the truth; None of five classes and fewer.
        top5_overlap: share of the original's five largest that are among the swapped's five largest.
        answers: number of answers that these are shares of; one that is not finite agrees in nothing.
        frames: relative L2 of single frames, over the frames of all inputs; where all sites are swapped, at the output.
    """

    func: str
    init: str
    swapped: Swapped
    site: str | None
    sites_swapped: int
    at: str
    part: str
    inputs: int
    nonfinite: int
    left_out: int
    relative_l2: Quantiles
    cosine: Quantiles
    kl: Quantiles | None = None
    top1: float | None = None
    top5: float | None = None
    top5_overlap: float | None = None
    answers: int | None = None
    frames: Quantiles | None = None


@dataclass(frozen=True)
class Score(Record):
    """How well one network does what it is for.

    Attributes:
        value: of what was measured.
        interval: 95 % interval of a share, after Wilson; None of anything else, and of inputs that are not independent.
    """

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Quality(Record):
    """How well a network does what it is for, with its norms and with something else in their place.

    Attributes:
        name: what was measured: ``top-1``, ``perplexity``, …; of a function of the user's its own name.
        higher_is_better: whether it grows with quality; None where only the user knows.
        n: number of images, words, tokens or pairs that it was measured on; None where only the user knows.
        over: they in words.
        scores: of each network: ``original``; ``swapped``; and where it was healed, ``healed``.
    """

    name: str
    higher_is_better: bool | None
    n: int | None
    over: str
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class DriftCalibration(Record):
    """What the rows of a drift were calibrated on, each by itself, before it was measured on other inputs.

    Attributes:
        data: the inputs in words; empty where they do not say it.
        refit: ``neighbours`` or ``norms``, as :func:`normscope.calibrate` takes it.
        n_learned: samples that were learned from.
        n_judged: samples that decided what was kept of it.
        left_out: samples that did not fit into memory.
        restored: rows that have the start values, as calibration did not lower the drift on the samples that decide.
        left: why a linear layer beside a site was left as it is where all sites are swapped, by path.
    """

    data: str
    refit: str
    n_learned: int
    n_judged: int
    left_out: int
    restored: int
    left: Mapping[str, str]

    @property
    def in_words(self) -> str:
        """Say it in a line.

        >>> DriftCalibration("digits", "norms", 36, 12, 0, 0, {}).in_words
        'by itself, functions alone, on 48 other samples than it is measured on (12 of them decided)'
        """
        alone = ", functions alone" if self.refit == "norms" else ""
        samples = count(self.n_learned + self.n_judged, "other sample")
        return f"by itself{alone}, on {samples} than it is measured on ({self.n_judged} of them decided)"


@dataclass(frozen=True, repr=False)
class DriftReport(Tabled, Record):
    """What one swap did to a network's outputs.

    Attributes:
        func: what took the norms' place.
        init: with which start values; empty where there are none, as of an RMSNorm.
        sites: paths of the swapped sites, in the network's order.
        rows: everything that was measured.
        about: ``model``, ``weights`` and ``data`` in words, as far as they were told.
        quality: how well the network does what it is for, on the same inputs, with no site swapped and with all; None
            where nothing tells.
        no_quality: why there is none; else empty.
        calibration: of ``init="calibrated"``, what every row was calibrated on; else None.
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
        how = " ".join(filter(None, ("DriftReport", self.func, self.init)))
        return f"{how}: {count(len(self.sites), 'site')} swapped, relative L2 {self.all.relative_l2.p50:.3g}"

    @property
    def start_in_words(self) -> str:
        """The init; of a calibrated one also what it was learned from."""
        done = self.calibration
        if done is None:
            return self.init
        alone = " (functions alone)" if done.refit == "norms" else ""
        return f"{self.init}{alone} on {count(done.n_learned + done.n_judged, 'other sample')}"

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
        """The network's output with each site swapped alone, in the network's order; empty if it was not asked for."""
        return [row for row in self.rows if row.swapped == "one"]

    @property
    def cumulative(self) -> list[Drift]:
        """The network's output with one site, two sites, … swapped; empty if it was not asked for."""
        return [row for row in self.rows if row.swapped == "cumulative"]

    def least_harmful(self, number: int) -> list[str]:
        """Return the paths of those sites that move the output least when each is swapped alone, the least first.

        By the median over inputs, a median that is not finite last; of equals, the first in the network.

        Raises:
            UsageError: if there are not so many sites, or if no site was swapped alone.
        """
        if not self.by_site:
            raise UsageError("Which sites are least harmful is known once each was swapped alone: one_at_a_time=True.")
        if not 1 <= number <= len(self.sites):
            raise UsageError(f"{number} sites were asked for; there are {len(self.sites)}, and at least one is taken.")
        medians = {row.site: row.relative_l2.p50 for row in self.by_site}
        known = {path: math.inf if math.isnan(medians[path]) else medians[path] for path in self.sites}
        return sorted(self.sites, key=known.__getitem__)[:number]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds, with what was told of the network at its top level."""
        document = super().as_dict()
        return {**document.pop("about"), **document}
