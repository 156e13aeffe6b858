"""A healing as a figure: its loss and what was kept of it, and the drift before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normscope.figures.notes import framed, heading, inches_of, title_and_foot
from normscope.figures.style import LEAST_POINTS, Style, scale_by_factors, style_named
from normscope.swaps.heal.reports import BLOCKS, SITES, START, WHOLE, HealReport, TrainingInterval

_INCHES = (6.4, 2.4)
_LEAST_INCHES = 4.5  # of all panels beside one another
_NAMES = {START: "start\nvalues", SITES: "each site\nalone", BLOCKS: "blocks", WHOLE: "end\nto end"}
_MANY_TIMES = 4
_HEALED = 0.2  # of the start's drift


def plot_healing(
    report: HealReport, title: str | None = None, *, width: float | None = None, style: str = "light"
) -> Figure:
    """Draw the course of a healing, and the drift on inputs that nothing of it has seen, before and after each stage.

    To the left the median drift on the inputs that decide, after each site by itself, which takes no steps; then beside
    the training loss, which is a step wide for each interval: a filled marker where it fell and the interval was kept,
    an open one where the steps were taken back. To the right
    medians on the held-out inputs, and bars from the 10th to the 90th percentile.

    Args:
        report: what :func:`normscope.heal` returned.
        title: above all panels, as of :func:`normscope.plot`.
        width: of the figure, in inches; in a narrow one the drifts stand below the course.
        style: ``light`` or ``dark``.

    Returns:
        A matplotlib figure.

    Raises:
        UsageError: if there is no such style, or if the width is under 2 inches.
    """
    theme = style_named(style)
    inches = inches_of(width, _INCHES[0])
    narrow = inches < _LEAST_INCHES
    title, origin = title_and_foot(title, heading(report.about), report.about)
    with matplotlib.rc_context(theme.rc()):
        figure = framed(inches, _INCHES[1] * (1 + narrow), title, [origin], theme)
        alone = [point for point in report.points if point.stage == SITES]
        trained = [point for point in report.points if point.stage != SITES]
        shares = [*([0.6] if alone else []), 1.4, *([] if narrow else [1.3])]
        grid = figure.add_gridspec(1 + narrow, len(shares), width_ratios=shares)
        first = figure.add_subplot(grid[0, 0])
        course = figure.add_subplot(grid[0, 1], sharey=first) if alone else first
        drifts = figure.add_subplot(grid[1, :] if narrow else grid[0, -1])
        _draw_course(course, trained, theme)
        if alone:
            _draw_sites(first, alone, theme)
            course.tick_params(axis="y", which="both", labelleft=False)
        low, high = min(first.dataLim.y0, course.dataLim.y0), max(first.dataLim.y1, course.dataLim.y1)
        if 0 < _MANY_TIMES * low < high < math.inf:
            scale_by_factors(first)
        first.set_ylabel("relative L2")
        _draw_drifts(drifts, report, theme)
    return figure


def _draw_course(ax: Axes, points: Sequence[TrainingInterval], style: Style) -> None:
    places, edges = _places(points)
    loss, judged = style.curves[1], style.curves[0]
    for stage in (BLOCKS, WHOLE):
        of_stage = [(place, point) for place, point in zip(places, points, strict=True) if point.stage == stage]
        lines = [(place, point.loss) for place, point in of_stage if point.loss is not None]
        lines = [(edges[stage][0], lines[0][1]), *lines] if lines else []  # each is of the steps before it
        ax.plot(*zip(*lines, strict=True) if lines else ((), ()), color=loss, lw=1.1, ds="steps-pre")
    _draw_judged(ax, places, points, style)
    for stage, (low, high) in edges.items():
        ax.axvline(low, color=style.faint, lw=0.6, ls=":")
        _say_above(ax, _NAMES[stage].replace("\n", " "), (low + high) / 2, style)
    _name_steps(ax, edges)
    ax.plot([], [], color=loss, lw=1.1, label="training loss")
    ax.plot([], [], ls="", marker="o", ms=2.8, color=judged, label="median drift, kept")
    ax.plot([], [], ls="", marker="o", ms=2.8, mfc=style.background, color=judged, label="taken back")
    ax.legend(loc="upper right", fontsize=LEAST_POINTS)


def _draw_judged(ax: Axes, places: Sequence[float], points: Sequence[TrainingInterval], style: Style) -> None:
    """Mark the median drift after each interval: filled where it was kept."""
    shown = [(place, point) for place, point in zip(places, points, strict=True) if point.drift is not None]
    for kept in (True, False):
        some = [(place, point.drift) for place, point in shown if point.kept == kept]
        ax.plot(
            *zip(*some, strict=True) if some else ((), ()),
            ls="",
            marker="o",
            ms=2.8,
            mew=0.7,
            color=style.curves[0],
            mfc=style.curves[0] if kept else style.background,
        )


def _draw_sites(ax: Axes, points: Sequence[TrainingInterval], style: Style) -> None:
    """The sites, each by itself, in the order in which they were tried."""
    _draw_judged(ax, [point.step for point in points], points, style)
    _say_above(ax, "each site alone", (points[0].step + points[-1].step) / 2, style)
    ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.set_xlim(0.5, max(point.step for point in points) + 0.5)
    ax.set_xlabel("sites")


def _say_above(ax: Axes, text: str, x: float, style: Style) -> None:
    ax.annotate(
        text,
        (x, 1.0),
        (0, 2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=LEAST_POINTS,
        color=style.faint,
    )


def _places(points: Sequence[TrainingInterval]) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """Places of the points, and of the beginning and end of each stage: steps count through."""
    edges, end = {}, 0.0
    for stage in (BLOCKS, WHOLE):
        if last := max((point.step for point in points if point.stage == stage), default=0):
            edges[stage] = (end, end + last)
            end += last
    return [edges[point.stage][0] + point.step for point in points], edges


def _name_steps(ax: Axes, edges: Mapping[str, tuple[float, float]]) -> None:
    end = max((high for _, high in edges.values()), default=1.0)
    ticks = [tick for tick in MaxNLocator(6, integer=True).tick_values(0, end) if 0 <= tick <= end]
    ax.set_xticks(ticks)
    ax.set_xlabel("steps")


def _draw_drifts(ax: Axes, report: HealReport, style: Style) -> None:
    stages = list(report.drifts)
    colour = style.curves[0]
    for place, stage in enumerate(stages):
        quantiles = report.drifts[stage]
        if not all(math.isfinite(value) for value in quantiles.values()):
            ax.annotate(
                "not finite", (place, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=LEAST_POINTS
            )
            continue
        ax.plot([place, place], [quantiles["p10"], quantiles["p90"]], color=colour, lw=1.4, solid_capstyle="butt")
        ax.plot([place], [quantiles["median"]], marker="o", ms=4, mew=0, color=colour)
        ax.annotate(
            f"{quantiles['median']:.3f}",
            (place, quantiles["median"]),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=LEAST_POINTS,
            bbox={"facecolor": style.background, "edgecolor": "none", "pad": 0.5},  # lines do not run through it
        )
    ax.set_xlim(-0.5, len(stages) - 0.2)
    ax.set_ylim(bottom=0)
    start = report.before["median"]
    if math.isfinite(start):
        ax.axhline(_HEALED * start, color=style.faint, lw=0.8, ls="--", zorder=0)
        ax.annotate(
            f"{1 - _HEALED:.0%} closed",
            (0.0, _HEALED * start),
            (3, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=LEAST_POINTS,
            color=style.faint,
            bbox={"facecolor": style.background, "edgecolor": "none", "pad": 0.8},  # the line goes on at either side
        )
    ax.set_xticks(range(len(stages)), [_NAMES[stage] for stage in stages])
    ax.set_ylabel(f"drift on {report.n_held_out} held-out samples")
    ending = "start values kept" if report.restored else f"{report.closed:.0%} of the median closed"
    ax.set_title(ending)
