"""The norm card: what centring and scaling do at each norm site, and what makes its tails."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from normscope.fits.curve_fit import CurveFit
from normscope.fits.fit import fit
from normscope.fits.targets import CONSTANT_OUTPUT
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.sums.stats import Array, Magnitudes, PairStats, of_pairs, of_tokens
from normscope.runtime.records import Record, Records, Tabled

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
class Tails(Record):
    """Large activations. Of all pairs, but for ``tokens``, which are the 16 of largest |x|.

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

    _properties = ("ratio",)

    @property
    def ratio(self) -> float:
        """The largest |x| over the median."""
        return self.largest / self.median if self.median > 0 else math.inf

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Positions of the tokens of largest |x| and how many of them each has, the most frequent first."""
        return Counter(token.position for token in self.tokens).most_common()


def tails_of(stats: PairStats, moments: Tensor, magnitudes: Magnitudes) -> Tails:
    """Large activations of a site that holds pairs.

    Args:
        stats: its sums.
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin over all folds, float64 ``(6, bins)``.
        magnitudes: how |x| is distributed over them.
    """
    reach = stats.reach.double()
    largest, median = float(reach.max()), magnitudes.quantile(0.5)

    def beyond(value: float) -> int:
        number = round(magnitudes.count - magnitudes.below(value))
        return max(number, 1) if largest > value else 0

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


NOTICED = 0.01  # a change of y by that share counts as one
LINEAR_UP_TO = 0.3994581122927263  # the u at which tanh u is 0.95 u


@dataclass(frozen=True)
class Centring:
    """Effect of subtracting the mean, over all tokens.

    Attributes:
        offset_p50: median of the tokens' |μ|/σ, with σ as the norm has it, eps included.
        offset_p95: its 95th percentile.
        mean_share: of a token's x², the share that its mean makes, t/(1 + t) with t = (μ/σ)²; averaged over tokens.
            What centring takes away; where a norm does not centre, as large a share of y² is one common offset.
        change_without: Σ(y − y′)²/Σy² within a token, where y′ is what RMSNorm makes of it, 2 − 2/√(1 + t); averaged
            over tokens. As large as 2 where means are all there is; None where the norm does not centre.
    """

    offset_p50: float
    offset_p95: float
    mean_share: float
    change_without: float | None


@dataclass(frozen=True)
class Scale(Record):
    """The σ that tokens are divided by, and for which c eps still leaves y(c·x) = y(x); over all tokens.

    Attributes:
        sigma_p5: 5th percentile of σ = 1/rstd, in units of x; without its mean where the norm leaves that out.
        sigma_p50: median.
        sigma_p95: 95th percentile.
        touched: share of tokens whose y eps makes smaller by more than 1 %. None, with the other two, where y does
            not follow from the token alone.
        holds_to: the c at which y(c·x) is smaller than y(x) by 1 % for one token in a hundred,
            and by less for the others.
        holds_to_p50: the c at which it is for half of the tokens.
    """

    sigma_p5: float
    sigma_p50: float
    sigma_p95: float
    touched: float | None
    holds_to: float | None
    holds_to_p50: float | None

    _properties = ("spread",)

    @property
    def spread(self) -> float:
        """The 95th percentile of σ over the 5th."""
        return self.sigma_p95 / self.sigma_p5 if self.sigma_p5 > 0 else math.inf


@dataclass(frozen=True, repr=False)
class NormCard(Tabled, Record):
    """One norm's effect on its tokens, at a glance.

    Attributes:
        model: the network.
        weights: its resolved checkpoint and revision.
        data: what went through it.
        site: module path of the norm.
        kind: of norm.
        placement: as of :class:`normscope.pairs.norms.sites.NormSite`.
        eps: what is added under the root, or bounds it.
        n_pairs: number of pairs.
        n_tokens: number of tokens.
        degenerate: why there is nothing to say, in words; None where there is.
        centring: None where that is so, or where the norm's line does not follow from the token.
        scale: None where that is so.
        linear: share of pairs at which the site's own tanh is within 5 % of its tangent; 1 where the pairs do not
            bend, None where no tanh is found.
        linear_up_to: the |x| up to which it is so; None where the pairs do not bend, or no tanh is found.
        straight: whether the pairs do not bend.
        tails: None where there is nothing to say.
    """

    model: str
    weights: str
    data: str
    site: str
    kind: str
    placement: str | None
    eps: float
    n_pairs: int
    n_tokens: int
    degenerate: str | None
    centring: Centring | None = None
    scale: Scale | None = None
    linear: float | None = None
    linear_up_to: float | None = None
    straight: bool = False
    tails: Tails | None = None


def norm_cards(capture: Capture) -> Records[NormCard]:
    """Norm cards of all sites of a capture: the effects of centring and scaling, and what makes the tails.

    Everything is of all tokens and pairs, from their sums; only the tokens that are named are drawn ones.
    Percentiles of tokens are right to an eighth of an octave at worst, those of pairs to 1/64; see docs/card.md.

    Args:
        capture: what :func:`normscope.capture` returned.

    Returns:
        One :class:`NormCard` for each site.

    >>> import normscope
    >>> from torch import nn
    >>> x = 5 + torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    >>> (card,) = norm_cards(normscope.capture(nn.Sequential(nn.LayerNorm(100)), [x]))
    >>> round(card.centring.offset_p50, 1), round(card.centring.mean_share, 2), card.scale.touched
    (5.0, 0.96, 0.0)
    """
    bends = {each.site: each for each in fit(capture, "tanh")}
    return Records(_card(capture, site, bends[site.name]) for site in capture.sites)


def _card(capture: Capture, site: NormSite, bend: CurveFit) -> NormCard:
    stats = capture.stats[site.name]
    card = NormCard(
        model=capture.about["model"],
        weights=capture.about["weights"],
        data=capture.about["data"],
        site=site.name,
        kind=site.kind,
        placement=site.placement,
        eps=site.eps,
        n_pairs=stats.n_pairs,
        n_tokens=stats.n_tokens,
        # Tokens that are nothing but their mean have no y, and still their σ and tails.
        degenerate=None if bend.nothing == CONSTANT_OUTPUT else bend.nothing,
    )
    if card.degenerate:
        return card
    moments = torch.from_numpy(stats.moments.numpy().sum(0))
    magnitudes = of_pairs(moments)
    linear_up_to = LINEAR_UP_TO / bend.alpha if bend.converged else None
    linear = None if linear_up_to is None else magnitudes.below(linear_up_to) / magnitudes.count
    return replace(
        card,
        centring=_centring(site, of_tokens(stats.token_offsets)),
        scale=_scale(site, of_tokens(stats.token_scales)),
        linear=1.0 if bend.straight else linear,
        linear_up_to=None if bend.straight else linear_up_to,
        straight=bend.straight,
        tails=tails_of(stats, moments, magnitudes),
    )


def _centring(site: NormSite, offsets: Magnitudes) -> Centring | None:
    if site.form is None:
        return None

    def squared(offset: Array) -> Array:
        """(μ/σ)² with σ about the mean, of what is counted: of forms that are not about it, μ/√(mean of x²)."""
        if site.form in ("layer_norm", "std_norm"):
            return offset**2
        variance = np.maximum(1 - offset**2, 0)
        return np.divide(offset**2, variance, out=np.full_like(offset, np.inf), where=variance > 0)

    p50, p95 = (float(np.sqrt(squared(np.array(offsets.quantile(share))))) for share in (0.5, 0.95))
    return Centring(
        offset_p50=p50,
        offset_p95=p95,
        mean_share=offsets.mean(lambda offset: 1 - 1 / (1 + squared(offset))),
        change_without=offsets.mean(lambda offset: 2 - 2 / np.sqrt(1 + squared(offset))) if site.centred else None,
    )


def _scale(site: NormSite, sigmas: Magnitudes) -> Scale:
    p5, p50, p95 = (sigmas.quantile(share) for share in (0.05, 0.5, 0.95))
    if site.form is None:
        return Scale(p5, p50, p95, None, None, None)
    holds_to = [_holds_to(site, sigmas.quantile(share)) for share in (0.01, 0.5)]
    return Scale(p5, p50, p95, _touched(site, sigmas), *holds_to)


def _touched(site: NormSite, sigmas: Magnitudes) -> float:
    if site.form == "root_mean_square":  # all tokens that eps bounds have the same σ, within one bin
        return float(sigmas.n[sigmas.low <= _bound(site)].sum()) / sigmas.count
    return sigmas.below(math.sqrt(site.eps / (1 - (1 - NOTICED) ** 2))) / sigmas.count


def _holds_to(site: NormSite, sigma: float) -> float:
    """The c at which a token's y(c·x) is 0.99 y(x), from its σ² = v + eps.

    Where eps is added, y(c·x)² : y(x)² is (v + eps) : (v + eps/c²). Where it bounds σ, y falls as c does below that.
    """
    if site.form == "root_mean_square":
        return (1 - NOTICED) * min(_bound(site) / sigma, 1) if sigma > 0 else 1 - NOTICED
    excess = sigma**2 * ((1 - NOTICED) ** -2 - 1)
    return math.sqrt(site.eps / (site.eps + excess)) if site.eps > 0 else 0.0


def _bound(site: NormSite) -> float:
    """The σ that eps, a bound of ‖x‖, stands for."""
    return site.eps / math.sqrt(site.d)
