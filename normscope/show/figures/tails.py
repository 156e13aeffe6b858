"""Spikes, channels' shares of Σx² and the positions of the tokens of largest |x|, over the depth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from normscope.errors import DataError, count
from normscope.fits.card import NormCard, Tails
from normscope.fits.spikes import SPIKE_RATIO, Stream, stream_of
from normscope.pairs.captures import Capture
from normscope.pairs.sums.sampling import LARGEST_TOKENS
from normscope.show.figures.sheet import draw_guides, inches_of, key, scale_by_factors, sheet_of, site_labels
from normscope.show.figures.style import LEAST_POINTS, FigureOptions, Style, theme_of
from normscope.show.figures.text import name_sites, names_inches, write_at

Array = NDArray[np.float64]
_SITE_INCHES, _LEAST_INCHES, _MAP_INCHES = 0.16, 4.6, 2.0
_SIDES_INCHES = 0.9  # of a figure's width, beside the maps
_ROWS = 200  # of pixels at most, each the largest of its channels
_NAMED = 6  # channels or positions beside a map
_TIMES = 10.0  # the share that channels alike would have: from there on a channel is named
_DOT_POINTS = 9.0  # diameter of the dot of all 16 tokens
_COUNTS = (1, 4, LARGEST_TOKENS)  # of the legend
_DEPTH_INCHES = 1.25
_DASHED = (0, (4, 1.5))
_GROWTH = "σ : σ of the first norm"
_MASSIVE = "massive activations"


def plot_tails(capture: Capture, cards: Sequence[NormCard], **options: Unpack[FigureOptions]) -> Figure:
    """Draw spikes and σ, the channels' shares of Σx² and the positions of the tokens of largest |x|, by depth.

    Above, the largest |x| over the median of |x|, and the median σ over that of the first norm, at the norms of the
    residual stream. Triangles mark where spikes, beyond 100 times the median (dotted), are first and last seen, with
    their channel and the sublayer that writes them; crosses mark massive activations (arXiv 2402.17762). In the middle,
    each channel's share of Σx² over all pairs; channels with ten times the mean share are named at the right. Below,
    dots whose area is the number of the 16 tokens of largest |x| at each position.

    Args:
        capture: what :func:`normscope.capture` returned.
        cards: what :func:`normscope.norm_cards` made of it.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        DataError: if no site has pairs.
        UsageError: if an option is not valid.
    """
    theme = theme_of(options)
    sites = [site.name for site in capture.sites if capture.stats[site.name].n_pairs]
    if not sites:
        raise DataError("No site holds a pair, so that there are no tails to draw.")
    by_site = {card.site: card.tails for card in cards if card.tails is not None}
    tails = {number: by_site[site] for number, site in enumerate(sites) if site in by_site}
    stream = stream_of(capture)
    inches = inches_of(options.get("width"), max(_LEAST_INCHES, 1.6 + _SITE_INCHES * len(sites)))
    most = min(_DOT_POINTS, 72 * (inches - _SIDES_INCHES) / len(sites))
    dot: dict[str, Any] = {"color": theme.ink, "ls": "", "marker": "o", "mew": 0}
    lines = (("max |x| : median of |x|", "-"), (_GROWTH, _DASHED)) if stream.norms else ()
    handles = [
        *(key(label, theme.ink, ls) for label, ls in lines),
        *(key(label, theme.ink, "", marker=marker, ms=3.5) for marker, (label, _) in _marks(stream).items()),
        *(key(count(n, "token"), ms=most * math.sqrt(n / LARGEST_TOKENS), **dot) for n in _COUNTS),
    ]
    names = list(site_labels(sites, options).values())
    ratios = [*([_DEPTH_INCHES] if stream.norms else []), _MAP_INCHES + 0.4, _MAP_INCHES]
    height, samples = 0.2 + sum(ratios) + names_inches(names), count(capture.n_samples, "sample")
    with sheet_of(options, theme, inches, height, capture.about, detail=samples, handles=handles) as figure:
        *depth, channels, tokens = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
        for ax in depth:  # none if no norm is left
            _draw_depth(ax, stream, {site: number for number, site in enumerate(sites)}, theme)
        _draw_channels(channels, [shares_of(capture, site) for site in sites], theme)
        _draw_positions(tokens, tails, most, theme)
        name_sites(tokens, names, inches - _SIDES_INCHES)
        tokens.set_xlim(-0.5, len(sites) - 0.5)
    return figure


def _marks(stream: Stream) -> dict[str, tuple[str, list[str]]]:
    """Return the label and the norms of each marker in the panel of spikes."""
    ends = [spike.last for spike in stream.spikes if spike.last not in (spike.site, stream.norms[-1].site)]
    marks = {
        "^": ("spike (over 100) born", [spike.site for spike in stream.spikes]),
        "v": ("last seen", ends),
        "x": (_MASSIVE, [norm.site for norm in stream.norms if norm.massive]),
    }
    return {marker: mark for marker, mark in marks.items() if mark[1]}


def _draw_depth(ax: Axes, stream: Stream, at: Mapping[str, int], theme: Style) -> None:
    """Draw the ratios of the norms of a stream, and mark where its spikes begin and end."""
    x = [at[norm.site] for norm in stream.norms]
    ax.plot(x, [norm.ratio for norm in stream.norms], color=theme.ink, lw=0.9)
    ax.plot(x, [norm.sigma / stream.norms[0].sigma for norm in stream.norms], color=theme.ink, lw=0.9, ls=_DASHED)
    ax.axhline(SPIKE_RATIO, color=theme.faint, lw=0.6, ls=":")
    ratios = {norm.site: norm.ratio for norm in stream.norms}
    for marker, (_, marked) in _marks(stream).items():
        ys = [ratios[site] for site in marked]
        ax.plot([at[site] for site in marked], ys, marker, color=theme.ink, ms=3.5, mew=0.6, clip_on=False)
    named: list[int] = []
    for spike in sorted(stream.spikes, key=lambda spike: -spike.ratio):
        if len(named) < _NAMED and all(abs(at[spike.site] - other) > 0.1 * len(at) for other in named):
            named.append(at[spike.site])
            words = ", ".join([str(spike.channel), *([spike.written_by.partition(" ")[0]] if spike.written_by else [])])
            early = at[spike.site] < 0.15 * len(at)  # no room to its left
            look = {"ha": "left", "va": "top"} if early else {"ha": "right", "va": "center"}
            place, offset = (at[spike.site], ratios[spike.site]), (1, -4) if early else (-4, 0)
            write_at(ax, words, place, offset, "data", fontsize=LEAST_POINTS, color=theme.ink, **look)
    ax.set_ylabel("ratio")
    scale_by_factors(ax)


def shares_of(capture: Capture, site: str) -> Array:
    """Return each channel's share of Σx² at a site, float64 ``(d,)``."""
    squares: Array = capture.stats[site].channel_sums[1].double().numpy()
    return squares / squares.sum() if squares.sum() > 0 else np.zeros_like(squares)


def _draw_channels(ax: Axes, shares: Sequence[Array], theme: Style) -> None:
    widest = max(map(len, shares))
    pooled = math.ceil(widest / _ROWS)  # channels in a row of pixels
    rows = math.ceil(widest / pooled)
    image = np.full((rows, len(shares)), np.nan)
    peaks: dict[int, float] = {}
    for column, share in enumerate(shares):
        largest = np.maximum.reduceat(share, np.arange(0, len(share), pooled))
        image[: len(largest), column] = 100 * largest
        for channel in map(int, np.flatnonzero(share > _TIMES / len(share))):
            peaks[channel] = max(peaks.get(channel, 0.0), float(share[channel]))
    shown = np.ma.masked_where(~(image > 0), image)
    top = float(shown.max()) if shown.count() else 100.0
    norm = LogNorm(max(float(shown.min()), 1e-4 * top) if shown.count() else 10.0, top)
    look: dict[str, Any] = {"origin": "lower", "aspect": "auto", "interpolation": "nearest", "cmap": theme.tokens}
    drawn = ax.imshow(shown, extent=(-0.5, len(shares) - 0.5, -0.5, rows * pooled - 0.5), norm=norm, **look)
    ticks = LogLocator(subs=(1, 3))
    bar = ax.figure.colorbar(drawn, ax=ax, location="top", aspect=60, pad=0.03, ticks=ticks, format="{x:g}")
    bar.set_label("share of Σx² at the site [%]")
    bar.minorticks_off()
    ax.set_ylabel("channel")
    _name_rows(ax, peaks, rows * pooled, f"over {_TIMES:g} times the mean share", theme)


def _draw_positions(ax: Axes, tails: Mapping[int, Tails], most: float, theme: Style) -> None:
    """Draw a dot for the tokens at each position of each site, ``most`` points wide if it has all of the site's."""
    dots = [(site, position, n) for site, of_site in tails.items() for position, n in dict(of_site.positions).items()]
    totals = Counter[int]()
    for _, position, n in dots:
        totals[position] += n
    sites, at, counts = np.array(dots, int).reshape(-1, 3).T
    ax.scatter(sites, at, most**2 * counts / LARGEST_TOKENS, theme.ink, lw=0)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel("position of the tokens\nof largest |x|")
    draw_guides(ax, theme)
    _name_rows(ax, totals, max(totals, default=0) + 1, "commonest positions", theme)


def _name_rows(ax: Axes, weights: Mapping[int, float], top: int, title: str, theme: Style) -> None:
    """Write numbers of rows at the right edge, the weightiest first, where none would run into another; and a title."""
    named: list[int] = []
    for number in sorted(weights, key=lambda number: -weights[number])[:_NAMED]:
        if all(abs(number - above) > 0.05 * top for above in named):
            named.append(number)
            look = {"va": "center", "fontsize": LEAST_POINTS, "color": theme.ink}
            write_at(ax, f"{number}", (1, number), (3, 0), ("axes fraction", "data"), **look)
    if named:
        write_at(ax, title, (1, 0.5), (20, 0), va="center", fontsize=LEAST_POINTS, color=theme.faint, rotation=90)
