"""S-curves: a column a norm site, and a row each for density, tokens, channels and residuals, or a row a network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack, cast

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normscope.errors import UsageError, count, unknown
from normscope.fits.curve_fit import CurveFit
from normscope.fits.targets import as_capture
from normscope.norms.sites import Layers, select
from normscope.pairs.captures import Capture, without_first
from normscope.show.figures.axes import LINEAR
from normscope.show.figures.notes import (
    HEAD_INCHES,
    facts,
    legend_handles,
    lines_above,
    r2_of,
    remarks,
    scale_of,
    write_heading,
)
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
    row_inches,
    sheet_of,
    title_and_foot,
    untrained,
)
from normscope.show.figures.style import NO_LABELS, SHORT, FigureOptions, readable, shades, theme_of
from normscope.show.figures.text import LINE_POINTS, NOTE, TITLE, tail, words_inches, wrapped, write_at

ROWS = tuple(row for row in DRAW if row != RESIDUAL)
_OUTPUT, _Y_LABELS = "output y", {RESIDUAL: "E[y|x] − fit"}
_LEAD = "Input x of norms, and their output y before the affine step"
_EDGE_INCHES = 0.35  # of a panel's width, that its ticks take
_MOST_COLUMNS, _PANEL_INCHES, _LEAST_PANEL = 6, (2.35, 2.05), (1.3, 1.2)  # widths and heights, ticks included
_LOWEST_PANEL = 0.9  # where a page would not contain higher ones
_ACROSS = 4
_COLUMN_INCHES, _LEAST_COLUMN = 1.75, 1.2  # of an overview; four of them are a page's text width
_ROW_INCHES, _AXIS_INCHES = 1.15, 0.3  # of an overview's panel, and of its ticks
_LABEL_INCHES = 0.3  # left of all panels


def plot(
    capture: Capture | str | Path,
    fits: Sequence[CurveFit] = (),
    *,
    layers: Layers | None = None,
    color: str | Sequence[str] = ROWS,
    compact: bool = False,
    xscale: str = LINEAR,
    share_axes: bool = False,
    ax: Axes | None = None,
    **options: Unpack[FigureOptions],
) -> Figure:
    """Draw the S-curves of every site of a capture.

    Axes and curves end where the pairs do. A linear axis of x leaves out spikes, as it becomes e times as long only for
    3 pairs in 10,000; the panel names the number of pairs beyond. E[y|x] is drawn where 32 pairs lie within 1/20 of the
    axis. Dotted lines are the bounds ±√(d−1) of a LayerNorm (±√d of an RMSNorm). Of more than four curves, the four of
    largest mean R² are drawn.

    Args:
        capture: what :func:`normscope.capture` returned, or the file of a capture.
        fits: what :func:`normscope.fit` made of it; drawn over every panel.
        layers: which sites, as of :func:`normscope.capture`; by default all.
        color: which rows: ``density``, ``token``, ``channel``, ``residual`` (what the curves leave of E[y|x]), as a
            list or separated by commas.
        compact: draw the densities alone, four beside one another, as :func:`normscope.figures.overview` does: of the
            sites that ``layers`` names, or of four.
        xscale: ``linear``, or ``asinh``, which contains every pair.
        share_axes: use the same axes and colours in all panels, so that sites can be compared.
        ax: your axes, for one row of one site; the heading is then written inside of them.
        options: those of all figures. ``width``: of the figure, in inches; narrow figures have fewer columns, and
            letters of at least 6 points. ``labels``: above each column ``short`` (short name and R², the default),
            ``full`` (also the path) or ``none``. ``font``:
            family of all letters, such as ``Times New Roman``. ``caption``: ``txt`` or ``tex``, for a file that
            :func:`normscope.figures.save_figure` writes beside the figure, with what otherwise stands below all panels.
            ``title``: above all panels, by default the network's name, and weights and data below; ``none`` for
            neither. ``style``: ``light`` or ``dark``.

    Returns:
        A matplotlib figure, which :func:`save_figure` writes; that of ``ax`` if given.

    Raises:
        UsageError: if there is no such site, row, scale, style, font, or kind of labels or caption, if ``ax`` is given
            for several panels, if the width is under 2 inches, or if the first argument is no capture.
    """
    capture, theme = as_capture(capture, "plot"), theme_of(options, plot.__kwdefaults__ or ())
    shown, labels = rows_named(color), options.get("labels", SHORT)
    capture = capture if layers is None else capture.only(layers)
    if ax is not None:
        return _plot_on(ax, capture, fits, [*shown, *["density"] * compact], xscale, options)
    if compact:
        drawn = None if layers is None else "all"
        return overview([capture], [fits], layers=drawn, xscale=xscale, share_axes=share_axes, **options)
    columns = columns_of(options, len(capture.sites), _LEAST_PANEL[0], _MOST_COLUMNS)
    width = inches_of(options.get("width"), 0.5 + _PANEL_INCHES[0] * columns)
    across = (width - 0.3) / columns
    height = min(_PANEL_INCHES[1], max(_LEAST_PANEL[1], 0.87 * across))
    with matplotlib.rc_context(theme.rc()):
        panels = panels_of(capture, capture.sites, fits, theme, xscale, across - _EDGE_INCHES)
        panels = with_shared_scales(panels, xscale) if share_axes else panels
        foot = [*remarks(panels, fits, labels), *_drawn_tokens(panels, shown), facts(panels), _LEAD]
        handles = legend_handles(panels, shown, "sample" in capture.about)
        parts: dict[str, Any] = {"foot": foot, "handles": handles, "detail": count(capture.n_samples, "sample")}
        figure = _draw_rows([("", panels)], shown, options, columns, width, height, about=capture.about, **parts)
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
    theme = theme_of(options, overview.__kwdefaults__ or ())
    chosen = [select(capture.sites, layers) for capture in captures]
    columns = max(min(_ACROSS, len(sites)) for sites in chosen)
    width = inches_of(options.get("width"), _COLUMN_INCHES * max(2, columns))
    columns = columns if width / columns >= _LEAST_COLUMN else 2
    inches = (width - _LABEL_INCHES) / columns - _EDGE_INCHES
    height = min(_ROW_INCHES, 0.85 * inches)
    every_fit = [fit for capture_fits in fits for fit in capture_fits]
    with matplotlib.rc_context(theme.rc()):
        drawn = [
            panels_of(capture, sites, capture_fits, theme, xscale, inches, best_of(every_fit)[0])
            for capture, sites, capture_fits in zip(captures, chosen, fits or [()] * len(captures), strict=True)
        ]
        if share_axes:
            every = iter(with_shared_scales([panel for panels in drawn for panel in panels], xscale))
            drawn = [list(itertools.islice(every, len(panels))) for panels in drawn]
        parts = _words_of_networks(captures, drawn, every_fit, options)
        networks = [(_name_of_row(capture, captures, height), of) for capture, of in zip(captures, drawn, strict=True)]
        figure = _draw_rows(networks, ["density"], options, columns, width, height + _AXIS_INCHES, **parts)
    figure.origin = origin_of(captures)
    return figure


def _name_of_row(capture: Capture, captures: Sequence[Capture], inches: float) -> str:
    """Return a network's name; and that its weights are random, or the end of its data if others share the name."""
    name, data, skip = heading(capture.about), capture.about.get("data", ""), capture.skip
    data = data.replace(without_first(skip), f"without {f'{skip} first tokens' if skip > 1 else 'token 0'}")
    data_of_name = {also.about.get("data", "") for also in captures if heading(also.about) == name}
    end = wrapped(data.rpartition(" · ")[2], inches + 0.3, TITLE) if len(data_of_name) > 1 and " · " in data else []
    return "\n".join(filter(None, (tail(name, inches + 0.3, TITLE), untrained(capture.about), *end)))


def _words_of_networks(
    captures: Sequence[Capture], drawn: Sequence[list[Panel]], fits: Sequence[CurveFit], options: FigureOptions
) -> dict[str, Any]:
    """Return legend and lines below an overview."""
    every, labels = [panel for panels in drawn for panel in panels], options.get("labels", SHORT)
    title = None if options.get("caption") else options.get("title")
    facts_by_network = []
    for capture, panels in zip(captures, drawn, strict=True):
        about = (facts(panels), title_and_foot(title, "", capture.about)[1])
        facts_by_network.append(f"{heading(capture.about)}: " * (len(captures) > 1) + " · ".join(filter(None, about)))
    foot = [*remarks(every, fits, labels), ". ".join(filter(None, facts_by_network)), _LEAD]
    handles = legend_handles(every, ["density"], any("sample" in capture.about for capture in captures))
    return {"about": {}, "foot": foot, "handles": handles, "h_pad": 0.03, "hspace": 0}


def _draw_rows(
    networks: Sequence[tuple[str, Sequence[Panel]]],
    rows: Sequence[str],
    options: FigureOptions,
    columns: int,
    width: float,
    panel_inches: float,
    **parts: Any,
) -> Sheet:
    """Draw networks below one another: a name on the left, and the rows of up to ``columns`` sites."""
    theme, labels = theme_of(options), options.get("labels", SHORT)
    blocks = [
        (name, panels[first : first + columns]) for name, panels in networks for first in range(0, len(panels), columns)
    ]
    above = iter(zip(*lines_above([panel for _, panels in blocks for panel in panels], rows, labels), strict=True))
    notes = [list(zip(*itertools.islice(above, len(panels)), strict=True)) for _, panels in blocks]
    with sheet_of(options, theme, width, _height(notes, panel_inches, labels), **parts) as figure:
        axes = figure.subplots(len(blocks) * len(rows), columns, squeeze=False)
        for ax in axes.flat:
            ax.set_visible(False)
        for number, (name, panels) in enumerate(blocks):
            last = max((len(later) for _, later in blocks[number + 1 :] if len(rows) == 1), default=0)
            for row_number, row in enumerate(rows):
                axes_here = axes[number * len(rows) + row_number]
                _draw_row(axes_here, panels, row, notes[number][row_number], NO_LABELS if row_number else labels)
                if row_number == len(rows) - 1:
                    for panel, ax in zip(panels[last:], axes_here[last:], strict=False):
                        ax.set_xlabel(panel.scales.x.label(panel.inches), labelpad=1)
                y_label = "\n".join(filter(None, (name, _Y_LABELS.get(row, _OUTPUT))))
                axes_here[0].set_ylabel(y_label, parse_math=False, labelpad=1)
        if any(panel.scales.shared for _, panels in blocks for panel in panels):
            _share(axes, rows)
    return figure


def _height(notes: Sequence[Sequence[Sequence[Any]]], panel_inches: float, labels: str) -> float:
    """Return the height of all panels and of the lines above them."""
    lines = sum(max(map(len, panel_lines)) for block in notes for panel_lines in block)
    heads = len(notes) * (HEAD_INCHES * (labels != NO_LABELS) + 0.1) + lines * LINE_POINTS / 72
    rows = sum(map(len, notes))
    return heads + rows * row_inches(panel_inches, rows, heads, _LOWEST_PANEL)


def _draw_row(axes: Any, panels: Sequence[Panel], row: str, notes: Sequence[Any], labels: str) -> None:
    """Draw a row of panels with the lines above them."""
    most = max(map(len, notes))
    for column, (panel, ax, lines) in enumerate(zip(panels, axes, notes, strict=False)):
        ax.set_visible(True)
        draw_panel(ax, panel, row)
        write_heading(ax, panel, labels, [*lines, *[[]] * (most - len(lines))])
        if row == "token":
            _draw_scale(ax, panel)
        if column and panel.scales.shared:
            ax.tick_params(labelleft=False)


def _share(axes: Any, rows: Sequence[str]) -> None:
    """Give all densities one scale of greys, and all residuals common limits of y."""
    shown = [ax for ax in axes.flat if ax.get_visible()]
    images = [image for ax in shown for image in ax.images]
    most = max((float(image.get_clim()[1] or 1) for image in images), default=1.0)
    for image in images:
        image.set_clim(vmax=most)
    residuals = [ax for ax in axes[rows.index(RESIDUAL) :: len(rows)].flat if ax in shown] if RESIDUAL in rows else []
    lows, highs = zip(*(ax.get_ylim() for ax in residuals), strict=True) if residuals else ((), ())
    for ax in residuals:
        ax.set_ylim(min(lows), max(highs))


def _plot_on(
    ax: Axes, capture: Capture, fits: Sequence[CurveFit], rows: list[str], xscale: str, options: FigureOptions
) -> Figure:
    """Draw one panel into somebody's axes, with its heading in the corner that an S leaves empty."""
    if len(capture.sites) != 1 or len(rows) != 1:
        raise UsageError(
            f"ax takes one row of one site, but there are {count(len(rows), 'row')} of "
            f"{count(len(capture.sites), 'site')}: name them by layers= and color=."
        )
    inches = ax.get_window_extent().width / ax.figure.dpi
    (panel,) = panels_of(capture, capture.sites, fits, theme_of(options), xscale, inches)
    draw_panel(ax, panel, rows[0])
    shown = [(f"{fit.curve} R² {r2_of(fit)}", panel.looks[fit.curve][0]) for fit in panel.fits if not fit.degenerate]
    words = [(panel.name, panel.style.ink), *shown]
    look: dict[str, Any] = {"va": "top", "zorder": 6, "fontproperties": NOTE, "parse_math": False}
    for number, (text, colour) in enumerate(words if options.get("labels") != NO_LABELS else ()):
        look |= {"color": readable(colour, ax.get_facecolor()), "path_effects": outline(panel.style)}
        write_at(ax, text, (0, 1), (3, -3 - LINE_POINTS * number), **look)
    ax.set(xlabel=panel.scales.x.label(panel.inches), ylabel=_Y_LABELS.get(rows[0], _OUTPUT))
    return cast(Figure, ax.get_figure(root=True))


def rows_named(rows: str | Sequence[str]) -> list[str]:
    """Return the names of a figure's rows as a list; UsageError for an unknown name."""
    names = [name.strip() for name in (rows.split(",") if isinstance(rows, str) else rows)]
    for name in names:
        if name not in DRAW:
            raise UsageError(unknown("colouring", name, DRAW))
    return list(dict.fromkeys(names))


def _draw_scale(ax: Axes, panel: Panel) -> None:
    left = words_inches(scale_of(panel)) / panel.inches + 0.04
    bar = ax.inset_axes((left, 1.035, min(0.3, 1 - left), 0.04))
    bar.imshow(np.linspace(0, 1, 64)[None, :], aspect="auto", cmap=shades(panel.style))
    bar.set_axis_off()
    bar.set_in_layout(False)


def _drawn_tokens(panels: Sequence[Panel], rows: Sequence[str]) -> list[str]:
    """Return a sentence on the tokens that are drawn."""
    if "token" not in rows:
        return []
    kept = [(panel.stats.tokens.key, panel.stats.largest.key) for panel in panels]  # some tokens are in both
    drawn = max(len(set(torch.cat(keys).tolist())) for keys in kept)
    every = max(panel.stats.n_tokens for panel in panels)
    marks = "Points" if all(panel.site.pointwise for panel in panels) else "Lines"
    return [f"{marks}: {drawn:,} of {every:,} tokens, coloured by σ (log scale)"]
