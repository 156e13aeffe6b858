"""The S-curves of a network: a column a norm site, and a row each for density, tokens and channels."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from normscope.errors import UsageError, unknown
from normscope.figures.panels import DRAW, Panel, draw_curves, extreme_channels, outline, token_scales
from normscope.figures.style import Style, style_named
from normscope.files import whole_file
from normscope.fits.fit import CurveFit
from normscope.fits.goodness import conditional_mean
from normscope.pairs.binning import DENSITY_Y_GRID
from normscope.pairs.captures import Capture
from normscope.pairs.stats import PairStats

FORMATS = ("png", "svg", "pdf")
ROWS = tuple(DRAW)
_COLUMNS = 6
_PANEL_INCHES = (2.35, 2.05)
_CENTRE_SHARE = 0.98  # of all pairs lie in the inset
_BOUND_SHOWN_WITHIN = 1.6  # times the largest |y|; a bound farther away would flatten the curves, and is written
_INSET_FROM = 3.0  # times wider must the tails reach than the centre for an inset to show more


def plot(
    capture: Capture, fits: Sequence[CurveFit] = (), *, color: str | Sequence[str] = ROWS, style: str = "light"
) -> Figure:
    """Draw the S-curves of every site of a capture.

    Axes are linear, as the S is seen on them: from the smallest to the largest x, with the centre enlarged in an
    inset where the tails reach far beyond it. The dotted lines are the bounds ±√(d−1) of a LayerNorm (±√d of an
    RMSNorm).

    Args:
        capture: what :func:`normscope.capture` returned.
        fits: what :func:`normscope.fit` made of it; drawn over every panel.
        color: which rows: ``density``, ``token``, ``channel``, as a list or separated by commas.
        style: ``light`` or ``dark``.

    Returns:
        A matplotlib figure; :func:`save` writes it.

    Raises:
        UsageError: if there is no such row or style.
    """
    rows = rows_named(color)
    theme = style_named(style)
    columns = min(_COLUMNS, len(capture.sites))
    blocks = math.ceil(len(capture.sites) / columns)
    with matplotlib.rc_context(theme.rc()):
        width, height = _PANEL_INCHES
        figure = Figure(figsize=(0.5 + width * columns, 0.95 + height * len(rows) * blocks), layout="constrained")
        axes = figure.subplots(len(rows) * blocks, columns, squeeze=False)
        for ax in axes.flat:
            ax.set_visible(False)
        for number, site in enumerate(capture.sites):
            own = [found for found in fits if found.site == site.name]
            panel = Panel(site, capture.stats[site.name], own, theme)
            block, column = divmod(number, columns)
            for place, row in enumerate(rows):
                ax = axes[block * len(rows) + place, column]
                _draw(ax, panel, row)
                if column == 0:
                    ax.set_ylabel("output before affine, y", labelpad=1)
                if place == len(rows) - 1:
                    ax.set_xlabel("norm input x", labelpad=1)
                if place == 0:
                    _title(ax, panel)
        _caption(figure, capture, fits, rows, theme)
    return figure


def save(figure: Figure, path: str | Path, capture: Capture, dpi: int = 200) -> Path:
    """Write a figure, whole or not at all; its format is the suffix of ``path``, and it says in itself what it shows.

    Raises:
        UsageError: if the suffix is not one of png, svg and pdf, or if it cannot be written there.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise UsageError(unknown("figure format", kind, FORMATS))
    text = json.dumps({**capture.about, "versions": dict(capture.versions), "seed": capture.seed})
    key = "Subject" if kind == "pdf" else "Description"
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with whole_file(path) as partial, matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "normscope"}):
        figure.savefig(partial, dpi=dpi, format=kind, metadata={key: text, **dates})
    return path


def rows_named(color: str | Sequence[str]) -> list[str]:
    """Look the rows of a figure up; UsageError where there is none of that name."""
    names = [name.strip() for name in (color.split(",") if isinstance(color, str) else color)]
    for name in names:
        if name not in DRAW:
            raise UsageError(unknown("colouring", name, DRAW))
    return list(dict.fromkeys(names))


def _draw(ax: Axes, panel: Panel, row: str) -> None:
    ax.set_visible(True)
    x_limits, y_limits = _whole_range(panel)
    _draw_within(ax, panel, row, x_limits, y_limits)
    centre = _centre_range(panel.stats)
    if centre is not None and x_limits[1] - x_limits[0] > _INSET_FROM * (centre[0][1] - centre[0][0]):
        inset = ax.inset_axes((0.09, 0.58, 0.34, 0.40))
        _draw_within(inset, panel, row, *centre)
        inset.tick_params(labelsize=4.5, length=1.5, pad=1)
        for spine in inset.spines.values():
            spine.set(visible=True, linewidth=0.5, color=panel.style.faint)
    _LEGENDS[row](ax, panel)


def _draw_within(
    ax: Axes, panel: Panel, row: str, x_limits: tuple[float, float], y_limits: tuple[float, float]
) -> None:
    ax.set(xlim=x_limits, ylim=y_limits)
    DRAW[row](ax, panel)
    draw_curves(ax, panel)
    ax.set(xlim=x_limits, ylim=y_limits)


def _whole_range(panel: Panel) -> tuple[tuple[float, float], tuple[float, float]]:
    """Limits that hold every pair, symmetric about the origin, and the bound where the pairs come near it."""
    stats = panel.stats
    if not stats.n_pairs:
        return (-1.0, 1.0), (-1.0, 1.0)
    reach_x = max(float(stats.channel_extremes.abs().max()), 1e-30)
    filled = stats.density.sum(0).nonzero().squeeze(1)
    edges = DENSITY_Y_GRID.edges()[1:-1].abs()  # of the bin that holds the largest |y|: the panel holds it whole
    reach_y = float(edges[(filled - 1).clamp(0, len(edges) - 1)].maximum(edges[filled.clamp(max=len(edges) - 1)]).max())
    if panel.site.bound < _BOUND_SHOWN_WITHIN * reach_y:
        reach_y = panel.site.bound
    return (-1.06 * reach_x, 1.06 * reach_x), (-1.04 * reach_y, 1.04 * reach_y)


def _centre_range(stats: PairStats) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Limits about the origin within which nearly all pairs lie."""
    x, mean, deviation = conditional_mean(stats.moments.sum(0), max(1, stats.n_pairs // 100))
    if len(x) < 2:
        return None
    n = stats.moments[:, 0].sum(0)
    centres = (stats.moments[:, 1].sum(0) / n.clamp_min(1)).abs()
    order = centres.argsort()
    reach = float(centres[order][int((n[order].cumsum(0) < _CENTRE_SHARE * n.sum()).sum())])
    inside = np.abs(x) <= reach
    if reach <= 0 or not inside.any():
        return None
    top = float(np.max(np.abs(mean[inside]) + 1.5 * deviation[inside]))
    return (-reach, reach), (-top, top)


def _title(ax: Axes, panel: Panel) -> None:
    site = panel.site
    kind = " · ".join(part for part in (f"{site.kind} d={site.d}", site.placement) if part)
    ax.set_title(f"{site.index}  {site.name}\n{kind}\n{panel.stats.n_pairs:,} pairs", parse_math=False)
    if site.bound > ax.get_ylim()[1]:
        text = f"bound ±{site.bound:.3g} is off the panel"
        ax.text(0.99, 0.985, text, color=panel.style.faint, ha="right", va="top", transform=ax.transAxes, fontsize=5.2)


def _density_legend(ax: Axes, panel: Panel) -> None:
    """The parameters and R² of each curve, in the corner that an S leaves empty."""
    lines = []
    for found in panel.fits:
        if found.degenerate:
            lines.append((f"{found.curve}: nothing to fit", panel.style.faint))
            continue
        shape = (
            f"slope {found.slope:.3g}, straight" if found.straight else f"A {found.amplitude:.3g}  α {found.alpha:.3g}"
        )
        doubt = "" if found.converged else "  not converged"
        lines.append((f"{found.curve}  {shape}  R² {found.r2:.3f}{doubt}", panel.style.curves[found.curve][0]))
    if panel.fits and panel.fits[0].r2_ceiling is not None:
        lines.append((f"ceiling R² {panel.fits[0].r2_ceiling:.3f}, folds by {panel.stats.fold_by}", panel.style.ink))
    _corner_text(ax, panel, lines)


def _token_legend(ax: Axes, panel: Panel) -> None:
    low, high = token_scales(panel.stats)
    bar = ax.inset_axes((0.60, 0.11, 0.37, 0.035))
    bar.imshow(np.linspace(0, 1, 64)[None, :], aspect="auto", cmap=panel.style.tokens)
    bar.set(yticks=[], xticks=[0, 63], xticklabels=[f"{low:.2g}", f"{high:.2g}"])
    bar.tick_params(length=0, pad=1, labelsize=5.4)
    drawn = len(panel.stats.tokens.key) + len(panel.stats.largest.key)
    text = f"σ (log) of {drawn:,} of {panel.stats.n_tokens:,} tokens"
    ax.text(0.99, 0.16, text, ha="right", fontsize=5.4, transform=ax.transAxes, path_effects=outline(panel.style))


def _channel_legend(ax: Axes, panel: Panel) -> None:
    extreme = extreme_channels(panel.stats)
    named = [(f"channel {c}", colour) for c, colour in zip(extreme, panel.style.channels, strict=False)]
    _corner_text(ax, panel, [("a sample, even over x", panel.style.faint), *named])


def _corner_text(ax: Axes, panel: Panel, lines: Sequence[tuple[str, str]]) -> None:
    for number, (text, colour) in enumerate(reversed(lines)):
        ax.text(
            0.99,
            0.02 + 0.075 * number,
            text,
            color=colour,
            ha="right",
            fontsize=5.6,
            transform=ax.transAxes,
            path_effects=outline(panel.style),
            zorder=6,
        )


_LEGENDS = {"density": _density_legend, "token": _token_legend, "channel": _channel_legend}


def _caption(figure: Figure, capture: Capture, fits: Sequence[CurveFit], rows: Sequence[str], theme: Style) -> None:
    about = capture.about
    title = f"{about['model']} · {capture.n_samples} samples\nweights: {about['weights']}\ndata: {about['data']}"
    figure.suptitle(title, fontsize=7.5, parse_math=False)
    handles: list[Artist] = [Line2D([], [], color=theme.ink, lw=1.4, label="E[y|x], the best any function of x can do")]
    if "density" in rows:
        grey = matplotlib.colormaps[theme.density](0.6)
        handles.insert(0, Patch(facecolor=grey, label="all pairs (log scale, each panel its own)"))
    for curve in dict.fromkeys(found.curve for found in fits):
        colour, dashes = theme.curves[curve]
        handles.append(Line2D([], [], color=colour, ls=dashes, lw=1.1, label=f"A·{curve}(αx), least squares"))
    if any(site.bound < _whole_range(Panel(site, capture.stats[site.name], (), theme))[1][1] for site in capture.sites):
        handles.append(Line2D([], [], color=theme.faint, ls=":", lw=0.9, label="bound: ±√(d−1), without centring ±√d"))
    across = min(_COLUMNS, len(capture.sites))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) if across > 3 else max(1, across - 1))
