"""Numbers over the depth of one network, and α against the std of x: of fits, and of point-wise functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normscope.curves.known import FLAT, FREE
from normscope.errors import DataError, count
from normscope.fits.curve_fit import CurveFit
from normscope.fits.saturation import Saturation, saturation, spread
from normscope.norms.sites import kind_of_site
from normscope.pairs.captures import Capture
from normscope.show.figures.fit_numbers import (
    ALPHA,
    AMPLITUDE,
    MARKERS,
    FitNumber,
    draw_against_std,
    draw_number,
    finish,
    handles_of_fits,
    r_squared,
)
from normscope.show.figures.notes import remarks
from normscope.show.figures.panels import best_of
from normscope.show.figures.sheet import (
    columns_of,
    draw_guides,
    inches_of,
    key,
    scale_where_wide,
    sheet_of,
    site_labels,
)
from normscope.show.figures.style import NO_LABELS, FigureOptions, Style, theme_of
from normscope.show.figures.text import name_sites, names_inches, that_fits
from normscope.show.tables.table import percent

_INCHES, _LEAST_PANEL, _HEIGHT = 5.5, 1.3, 1.75
_EDGE_INCHES = 0.35  # of a panel's width, that its ticks take
_SHARES = {f"beyond_{end}": f"|αx + s| > {end}" for end in (1, 2, 3)}
_SHARES["saturated"] = f"saturated: |f′| under {percent(FLAT)} of its peak"
_SITE_INCHES, _LEAST_SATURATION, _SATURATION_HEIGHT = 0.16, 4.6, 2.0
_BESIDE_INCHES = 2.0  # of a panel beside another, at least
_SIDES_INCHES = 0.9  # of a figure's width, beside the panel
_AGAINST_STD = "α = c/std, c the median of α·std"
_Series = list[tuple[list[tuple[float, CurveFit]], dict[str, Any]]]  # depths and fits, and their look


def plot_depth(capture: Capture, fits: Sequence[CurveFit], **options: Unpack[FigureOptions]) -> Figure:
    """Draw A, α and R² of every site over the depth, and α against 1/std of the norm's input.

    A colour a curve, of more than four those of the four largest mean R²; a marker a kind of site. Bars are 95%
    intervals; the dotted line is the ceiling, beside the held-out R². Open markers are fits whose A and α are not
    identified, such as straight ones; they are not drawn in the panels of A and α. The last panel is figure 8 of arXiv
    2503.10622, for fitted α in place of learned ones; on its dashed line α is proportional to 1/std.

    Args:
        capture: what :func:`normscope.capture` returned.
        fits: what :func:`normscope.fit` made of each of its sites.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        DataError: if there is no fit of a site of this capture.
        UsageError: if an option is not valid.
    """
    theme = theme_of(options)
    depths = {site.name: site.index for site in capture.sites}
    fits = [fit for fit in fits if fit.site in depths and fit.channel is None]
    if not fits:
        raise DataError("There is no fit of a site to draw over the depth; fit each site by itself.")
    fits = [fit for fit in fits if fit.curve != FREE] or fits
    fits = [fit for fit in fits if fit.curve in best_of(fits)[0]]
    names = site_labels(depths, {} if options.get("labels") == NO_LABELS else options)
    series, handles = _series(fits, depths, names, theme)
    inches = inches_of(options.get("width"), _INCHES)
    columns = columns_of({"width": inches}, 4, _LEAST_PANEL, 2)
    across = (inches - 0.3) / columns
    room = across - _EDGE_INCHES
    height = (min(_HEIGHT, across) + 0.3) * 4 / columns
    parts: dict[str, Any] = {"detail": count(capture.n_samples, "sample"), "foot": remarks([], fits)}
    with sheet_of(options, theme, inches, height, capture.about, handles=handles, **parts) as figure:
        *over_depth, last = figure.subplots(4 // columns, columns).flat
        for ax, number in zip(over_depth, (AMPLITUDE, ALPHA, r_squared(fits)), strict=True):
            _draw_over_depth(ax, number, series, theme)
            ax.set_xlabel(that_fits(("norm site, in the order of calls", "norm site"), room), labelpad=1)
        _draw_against_std(last, capture, series, theme)
        last.set_xlabel(that_fits(("1 / std of the norm's input x, log", "1 / std of x, log"), room), labelpad=1)
    return figure


def _series(
    fits: Sequence[CurveFit], depths: dict[str, int], names: dict[str, str], theme: Style
) -> tuple[_Series, list[Artist]]:
    """Return the fits of each curve and kind of site with their look, and the legend."""
    kinds = {site: kind_of_site(name) for site, name in names.items()}
    curves = theme.looks(fit.curve for fit in fits)
    markers = dict(zip(dict.fromkeys(kinds.values()), itertools.cycle(MARKERS), strict=False))
    series: _Series = []
    for curve, (kind, marker) in itertools.product(dict.fromkeys(fit.curve for fit in fits), markers.items()):
        fits_here = [fit for fit in fits if (fit.curve, kinds[fit.site]) == (curve, kind)]
        points: list[tuple[float, CurveFit]] = [(depths[fit.site], fit) for fit in fits_here]
        series.append((points, {"color": curves[curve][0], "ls": curves[curve][1], "marker": marker}))
    handles: list[Artist] = [key(curve, *curves[curve]) for curve in dict.fromkeys(fit.curve for fit in fits)]
    handles += [key(kind, theme.ink, "", marker=marker, ms=3) for kind, marker in markers.items()]
    return series, [*handles, *handles_of_fits(fits, theme), key(_AGAINST_STD, theme.ink, (0, (4, 2)))]


def _draw_over_depth(ax: Axes, number: FitNumber, series: _Series, theme: Style) -> None:
    for points, look in series:
        draw_number(ax, number, points, look, theme.ink)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_ylabel(number.label)
    scale_where_wide(ax)
    finish(ax, number, theme)


def _draw_against_std(ax: Axes, capture: Capture, series: _Series, theme: Style) -> None:
    stds = {site.name: spread(capture.stats[site.name]) for site in capture.sites}
    points = [
        (1 / stds[fit.site], fit.alpha, {"color": look["color"], "marker": look["marker"]})
        for points, look in series
        for _, fit in points
        if fit.identified and stds[fit.site] > 0
    ]
    ax.set_ylabel(f"{ALPHA.label}, log")
    draw_against_std(ax, points, theme)


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
    names = site_labels([function.site for function in functions], options)
    short = site_labels(names, {}) if options.get("labels") == NO_LABELS else names
    kinds = [*map(kind_of_site, short.values())]
    markers = dict(zip(dict.fromkeys(kinds), itertools.cycle(MARKERS), strict=False))
    colours = dict(zip(_SHARES, theme.channels, strict=True))
    handles = [key(kind, theme.ink, "", marker=marker, ms=3) for kind, marker in markers.items()]
    handles += [key("α = 1/std", theme.ink, (0, (4, 2))), *(key(_SHARES[share], colours[share]) for share in _SHARES)]
    inches = inches_of(options.get("width"), max(_LEAST_SATURATION, 2.4 + _SITE_INCHES * len(names)))
    columns = columns_of({"width": inches}, 2, _BESIDE_INCHES, 2)
    height = _SATURATION_HEIGHT * 2 / columns + names_inches([*names.values()])
    samples = count(capture.n_samples, "sample")
    with sheet_of(options, theme, inches, height, capture.about, detail=samples, handles=handles) as figure:
        against, shares = figure.subplots(2 // columns, columns, width_ratios=(1, 1.6)[:columns])
        looks = [{"color": theme.ink, "marker": markers[kind]} for kind in kinds]
        points = [(f.inverse_std, abs(f.alpha.p50), look) for f, look in zip(functions, looks, strict=True)]
        draw_against_std(against, [point for point in points if math.isfinite(point[0]) and point[1]], theme, 1.0)
        against.set(xlabel="1 / std of x, log", ylabel="α, log")
        for kind, marker in markers.items():
            _draw_shares(shares, {n: f for n, f in enumerate(functions) if kinds[n] == kind}, marker, colours)
        draw_guides(shares, theme)
        name_sites(shares, [*names.values()], 0.6 * inches if columns == 2 else inches - _SIDES_INCHES)
    return figure


def _draw_shares(ax: Axes, functions: Mapping[int, Saturation], marker: str, colours: Mapping[str, str]) -> None:
    """Draw the shares of one kind of functions, by the number of each."""
    for share, colour in colours.items():
        percentages = 100 * np.array([getattr(function, share) for function in functions.values()], float)  # None: NaN
        ax.plot([*functions], percentages, color=colour, marker=marker, ms=3, mew=0, lw=0.9, clip_on=False)
    ax.set(ylabel="share of pairs [%]", ylim=(0, None))
