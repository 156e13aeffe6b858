"""A training run: its numbers by step and depth, and the S-curves of a few sites over its steps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator
from numpy.typing import NDArray

from normscope.curves.known import BY_NAME
from normscope.errors import DataError, count
from normscope.pairs.storage import load_capture
from normscope.pairs.sums.stats import PairStats
from normscope.show.figures.axes import XAxis, mean_line
from normscope.show.figures.sheet import (
    MANY_TIMES,
    PANELS_INCHES,
    columns_of,
    draw_guides,
    inches_of,
    key,
    scale_where_wide,
    sheet_of,
    site_labels,
)
from normscope.show.figures.style import FigureOptions, Style, shades, theme_of
from normscope.show.figures.text import NOTE, literal, tail, write_above
from normscope.show.tables.table import number as written
from normscope.tools.probe.timeline import Timeline

Array = NDArray[np.float64]
_FEW = 4  # sites that are lines; more are the rows of a map
_TICKS, _MARKED = 5, 24  # probes at most that have ticks, and markers
_COLUMNS, _PANEL_INCHES, _LEAST_PANEL, _HEIGHT = 3, 2.6, 1.4, 1.45
_PIXELS = 600  # of a map's width
_NAME_INCHES, _LINE_INCHES = 0.75, 0.1  # of a site's name beside a map
_STEPS, _POINTS = 10, 200  # curves in a panel at most, and points of each
_SCURVE_INCHES, _LEAST_SCURVE = 1.7, 1.15
_DASHED = (0, (4, 2))
_SHARES = {f"beyond_{end}": f"|αx + s| > {end}" for end in (1, 2, 3)}
_SATURATED, _RANGE = "saturated pairs [%]", "Saturated pairs: median over the sites, and their range"
_ABOVE = "Above panels: R² of the fitted {}, or a function's α, at the first and the last step"
_SITES = {"spread": "σ: 95th/5th percentile", "offset": "median |μ|/σ", "largest": "largest |x|"}


def plot_timeline(timeline: Timeline, **options: Unpack[FigureOptions]) -> Figure:
    """Draw a training run by step and depth.

    Maps have a row per site, in the order of calls; up to four sites are lines instead. Norms have R² and α of each
    curve, the spread of σ, the median |μ|/σ and the largest |x|. Point-wise functions have α beside 1/std(x), as in
    figure 8 of arXiv 2503.10622, α·std(x), and the shares of saturated pairs: medians over the sites, and their range.

    Args:
        timeline: what :func:`normscope.load_timeline` returned.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        DataError: if the timeline contains no number.
        UsageError: if an option is not valid.
    """
    theme = theme_of(options)
    panels, handles = _panels(timeline, theme, options)
    if not panels:
        raise DataError("No site of the timeline has a finite number, so that there is nothing to draw.")
    columns = columns_of(options, len(panels), _LEAST_PANEL, _COLUMNS)
    rows = math.ceil(len(panels) / columns)
    inches = inches_of(options.get("width"), 0.3 + _PANEL_INCHES * columns)
    parts: dict[str, Any] = {"detail": _steps(timeline), "handles": handles, "foot": [_RANGE] * (_SATURATED in panels)}
    height = min((_HEIGHT + 0.25) * rows, PANELS_INCHES)
    with sheet_of(options, theme, inches, height, timeline.about, **parts) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for number, (ax, (title, draw_panel)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
            draw_panel(ax)
            _label(ax, title, timeline.steps, theme)
            if number + columns >= len(panels):
                ax.set_xlabel("step", labelpad=1)
            if ax.images and number % columns and axes.flat[number - 1].images:
                ax.tick_params(labelleft=False)
        for ax, first in itertools.product(axes.flat, [ax for ax in axes.flat if ax.images][:1]):
            ax.set_xlim(first.get_xlim())  # lines beside maps
    return figure


def _steps(timeline: Timeline) -> str:
    ends = " to ".join(f"{step:,}" for step in timeline.steps[timeline.ends])
    probes = f"{count(len(timeline.steps), 'record')}, " if len(timeline.steps) > 1 else ""
    site = f"{timeline.sites[0].name} · " if len(timeline.sites) == 1 else ""
    return f"{site}{probes}step {ends}"


def _panels(
    timeline: Timeline, theme: Style, options: FigureOptions
) -> tuple[dict[str, Callable[[Axes], object]], list[Artist]]:
    """Return functions that draw the panels, by title, and the entries of the legend."""
    functions = [site.name for site in timeline.sites if site.curve]
    few = timeline if len(timeline.sites) <= _FEW else timeline.only(functions or "all").only(None)
    colours = shades(theme)(np.linspace(0, 1, len(few.sites)))
    names, numbers = site_labels([site.name for site in timeline.sites], options), _numbers(timeline)
    handles: list[Artist] = []
    panels: dict[str, Callable[[Axes], object]] = {}
    for title, values in numbers.items():
        alike = [array for name, array in numbers.items() if name.split(" of ")[0] == title.split(" of ")[0]]
        draw = functools.partial(_draw_map, alike=np.array(alike), names=[*names.values()], style=theme)
        if few is timeline:
            draw = functools.partial(_draw_lines, colours=colours)
        panels[title] = functools.partial(draw, steps=timeline.steps, values=values)
    if np.isfinite(timeline.losses).any():
        panels["loss"] = lambda ax: _draw_lines(ax, timeline.steps, timeline.losses[:, None], [theme.ink])
    if len(few.sites) > 1 and (few is timeline or functions):
        handles += [key(names[site.name], colour) for site, colour in zip(few.sites, colours, strict=True)]
    if functions:
        both = np.hstack([few.values("module_alpha"), few.values("inverse_std")])
        looks: dict[str, Any] = {"colours": [*colours] * 2, "dashes": ["-"] * len(colours) + [_DASHED] * len(colours)}
        panels["α and 1/std(x)"] = functools.partial(_draw_lines, steps=few.steps, values=both, **looks)
        panels[_SATURATED] = functools.partial(_draw_shares, timeline=timeline, theme=theme)
        handles += [key("α", theme.ink), key("1/std(x)", theme.ink, _DASHED)]
        handles += [key(label, colour) for label, colour in zip(_SHARES.values(), theme.channels, strict=False)]
    return panels, handles


def _numbers(timeline: Timeline) -> dict[str, Array]:
    """Return the numbers of all sites that have any, ``(records, sites)``, by the titles of their panels."""
    norms = np.array([site.curve is None for site in timeline.sites])
    fitted = {
        f"{title} of {curve}": np.where(norms, timeline.values(f"{metric}/{curve}"), np.nan)
        for title, metric in (("R²", "r2"), ("α", "alpha"))
        for curve in timeline.curves
    }
    alpha = timeline.values("module_alpha")
    functions = {"α": alpha, "α·std(x)": alpha / timeline.values("inverse_std")}
    sites = {title: timeline.values(metric) for metric, title in _SITES.items()}
    return {title: v for title, v in (fitted | functions | sites).items() if np.isfinite(v).any()}


def _draw_lines(
    ax: Axes, steps: NDArray[np.int64], values: Array, colours: Iterable[Any], dashes: Iterable[Any] = ("-",)
) -> None:
    """Draw a line per column of values, with a marker at each probe if they are not many."""
    marker = "o" if len(values) <= _MARKED else ""
    for column, colour, ls in zip(values.T, colours, itertools.cycle(dashes), strict=False):
        ax.plot(steps, column, color=colour, ls=ls, lw=1.0, marker=marker, ms=2.2)


def _label(ax: Axes, title: str, steps: NDArray[np.int64], theme: Style) -> None:
    """Write the title, and ticks: at the probed steps if they are few and far apart, and otherwise at round ones."""
    if not ax.images:
        draw_guides(ax, theme)
    logarithmic = isinstance(ax.images[0].norm, LogNorm) if ax.images else title != _SATURATED and scale_where_wide(ax)
    title += ", log" * logarithmic
    ax.set_title(title, loc="left", parse_math=False)
    apart = len(steps) <= _TICKS and all(np.diff(steps) * _TICKS >= steps[-1] - steps[0])
    ax.xaxis.set_major_locator(FixedLocator(steps.tolist()) if apart else MaxNLocator(_TICKS - 1, integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")


def _draw_shares(ax: Axes, timeline: Timeline, theme: Style) -> None:
    for share, colour in zip(_SHARES, theme.channels, strict=False):
        percent = 100 * timeline.values(share)
        present = np.isfinite(percent).any(axis=1)
        low, median, high = np.nanquantile(percent[present], (0, 0.5, 1), axis=1)
        ax.fill_between(timeline.steps[present], low, high, color=colour, alpha=0.15, lw=0)
        _draw_lines(ax, timeline.steps[present], median[:, None], [colour])


def _draw_map(ax: Axes, steps: NDArray[np.int64], values: Array, alike: Array, names: list[str], style: Style) -> None:
    """Draw a row per site, in the colours of all values ``alike``; each pixel is the record nearest to its step."""
    first, last = steps[[0, -1]] + ((-0.5, 0.5) if len(values) == 1 else (0, 0))
    at = np.linspace(first, last, _PIXELS)
    nearest = np.abs(steps - at[:, None]).argmin(axis=1)
    finite = alike[np.isfinite(alike)]
    low, high = finite.min(), finite.max()
    wide = 0 < MANY_TIMES * low < high
    norm = LogNorm(low, high) if wide else Normalize(low, high)
    look: dict[str, Any] = {"origin": "upper", "aspect": "auto", "interpolation": "nearest", "cmap": style.tokens}
    extent = (first, last, len(names) - 0.5, -0.5)
    drawn = ax.imshow(np.ma.masked_invalid(values[nearest].T), extent=extent, norm=norm, **look)
    ticks = LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(4)
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02, aspect=30, fraction=0.06, ticks=ticks, format="{x:g}")
    bar.minorticks_off()
    every = max(1, math.ceil(len(names) * _LINE_INCHES / _HEIGHT))
    ax.set_yticks(range(0, len(names), every), [literal(tail(name, _NAME_INCHES, NOTE)) for name in names[::every]])


def plot_scurves_by_step(timeline: Timeline, **options: Unpack[FigureOptions]) -> Figure:
    """Draw the S-curves of up to four sites, evenly over the depth, from dark at the first step to light at the last.

    A curve is E[y|x] if the probe kept captures, and otherwise the first fitted curve, between percentiles 0.5 and 99.5
    of x at that step; the straight line where the pairs do not bend. Ten steps are drawn, evenly over the records.

    Args:
        timeline: what :func:`normscope.load_timeline` returned; :meth:`Timeline.only` chooses other sites.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if an option is not valid.
    """
    theme, shown = theme_of(options), timeline.only(None)
    records = np.linspace(0, len(shown.steps) - 1, min(_STEPS, len(shown.steps))).round().astype(int).tolist()
    names = site_labels([site.name for site in timeline.sites], options)
    columns = columns_of(options, len(shown.sites), _LEAST_SCURVE, _FEW)
    rows, colours, norm = math.ceil(len(shown.sites) / columns), shades(theme), Normalize(*shown.steps[[0, -1]])
    inches = inches_of(options.get("width"), 0.6 + _SCURVE_INCHES * columns)
    drawn = "E[y|x]" if any(map(shown.capture_of, records)) else "Fits, dashed where they do not bend"
    foot = [f"{drawn}, over 99% of the pairs of each step", _ABOVE.format(timeline.curves[0])]
    with sheet_of(options, theme, inches, 1.6 * rows, timeline.about, detail=_steps(timeline), foot=foot) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for record in records:
            path = shown.capture_of(record)
            stats = load_capture(path).stats if path else {}
            for number, (ax, site) in enumerate(zip(axes.flat, shown.sites, strict=False)):
                x, y, dashes = _scurve(shown, record, number, stats.get(site.name), inches / columns)
                ax.plot(x, y, color=colours(norm(shown.steps[record])), ls=dashes, lw=1.1)
        for number, ax in enumerate(axes.flat):
            ax.set_visible(number < len(shown.sites))
            if ax.get_visible():
                _write_heading(ax, shown, number, names, theme)
                ax.set_ylabel("" if number % columns else "output y", labelpad=1)
        if len(records) > 1:
            look: dict[str, Any] = {"ticks": MaxNLocator(5), "format": "{x:,.0f}", "label": "step"}
            figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.02, aspect=20 * rows, **look)
    return figure


def _write_heading(ax: Axes, timeline: Timeline, number: int, names: Mapping[str, str], theme: Style) -> None:
    """Write a site's name, and its R² or α at the first and the last step."""
    site = timeline.sites[number]
    name, metric = ("α", "module_alpha") if site.curve else ("R²", f"r2/{timeline.curves[0]}")
    ends = [written(value, ".3f") for value in timeline.values(metric)[[0, -1], number]]
    pad = write_above(ax, [[(f"{name} {' → '.join(dict.fromkeys(ends))}", theme.ink)]])
    ax.set_title(names[site.name], loc="left", y=1, pad=pad, parse_math=False)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.set_xlabel("norm input x", labelpad=1)


def _scurve(
    timeline: Timeline, record: int, number: int, stats: PairStats | None, inches: float
) -> tuple[Array, Array, Any]:
    """Return x, y and dashes of a site's S-curve at one step; empty where neither pairs nor a fit are known."""
    curve = timeline.sites[number].curve
    curve = curve if curve in timeline.curves else timeline.curves[0]
    metrics = ("low", "high", *(f"{name}/{curve}" for name in ("amplitude", "alpha", "shift", "slope", "at_zero")))
    low, high, amplitude, alpha, shift, slope, at_zero = (timeline.values(name)[record, number] for name in metrics)
    if not low < high:
        return np.empty(0), np.empty(0), "-"
    if stats is not None:
        return *mean_line(stats.moments.sum(0), XAxis((low, high)), inches), "-"
    x = np.linspace(low, high, _POINTS)
    if math.isnan(alpha) or curve not in BY_NAME:
        return x, at_zero + slope * x, _DASHED
    return x, amplitude * BY_NAME[curve].function(torch.from_numpy(alpha * x + shift)).numpy(), "-"
