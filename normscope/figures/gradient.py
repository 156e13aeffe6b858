"""The gradient view: each norm's Jacobian diagonal against x, and the terms that each curve assumes constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import count
from normscope.figures.axes import XAxis
from normscope.figures.panels import outline
from normscope.figures.style import (
    LINE_POINTS,
    Style,
    Words,
    broken,
    columns_within,
    head_inches,
    head_panel,
    inches_of,
    key,
    sheet,
    style_named,
    wrapped,
    write_above,
)
from normscope.fits.curve_fit import CurveFit
from normscope.fits.gradient import DrawnJacobians, GradientView, drawn_jacobians, gradient, mean_diagonal
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.sums.sampling import LARGEST_TOKENS
from normscope.pairs.sums.stats import PairStats
from normscope.tables.table import measured

Array = NDArray[np.float64]
_EDGE_INCHES = 0.35  # of a panel's width, that its ticks take
_LEAST_INCHES = 3.5
_SMALL = FontProperties(size=6.5)
_MOST_POINTS = 20_000
_LEAST_COUNT = 32  # pairs that a point of a drawn mean or median takes at least
_GROUPS_AN_OCTAVE = 2  # of the medians
_GROUPS_TO_THE_BEND = 8  # of the mean, where the axis is linear: finer ones would be drawn on one spot
_HELD = {"scale": "tanh", "others": "isru"}  # which curve's derivation holds it constant


@dataclass(frozen=True)
class _SiteColumn:
    """Data and style of the panels of one site."""

    site: NormSite
    stats: PairStats
    view: GradientView
    drawn: DrawnJacobians
    fits: Sequence[CurveFit]
    style: Style
    room: float  # inches that a line of text above a panel may take


def plot_gradient(
    capture: Capture,
    fits: Sequence[CurveFit] = (),
    *,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw every site's Jacobian.

    Above, the diagonal ∂y_i/∂x_i of the drawn tokens against x, E[∂y_i/∂x_i | x] over all pairs and the derivative of
    each fitted curve, on an axis that is linear about zero and logarithmic beyond. Below, over the drawn tokens, what
    DyT and DyISRU hold constant against |x|, in one unit: medians, and the range from quantile 0.16 to 0.84; the
    assumption holds where a line is flat and its range narrow.

    Args:
        capture: what :func:`normscope.capture` returned with ``diagonal=True``.
        fits: what :func:`normscope.fit` made of it.
        width: of the figure, in inches; panels go below one another where there is no room for all.
        title: above all panels, as of :func:`normscope.plot`.
        style: ``light`` or ``dark``.

    Raises:
        UsageError: if there is no such style, or if the width is under 2 inches.
        DataError: if the capture has no sums of the Jacobian's diagonal.
    """
    theme = style_named(style)
    across, (panel_width, panel_height) = columns_within(len(capture.sites), width)
    blocks, room = math.ceil(len(capture.sites) / across), panel_width - _EDGE_INCHES
    columns = [
        _column(capture, site, view, fits, theme, room)
        for site, view in zip(capture.sites, gradient(capture, fits), strict=True)
    ]
    notes = [
        len(_notes_of_diagonal(column)) + len(_notes_of_constants(column))
        for column in columns
        if isinstance(column, _SiteColumn)
    ]
    height = 2 * panel_height + 0.35 + head_inches(capture.sites, room) + max(notes, default=0) * LINE_POINTS / 72
    inches = inches_of(width, max(0.5 + panel_width * across, _LEAST_INCHES))
    samples, handles = count(capture.n_samples, "sample"), _handles(fits, theme)
    with sheet(theme, inches, height * blocks, title, capture.about, samples, handles=handles) as figure:
        axes = figure.subplots(2 * blocks, across, squeeze=False)
        for ax in axes.flat:
            ax.set_visible(False)
        for number, (site, column) in enumerate(zip(capture.sites, columns, strict=True)):
            block, place = divmod(number, across)
            above, below = axes[2 * block : 2 * block + 2, place]
            above.set_visible(True)
            of_tokens = f"{capture.stats[site.name].n_tokens:,} tokens"
            if isinstance(column, _SiteColumn):
                below.set_visible(True)
                _draw_diagonal(above, column)
                _draw_constants(below, column)
                pad = write_above(above, _notes_of_diagonal(column))
                head_panel(above, site, [f"{column.view.n_tokens} of {of_tokens}", of_tokens], room, pad)
            else:
                _decline(above, f"No closed form: {column}.", theme, room)
                head_panel(above, site, [of_tokens], room)
            if place == 0:
                above.set_ylabel("diagonal of the Jacobian", labelpad=1)
                below.set_ylabel("1/rstd and √C, in units of x", labelpad=1)
    return figure


def _column(
    capture: Capture, site: NormSite, view: GradientView, fits: Sequence[CurveFit], theme: Style, room: float
) -> _SiteColumn | str:
    """Return the data of a site's panels, or the reason why there is nothing to draw."""
    stats = capture.stats[site.name]
    drawn = drawn_jacobians(site, stats)
    if not isinstance(drawn, DrawnJacobians):
        return str(drawn)
    return _SiteColumn(site, stats, view, drawn, [fit for fit in fits if fit.site == site.name], theme, room)


def _decline(ax: Axes, reason: str, style: Style, inches: float) -> None:
    ax.axis("off")
    text = "\n".join(wrapped(reason, inches, _SMALL))
    look: dict[str, Any] = {"ha": "center", "va": "center", "color": style.faint, "fontproperties": _SMALL}
    ax.text(0.5, 0.5, text, transform=ax.transAxes, parse_math=False, **look)


def _draw_diagonal(ax: Axes, column: _SiteColumn) -> None:
    drawn, style = column.drawn, column.style
    grey, marked = style.faint, style.channels[0]
    for x, diagonal, colour in (
        (drawn.x, drawn.uniform.diagonal, grey),
        (drawn.largest_x, drawn.largest.diagonal, marked),
    ):
        ax.scatter(*_thinned(x, diagonal), color=colour, s=1.6, lw=0, alpha=0.35, rasterized=True)
    reach = max(float(part.abs().max()) for part in (drawn.x, drawn.largest_x) if part.numel()) or 1.0
    linear = max(float(drawn.x.abs().median()), 1e-3 * reach)
    axis = XAxis((-1.15 * reach, 1.15 * reach), linear)
    axis.set_on(ax, column.room)
    mean = mean_diagonal(column.site, column.stats, _LEAST_COUNT, linear / _GROUPS_TO_THE_BEND)
    ax.plot(*mean, color=style.ink, lw=1.4, zorder=3, path_effects=outline(style))
    steps = math.asinh(1.15 * reach / linear)
    grid = linear * torch.linspace(-steps, steps, 601, dtype=torch.float64).sinh()
    looks = style.looks(fit.curve for fit in column.fits)
    for fit in column.fits:
        if not fit.degenerate:
            colour, dashes = looks[fit.curve]
            ax.plot(
                grid, fit.derivative(grid), color=colour, ls=dashes, lw=1.1, zorder=4, path_effects=outline(style, 0.8)
            )
    ax.set_ylim(0, None)
    ax.set_xlabel(axis.label(column.room), labelpad=1)


def _notes_of_diagonal(column: _SiteColumn) -> list[Words]:
    """Return the diagonal's shares of ‖J‖², and the R² of functions of x that predict it."""
    view, style, room = column.view, column.style, column.room
    shares = [
        f"diagonal: {_written(100 * view.share, '.1f')} % of ‖J‖²",
        f"tail {_written(100 * view.tail_share, '.1f')} %",
    ]
    best = ["best f(x)", f"R² {_with_interval(view, 'of_x', view.r2_of_x)}"]
    lines = [*broken(shares, style.ink, room), *broken(best, style.ink, room)]
    looks = style.looks(fit.curve for fit in column.fits)
    for fit in column.fits:
        r2 = _with_interval(view, fit.curve, view.r2[fit.curve])
        parts = [fit.curve, "nothing to fit"] if fit.degenerate else [f"{fit.curve}'s derivative", f"R² {r2}"]
        lines += broken(parts, looks[fit.curve][0], room)
    return lines


def _draw_constants(ax: Axes, column: _SiteColumn) -> None:
    drawn, style = column.drawn, column.style
    x, largest = drawn.x.abs().flatten(), drawn.largest_x.abs().flatten()
    grouped = {name: _grouped(x, _of_pairs(getattr(drawn.uniform, name), drawn.x)) for name in _HELD}
    if not len(grouped["scale"][0]):
        _decline(ax, f"No {_LEAST_COUNT} pairs of one size of x, other than zero.", style, column.room)
        return
    for name, curve in _HELD.items():
        colour, dashes = style.looks()[curve]
        at, quantiles = grouped[name]
        if name == "scale":  # the two ranges nearly coincide, and two fills would be one grey
            ax.fill_between(at, quantiles[0], quantiles[2], color=colour, alpha=0.18, lw=0)
        ax.plot(at, quantiles[::2].T, color=colour, ls=dashes, lw=0.8)
        ax.plot(at, quantiles[1], color=colour, ls=dashes, lw=1.2, zorder=3, path_effects=outline(style, 0.8))
        far = largest > drawn.tail
        values = _of_pairs(getattr(drawn.largest, name), drawn.largest_x)
        marker = "o" if name == "scale" else "x"
        ax.scatter(
            *_thinned(largest[far], values[far]), color=colour, marker=marker, s=4, lw=0.5, alpha=0.6, rasterized=True
        )
    ax.set(xscale="log", yscale="log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.axvline(drawn.tail, color=style.faint, lw=0.7, ls=":", zorder=1)
    ax.set_xlabel("|x|", labelpad=1)
    write_above(ax, _notes_of_constants(column))


def _notes_of_constants(column: _SiteColumn) -> list[Words]:
    """Return the ratio of the quantiles 0.84 and 0.16 of each constant."""
    sign = "σ" if column.view.centred else "ρ"
    lines: list[Words] = []
    for part in ("centre", "tail"):
        constants = column.view.constants[part]
        ratios = [f"{sign} {_written(constants.scale.ratio, '.3g')}", f"√C {_written(constants.others.ratio, '.3g')}"]
        lines += broken([f"p84/p16 in the {part}:", *ratios], column.style.ink, column.room)
    return lines


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


def _with_interval(view: GradientView, name: str, r2: float) -> str:
    return measured(r2, view.intervals.get(name), ".2f").replace("-", "−")


def _handles(fits: Sequence[CurveFit], style: Style) -> list[Artist]:
    """The legend: points, lines, dashes and bands."""
    largest = f"{LARGEST_TOKENS} tokens of largest |x|"
    looks = style.looks(fit.curve for fit in fits)
    scale, others = (style.looks()[curve] for curve in _HELD.values())
    return [
        key("pairs of the tokens drawn uniformly", style.faint, "", marker="o", ms=3, mew=0),
        key(f"pairs of the {largest}", style.channels[0], "", marker="o", ms=3, mew=0),
        Line2D([], [], color=style.ink, lw=1.4, label="E[∂y$_i$/∂x$_i$ | x] over all pairs"),
        *(
            key(f"derivative of the fitted {curve}", *looks[curve], lw=1.1)
            for curve in dict.fromkeys(fit.curve for fit in fits)
        ),
        Patch(facecolor=scale[0], alpha=0.4, label="1/rstd (σ or ρ), which DyT holds constant: median, 16–84 %"),
        key("√C in its unit, which DyISRU does: median, 16–84 %", *others, lw=1.1),
        key(f"o and x: both, in the tail of the {largest}", style.ink, "", marker="x", ms=3, mew=0.6),
        key("where the tail begins: 1 % of the pairs", style.faint, ":"),
    ]
