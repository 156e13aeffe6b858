"""Records that reports of swaps share: quantiles, drift, quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from normscope.runtime.records import Record, Tabled

OUTPUT, END = "output", "end of trajectory"
Swapped = Literal["all", "one", "cumulative"]


class AboutNetwork(Tabled, Record):
    """Report whose JSON has model, weights and data at its top level."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON, with the description of the network at its top level."""
        document = super().as_dict()
        return {**document.pop("about"), **document}


@dataclass(frozen=True)
class Quantiles:
    """Distribution of n values over inputs: extremes, the 10th and 90th percentile, and the median.

    Quantiles are interpolated as numpy does by default, but infinite where a neighbour is; of no values they are NaN.
    """

    min: float
    p10: float
    p50: float
    p90: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Compute the quantiles of values, some of which may be infinite.

        >>> Quantiles.of([3.0, 1.0, 2.0]).p50, Quantiles.of([1.0, 2.0, math.inf]).p90
        (2.0, inf)
        """
        ordered = sorted(values)
        smallest, p10, p50, p90, largest = (_quantile(ordered, share) for share in (0.0, 0.1, 0.5, 0.9, 1.0))
        return cls(smallest, p10, p50, p90, largest, len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * share
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]  # numpy has NaN between them if one is ∞
    if math.isinf(low) or math.isinf(high):
        return low if low == high or math.isinf(low) else high
    return low + (high - low) * (position - math.floor(position))


@dataclass(frozen=True)
class Drift(Record):
    """Distance of a network from the original at one place, with some of its norms replaced.

    An input whose swapped values are not finite counts as infinitely far in the quantiles, with a cosine of −∞.

    Attributes:
        func: curve in the norms' place.
        init: start values; empty if there are none, as for an RMSNorm.
        swapped: ``all`` sites; ``one`` alone; or ``cumulative``: those up to this one, the least harmful first.
        site: the one, or the one added last; None for all.
        sites_swapped: number of sites swapped.
        at: place of the measurement: ``output``, a site's path, or ``end of trajectory``.
        part: part of the data, such as ``timestep 980``; empty for all of it.
        inputs: number of inputs that were compared, non-finite ones included.
        nonfinite: number of inputs with a NaN or an infinity once the norms were swapped.
        left_out: number of further inputs at which the original itself is not finite, or zero throughout.
        relative_l2: ‖swapped − original‖ / ‖original‖ over all values of an input.
        cosine: of the angle between the two.
        kl: KL(original ‖ swapped) of the softmaxes in nats, for tokens an input's mean over its positions. This and the
            following are None if the output is no logits.
        top1: share of the answers (inputs; for tokens, positions) with the same largest logit.
        top5: share of the answers where the original's largest is among the swapped's five largest; None for five
            classes and fewer.
        top5_overlap: share of the original's five largest among the swapped's five largest.
        answers: number of answers; one that is not finite agrees in nothing.
        frames: relative L2 of single frames of all inputs, at the output with all sites swapped.
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

    @property
    def error(self) -> Quantiles:
        """The error that decides: KL divergence of logits, relative L2 of other outputs."""
        return self.relative_l2 if self.kl is None else self.kl


@dataclass(frozen=True)
class Score(Record):
    """Quality of one network at its task, with the 95 % Wilson interval of a share of independent inputs."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Quality(Record):
    """Quality of a network at its task, with its norms and with replacements.

    Attributes:
        name: the measure: ``top-1 accuracy``, ``perplexity``, …, or the name of the user's function.
        higher_is_better: None if only the user knows, as for n.
        n: number of images, words, tokens or pairs.
        over: the same in words.
        scores: by network: ``original``, ``swapped``, and after healing ``healed``.
    """

    name: str
    higher_is_better: bool | None
    n: int | None
    over: str
    scores: Mapping[str, Score]
