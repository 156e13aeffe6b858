"""Fits over the depth of one network, by kind of site; and α against the standard deviation of the norm's input."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
from normscope.show.figures.sheet import inches_of, key, scale_where_wide, sheet_of, site_labels
from normscope.show.figures.style import NO_LABELS, FigureOptions, Style, theme_of
from normscope.show.figures.text import that_fits

_ROW_INCHES, _SQUARE_INCHES = 1.15, 1.7
_COLUMN_INCHES = 2.3
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
    looks = _looks(names, theme)
    handles: list[Artist] = [key(kind, ms=3, **look) for kind, look in looks.items()]
    handles += handles_of_fits([fit for fit in fits if fit.curve in curves], theme)
    handles.append(key(_AGAINST_STD, theme.ink, (0, (4, 2))))
    inches = inches_of(options.get("width"), max(4.6, 0.5 + _COLUMN_INCHES * len(curves)))
    rows = (AMPLITUDE, ALPHA, r_squared(fits))
    ratios = [*([_ROW_INCHES] * len(rows)), _SQUARE_INCHES]
    parts: dict[str, Any] = {"detail": count(capture.n_samples, "sample"), "foot": remarks([], fits)}
    with sheet_of(options, theme, inches, 0.7 + sum(ratios), capture.about, handles=handles, **parts) as figure:
        axes = figure.subplots(len(ratios), len(curves), squeeze=False, height_ratios=ratios)
        for panels, curve in zip(axes.T, curves, strict=True):
            by_kind: dict[str, list[CurveFit]] = {kind: [] for kind in looks}
            for fit in fits:
                by_kind[kind_of_site(names[fit.site])] += [fit] if fit.curve == curve else []
            _draw_column(panels, rows, capture, by_kind, looks, theme)
        _label(axes, curves, [*(row.label for row in rows), ALPHA.label], (inches - 0.5) / len(curves))
    return figure


def _looks(names: Mapping[str, str], theme: Style) -> dict[str, dict[str, Any]]:
    """Return the colour and marker of each kind of site."""
    kinds = dict.fromkeys(map(kind_of_site, names.values()))
    looks = zip(itertools.cycle(theme.curves), itertools.cycle(MARKERS), strict=False)
    return {kind: {"color": colour, "marker": marker} for kind, (colour, marker) in zip(kinds, looks, strict=False)}


def _draw_column(
    panels: Sequence[Axes],
    rows: Sequence[FitNumber],
    capture: Capture,
    by_kind: Mapping[str, Sequence[CurveFit]],
    looks: Mapping[str, dict[str, Any]],
    theme: Style,
) -> None:
    """Draw one curve's fits: a panel for each number, and α against 1/std."""
    numbers = {site.name: site.index for site in capture.sites}
    for ax, row in zip(panels[:-1], rows, strict=True):
        for kind, fits in by_kind.items():
            draw_number(ax, row, [(numbers[fit.site], fit) for fit in fits], looks[kind])
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        scale_where_wide(ax)
        finish(ax, row, theme)
    identified = [(kind, fit) for kind, fits in by_kind.items() for fit in fits if fit.identified]
    stds = [spread(capture.stats[fit.site]) for _, fit in identified]
    points = [(1 / std, fit.alpha, looks[kind]) for (kind, fit), std in zip(identified, stds, strict=True) if std > 0]
    draw_against_std(panels[-1], points, theme)


def _label(axes: Any, curves: Sequence[str], labels: Sequence[str], inches: float) -> None:
    for ax, curve in zip(axes[0], curves, strict=True):
        ax.set_title(curve, parse_math=False)
    for ax, label in zip(axes[:, 0], labels, strict=True):
        ax.set_ylabel(label)
    for ax in axes[-2]:
        ax.set_xlabel(that_fits(("norm site, in the order of calls", "norm site"), inches), labelpad=1)
    for ax in axes[-1]:
        ax.set_xlabel(that_fits(("1 / std of the norm's input x", "1 / std of x"), inches), labelpad=1)
    axes[0, 0].figure.align_ylabels(axes[:, 0])
