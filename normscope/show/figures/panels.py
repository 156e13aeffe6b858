"""One panel of one norm site: its pairs as a density, by token or by channel, under the fitted curves."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from normscope.curves.known import CURVES, FREE
from normscope.fits.ceiling import conditional_mean
from normscope.fits.curve_fit import CurveFit
from normscope.fits.saturation import site_saturation
from normscope.norms.sites import NormSite, short_names
from normscope.pairs.captures import Capture
from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, FloatGrid
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.files import visible
from normscope.show.figures.axes import (
    LINEAR,
    MOST_PAIRS,
    Limits,
    Scales,
    XAxis,
    mean_line,
    number,
    pairs_beyond,
    reach_of,
    scales_of,
)
from normscope.show.figures.style import (
    FULL,
    LEAST_POINTS,
    NO_LABELS,
    NOTE,
    SHORT,
    Look,
    Style,
    Words,
    broken,
    key,
    tail,
    that_fits,
    words_inches,
    write_above,
)
from normscope.show.tables.table import sink_sentence

Array = NDArray[np.float64]

_EXTREME_CHANNELS = 4


def extreme_channels(stats: PairStats) -> list[int]:
    """Return the channels that reach the largest |x|, the largest first."""
    return [int(i) for i in stats.reach.argsort(descending=True)[:_EXTREME_CHANNELS]]


def drawn_tokens(stats: PairStats) -> tuple[Array, Array, Array]:
    """Return x and y, float64 ``(tokens, d)``, and 1/σ, ``(tokens,)``, of the sampled and of the largest tokens."""
    x, y, rstd = (
        torch.cat([getattr(stats.tokens, name), getattr(stats.largest, name)]).double().numpy()
        for name in ("x", "y", "rstd")
    )
    return x, y, rstd


def drawn_pairs(stats: PairStats) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return x, y and channel, ``(pairs,)``, of those tokens and of the pairs that are drawn evenly over x."""
    token_x, token_y, _ = drawn_tokens(stats)
    if stats.grouped:  # of whose tokens only the single pairs know their channel
        token_x, token_y = token_x[:0], token_y[:0]
    channels = np.broadcast_to(np.arange(token_x.shape[1]), token_x.shape)
    filled = stats.pairs.filled
    return (
        np.concatenate([token_x.ravel(), stats.pairs.x[filled].double().numpy()]),
        np.concatenate([token_y.ravel(), stats.pairs.y[filled].double().numpy()]),
        np.concatenate([channels.ravel(), stats.pairs.channel[filled].long().numpy()]),
    )


def image(stats: PairStats, x_edges: Array, y_edges: Array) -> Array:
    """Spread the counted pairs evenly over each cell, and gather them by pixel.

    Args:
        stats: sums of a site.
        x_edges: of the pixels, ascending, ``(columns + 1,)``.
        y_edges: likewise, ``(rows + 1,)``.

    Returns:
        Number of pairs per pixel, float64 ``(rows, columns)``, rows in ascending order of y.
    """
    counts = stats.density.numpy().astype(np.float64)
    return _gathered(_gathered(counts, DENSITY_X_GRID, x_edges).T, DENSITY_Y_GRID, y_edges)


def _gathered(counts: Array, grid: FloatGrid, at: Array) -> Array:
    """Gather counts ``(bins, n)`` between neighbouring places in x: ``(places - 1, n)``."""
    edges = grid.edges().numpy()
    edges[0], edges[-1] = 2 * edges[1], 2 * edges[-2]
    below = np.concatenate([np.zeros((1, counts.shape[1])), counts.cumsum(0)])
    bins = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, grid.size - 1)
    share = np.clip((at - edges[bins]) / (edges[bins + 1] - edges[bins]), 0, 1)
    gathered: Array = np.diff(below[bins] + share[:, None] * (below[bins + 1] - below[bins]), axis=0)
    return gathered


_PIXELS = 220
_TOKEN_POINT = 1.26  # points across
_MOST_DRAWN = 4  # curves at most
_INSET_FROM = 3.0  # times as wide as the range of 99 % of the pairs is an axis with an inset
_LEAST_INCHES = 1.5  # of a panel with an inset
_INSET = (0.06, 0.57, 0.32, 0.43)
_CURVE_POINTS = 600
_LINE_POINTS = 33  # of a token's line on an axis that bends it


@dataclass(frozen=True)
class Panel:
    """Data and style of the panels of one site.

    Attributes:
        site: the norm.
        name: its short name.
        stats: its sums.
        fits: those that are drawn.
        style: of the figure.
        looks: colour and dashes of each curve.
        scales: of its axes and colours.
        inches: width of the panel between its edges, roughly.
    """

    site: NormSite
    name: str
    stats: PairStats
    fits: Sequence[CurveFit]
    style: Style
    looks: Mapping[str, Look]
    scales: Scales
    inches: float = 2.0

    @property
    def room(self) -> float:
        """Width of the lines above the panel, in inches."""
        return self.inches + 0.05

    @functools.cached_property
    def moments(self) -> Tensor:
        """Sums over all folds, per bin of x."""
        moments: Tensor = self.stats.moments
        return moments.sum(0)

    @property
    def axis(self) -> XAxis:
        """The axis of x."""
        return self.scales.x

    @functools.cached_property
    def centre(self) -> tuple[Limits, Limits] | None:
        """Limits of x and y that contain nearly all pairs, where a wide panel's linear axis goes far beyond.

        None with shared scales: panels enlarged differently cannot be compared.
        """
        if self.axis.linear_width is not None or self.scales.shared or self.inches < _LEAST_INCHES:
            return None
        reach = reach_of(self.moments, MOST_PAIRS)
        x, mean, deviation = conditional_mean(self.moments, max(1, self.stats.n_pairs // 100))
        inside = np.abs(x) <= reach
        if reach <= 0 or not inside.any() or self.axis.limits[1] < _INSET_FROM * reach:
            return None
        top = float(np.max(np.abs(mean[inside]) + 1.5 * deviation[inside]))
        return (-reach, reach), (-top, top)


def panels_of(
    capture: Capture,
    sites: Sequence[NormSite],
    fits: Sequence[CurveFit],
    style: Style,
    looks: Mapping[str, Look] | None = None,
    xscale: str = LINEAR,
    inches: float = 2.0,
) -> list[Panel]:
    """Make the panels of some sites of a capture; ``looks`` are by default of these fits."""
    drawn, _ = best_of(fits)
    looks = style.looks_of(drawn) if looks is None else looks
    names = short_names(site.name for site in capture.sites)
    panels = []
    for site in sites:
        stats, of_site = capture.stats[site.name], [fit for fit in fits if fit.site == site.name and fit.curve in drawn]
        scales = scales_of([(site, stats)], xscale, of_site)
        panels.append(Panel(site, names[site.name], stats, of_site, style, looks, scales, inches))
    return panels


def with_shared_scales(panels: Sequence[Panel], xscale: str) -> list[Panel]:
    """Return the panels with the widest scales of any of them."""
    fits = [fit for panel in panels for fit in panel.fits]
    shared = scales_of([(panel.site, panel.stats) for panel in panels], xscale, fits, shared=True)
    return [replace(panel, scales=shared) for panel in panels]


def best_of(fits: Sequence[CurveFit]) -> tuple[list[str], list[str]]:
    """Return the curves that are drawn, all or the four of the largest mean R² over sites, and the others likewise."""
    curves = list(dict.fromkeys(fit.curve for fit in fits))
    if len(curves) <= _MOST_DRAWN:
        return curves, []
    r2 = {curve: [-math.inf if fit.degenerate else fit.r2 for fit in fits if fit.curve == curve] for curve in curves}
    ranked = sorted(curves, key=lambda curve: -sum(r2[curve]) / len(r2[curve]))
    return [curve for curve in curves if curve in ranked[:_MOST_DRAWN]], ranked[_MOST_DRAWN:]


def draw_density(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """All pairs: how many lie where, on a logarithmic colour scale, and E[y|x] over them."""
    limits = (*axis.limits, *ax.get_ylim())
    counts = image(panel.stats, axis.evenly(_PIXELS + 1), np.linspace(*limits[2:], _PIXELS + 1))
    shown = np.ma.masked_less_equal(counts, 0)
    if shown.count():
        # The palest quarter of the map is left out, so that a single pair in the tails can still be seen.
        colours = ListedColormap(matplotlib.colormaps[panel.style.density](np.linspace(0.25, 1, 256)))
        on_paper = axis.linear_width is not None  # where its columns are as wide as one another
        ax.imshow(
            shown,
            extent=(0, 1, 0, 1) if on_paper else limits,
            transform=ax.transAxes if on_paper else ax.transData,
            origin="lower",
            aspect="auto",
            norm=LogNorm(0.1, max(float(shown.max()), 1.0)),
            cmap=colours,
            interpolation="nearest",
        )
    share = 1.0 if axis == panel.axis else _INSET[2]
    x, mean = mean_line(panel.moments, axis, share * panel.inches)
    ax.plot(x, mean, color=panel.style.ink, lw=1.4, zorder=3, path_effects=outline(panel.style))


def draw_tokens(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """Whole tokens, each its straight line of slope 1/σ, coloured by σ; of a point-wise function, without lines."""
    x, y, rstd = drawn_tokens(panel.stats)
    if not len(x):
        return
    scale = 1 / rstd
    low, high = panel.scales.sigma
    norm = LogNorm(low, high * (1 + 1e-6))
    if panel.site.pointwise is None:
        ends = np.stack([x.argmin(1), x.argmax(1)], axis=1)[:, :, None]
        lines = np.concatenate([np.take_along_axis(v[:, :, None], ends, 1) for v in (x, y)], axis=2)
        if axis.linear_width is not None:
            lines = _bent(lines, axis)
        look: dict[str, Any] = {"norm": norm, "cmap": panel.style.tokens, "lw": 0.5, "alpha": 0.45, "rasterized": True}
        ax.add_collection(LineCollection(list(lines), array=scale, **look), autolim=False)
    # One marker stamped along each token: a scatter that colours point by point takes most of a figure's time.
    for token_x, token_y, colour in zip(x, y, matplotlib.colormaps[panel.style.tokens](norm(scale)), strict=True):
        points = Line2D(token_x, token_y, ls="", marker="o", ms=_TOKEN_POINT, mew=0, color=colour, rasterized=True)
        ax.add_artist(points)


def _bent(lines: Array, axis: XAxis) -> Array:
    """Points along straight lines, evenly spaced on paper; ``lines`` are their ends, ``(lines, 2, 2)``."""
    first, last = lines[:, :1], lines[:, 1:]
    x = axis.at(np.linspace(axis.along(first[..., 0]), axis.along(last[..., 0]), _LINE_POINTS, axis=1)[..., 0])
    across = last[..., 0] - first[..., 0]
    share = np.divide(x - first[..., 0], across, out=np.zeros_like(x), where=across != 0)
    return np.stack([x, first[..., 1] + share * (last[..., 1] - first[..., 1])], axis=2)


def draw_channels(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """The same tokens, and pairs drawn evenly over x, by channel: those of largest |x| in colour, the rest grey."""
    x, y, channel = drawn_pairs(panel.stats)
    ax.scatter(x, y, color=panel.style.faint, s=1.2, lw=0, alpha=0.35, rasterized=True)
    for colour, extreme in zip(panel.style.channels, extreme_channels(panel.stats), strict=False):
        of_channel = channel == extreme
        ax.scatter(x[of_channel], y[of_channel], color=colour, s=4, lw=0, rasterized=True, zorder=2)


def draw_curves(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """Every fitted curve, and the bounds that no output of the norm passes."""
    grid = torch.from_numpy(axis.evenly(_CURVE_POINTS))
    for fit in panel.fits:
        if not fit.degenerate:
            colour, dashes = panel.looks[fit.curve]
            ax.plot(grid, fit(grid), color=colour, ls=dashes, lw=1.1, zorder=4, path_effects=outline(panel.style, 0.8))
    if math.isfinite(panel.site.bound):  # running statistics bound nothing
        for bound in (-panel.site.bound, panel.site.bound):
            ax.axhline(bound, color=panel.style.faint, lw=0.7, ls=":", zorder=1)


def draw_panel(ax: Axes, panel: Panel, row: str, *, beyond: bool = False, inset: bool = True) -> None:
    """Draw one row of the panels.

    Args:
        ax: where.
        panel: what.
        row: the row.
        beyond: write how many pairs lie beyond the axis.
        inset: enlarge the centre in an inset, where the axis goes far beyond it.
    """
    _draw_within(ax, panel, row, panel.axis, panel.scales.y)
    if row == RESIDUAL:
        return
    if len(middle := _middle(panel.moments)):
        look: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "solid_capstyle": "butt", "clip_on": False}
        ax.plot(np.clip(middle, *panel.axis.limits), [0, 0], color=panel.style.ink, lw=_RANGE_POINTS, zorder=5, **look)
    if beyond and (n := pairs_beyond(panel.moments, panel.axis.limits)):
        words = [f"{n:,} pair{'s' * (n > 1)} beyond", f"{n:,} pair{'s' * (n > 1)}\nbeyond"]
        look = {"ha": "right", "va": "bottom", "fontsize": LEAST_POINTS, "path_effects": outline(panel.style)}
        ax.text(0.99, 0.05, that_fits(words, 0.5 * panel.inches, LEAST_POINTS), transform=ax.transAxes, **look)
    if inset and panel.centre is not None:
        x_limits, y_limits = panel.centre
        _draw_within(_inset_of(ax, panel, x_limits), panel, row, XAxis(x_limits), y_limits)


_RANGE_POINTS = 2.0
RANGE = f"{MOST_PAIRS:.0%} of the pairs".replace("%", " %")


def _middle(moments: Tensor) -> list[float]:
    """Return the range of x that contains 99 % of the pairs."""
    n, x = moments[:2, moments[0] > 0].numpy()
    if not n.size:
        return []
    below = n.cumsum() / n.sum()
    outside = (1 - MOST_PAIRS) / 2
    return [float((x / n)[np.searchsorted(below, share)]) for share in (outside, 1 - outside)]


def _inset_of(ax: Axes, panel: Panel, x_limits: Limits) -> Axes:
    """Make axes for the enlarged centre in the corner that an S leaves empty, away from the panel's axes."""
    inset: Axes = ax.inset_axes(_INSET)
    inset.set_in_layout(False)  # its labels reach no farther than the panel's
    inset.yaxis.tick_right()
    inset.tick_params(labelsize=LEAST_POINTS, length=1.5, pad=1)
    for spine in inset.spines.values():
        spine.set(visible=True, linewidth=0.5, color=panel.style.faint)
    end = float(f"{0.7 * x_limits[1]:.0e}")
    inset.xaxis.set_major_locator(FixedLocator([-end, end] if len(number(end)) < _LONG else [end]))
    inset.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
    inset.yaxis.set_major_locator(MaxNLocator(2, steps=(1, 2, 5, 10), symmetric=True))
    for label in (*inset.get_xticklabels(), *inset.get_yticklabels()):
        label.set_path_effects([*outline(panel.style)])
    return inset


_LONG = 4  # letters of a tick, of which an inset has room for one


def _draw_within(ax: Axes, panel: Panel, row: str, axis: XAxis, y_limits: Limits) -> None:
    if axis == panel.axis:
        axis.set_on(ax, panel.inches)
    ax.set(xlim=axis.limits, ylim=y_limits)
    DRAW[row](ax, panel, axis)
    if row != RESIDUAL:
        draw_curves(ax, panel, axis)
        ax.set(xlim=axis.limits, ylim=y_limits)


def outline(style: Style, width: float = 1.2) -> list[withStroke]:
    """Return an outline that separates lines and letters from the background."""
    return [withStroke(linewidth=1.1 + width, foreground=style.background, alpha=0.7)]


_MOST_LISTED = 20


def legend_handles(panels: Sequence[Panel], rows: Sequence[str], sampled: bool) -> list[Artist]:
    """Return the legend of these rows of panels; ``sampled`` if their pairs are those of a sample of the tokens."""
    style = panels[0].style
    handles: list[Artist] = []
    if "density" in rows:
        grey = matplotlib.colormaps[style.density](0.6)
        handles.append(
            Patch(facecolor=grey, label=f"{'pairs of sampled tokens' if sampled else 'all pairs'} (log scale)")
        )
        handles.append(key("mean, E[y|x]", style.ink, lw=1.4))
    fits = [fit for panel in panels for fit in panel.fits]
    shifted = {fit.curve for fit in fits if not fit.degenerate and fit.shift}
    for curve, function in {fit.curve: fit.function for fit in fits}.items():
        argument = "αx+s" if curve in shifted else "αx"
        if curve == FREE:
            label = "free: E[y|x] in groups of bins"
        elif curve in CURVES:
            alias = "" if function.function_name == curve else f"{curve}: "
            label = f"{alias}A·{function.function_name}({argument})"
        else:
            label = f"{curve}: A·f({argument}), f(u) = {function.formula}"
        handles.append(key(label, *panels[0].looks[curve], lw=1.1))
    of_y = [row for row in rows if row != RESIDUAL]
    if of_y:
        handles.append(key(RANGE, style.ink, lw=_RANGE_POINTS))
    if of_y and any(panel.site.bound < panel.scales.y[1] for panel in panels):
        of_function = ", of point-wise functions ±1" if any(panel.site.pointwise for panel in panels) else ""
        handles.append(key(f"bound: ±√(d−1), without centring ±√d{of_function}", style.faint, ":"))
    if "channel" in rows:
        handles.append(key("other channels, evenly over x", style.faint, "", marker="o", ms=2.5, mew=0))
    folds = _folds(panels)
    if RESIDUAL in rows and folds:
        label = f"±{_BAND:g} standard errors of E[y|x], folds by {folds}"
        handles.append(Patch(facecolor=style.faint, alpha=_BAND_ALPHA, label=label))
    return handles


def _folds(panels: Sequence[Panel]) -> str:
    return ", ".join(sorted({str(panel.stats.fold_by) for panel in panels if panel.stats.fold_by}))


def facts(panels: Sequence[Panel], labels: str) -> str:
    """Return class, d and placement of the norms, and their numbers of pairs, as far as no panel names them."""
    if labels == FULL:
        return ""
    sites = [panel.site for panel in panels]
    kinds = " and ".join(dict.fromkeys(site.kind for site in sites))
    placements = " and ".join(dict.fromkeys(site.placement for site in sites if site.placement))
    pairs = f"{_range([panel.stats.n_pairs for panel in panels])} pairs a panel"
    return ", ".join(filter(None, (kinds, f"d = {_range([site.d for site in sites])}", placements, pairs)))


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(f"{n:,}" for n in dict.fromkeys((min(numbers), max(numbers))))


def remarks(panels: Sequence[Panel], fits: Sequence[CurveFit], labels: str = NO_LABELS) -> list[str]:
    """Return sentences below a legend: the meaning of the numbers above panels, and the curves that are not drawn."""
    lines = []
    if labels != NO_LABELS and (with_fits := [panel for panel in panels if panel.fits]):
        folds = _folds([panel for panel in with_fits if panel.fits[0].r2_cv is not None])
        lines.append(f"Above panels: R²{f' on held-out pairs, folds by {folds}' if folds else ''}")
        written = str([notes_of(panel, labels) for panel in with_fits])
        mark = "ceiling:" if "ceiling" in written else "after /: the ceiling," if "'/ " in written else ""
        lines[0] += f"; {mark} that of the best function of x" if mark else ""
        lines[0] += "; *: too low, as x repeats there, finer than bins resolve" if "*" in written else ""
    if sink := sink_sentence(fits):
        lines.append(sink)
    if others := best_of(fits)[1]:
        more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
        lines.append(f"Not drawn, of smaller mean R²: {', '.join(others[:_MOST_LISTED])}{more}")
    return lines


def r2_of(fit: CurveFit) -> str:
    """Return R² in three digits, on held-out pairs if there are any."""
    return f"{fit.r2 if fit.r2_cv is None else fit.r2_cv:.3f}"


def notes_of(panel: Panel, labels: str) -> list[Words]:
    """Return the lines above a panel: R² and ceiling in one line; or all about the site, and a line a curve."""
    ink, site, fits = panel.style.ink, panel.site, panel.fits
    module = broken(_module(panel), ink, panel.room)
    ceiling = fits[0].r2_ceiling if fits else None
    top = [] if ceiling is None else [f"ceiling {ceiling:.3f}{'*' if fits[0].x_repeats else ''}"]
    if labels != FULL:
        return [*module, *fits_in_line(panel, "R²", r2_of, top)] if labels == SHORT else []
    of_site = [f"{visible(site.kind)} d={site.d}", *([site.placement] if site.placement else [])]
    bounds = [f"|y| ≤ {site.bound:.3g}"] if panel.scales.y[1] < site.bound < math.inf else []  # beyond the panel
    path: Words = [(tail(f"{site.index}  {site.name}", panel.room, NOTE), ink)]
    lines = [path, *broken([*of_site, f"{panel.stats.n_pairs:,} pairs", *bounds], ink, panel.room), *module]
    for fit in fits:
        parts = [f"{fit.curve}: nothing to fit"] if fit.degenerate else [fit.curve, *_result(fit)]
        lines += broken(parts, panel.style.faint if fit.degenerate else panel.looks[fit.curve][0], panel.room)
    return [*lines, *broken(top, ink, panel.room)]


def _module(panel: Panel) -> list[str]:
    """A point-wise function with its own α and s, and the share of pairs that it saturates; nothing for a norm."""
    if (own := site_saturation(panel.site, panel.stats)) is None:
        return []
    shift = [f"s {own.shift.p50:.3g}"] if own.shift.p50 else []
    share = [] if own.saturated is None else [f"{100 * own.saturated:.2g} % saturated"]
    return [f"{own.curve}, α {own.alpha.p50:.3g}", *shift, *share]


def _result(fit: CurveFit) -> list[str]:
    shape = [f"A {fit.amplitude:.3g}", f"α {fit.alpha:.3g}", *([f"s {fit.shift:.3g}"] if fit.shift else [])]
    if fit.doubt == "straight":
        shape = [f"slope {fit.slope:.3g}, straight"]
    elif fit.unidentified:
        shape = ["A and α not identified"]
    held_out = [] if fit.r2_cv is None else [f"held out {fit.r2_cv:.3f}"]
    doubt = ["not converged"] if fit.doubt == "not converged" else []
    return [*([] if fit.curve == FREE else shape), f"R² {fit.r2:.3f}", *held_out, *doubt]


def fits_in_line(panel: Panel, lead: str, value: Callable[[CurveFit], str], after: Sequence[str] = ()) -> list[Words]:
    """Return one line of a number of every fit, in its colour; on a narrow panel with fewer words and no leading zeros.

    What makes fits doubtful follows, such as ``straight``.
    """
    ink, fits = panel.style.ink, [fit for fit in panel.fits if not fit.degenerate]
    if not fits:
        return [[("nothing to fit", panel.style.faint)]] if panel.fits else []
    colours = [panel.looks[fit.curve][0] for fit in fits]
    doubts = [(doubt, ink) for doubt in dict.fromkeys(fit.doubt for fit in fits) if doubt]
    named = [(f"{fit.curve} {value(fit)}", colour) for fit, colour in zip(fits, colours, strict=True)]
    bare = [(value(fit), colour) for fit, colour in zip(fits, colours, strict=True)]
    begin, end = [(lead, ink)], [(text, ink) for text in after]
    slash = [(text.replace("ceiling", "/"), ink) for text in after]
    some: list[Words] = [[*named, *doubts, *end], [*bare, *doubts, *end], [*bare, *doubts, *slash]] if after else []
    some = [[(re.sub(r"\b0\.", ".", text), colour) for text, colour in line] for line in some]
    lines: list[Words] = [[*begin, *named, *doubts, *end], *some]
    lines += [[*first, *values, *doubts] for values in (named, bare) for first in (begin, [])]
    return [next((line for line in lines if words_inches(line) <= panel.room), bare)]


def write_heading(ax: Axes, panel: Panel, labels: str, notes: Sequence[Words], least: int) -> None:
    """Write a site's short name above a panel, and notes below it; neighbours have ``least`` lines or fewer."""
    pad = write_above(ax, notes, least)
    if labels != NO_LABELS:
        name = tail(panel.name, panel.room, _HEAD)
        ax.set_title(name, parse_math=False, loc="left", y=1, pad=pad, fontproperties=_HEAD)


_HEAD = FontProperties(size=7)
HEAD_INCHES = 0.13


_GROUPS = 120  # across a panel at most
_LEAST_COUNT = 128  # pairs that a group holds at least
_BAND = 2.0  # standard errors
_MARGIN = 1.08
_BAND_ALPHA = 0.35


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


def residuals(
    moments: Tensor,
    fits: Sequence[CurveFit],
    width: float,
    least_count: int = _LEAST_COUNT,
    along: Callable[[Array], Array] = lambda x: x,
) -> Residuals:
    """Return mean residuals of the curves in groups of bins, and the standard error of E[y|x] from the folds.

    Folds are independent, pairs are not. With the folds' shares w of a group's pairs and their means m of y, the
    standard error is √(Σw² · Σw(m − Σwm)² / (1 − Σw²)), which is sd / √folds for folds of equal size.

    Args:
        moments: n, Σx, Σy, … per fold and bin of x: float64 ``(folds, 6, bins)``.
        fits: of this site, none degenerate.
        width: of a group along x at most, unless it would contain too few pairs.
        least_count: least number of pairs of a group.
        along: position of x on an axis, in units of the width.

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
    starts = _starts(n.sum(0), along(x), width, least_count)
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


def draw_residuals(ax: Axes, panel: Panel, axis: XAxis) -> None:
    """E[y|x] − A·f(αx + s) of every fitted curve over ± 2 standard errors."""
    fits = [fit for fit in panel.fits if not fit.degenerate]
    low, high = axis.along(np.array(axis.limits))
    groups = residuals(panel.stats.moments, fits, (high - low) / _GROUPS, along=axis.along)
    band = _BAND * groups.error
    inside = (groups.x >= axis.limits[0]) & (groups.x <= axis.limits[1])
    reach = _MARGIN * float(np.nanmax(np.abs(np.array([*groups.off, *([] if fits else [band])])[:, inside]), initial=0))
    reach = reach if reach > 0 else 1.0
    ax.set(xlim=axis.limits, ylim=(-reach, reach))
    look: dict[str, Any] = {"lw": 1.0, "zorder": 4, "path_effects": outline(panel.style, 0.6)}
    band_look: dict[str, Any] = {"color": panel.style.faint, "alpha": _BAND_ALPHA, "lw": 0, "zorder": 1}
    ax.fill_between(groups.x, -band, band, **band_look)
    ax.axhline(0, color=panel.style.ink, lw=0.6, zorder=2)
    for fit, off in zip(fits, groups.off, strict=True):
        colour, dashes = panel.looks[fit.curve]
        ax.plot(groups.x, off, color=colour, ls=dashes, **look)


RESIDUAL = "residual"
DRAW: dict[str, Callable[[Axes, Panel, XAxis], None]] = {
    "density": draw_density,
    "token": draw_tokens,
    "channel": draw_channels,
    RESIDUAL: draw_residuals,
}
