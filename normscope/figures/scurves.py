"""The S-curves of a network: a column a norm site, and a row each for density, tokens, channels and residuals."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.figure import Figure

from normscope.errors import UsageError, count, unknown
from normscope.figures.axes import AUTO, check_xscale, share_colours, share_heights
from normscope.figures.panels import (
    DRAW,
    RESIDUAL,
    Panel,
    ceiling_note,
    draw_panel,
    extreme_channels,
    fit_notes,
    legend_handles,
    panels_of,
    remarks,
    residual_handles,
    with_shared_scales,
)
from normscope.figures.style import (
    LINE_POINTS,
    NOTE,
    Style,
    Words,
    broken,
    columns_within,
    head_inches,
    head_panel,
    inches_of,
    lined,
    sheet,
    strip_above,
    style_named,
    width_of,
    write_above,
)
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.known import FREE
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import Layers
from normscope.runtime.files import whole_file

ROWS = tuple(row for row in DRAW if row != RESIDUAL)
FORMATS = ("png", "svg", "pdf")
_VECTOR_DPI = 72  # at which matplotlib lays out what is in points
_EDGE_INCHES = 0.35  # of a panel's width, that its ticks take


def plot(
    capture: Capture,
    fits: Sequence[CurveFit] = (),
    *,
    sites: Layers | None = None,
    rows: str | Sequence[str] = ROWS,
    xscale: str = AUTO,
    share_axes: bool = False,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
    ax: Axes | None = None,
) -> Figure:
    """Draw the S-curves of every site of a capture.

    The axis of x contains every pair. It is linear, with the centre enlarged in an inset where the tails reach far
    beyond it. Where massive activations leave 99 % of the pairs in a tenth of the width, it is asinh: nearly linear
    for the 90 % of the pairs nearest to zero, logarithmic beyond. E[y|x] is drawn where 32 pairs lie within 1/20 of
    the axis. Dotted lines are the bounds ±√(d−1) of a LayerNorm (±√d of an RMSNorm). Of more than four curves, the
    four of largest mean R² are drawn.

    Args:
        capture: what :func:`normscope.capture` returned.
        fits: what :func:`normscope.fit` made of it; drawn over every panel.
        sites: which sites, as ``layers`` of :func:`normscope.capture`; by default all.
        rows: which rows: ``density``, ``token``, ``channel``, ``residual`` (what the curves leave of E[y|x]), as a
            list or separated by commas.
        xscale: ``linear``, ``asinh`` or ``auto``.
        share_axes: use the same axes and colours in all panels, so that sites can be compared, without insets;
            ``auto`` is asinh if one site's pairs require it.
        width: of the figure, in inches; narrow figures have fewer columns, and letters of at least 6 points.
        title: above all panels; by default the network's name, and weights and data below all panels; ``none`` for
            neither.
        style: ``light`` or ``dark``.
        ax: axes of yours, for one row of one site; only the panel is drawn there.

    Returns:
        A matplotlib figure, that of ``ax`` if given; :func:`save_figure` writes it.

    Raises:
        UsageError: if there is no such site, row, scale or style, or if ``ax`` is given for several panels, or the
            width is under 2 inches.
    """
    shown, theme = rows_named(rows), style_named(style)
    check_xscale(xscale)
    capture = capture if sites is None else capture.only(sites)
    if ax is not None:
        return _draw_on(ax, capture, fits, shown, xscale, theme)
    columns, panel_inches = columns_within(len(capture.sites), width)
    inches = panel_inches[0] - _EDGE_INCHES
    panels = panels_of(capture, capture.sites, fits, theme, xscale=xscale, inches=inches, room=inches + 0.05)
    if share_axes:
        panels = with_shared_scales(panels, xscale)
    inches = inches_of(width, 0.5 + panel_inches[0] * columns)
    notes = [[_NOTES[row](panel) for row in shown] for panel in panels]
    blocks = math.ceil(len(panels) / columns)
    lines = [max(map(len, of_row)) for of_row in zip(*notes, strict=True)]  # above the panels of each row
    rows_inches = len(shown) * panel_inches[1] + sum(lines) * LINE_POINTS / 72
    height = blocks * (rows_inches + head_inches(capture.sites, panels[0].room) + 0.12)
    handles = legend_handles(
        panels, density="density" in shown, sampled="sample" in capture.about, bounds=set(shown) != {RESIDUAL}
    )
    if RESIDUAL in shown:
        handles += residual_handles(panels)
    samples = count(capture.n_samples, "sample")
    foot = remarks(panels, fits, ceilings="density" in shown)
    with sheet(theme, inches, height, title, capture.about, samples, foot=foot, handles=handles) as figure:
        axes = figure.subplots(len(shown) * blocks, columns, squeeze=False)
        for empty in axes.flat:
            empty.set_visible(False)
        for number, panel in enumerate(panels):
            block, column = divmod(number, columns)
            for place, row in enumerate(shown):
                panel_ax = axes[block * len(shown) + place, column]
                panel_ax.set_visible(True)
                _draw(panel_ax, panel, row, notes[number][place], lines[place], title=place == 0)
                if column == 0:
                    panel_ax.set_ylabel(_name_of_y(row), labelpad=1)
                elif share_axes:
                    panel_ax.tick_params(labelleft=False)
                if place == len(shown) - 1:
                    panel_ax.set_xlabel(panel.axis.label(panel.inches), labelpad=1)
        if share_axes:
            for place, row in enumerate(shown):
                of_row = [ax for ax in axes[place :: len(shown)].flat if ax.get_visible()]
                if row == "density":
                    share_colours(of_row)
                elif row == RESIDUAL:
                    share_heights(of_row)
    return figure


def _draw_on(
    ax: Axes, capture: Capture, fits: Sequence[CurveFit], rows: Sequence[str], xscale: str, theme: Style
) -> Figure:
    """Draw one panel into somebody's axes."""
    if len(capture.sites) != 1 or len(rows) != 1:
        raise UsageError(
            f"ax takes one row of one site, but there are {count(len(rows), 'row')} of "
            f"{count(len(capture.sites), 'site')}: say sites= and rows=."
        )
    figure = ax.get_figure(root=True)
    if figure is None:
        raise UsageError("ax belongs to no figure.")
    inches = ax.get_window_extent().width / figure.dpi
    (panel,) = panels_of(capture, capture.sites, fits, theme, xscale=xscale, inches=inches, room=inches)
    _draw(ax, panel, rows[0], _NOTES[rows[0]](panel), title=True)
    ax.set(xlabel=panel.axis.label(inches), ylabel=_name_of_y(rows[0]))
    return figure


def _name_of_y(row: str) -> str:
    return "E[y|x] − fit" if row == RESIDUAL else "output before affine, y"


def save_figure(figure: Figure, path: str | Path, shown: Any, dpi: int = 200) -> Path:
    """Write a figure to a file whose suffix is its format, with its provenance in the metadata.

    Args:
        figure: what :func:`normscope.plot`, :func:`normscope.overview` or another of them drew.
        path: of the file.
        shown: a capture or a list of them, whose model, weights, data, versions and seed the file contains as JSON; or
            other JSON.
        dpi: dots per inch, also of the points within svg and pdf.

    Returns:
        The path.

    Raises:
        UsageError: if the suffix is not one of png, svg and pdf, or if it cannot be written there.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise UsageError(unknown("figure format", kind, FORMATS))
    text = json.dumps(_origin(shown))
    key = "Subject" if kind == "pdf" else "Description"
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    drawn = io.BytesIO()  # on a full disk matplotlib's PDF writer raises an error of zlib's
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "normscope", "pdf.fonttype": 42}),
        _laid_out(figure, kind, dpi),
    ):
        figure.savefig(drawn, dpi=dpi, format=kind, metadata={key: text, **dates})
    with whole_file(path) as partial:
        partial.write_bytes(drawn.getvalue())
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


def _draw(ax: Axes, panel: Panel, row: str, notes: Sequence[Words], least: int = 0, *, title: bool) -> None:
    draw_panel(ax, panel, row)
    if row == "token":
        _draw_scale(ax, panel)
    pad = write_above(ax, notes, least)
    if title:
        pairs = f"{panel.stats.n_pairs:,} pairs"
        bound = panel.site.bound  # written where its lines lie beyond the panel
        bounded = [f"{pairs} · |y| ≤ {bound:.3g}"] if panel.scales.y[1] < bound < math.inf else []
        head_panel(ax, panel.site, [*bounded, pairs], panel.room, pad)


def _density_notes(panel: Panel) -> list[Words]:
    """The parameters and R² of each curve, and of the best function of x."""
    return [*fit_notes(panel, _result), *ceiling_note(panel)]


def _result(fit: CurveFit) -> list[str]:
    if fit.curve == FREE:
        return [f"R² {fit.r2:.3f}"]
    shape = [f"A {fit.amplitude:.3g}", f"α {fit.alpha:.3g}"]
    if fit.doubt == "straight":
        shape = [f"slope {fit.slope:.3g}, straight"]
    elif fit.doubt == "power law":
        shape = [f"{fit.coefficient:.3g}·|x|^{fit.function.power_at_origin:.3g}, power law"]
    return [*shape, f"R² {fit.r2:.3f}", *(["not converged"] if fit.doubt == "not converged" else [])]


def _token_notes(panel: Panel) -> list[Words]:
    """Ends of the colour bar, with room for it between them, and how many tokens are drawn."""
    low, high = panel.scales.sigma
    drawn = len(panel.stats.tokens.key) + len(panel.stats.largest.key)
    ink = panel.style.ink
    below: Words = [(_least_scale(low), ink), (_ROOM, "none"), (f"{high:.2g}", ink)]
    return [*broken([f"{drawn:,} of {panel.stats.n_tokens:,}", "tokens, by σ (log)"], ink, panel.room), below]


_ROOM = "mmm"  # is not drawn


def _least_scale(low: float) -> str:
    return f"σ {low:.2g}"


def _draw_scale(ax: Axes, panel: Panel) -> None:
    left = 72 * width_of(_least_scale(panel.scales.sigma[0]), NOTE) + 4
    bar = strip_above(ax, left, 72 * width_of(_ROOM, NOTE))
    bar.imshow(np.linspace(0, 1, 64)[None, :], aspect="auto", cmap=panel.style.tokens)
    bar.set(yticks=[], xticks=[])
    for spine in bar.spines.values():
        spine.set_visible(False)


def _channel_notes(panel: Panel) -> list[Words]:
    """The channels of largest |x|, each in its colour."""
    extreme = extreme_channels(panel.stats)
    named = [(f"{c}", colour) for c, colour in zip(extreme, panel.style.channels, strict=False)]
    others = broken(["others: a sample,", "even over x"], panel.style.faint, panel.room)
    return [*lined([("channels", panel.style.ink), *named], panel.room), *others]


_NOTES: dict[str, Callable[[Panel], list[Words]]] = {
    "density": _density_notes,
    "token": _token_notes,
    "channel": _channel_notes,
    RESIDUAL: lambda panel: fit_notes(panel, lambda fit: [f"RMSE {fit.rmse:.3g}"]),
}
