"""Where the squares of a network's activations lie: channels by depth and tokens by depth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from normscope.errors import DataError, count
from normscope.figures.notes import framed, heading, inches_of, title_and_foot
from normscope.figures.style import LEAST_POINTS, Style, style_named
from normscope.fits.views.card import NormCard
from normscope.pairs.captures import Capture

Array = NDArray[np.float64]
_SITE_INCHES, _LEAST_INCHES, _MAP_INCHES = 0.16, 4.6, 2.0
_ROWS = 200  # of pixels at most, each the largest of its channels
_NAMED = 6  # channels or positions beside a map
_TIMES = 10.0  # the share that channels alike would have: from there on a channel is named


def plot_tails(
    capture: Capture,
    cards: Sequence[NormCard],
    *,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw which channels hold Σx² at every norm site, and at which positions the tokens of largest |x| stand.

    Above, each channel's share of Σx² on a logarithmic scale, a column a site, over all pairs; channels that hold ten
    times as much as they would if all were alike are named at the right. Below, how many of the 16 tokens of largest
    |x| of each site stand at each position within their samples. A cross marks a site with massive activations
    (|x| beyond 100 and beyond 1000 times the median, arXiv 2402.17762). Both maps are of the site's own channels: of
    networks whose widths differ, each column goes to its own number.

    Args:
        capture: what :func:`normscope.capture` returned.
        cards: what :func:`normscope.norm_cards` made of it.
        width: of the figure, in inches.
        title: above both maps, as of :func:`normscope.plot`.
        style: ``light`` or ``dark``.

    Returns:
        A matplotlib figure; :func:`normscope.save_figure` writes it.

    Raises:
        DataError: if no site holds pairs.
        UsageError: if there is no such style.
    """
    theme = style_named(style)
    sites = [site for site in capture.sites if capture.stats[site.name].n_pairs]
    if not sites:
        raise DataError("No site holds a pair, so that there are no tails to draw.")
    by_site = {card.site: card for card in cards}
    chosen = [by_site[site.name] for site in sites if site.name in by_site]
    shares = [shares_of(capture, site.name) for site in sites]
    inches = inches_of(width, max(_LEAST_INCHES, 1.6 + _SITE_INCHES * len(sites)))
    usual = heading(capture.about, count(capture.n_samples, "sample"))
    title, origin = title_and_foot(title, usual, capture.about)
    foot = ["×: massive activations, |x| beyond 100 and 1000 times the median"] if _massive(chosen) else []
    foot.append(origin)
    with matplotlib.rc_context(theme.rc()):
        figure = framed(inches, 0.7 + 2 * _MAP_INCHES, title, foot, theme)
        channels, tokens = figure.subplots(2, 1, sharex=True)
        numbers = [site.index for site in sites]
        _draw_channels(figure, channels, shares, theme)
        _draw_positions(figure, tokens, [_positions(by_site.get(site.name)) for site in sites], theme)
        for place, site in enumerate(sites):
            if (card := by_site.get(site.name)) and card.tails and card.tails.massive:
                channels.annotate(
                    "×", (place, 1), (0, 0), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center"
                )
        tokens.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        tokens.xaxis.set_major_formatter(lambda at, _: str(numbers[round(at)]) if 0 <= round(at) < len(numbers) else "")
        tokens.set_xlabel("norm site, in the order of calls", labelpad=1)
    return figure


def _massive(cards: Sequence[NormCard]) -> bool:
    return any(card.tails is not None and card.tails.massive for card in cards)


def shares_of(capture: Capture, site: str) -> Array:
    """Return each channel's share of Σx² at a site, float64 ``(d,)``."""
    squares: Array = capture.stats[site].channel_sums[1].double().numpy()
    return squares / squares.sum() if squares.sum() > 0 else np.zeros_like(squares)


def _draw_channels(figure: Figure, ax: Axes, shares: Sequence[Array], theme: Style) -> None:
    most = max(map(len, shares))
    each = math.ceil(most / _ROWS)
    rows = math.ceil(most / each)
    image = np.full((rows, len(shares)), np.nan)
    for column, share in enumerate(shares):
        of_rows = np.maximum.reduceat(share, np.arange(0, len(share), each))
        image[: len(of_rows), column] = of_rows
    shown = np.ma.masked_where(~(image > 0), image)
    top = float(shown.max()) if shown.count() else 1.0
    drawn = ax.imshow(
        shown,
        extent=(-0.5, len(shares) - 0.5, -0.5, rows * each - 0.5),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap=theme.tokens,
        norm=LogNorm(max(float(shown.min()), 1e-4 * top) if shown.count() else 0.1, top),
    )
    figure.colorbar(drawn, ax=ax, pad=0.09, label="share of Σx²", aspect=30)
    ax.set_ylabel("channel")
    peaks: dict[int, float] = {}
    for share in shares:
        for channel in np.flatnonzero(share > _TIMES / len(share)):
            peaks[int(channel)] = max(peaks.get(int(channel), 0.0), float(share[channel]))
    _name(ax, sorted(peaks, key=lambda channel: -peaks[channel])[:_NAMED], rows * each, theme)


def _positions(card: NormCard | None) -> dict[int, int]:
    return dict(card.tails.positions) if card is not None and card.tails is not None else {}


def _draw_positions(figure: Figure, ax: Axes, positions: Sequence[dict[int, int]], theme: Style) -> None:
    known = sorted({position for at_site in positions for position in at_site})
    most = max(known, default=0) + 1
    each = math.ceil(most / _ROWS)
    rows = math.ceil(most / each)
    image = np.zeros((rows, len(positions)))
    for column, at_site in enumerate(positions):
        for position, number in at_site.items():
            image[position // each, column] += number
    drawn = ax.imshow(
        np.ma.masked_equal(image, 0),
        extent=(-0.5, len(positions) - 0.5, -0.5, rows * each - 0.5),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap=theme.tokens,
        vmin=0,
        vmax=max(image.max(), 1),
    )
    label = "of the 16 tokens of largest |x|"
    figure.colorbar(drawn, ax=ax, pad=0.09, label=label, aspect=30)
    ax.set_ylabel("position of the token")
    totals = {position: sum(at_site.get(position, 0) for at_site in positions) for position in known}
    _name(ax, sorted(totals, key=lambda position: -totals[position])[:_NAMED], rows * each, theme)


def _name(ax: Axes, numbers: Sequence[int], top: int, theme: Style) -> None:
    """Write numbers of rows at the right edge, the weightiest first, where none would run into another."""
    kept: list[int] = []
    for number in numbers:
        if all(abs(number - other) > 0.05 * top for other in kept):
            kept.append(number)
            ax.annotate(
                f"{number}",
                (1, number),
                (3, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                fontsize=LEAST_POINTS,
                color=theme.ink,
            )
