"""A healing as a figure: its loss and the drift on the way, and the drift before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normscope.figures.style import LEAST_POINTS, Style, inches_of, scale_where_wide, sheet, style_named, write_at
from normscope.swaps.reports import CALIBRATED, START, TRAINED, HealReport, TrainingCheck

_INCHES = (6.4, 2.4)
_LEAST_INCHES = 4.5  # of both panels beside one another
_NAMES = {START: "start\nvalues", CALIBRATED: "calibrated", TRAINED: "trained"}
_HEALED = 0.2  # of the start's drift


def plot_healing(
    report: HealReport, title: str | None = None, *, width: float | None = None, style: str = "light"
) -> Figure:
    """Draw the course of a healing, and the drift on inputs that nothing of it has seen, before and after each stage.

    To the left the training loss, a step wide from one check to the next, and the median drift on the inputs that
    decide at each check: a filled marker where it was the least so far, an open one elsewhere. To the right
    medians on the held-out inputs, and bars from the 10th to the 90th percentile.

    Args:
        report: what :func:`normscope.heal` returned.
        title: above all panels, as of :func:`normscope.plot`.
        width: of the figure, in inches; in a narrow one the drifts stand below the course.
        style: ``light`` or ``dark``.

    Raises:
        UsageError: if there is no such style, or if the width is under 2 inches.
    """
    theme = style_named(style)
    inches = inches_of(width, _INCHES[0])
    narrow = inches < _LEAST_INCHES
    with sheet(theme, inches, _INCHES[1] * (1 + narrow), title, report.about) as figure:
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
    ax.plot(*_columns(losses), color=style.curves[1], lw=1.1, ds="steps-pre", label="training loss")
    for kept, label in ((True, "median drift, least so far"), (False, "no less than before")):
        ax.plot(
            *_columns([(check.step, check.drift) for check in checks if check.kept == kept]),
            ls="",
            marker="o",
            ms=2.8,
            mew=0.7,
            color=style.curves[0],
            mfc=style.curves[0] if kept else style.background,
            label=label,
        )
    end = max((check.step for check in checks), default=1)
    ax.set_xticks([tick for tick in MaxNLocator(6, integer=True).tick_values(0, end) if 0 <= tick <= end])
    ax.set_xlabel("steps")
    ax.legend(loc="upper right", fontsize=LEAST_POINTS)


def _columns(points: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    shown = [(step, value) for step, value in points if value is not None]
    return [step for step, _ in shown], [value for _, value in shown]


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
        behind = {"facecolor": style.background, "edgecolor": "none", "pad": 0.5}  # no line runs through the number
        at, look = (place, quantiles["median"]), {"va": "center", "fontsize": LEAST_POINTS, "bbox": behind}
        write_at(ax, f"{quantiles['median']:.3f}", at, (4, 0), "data", **look)
    ax.set_xlim(-0.5, len(stages) - 0.2)
    ax.set_ylim(bottom=0)
    start = report.before["median"]
    if math.isfinite(start):
        ax.axhline(_HEALED * start, color=style.faint, lw=0.8, ls="--", zorder=0)
        behind = {"facecolor": style.background, "edgecolor": "none", "pad": 0.8}  # the line goes on at either side
        look = {"va": "center", "fontsize": LEAST_POINTS, "color": style.faint, "bbox": behind}
        write_at(ax, f"{1 - _HEALED:.0%} closed", (0.0, _HEALED * start), (3, 0), ("axes fraction", "data"), **look)
    ax.set_xticks(range(len(stages)), [_NAMES[stage] for stage in stages])
    ax.set_ylabel(f"{report.measure} on {report.n_held_out} held-out samples")
    ending = "start values kept" if report.restored else f"{report.closed:.0%} of the median closed"
    ax.set_title(ending)
