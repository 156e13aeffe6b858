"""The figure and the table of a healing: what they show is what the report says."""

import math

from normscope.figures.drift import plot_healing
from normscope.swaps.reports import HealReport, TrainingCheck
from normscope.tables.swaps import healing_table

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
REPORT = HealReport(DRIFTS, "trained", CHECKS, 20, "all", 192, 64, 32, 0)


def dots(ax):
    return [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "o"]


def test_every_check_stands_at_its_step_and_drift():
    course, _ = plot_healing(REPORT).axes
    assert dots(course) == [[[15, 0.2], [20, 0.12]], [[5, 0.35]]]  # the one that was not finite has no place
    losses = [line.get_xydata().tolist() for line in course.lines if line.get_drawstyle() == "steps-pre"]
    assert losses == [[[0, 0.2], [5, 0.2], [10, 0.15], [20, 0.1]]]
    assert course.get_xlabel() == "steps" and all(x >= 0 for x in course.get_xticks())


def test_the_drift_before_and_after_each_stage():
    *_, drifts = plot_healing(REPORT, "a title").axes
    bars = [line.get_ydata() for line in drifts.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    assert [list(bar) for bar in bars] == [[own["p10"], own["p90"]] for own in DRIFTS.values()]
    assert [text.get_text() for text in drifts.texts] == ["0.500", "0.300", "0.100", "80% closed"]
    assert drifts.get_title() == "80% of the median closed"


def test_what_is_not_finite_is_said_and_not_drawn():
    start = dict.fromkeys(("p10", "median", "p90"), math.inf)
    report = HealReport({"start": start, "trained": start}, "start", [], 1, "all", 3, 1, 2, 0)
    _, drifts = plot_healing(report).axes
    assert [text.get_text() for text in drifts.texts] == ["not finite"] * 2
    assert drifts.get_title() == "start values kept"


def test_the_table_has_a_row_a_stage():
    columns = [list(column.cells) for column in healing_table(REPORT).columns]
    assert columns[0] == ["start values", "calibrated", "trained"]
    assert columns[1] == ["", "", "20"]
    assert columns[3] == ["0.5", "0.3", "0.1"]
    assert columns[5] == ["", "40.0%", "80.0%"]
    assert columns[6] == ["", "", "yes"]
