"""The S-curves of a network: a column a norm site, and a row each for density, tokens, channels and residuals."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import UsageError, unknown
from normscope.figures.panels import (
    DRAW,
    LINE_SHARE,
    Limits,
    Panel,
    corner_lines,
    corner_text,
    draw_panel,
    enlarged_range,
    extreme_channels,
    inset_of,
    legend_handles,
    outline,
    panels_of,
    token_scales,
    whole_range,
)
from normscope.figures.style import head_figure, head_panel, legend_columns, style_named
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.known import FREE
from normscope.pairs.captures import Capture
from normscope.runtime.files import whole_file

Array = NDArray[np.float64]

_GROUPS = 120  # across a panel at most
_LEAST_COUNT = 128  # pairs that a group holds at least
_BAND = 2.0  # standard errors
_MARGIN = 1.08
_INSET_SHARE = 0.46  # of a panel's height
_BAND_ALPHA = 0.35
_LETTERS = 5.2


@dataclass(frozen=True)
class Residuals:
    """Of groups of neighbouring bins, in ascending order of x.

    Attributes:
        x: mean x, float64 ``(groups,)``.
        error: standard error of E[y|x], in units of y, ``(groups,)``; NaN where the pairs are of a single fold.
        off: E[y|x] − A·f(αx + s), in units of y, ``(fits, groups)``.
    """

    x: Array
    error: Array
    off: Array


def residuals(moments: Tensor, fits: Sequence[CurveFit], width: float, least_count: int = _LEAST_COUNT) -> Residuals:
    """Average over each group of bins what the curves leave of y there, and see how far the folds differ.

    The folds are independent, pairs are not: with the share w of a group's pairs that each fold holds, and the folds'
    means m of y there, the standard error is that of a mean of so many folds, √(Σw² · Σw(m − Σwm)² / (1 − Σw²)),
    which is the standard deviation over folds / √folds where all hold the same number.

    Args:
        moments: n, Σx, Σy, … per fold and bin of x: float64 ``(folds, 6, bins)``.
        fits: of this site, none degenerate.
        width: a group reaches over no more of x than this, unless it would hold too few pairs.
        least_count: how many pairs a group holds at least, where there are as many.

    Returns:
        The residuals, of no group where there is no pair.

    >>> n, y = torch.full((4, 1), 50.0), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> found = residuals(torch.stack([n, n, n * y, n, n, n], 1).double(), (), 1.0)
    >>> round(float(found.error[0]), 6), round(float(y.std() / 4**0.5), 6)
    (0.645497, 0.645497)
    """
    filled = moments[:, 0].sum(0) > 0
    n, sum_x, sum_y = moments[:, :3, filled].numpy().transpose(1, 0, 2)
    if not n.size:
        return Residuals(np.empty(0), np.empty(0), np.empty((len(fits), 0)))
    x = sum_x.sum(0) / n.sum(0)
    starts = _starts(n.sum(0), x, width, least_count)
    by_fold, y_by_fold = np.add.reduceat(n, starts, axis=1), np.add.reduceat(sum_y, starts, axis=1)
    held = by_fold.sum(0)
    mean = y_by_fold.sum(0) / held
    share = by_fold / held
    fold_means = np.divide(y_by_fold, by_fold, out=np.zeros_like(by_fold), where=by_fold > 0)
    alike = (share**2).sum(0)
    several = np.count_nonzero(by_fold, axis=0) > 1
    error = np.full_like(mean, np.nan)
    np.divide(alike * (share * (fold_means - mean) ** 2).sum(0), 1 - alike, out=error, where=several)
    expected = np.stack([fit(torch.from_numpy(x)).numpy() for fit in fits]) if fits else np.empty((0, len(x)))
    at_fit = np.add.reduceat(n.sum(0) * expected, starts, axis=1) / held
    return Residuals(np.add.reduceat(sum_x.sum(0), starts) / held, np.sqrt(error), mean - at_fit)


def _starts(n: Array, x: Array, width: float, least_count: int) -> NDArray[np.intp]:
    """First bins of the groups: at most one in a multiple of ``width``, each of ``least_count`` pairs if there are."""
    cuts = np.flatnonzero(np.diff(np.floor(x / width), prepend=-np.inf))
    starts, held = [0], 0.0
    for place, count in zip(cuts, np.add.reduceat(n, cuts), strict=True):
        if held >= least_count:
            starts.append(int(place))
            held = 0.0
        held += count
    return np.array(starts[:-1] if held < least_count and len(starts) > 1 else starts)


def draw_residuals(ax: Axes, panel: Panel) -> None:
    """E[y|x] − A·f(αx + s) of every fitted curve over ± 2 standard errors of E[y|x], and the fits' RMSE above them."""
    x_limits, _ = whole_range(panel)
    lines = corner_lines(panel, lambda fit: f"RMSE {fit.rmse:.3g}")
    centre = enlarged_range(panel)
    free = max(LINE_SHARE * (len(lines) + 0.5), _INSET_SHARE if centre else 0)
    _draw_within(ax, panel, x_limits, free)
    corner_text(ax, panel.style, lines, _LETTERS, lowest=0.985 - LINE_SHARE * (len(lines) - 0.3))
    if centre:
        _draw_within(inset_of(ax, panel.style), panel, centre[0], 0)


def _draw_within(ax: Axes, panel: Panel, x_limits: Limits, free: float) -> None:
    """Draw what lies between these limits; above it a share of the height stays free."""
    fits = [fit for fit in panel.fits if not fit.degenerate]
    groups = residuals(panel.stats.moments, fits, (x_limits[1] - x_limits[0]) / _GROUPS)
    band = _BAND * groups.error
    # The worst of many curves would flatten all others: those that the corner names are seen whole.
    named = [off for fit, off in zip(fits, groups.off, strict=True) if fit in panel.named] or [band]
    inside = (groups.x >= x_limits[0]) & (groups.x <= x_limits[1])
    reach = _MARGIN * float(np.nanmax(np.abs(np.array(named)[:, inside]), initial=0))
    reach = reach if reach > 0 else 1.0
    ax.set(xlim=x_limits, ylim=(-reach, reach * (1 + free) / (1 - free)))
    drawn: list[Artist] = [
        ax.fill_between(groups.x, -band, band, color=panel.style.faint, alpha=_BAND_ALPHA, lw=0, zorder=1)
    ]
    ax.axhline(0, color=panel.style.ink, lw=0.6, zorder=2)
    for fit, off in zip(fits, groups.off, strict=True):
        colour, dashes = panel.looks[fit.curve]
        drawn += ax.plot(
            groups.x, off, color=colour, ls=dashes, lw=1.0, zorder=4, path_effects=outline(panel.style, 0.6)
        )
    for artist in drawn:
        artist.set_clip_path(Rectangle((x_limits[0], -reach), np.ptp(x_limits), 2 * reach, transform=ax.transData))


def residual_handles(panels: Sequence[Panel]) -> list[Artist]:
    """The legend of the band, and of its folds; nothing where no site has any."""
    over = sorted({str(panel.stats.fold_by) for panel in panels if panel.stats.fold_by})
    if not over:
        return []
    label = f"±{_BAND:g} standard errors of E[y|x], folds by {', '.join(over)}"
    return [Patch(facecolor=panels[0].style.faint, alpha=_BAND_ALPHA, label=label)]


FORMATS = ("png", "svg", "pdf")
ROWS = tuple(DRAW)
_RESIDUAL = "residual"
_ROW_NAMES = (*ROWS, _RESIDUAL)
_COLUMNS = 6
_PANEL_INCHES = (2.35, 2.05)
_LEGEND_FONT = FontProperties(size=6.5)
_LEGEND_LINE_INCHES = 0.13
_LEGEND_LINES_FREE = 2  # of a figure without more


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
        color: which rows: ``density``, ``token``, ``channel``, ``residual`` (what the curves leave of E[y|x]), as a
            list or separated by commas.
        style: ``light`` or ``dark``.

    Returns:
        A matplotlib figure; :func:`save_figure` writes it.

    Raises:
        UsageError: if there is no such row or style.
    """
    rows = rows_named(color)
    bounded = [row for row in rows if row != _RESIDUAL]
    theme = style_named(style)
    columns = min(_COLUMNS, len(capture.sites))
    blocks = math.ceil(len(capture.sites) / columns)
    panels = panels_of(capture, capture.sites, fits, theme)
    with matplotlib.rc_context(theme.rc()):
        width, height = 0.5 + _PANEL_INCHES[0] * columns, 0.95 + _PANEL_INCHES[1] * len(rows) * blocks
        handles = _handles(capture, panels, rows)
        across = legend_columns([str(handle.get_label()) for handle in handles], width, _LEGEND_FONT)
        height += _LEGEND_LINE_INCHES * max(0, math.ceil(len(handles) / across) - _LEGEND_LINES_FREE)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(len(rows) * blocks, columns, squeeze=False)
        for ax in axes.flat:
            ax.set_visible(False)
        for number, panel in enumerate(panels):
            block, column = divmod(number, columns)
            for place, row in enumerate(rows):
                ax = axes[block * len(rows) + place, column]
                ax.set_visible(True)
                _draw(ax, panel, row)
                if row in bounded[:1]:
                    _say_where_the_bound_is(ax, panel)
                if column == 0:
                    ax.set_ylabel("E[y|x] − fit" if row == _RESIDUAL else "output before affine, y", labelpad=1)
                if place == len(rows) - 1:
                    ax.set_xlabel("norm input x", labelpad=1)
                if place == 0:
                    _title(ax, panel)
        head_figure(figure, capture)
        figure.legend(handles=handles, loc="outside lower center", ncols=across, prop=_LEGEND_FONT)
    return figure


def save_figure(figure: Figure, path: str | Path, shown: Any, dpi: int = 200) -> Path:
    """Write a figure, whole or not at all; its format is the suffix of ``path``, and it says in itself what it shows.

    Args:
        figure: what :func:`normscope.plot`, :func:`normscope.overview` or another of them drew.
        path: of the file.
        shown: a capture or a list of them, of which the file holds model, weights, data, versions and seed as JSON; or
            what it is to hold in their place.
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
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "normscope"}):
        figure.savefig(drawn, dpi=dpi, format=kind, metadata={key: text, **dates})
    with whole_file(path) as partial:
        partial.write_bytes(drawn.getvalue())
    return path


def rows_named(color: str | Sequence[str]) -> list[str]:
    """Look the rows of a figure up; UsageError where there is none of that name."""
    names = [name.strip() for name in (color.split(",") if isinstance(color, str) else color)]
    for name in names:
        if name not in _ROW_NAMES:
            raise UsageError(unknown("colouring", name, _ROW_NAMES))
    return list(dict.fromkeys(names))


def _origin(shown: Any) -> Any:
    if isinstance(shown, Capture):
        return {**shown.about, "versions": dict(shown.versions), "seed": shown.seed}
    return [_origin(one) for one in shown] if isinstance(shown, (list, tuple)) else shown


def _title(ax: Axes, panel: Panel) -> None:
    site = panel.site
    head_panel(ax, site, f"{panel.stats.n_pairs:,} pairs", _PANEL_INCHES[0])


def _say_where_the_bound_is(ax: Axes, panel: Panel) -> None:
    if ax.get_ylim()[1] < panel.site.bound < math.inf:
        text = f"bound ±{panel.site.bound:.3g} is off the panel"
        ax.text(0.99, 0.985, text, color=panel.style.faint, ha="right", va="top", transform=ax.transAxes, fontsize=5.2)


def _draw(ax: Axes, panel: Panel, row: str) -> None:
    if row == _RESIDUAL:
        draw_residuals(ax, panel)
        return
    draw_panel(ax, panel, row)
    _LEGENDS[row](ax, panel)


def _density_legend(ax: Axes, panel: Panel) -> None:
    """The parameters and R² of each curve, in the corner that an S leaves empty."""
    lines = corner_lines(panel, _result)
    if panel.fits and panel.fits[0].r2_ceiling is not None:
        lines.append(("best held-out function of x:", panel.style.ink))
        lines.append((f"R² {panel.fits[0].r2_ceiling:.3f}, folds by {panel.stats.fold_by}", panel.style.ink))
    corner_text(ax, panel.style, lines)


def _result(fit: CurveFit) -> str:
    if fit.curve == FREE:
        return f"R² {fit.r2:.3f}"
    shape = f"A {fit.amplitude:.3g}  α {fit.alpha:.3g}"
    if fit.doubt == "straight":
        shape = f"slope {fit.slope:.3g}, straight"
    elif fit.doubt == "power law":
        shape = f"{fit.coefficient:.3g}·|x|^{fit.function.power_at_origin:.3g}, power law"
    return f"{shape}  R² {fit.r2:.3f}{'  not converged' if fit.doubt == 'not converged' else ''}"


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
    corner_text(ax, panel.style, [("a sample, even over x", panel.style.faint), *named])


_LEGENDS = {"density": _density_legend, "token": _token_legend, "channel": _channel_legend}


def _handles(capture: Capture, panels: Sequence[Panel], rows: Sequence[str]) -> list[Artist]:
    shown = legend_handles(
        panels, density="density" in rows, sampled="sample" in capture.about, bounds=set(rows) != {_RESIDUAL}
    )
    return [*shown, *(residual_handles(panels) if _RESIDUAL in rows else [])]
