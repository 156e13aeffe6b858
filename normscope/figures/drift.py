"""Drift of swaps: by site, by number of sites, with some norms kept, and before and after healing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from normscope.errors import UsageError, count
from normscope.figures.style import (
    LEAST_POINTS,
    Style,
    draw_guides,
    inches_of,
    key,
    literal,
    scale_where_wide,
    sheet,
    style_named,
    tail,
    width_of,
    write_at,
)
from normscope.fits.curves.expressions import curves_named
from normscope.fits.curves.known import CURVES
from normscope.pairs.norms.sites import NormSite
from normscope.swaps.inits import INITS
from normscope.swaps.reports import (
    CALIBRATED,
    START,
    TRAINED,
    Drift,
    DriftReport,
    HealReport,
    KeepReport,
    KeepStep,
    Quality,
    Quantiles,
    TrainingCheck,
)

_WIDTH, _WIDEST = 6.6, 24.0
_SITE_INCHES, _PANEL_INCHES = 0.2, 1.5
_NAME_INCHES, _UPRIGHT_INCHES = 1.45, 0.1  # of a site, which stands upright
_EDGE_INCHES = 0.5  # of a panel's width, that its ticks take
_LEAST_ABREAST = 2.5
_KEEP_INCHES = (6.4, 2.6)
_ASIDE = 0.06  # of a number of norms: so that bars at the same one do not cover one another
_DODGE = 0.62  # of the distance of two sites, over which the swaps are spread
_TINY = FontProperties(size=LEAST_POINTS)
_PLACEMENTS = {"pre-norm": "^", "post-norm": "v", "qk": "d", "final": "s", None: "x"}
_OUTSIDE: dict[str, Any] = {"ls": "", "clip_on": False, "in_layout": False}
_SITES = {  # by field of a report: a row's site, title of the panel, and its distance, with room for the placements
    "by_site": ("site", "the network's output, each site swapped alone", 13),
    "at_sites": ("at", "each site's own output, all sites swapped", None),
}


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
    reports: Sequence[DriftReport],
    sites: Sequence[NormSite] = (),
    *,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw how far a network's output moves: medians over inputs, and from the 10th to the 90th percentile.

    Above, the output with each site swapped alone, and each site's own output with all swapped; below, the output
    against the number of sites swapped, the least harmful first, and by part of the data. Several swaps have one panel
    more: ratios of their medians to the first swap's. The dotted line, a relative L2 of 1, is the distance of zero from
    the original. Panels without measurements are left out; a cross at the upper edge is a value that is not finite.

    Args:
        reports: of one network; a colour a function, a marker and dashes an init.
        sites: its norm sites: their order, and their placements as signs above the panels.
        width: of the figure, in inches; where not every site's name has room, every second, third … is named.
        title: above all panels, as of :func:`normscope.plot`.
        style: ``light`` or ``dark``.

    Raises:
        UsageError: if there is no report, if they are of several networks or inputs, or if there is no such style.
    """
    theme = style_named(style)
    if not reports:
        raise UsageError("There is no drift to draw; measure some first.")
    if len({tuple(map(report.about.get, ("model", "weights", "data"))) for report in reports}) > 1:
        raise UsageError("The drifts are of several networks or inputs; a figure takes those of one.")
    lines = _lines(reports, theme)
    paths = _paths(reports, sites)
    inches = inches_of(width, min(max(_WIDTH, 0.8 + _SITE_INCHES * len(paths)), _WIDEST))
    wide, narrow = (
        [rows for rows in kinds if any(getattr(report, rows) for report in reports)]
        for kinds in (_SITES, ("cumulative", "by_part"))
    )
    abreast = len(narrow) if inches >= _LEAST_ABREAST * len(narrow) else 1
    names = [tail(path, _NAME_INCHES, _TINY) for path in paths]
    foot = max(width_of(name, _TINY) for name in names) if wide else 0.0
    ratios = len(reports) > 1 and "by_site" in wide
    rows = len(wide) + math.ceil(len(narrow) / max(1, abreast)) + ratios
    inputs = count(max(report.all.inputs for report in reports), "input")
    height, handles = (_PANEL_INCHES + 0.35) * rows + foot, _handles(lines, sites, paths, theme)
    with sheet(theme, inches, height, title, reports[0].about, inputs, handles=handles) as figure:
        grid = figure.add_gridspec(rows, max(1, abreast))
        upper = [figure.add_subplot(grid[row, :]) for row in range(len(wide))]
        places = [(len(wide) + ratios + number // abreast, number % abreast) for number in range(len(narrow))]
        lower = [figure.add_subplot(grid[place]) for place in places]
        for ax, rows_name in zip([*upper, *lower], [*wide, *narrow], strict=True):
            if rows_name in _SITES:
                _draw_sites(ax, lines, paths, rows_name)
            elif rows_name == "cumulative":
                _draw_cumulative(ax, lines)
            else:
                _draw_parts(ax, lines)
            _finish(ax, theme)
        if ratios:
            upper.append(figure.add_subplot(grid[len(wide), :]))
            _draw_ratios(upper[-1], lines, paths, theme)
        for ax in upper:
            _name_sites(ax, names if ax is upper[-1] else [], inches - _EDGE_INCHES)
        if upper:
            _sign_placements(upper[0], sites, paths, theme)
        figure.align_ylabels()
    return figure


def _lines(reports: Sequence[DriftReport], theme: Style) -> list[_DriftLine]:
    colours = _colours(dict.fromkeys(report.func for report in reports), theme)
    lines = []
    for number, report in enumerate(reports):
        init = INITS.get(report.init, INITS["fit"])
        offset = _DODGE * ((number + 0.5) / len(reports) - 0.5)
        label = " · ".join(part for part in (report.func, report.start_in_words) if part)
        lines.append(_DriftLine(report, label, colours[report.func], init.marker, init.dashes, offset))
    return lines


def _colours(funcs: Iterable[str], theme: Style) -> dict[str, Any]:
    """Return a colour for each function, a built-in curve's own first; RMSNorm is no curve."""
    curves = {func: _curve(func) for func in funcs}
    looks, colours = theme.looks(curves.values()), dict[str, Any]()
    for func, curve in sorted(curves.items(), key=lambda item: item[1] not in CURVES):
        usual = theme.ink if func == "rmsnorm" else looks[curve][0]
        choice = (usual, *theme.curves, *theme.channels)
        colours[func] = next((colour for colour in choice if colour not in colours.values()), usual)
    return colours


def _curve(func: str) -> str:
    try:
        return curves_named(func)[0].name
    except UsageError:  # free, best and others that are no single curve
        return func


def _paths(reports: Sequence[DriftReport], sites: Sequence[NormSite]) -> list[str]:
    swapped = dict.fromkeys(path for report in reports for path in report.sites)
    listed = [site.name for site in sites if site.name in swapped]
    return [*listed, *(path for path in swapped if path not in listed)]


def _handles(
    lines: Sequence[_DriftLine], sites: Sequence[NormSite], paths: Sequence[str], theme: Style
) -> list[Artist]:
    faint = theme.faint
    handles: list[Artist] = [key(line.label, line.colour, line.dashes, marker=line.marker, ms=3) for line in lines]
    handles.append(key("10th to 90th percentile", faint, "", marker="|", ms=6))
    if any(_infinite(row.relative_l2) for line in lines for row in line.report.rows):
        handles.append(key("not finite", theme.ink, "", marker="X", ms=4))
    for placement in dict.fromkeys(site.placement for site in sites if site.name in paths):
        label = placement or "beside the residual stream"
        handles.append(key(label, faint, "", marker=_PLACEMENTS[placement], ms=3.2))
    return handles


def _infinite(quantiles: Quantiles) -> bool:
    return math.isinf(quantiles.p50) or math.isinf(quantiles.p90)


def _draw_sites(ax: Axes, lines: Sequence[_DriftLine], paths: Sequence[str], rows_name: str) -> None:
    name, title, pad = _SITES[rows_name]
    for line in lines:
        at = {getattr(row, name): row for row in getattr(line.report, rows_name)}
        _draw_dots(ax, line, [(number, at[path]) for number, path in enumerate(paths) if path in at], line.offset)
    ax.set_title(title, loc="left", pad=pad)


def _draw_ratios(ax: Axes, lines: Sequence[_DriftLine], paths: Sequence[str], theme: Style) -> None:
    """Each median over the first swap's, with each site swapped alone: what differs where they seem to coincide."""
    first = {row.site: row.relative_l2.p50 for row in lines[0].report.by_site}
    for line in lines[1:]:
        rows = {row.site: row.relative_l2.p50 for row in line.report.by_site}
        drawn = {
            number + line.offset: rows[path] / first[path]
            for number, path in enumerate(paths)
            if path in rows and 0 < first.get(path, 0) < math.inf and math.isfinite(rows[path])
        }
        x, ratio = list(drawn), list(drawn.values())
        ax.plot(x, ratio, marker=line.marker, ms=2.6, mew=0, color=line.colour, ls="")
        ax.vlines(x, 1, ratio, color=line.colour, lw=0.7, alpha=0.8)
    ax.axhline(1, color=theme.faint, lw=0.9, zorder=0)
    ax.set_title(f"each site swapped alone, as a multiple of {literal(lines[0].label)}", loc="left")
    scale_where_wide(ax)
    ax.set_ylabel("ratio of medians")
    draw_guides(ax, theme)


def _draw_cumulative(ax: Axes, lines: Sequence[_DriftLine]) -> None:
    for line in lines:
        rows = [(row.sites_swapped, row) for row in line.report.cumulative]
        _draw_dots(ax, line, rows, line.offset, joined=True)
    ax.set_title("the output, one site more at a time", loc="left")
    ax.set_xlabel("number of sites swapped, the least harmful first")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_parts(ax: Axes, lines: Sequence[_DriftLine]) -> None:
    parts = list(dict.fromkeys(row.part for line in lines for row in line.report.by_part))
    for line in lines:
        rows = [(parts.index(row.part), row) for row in line.report.by_part]
        _draw_dots(ax, line, rows, 0.6 * line.offset, joined=True)
    words = {part.rpartition(" ")[0] for part in parts}
    shared = literal(words.pop()) if len(words) == 1 else ""
    names = [literal(part).removeprefix(f"{shared} ") for part in parts]
    every = max(1, math.ceil(len(parts) / 12))
    ax.set_xticks(range(0, len(parts), every), names[::every])
    ax.set_xlabel(shared or "part of the data")
    ax.set_title(f"the output by {shared or 'part of the data'}, all sites swapped", loc="left")


def _draw_dots(
    ax: Axes, line: _DriftLine, rows: Sequence[tuple[int, Drift]], offset: float, *, joined: bool = False
) -> None:
    """A dot and a bar for each row, set aside so that one swap does not hide another."""
    points = [(x + offset, row.relative_l2) for x, row in rows]
    finite = [(x, quantiles) for x, quantiles in points if math.isfinite(quantiles.p50)]
    medians = [quantiles.p50 for _, quantiles in finite]
    dashes = line.dashes if joined else ""
    ax.plot([x for x, _ in finite], medians, marker=line.marker, ms=2.3, mew=0, color=line.colour, ls=dashes, lw=0.7)
    _draw_bars(ax, [(x, quantiles) for x, quantiles in finite if math.isfinite(quantiles.p90)], line.colour, alpha=0.8)
    if x := [x for x, quantiles in points if _infinite(quantiles)]:  # crosses at the upper edge
        look: dict[str, Any] = {"marker": "X", "ms": 3.6, "mew": 0, "color": line.colour, "zorder": 5, **_OUTSIDE}
        ax.plot(x, [1.0] * len(x), transform=ax.get_xaxis_transform(), **look)


def _draw_bars(ax: Axes, points: Sequence[tuple[float, Quantiles]], colour: Any, alpha: float | None = None) -> None:
    low, high = [quantiles.p10 for _, quantiles in points], [quantiles.p90 for _, quantiles in points]
    ax.vlines([x for x, _ in points], low, high, color=colour, lw=0.7, alpha=alpha)


def _finish(ax: Axes, theme: Style) -> None:
    """Choose the axis, logarithmic where values are many times one another, and show 1 where it is near."""
    high = ax.dataLim.y1
    if not scale_where_wide(ax):
        ax.set_ylim(0, None if 0 < high < math.inf else 1.1)
    bottom, top = ax.get_ylim()
    if bottom < 1 < 1.5 * top:
        ax.axhline(1, color=theme.faint, ls=":", lw=0.9, zorder=0)
    ax.set_ylabel("relative L2")
    draw_guides(ax, theme)


def _name_sites(ax: Axes, names: Sequence[str], inches: float) -> None:
    every = max(1, math.ceil(len(names) * _UPRIGHT_INCHES / inches))
    labels = [literal(name) for name in names[::every]]
    ax.set_xticks(range(0, len(names), every), labels, rotation=90, fontproperties=_TINY)
    ax.margins(x=0.01)


def _sign_placements(ax: Axes, sites: Sequence[NormSite], paths: Sequence[str], theme: Style) -> None:
    placements, edge = {site.name: site.placement for site in sites}, ax.get_xaxis_transform()
    for placement, marker in _PLACEMENTS.items():
        x = [number for number, path in enumerate(paths) if path in placements and placements[path] == placement]
        ax.plot(x, [1.06] * len(x), transform=edge, marker=marker, ms=2.6, color=theme.faint, **_OUTSIDE)


def plot_keep(
    report: KeepReport, title: str | None = None, *, width: float | None = None, style: str = "light"
) -> Figure:
    """Draw the drift, and beside it the quality, against the number of norms that are swapped.

    Medians over inputs, with bars from the 10th to the 90th percentile, on the inputs of the choice and on held-out
    ones; crosses are drifts after ``after``, for example a calibration. Each number follows the norm put back last. The
    dotted line is the original's quality.

    Args:
        report: what :func:`normscope.keep` returned.
        title: above all panels, as of :func:`normscope.plot`.
        width: of the figure, in inches.
        style: ``light`` or ``dark``.

    Raises:
        UsageError: if there is no such style, or if the width is under 2 inches.
    """
    theme = style_named(style)
    inches = inches_of(width, _KEEP_INCHES[0])
    beside = report.quality is not None and inches >= 2 * _LEAST_ABREAST
    rows = 1 + (report.quality is not None and not beside)
    names = [literal(tail(f"{step.site or 'none'}  {step.swapped}", _NAME_INCHES, _TINY)) for step in report.taken]
    foot = max(width_of(name, _TINY) for name in names)
    with sheet(theme, inches, (_KEEP_INCHES[1] + foot) * rows, title, report.about) as figure:
        grid = figure.add_gridspec(rows, 1 + beside)
        _draw_kept(figure.add_subplot(grid[0, 0]), report, theme)
        if report.quality is not None:
            _draw_quality(figure.add_subplot(grid[rows - 1, -1]), report.quality, report.taken, theme)
        for ax in figure.axes:
            ax.set_xlabel(f"norms swapped, of {len(report.sites)}, and the one put back last")
            every = max(1, math.ceil(len(names) * 2 * _UPRIGHT_INCHES * len(figure.axes) / inches))
            ticks = [step.swapped for step in report.taken]
            ax.set_xticks(ticks[::every], names[::every], rotation=90, fontproperties=_TINY)
            ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderpad=0, columnspacing=1.2)
            draw_guides(ax, theme)
    return figure


def _draw_kept(ax: Axes, report: KeepReport, theme: Style) -> None:
    measured = {
        "chosen on": [(step.swapped - _ASIDE, step.error) for step in report.taken],
        "held out": [(step.swapped + _ASIDE, step.held_out) for step in report.taken if step.held_out is not None],
    }
    for colour, (label, points) in zip(theme.curves, measured.items(), strict=False):
        if points:
            medians = [quantiles.p50 for _, quantiles in points]
            ax.plot([x for x, _ in points], medians, color=colour, marker="o", ms=3, lw=0.9, label=label)
            _draw_bars(ax, points, colour)
    tried = [(step.swapped, step.worked_on) for step in report.steps if step.worked_on is not None]
    if tried:
        ax.plot(*zip(*tried, strict=True), color=theme.ink, ls="", marker="X", ms=4, mew=0, label="calibrated")
    ax.set_ylim(0, None)
    ax.set_ylabel(report.measure)


def _draw_quality(ax: Axes, quality: Quality, taken: Sequence[KeepStep], theme: Style) -> None:
    scores = quality.scores
    points = [(step.swapped, scores[f"{step.kept} kept"].value) for step in taken]
    ax.plot(*zip(*points, strict=True), color=theme.curves[0], marker="o", ms=3, lw=0.9, label="swapped")
    ax.axhline(scores["original"].value, color=theme.faint, ls=":", lw=0.9, label="original")
    ax.set_ylabel(literal(quality.name))


_HEAL_INCHES = (6.4, 2.4)
_LEAST_HEAL_INCHES = 4.5  # of both panels beside one another
_STAGES = {START: "start\nvalues", CALIBRATED: "calibrated", TRAINED: "trained"}
_HEALED = 0.2  # of the start's drift


def plot_healing(
    report: HealReport, title: str | None = None, *, width: float | None = None, style: str = "light"
) -> Figure:
    """Draw the course of a healing, and the drift on held-out inputs before and after each stage.

    Left: the training loss between checks, and the median drift at each check, with a filled marker if it is the least
    so far. Right: medians on the held-out inputs, and bars from the 10th to the 90th percentile.

    Args:
        report: what :func:`normscope.heal` returned.
        title: above all panels, as of :func:`normscope.plot`.
        width: of the figure, in inches; a narrow one has the drifts below the course.
        style: ``light`` or ``dark``.

    Raises:
        UsageError: if there is no such style, or if the width is under 2 inches.
    """
    theme = style_named(style)
    inches = inches_of(width, _HEAL_INCHES[0])
    narrow = inches < _LEAST_HEAL_INCHES
    with sheet(theme, inches, _HEAL_INCHES[1] * (1 + narrow), title, report.about) as figure:
        grid = figure.add_gridspec(1 + narrow, 2 - narrow, width_ratios=[1.4, 1.3][: 2 - narrow])
        course, drifts = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[-1, -1])
        _draw_course(course, report.checks, theme)
        scale_where_wide(course)
        course.set_ylabel("relative L2")
        _draw_drifts(drifts, report, theme)
    return figure


def _draw_course(ax: Axes, checks: Sequence[TrainingCheck], style: Style) -> None:
    losses = [(check.step, check.loss) for check in checks if check.loss is not None]
    losses = [(0, losses[0][1]), *losses] if losses else []  # each is of the steps before it
    ax.plot(*_finite(losses), color=style.curves[1], lw=1.1, ds="steps-pre", label="training loss")
    look: dict[str, Any] = {"ls": "", "marker": "o", "ms": 2.8, "mew": 0.7, "color": style.curves[0]}
    for kept, label in ((True, "median drift, least so far"), (False, "no less than before")):
        drifts = [(check.step, check.drift) for check in checks if check.kept == kept]
        ax.plot(*_finite(drifts), mfc=style.curves[0] if kept else style.background, label=label, **look)
    end = max((check.step for check in checks), default=1)
    ax.set_xticks([tick for tick in MaxNLocator(6, integer=True).tick_values(0, end) if 0 <= tick <= end])
    ax.set_xlabel("steps")
    ax.legend(loc="upper right", fontsize=LEAST_POINTS)


def _finite(points: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    shown = [(step, value) for step, value in points if value is not None]
    return [step for step, _ in shown], [value for _, value in shown]


def _draw_drifts(ax: Axes, report: HealReport, style: Style) -> None:
    colour = style.curves[0]
    for place, quantiles in enumerate(report.drifts.values()):
        if not all(math.isfinite(value) for value in quantiles.values()):
            at: Any = ("data", "axes fraction")
            ax.annotate("not finite", (place, 0.02), xycoords=at, ha="center", fontsize=LEAST_POINTS)
            continue
        ax.plot([place, place], [quantiles["p10"], quantiles["p90"]], color=colour, lw=1.4, solid_capstyle="butt")
        ax.plot([place], [quantiles["median"]], marker="o", ms=4, mew=0, color=colour)
        behind = {"facecolor": style.background, "edgecolor": "none", "pad": 0.5}  # no line runs through the number
        at, look = (place, quantiles["median"]), {"va": "center", "fontsize": LEAST_POINTS, "bbox": behind}
        write_at(ax, f"{quantiles['median']:.3f}", at, (4, 0), "data", **look)
    ax.set_xlim(-0.5, len(report.drifts) - 0.2)
    ax.set_ylim(bottom=0)
    start = report.before["median"]
    if math.isfinite(start):
        ax.axhline(_HEALED * start, color=style.faint, lw=0.8, ls="--", zorder=0)
        behind = {"facecolor": style.background, "edgecolor": "none", "pad": 0.8}  # the line goes on at either side
        look = {"va": "center", "fontsize": LEAST_POINTS, "color": style.faint, "bbox": behind}
        write_at(ax, f"{1 - _HEALED:.0%} closed", (0.0, _HEALED * start), (3, 0), ("axes fraction", "data"), **look)
    ax.set_xticks(range(len(report.drifts)), [_STAGES[stage] for stage in report.drifts])
    ax.set_ylabel(f"{report.measure} on {report.n_held_out} held-out samples")
    ax.set_title("start values kept" if report.restored else f"{report.closed:.0%} of the median closed")
