"""S-curves: a column a norm site, and a row each for density, tokens, channels and residuals, or a row a network."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from normscope.errors import UsageError, count, unknown
from normscope.fits.curve_fit import CurveFit
from normscope.fits.targets import as_capture
from normscope.norms.sites import Layers, select
from normscope.pairs.captures import Capture
from normscope.runtime.files import whole_file
from normscope.show.figures.axes import LINEAR, share_colours, share_heights
from normscope.show.figures.panels import (
    DRAW,
    HEAD_INCHES,
    RESIDUAL,
    Panel,
    best_of,
    draw_panel,
    extreme_channels,
    facts,
    fits_in_line,
    legend_handles,
    notes_of,
    outline,
    panels_of,
    r2_of,
    remarks,
    with_shared_scales,
    write_heading,
)
from normscope.show.figures.style import (
    LINE_POINTS,
    NO_LABELS,
    NOTE,
    SHORT,
    FigureOptions,
    Sheet,
    Words,
    columns_of,
    heading,
    inches_of,
    readable,
    sheet_of,
    tail,
    theme_of,
    title_and_foot,
    untrained,
    words_inches,
    write_at,
)
from normscope.show.tables.markup import latex

ROWS = tuple(row for row in DRAW if row != RESIDUAL)
FORMATS = ("png", "svg", "pdf")
_VECTOR_DPI = 72  # at which matplotlib lays out what is in points
_LEAST_DPI = 300  # of the points within a vector graphic
_LEAD = "Input x of norms, and their output y before the affine step"
_EDGE_INCHES = 0.35  # of a panel's width, that its ticks take
_MOST_COLUMNS, _PANEL_INCHES, _LEAST_PANEL = 6, (2.35, 2.05), (1.3, 1.2)  # widths and heights, ticks included
_ACROSS = 4
_COLUMN_INCHES, _LEAST_COLUMN = 1.75, 1.2  # of an overview; four of them are a page's text width
_ROW_INCHES = 1.15
_AXIS_INCHES = 0.25  # of a panel's ticks
_LABEL_INCHES = 0.3  # left of all panels
_LABEL = FontProperties(size=7)


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
    if compact and ax is None:
        drawn = None if layers is None else "all"
        return overview([capture], [fits], layers=drawn, xscale=xscale, share_axes=share_axes, **options)
    if ax is not None:
        if len(capture.sites) != 1 or len(shown) != 1 or compact:
            raise UsageError(
                f"ax takes one row of one site, but there are {count(len(shown), 'row')} of "
                f"{count(len(capture.sites), 'site')}: name them by layers= and rows=."
            )
        inches = ax.get_window_extent().width / ax.figure.dpi
        (panel,) = panels_of(capture, capture.sites, fits, theme, xscale=xscale, inches=inches)
        return _draw_on(ax, panel, shown[0], labels)
    columns = columns_of(options, len(capture.sites), _LEAST_PANEL[0], _MOST_COLUMNS)
    inches = inches_of(options.get("width"), 0.5 + _PANEL_INCHES[0] * columns)
    across = (inches - 0.3) / columns
    panel_inches = min(_PANEL_INCHES[1], max(_LEAST_PANEL[1], 0.87 * across))
    with matplotlib.rc_context(theme.rc()):
        panels = panels_of(capture, capture.sites, fits, theme, xscale=xscale, inches=across - _EDGE_INCHES)
        if share_axes:
            panels = with_shared_scales(panels, xscale)
        blocks = math.ceil(len(panels) / columns)
        notes = [[_notes(panel, row, labels, first=row == shown[0]) for row in shown] for panel in panels]
        lines = [max(map(len, of_row)) for of_row in zip(*notes, strict=True)]  # above the panels of each row
        rows_inches = len(shown) * panel_inches + sum(lines) * LINE_POINTS / 72
        height = blocks * (rows_inches + HEAD_INCHES * (labels != NO_LABELS) + 0.12)
        handles = legend_handles(panels, shown, "sample" in capture.about)
        foot = [_LEAD, facts(panels, labels), *_drawn_tokens(panels, shown), *remarks(panels, fits, labels)]
    parts: dict[str, Any] = {"detail": count(capture.n_samples, "sample"), "foot": foot, "handles": handles}
    with sheet_of(options, theme, inches, height, capture.about, **parts) as figure:
        figure.origin = _origin(capture)
        axes = figure.subplots(len(shown) * blocks, columns, squeeze=False)
        for empty in axes.flat:
            empty.set_visible(False)
        for number, panel in enumerate(panels):
            block, column = divmod(number, columns)
            for place, row in enumerate(shown):
                panel_ax = axes[block * len(shown) + place, column]
                panel_ax.set_visible(True)
                draw_panel(panel_ax, panel, row, beyond=place == 0)
                if row == "token":
                    _draw_scale(panel_ax, panel)
                write_heading(panel_ax, panel, NO_LABELS if place else labels, notes[number][place], lines[place])
                if column == 0:
                    panel_ax.set_ylabel(_name_of_y(row), labelpad=1)
                elif share_axes:
                    panel_ax.tick_params(labelleft=False)
                if place == len(shown) - 1:
                    panel_ax.set_xlabel(panel.axis.label(panel.inches), labelpad=1)
        if share_axes:
            share_colours(figure.axes)
            if RESIDUAL in shown:
                share_heights([ax for ax in axes[shown.index(RESIDUAL) :: len(shown)].flat if ax.get_visible()])
    return figure


def _draw_on(ax: Axes, panel: Panel, row: str, labels: str) -> Axes:
    """Draw one panel into somebody's axes, with its heading in the corner that an S leaves empty."""
    draw_panel(ax, panel, row, beyond=True, inset=False)
    fits = [(f"{fit.curve} R² {r2_of(fit)}", panel.looks[fit.curve][0]) for fit in panel.fits if not fit.degenerate]
    words = [(panel.name, panel.style.ink), *fits]
    look: dict[str, Any] = {"va": "top", "zorder": 6, "fontproperties": NOTE, "parse_math": False}
    for number, (text, colour) in enumerate(words if labels != NO_LABELS else ()):
        look |= {"color": readable(colour, ax.get_facecolor()), "path_effects": outline(panel.style)}
        write_at(ax, text, (0, 1), (3, -3 - LINE_POINTS * number), **look)
    ax.set(xlabel=panel.axis.label(panel.inches), ylabel=_name_of_y(row))
    return ax


def _name_of_y(row: str) -> str:
    return "E[y|x] − fit" if row == RESIDUAL else "output y"


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
    every_fit = [fit for fitted in fits for fit in fitted]
    drawn, _ = best_of(every_fit)
    with matplotlib.rc_context(theme.rc()):
        networks = [
            panels_of(
                *(capture, sites, [fit for fit in fitted if fit.curve in drawn], theme),
                *(theme.looks_of(drawn), xscale, inches),
            )
            for capture, sites, fitted in zip(captures, chosen, fits or [()] * len(captures), strict=True)
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
        panel_inches = min(_ROW_INCHES, 0.85 * inches)
        above = HEAD_INCHES * (labels != NO_LABELS) + 0.04
        height = sum(panel_inches + above + _AXIS_INCHES + n * LINE_POINTS / 72 for n in lines) + 0.15
        handles = legend_handles(every, ["density"], any("sample" in capture.about for capture in captures))
        foot = [_LEAD, *remarks(every, every_fit, labels)]
        for capture, panels in zip(captures, networks, strict=True):
            name = f"{heading(capture.about)}: " if len(captures) > 1 else ""
            title = None if options.get("caption") else options.get("title")
            of_network = (facts(panels, labels), title_and_foot(title, "", capture.about)[1])
            foot.append(name + " · ".join(filter(None, of_network)))
    with sheet_of(options, theme, width, height, {}, foot=foot, handles=handles, h_pad=0.03, hspace=0) as figure:
        figure.origin = _origin(captures)
        axes = figure.subplots(len(rows), columns, squeeze=False)
        for number, ((capture, panels), axes_of_row) in enumerate(zip(rows, axes, strict=True)):
            for column, ax in enumerate(axes_of_row):
                if column >= len(panels):
                    ax.set_visible(False)
                    continue
                panel, shared_axes = panels[column], panels[column].scales.shared
                draw_panel(ax, panel, "density", beyond=True)
                ax.locator_params(axis="y", nbins=4)
                ax.tick_params(length=2, pad=1.5, labelleft=column == 0 or not shared_axes)
                write_heading(ax, panel, labels, notes[number][column], lines[number])
                if column == 0:
                    name = tail(heading(capture.about), panel_inches + 0.3, _LABEL)
                    of_row = filter(None, (name, untrained(capture.about), _name_of_y("density")))
                    ax.set_ylabel("\n".join(of_row), parse_math=False, labelpad=1)
                if not any(column < len(under) for _, under in rows[number + 1 :]):
                    ax.set_xlabel(panel.axis.label(panel.inches), labelpad=1)
        if share_axes:
            share_colours(figure.axes)
    return figure


def save_figure(figure: Figure, path: str | Path, shown: Any = None, dpi: int = 200) -> Path:
    """Write a figure to a file whose suffix is its format, with its provenance in the metadata, and its caption beside.

    Args:
        figure: what :func:`normscope.plot`, :func:`normscope.figures.overview` or another of them drew.
        path: of the file.
        shown: a capture or a list of them, whose model, weights, data, versions and seed the file contains as JSON; or
            other JSON; by default what the figure was drawn from.
        dpi: dots per inch; of the points within svg and pdf at least 300.

    Returns:
        The path.

    Raises:
        UsageError: if the suffix is not one of png, svg and pdf, or if it cannot be written there.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise UsageError(unknown("figure format", kind, FORMATS))
    text = json.dumps(getattr(figure, "origin", {}) if shown is None else _origin(shown))
    dpi = dpi if kind == "png" else max(dpi, _LEAST_DPI)
    key = "Subject" if kind == "pdf" else "Description"
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    drawn = io.BytesIO()  # on a full disk matplotlib's PDF writer raises an error of zlib's
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "normscope", "pdf.fonttype": 42}),
        matplotlib.rc_context(figure.math if isinstance(figure, Sheet) else {}),
        _laid_out(figure, kind, dpi),
    ):
        figure.savefig(drawn, dpi=dpi, format=kind, metadata={key: text, **dates})
    with whole_file(path) as partial:
        partial.write_bytes(drawn.getvalue())
    if isinstance(figure, Sheet) and figure.caption:
        suffix, caption = figure.caption
        written = f"\\caption{{{latex(caption)}}}" if suffix == "tex" else caption
        with whole_file(path.with_suffix(f".{suffix}")) as partial:
            partial.write_text(f"{written}\n", encoding="utf-8")
    return path


@contextlib.contextmanager
def _laid_out(figure: Figure, kind: str, dpi: int) -> Iterator[None]:
    """Lay a figure out as it will be in a file; otherwise savefig draws all of it twice."""
    engine, canvas, dots = figure.get_layout_engine(), figure.canvas, figure.dpi
    if engine is None:
        yield
        return
    try:
        get_registered_canvas_class(kind)(figure)  # whose letters are as wide as they will be in the file
        figure.dpi = dpi if kind == "png" else _VECTOR_DPI
        engine.execute(figure)
        figure.set_canvas(canvas)
        figure.dpi = dots
        with matplotlib.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
            figure.set_layout_engine(None)
        yield
    finally:
        figure.set_canvas(canvas)
        figure.dpi = dots
        figure.set_layout_engine(engine)


def rows_named(rows: str | Sequence[str]) -> list[str]:
    """Return the names of a figure's rows as a list; UsageError for an unknown name."""
    names = [name.strip() for name in (rows.split(",") if isinstance(rows, str) else rows)]
    for name in names:
        if name not in DRAW:
            raise UsageError(unknown("colouring", name, DRAW))
    return list(dict.fromkeys(names))


def _origin(shown: Any) -> Any:
    if isinstance(shown, Capture):
        return {**shown.about, "versions": dict(shown.versions), "seed": shown.seed}
    return [_origin(capture) for capture in shown] if isinstance(shown, (list, tuple)) else shown


def _notes(panel: Panel, row: str, labels: str, *, first: bool) -> list[Words]:
    """Return the lines above a panel: those of its column, and those of its row."""
    lines = notes_of(panel, labels) if first else []
    if row == "token":
        return [*lines, _scale_of(panel)]
    if row == "channel":
        extreme = zip(map(str, extreme_channels(panel.stats)), panel.style.channels, strict=False)
        words = [("channels" if panel.room > _LEAST_ROOM else "ch.", panel.style.ink), *extreme]
        while words_inches(words) > panel.room:
            words.pop()
        return [*lines, words]
    return [*lines, *(fits_in_line(panel, "RMSE", lambda fit: f"{fit.rmse:.3g}") if row == RESIDUAL else [])]


_LEAST_ROOM = 1.2  # inches


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
