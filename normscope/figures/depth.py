"""Fits over the depth of one network, by kind of site; and α against how far the norm's input spreads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from normscope.errors import DataError, UsageError, count
from normscope.figures.panels import best_of, remarks
from normscope.figures.style import (
    LEAST_POINTS,
    LINE_POINTS,
    NOTE,
    Style,
    draw_guides,
    inches_of,
    key,
    scale_where_wide,
    sheet,
    style_named,
    that_fits,
    wrapped,
    write_above,
    write_at,
)
from normscope.fits.card import NormCard
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.expressions import curves_named
from normscope.fits.curves.known import FREE, Curve
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import kind_of_site
from normscope.pairs.sums.stats import PairStats

_MARKERS = "osD^vP*X"
_ROW_INCHES, _SQUARE_INCHES = 1.15, 1.7
_COLUMN_INCHES = 2.3


def plot_depth(
    capture: Capture,
    fits: Sequence[CurveFit],
    *,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw A, α and R² of every site over the depth, a line a kind of site, and α against 1/std of the norm's input.

    A column a curve, of more than four those of the four largest mean R². Bars are 95 % intervals; dotted lines are the
    ceilings. A and α that are not identifiable are left out. The last row is figure 8 of arXiv 2503.10622, for
    fitted α in place of learned ones; there the dashed line is α·std = 1.

    Args:
        capture: what :func:`normscope.capture` returned.
        fits: what :func:`normscope.fit` made of each of its sites.
        width: of the figure, in inches.
        title: above all panels, as of :func:`normscope.plot`.
        style: ``light`` or ``dark``.

    Raises:
        DataError: if there is no fit of a site of this capture.
        UsageError: if there is no such style.
    """
    theme = style_named(style)
    numbers = {site.name: site.index for site in capture.sites}
    fits = [fit for fit in fits if fit.site in numbers and fit.channel is None]
    if not fits:
        raise DataError("There is no fit of a site to draw over the depth; fit each site by itself.")
    curves, _ = best_of([fit for fit in fits if fit.curve != FREE] or fits)
    kinds = list(dict.fromkeys(kind_of_site(site.name) for site in capture.sites))
    handles = [
        *(key(kind, ms=3, **_look(place, theme)) for place, kind in enumerate(kinds)),
        key("ceiling: the best f(x) that was found", theme.faint, ":", marker="_", ms=4),
        key("α = 1/std", theme.faint, "--"),
    ]
    inches = inches_of(width, max(4.6, 0.5 + _COLUMN_INCHES * len(curves)))
    room = (inches - 0.5) / len(curves)
    height, samples = 0.7 + _ROW_INCHES * len(_NUMBERS) + _SQUARE_INCHES, count(capture.n_samples, "sample")
    foot = remarks([], fits)
    with sheet(theme, inches, height, title, capture.about, samples, foot=foot, handles=handles) as figure:
        ratios = [*([_ROW_INCHES] * len(_NUMBERS)), _SQUARE_INCHES]
        axes = figure.subplots(len(ratios), len(curves), squeeze=False, height_ratios=ratios)
        for column, curve in enumerate(curves):
            of_curve = [fit for fit in fits if fit.curve == curve]
            for ax, label in zip(axes[:-1, column], _NUMBERS, strict=True):
                for place, kind in enumerate(kinds):
                    of_kind = [fit for fit in of_curve if kind_of_site(fit.site) == kind]
                    _draw_number(ax, [(numbers[fit.site], fit) for fit in of_kind], _look(place, theme), label)
                ax.set_ylabel(label if column == 0 else "")
                ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
                scale_where_wide(ax)
                draw_guides(ax, theme)
            names = ("norm site, in the order of calls", "norm site")
            axes[-2, column].set_xlabel(that_fits(names, room), labelpad=1)
            axes[0, column].set_title(curve, parse_math=False)
            _draw_spread(axes[-1, column], capture, of_curve, kinds, theme)
            names = ("1 / std of the norm's input x", "1 / std of x")
            axes[-1, column].set_xlabel(that_fits(names, room), labelpad=1)
        axes[-1, 0].set_ylabel("α")
        figure.align_ylabels(axes[:, 0])
    return figure


def _look(place: int, theme: Style) -> dict[str, Any]:
    colours = theme.curves
    return {"color": colours[place % len(colours)], "marker": _MARKERS[place % len(_MARKERS)]}


_NUMBERS: dict[str, tuple[str, Callable[[CurveFit], float]]] = {  # by label: the field, and its value to draw
    "A": ("amplitude", lambda fit: fit.amplitude if fit.told_apart else math.nan),
    "α": ("alpha", lambda fit: fit.alpha if fit.told_apart else math.nan),
    "R²": ("r2", lambda fit: fit.r2),
}


def _draw_number(ax: Axes, points: Sequence[tuple[int, CurveFit]], look: dict[str, Any], label: str) -> None:
    name, value = _NUMBERS[label]
    shown = [(at, fit) for at, fit in points if math.isfinite(value(fit))]
    ax.plot([at for at, _ in shown], [value(fit) for _, fit in shown], lw=0.8, ms=2.8, mew=0, zorder=3, **look)
    for at, fit in shown:
        if name in fit.intervals:
            ax.plot([at, at], fit.intervals[name], color=look["color"], lw=0.6, zorder=2)
    ceilings = [(at, fit.r2_ceiling) for at, fit in points if name == "r2" and fit.r2_ceiling is not None]
    if ceilings:
        ax.plot(*zip(*ceilings, strict=True), color=look["color"], ls=":", marker="_", ms=4, lw=0.9, zorder=1)


def spread(stats: PairStats) -> float:
    """Return the standard deviation of a norm's input x over all of its pairs; NaN without any."""
    n, x, _, xx, _, _ = stats.moments.sum((0, 2)).tolist()
    return math.sqrt(max(xx / n - (x / n) ** 2, 0.0)) if n else math.nan


def _draw_spread(ax: Axes, capture: Capture, fits: Sequence[CurveFit], kinds: Sequence[str], theme: Style) -> None:
    """α against 1/std of x, on axes of equal factors."""
    every = []
    for place, kind in enumerate(kinds):
        of_kind = [fit for fit in fits if fit.told_apart and fit.alpha > 0 and kind_of_site(fit.site) == kind]
        stds = [spread(capture.stats[fit.site]) for fit in of_kind]
        points = [(1 / std, fit.alpha) for std, fit in zip(stds, of_kind, strict=True) if std > 0]
        every += points
        look = {**_look(place, theme), "ls": "", "ms": 3, "mew": 0, "zorder": 3}
        ax.plot([x for x, _ in points], [alpha for _, alpha in points], **look)
    if not every:
        ax.text(0.5, 0.5, "no α is told", color=theme.faint, ha="center", va="center", transform=ax.transAxes)
        return
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    x = np.array(sorted(x for x, _ in every))
    limits = ax.get_ylim()
    ax.plot(x[[0, -1]], x[[0, -1]], color=theme.faint, ls="--", lw=0.8, zorder=1)
    ax.set_ylim(min(limits[0], x[0]), max(limits[1], x[-1]))


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
    """Draw the channels' shares of Σx² at every norm site, and the positions of the tokens of largest |x|.

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

    Raises:
        DataError: if no site has pairs.
        UsageError: if there is no such style.
    """
    theme = style_named(style)
    sites = [site for site in capture.sites if capture.stats[site.name].n_pairs]
    if not sites:
        raise DataError("No site holds a pair, so that there are no tails to draw.")
    by_site = {card.site: card for card in cards}
    tails = [card.tails if (card := by_site.get(site.name)) else None for site in sites]
    massive = [place for place, tail in enumerate(tails) if tail is not None and tail.massive]
    shares = [shares_of(capture, site.name) for site in sites]
    inches = inches_of(width, max(_LEAST_INCHES, 1.6 + _SITE_INCHES * len(sites)))
    samples = count(capture.n_samples, "sample")
    foot = ["×: massive activations, |x| beyond 100 and 1000 times the median"] if massive else []
    with sheet(theme, inches, 0.7 + 2 * _MAP_INCHES, title, capture.about, samples, foot=foot) as figure:
        channels, tokens = figure.subplots(2, 1, sharex=True)
        numbers = [site.index for site in sites]
        _draw_channels(figure, channels, shares, theme)
        _draw_positions(figure, tokens, [dict(tail.positions) if tail is not None else {} for tail in tails], theme)
        for place in massive:
            write_at(channels, "×", (place, 1), (0, 0), ("data", "axes fraction"), va="baseline", ha="center")
        tokens.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        tokens.xaxis.set_major_formatter(lambda at, _: str(numbers[round(at)]) if 0 <= round(at) < len(numbers) else "")
        tokens.set_xlabel("norm site, in the order of calls", labelpad=1)
    return figure


def shares_of(capture: Capture, site: str) -> Array:
    """Return each channel's share of Σx² at a site, float64 ``(d,)``."""
    squares: Array = capture.stats[site].channel_sums[1].double().numpy()
    return squares / squares.sum() if squares.sum() > 0 else np.zeros_like(squares)


def _draw_channels(figure: Figure, ax: Axes, shares: Sequence[Array], theme: Style) -> None:
    each, rows = _rows_of(max(map(len, shares)))
    image = np.full((rows, len(shares)), np.nan)
    peaks: dict[int, float] = {}
    for column, share in enumerate(shares):
        of_rows = np.maximum.reduceat(share, np.arange(0, len(share), each))
        image[: len(of_rows), column] = of_rows
        for channel in map(int, np.flatnonzero(share > _TIMES / len(share))):
            peaks[channel] = max(peaks.get(channel, 0.0), float(share[channel]))
    shown = np.ma.masked_where(~(image > 0), image)
    top = float(shown.max()) if shown.count() else 1.0
    norm = LogNorm(max(float(shown.min()), 1e-4 * top) if shown.count() else 0.1, top)
    _draw_map(figure, ax, shown, each, theme, norm, "share of Σx²")
    ax.set_ylabel("channel")
    _name(ax, peaks, rows * each, theme)


def _rows_of(numbers: int) -> tuple[int, int]:
    """Return how many channels or positions share a row of a map, and the number of its rows."""
    each = math.ceil(numbers / _ROWS)
    return each, math.ceil(numbers / each)


def _draw_map(figure: Figure, ax: Axes, image: Any, each: int, theme: Style, norm: Normalize, label: str) -> None:
    """Draw a masked image ``(rows, sites)`` with ``each`` channels or positions per row."""
    rows, columns = image.shape
    extent = (-0.5, columns - 0.5, -0.5, rows * each - 0.5)
    look: dict[str, Any] = {"origin": "lower", "aspect": "auto", "interpolation": "nearest", "cmap": theme.tokens}
    figure.colorbar(ax.imshow(image, extent=extent, norm=norm, **look), ax=ax, pad=0.09, label=label, aspect=30)


def _draw_positions(figure: Figure, ax: Axes, positions: Sequence[dict[int, int]], theme: Style) -> None:
    totals = dict.fromkeys(sorted(set().union(*positions)), 0)
    each, rows = _rows_of(max(totals, default=0) + 1)
    image = np.zeros((rows, len(positions)))
    for column, at_site in enumerate(positions):
        for position, number in at_site.items():
            image[position // each, column] += number
            totals[position] += number
    norm = Normalize(0, max(image.max(), 1))
    _draw_map(figure, ax, np.ma.masked_equal(image, 0), each, theme, norm, "of the 16 tokens of largest |x|")
    ax.set_ylabel("position of the token")
    _name(ax, totals, rows * each, theme)


def _name(ax: Axes, weights: Mapping[int, float], top: int, theme: Style) -> None:
    """Write numbers of rows at the right edge, the weightiest first, where none would run into another."""
    kept: list[int] = []
    for number in sorted(weights, key=lambda number: -weights[number])[:_NAMED]:
        if all(abs(number - other) > 0.05 * top for other in kept):
            kept.append(number)
            look = {"va": "center", "fontsize": LEAST_POINTS, "color": theme.ink}
            write_at(ax, f"{number}", (1, number), (3, 0), ("axes fraction", "data"), **look)


_PANEL_INCHES = 1.55
_HEIGHT = 1.1
_COLUMNS = 4
_REACH = 5.0
_POINTS = 601
ALPHAS = (0.5, 1.0, 2.0)


def plot_curves(
    curves: str | Sequence[str | Curve] = "all",
    *,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw f(αx) of curves for α = 0.5, 1 and 2, a panel each, with its formula above it.

    The panels of hardtanh, sigmoid and tanh are figure 7 of arXiv 2503.10622, and that of tanh its figure 3.

    Args:
        curves: names separated by commas or as a list, ``all``, or formulas, as ``func`` of :func:`normscope.fit`.
        width: of the figure, in inches.
        title: above all panels; by default, and with ``none``, there is none.
        style: ``light`` or ``dark``.

    Raises:
        UsageError: if there is no such curve or style, or if the width is under 2 inches.
    """
    chosen, theme = curves_named(curves), style_named(style)
    if not chosen:
        raise UsageError("There is no curve to draw; name one or more, or all.")
    columns = min(_COLUMNS, len(chosen)) if width is None else max(1, min(len(chosen), int(width / 1.3)))
    inches = inches_of(width, 0.3 + _PANEL_INCHES * columns)
    rows = math.ceil(len(chosen) / columns)
    handles = [key(f"α = {alpha:g}", theme.curves[place], lw=1.1) for place, alpha in enumerate(ALPHAS)]
    with sheet(theme, inches, 0.1 + (_HEIGHT + 0.55) * rows, title, {}, handles=handles) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for ax in axes.flat[len(chosen) :]:
            ax.set_visible(False)
        for number, (ax, curve) in enumerate(zip(axes.flat, chosen, strict=False)):
            _draw(ax, curve, theme, inches / columns - 0.35)
            ax.tick_params(labelbottom=number + columns >= len(chosen))
    return figure


def _draw(ax: Axes, curve: Curve, theme: Style, inches: float) -> None:
    x = torch.linspace(-_REACH, _REACH, _POINTS, dtype=torch.float64)
    for place, alpha in enumerate(ALPHAS):
        ax.plot(x, curve.function(alpha * x), color=theme.curves[place], lw=1.1)
    for level in (0.0,) if curve.limit is None else (-curve.limit, 0.0, curve.limit):
        ax.axhline(level, color=theme.faint, lw=0.5, ls=":", zorder=0)
    reach = 1.15 * (curve.limit or 2.0)
    ax.set(xlim=(-_REACH, _REACH), ylim=(-reach, reach))
    formula = wrapped(f"f(u) = {curve.formula}", inches, NOTE)
    pad = write_above(ax, [[(line, theme.ink)] for line in formula])
    ax.set_title(curve.name, loc="left", pad=max(pad, LINE_POINTS), parse_math=False)
