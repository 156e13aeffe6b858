"""Point-wise functions: α against the standard deviation of the input, and shares of saturated pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normscope.curves.known import FLAT
from normscope.errors import DataError, count
from normscope.fits.saturation import Saturation, saturation
from normscope.norms.sites import kind_of_site
from normscope.pairs.captures import Capture
from normscope.show.figures.fit_numbers import MARKERS, draw_against_std
from normscope.show.figures.sheet import columns_of, draw_guides, inches_of, key, sheet_of, site_labels
from normscope.show.figures.style import NO_LABELS, FigureOptions, theme_of
from normscope.show.figures.text import name_sites, names_inches

_SHARES = {f"beyond_{end}": f"|αx + s| > {end}" for end in (1, 2, 3)}
_SHARES["saturated"] = f"saturated: |f′| under {100 * FLAT:g} % of its peak"
_SITE_INCHES, _LEAST_INCHES, _PANEL_INCHES = 0.16, 4.6, 2.0
_BESIDE_INCHES = 2.0  # of a panel beside another, at least
_SIDES_INCHES = 0.9  # of a figure's width, beside the panel


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
    inches = inches_of(options.get("width"), max(_LEAST_INCHES, 2.4 + _SITE_INCHES * len(names)))
    columns = columns_of({"width": inches}, 2, _BESIDE_INCHES, 2)
    height, samples = _PANEL_INCHES * 2 / columns + names_inches([*names.values()]), count(capture.n_samples, "sample")
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
        percent = 100 * np.array([getattr(function, share) for function in functions.values()], float)  # None: NaN
        ax.plot([*functions], percent, color=colour, marker=marker, ms=3, mew=0, lw=0.9, clip_on=False)
    ax.set(ylabel="share of pairs [%]", ylim=(0, None))
