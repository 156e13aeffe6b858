"""Several captures beside one another: α, slope and R² over the depth of the network, a line a capture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normscope.errors import UsageError, count
from normscope.fits.comparison import check_number, match
from normscope.fits.curve_fit import CurveFit
from normscope.fits.saturation import MODULE, with_modules
from normscope.pairs.captures import Capture
from normscope.show.figures.fit_numbers import (
    ALPHA,
    MARKERS,
    NO_CEILING,
    SATURATED,
    SLOPE,
    FitNumber,
    draw_number,
    finish,
    handles_of_fits,
    is_too_low,
    r_squared,
)
from normscope.show.figures.sheet import (
    MANY_TIMES,
    PANELS_INCHES,
    columns_of,
    inches_of,
    key,
    scale_by_factors,
    sheet_of,
    without_digest,
)
from normscope.show.figures.style import FigureOptions, Style, shades, theme_of
from normscope.show.figures.text import that_fits

_COLUMN_INCHES, _ROW_INCHES = 2.9, 1.3
_LEAST_INCHES, _LEAST_COLUMN = 4.6, 0.95
_COLUMNS = 4
_DODGE = 0.09  # of the distance of two sites, so that one capture's interval does not hide another's
_MATCHED = ("sites matched by placement and relative depth", "sites matched by name")
_NAMED = ("model", "weights", "dtype", "data", "part", "sample")


@dataclass(frozen=True)
class _Line:
    """One capture's line in every panel."""

    label: str
    look: dict[str, Any]
    places: dict[str, float]
    fits: Sequence[CurveFit]


def told_apart(captures: Sequence[Capture]) -> tuple[list[str], dict[str, str]]:
    """Return a label of each capture, and the entries of all: a label is one entry that suffices, or all that differ.

    >>> from types import SimpleNamespace as Seen
    >>> about = {"model": "net", "weights": "step 1", "data": "noise"}
    >>> told_apart([Seen(about=about, n_samples=8), Seen(about={**about, "weights": "step 2"}, n_samples=8)])
    (['1  step 1', '2  step 2'], {'model': 'net', 'data': 'noise'})
    """
    abouts = [{name: without_digest(value) for name, value in capture.about.items()} for capture in captures]
    for about, capture in zip(abouts, captures, strict=True):
        about["samples"] = count(capture.n_samples, "sample")
        about["data"] = about["data"].removesuffix(f" · {about.get('part')}")  # which is an entry of its own
    values = {name: [about.get(name, "") for about in abouts] for name in (*_NAMED, "samples")}
    differing = [name for name, entries in values.items() if len(set(entries)) > 1] or ["samples"]
    alone = [name for name in differing if len(set(values[name])) == len(captures)]
    entries = [values[name] for name in alone[:1] or differing]
    labels = [" · ".join(filter(None, parts)) for parts in zip(*entries, strict=True)]
    common = {
        name: abouts[0][name] for name in _NAMED if name not in differing and values[name][0] not in ("", "float32")
    }
    return [f"{number}  {label}" for number, label in enumerate(labels, 1)], common


def _sources(captures: Sequence[Capture], common: Mapping[str, str], labels: Sequence[str]) -> str:
    """Return weights and data of each capture that are in no label, nor common to all; or nothing."""
    names = [name for name in ("weights", "data") if name not in common]
    every = ([without_digest(capture.about.get(name, "")) for name in names] for capture in captures)
    sources = (" · ".join(t for t in texts if t not in label) for texts, label in zip(every, labels, strict=True))
    return "; ".join(f"{number}: {text}" for number, text in enumerate(sources, 1) if text)


def plot_comparison(
    captures: Sequence[Capture], fits: Sequence[Sequence[CurveFit]], **options: Unpack[FigureOptions]
) -> Figure:
    """Draw α, slope at the origin and R² of several captures over the depth: a column a curve, a line a capture.

    Point-wise functions in place of norms have a column of their own, and a row for the shares of saturated pairs.
    Bars, dotted lines and open markers are as of :func:`plot_depth`. Where sites are not matched by name, depth runs
    from 0, the first norm, to 1, the last.

    Args:
        captures: two or more.
        fits: for each, what :func:`normscope.fit` made of it, of the same curves.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if there are fewer than two captures, if the fits are of another number of them, or if an
            option is not valid.
    """
    check_number(len(captures))
    if len(fits) != len(captures):
        raise UsageError(f"There are {len(captures)} captures, but the fits of {len(fits)}; give the fits of each.")
    fits = [with_modules(capture, capture_fits) for capture, capture_fits in zip(captures, fits, strict=True)]
    theme, by_name = theme_of(options), all(match(captures[0].sites, c.sites).by == "name" for c in captures[1:])
    lines, common = _lines(captures, fits, theme, by_name)
    every = [fit for capture_fits in fits for fit in capture_fits]
    curves = list(dict.fromkeys(fit.curve for fit in every))
    columns = columns_of(options, len(curves), _LEAST_COLUMN, _COLUMNS)
    blocks = math.ceil(len(curves) / columns)
    inches = inches_of(options.get("width"), max(_LEAST_INCHES, 0.5 + _COLUMN_INCHES * columns))
    numbers = [ALPHA, SLOPE, r_squared(every), *([SATURATED] if MODULE in curves else [])]
    height = min((0.3 + _ROW_INCHES * len(numbers)) * blocks, PANELS_INCHES)
    handles = [*(key(line.label, ms=3.2, lw=1, **line.look) for line in lines), *handles_of_fits(every, theme)]
    parts: dict[str, Any] = {"handles": handles, "names": _NAMED[1:], "detail": _MATCHED[by_name]}
    parts["foot"] = [_sources(captures, common, [line.label for line in lines])]
    parts["foot"] += [NO_CEILING] if any(map(is_too_low, every)) else []
    with sheet_of(options, theme, inches, height, common, **parts) as figure:
        axes = figure.subplots(len(numbers) * blocks, columns, squeeze=False, sharex=True)
        for ax in axes[-len(numbers) :, len(curves) - columns * (blocks - 1) :].flat:
            ax.set_visible(False)
        for row, number in enumerate(numbers):
            panels = [axes[n // columns * len(numbers) + row, n % columns] for n in range(len(curves))]
            _draw_row(panels, columns, number, curves, lines, theme)
        _name_depth(panels, by_name, (inches - 0.5) / columns)
        figure.align_ylabels()
    return figure


def _draw_row(
    panels: Sequence[Axes], columns: int, number: FitNumber, curves: Sequence[str], lines: Sequence[_Line], theme: Style
) -> None:
    """Draw one number of every curve, on one axis of y."""
    for n, (ax, curve) in enumerate(zip(panels, curves, strict=True)):
        for line in lines:
            fits = [fit for fit in line.fits if fit.curve == curve and fit.site in line.places]
            points = [(line.places[fit.site], fit) for fit in fits]
            draw_number(ax, number, points, line.look, line.look["color"])
        if number is ALPHA:
            ax.set_title(curve, parse_math=False)
        if n % columns == 0:
            ax.set_ylabel(number.label)
    _share_heights(panels, columns)
    for ax in panels:
        finish(ax, number, theme)


def _lines(
    captures: Sequence[Capture], fits: Sequence[Sequence[CurveFit]], theme: Style, by_name: bool
) -> tuple[list[_Line], dict[str, str]]:
    """Return a line of each capture, and what all captures have in common."""
    number, (labels, common) = len(captures), told_apart(captures)
    colours: Sequence[Any] = theme.channels
    if number > len(colours):
        colours = [shades(theme)(n / (number - 1)) for n in range(number)]
    lines = []
    for n, (capture, capture_fits, label) in enumerate(zip(captures, fits, labels, strict=True)):
        last = 1 if by_name else max(1, *(site.index for site in capture.sites), 1)
        offset = _DODGE * (n - (number - 1) / 2)
        places = {site.name: (site.index + offset) / last for site in capture.sites}
        look = {"color": colours[n], "marker": MARKERS[n % len(MARKERS)]}
        lines.append(_Line(label, look, places, capture_fits))
    return lines, common


def _share_heights(panels: Sequence[Axes], columns: int) -> None:
    """Give one number the same axis in all columns, logarithmic where its values are many times one another."""
    low, high = min(ax.dataLim.y0 for ax in panels), max(ax.dataLim.y1 for ax in panels)
    for n, ax in enumerate(panels):
        if n:
            ax.sharey(panels[0])
        if n % columns:
            ax.tick_params(labelleft=False)
        if 0 < MANY_TIMES * low < high:
            scale_by_factors(ax)
    panels[0].autoscale(axis="y")


def _name_depth(panels: Sequence[Axes], by_name: bool, inches: float) -> None:
    by_depth = ("relative depth of the norm site", "relative depth")
    names = ("norm site, in the order of calls", "norm site") if by_name else by_depth
    for ax in panels:
        ax.set_xlabel(that_fits(names, inches), labelpad=1)
        ax.tick_params(labelbottom=True)
        if by_name:
            ax.xaxis.set_major_locator(MaxNLocator(max(2, int(3 * inches)), integer=True))
