"""Drift of swaps: by site, by number of sites, by part of the data, and with some norms kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normscope.curves.known import BY_NAME
from normscope.errors import UsageError, count
from normscope.norms.sites import NormSite
from normscope.show.figures.fit_numbers import MARKERS
from normscope.show.figures.sheet import (
    PANELS_INCHES,
    draw_guides,
    inches_of,
    key,
    scale_where_wide,
    sheet_of,
    site_labels,
)
from normscope.show.figures.style import FigureOptions, Style, theme_of
from normscope.show.figures.text import NOTE, literal, name_sites, names_inches, width_of
from normscope.swaps.drift.reports import DriftReport, KeepReport
from normscope.swaps.inits import INITS, published_name
from normscope.swaps.reports import Drift, Quantiles

_WIDTH, _WIDEST = 6.6, 24.0
_SITE_INCHES, _PANEL_INCHES = 0.2, 1.3
_EDGE_INCHES = 0.5  # of a panel's width, that its ticks take
_LEAST_ABREAST = 2.5
_KEEP_INCHES = (6.4, 2.6)
_BARS, _QUALITY_BARS = "Bars: 10th to 90th percentile over inputs", "; of the quality, 95% interval"
_ASIDE = 0.06  # of a number of norms: so that bars at the same one do not cover one another
_DODGE = 0.62  # of the distance of two sites, over which the swaps are spread
_DODGE_OF_NUMBERS = 0.06  # of the distance of two ticks that are numbers, on which the points have to stand
_KEYS = {"by_site": "site", "at_sites": "at", "cumulative": "sites_swapped", "by_part": "part"}  # x of a row, by panel
_TITLES = {
    "by_site": "each site swapped alone, {}",
    "at_sites": "each site's own output, all sites swapped",
    "cumulative": "one site more at a time, {}",
}


_Series = tuple[str, list[tuple[float, Quantiles | float]], dict[str, Any]]  # label, points and look


@dataclass(frozen=True)
class _DriftLine:
    """One swap in every panel."""

    report: DriftReport
    label: str
    colour: Any
    marker: str
    dashes: Any
    offset: float


def plot_drift(
    reports: Sequence[DriftReport], sites: Sequence[NormSite] = (), **options: Unpack[FigureOptions]
) -> Figure:
    """Draw how far a network's output moves: medians over inputs, and from the 10th to the 90th percentile.

    Panels without measurements are left out. The dotted line, a relative L2 of 1, is the distance of zeros from the
    original; a cross is a value that is not finite.

    Args:
        reports: of one network; a marker each, a colour a function, dashes an init.
        sites: its norm sites, in their order.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if there is no report, if they are of several networks or inputs, or if an option is not valid.
    """
    if not reports:
        raise UsageError("There is no drift to draw; measure some first.")
    if len({tuple(map(report.about.get, ("model", "weights", "data"))) for report in reports}) > 1:
        raise UsageError("The drifts are of several networks or inputs; a figure takes those of one.")
    theme, swapped = theme_of(options), dict.fromkeys(path for report in reports for path in report.sites)
    lines = _lines(reports, theme)
    paths = list(dict.fromkeys([*(site.name for site in sites if site.name in swapped), *swapped]))
    inches = inches_of(options.get("width"), min(max(_WIDTH, 0.8 + _SITE_INCHES * len(paths)), _WIDEST))
    rows, wide = _rows_of_panels(reports, inches)
    names = list(site_labels(paths, options).values())
    height = min((_PANEL_INCHES + 0.35) * len(rows) + (names_inches(names) if wide else 0.0), PANELS_INCHES)
    parts: dict[str, Any] = {"handles": _handles(lines, theme)}
    parts["detail"] = count(max(report.all.inputs for report in reports), "input")
    with sheet_of(options, theme, inches, height, reports[0].about, **parts) as figure:
        for panel, ax in figure.subplot_mosaic(rows).items():
            _draw_panel(ax, lines, panel, paths, theme)
            if panel in wide:
                name_sites(ax, names if panel == wide[-1] else [], inches - _EDGE_INCHES)
                ax.set_xlim(-0.5, len(paths) - 0.5)
        figure.align_ylabels()
    return figure


def _rows_of_panels(reports: Sequence[DriftReport], inches: float) -> tuple[list[Any], list[str]]:
    """Return the panels of what was measured, as a mosaic, and those as wide as the figure."""
    panels = [panel for panel in _KEYS if any(getattr(report, panel) for report in reports)]
    wide: list[str] = [panel for panel in ("by_site", "at_sites") if panel in panels]
    narrow = [panel for panel in ("cumulative", "by_part") if panel in panels]
    abreast = max(1, len(narrow)) if inches >= _LEAST_ABREAST * len(narrow) else 1
    rows: list[Any] = [narrow[n : n + abreast] for n in range(0, len(narrow), abreast)]
    return [*([panel] * abreast for panel in wide), *rows], wide


def _lines(reports: Sequence[DriftReport], theme: Style) -> list[_DriftLine]:
    colours, lines = colours_of([report.func for report in reports], theme), []
    for number, report in enumerate(reports):
        init = INITS.get(report.init, INITS["fit"])
        offset = _DODGE * ((number + 0.5) / len(reports) - 0.5)
        label = " · ".join(text for text in (published_name(report.func), report.start_in_words) if text)
        marker = MARKERS[number % len(MARKERS)]
        lines.append(_DriftLine(report, label, colours[report.func], marker, init.dashes, offset))
    return lines


def colours_of(funcs: Sequence[str], theme: Style) -> dict[str, str]:
    """Return the colour of each swap: of its built-in curve, or one of its own; a norm's is grey."""
    curves = {func: BY_NAME[func.lower()].name if func.lower() in BY_NAME else func for func in funcs}
    looks = theme.looks(curve for curve in curves.values() if curve != "rmsnorm")
    return {func: looks.get(curve, (theme.faint,))[0] for func, curve in curves.items()}


def _handles(lines: Sequence[_DriftLine], theme: Style) -> list[Artist]:
    faint = theme.faint
    handles: list[Artist] = [key(line.label, line.colour, line.dashes, marker=line.marker, ms=3) for line in lines]
    handles.append(key("10th to 90th percentile", faint, "", marker="|", ms=6))
    if any(1.5 * row.relative_l2.p90 > 1 for line in lines for row in line.report.rows):
        handles.append(key("zeros in place of the output", faint, ":"))
    if any(math.isinf(row.relative_l2.p90) for line in lines for row in line.report.rows):
        handles.append(key("not finite", theme.ink, "", marker="X", ms=4))
    return handles


def _draw_panel(ax: Axes, lines: Sequence[_DriftLine], panel: str, paths: Sequence[str], theme: Style) -> None:
    """A dot and a bar for each row of each swap, the axes and the title of the panel."""
    parts = list(dict.fromkeys(row.part for line in lines for row in line.report.by_part))
    places = {name: x for x, name in enumerate(parts if panel == "by_part" else paths)}
    for line in lines:
        rows = [(getattr(row, _KEYS[panel]), row) for row in getattr(line.report, panel)]
        _draw_dots(ax, line, [(places.get(x, x), row) for x, row in rows], joined=panel in ("cumulative", "by_part"))
    title = _TITLES.get(panel, "").format(
        count(max(row.inputs for line in lines for row in getattr(line.report, panel)), "input")
    )
    if panel == "cumulative":
        ax.set_xlabel("number of sites swapped, the least harmful first")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    elif panel == "by_part":
        words = {name.rpartition(" ")[0] for name in parts}
        shared = literal(words.pop()) if len(words) == 1 else ""
        every = max(1, math.ceil(len(parts) / 12))
        names = [literal(name).removeprefix(f"{shared} ") for name in parts[::every]]
        ax.set_xticks(range(0, len(parts), every), names)
        ax.set_xlabel(shared or "part of the data")
        title = f"the output by {shared or 'part of the data'}, all sites swapped"
    ax.set_title(title, loc="left")
    high = ax.dataLim.y1
    ax.set_ylabel("relative L2")
    if not scale_where_wide(ax):
        ax.set_ylim(0, None if 0 < high < math.inf else 1.1)
    bottom, top = ax.get_ylim()
    if bottom < 1 < 1.5 * top:
        ax.axhline(1, color=theme.faint, ls=":", lw=0.9, zorder=0)
    draw_guides(ax, theme)


def _draw_dots(ax: Axes, line: _DriftLine, rows: Sequence[tuple[int, Drift]], *, joined: bool) -> None:
    """Draw medians and bars, set aside so that one swap does not hide another."""
    offset = line.offset * (_DODGE_OF_NUMBERS if joined else 1)
    points = [(x + offset, row.relative_l2) for x, row in rows]
    finite = [(x, quantiles) for x, quantiles in points if math.isfinite(quantiles.p50)]
    medians = [quantiles.p50 for _, quantiles in finite]
    dashes = line.dashes if joined else ""
    ax.plot([x for x, _ in finite], medians, marker=line.marker, ms=2.3, mew=0, color=line.colour, ls=dashes, lw=0.7)
    _draw_bars(ax, [(x, quantiles) for x, quantiles in finite if math.isfinite(quantiles.p90)], line.colour, alpha=0.8)
    if x := [x for x, quantiles in points if math.isinf(quantiles.p90)]:  # crosses at the upper edge
        look: dict[str, Any] = {"marker": "X", "ms": 3.6, "mew": 0, "color": line.colour, "zorder": 5, "ls": ""}
        ax.plot(x, [1.0] * len(x), transform=ax.get_xaxis_transform(), in_layout=False, clip_on=False, **look)


def _draw_bars(ax: Axes, points: Sequence[tuple[float, Quantiles]], colour: Any, alpha: float | None = None) -> None:
    """Draw a bar from the 10th to the 90th percentile at each x."""
    low, high = [quantiles.p10 for _, quantiles in points], [quantiles.p90 for _, quantiles in points]
    ax.vlines([x for x, _ in points], low, high, color=colour, lw=0.7, alpha=alpha)


def with_unit(measure: str) -> str:
    return f"{measure} [nats]" if measure.startswith("KL") else measure


def plot_keep(report: KeepReport, **options: Unpack[FigureOptions]) -> Figure:
    """Draw the drift, and beside it the quality, against the number of norms that are kept.

    Medians with bars from the 10th to the 90th percentile over inputs; of the quality, 95% intervals. An open square
    is the calibrated swap on held-out inputs; crosses are medians after ``after`` on the inputs that decide there. Each
    tick names the norm kept in addition.

    Args:
        report: what :func:`normscope.keep` returned.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if an option is not valid.
    """
    theme, quality = theme_of(options), report.quality
    series = _keep_series(report, theme)
    handles: list[Artist] = [key(label, **look) for label, points, look in series if points]
    handles += [key("original", theme.ink, ":")] if quality else []
    inches = inches_of(options.get("width"), _KEEP_INCHES[0])
    columns = 2 if quality and inches >= 2 * _LEAST_ABREAST else 1
    rows = 2 if quality and columns == 1 else 1
    labels = site_labels(report.sites, options)
    last = max([len(report.kept), *(step.kept for step in report.steps if step.worked_on is not None)])
    names = [labels[step.site] if step.site else "none" for step in report.steps[: last + 1]]
    every = math.ceil(len(names) * max(map(width_of, names)) / (inches / columns - 2 * _EDGE_INCHES))
    ticks = ["" if kept % every else f"{kept}\n{literal(name)}" for kept, name in enumerate(names)]
    height, foot = (_KEEP_INCHES[1] + 0.15) * rows, [_BARS + _QUALITY_BARS * bool(quality)]
    with sheet_of(options, theme, inches, height, report.about, foot=foot, handles=handles) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).flat
        _draw_kept_drift(axes[0], report, series)
        if quality:
            _draw_kept_quality(axes[1], report, series[1][2], theme)
        for ax in axes:
            ax.set_xlabel(f"norms kept, of {len(report.sites)}")
            ax.set_xticks(range(len(ticks)), ticks, fontproperties=NOTE)
            ax.margins(x=0.06)
            draw_guides(ax, theme)
    return figure


def _keep_series(report: KeepReport, theme: Style) -> list[_Series]:
    """Return label, points and look of the inputs of the choice, of held-out ones, and of calibrated swaps."""
    dots: dict[str, Any] = {"ms": 3, "lw": 0.9}
    held_out: dict[str, Any] = {"color": theme.channels[1], "marker": "s", "ls": "-", **dots}
    n_held_out = next((step.held_out.n for step in report.taken if step.held_out is not None), 0)
    calibrated = [(len(report.kept) + 2 * _ASIDE, report.calibrated)] if report.calibrated else []
    tried = [step for step in report.steps if not calibrated or step.kept != len(report.kept)]
    return [
        (
            f"uncalibrated, {count(report.n_chosen_on, 'input')} used to choose",
            [(step.kept - _ASIDE, step.error) for step in report.taken],
            {"color": theme.channels[0], "marker": "o", "ls": (0, (3, 1.5)), **dots},
        ),
        (
            f"uncalibrated, {n_held_out} held-out inputs",
            [(step.kept + _ASIDE, step.held_out) for step in report.taken if step.held_out is not None],
            held_out,
        ),
        (
            "calibrated, validation inputs",
            [(step.kept, step.worked_on) for step in tried if step.worked_on is not None],
            {"color": theme.ink, "marker": "X", "ls": "", "ms": 4.5, "mew": 0, "zorder": 4},
        ),
        ("calibrated, held-out inputs", [*calibrated], {**held_out, "mfc": theme.background, "ms": 4}),
    ]


def _draw_kept_drift(ax: Axes, report: KeepReport, series: list[_Series]) -> None:
    for _, points, look in series:
        medians = [value.p50 if isinstance(value, Quantiles) else value for _, value in points]
        ax.plot([x for x, _ in points], medians, **look)
        _draw_bars(ax, [(x, value) for x, value in points if isinstance(value, Quantiles)], look["color"])
    ax.set_ylabel(with_unit(report.measure))
    if not scale_where_wide(ax):
        ax.set_ylim(0, None)


def _draw_kept_quality(ax: Axes, report: KeepReport, look: dict[str, Any], theme: Style) -> None:
    assert report.quality is not None  # noqa: S101 - for mypy
    scores = {step.kept: report.quality.scores[f"{step.kept} kept"] for step in report.taken}
    ax.plot(list(scores), [score.value for score in scores.values()], **look)
    for kept, score in scores.items():
        ax.plot([kept] * 2, score.interval or [score.value] * 2, color=look["color"], lw=0.7)
    ax.axhline(report.quality.scores["original"].value, color=theme.ink, ls=":", lw=0.9)
    ax.set_ylabel(literal(report.quality.name))
