"""The gradient view: each norm's Jacobian diagonal against x, and the terms that each curve assumes constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import count
from normscope.fits.curve_fit import CurveFit
from normscope.fits.gradient import DrawnJacobians, GradientView, drawn_jacobians, gradient, mean_diagonal
from normscope.norms.sites import NormSite
from normscope.pairs.captures import Capture
from normscope.pairs.sums.sampling import LARGEST_TOKENS
from normscope.pairs.sums.stats import PairStats
from normscope.show.figures.axes import LINEAR, pairs_beyond, scales_of
from normscope.show.figures.panels import outline
from normscope.show.figures.sheet import columns_of, inches_of, key, row_inches, sheet_of, site_labels
from normscope.show.figures.style import FigureOptions, Style, theme_of
from normscope.show.figures.text import (
    LINE_POINTS,
    NOTE,
    TITLE,
    Words,
    lines_of_words,
    tail,
    that_fits,
    wrapped,
    write_above,
)
from normscope.show.tables.table import number

Array = NDArray[np.float64]
_EDGE_INCHES = 0.35  # of a panel's width, that its ticks take
_LEAST_INCHES, _LEAST_PANEL = 3.5, (1.45, 0.8)
_PANEL_INCHES = (2.35, 1.75)
_LABEL_INCHES = 1.3  # height of a panel that a label of y with its unit takes
_MOST_COLUMNS = 6
_FEW_TIMES = 3  # between the values of a logarithmic axis with even ticks
_MOST_POINTS = 20_000
_LEAST_COUNT = 32  # pairs that a point of a drawn mean or median takes at least
_GROUPS_AN_OCTAVE = 2  # of the medians
_GROUPS, _GROUPS_TO_THE_MEDIAN = 60, 5  # of the mean: across the axis, and from 0 to the median |x|, at least
_FOOT = (
    "×: 84th over 16th percentile of the drawn tokens; tail: 1% of the pairs, beyond the grey line",
    "Below: medians, and for DyT's constant the 16th to 84th percentile",
)


def plot_gradient(capture: Capture, fits: Sequence[CurveFit] = (), **options: Unpack[FigureOptions]) -> Figure:
    """Draw every site's Jacobian.

    Above, the diagonal ∂y_i/∂x_i of the drawn tokens against x, E[∂y_i/∂x_i | x] over all pairs and the derivative of
    each fitted curve. Below, what DyT and DyISRU hold constant against |x|: medians over the drawn tokens, and of DyT's
    the range from quantile 0.16 to 0.84. The assumption holds where a line is flat and its range narrow.

    Args:
        capture: what :func:`normscope.capture` returned with ``diagonal=True``.
        fits: what :func:`normscope.fit` made of it.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if an option is not valid.
        DataError: if the capture has no sums of the Jacobian's diagonal.
    """
    theme = theme_of(options)
    views = gradient(capture, fits)
    across = columns_of(options, len(views), _LEAST_PANEL[0], _MOST_COLUMNS)
    blocks = math.ceil(len(views) / across)
    inches = inches_of(options.get("width"), max(0.5 + _PANEL_INCHES[0] * across, _LEAST_INCHES))
    room = (inches - 0.3) / across - _EDGE_INCHES
    names = site_labels((site.name for site in capture.sites), options)
    heads = [lines_of_words(_head(view, fits, theme), room) for view in views]
    most = max(map(len, heads))
    texts = blocks * (most + 4) * LINE_POINTS / 72
    height = min(_PANEL_INCHES[1], room + 0.2)
    if options.get("width"):
        height = row_inches(height, 2 * blocks, texts, _LEAST_PANEL[1])
    parts: dict[str, Any] = {"detail": count(capture.n_samples, "sample"), "handles": _handles(views, fits, theme)}
    parts["foot"] = [*_FOOT, *_share_of_diagonal(views)]
    with sheet_of(options, theme, inches, texts + 2 * blocks * height, capture.about, **parts) as figure:
        axes = figure.subplots(2 * blocks, across, squeeze=False)
        for ax in axes.flat:
            ax.set_visible(False)
        for number, (site, view, head) in enumerate(zip(capture.sites, views, heads, strict=True)):
            block, column = divmod(number, across)
            above, below = axes[2 * block : 2 * block + 2, column]
            fits_here = [fit for fit in fits if fit.site == site.name and not fit.degenerate]
            above.set_visible(True)
            stats = capture.stats[site.name]
            drawn = drawn_jacobians(site, stats)
            if isinstance(drawn, str):
                _decline(above, f"No closed form: {drawn}.", room)
            else:
                below.set_visible(True)
                _draw_diagonal(above, site, stats, drawn, fits_here, theme, room)
                _draw_constants(below, view, drawn, theme, room)
            pad = write_above(above, [*head, *[[]] * (most - len(head))])
            look: dict[str, Any] = {"loc": "left", "y": 1, "pad": pad, "parse_math": False}
            above.set_title(tail(names[site.name], room, TITLE), fontproperties=TITLE, **look)
            if column == 0:
                above.set_ylabel("∂y$_i$/∂x$_i$", labelpad=1)
                below.set_ylabel("σ and √C" + ", in units of x" * (height > _LABEL_INCHES), labelpad=1)
    return figure


def _decline(ax: Axes, reason: str, inches: float) -> None:
    ax.axis("off")
    text = "\n".join(wrapped(reason, inches))
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontproperties": NOTE}
    ax.text(0.5, 0.5, text, transform=ax.transAxes, parse_math=False, **look)


def _head(view: GradientView, fits: Sequence[CurveFit], style: Style) -> Words:
    """Return the R² of functions of x that predict the diagonal, in the colours of the curves."""
    looks = style.looks(fit.curve for fit in fits)
    words = [(f"{curve}′ {_written(r2, '.2f')}", looks[curve][0]) for curve, r2 in view.r2.items()]
    if math.isfinite(view.r2_of_x):
        words.append((f"ceiling {_written(view.r2_of_x, '.2f')}", style.ink))
    return [("R²", style.ink), *words] if words and not view.reason else []


def _share_of_diagonal(views: Sequence[GradientView]) -> list[str]:
    """Return a sentence about the diagonal's shares of the Jacobian, which holds for all sites."""
    shares = [view.share for view in views if not view.reason and math.isfinite(view.share)]
    if not shares:
        return []
    ends = dict.fromkeys(number(end, ".1%") for end in (min(shares), max(shares)))
    return [f"R²: of the derivatives, for the diagonal, which holds {' to '.join(ends)} of ‖J‖²"]


def _draw_diagonal(
    ax: Axes,
    site: NormSite,
    stats: PairStats,
    drawn: DrawnJacobians,
    fits: Sequence[CurveFit],
    style: Style,
    inches: float,
) -> None:
    for x, diagonal, colour in (
        (drawn.x, drawn.uniform.diagonal, style.faint),
        (drawn.largest_x, drawn.largest.diagonal, style.channels[0]),
    ):
        ax.scatter(*_thinned(x, diagonal), color=colour, s=1.6, lw=0, alpha=0.35, rasterized=True)
    axis = scales_of([(site, stats)], LINEAR).x
    axis.set_on(ax, inches)
    low, high = axis.limits
    width = min((high - low) / _GROUPS, float(drawn.x.abs().median()) / _GROUPS_TO_THE_MEDIAN) or high
    at, mean = mean_diagonal(site, stats, _LEAST_COUNT, width)
    ax.plot(at, mean, color=style.ink, lw=1.4, zorder=3, path_effects=outline(style))
    grid = torch.linspace(low, high, 601, dtype=torch.float64)
    looks = style.looks(fit.curve for fit in fits)
    for fit in fits:
        colour, dashes = looks[fit.curve]
        look: dict[str, Any] = {"color": colour, "ls": dashes, "lw": 1.1, "path_effects": outline(style, 0.8)}
        ax.plot(grid, fit.derivative(grid), zorder=4, **look)
    ax.set_ylim(0, None)
    n = pairs_beyond(stats.moments.sum(0), axis.limits)
    beyond = f" ({count(n, 'pair')} beyond)" if n else ""
    ax.set_xlabel(that_fits((f"norm input x{beyond}", f"x{beyond}"), inches), labelpad=1)


def _draw_constants(ax: Axes, view: GradientView, drawn: DrawnJacobians, style: Style, inches: float) -> None:
    x = drawn.x.abs().flatten()
    at, scale = _grouped(x, _of_pairs(drawn.uniform.scale, drawn.x))
    if not len(at):
        _decline(ax, f"No {_LEAST_COUNT} pairs of one size of x, other than zero.", inches)
        return
    _, root_c = _grouped(x, _of_pairs(drawn.uniform.others, drawn.x))
    held, root = _held_looks(style)
    ax.fill_between(at, scale[0], scale[2], color=held["color"], alpha=0.2, lw=0)
    ax.plot(at, scale[1], zorder=3, **held)
    ax.plot(at, root_c[1], zorder=4, **root)
    largest, values = drawn.largest_x.abs().flatten(), _of_pairs(drawn.largest.scale, drawn.largest_x)
    look: dict[str, Any] = {"color": style.channels[0], "s": 3, "lw": 0, "alpha": 0.6, "rasterized": True}
    ax.scatter(*_thinned(largest[largest > drawn.tail], values[largest > drawn.tail]), **look)
    ax.set(xscale="log", yscale="log", xlabel="|x|")
    few = ax.dataLim.y1 < _FEW_TIMES * ax.dataLim.y0
    ax.yaxis.set_major_locator(MaxNLocator(4) if few else LogLocator(subs=(1, 2, 5), numticks=8))
    ax.yaxis.set_minor_locator(NullLocator())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.axvline(drawn.tail, color=style.faint, lw=0.7, zorder=1)
    centre, tail = view.constants["centre"], view.constants["tail"]
    ratios = (
        ("σ" if view.centred else "ρ", centre.scale.ratio, tail.scale.ratio, held["color"]),
        ("√C", centre.others.ratio, tail.others.ratio, root["color"]),
    )
    written = [(f"{sign} ×{_written(n, '.3g')}, tail ×{_written(m, '.3g')}", colour) for sign, n, m, colour in ratios]
    write_above(ax, [[words] for words in written])


def _of_pairs(values: Tensor, x: Tensor) -> Tensor:
    """Return a value for every pair, which may be its token's: flat ``(tokens · d,)``."""
    return (values if values.ndim == 2 else values[:, None].expand_as(x)).flatten()


def _grouped(x: Tensor, values: Tensor) -> tuple[Array, Array]:
    """Median x, and quantiles 0.16, 0.50 and 0.84 of the values, in groups of half an octave of x, all positive.

    Groups of fewer than 32 pairs are left out. Returns ``(groups,)`` and ``(3, groups)``.
    """
    at, quantiles = [], []
    octaves = (x.log2() * _GROUPS_AN_OCTAVE).floor()
    for octave in np.unique(octaves[octaves.isfinite()].numpy()):
        inside = octaves == octave
        if int(inside.sum()) >= _LEAST_COUNT:
            at.append(float(x[inside].median()))
            quantiles.append(np.quantile(values[inside].numpy(), (0.16, 0.5, 0.84)))
    return np.array(at), np.array(quantiles).reshape(-1, 3).T


def _thinned(x: Tensor, y: Tensor) -> tuple[Array, Array]:
    step = max(1, -(-x.numel() // _MOST_POINTS))
    return x.flatten()[::step].numpy(), y.flatten()[::step].numpy()


def _written(number: float, form: str) -> str:
    return format(number, f"z{form}").replace("-", "−") if math.isfinite(number) else "–"


def _held_looks(style: Style) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the looks of the medians of what DyT and DyISRU hold constant."""
    return {"color": style.channels[1], "ls": "-", "lw": 1.4}, {"color": style.ink, "ls": (0, (1, 1)), "lw": 1.1}


def _handles(views: Sequence[GradientView], fits: Sequence[CurveFit], style: Style) -> list[Artist]:
    """Make the legend: points, and lines."""
    looks, (held, root) = style.looks(fit.curve for fit in fits), _held_looks(style)
    n_tokens = max(view.n_tokens for view in views)
    scales = " or ".join(dict.fromkeys("σ" if view.centred else "ρ" for view in views))
    curves = list(dict.fromkeys(fit.curve for fit in fits if not fit.degenerate))
    in_headings = len({looks[curve][0] for curve in curves}) == len(curves)  # named there, each in its colour
    return [
        key(f"{n_tokens} random tokens", style.faint, "", marker="o", ms=3, mew=0),
        key(f"{LARGEST_TOKENS} of largest |x|", style.channels[0], "", marker="o", ms=3, mew=0),
        Line2D([], [], color=style.ink, lw=1.4, label="mean, E[∂y$_i$/∂x$_i$ | x]"),
        *(key(f"{curve}′", *looks[curve], lw=1.1) for curve in curves if not in_headings),
        key(f"{scales}, constant in DyT", **held),
        key("√C, constant in DyISRU", **root),
    ]
