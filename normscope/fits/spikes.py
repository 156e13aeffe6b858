"""The residual stream by depth: σ, spikes of single activations, and the sublayers that write and remove them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from normscope.fits.card import MASSIVE_RATIO, MASSIVE_SIZE
from normscope.norms.sites import NormSite, kind_of_site
from normscope.pairs.captures import Capture
from normscope.pairs.sums.magnitudes import of_pairs, of_tokens
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import Record

SPIKE_RATIO = 100  # times the median of |x|; small networks have spikes that are not massive
_JUMP = 10  # of the ratio, from one norm to the next: a further spike, on top of the first
_SUBLAYERS = ("attention", "FFN")  # of a block with two norms
_BLOCK = re.compile(r".*\d(?=\.)")  # of a module path, up to its last number within


@dataclass(frozen=True)
class StreamNorm(Record):
    """Input of one norm on the residual stream.

    Attributes:
        site: name of the norm.
        sigma: median σ of its tokens.
        median: of |x|, over all pairs.
        largest, channel: the largest |x|, and its channel.
        written_by: sublayer that writes to the stream between the norm before and this one; None if not known.
        ratio: the largest |x| over the median.
        massive: whether it exceeds both 100 and 1000 times the median (arXiv 2402.17762).
    """

    site: str
    sigma: float
    median: float
    largest: float
    channel: int
    written_by: str | None

    _properties = ("ratio", "massive")

    @property
    def ratio(self) -> float:
        return self.largest / self.median

    @property
    def massive(self) -> bool:
        return self.largest > max(MASSIVE_SIZE, MASSIVE_RATIO * self.median)


@dataclass(frozen=True)
class Spike(Record):
    """Activations beyond 100 times the median at one norm, or at consecutive pre-norms.

    Attributes:
        site, last: the first norm that sees them, and the last.
        peak: the norm where they exceed the median most.
        channel, largest, ratio: the largest |x| there, its channel, and its ratio to the median.
        before: largest ratio in ``channel`` at the norm before ``site``; None without one.
        after: likewise at the norm behind ``last``; None if they reach the end of the stream.
        positions: position, and number of tokens, of those among the 16 largest at the peak; empty if not known.
        cosine: between the y of two of these tokens, mean over pairs of them; None for fewer than two.
        massive: first and last norm where they are massive; None if nowhere.
        written_by, removed_by: such as ``FFN of layers.11``; None if not known.
    """

    site: str
    last: str
    peak: str
    channel: int
    largest: float
    ratio: float
    before: float | None
    after: float | None
    positions: tuple[tuple[int, int], ...]
    cosine: float | None
    massive: tuple[str, str] | None
    written_by: str | None
    removed_by: str | None


@dataclass(frozen=True)
class Stream(Record):
    """The residual stream, as the norms of a network see it.

    Attributes:
        placement: of the norms; None if none is on a stream, and all norms are meant.
        norms: in the order of depth; of two that read the same values, the first.
        spikes: in the order of depth.
    """

    placement: str | None
    norms: tuple[StreamNorm, ...]
    spikes: tuple[Spike, ...]


def stream_of(capture: Capture) -> Stream:
    """Follow the residual stream of a captured network from norm to norm.

    The inputs of consecutive pre-norms differ by what the sublayer between them writes. In blocks of two norms, the
    first sublayer counts as attention, though it may mix tokens in another way, and the second as the FFN. In other
    networks the writer is not known.

    >>> import normscope
    >>> stream = stream_of(normscope.capture(normscope.load("demo_vit", limit=2)))
    >>> stream.placement, len(stream.norms), stream.norms[2].written_by, stream.spikes
    ('pre-norm', 17, 'FFN of blocks.0', ())
    """
    placement, sites = _sites_on_stream(capture)
    stats = [capture.stats[site.name] for site in sites]
    pairs = itertools.pairwise(sites)
    joined = [False, *(placement == "pre-norm" and _joined(capture, sites, *pair) for pair in pairs)]
    writers = [sublayer if join else None for sublayer, join in zip([None, *_sublayers(sites)], joined, strict=False)]
    norms = []
    for site, sums, writer in zip(sites, stats, writers, strict=False):
        sigma = of_tokens(sums.token_scales).quantile(0.5)
        reach = float(sums.reach.max()), int(sums.reach.argmax())
        norms.append(StreamNorm(site.name, sigma, _median(sums), *reach, writer))
    runs = list[list[int]]()
    for number, norm in enumerate(norms):
        before = norms[number - 1].ratio if joined[number] else 0.0
        if norm.ratio > SPIKE_RATIO:
            follows = before > SPIKE_RATIO and norm.ratio <= _JUMP * before
            runs = [*runs[:-1], [*runs[-1], number]] if follows else [*runs, [number]]
    return Stream(placement, tuple(norms), tuple(_spike(run, norms, stats, [*joined, False]) for run in runs))


def _sites_on_stream(capture: Capture) -> tuple[str | None, list[NormSite]]:
    norms = [site for site in capture.sites if site.pointwise is None and _median(capture.stats[site.name]) > 0]
    present = {site.placement for site in norms}
    placement = next((name for name in ("pre-norm", "post-norm") if name in present), None)
    norms = [site for site in norms if placement is None or site.placement in (placement, "final")]
    sums = [capture.stats[site.name].channel_sums for site in norms]
    again = [False, *(torch.equal(*pair) for pair in itertools.pairwise(sums))]  # norms of parallel sublayers
    return placement, [site for site, repeated in zip(norms, again, strict=False) if not repeated]


def _median(stats: PairStats) -> float:
    return of_pairs(stats.moments.sum(0)).quantile(0.5) if stats.n_pairs else 0.0


def _joined(capture: Capture, stream: Sequence[NormSite], before: NormSite, site: NormSite) -> bool:
    """True if a norm reads the stream behind another, and no norm between them is missing."""
    first, second = (capture.stats[norm.name] for norm in (before, site))
    same = (first.channels, first.n_tokens, 1, 1) == (second.channels, second.n_tokens, before.calls, site.calls)
    beside = {norm.index for norm in capture.sites if norm not in stream}
    return same and beside.issuperset(range(before.index + 1, site.index))


def _sublayers(sites: Sequence[NormSite]) -> list[str | None]:
    """Name the sublayer that reads each norm, by the order of the norms in a block."""
    names = [site.name for site in sites if site.placement == "pre-norm"]
    blocks = [(_BLOCK.match(site.path) or [site.path])[0] for site in sites]
    # Numbers of one block may be several (block.3.layer.1 in T5), or within a word (encoder_layer_3 in torchvision).
    for kinds in ([*map(kind_of_site, names)], [re.sub(r"\d+", "*", name, count=1) for name in names]):
        distinct = list(dict.fromkeys(kinds))
        if len(distinct) == len(_SUBLAYERS) and kinds == (distinct * len(kinds))[: len(kinds)]:
            return [f"{sublayer} of {block}" for block, sublayer in zip(blocks, itertools.cycle(_SUBLAYERS))]
    return [None] * len(sites)


def _spike(
    run: Sequence[int], norms: Sequence[StreamNorm], all_stats: Sequence[PairStats], joined: Sequence[bool]
) -> Spike:
    first, last = run[0], run[-1]
    at_peak = max(run, key=lambda number: norms[number].ratio)
    peak, stats = norms[at_peak], all_stats[at_peak]
    tokens = stats.largest
    beyond = tokens.x.abs().amax(1) > SPIKE_RATIO * peak.median
    unit = nn.functional.normalize(tokens.y[beyond].double(), dim=1)
    n_pairs = 0 if stats.grouped else len(unit) * (len(unit) - 1)
    known = bool((tokens.sample >= 0).all()) and not stats.grouped
    massive = [norms[number].site for number in run if norms[number].massive]

    def ratio_at(number: int, connected: bool) -> float | None:
        return float(all_stats[number].reach[peak.channel]) / norms[number].median if connected else None

    return Spike(
        site=norms[first].site,
        last=norms[last].site,
        peak=peak.site,
        channel=peak.channel,
        largest=peak.largest,
        ratio=peak.ratio,
        before=ratio_at(first - 1, joined[first]),
        after=ratio_at(last + 1, joined[last + 1]),
        positions=tuple(Counter(tokens.position[beyond].tolist()).most_common()) if known else (),
        cosine=float((unit @ unit.mT).sum() - len(unit)) / n_pairs if n_pairs else None,
        massive=(massive[0], massive[-1]) if massive else None,
        written_by=norms[first].written_by,
        removed_by=norms[last + 1].written_by if joined[last + 1] else None,
    )
