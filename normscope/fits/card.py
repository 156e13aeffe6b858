"""Norm cards: the effects of centring and scaling at each norm site, and the sources of its tails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.fits.curve_fit import CurveFit, SiteRecord, about_site
from normscope.fits.fit import fit
from normscope.fits.saturation import Saturation, site_saturation
from normscope.fits.scale import Scale, scale_of
from normscope.fits.sinks import Sink
from normscope.fits.targets import CONSTANT_OUTPUT, as_capture
from normscope.inputs.held_out import Pool
from normscope.inputs.loaded_model import LoadedModel
from normscope.norms.bound_inputs import unpacked
from normscope.norms.formulas import FORMS
from normscope.norms.sites import NormSite
from normscope.norms.trace import find_norms
from normscope.pairs.captures import Capture
from normscope.pairs.sums.magnitudes import Array, Magnitudes, of_pairs, of_tokens
from normscope.pairs.sums.stats import PairStats
from normscope.pairs.token_sums import TokenSums, token_sums
from normscope.runtime.network import uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.runtime.records import Record, Records

MASSIVE_SIZE, MASSIVE_RATIO = 100, 1000  # arXiv 2402.17762, section 2
_CHANNELS_NAMED = 4
_MOST_OF_OUTPUT = 0.9  # of a token's Σy²
_LINEAR_UP_TO = 0.3994581122927263  # the u at which tanh u is 0.95 u


@dataclass(frozen=True)
class TailChannel:
    """A channel that contributes much of Σx².

    Attributes:
        share: of Σx², over all pairs, as its smallest and largest x, ``low`` and ``high``.
        of_y, of_output: shares of Σy² and of Σ(γy)², the output before the bias; None without a second pass.
        gamma: γ over the median |γ| of all channels; likewise.
    """

    channel: int
    share: float
    low: float
    high: float
    of_y: float | None = None
    of_output: float | None = None
    gamma: float | None = None


@dataclass(frozen=True)
class TailToken:
    """One of the tokens of largest |x|.

    Attributes:
        sample: number of its sample within the data set; None if tokens belong to no sample.
        position: its number among the tokens of that sample.
        channel: of its largest |x|; None if a token is a group of channels, of which some elements are kept.
        x: the element of largest magnitude.
    """

    sample: int | None
    position: int
    channel: int | None
    x: float


@dataclass(frozen=True)
class Tails(Record):
    """Large activations, over all pairs; ``tokens`` are the 16 of largest |x|.

    Attributes:
        kurtosis: of x, E(x − E x)⁴/Var(x)²; a normal distribution has 3.
        median: of |x|.
        largest, channel: the largest |x|, and its channel.
        beyond_100, beyond_1000: numbers of pairs with |x| over 100 and 1000 times the median; None if that is zero.
        massive: number of massive activations: |x| beyond both 100 and 1000 times the median.
        channels: the channels that contribute most to Σx², in descending order.
        tokens: the tokens of largest |x|, in descending order.
        elements: share of a token's elements that contain 90 % of its Σy², the median over tokens drawn uniformly; 0.44
            for a normal distribution. None, with the next, if tokens are groups of channels.
        cosine: between the y of two of the tokens of largest |x|, mean over all pairs of them.
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
    elements: float | None = None
    cosine: float | None = None

    _properties = ("ratio",)

    @property
    def ratio(self) -> float:
        """The largest |x| over the median."""
        return self.largest / self.median if self.median > 0 else math.inf

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Positions of the tokens of largest |x|, and their numbers of tokens, in descending order."""
        return Counter(token.position for token in self.tokens).most_common()


def _tails(stats: PairStats, moments: Tensor, magnitudes: Magnitudes, sums: TokenSums | None = None) -> Tails:
    reach = stats.reach.double()
    largest, median = float(reach.max()), magnitudes.quantile(0.5)

    def beyond(value: float) -> int | None:
        number = round(magnitudes.count - magnitudes.below(value))
        return None if median <= 0 else max(number, 1) if largest > value else 0

    elements, cosine = (None, None) if stats.grouped else _sparsity(stats)
    return Tails(
        kurtosis=_kurtosis(moments),
        median=median,
        largest=largest,
        channel=int(reach.argmax()),
        beyond_100=beyond(100 * median),
        beyond_1000=beyond(1000 * median),
        massive=beyond(max(MASSIVE_SIZE, MASSIVE_RATIO * median)),
        channels=_tail_channels(stats, sums),
        tokens=_tail_tokens(stats),
        elements=elements,
        cosine=cosine,
    )


def _sparsity(stats: PairStats) -> tuple[float, float]:
    """Return ``elements`` and ``cosine`` of :class:`Tails`."""
    squares = stats.tokens.y.double().square().sort(1, descending=True).values
    needed = squares.cumsum(1) - squares < _MOST_OF_OUTPUT * squares.sum(1, keepdim=True)
    unit = nn.functional.normalize(stats.largest.y.double(), dim=1)
    cosine = (unit @ unit.mT)[~torch.eye(len(unit), dtype=torch.bool)].mean()  # NaN of a single token
    return float(needed.double().mean(1).quantile(0.5)), float(cosine)


def _kurtosis(moments: Tensor) -> float:
    """Put each bin's pairs one standard deviation to either side of its mean: right to third order in its width."""
    n, x, _, xx, *_ = moments[:, moments[0] > 0].numpy()
    centre = x.sum() / n.sum()
    mean, variance = x / n - centre, np.maximum(xx / n - (x / n) ** 2, 0)
    second = n @ (mean**2 + variance)
    fourth = n @ (mean**4 + 6 * mean**2 * variance + variance**2)
    return float(fourth * n.sum() / second**2)


def _tail_channels(stats: PairStats, sums: TokenSums | None) -> tuple[TailChannel, ...]:
    squares = stats.channel_sums[1]
    columns = dict(zip(("low", "high"), stats.channel_extremes, strict=True))
    if sums is not None:
        y, gamma = sums.squares.cpu(), sums.gamma.double()
        output = gamma.square() * y
        columns |= {"of_y": y / y.sum(), "of_output": output / output.sum(), "gamma": gamma / gamma.abs().quantile(0.5)}
    shares, channels = (squares / squares.sum()).topk(min(_CHANNELS_NAMED, len(squares)))
    return tuple(
        TailChannel(channel, share, **{name: float(column[channel]) for name, column in columns.items()})
        for channel, share in zip(channels.tolist(), shares.tolist(), strict=True)
        if columns["low"][channel] <= columns["high"][channel]  # a channel may be without pairs
    )


def _tail_tokens(stats: PairStats) -> tuple[TailToken, ...]:
    drawn = stats.largest
    channels = drawn.x.abs().argmax(1)
    rows = zip(drawn.sample.tolist(), drawn.position.tolist(), channels.tolist(), drawn.x, strict=True)
    return tuple(
        TailToken(sample if sample >= 0 else None, position, None if stats.grouped else channel, float(x[channel]))
        for sample, position, channel, x in rows
    )


@dataclass(frozen=True)
class Centring:
    """Effect of subtracting the mean, over all tokens.

    Attributes:
        offset_p50: median of the tokens' |μ|/σ, with the norm's σ, which includes eps.
        offset_p95: its 95th percentile.
        mean_share: share of the mean in a token's Σx², t/(1 + t) with t = (μ/σ)², averaged over tokens. Centring
            removes it; without centring it is the share of a common offset in Σy².
        change_without: Σ(y − y′)²/Σy² within a token, where y′ is RMSNorm's output, 2 − 2/√(1 + t), averaged over
            tokens: 2 for tokens that are all mean; None if the norm does not centre.
    """

    offset_p50: float
    offset_p95: float
    mean_share: float
    change_without: float | None


@dataclass(frozen=True, repr=False)
class NormCard(SiteRecord, Record):
    """One norm's effect on its tokens, at a glance; of a point-wise function, its saturation and its tails.

    Attributes:
        kind, placement, eps: as of :class:`normscope.norms.sites.NormSite`.
        n_pairs, n_tokens: numbers of pairs and tokens.
        degenerate: reason why there is nothing to report; None if there is.
        centring: effect of the mean; also None if the norm's line does not follow from the token.
        scale: effect of σ and eps.
        linear: share of pairs at which the site's own tanh, with its shift, is within 5 % of the tangent at its centre;
            1 if the pairs do not bend, None without a tanh.
        linear_up_to: the |x| beyond which no pair is; None if the pairs do not bend, or without a tanh.
        straight: True if the pairs do not tanh.
        tails: the large activations.
        sink: the position that carries more than half of Σx², if there is one, with tanh's R² without it.
        saturation: of a point-wise function, which has no centring, scale or linear range; None for a norm.
    """

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
    sink: Sink | None = None
    saturation: Saturation | None = None


def norm_cards(
    capture: Capture,
    model: nn.Module | LoadedModel | None = None,
    batches: Iterable[Any] | None = None,
    *,
    progress: Progress = silent,
) -> Records[NormCard]:
    """Norm cards of all sites of a capture: the effects of centring and scaling, and the sources of the tails.

    Numbers cover all tokens and pairs, by their sums. Percentiles of tokens are right to an eighth of an octave at
    worst, those of pairs to 1/64; see docs/card.md.

    Args:
        capture: result of :func:`normscope.capture`.
        model: the network, for a second pass, over a gibibyte of inputs at most, that finds the channels that set σ.
        batches: inputs of that pass, of which a fourth is held out; None for a loaded model's own.
        progress: of that pass, as of :func:`normscope.capture`.

    Returns:
        One :class:`NormCard` for each site.

    Raises:
        DataError: if the second pass has fewer than two samples.

    >>> import normscope
    >>> from torch import nn
    >>> x = 5 + torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    >>> (card,) = norm_cards(normscope.capture(nn.Sequential(nn.LayerNorm(100)), [x]))
    >>> round(card.centring.offset_p50, 1), round(card.centring.mean_share, 2), card.scale.touched
    (5.0, 0.96, 0.0)
    """
    capture = as_capture(capture, "norm_cards")
    fits = fit(capture, "tanh")  # one per site, in their order
    sums: dict[str, TokenSums] = {}
    if model is not None:
        module, batches, *_ = unpacked(model, batches)
        network, pool = uncompiled(module), Pool.of(batches)
        report = find_norms(network, pool.learned[0].first_sample())
        sites = [site for site in report.sites if site.replaceable and site.form and not site.grouped]
        sums = token_sums(network, pool, report, [site for site in sites if site.name in capture.stats], progress)
    rows = zip(capture.sites, fits, strict=True)
    return Records(_card(capture, site, tanh, sums.get(site.name)) for site, tanh in rows)


def _card(capture: Capture, site: NormSite, tanh: CurveFit, sums: TokenSums | None) -> NormCard:
    stats = capture.stats[site.name]
    about = {
        **about_site(capture, site.name),
        **{"kind": site.kind, "placement": site.placement, "eps": site.eps},
        **{"n_pairs": stats.n_pairs, "n_tokens": stats.n_tokens},
        # Tokens that are all mean have a constant y, but also a σ and tails.
        "degenerate": None if tanh.nothing == CONSTANT_OUTPUT else tanh.nothing,
        "saturation": site_saturation(site, stats),
        "sink": tanh.sink,
    }
    if about["degenerate"]:
        return NormCard(**about)
    moments = torch.from_numpy(stats.moments.numpy().sum(0))
    magnitudes = of_pairs(moments)
    if site.pointwise:
        return NormCard(**about, tails=_tails(stats, moments, magnitudes))
    linear, linear_up_to = 1.0 if tanh.straight else None, None
    if tanh.identified:
        ends = [(side * _LINEAR_UP_TO - tanh.shift) / tanh.alpha for side in (-1, 1)]
        n, x = moments[:2, moments[0] > 0]
        inside = (tanh.alpha * x / n + tanh.shift).abs() <= _LINEAR_UP_TO
        linear, linear_up_to = float(n[inside].sum() / n.sum()), max(map(abs, ends))
    return NormCard(
        **about,
        centring=centring_of(site, of_tokens(stats.token_offsets)) if site.form else None,
        scale=scale_of(site, of_tokens(stats.token_scales), sums),
        linear=linear,
        linear_up_to=linear_up_to,
        straight=tanh.straight,
        tails=_tails(stats, moments, magnitudes, sums),
    )


def centring_of(site: NormSite, offsets: Magnitudes) -> Centring:
    """Return the effect of the mean from the tokens' counted |μ|/σ, for a site with a form."""

    def squared(offset: Array) -> Array:
        """(μ/σ)² with σ about the mean, from the counted offsets: μ/√(mean of x²) for forms that are not about it."""
        if FORMS[site.form or ""].about_mean:
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
