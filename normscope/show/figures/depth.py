"""Fits over the depth of one network, by kind of site; and α against how far the norm's input spreads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from normscope.curves.expressions import curves_named
from normscope.curves.known import FLAT, FREE, Curve
from normscope.errors import DataError, UsageError, count
from normscope.fits.card import NormCard
from normscope.fits.curve_fit import CurveFit
from normscope.fits.saturation import saturation, spread
from normscope.norms.sites import kind_of_site
from normscope.pairs.captures import Capture
from normscope.pairs.sums.sampling import LARGEST_TOKENS
from normscope.show.figures.panels import best_of, remarks
from normscope.show.figures.style import (
    LEAST_POINTS,
    NO_LABELS,
    FigureOptions,
    Style,
    columns_of,
    draw_guides,
    inches_of,
    key,
    literal,
    name_sites,
    names_inches,
    scale_where_wide,
    sheet_of,
    site_labels,
    tail,
    that_fits,
    theme_of,
    write_at,
)

MARKERS = "osD^vP*X"
_ROW_INCHES, _SQUARE_INCHES = 1.15, 1.7
_COLUMN_INCHES = 2.3
_STRAIGHT_AT = 0.04  # of a panel's height: open markers of fits without the panel's number
_AGAINST_STD = "α = c/std, c the median of α·std"


def plot_depth(capture: Capture, fits: Sequence[CurveFit], **options: Unpack[FigureOptions]) -> Figure:
    """Draw A, α and R² of every site over the depth, a line a kind of site, and α against 1/std of the norm's input.

    A column a curve, of more than four those of the four largest mean R². Bars are 95 % intervals; dotted lines are the
    ceilings, beside the held-out R². Open markers are fits whose A and α are not identified, such as straight ones, and
    stand at the lower edge of the panels of A and α. The last row is figure 8 of arXiv 2503.10622, for fitted α in
    place of learned ones; on its dashed line α is proportional to 1/std.

    Args:
        capture: what :func:`normscope.capture` returned.
        fits: what :func:`normscope.fit` made of each of its sites.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        DataError: if there is no fit of a site of this capture.
        UsageError: if an option is not valid.
    """
    theme = theme_of(options)
    numbers = {site.name: site.index for site in capture.sites}
    fits = [fit for fit in fits if fit.site in numbers and fit.channel is None]
    if not fits:
        raise DataError("There is no fit of a site to draw over the depth; fit each site by itself.")
    fits = [fit for fit in fits if fit.curve != FREE] or fits
    curves, _ = best_of(fits)
    names = site_labels(numbers, {} if options.get("labels") == NO_LABELS else options)
    kind_of = {path: kind_of_site(name) for path, name in names.items()}
    looks = {kind: _look(place, theme) for place, kind in enumerate(dict.fromkeys(kind_of.values()))}
    handles: list[Artist] = [key(kind, ms=3, **look) for kind, look in looks.items()]
    handles += [
        *handles_of_fits([fit for fit in fits if fit.curve in curves], theme),
        key(_AGAINST_STD, theme.ink, (0, (4, 2))),
    ]
    inches = inches_of(options.get("width"), max(4.6, 0.5 + _COLUMN_INCHES * len(curves)))
    room = (inches - 0.5) / len(curves)
    rows = (AMPLITUDE, ALPHA, r_squared(fits))
    height, samples = 0.7 + _ROW_INCHES * len(rows) + _SQUARE_INCHES, count(capture.n_samples, "sample")
    foot = remarks([], fits)
    with sheet_of(options, theme, inches, height, capture.about, detail=samples, foot=foot, handles=handles) as figure:
        ratios = [*([_ROW_INCHES] * len(rows)), _SQUARE_INCHES]
        axes = figure.subplots(len(ratios), len(curves), squeeze=False, height_ratios=ratios)
        for column, curve in enumerate(curves):
            of_curve = [fit for fit in fits if fit.curve == curve]
            for ax, row in zip(axes[:-1, column], rows, strict=True):
                for kind, look in looks.items():
                    of_kind = [(numbers[fit.site], fit) for fit in of_curve if kind_of[fit.site] == kind]
                    draw_number(ax, row, of_kind, look)
                ax.set_ylabel(row.label if column == 0 else "")
                ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
                scale_where_wide(ax)
                finish(ax, row, theme)
            axes[-2, column].set_xlabel(that_fits(("norm site, in the order of calls", "norm site"), room), labelpad=1)
            axes[-1, column].set_xlabel(that_fits(("1 / std of the norm's input x", "1 / std of x"), room), labelpad=1)
            axes[0, column].set_title(curve, parse_math=False)
            stds = {fit.site: spread(capture.stats[fit.site]) for fit in of_curve}
            points = [(1 / stds[fit.site], fit) for fit in of_curve if fit.identified and stds[fit.site] > 0]
            _draw_spread(axes[-1, column], [(x, fit.alpha, looks[kind_of[fit.site]]) for x, fit in points], theme)
        axes[-1, 0].set_ylabel("α")
        figure.align_ylabels(axes[:, 0])
    return figure


def _look(place: int, theme: Style) -> dict[str, Any]:
    colours = theme.curves
    return {"color": colours[place % len(colours)], "marker": MARKERS[place % len(MARKERS)]}


@dataclass(frozen=True)
class FitNumber:
    """A number of a fit: the label of its axis, its name in the fit's intervals, and its value, NaN without any."""

    label: str
    name: str
    value: Callable[[CurveFit], float]


AMPLITUDE = FitNumber("A", "amplitude", lambda fit: fit.amplitude if fit.identified else math.nan)
ALPHA = FitNumber("α", "alpha", lambda fit: fit.alpha if fit.identified else math.nan)
SLOPE = FitNumber("slope at 0", "slope", lambda fit: math.nan if fit.curve == FREE else fit.slope)
SATURATED = FitNumber("saturated", "saturated", lambda fit: fit.saturated)
_R2 = FitNumber("R²", "r2", lambda fit: fit.r2)
_HELD_OUT = FitNumber("held-out R²", "r2_cv", lambda fit: math.nan if fit.r2_cv is None else fit.r2_cv)


def r_squared(fits: Sequence[CurveFit]) -> FitNumber:
    """Return the held-out R², which compares with the ceiling, or that of all pairs if no fit has folds."""
    return _R2 if all(fit.r2_cv is None for fit in fits) else _HELD_OUT


def draw_number(ax: Axes, number: FitNumber, points: Sequence[tuple[float, CurveFit]], look: Mapping[str, Any]) -> None:
    """Draw a number of each fit at its x, with 95 % intervals; of R² also the ceiling.

    Markers of fits whose A and α are not identified are open, and at the lower edge where the number is missing.
    """
    colour, marker = look["color"], {**look, "ls": "", "ms": 3, "mew": 0.8}
    values = [number.value(fit) for _, fit in points]
    ax.plot([x for x, _ in points], values, color=colour, lw=0.9, zorder=2)
    for (x, fit), y in zip(points, values, strict=True):
        face = ax.get_facecolor() if fit.doubt else colour
        if math.isfinite(y):
            ax.plot([x], [y], mfc=face, zorder=3, **marker)
            ax.plot([x, x], fit.intervals.get(number.name, (y, y)), color=colour, lw=0.7, zorder=1)
        elif fit.doubt:
            ax.plot([x], [_STRAIGHT_AT], mfc=face, transform=ax.get_xaxis_transform(), zorder=3, **marker)
    ceilings = [(x, fit.r2_ceiling) for x, fit in points if fit.r2_ceiling is not None]
    if number in (_R2, _HELD_OUT):
        look = {"color": colour, "ls": ":", "lw": 0.9, "marker": "_", "ms": 4, "zorder": 1}
        ax.plot([x for x, _ in ceilings], [y for _, y in ceilings], **look)


def handles_of_fits(fits: Sequence[CurveFit], theme: Style) -> list[Artist]:
    """Return the legend of open markers, ceilings and bars, as far as there are any."""
    handles: list[Artist] = []
    if any(fit.doubt for fit in fits):
        reasons = " or ".join(dict.fromkeys(fit.doubt for fit in fits if fit.doubt and not fit.unidentified))
        label = f"open: {reasons + ', ' if reasons else ''}A and α not identified"
        handles.append(key(label, theme.ink, "", marker="o", mfc=theme.background, ms=3.2))
    if any(fit.r2_ceiling is not None for fit in fits):
        handles.append(key("ceiling: held-out R² of the best function of x", theme.ink, ":", marker="_", ms=4))
    if any(fit.intervals for fit in fits):
        handles.append(key("95 % interval", theme.ink, "", marker="|", ms=6))
    return handles


def finish(ax: Axes, number: FitNumber, theme: Style) -> None:
    """Draw guides, and say in words if no fit has the number."""
    draw_guides(ax, theme)
    if not ax.dataLim.y0 < math.inf:
        ax.text(0.5, 0.5, f"no {number.label} identified", ha="center", va="center", transform=ax.transAxes)


def _draw_spread(
    ax: Axes, points: Sequence[tuple[float, float, dict[str, Any]]], theme: Style, ratio: float | None = None
) -> None:
    """α against 1/std of x, on axes of equal factors, and the line of a ratio α·std, by default the median."""
    if not points:
        finish(ax, ALPHA, theme)
        return
    for x, alpha, look in points:
        ax.plot([x], [alpha], ls="", ms=3, mew=0, zorder=3, **look)
    at, alphas = np.array(sorted((x, alpha) for x, alpha, _ in points)).T
    ends = at[[0, -1]]
    if ratio is not None:  # the axes alike, so that the line is their diagonal
        ends = at = alphas = np.array([min(*at, *alphas), max(*at, *alphas)])
    ax.set(xscale="log", yscale="log")
    for axis, values in ((ax.xaxis, at), (ax.yaxis, alphas)):
        digits = (1, 2, 5) if max(values) > 4 * min(values) else (1, 1.5, 2, 3, 5, 7)
        axis.set_major_locator(LogLocator(subs=digits, numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    slope = np.median(alphas / at) if ratio is None else ratio
    ax.plot(ends, slope * ends, color=theme.ink, ls=(0, (4, 2)), lw=0.8, zorder=1)


_SHARES = {f"beyond_{end}": f"|αx + s| > {end}" for end in (1, 2, 3)}
_SHARES["saturated"] = f"saturated: |f′| under {100 * FLAT:g} % of its peak"


def plot_saturation(capture: Capture, **options: Unpack[FigureOptions]) -> Figure:
    """Draw α of every point-wise function against 1/std of its input, and shares of its pairs over the depth.

    The first panel is figure 8 of arXiv 2503.10622, after training: on its dashed line α is 1/std. The second contains
    the shares of pairs with αx + s beyond ±1, ±2 and ±3, and beyond the ends of f, a line a kind of site. Where
    channels differ, α is their median.

    Args:
        capture: what :func:`normscope.capture` returned.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        DataError: if the capture has no point-wise function.
        UsageError: if an option is not valid.
    """
    theme, functions = theme_of(options), saturation(capture)
    if not functions:
        raise DataError("There is no point-wise function in this capture, so that nothing saturates.")
    sites = [each.site for each in functions]
    names = list(site_labels(sites, options).values())
    kinds = [*map(kind_of_site, site_labels(sites, {} if options.get("labels") == NO_LABELS else options).values())]
    markers = dict(zip(dict.fromkeys(kinds), itertools.cycle(MARKERS), strict=False))
    colours = dict(zip(_SHARES, (*theme.curves[1:4], theme.curves[0]), strict=True))
    handles = [key(kind, theme.ink, "", marker=marker, ms=3) for kind, marker in markers.items()]
    handles += [key("α = 1/std", theme.ink, (0, (4, 2))), *(key(_SHARES[share], colours[share]) for share in _SHARES)]
    inches = inches_of(options.get("width"), max(_LEAST_INCHES, 2.4 + _SITE_INCHES * len(names)))
    columns = columns_of({"width": inches}, 2, _BESIDE_INCHES, 2)
    height, samples = _MAP_INCHES * 2 / columns + names_inches(names), count(capture.n_samples, "sample")
    with sheet_of(options, theme, inches, height, capture.about, detail=samples, handles=handles) as figure:
        against, shares = figure.subplots(2 // columns, columns, width_ratios=(1, 1.6)[:columns])
        of_sites = [
            (each.inverse_std, abs(each.alpha.p50), {"color": theme.ink, "marker": markers[kind]})
            for each, kind in zip(functions, kinds, strict=True)
        ]
        _draw_spread(against, [point for point in of_sites if math.isfinite(point[0]) and point[1]], theme, 1.0)
        for (kind, marker), (share, colour) in itertools.product(markers.items(), colours.items()):
            places = [n for n, of_site in enumerate(kinds) if of_site == kind]
            percent = 100 * np.array([getattr(functions[n], share) for n in places], float)  # None becomes NaN
            shares.plot(places, percent, color=colour, marker=marker, ms=3, mew=0, lw=0.9, clip_on=False)
        against.set(xlabel="1 / std of x", ylabel="α")
        shares.set(ylabel="share of pairs [%]", ylim=(0, None))
        draw_guides(shares, theme)
        name_sites(shares, names, 0.6 * inches if columns == 2 else inches - _SIDES_INCHES)
    return figure


Array = NDArray[np.float64]
_SITE_INCHES, _LEAST_INCHES, _MAP_INCHES = 0.16, 4.6, 2.0
_ROWS = 200  # of pixels at most, each the largest of its channels
_NAMED = 6  # channels or positions beside a map
_TIMES = 10.0  # the share that channels alike would have: from there on a channel is named
_SIDES_INCHES = 0.9  # of a figure's width, beside the maps
_BESIDE_INCHES = 2.0  # of a panel beside another, at least
_DOT_POINTS = 9.0  # diameter of the dot of all 16 tokens
_COUNTS = (1, 4, LARGEST_TOKENS)  # of the legend


def plot_tails(capture: Capture, cards: Sequence[NormCard], **options: Unpack[FigureOptions]) -> Figure:
    """Draw the channels' shares of Σx² at every norm site, and the positions of the tokens of largest |x|.

    Above, each channel's share of Σx² on a logarithmic scale, a column a site, over all pairs; channels that hold ten
    times as much as they would if all were alike are named at the right. Below, dots whose area is the number of the 16
    tokens of largest |x| at each position within their samples. A cross marks a site with massive activations (|x|
    beyond 100 and beyond 1000 times the median, arXiv 2402.17762). A ring marks a leading channel whose share of
    Σ(γy)² is under a tenth of its share of Σx²: it sets σ, and hardly any output. Of networks whose widths differ, each
    column goes to its site's number of channels.

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
    by_site = {card.site: card.tails for card in cards}
    tails = [by_site.get(site) for site in sites]
    positions = [dict(at_site.positions) if at_site else {} for at_site in tails]
    massive = [place for place, at_site in enumerate(tails) if at_site and at_site.massive]
    inches = inches_of(options.get("width"), max(_LEAST_INCHES, 1.6 + _SITE_INCHES * len(sites)))
    most = min(_DOT_POINTS, 72 * (inches - _SIDES_INCHES) / len(sites))
    tokens_at: dict[str, Any] = {"color": theme.ink, "ls": "", "marker": "o", "mew": 0}
    handles = [key(count(n, "token"), ms=most * math.sqrt(n / LARGEST_TOKENS), **tokens_at) for n in _COUNTS]
    foot = ["×: massive activations, |x| beyond 100 and 1000 times the median"] if massive else []
    leading = [(place, each) for place, at_site in enumerate(tails) if at_site for each in at_site.channels]
    rings = [
        (n, each.channel) for n, each in leading if each.of_output is not None and each.of_output < each.share / 10
    ]
    foot += (
        ["○: sets σ, and produces little output: its share of Σ(γy)² is under a tenth of that of Σx²"] if rings else []
    )
    names = list(site_labels(sites, options).values())
    height, samples = 0.6 + 2 * _MAP_INCHES + names_inches(names), count(capture.n_samples, "sample")
    with sheet_of(options, theme, inches, height, capture.about, detail=samples, foot=foot, handles=handles) as figure:
        channels, tokens = figure.subplots(2, 1, sharex=True)
        _draw_channels(figure, channels, [shares_of(capture, site) for site in sites], theme)
        channels.scatter(*np.array(rings, int).reshape(-1, 2).T, 40, "none", edgecolors=theme.ink, clip_on=False)
        _draw_positions(tokens, positions, most, theme)
        for place in massive:
            write_at(channels, "×", (place, 1), (0, 0), ("data", "axes fraction"), va="baseline", ha="center")
        name_sites(tokens, names, inches - _SIDES_INCHES)
        tokens.set_xlim(-0.5, len(sites) - 0.5)
    return figure


def shares_of(capture: Capture, site: str) -> Array:
    """Return each channel's share of Σx² at a site, float64 ``(d,)``."""
    squares: Array = capture.stats[site].channel_sums[1].double().numpy()
    return squares / squares.sum() if squares.sum() > 0 else np.zeros_like(squares)


def _draw_channels(figure: Figure, ax: Axes, shares: Sequence[Array], theme: Style) -> None:
    widest = max(map(len, shares))
    each = math.ceil(widest / _ROWS)  # channels in a row of pixels
    rows = math.ceil(widest / each)
    image = np.full((rows, len(shares)), np.nan)
    peaks: dict[int, float] = {}
    for column, share in enumerate(shares):
        of_rows = np.maximum.reduceat(share, np.arange(0, len(share), each))
        image[: len(of_rows), column] = 100 * of_rows
        for channel in map(int, np.flatnonzero(share > _TIMES / len(share))):
            peaks[channel] = max(peaks.get(channel, 0.0), float(share[channel]))
    shown = np.ma.masked_where(~(image > 0), image)
    top = float(shown.max()) if shown.count() else 100.0
    norm = LogNorm(max(float(shown.min()), 1e-4 * top) if shown.count() else 10.0, top)
    look: dict[str, Any] = {"origin": "lower", "aspect": "auto", "interpolation": "nearest", "cmap": theme.tokens}
    drawn = ax.imshow(shown, extent=(-0.5, len(shares) - 0.5, -0.5, rows * each - 0.5), norm=norm, **look)
    ticks = LogLocator(subs=(1, 3))
    bar = figure.colorbar(drawn, ax=ax, location="top", aspect=60, pad=0.03, ticks=ticks, format="{x:g}")
    bar.set_label("share of Σx² at the site [%]")
    bar.minorticks_off()
    ax.set_ylabel("channel")
    _name(ax, peaks, rows * each, theme)


def _draw_positions(ax: Axes, positions: Sequence[Mapping[int, int]], most: float, theme: Style) -> None:
    """Draw a dot for the tokens at each position, ``most`` points wide if all of a site's stand there."""
    dots = [(place, position, n) for place, at in enumerate(positions) for position, n in at.items()]
    totals: dict[int, int] = {}
    for _, position, n in dots:
        totals[position] = totals.get(position, 0) + n
    area = [most**2 * n / LARGEST_TOKENS for _, _, n in dots]
    ax.scatter([place for place, _, _ in dots], [position for _, position, _ in dots], area, theme.ink, lw=0)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel("position of the tokens\nof largest |x|")
    draw_guides(ax, theme)
    _name(ax, totals, max(totals, default=0) + 1, theme)


def _name(ax: Axes, weights: Mapping[int, float], top: int, theme: Style) -> None:
    """Write numbers of rows at the right edge, the weightiest first, where none would run into another."""
    kept: list[int] = []
    for number in sorted(weights, key=lambda number: -weights[number])[:_NAMED]:
        if all(abs(number - other) > 0.05 * top for other in kept):
            kept.append(number)
            look = {"va": "center", "fontsize": LEAST_POINTS, "color": theme.ink}
            write_at(ax, f"{number}", (1, number), (3, 0), ("axes fraction", "data"), **look)


_PANEL_INCHES, _HEIGHT, _WIDEST = 1.65, 1.1, 6.6
_COLUMNS = 4
_GAP_INCHES = 0.2  # between two formulas, and after the last
_REACH = 5.0
_POINTS = 601
_ABOVE = "f(u) stands above each panel; u = αx"
ALPHAS = {0.5: "-", 1.0: (0, (4, 1.5)), 2.0: (0, (1, 1.2))}  # with their dashes


def plot_curves(curves: str | Sequence[str | Curve] = "all", **options: Unpack[FigureOptions]) -> Figure:
    """Draw f(αx) of curves for α = 0.5, 1 and 2, a panel each, with its formula above it.

    The panels of hardtanh, sigmoid and tanh are figure 7 of arXiv 2503.10622, and that of tanh its figure 3.

    Args:
        curves: names separated by commas or as a list, ``all``, or formulas, as ``func`` of :func:`normscope.fit`.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if there is no such curve, or if an option is not valid.
    """
    chosen, theme = curves_named(curves), theme_of(options)
    if not chosen:
        raise UsageError("There is no curve to draw; name one or more, or all.")
    formulas = [f"${curve.tex}$" if curve.tex else literal(curve.formula) for curve in chosen]
    widest = max(_PANEL_INCHES, _GAP_INCHES + max(map(_inches_of_math, formulas)))
    widest = min(widest, (options.get("width") or _WIDEST) - 0.3)
    columns = columns_of(options, len(chosen), widest, _COLUMNS)
    inches = inches_of(options.get("width"), 0.3 + widest * columns)
    rows = math.ceil(len(chosen) / columns)
    looks = [(alpha, theme.curves[place], dashes) for place, (alpha, dashes) in enumerate(ALPHAS.items())]
    handles = [key(f"α = {alpha:g}", colour, dashes, lw=1.1) for alpha, colour, dashes in looks]
    height = 0.25 + (_HEIGHT + 0.45) * rows
    with sheet_of(options, theme, inches, height, {}, foot=[_ABOVE], handles=handles) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for ax in axes.flat[len(chosen) :]:
            ax.set_visible(False)
        x = torch.linspace(-_REACH, _REACH, _POINTS, dtype=torch.float64)
        for number, (ax, curve, formula) in enumerate(zip(axes.flat, chosen, formulas, strict=False)):
            for alpha, colour, dashes in looks:
                ax.plot(x, curve.function(alpha * x), color=colour, ls=dashes, lw=1.1)
            for level in (0.0,) if curve.limit is None else (-curve.limit, 0.0, curve.limit):
                ax.axhline(level, color=theme.faint, lw=0.5, ls=":", zorder=0)
            reach = 1.15 * (curve.limit or 2.0)
            ax.set(xlim=(-_REACH, _REACH), ylim=(-reach, reach), ylabel="" if number % columns else "f(αx)")
            if _inches_of_math(formula) > widest - _GAP_INCHES:
                formula = literal(tail(curve.formula, widest - _GAP_INCHES, _FORMULA))
            ax.set_title(f"{literal(curve.name)}\n{formula}", loc="left", fontproperties=_FORMULA)
            if number + columns >= len(chosen):
                ax.tick_params(labelbottom=True)
                ax.set_xlabel("x", labelpad=1)
    return figure


_FORMULA = FontProperties(size=7)
_MATH: Any = MathTextParser("path")


def _inches_of_math(text: str) -> float:
    return float(_MATH.parse(text, 72, _FORMULA).width) / 72
