"""The figure and the table of a healing: what they show is what the report says."""

import math

import pytest
from matplotlib.colors import to_hex

from normscope.errors import UsageError
from normscope.figures.healing import plot_healing
from normscope.swaps.heal.reports import HealReport, TrainingInterval
from normscope.tables.drift import healing_table

DRIFTS = {
    "start": {"p10": 0.3, "median": 0.5, "p90": 0.8},
    "sites": {"p10": 0.25, "median": 0.4, "p90": 0.7},
    "blocks": {"p10": 0.2, "median": 0.3, "p90": 0.6},
    "whole": {"p10": 0.05, "median": 0.1, "p90": 0.2},
}
POINTS = [
    TrainingInterval("sites", 1, None, 0.45, True),
    TrainingInterval("sites", 2, None, 0.46, False),
    TrainingInterval("blocks", 5, 0.2, 0.35, True),
    TrainingInterval("blocks", 10, 0.15, None, False),
    TrainingInterval("whole", 25, 0.2, 0.2, True),
    TrainingInterval("whole", 50, 0.1, 0.12, True),
]
REPORT = HealReport(DRIFTS, False, POINTS, 60, 192, 64, 32, 0)


def dots(ax):
    """Filled and open markers; what is empty is the legend's."""
    return [own for own in (line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "o") if own]


def test_every_interval_stands_at_its_step_and_drift():
    sites, course, _ = plot_healing(REPORT).axes
    assert dots(course) == [[[5, 0.35], [35, 0.2], [60, 0.12]]]  # the one that was not finite has no place
    losses = [line.get_xydata().tolist() for line in course.lines if line.get_drawstyle() == "steps-pre"]
    assert losses == [[[0, 0.2], [5, 0.2], [10, 0.15]], [[10, 0.2], [35, 0.2], [60, 0.1]]]
    assert dots(sites) == [[[1, 0.45]], [[2, 0.46]]]  # kept, and taken back


def test_nothing_stands_at_negative_steps_and_both_share_their_heights():
    sites, course, _ = plot_healing(REPORT).axes
    assert all(x >= 0 for ax in (sites, course) for line in ax.lines for x in line.get_xdata())
    sites.figure.draw_without_rendering()
    places = [ax.transData.transform((0, 0.3))[1] for ax in (sites, course)]
    assert places[0] == pytest.approx(places[1])  # one height means one drift in both
    assert (sites.get_xlabel(), course.get_xlabel()) == ("sites", "steps")
    bare = HealReport(DRIFTS, False, POINTS[2:], 60, 192, 64, 32, 0)
    assert len(plot_healing(bare).axes) == 2


def test_the_drift_before_and_after_each_stage():
    *_, drifts = plot_healing(REPORT, "a title").axes
    bars = [line.get_ydata() for line in drifts.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    assert [list(bar) for bar in bars] == [[own["p10"], own["p90"]] for own in DRIFTS.values()]
    assert [text.get_text() for text in drifts.texts] == ["0.500", "0.400", "0.300", "0.100", "80% closed"]
    assert drifts.get_title() == "80% of the median closed"


def test_what_is_not_finite_is_said_and_not_drawn():
    start = dict.fromkeys(("p10", "median", "p90"), math.inf)
    report = HealReport({"start": start, "whole": start}, True, [], 1, 3, 1, 2, 0)
    _, drifts = plot_healing(report).axes
    assert [text.get_text() for text in drifts.texts] == ["not finite"] * 2
    assert drifts.get_title() == "start values kept"


def test_themes():
    assert to_hex(plot_healing(REPORT, style="dark").get_facecolor()) == "#14171c"
    with pytest.raises(UsageError, match="no style"):
        plot_healing(REPORT, style="dusk")


def test_the_table_has_a_row_a_stage():
    columns = [list(column.cells) for column in healing_table(REPORT).columns]
    assert columns[0] == ["start values", "each site alone", "blocks", "end to end"]
    assert columns[1] == ["", "", "10", "50"]
    assert columns[2] == ["", "1/2", "1/2", "2/2"]
    assert columns[4] == ["0.5000", "0.4000", "0.3000", "0.1000"]
    assert columns[6] == ["", "20.0%", "40.0%", "80.0%"]
