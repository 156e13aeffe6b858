"""What figures and tables of speed hold is read from their artists and cells, of times that are given."""

from types import SimpleNamespace as Record

import matplotlib.colors
import pytest
from artists import printed, shown

from normscope.errors import UsageError
from normscope.show.figures.style import STYLES
from normscope.tools.bench.figure import plot_speed
from normscope.tools.bench.table import duration, speed_tables

FORWARD, BOTH = "forward", "forward + backward"


def row(variant, median=1e-3, way="eager", scope="norm", passes=FORWARD, **other):
    timed = median is not None
    given = {
        **{"variant": variant, "way": way, "scope": scope, "passes": passes, "dtype": "float32"},
        **{"shape": (2, 197, 768), "sites": 25, "samples": (median,) * 5 if timed else (), "median": median},
        **{"p25": 0.9 * median if timed else None, "p75": 1.2 * median if timed else None},
        **{"ratio": None, "verdict": "", "note": ""},
    }
    return Record(**given | other)


@pytest.fixture
def report():
    rows = [
        row("native", 2e-3),
        row("dyt", 1e-3, ratio=0.5, verdict="faster"),
        row("dyisru", 4e-3, ratio=2.0, verdict="slower", p75=900.0),
        row("native", 3e-3, way="compile"),
        row("dyt", None, way="compile", verdict="not run", note="RuntimeError: no [compiler] here"),
        row("native", 0.5, scope="model", shape=(2, 3, 224, 224)),
        row("mine", 0.6, scope="model", ratio=1.2, verdict="inconclusive", shape=(2, 3, 224, 224)),
        row("native", 7.0, scope="model", passes=BOTH, dtype="bfloat16"),
    ]
    about = {"model": "odd$net_{", "weights": "random [weights]", "data": "noise & more"}
    return Record(about=about, device="cpu, 2 threads", rows=rows, left_out=("Left to --full: [much].",))


def report_of(*rows, device="cuda"):
    return Record(about={}, device=device, rows=rows, left_out=())


def foot_of(figure):
    return figure.texts[-1].get_text().replace("\n", " ")


def test_a_bar_is_as_long_as_its_median(report):
    axes = shown(plot_speed(report))
    assert [ax.get_title() for ax in axes] == [
        "norm alone, forward\ninput 2×197×768, float32",
        "whole network, forward\ninput 2×3×224×224, float32",
        "whole network, forward + backward\ninput 2×197×768, bfloat16",
    ]
    widths = [[bar.get_width() for bar in ax.patches] for ax in axes]
    assert widths == [pytest.approx(of) for of in ([2.0, 1.0, 4.0, 3.0], [500.0, 600.0], [7.0])]
    assert [ax.get_xlabel() for ax in axes] == ["time [ms]", "time [ms]", "time [s]"]
    names = ["native", "DyT", "DyISRU", "native", "DyT"]
    assert [label.get_text() for label in axes[0].get_yticklabels()] == names and axes[0].get_xlim()[0] == 0
    cut = [line for line in axes[0].lines if line.get_marker() == ">"]
    assert [line.get_ydata()[0] for line in cut] == [3]  # dyisru's whisker alone, of 900 s, leaves the panel


def test_fused_bars_are_compared_with_the_eager_native_norm():
    report = report_of(
        row("native", 2e-3), row("native", 3e-3, way="compile"), row("dyt", 1e-3, way="fused", ratio=0.5)
    )
    figure = plot_speed(report)
    [norm] = shown(figure)
    assert [line.get_xdata()[0] for line in norm.lines if line.get_linestyle() == ":"] == [2.0, 3.0, 2.0]
    assert matplotlib.colors.same_color(norm.patches[2].get_facecolor(), STYLES["light"].looks()["tanh"][0])
    assert "dotted: native norm, eager for fused" in foot_of(figure)
    text = "".join(printed(table, 80) for table in speed_tables(report))
    assert "the norm alone · fused · forward" in text and "beside the eager native norm" in " ".join(text.split())


def test_a_bar_has_a_ratio_in_the_font_of_its_verdict(report):
    figure = plot_speed(report)
    fonts = {text.get_text(): text.get_fontproperties() for text in shown(figure)[0].texts}
    assert [text for text, font in fonts.items() if font.get_weight() == "bold"] == ["×0.500"]
    assert [text for text, font in fonts.items() if font.get_style() == "italic"] == ["×2.00"]
    assert "not run" in fonts and not any("?" in text for text in fonts)
    assert "×: multiple of its time, bold if faster, in italics if slower, plain if inconclusive" in foot_of(figure)


def test_a_report_without_times_is_refused():
    with pytest.raises(UsageError, match="Nothing was timed"):
        plot_speed(report_of())


def test_durations_in_three_digits():
    seconds = (9.9949e-6, 9.996e-6, 0.9996e-3, 0.9994e-3, 59.96, 1e-9)
    assert list(map(duration, seconds)) == ["9.99 µs", "10.0 µs", "1.00 ms", "999 µs", "60.0 s", "0.00 µs"]


def test_tables_contain_the_verdicts(report):
    tables = speed_tables(report)
    assert [table.title for table in tables] == [
        "the norm alone · eager · forward · float32",
        "the norm alone · compile · forward · float32",
        "the whole network · eager · forward · float32",
        "the whole network · eager · forward + backward · bfloat16",
    ]
    text = "".join(printed(table, 100) for table in tables)
    cells = [line.split() for line in text.splitlines()]
    assert ["DyT", "1.00", "ms", "0.90–1.20", "0.50", "5", "faster"] in cells
    assert ["DyT", "–", "–", "–", "–", "not", "run"] in cells
    assert ["mine", "600", "ms", "540–720", "1.20", "5", "inconclusive"] in cells
    assert "n: number of times measured" in " ".join(text.split())
    assert "no [compiler] here" in text and "[much]" in text
