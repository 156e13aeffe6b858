"""The figure and the table of a healing: what they show is what the report says."""

import math
from dataclasses import replace

from normscope.tools.heal.figure import plot_healing
from normscope.tools.heal.reports import HealReport, TrainingCheck
from normscope.tools.heal.table import healing_table

DRIFTS = {
    "start": {"p10": 0.3, "median": 0.5, "p90": 0.8},
    "calibrated": {"p10": 0.2, "median": 0.3, "p90": 0.6},
    "trained": {"p10": 0.05, "median": 0.1, "p90": 0.2},
}
CHECKS = [
    TrainingCheck(5, 0.2, 0.35, False),
    TrainingCheck(10, 0.15, None, False),
    TrainingCheck(15, None, 0.2, True),
    TrainingCheck(20, 0.1, 0.12, True),
]
REPORT = HealReport(DRIFTS, "trained", CHECKS, 20, "all", 192, 64, 32, 0, before_training=0.31)
# The weights of a training at whose checks nothing was kept are those before it.
NOT_KEPT = replace(
    REPORT,
    drifts={**DRIFTS, "trained": DRIFTS["calibrated"]},
    left_with="calibrated",
    checks=[replace(check, kept=False) for check in CHECKS],
)


def dots(ax):
    """The points of a panel by their filling: [x, y] of filled ones, and of open ones."""
    lines = [line for line in ax.lines if line.get_marker() == "o"]
    points = [(line.get_mfc() == "#FFFFFF", point) for line in lines for point in line.get_xydata().tolist()]
    return [[point for empty, point in points if empty == kind] for kind in (False, True)]


def stages(ax):
    return [tick.get_text().replace("\n", " ") for tick in ax.get_xticklabels()]


def test_the_figure_shows_every_check_and_the_drift_before_training():
    course, losses, _ = plot_healing(REPORT).axes
    assert dots(course) == [[[15, 0.2], [20, 0.12]], [[5, 0.35]]]  # the one that was not finite has no place
    assert [list(line.get_ydata()) for line in course.lines if line.get_ls() == "--"] == [[0.31, 0.31]]
    assert losses.lines[0].get_xydata().tolist() == [[0, 0.2], [5, 0.2], [10, 0.15], [20, 0.1]]
    assert course.get_xlabel() == "training steps" and all(x >= 0 for x in course.get_xticks())
    assert course.get_ylabel() == "relative L2,\n64 validation inputs"


def test_the_figure_shows_the_drift_before_and_after_each_stage():
    *_, drifts = plot_healing(REPORT, title="a title").axes
    bars = [list(line.get_ydata()) for line in drifts.lines if len(line.get_xdata()) == 2]
    assert bars == [[stage["p10"], stage["p90"]] for stage in DRIFTS.values()]
    assert dots(drifts) == [[[2, 0.1]], [[0, 0.5], [1, 0.3]]]  # filled: the state that was kept
    assert [text.get_text() for text in drifts.texts] == ["0.5", "0.3", "0.1"]
    assert stages(drifts) == ["uncalibrated", "calibrated", "trained"]
    assert drifts.get_title() == "trained state kept: median −80.0%"


def test_a_state_before_training_is_not_called_trained():
    figure = plot_healing(NOT_KEPT)
    assert stages(figure.axes[-1]) == ["uncalibrated", "calibrated"]
    assert figure.axes[-1].get_title() == "calibrated state kept: median −40.0%"
    assert any("no state of it was kept" in text.get_text() for text in figure.texts)
    assert healing_table(NOT_KEPT).rows[2][0] == "training, no state kept"


def test_infinite_drift_is_labelled_and_not_drawn():
    start = dict.fromkeys(("p10", "median", "p90"), math.inf)
    *_, drifts = plot_healing(replace(REPORT, drifts=dict.fromkeys(DRIFTS, start), left_with="start")).axes
    assert [text.get_text() for text in drifts.texts] == ["not finite"] * 3
    assert drifts.get_title() == "uncalibrated state kept"


def test_the_table_has_a_row_per_stage():
    columns = list(map(list, zip(*healing_table(REPORT).rows, strict=True)))
    assert columns[0] == ["uncalibrated", "calibrated", "trained"]
    assert columns[1] == ["", "", "20"]
    assert columns[3] == ["0.5", "0.3", "0.1"]
    assert columns[5] == ["", "40.0%", "80.0%"]
    assert columns[6] == ["", "", "yes"]
