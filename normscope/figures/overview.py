"""Several networks in one figure: a row a network, and across it four norm sites from shallow to deep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.gridspec import GridSpec

from normscope.errors import UsageError, count
from normscope.figures.axes import AUTO, share_colours
from normscope.figures.panels import (
    Panel,
    best_of,
    ceiling_note,
    draw_panel,
    fit_notes,
    legend_handles,
    panels_of,
    remarks,
    with_shared_scales,
)
from normscope.figures.style import (
    LEAST_POINTS,
    LINE_POINTS,
    NONE,
    Style,
    Words,
    heading,
    inches_of,
    name_lines,
    sheet,
    style_named,
    tail,
    title_and_foot,
    without_digest,
    wrapped,
    write_above,
    write_at,
)
from normscope.fits.curve_fit import CurveFit
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import select

_ACROSS = 4
_COLUMN_INCHES = 1.75  # four of them are a page's text width
_LEAST_COLUMN = 1.2
_PANEL_INCHES = 1.15
_AXIS_INCHES = 0.25  # of a panel's ticks
_EDGE_INCHES = 0.38  # of a panel's width, that its ticks take
_GAP_INCHES = 0.1  # above a heading
_LINE_INCHES = 0.105
_FOOT_INCHES = 0.2
_BOLD, _SMALL, _TINY = (
    FontProperties(size=7.5, weight="bold"),
    FontProperties(size=6.2),
    FontProperties(size=LEAST_POINTS),
)


def overview(
    captures: Sequence[Capture],
    fits: Sequence[Sequence[CurveFit]] = (),
    *,
    xscale: str = AUTO,
    share_axes: bool = False,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw several captures below one another: four norm sites each, evenly over the depth, as wide as a page's text.

    Each panel shows the density of all pairs, E[y|x], the fitted curves, and the bound where the pairs come near it, as
    figure 2 of arXiv 2503.10622 does for some tokens.

    Args:
        captures: a row each; one of fewer than four sites has as many panels.
        fits: for each capture, what :func:`normscope.fit` made of it; without any, no curves are drawn.
        xscale: ``linear``, ``asinh`` or ``auto``, as of :func:`normscope.plot`.
        share_axes: whether all panels of all networks have the same axes and colours, as of :func:`normscope.plot`.
        width: of the figure, in inches; by default that of a page's text, 7 for four sites. In a narrow one panels go
            below one another.
        title: above all panels; by default none, as each row names its network, weights and data. With ``none`` it
            names the network alone.
        style: ``light`` or ``dark``.

    Raises:
        UsageError: if there is no capture, if the fits are of another number of captures, if there is no such scale or
            style, or if the width is under 2 inches.

    >>> import normscope, torch
    >>> from torch import nn
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> captures = [normscope.capture(nn.Sequential(norm), [x]) for norm in (nn.LayerNorm(8), nn.RMSNorm(8))]
    >>> figure = overview(captures, [normscope.fit(capture) for capture in captures])
    >>> [ax.get_title(loc="left") for ax in figure.axes if ax.images]
    ['0  0\\nLayerNorm d=8', '0  0\\nRMSNorm d=8']
    """
    if not captures:
        raise UsageError("There is no capture to draw; an overview takes one or more.")
    if len(fits) not in (0, len(captures)):
        raise UsageError(f"There are {len(captures)} captures, but the fits of {len(fits)}; give the fits of each.")
    theme = style_named(style)
    every_fit = [fit for fitted in fits for fit in fitted]
    columns, width = _columns(captures, width)
    networks = _panels(captures, fits or [()] * len(captures), theme, xscale, width / columns - _EDGE_INCHES)
    every = [panel for panels in networks for panel in panels]
    if share_axes:
        every = with_shared_scales(every, xscale)
        shared = iter(every)
        networks = [[next(shared) for _ in panels] for panels in networks]
    rows: list[_Row] = []
    for capture, panels in zip(captures, networks, strict=True):
        lines = _heading(capture, panels, width - 0.45, title)
        rows += [([] if first else lines, panels[first : first + columns]) for first in range(0, len(panels), columns)]
    handles = legend_handles(every, density=True, sampled=any("sample" in capture.about for capture in captures))
    notes = [[_notes(panel) for panel in panels] for _, panels in rows]
    panel_inches = min(_PANEL_INCHES, 0.85 * every[0].inches)
    heights = [_GAP_INCHES + _LINE_INCHES * len(heading) for heading, _ in rows]
    note_inches = [max(map(len, lines)) * LINE_POINTS / 72 for lines in notes]
    name_inches = _LINE_INCHES * max(len(name_lines(panel.site, panel.room, _SMALL)) for panel in every)
    height = sum(heights) + sum(note_inches) + (panel_inches + name_inches + _AXIS_INCHES) * len(rows) + _FOOT_INCHES
    foot = remarks(every, every_fit)
    with sheet(
        theme, width, height, title, {}, foot=foot, handles=handles, font=_SMALL, h_pad=0.03, hspace=0
    ) as figure:
        ratios = [inches for height in heights for inches in (height, panel_inches)]
        grid = GridSpec(2 * len(rows), columns, figure, height_ratios=ratios)
        for number, (above_row, of_row) in enumerate(rows):
            _write(figure.add_subplot(grid[2 * number, :]), above_row)
            for column, panel in enumerate(of_row):
                ax = figure.add_subplot(grid[2 * number + 1, column])
                _draw(ax, panel, notes[number][column], max(map(len, notes[number])))
                followed = any(column < len(others) for _, others in rows[number + 1 :])
                _name_axes(ax, panel, first=column == 0, last=not followed)
        if share_axes:
            share_colours([ax for ax in figure.axes if ax.images])
    return figure


_Row: TypeAlias = tuple[Sequence[str], Sequence[Panel]]  # a heading's lines, of a network's first row, and panels


def _columns(captures: Sequence[Capture], width: float | None) -> tuple[int, float]:
    """Return the number of columns and the width of the figure."""
    columns = max(2, *(min(_ACROSS, len(capture.sites)) for capture in captures))
    inches = inches_of(width, _COLUMN_INCHES * columns)
    return (columns if inches / columns >= _LEAST_COLUMN else 2), inches


def _panels(
    captures: Sequence[Capture], fits: Sequence[Sequence[CurveFit]], theme: Style, xscale: str, inches: float
) -> list[list[Panel]]:
    """Four panels of each network, evenly over its depth."""
    drawn, _ = best_of([fit for fitted in fits for fit in fitted])
    looks = theme.looks_of(drawn)
    return [
        panels_of(
            *(capture, select(capture.sites, _ACROSS), [fit for fit in fitted if fit.curve in drawn], theme, looks),
            *(xscale, inches, inches),
        )
        for capture, fitted in zip(captures, fits, strict=True)
    ]


def _heading(capture: Capture, panels: Sequence[Panel], inches: float, title: str | None) -> list[str]:
    """The bold line, and those below it: network, weights, data."""
    about, name = capture.about, tail(heading(capture.about), inches, _BOLD)
    if title == NONE:
        return [name, *wrapped(title_and_foot(NONE, "", about)[1], inches, _SMALL)]
    counts = sorted({panel.stats.n_pairs for panel in panels})
    pairs = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    weights = f"weights: {without_digest(about['weights'])}"
    data = f"data ({count(capture.n_samples, 'sample')}, {pairs} pairs a panel): {about['data']}"
    return [name, *wrapped(weights, inches, _SMALL), *wrapped(data, inches, _SMALL)]


def _write(ax: Axes, lines: Sequence[str]) -> None:
    """Write the heading into axes of its own, so that the layout reserves its room."""
    ax.axis("off")
    for line, text in enumerate(lines):
        points = 0, 2 + 72 * _LINE_INCHES * (len(lines) - 1 - line)
        font = _SMALL if line else _BOLD
        write_at(ax, text, (0, 0), points, va="baseline", fontproperties=font, parse_math=False, in_layout=False)


def _draw(ax: Axes, panel: Panel, notes: Sequence[Words], least: int) -> None:
    draw_panel(ax, panel, "density")
    ax.locator_params(axis="y", nbins=4)
    ax.tick_params(labelsize=_TINY.get_size(), length=2, pad=1.5)
    # Wider numbers would take the panels' room.
    ax.ticklabel_format(axis="both" if panel.axis.linear_width is None else "y", scilimits=(-2, 4))
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_offset_text().set_fontproperties(_TINY)
    site = panel.site
    lines = name_lines(site, panel.room, _SMALL)
    pad = write_above(ax, notes, least)
    ax.set_title("\n".join(lines), loc="left", fontproperties=_SMALL, parse_math=False, pad=pad)
    if not panel.stats.n_pairs:
        ax.text(0, 0, "no finite pair", fontproperties=_SMALL, color=panel.style.faint, ha="center")


def _name_axes(ax: Axes, panel: Panel, *, first: bool, last: bool) -> None:
    """Name y at the first panel of a row, and x at the last of a column and wherever the axis is another."""
    shared = panel.scales.shared
    if first:
        ax.set_ylabel("output before affine, y", fontproperties=_SMALL, labelpad=1)
    ax.tick_params(labelleft=first or not shared)
    if last or (panel.axis.linear_width is not None and not shared):
        ax.set_xlabel(panel.axis.label(panel.inches), fontproperties=_SMALL, labelpad=1)


def _notes(panel: Panel) -> list[Words]:
    if not panel.stats.n_pairs:
        return []
    lines = fit_notes(panel, lambda fit: [f"R² {fit.r2:.3f}", *([fit.doubt] if fit.doubt else [])])
    return [*lines, *ceiling_note(panel)]
