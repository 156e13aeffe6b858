"""Several networks in one figure: a row a network, and across it four norm sites from shallow to deep."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.gridspec import GridSpec

from normscope.errors import UsageError, count
from normscope.figures.axes import AUTO
from normscope.figures.legends import ceiling_note, fit_notes, legend_handles, remarks
from normscope.figures.notes import LINE_POINTS, Words, foot_inches, frame, heading, write_above
from normscope.figures.panels import Panel, best_of, draw_panel, panels_of
from normscope.figures.style import LEAST_POINTS, kind_of, legend_columns, style_named, tail, title_of, wrapped
from normscope.fits.curve_fit import CurveFit
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import select

_ACROSS = 4
_COLUMN_INCHES = 1.75  # four of them are a page's text width
_PANEL_INCHES = 1.15
_AXIS_INCHES = 0.46  # of a panel's titles and ticks
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
    width: float | None = None,
    style: str = "light",
) -> Figure:
    """Draw several captures below one another: four norm sites each, evenly over the depth, as wide as a page's text.

    Each panel holds the density of all pairs, E[y|x], the fitted curves, and the bound where the pairs come near it:
    the arrangement of figure 2 of arXiv 2503.10622, with all pairs in place of some tokens.

    Args:
        captures: a row each; one of fewer than four sites has as many panels.
        fits: for each capture, what :func:`normscope.fit` made of it; without any, no curves are drawn.
        xscale: ``linear``, ``asinh`` or ``auto``, as of :func:`normscope.plot`.
        width: of the figure, in inches; by default that of a page's text, 7 for four sites.
        style: ``light`` or ``dark``.

    Returns:
        A matplotlib figure; :func:`normscope.save_figure` writes it.

    Raises:
        UsageError: if there is no capture, if the fits are of another number of captures, or if there is no such scale
            or style.

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
    drawn, _ = best_of(every_fit)
    chosen = [select(capture.sites, _ACROSS) for capture in captures]
    columns = max(2, *map(len, chosen))
    width = width or _COLUMN_INCHES * columns
    across = width / columns
    rows = [
        panels_of(
            *(capture, sites, [fit for fit in fitted if fit.curve in drawn], theme, theme.looks_of(drawn)),
            *(xscale, across - _EDGE_INCHES, across - _EDGE_INCHES + 0.05),
        )
        for capture, sites, fitted in zip(captures, chosen, fits or [()] * len(captures), strict=True)
    ]
    headings = [_heading(capture, panels, width - 0.45) for capture, panels in zip(captures, rows, strict=True)]
    heights = [_GAP_INCHES + _LINE_INCHES * (len(details) + 1) for _, details in headings]
    every = [panel for panels in rows for panel in panels]
    handles = legend_handles(every, density=True, sampled=any("sample" in capture.about for capture in captures))
    below = remarks(every, every_fit)
    legend_across = legend_columns([str(handle.get_label()) for handle in handles], width, _SMALL)
    foot = _FOOT_INCHES + _LINE_INCHES * 1.2 * math.ceil(len(handles) / legend_across) + foot_inches(below, width)
    notes = [[_notes(panel) for panel in panels] for panels in rows]
    note_inches = [max(map(len, of_row)) * LINE_POINTS / 72 for of_row in notes]
    panel_inches = min(_PANEL_INCHES, 0.85 * (across - _EDGE_INCHES))
    with matplotlib.rc_context(theme.rc()):
        height = sum(heights) + sum(note_inches) + (panel_inches + _AXIS_INCHES) * len(rows) + foot
        figure = Figure(figsize=(width, height))
        ratios = [inches for height in heights for inches in (height, panel_inches)]
        grid = GridSpec(2 * len(rows), columns, figure, height_ratios=ratios)
        for number, (panels, (name, details)) in enumerate(zip(rows, headings, strict=True)):
            _write(figure.add_subplot(grid[2 * number, :]), name, details)
            for column, panel in enumerate(panels):
                ax = figure.add_subplot(grid[2 * number + 1, column])
                _draw(ax, panel, notes[number][column], max(map(len, notes[number])))
                if column == 0:
                    ax.set_ylabel("output before affine, y", fontproperties=_SMALL, labelpad=1)
                followed = any(column < len(others) for others in rows[number + 1 :])
                if not followed or panel.axis.linear_width is not None:
                    ax.set_xlabel(panel.axis.label(panel.inches), fontproperties=_SMALL, labelpad=1)
        engine = frame(figure, "", below, theme, handles=handles, ncols=legend_across, prop=_SMALL)
        engine.set(h_pad=0.03, hspace=0)
    return figure


def _heading(capture: Capture, panels: Sequence[Panel], inches: float) -> tuple[str, list[str]]:
    """The bold line, and those below it: network, weights, data."""
    about = capture.about
    counts = sorted({panel.stats.n_pairs for panel in panels})
    pairs = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    weights = f"weights: {about['weights']}"
    data = f"data ({count(capture.n_samples, 'sample')}, {pairs} pairs a panel): {about['data']}"
    return tail(heading(about), inches, _BOLD), [*wrapped(weights, inches, _SMALL), *wrapped(data, inches, _SMALL)]


def _write(ax: Axes, name: str, details: Sequence[str]) -> None:
    """Write the heading into axes of its own, which the layout keeps free whatever its letters turn out to take."""
    ax.axis("off")
    for line, text in enumerate([name, *details]):
        ax.annotate(
            text,
            (0, 0),
            (0, 2 + 72 * _LINE_INCHES * (len(details) - line)),
            fontproperties=_SMALL if line else _BOLD,
            xycoords="axes fraction",
            textcoords="offset points",
            parse_math=False,
            in_layout=False,
        )


def _draw(ax: Axes, panel: Panel, notes: Sequence[Words], least: int) -> None:
    draw_panel(ax, panel, "density")
    ax.locator_params(axis="y", nbins=4)
    ax.tick_params(labelsize=_TINY.get_size(), length=2, pad=1.5)
    # Wider numbers would take the panels' room.
    ax.ticklabel_format(axis="both" if panel.axis.linear_width is None else "y", scilimits=(-2, 4))
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_offset_text().set_fontproperties(_TINY)
    site = panel.site
    lines = [title_of(site, panel.room, _SMALL), *kind_of(site, panel.room, _SMALL)]
    pad = write_above(ax, notes, least)
    ax.set_title("\n".join(lines), loc="left", fontproperties=_SMALL, parse_math=False, pad=pad)
    if not panel.stats.n_pairs:
        ax.text(0, 0, "no finite pair", fontproperties=_SMALL, color=panel.style.faint, ha="center")


def _notes(panel: Panel) -> list[Words]:
    if not panel.stats.n_pairs:
        return []
    lines = fit_notes(panel, lambda fit: [f"R² {fit.r2:.3f}", *([fit.doubt] if fit.doubt else [])])
    return [*lines, *ceiling_note(panel)]
