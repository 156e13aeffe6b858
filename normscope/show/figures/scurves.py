"""S-curves: a column a norm site, and a row each for density, tokens, channels and residuals, or a row a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from normscope.errors import UsageError, count, unknown
from normscope.fits.curve_fit import CurveFit
from normscope.fits.targets import as_capture
from normscope.norms.sites import Layers, select
from normscope.pairs.captures import Capture
from normscope.show.figures.axes import LINEAR, share_colours, share_heights
from normscope.show.figures.notes import (
    HEAD_INCHES,
    facts,
    fits_in_line,
    legend_handles,
    notes_of,
    r2_of,
    remarks,
    write_heading,
)
from normscope.show.figures.panel_data import extreme_channels
from normscope.show.figures.panels import (
    DRAW,
    RESIDUAL,
    Panel,
    best_of,
    draw_panel,
    outline,
    panels_of,
    with_shared_scales,
)
from normscope.show.figures.sheet import (
    Sheet,
    columns_of,
    heading,
    inches_of,
    origin_of,
    sheet_of,
    title_and_foot,
    untrained,
)
from normscope.show.figures.style import NO_LABELS, SHORT, FigureOptions, readable, theme_of
from normscope.show.figures.text import LINE_POINTS, NOTE, Words, tail, words_inches, write_at

ROWS = tuple(row for row in DRAW if row != RESIDUAL)
_LEAD = "Input x of norms, and their output y before the affine step"
_EDGE_INCHES = 0.35  # of a panel's width, that its ticks take
_MOST_COLUMNS, _PANEL_INCHES, _LEAST_PANEL = 6, (2.35, 2.05), (1.3, 1.2)  # widths and heights, ticks included
_ACROSS = 4
_COLUMN_INCHES, _LEAST_COLUMN = 1.75, 1.2  # of an overview; four of them are a page's text width
_ROW_INCHES, _AXIS_INCHES = 1.15, 0.3  # of an overview's panel, and of its ticks
_LABEL_INCHES = 0.3  # left of all panels
_LABEL = FontProperties(size=7)
_LEAST_ROOM = 1.2  # inches, for the word "channels"


def plot(
    capture: Capture | str | Path,
    fits: Sequence[CurveFit] = (),
    *,
    layers: Layers | None = None,
    rows: str | Sequence[str] = ROWS,
    compact: bool = False,
    xscale: str = LINEAR,
    share_axes: bool = False,
    ax: Axes | None = None,
    **options: Unpack[FigureOptions],
) -> Any:
    """Draw the S-curves of every site of a capture.

    A linear axis of x ends where the fitted tanh saturates, at |αx| = 3, but contains 99 % of the pairs; the panel
    names the number of pairs beyond. A bar on the axis marks the range of 99 % of the pairs, and an inset enlarges it
    where it is narrow. E[y|x] is drawn where 32 pairs lie within 1/20 of the axis. Dotted lines are the bounds ±√(d−1)
    of a LayerNorm (±√d of an RMSNorm). Of more than four curves, the four of largest mean R² are drawn.

    Args:
        capture: what :func:`normscope.capture` returned, or the file of a capture.
        fits: what :func:`normscope.fit` made of it; drawn over every panel.
        layers: which sites, as of :func:`normscope.capture`; by default all.
        rows: which rows: ``density``, ``token``, ``channel``, ``residual`` (what the curves leave of E[y|x]), as a
            list or separated by commas.
        compact: draw the densities alone, four beside one another, as :func:`normscope.figures.overview` does: of the
            sites that ``layers`` names, or of four.
        xscale: ``linear``, ``asinh`` or ``symlog``; the latter two contain every pair.
        share_axes: use the same axes and colours in all panels, so that sites can be compared, without insets.
        ax: your axes, for one row of one site; the heading is then written inside of them.
        options: those of all figures. ``width``: of the figure, in inches; narrow figures have fewer columns, and
            letters of at least 6 points. ``labels``: above each column ``short`` (short name and R², the default),
            ``full`` (path, class, d, placement, number of pairs, and all numbers of the fits) or ``none``. ``font``:
            family of all letters, such as ``Times New Roman``. ``caption``: ``txt`` or ``tex``, for a file that
            :func:`normscope.figures.save_figure` writes beside the figure, with what otherwise stands below all panels.
            ``title``: above all panels, by default the network's name, and weights and data below; ``none`` for
            neither. ``style``: ``light`` or ``dark``.

    Returns:
        A matplotlib figure, which :func:`save_figure` writes; ``ax`` if given.

    Raises:
        UsageError: if there is no such site, row, scale, style, font, or kind of labels or caption, if ``ax`` is given
            for several panels, if the width is under 2 inches, or if the first argument is no capture.
    """
    capture = as_capture(capture, "plot")
    shown, theme, labels = rows_named(rows), theme_of(options), options.get("labels", SHORT)
    capture = capture if layers is None else capture.only(layers)
    if ax is not None:
        if len(capture.sites) != 1 or len(shown) != 1 or compact:
            raise UsageError(
                f"ax takes one row of one site, but there are {count(len(shown), 'row')} of "
                f"{count(len(capture.sites), 'site')}: name them by layers= and rows=."
            )
        inches = ax.get_window_extent().width / ax.figure.dpi
        (panel,) = panels_of(capture, capture.sites, fits, theme, xscale, inches)
        return _draw_on(ax, panel, shown[0], labels)
    if compact:
        drawn = None if layers is None else "all"
        return overview([capture], [fits], layers=drawn, xscale=xscale, share_axes=share_axes, **options)
    columns = columns_of(options, len(capture.sites), _LEAST_PANEL[0], _MOST_COLUMNS)
    width = inches_of(options.get("width"), 0.5 + _PANEL_INCHES[0] * columns)
    across = (width - 0.3) / columns
    panel_inches = min(_PANEL_INCHES[1], max(_LEAST_PANEL[1], 0.87 * across))
    with matplotlib.rc_context(theme.rc()):
        panels = panels_of(capture, capture.sites, fits, theme, xscale, across - _EDGE_INCHES)
        panels = with_shared_scales(panels, xscale) if share_axes else panels
        blocks = [("", panels[first : first + columns]) for first in range(0, len(panels), columns)]
        foot = [_LEAD, facts(panels, labels), *_drawn_tokens(panels, shown), *remarks(panels, fits, labels)]
        handles = legend_handles(panels, shown, "sample" in capture.about)
        parts: dict[str, Any] = {"foot": foot, "handles": handles, "detail": count(capture.n_samples, "sample")}
        figure = _draw_blocks(blocks, shown, options, columns, width, panel_inches, about=capture.about, **parts)
    figure.origin = origin_of(capture)
    return figure


def overview(
    captures: Sequence[Capture],
    fits: Sequence[Sequence[CurveFit]] = (),
    *,
    layers: Layers = None,
    xscale: str = LINEAR,
    share_axes: bool = False,
    **options: Unpack[FigureOptions],
) -> Figure:
    """Draw one or several captures as panels alone: rows of four norm sites for each network.

    Each panel shows the density of all pairs, E[y|x], and the fitted curves, as figure 2 of arXiv 2503.10622 does for
    some tokens.

    Args:
        captures: one or more rows each; fewer than four sites make fewer panels.
        fits: for each capture, what :func:`normscope.fit` made of it; without any, no curves are drawn.
        layers: the sites of each network, see :func:`normscope.capture`; by default four evenly over the depth.
        xscale: as of :func:`normscope.plot`.
        share_axes: likewise, for all panels of all networks.
        options: as of :func:`normscope.plot`; the usual width is that of a page's text, 7 inches for four sites, and
            there is no usual title, as each row names its network.

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
    theme, labels = theme_of(options), options.get("labels", SHORT)
    chosen = [select(capture.sites, layers) for capture in captures]
    columns = max(2, *(min(_ACROSS, len(sites)) for sites in chosen))
    width = inches_of(options.get("width"), _COLUMN_INCHES * columns)
    columns = columns if width / columns >= _LEAST_COLUMN else 2
    inches = (width - _LABEL_INCHES) / columns - _EDGE_INCHES
    panel_inches = min(_ROW_INCHES, 0.85 * inches)
    every_fit = [fit for of_capture in fits for fit in of_capture]
    curves, _ = best_of(every_fit)
    with matplotlib.rc_context(theme.rc()):
        networks = [
            panels_of(capture, sites, of_capture, theme, xscale, inches, curves)
            for capture, sites, of_capture in zip(captures, chosen, fits or [()] * len(captures), strict=True)
        ]
        every = [panel for panels in networks for panel in panels]
        if share_axes:
            every = with_shared_scales(every, xscale)
            shared = iter(every)
            networks = [[next(shared) for _ in panels] for panels in networks]
        blocks = [
            (_name_of_row(capture, panel_inches), panels[first : first + columns])
            for capture, panels in zip(captures, networks, strict=True)
            for first in range(0, len(panels), columns)
        ]
        foot = [_LEAD, *remarks(every, every_fit, labels)]
        foot += [
            _about(capture, facts(panels, labels), options, len(captures) > 1)
            for capture, panels in zip(captures, networks, strict=True)
        ]
        handles = legend_handles(every, ["density"], any("sample" in capture.about for capture in captures))
        parts: dict[str, Any] = {"about": {}, "foot": foot, "handles": handles, "h_pad": 0.03, "hspace": 0}
        figure = _draw_blocks(blocks, ["density"], options, columns, width, panel_inches + _AXIS_INCHES, **parts)
    figure.origin = origin_of(captures)
    return figure


def _name_of_row(capture: Capture, inches: float) -> str:
    name = tail(heading(capture.about), inches + 0.3, _LABEL)
    return "\n".join(filter(None, (name, untrained(capture.about))))


def _about(capture: Capture, facts_of_panels: str, options: FigureOptions, several: bool) -> str:
    """Return the line of one network below an overview."""
    title = None if options.get("caption") else options.get("title")
    facts_and_data = (facts_of_panels, title_and_foot(title, "", capture.about)[1])
    return (f"{heading(capture.about)}: " if several else "") + " · ".join(filter(None, facts_and_data))


def _draw_blocks(
    blocks: Sequence[tuple[str, Sequence[Panel]]],
    rows: Sequence[str],
    options: FigureOptions,
    columns: int,
    width: float,
    panel_inches: float,
    **parts: Any,
) -> Sheet:
    """Draw blocks of panels below one another: a name on the left, and the rows of up to ``columns`` sites."""
    theme, labels = theme_of(options), options.get("labels", SHORT)
    notes = [[[_notes(panel, row, labels, rows) for panel in panels] for row in rows] for _, panels in blocks]
    lines = [[max(map(len, of_panels)) for of_panels in of_rows] for of_rows in notes]
    heads = len(blocks) * (HEAD_INCHES * (labels != NO_LABELS) + 0.1) + sum(map(sum, lines)) * LINE_POINTS / 72
    height = len(blocks) * len(rows) * panel_inches + heads
    with sheet_of(options, theme, width, height, **parts) as figure:
        axes = figure.subplots(len(blocks) * len(rows), columns, squeeze=False)
        for ax in axes.flat:
            ax.set_visible(False)
        for block, (name, panels) in enumerate(blocks):
            under = [] if len(rows) > 1 else [len(later) for _, later in blocks[block + 1 :]]
            for place, row in enumerate(rows):
                row_of_axes = axes[block * len(rows) + place]
                for column, (panel, ax) in enumerate(zip(panels, row_of_axes, strict=False)):
                    ax.set_visible(True)
                    draw_panel(ax, panel, row, beyond=place == 0)
                    above = notes[block][place][column], lines[block][place]
                    write_heading(ax, panel, NO_LABELS if place else labels, *above)
                    if row == "token":
                        _draw_scale(ax, panel)
                    if place == len(rows) - 1 and column >= max(under, default=0):
                        ax.set_xlabel(panel.scales.x.label(panel.inches), labelpad=1)
                    if column and panel.scales.shared:
                        ax.tick_params(labelleft=False)
                y_label = "\n".join(filter(None, (name, _name_of_y(row))))
                row_of_axes[0].set_ylabel(y_label, parse_math=False, labelpad=1)
        _share(figure, axes, blocks, rows)
    return figure


def _share(figure: Sheet, axes: Any, blocks: Sequence[tuple[str, Sequence[Panel]]], rows: Sequence[str]) -> None:
    """Give panels of shared scales common greys, and common limits of residuals."""
    if blocks[0][1] and blocks[0][1][0].scales.shared:
        share_colours(figure.axes)
        if RESIDUAL in rows:
            share_heights([ax for ax in axes[rows.index(RESIDUAL) :: len(rows)].flat if ax.get_visible()])


def _draw_on(ax: Axes, panel: Panel, row: str, labels: str) -> Axes:
    """Draw one panel into somebody's axes, with its heading in the corner that an S leaves empty."""
    draw_panel(ax, panel, row, beyond=True, inset=False)
    fits = [(f"{fit.curve} R² {r2_of(fit)}", panel.looks[fit.curve][0]) for fit in panel.fits if not fit.degenerate]
    words = [(panel.name, panel.style.ink), *fits]
    look: dict[str, Any] = {"va": "top", "zorder": 6, "fontproperties": NOTE, "parse_math": False}
    for number, (text, colour) in enumerate(words if labels != NO_LABELS else ()):
        look |= {"color": readable(colour, ax.get_facecolor()), "path_effects": outline(panel.style)}
        write_at(ax, text, (0, 1), (3, -3 - LINE_POINTS * number), **look)
    ax.set(xlabel=panel.scales.x.label(panel.inches), ylabel=_name_of_y(row))
    return ax


def rows_named(rows: str | Sequence[str]) -> list[str]:
    """Return the names of a figure's rows as a list; UsageError for an unknown name."""
    names = [name.strip() for name in (rows.split(",") if isinstance(rows, str) else rows)]
    for name in names:
        if name not in DRAW:
            raise UsageError(unknown("colouring", name, DRAW))
    return list(dict.fromkeys(names))


def _name_of_y(row: str) -> str:
    return "E[y|x] − fit" if row == RESIDUAL else "output y"


def _notes(panel: Panel, row: str, labels: str, rows: Sequence[str]) -> list[Words]:
    """Return the lines above a panel: those of its column, and those of its row."""
    lines = notes_of(panel, labels) if row == rows[0] else []
    if row == "token":
        return [*lines, _scale_of(panel)]
    if row == "channel":
        extreme = zip(map(str, extreme_channels(panel.stats)), panel.style.channels, strict=False)
        words = [("channels" if panel.room > _LEAST_ROOM else "ch.", panel.style.ink), *extreme]
        while words_inches(words) > panel.room:
            words.pop()
        return [*lines, words]
    return [*lines, *(fits_in_line(panel, "RMSE", lambda fit: f"{fit.rmse:.3g}") if row == RESIDUAL else [])]


def _scale_of(panel: Panel) -> Words:
    low, high = panel.scales.sigma
    return [(f"σ {low:.2g} to {high:.2g}", panel.style.ink)]


def _draw_scale(ax: Axes, panel: Panel) -> None:
    left = words_inches(_scale_of(panel)) / panel.inches + 0.04
    bar = ax.inset_axes((left, 1.035, min(0.3, 1 - left), 0.04))
    bar.imshow(np.linspace(0, 1, 64)[None, :], aspect="auto", cmap=panel.style.tokens)
    bar.set_axis_off()
    bar.set_in_layout(False)


def _drawn_tokens(panels: Sequence[Panel], rows: Sequence[str]) -> list[str]:
    """Return a sentence on the tokens that are drawn."""
    if "token" not in rows:
        return []
    kept = [(panel.stats.tokens.key, panel.stats.largest.key) for panel in panels]  # some tokens are in both
    drawn = max(len(set(torch.cat(keys).tolist())) for keys in kept)
    every = max(panel.stats.n_tokens for panel in panels)
    what = "Points" if all(panel.site.pointwise for panel in panels) else "Lines"
    return [f"{what}: {drawn:,} of {every:,} tokens, coloured by σ (log scale)"]
