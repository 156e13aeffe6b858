"""Compact figure of one or several networks: a row a network, and across it four norm sites from shallow to deep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from normscope.errors import UsageError
from normscope.figures.axes import LINEAR, share_colours
from normscope.figures.panels import (
    SHORT,
    best_of,
    check_labels,
    draw_panel,
    facts,
    heading_inches,
    legend_handles,
    notes_of,
    panels_of,
    remarks,
    with_shared_scales,
    write_heading,
)
from normscope.figures.style import (
    LINE_POINTS,
    heading,
    inches_of,
    sheet,
    style_named,
    tail,
    title_and_foot,
    untrained,
)
from normscope.fits.curve_fit import CurveFit
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import select

LEAD = "input x of norm layers, and their output y before the affine step"
_ACROSS = 4
_COLUMN_INCHES, _LEAST_COLUMN = 1.75, 1.2  # four of them are a page's text width
_PANEL_INCHES = 1.15
_AXIS_INCHES = 0.25  # of a panel's ticks
_EDGE_INCHES = 0.38  # of a panel's width, that its ticks take
_LABEL_INCHES = 0.3  # left of all panels
_BOLD = FontProperties(size=7.5, weight="bold")


def overview(
    captures: Sequence[Capture],
    fits: Sequence[Sequence[CurveFit]] = (),
    *,
    xscale: str = LINEAR,
    share_axes: bool = False,
    width: float | None = None,
    labels: str = SHORT,
    font: str | None = None,
    caption: str | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw one or several captures as panels alone: a row a network, and four norm sites evenly over the depth.

    Each panel shows the density of all pairs, E[y|x], and the fitted curves, as figure 2 of arXiv 2503.10622 does for
    some tokens.

    Args:
        captures: a row each; fewer than four sites make fewer panels.
        fits: for each capture, what :func:`normscope.fit` made of it; without any, no curves are drawn.
        xscale: as of :func:`normscope.plot`.
        share_axes: likewise, for all panels of all networks.
        width: of the figure, in inches; by default that of a page's text, 7 for four sites. In a narrow one panels go
            below one another.
        labels: above each panel, as of :func:`normscope.plot`.
        font: likewise.
        caption: likewise.
        title: above all panels; by default none, as each row names its network. With ``none`` weights and data are
            left out too.
        style: ``light`` or ``dark``.

    Raises:
        UsageError: as of :func:`normscope.plot`; and if there is no capture, or the fits are of another number of
            captures.

    >>> import normscope, torch
    >>> from torch import nn
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> captures = [normscope.capture(nn.Sequential(norm), [x]) for norm in (nn.LayerNorm(8), nn.RMSNorm(8))]
    >>> figure = overview(captures, [normscope.fit(capture) for capture in captures])
    >>> [ax.get_ylabel().split("\\n")[0] for ax in figure.axes if ax.get_visible()]
    ['Sequential', 'Sequential']
    """
    if not captures:
        raise UsageError("There is no capture to draw; an overview takes one or more.")
    if len(fits) not in (0, len(captures)):
        raise UsageError(f"There are {len(captures)} captures, but the fits of {len(fits)}; give the fits of each.")
    check_labels(labels)
    theme = style_named(style, font)
    columns = max(2, *(min(_ACROSS, len(capture.sites)) for capture in captures))
    width = inches_of(width, _COLUMN_INCHES * columns)
    columns = columns if width / columns >= _LEAST_COLUMN else 2
    inches = (width - _LABEL_INCHES) / columns - _EDGE_INCHES
    every_fit = [fit for fitted in fits for fit in fitted]
    drawn, _ = best_of(every_fit)
    with matplotlib.rc_context(theme.rc()):
        networks = [
            panels_of(
                *(capture, select(capture.sites, _ACROSS), [fit for fit in fitted if fit.curve in drawn], theme),
                *(theme.looks_of(drawn), xscale, inches, inches + 0.05),
            )
            for capture, fitted in zip(captures, fits or [()] * len(captures), strict=True)
        ]
        if share_axes:
            shared = iter(with_shared_scales([panel for panels in networks for panel in panels], xscale))
            networks = [[next(shared) for _ in panels] for panels in networks]
        every = [panel for panels in networks for panel in panels]
        rows = [
            (capture, panels[first : first + columns])
            for capture, panels in zip(captures, networks, strict=True)
            for first in range(0, len(panels), columns)
        ]
        notes = [[notes_of(panel, labels) for panel in panels] for _, panels in rows]
        lines = [max(map(len, of_row)) for of_row in notes]
        panel_inches = min(_PANEL_INCHES, 0.85 * inches)
        above = heading_inches(every, labels) + 0.04
        height = sum(panel_inches + above + _AXIS_INCHES + n * LINE_POINTS / 72 for n in lines) + 0.15
        handles = legend_handles(every, ["density"], any("sample" in capture.about for capture in captures))
        foot = [*([LEAD] if caption else []), *remarks(every, every_fit, str(notes))]
        for capture, panels in zip(captures, networks, strict=True):
            name = f"{heading(capture.about)}: " if len(captures) > 1 else ""
            of_network = (facts(panels, labels), title_and_foot(title, "", capture.about)[1])
            foot.append(name + " · ".join(filter(None, of_network)))
    below: dict[str, Any] = {"foot": foot, "handles": handles, "caption": caption}
    with sheet(theme, width, height, title, {}, **below, h_pad=0.03, hspace=0) as figure:
        axes = figure.subplots(len(rows), columns, squeeze=False)
        for number, ((capture, panels), of_row) in enumerate(zip(rows, axes, strict=True)):
            for column, ax in enumerate(of_row):
                if column >= len(panels):
                    ax.set_visible(False)
                    continue
                panel, shared_axes = panels[column], panels[column].scales.shared
                draw_panel(ax, panel, "density", beyond=True)
                ax.locator_params(axis="y", nbins=4)
                ax.tick_params(length=2, pad=1.5, labelleft=column == 0 or not shared_axes)
                write_heading(ax, panel, labels, notes[number][column], lines[number])
                if column == 0:
                    name = " · ".join(filter(None, (heading(capture.about), untrained(capture.about))))
                    ax.set_ylabel(f"{tail(name, panel_inches + 0.2, _BOLD)}\noutput y", parse_math=False, labelpad=1)
                if not any(column < len(below) for _, below in rows[number + 1 :]):
                    ax.set_xlabel(panel.axis.label(panel.inches), labelpad=1)
        if share_axes:
            share_colours([ax for ax in figure.axes if ax.images])
    return figure
