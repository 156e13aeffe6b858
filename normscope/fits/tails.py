"""What is large at a norm site: kurtosis, massive activations, and the channels and tokens that hold the tails."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from normscope.fits.magnitudes import Magnitudes
from normscope.pairs.stats import PairStats

MASSIVE_SIZE, MASSIVE_RATIO = 100, 1000  # arXiv 2402.17762, section 2
_CHANNELS_NAMED = 3


@dataclass(frozen=True)
class TailChannel:
    """A channel that holds much of Σx²: its share of it, its smallest and its largest x, over all pairs."""

    channel: int
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class TailToken:
    """One of the tokens of largest |x|: where it came from, and that x.

    Attributes:
        sample: number of its sample within the data set; None where tokens are nobody's.
        position: its number among the tokens that the norm takes of that sample.
        channel: of its largest |x|; None where a token is a group of channels, of which some elements are kept.
        x: the element of largest magnitude.
    """

    sample: int | None
    position: int
    channel: int | None
    x: float


@dataclass(frozen=True)
class Tails:
    """What is large. Of all pairs, but for ``tokens``, which are the 16 of largest |x|.

    Attributes:
        kurtosis: of x, E(x − E x)⁴/Var(x)²; a normal distribution has 3.
        median: of |x|.
        largest: |x|.
        channel: that holds the largest |x|.
        beyond_100: number of pairs whose |x| is more than 100 times the median; None where that is zero.
        beyond_1000: more than 1000 times.
        massive: number of pairs that are massive activations: |x| beyond both 100 and 1000 times the median.
        channels: the channels that hold most of Σx², first.
        tokens: the tokens of largest |x|, first.
    """

    kurtosis: float
    median: float
    largest: float
    channel: int
    beyond_100: int | None
    beyond_1000: int | None
    massive: int | None
    channels: tuple[TailChannel, ...]
    tokens: tuple[TailToken, ...]

    @property
    def ratio(self) -> float:
        """How many times the median |x| the largest is."""
        return self.largest / self.median if self.median > 0 else math.inf

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Positions of the tokens of largest |x| and how many of them each has, the most frequent first."""
        return Counter(token.position for token in self.tokens).most_common()


def tails_of(stats: PairStats, moments: Tensor, magnitudes: Magnitudes) -> Tails:
    """Say what is large at a site that holds pairs.

    Args:
        stats: its sums.
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin over all folds, float64 ``(6, bins)``.
        magnitudes: how |x| is distributed over them.
    """
    reach = stats.reach.double()
    largest, median = float(reach.max()), magnitudes.quantile(0.5)

    def beyond(value: float) -> int:
        found = round(magnitudes.count - magnitudes.below(value))
        return max(found, 1) if largest > value else 0

    return Tails(
        kurtosis=_kurtosis(moments),
        median=median,
        largest=largest,
        channel=int(reach.argmax()),
        beyond_100=beyond(100 * median) if median > 0 else None,
        beyond_1000=beyond(1000 * median) if median > 0 else None,
        massive=beyond(max(MASSIVE_SIZE, MASSIVE_RATIO * median)) if median > 0 else None,
        channels=_channels(stats),
        tokens=_tokens(stats),
    )


def _kurtosis(moments: Tensor) -> float:
    """Put each bin's pairs one standard deviation to either side of its mean: right to third order in its width."""
    n, x, _, xx, _, _ = moments[:, moments[0] > 0].numpy()
    centre = x.sum() / n.sum()
    mean, variance = x / n - centre, np.maximum(xx / n - (x / n) ** 2, 0)
    second = n @ (mean**2 + variance)
    fourth = n @ (mean**4 + 6 * mean**2 * variance + variance**2)
    return float(fourth * n.sum() / second**2)


def _channels(stats: PairStats) -> tuple[TailChannel, ...]:
    squares = stats.channel_sums[1]
    low, high = stats.channel_extremes
    shares, channels = (squares / squares.sum()).topk(min(_CHANNELS_NAMED, len(squares)))
    return tuple(
        TailChannel(channel, share, float(low[channel]), float(high[channel]))
        for channel, share in zip(channels.tolist(), shares.tolist(), strict=True)
        if low[channel] <= high[channel]  # of some groups every token may be left out
    )


def _tokens(stats: PairStats) -> tuple[TailToken, ...]:
    drawn = stats.largest
    where = drawn.x.abs().argmax(1)
    rows = zip(drawn.sample.tolist(), drawn.position.tolist(), where.tolist(), drawn.x, strict=True)
    return tuple(
        TailToken(sample if sample >= 0 else None, position, None if stats.grouped else channel, float(x[channel]))
        for sample, position, channel, x in rows
    )
