"""Fits over the depth of one network, by curve and kind of site; and α against the std of the norm's input."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Unpack

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normscope.curves.known import FREE
from normscope.errors import DataError, count
from normscope.fits.curve_fit import CurveFit
from normscope.fits.saturation import spread
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
from normscope.show.figures.sheet import columns_of, inches_of, key, scale_where_wide, sheet_of, site_labels
from normscope.show.figures.style import NO_LABELS, FigureOptions, Style, theme_of
from normscope.show.figures.text import that_fits

_INCHES, _LEAST_PANEL, _HEIGHT = 5.5, 1.3, 1.75
_EDGE_INCHES = 0.35  # of a panel's width, that its ticks take
_AGAINST_STD = "α = c/std, c the median of α·std"
_Series = list[tuple[list[tuple[float, CurveFit]], dict[str, Any]]]  # depths and fits, and their look


def plot_depth(capture: Capture, fits: Sequence[CurveFit], **options: Unpack[FigureOptions]) -> Figure:
    """Draw A, α and R² of every site over the depth, and α against 1/std of the norm's input.

    A colour a curve, of more than four those of the four largest mean R²; a marker a kind of site. Bars are 95 %
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
