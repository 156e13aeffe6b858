"""The course of a healing, and the drift before and after each stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normscope.show.figures.drift import with_unit
from normscope.show.figures.sheet import inches_of, key, plain, scale_where_wide, sheet_of
from normscope.show.figures.style import LEAST_POINTS, FigureOptions, Style, theme_of
from normscope.show.figures.text import signed, write_at
from normscope.show.tables.table import number
from normscope.tools.heal.reports import TRAINED, HealReport
from normscope.tools.heal.table import STAGES

_INCHES = (6.4, 2.7)
_LEAST_ABREAST = 4.5  # of the panels beside one another


def plot_healing(report: HealReport, **options: Unpack[FigureOptions]) -> Figure:
    """Draw the course of a healing, and the drift on held-out inputs before and after each stage.

    Left, the training: its loss between checks, and the median drift at each check on validation inputs, with a
    filled marker if the state was kept; dashed, the median before training. Right, the held-out inputs: medians and
    bars from the 10th to the 90th percentile, filled for the state that the network was left in. A training at whose
    checks no state was kept is not shown there.

    Args:
        report: what :func:`normscope.heal` returned.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if an option is not valid.
    """
    theme = theme_of(options)
    inches = inches_of(options.get("width"), _INCHES[0])
    narrow = inches < _LEAST_ABREAST
    stages = [stage for stage in report.drifts if stage != TRAINED or report.training_kept]
    foot = [] if report.training_kept else ["The training lowered the median at no check: no state of it was kept."]
    look: dict[str, Any] = {"ls": "", "marker": "o", "ms": 3, "mew": 0.8, "color": theme.channels[1]}
    handles = [
        key("state kept", **look),
        key("state not kept", mfc=theme.background, **look),
        key("10th to 90th percentile", theme.channels[1], "", marker="|", ms=6),
    ]
    if report.before_training is not None:
        handles.append(key("before training", theme.ink, "--"))
    height = _INCHES[1] * (1.9 if narrow else 1)
    with sheet_of(options, theme, inches, height, report.about, foot=foot, handles=handles) as figure:
        grid = figure.add_gridspec(2 + narrow, 2 - narrow, height_ratios=[1, 1.6, 2][: 2 + narrow])
        course = figure.add_subplot(grid[1, 0])
        losses = figure.add_subplot(grid[0, 0], sharex=course)
        drifts = figure.add_subplot(grid[2, 0] if narrow else grid[:, 1])
        _draw_course(losses, course, report, look, theme)
        _draw_stages(drifts, report, stages, look, theme)
        figure.align_ylabels([losses, course])
    return figure


def _draw_course(losses: Axes, course: Axes, report: HealReport, look: dict[str, Any], theme: Style) -> None:
    loss = [(check.step, check.loss) for check in report.checks if check.loss is not None]
    loss = [(0, loss[0][1]), *loss] if loss else []  # each is of the steps before it
    losses.plot([step for step, _ in loss], [value for _, value in loss], color=theme.ink, lw=1.1, ds="steps-pre")
    losses.set_ylabel("training\nloss")
    losses.tick_params(labelbottom=False)
    for kept, face in ((True, look["color"]), (False, theme.background)):
        shown = [(check.step, check.drift) for check in report.checks if check.kept == kept and check.drift is not None]
        course.plot([step for step, _ in shown], [drift for _, drift in shown], mfc=face, zorder=3, **look)
    if report.before_training is not None:
        course.axhline(report.before_training, color=theme.ink, ls="--", lw=0.9)
    end = max((check.step for check in report.checks), default=1)
    course.set_xticks([tick for tick in MaxNLocator(6, integer=True).tick_values(0, end) if 0 <= tick <= end])
    course.set_xlabel("training steps")
    course.set_ylabel(f"{with_unit(report.measure)},\n{report.n_judged} validation inputs")
    for ax in (losses, course):
        scale_where_wide(ax)


def _draw_stages(ax: Axes, report: HealReport, stages: Sequence[str], look: dict[str, Any], theme: Style) -> None:
    for x, stage in enumerate(stages):
        quantiles = report.drifts[stage]
        if not all(math.isfinite(value) for value in quantiles.values()):
            at: Any = ("data", "axes fraction")
            ax.annotate("not finite", (x, 0.02), xycoords=at, ha="center", fontsize=LEAST_POINTS)
            continue
        ax.plot([x, x], [quantiles["p10"], quantiles["p90"]], color=look["color"], lw=1.2, zorder=2)
        face = look["color"] if stage == report.left_with else theme.background
        ax.plot([x], [quantiles["median"]], mfc=face, zorder=3, **look)
        at, beside = (x, quantiles["median"]), {"va": "center", "fontsize": LEAST_POINTS}
        write_at(ax, plain(quantiles["median"], 3), at, (5, 0), "data", **beside)
    ax.set_ylabel(f"{with_unit(report.measure)},\n{report.n_held_out} held-out inputs")
    if not scale_where_wide(ax):
        ax.set_ylim(bottom=0)
    ax.set_xlim(-0.5, len(stages) - 0.3)
    ax.set_xticks(range(len(stages)), [STAGES[stage] for stage in stages])
    kept, change = STAGES[report.left_with], signed(number(-report.closed, "+.1%"))
    ax.set_title("uncalibrated state kept" if report.restored else f"{kept} state kept: median {change}")
