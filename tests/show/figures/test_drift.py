"""Artists of the figure of drift, and cells of its tables, against the reports."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from artists import legend_of, printed
from networks import PreNorm

from normscope.errors import UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.norms.trace import find_norms
from normscope.show.figures.drift import plot_drift
from normscope.show.figures.fit_numbers import MARKERS
from normscope.show.figures.sheet import save_figure
from normscope.show.figures.style import style_named
from normscope.show.tables.drift import drift_table, parts_table, sites_table
from normscope.swaps.drift.drift import drift
from normscope.swaps.drift.reports import DriftCalibration
from normscope.swaps.inits import published_name
from normscope.swaps.replace import replacements

ABOUT = {"model": "net$x_{", "weights": "random", "data": "noise"}
DRAW = torch.Generator().manual_seed(0)


def measured(func="dyt", init="paper", kind="classes", parts=("timestep 980", "timestep 0"), **options):
    model = PreNorm()
    samples = tuple(Sample(f"s{n}", n, n) for n in range(6))
    draw = torch.Generator().manual_seed(0)
    batches = [Batch((torch.randn(6, 8, generator=draw),), samples=samples, part=part) for part in parts]
    sites = find_norms(model, batches[0].first_sample()).sites
    modules = replacements(model, func, sites, init=init)
    report = drift(model, batches, modules, outputs=Outputs(kind), func=func, init=init, about=ABOUT, **options)
    return report, sites


@pytest.fixture(scope="module")
def reports():
    return [measured()[0], measured("derf")[0], measured("rmsnorm", "fit")[0]], measured()[1]


def spoilt(report):
    """The same with a NaN at every site's p90 and two of twelve inputs that are not finite."""

    def row(one):
        worse = replace(one.relative_l2, p90=math.inf, max=math.inf)
        return replace(one, relative_l2=worse, cosine=replace(one.cosine, p10=-math.inf), nonfinite=2)

    return replace(report, rows=[row(one) for one in report.rows])


def titled(figure):
    return {ax.get_title(loc="left"): ax for ax in figure.axes}


def cells(table):
    return list(map(tuple, table.rows))


def medians(rows):
    return [row.relative_l2.p50 for row in rows]


def dots(ax):
    """The points that a panel draws of each swap: (x, y)."""
    lines = [line for line in ax.lines if line.get_marker() in MARKERS and len(line.get_xdata())]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in lines]


def test_each_panel_draws_medians_and_ranges_beside_one_another(reports):
    measured, sites = reports
    figure = plot_drift(measured, sites)
    alone, at, cumulative, parts = figure.axes
    panels = {"by_site": alone, "at_sites": at, "cumulative": cumulative, "by_part": parts}
    for rows, ax in panels.items():
        assert [y for _, y in dots(ax)] == [medians(getattr(report, rows)) for report in measured], rows
        ranges = [[(low, high) for (_, low), (_, high) in bars.get_segments()] for bars in ax.collections]
        expected = [[row.relative_l2 for row in getattr(report, rows)] for report in measured]
        assert ranges == [[(quantiles.p10, quantiles.p90) for quantiles in row] for row in expected], rows
        places = [x for xs, _ in dots(ax) for x in xs]
        assert len(set(places)) == len(places), rows
    for panel, expected in ((cumulative, [1, 2, 3]), (parts, [0, 1])):  # numbers: on their ticks, to the eye
        np.testing.assert_allclose([x for x, _ in dots(panel)], [expected] * 3, atol=0.02)
    assert {"each site swapped alone, 12 inputs", "one site more at a time, 12 inputs"} < set(titled(figure))
    assert {at % 1 for at in cumulative.get_xticks()} == {0}
    assert [tick.get_text() for tick in parts.get_xticklabels()] == ["980", "0"] and parts.get_xlabel() == "timestep"
    assert figure.get_suptitle().startswith("net$x_{") and "12 inputs" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("kind", "names"), [("short", ["2", "1", "0"]), ("full", ["norms.2", "norms.1", "norms.0"]), ("none", list("012"))]
)
def test_sites_stand_in_order(reports, kind, names):
    measured, sites = reports
    figure = plot_drift(measured[:1], sites[::-1], labels=kind)
    alone, at, *_ = figure.axes
    assert [tick.get_text() for tick in at.get_xticklabels()] == names
    assert not any(tick.get_text() for tick in alone.get_xticklabels())


@pytest.mark.parametrize(
    ("style", "funcs", "curve"),
    [("light", ("rmsnorm", "derf", "dyt"), "tanh"), ("dark", ("free", "mine=x/(1+abs(x))", "identity"), "linear")],
)
def test_functions_differ_in_colour_and_a_curve_keeps_its_own(reports, style, funcs, curve):
    figure = plot_drift([replace(reports[0][0], func=func) for func in funcs], style=style)
    colours = [handle.get_color() for handle in figure.legends[0].legend_handles[:3]]
    assert len(set(colours)) == 3 and colours[2] == style_named(style).looks()[curve][0]
    assert "rmsnorm" not in funcs or colours[0] == style_named(style).faint
    assert len({handle.get_marker() for handle in figure.legends[0].legend_handles[:3]}) == 3
    assert legend_of(figure)[:3] == [f"{published_name(func)} · paper" for func in funcs]


def test_panels_without_anything_are_left_out():
    report, _ = measured(parts=("",), one_at_a_time=False, cumulative=False)
    assert list(titled(plot_drift([report]))) == ["each site's own output, all sites swapped"]
    report, _ = measured(parts=("",))
    assert len(plot_drift([report]).axes) == 3


def test_values_that_are_not_finite_are_crosses(reports, tmp_path):
    worse = spoilt(reports[0][0])
    lost = [replace(row, relative_l2=replace(row.relative_l2, p50=math.inf)) for row in worse.rows]
    rows = [gone if row.site == "norms.1" else row for row, gone in zip(worse.rows, lost, strict=True)]
    figure = plot_drift([replace(worse, rows=rows)], reports[1])
    alone = figure.axes[0]
    assert [len(line.get_xdata()) for line in alone.lines if line.get_marker() == "X"] == [3]
    assert "not finite" in legend_of(figure)
    assert all(np.isfinite(line.get_ydata()).all() for line in alone.lines)
    assert save_figure(figure, tmp_path / "worse.png", [], 60).stat().st_size > 1000


def test_identical_norms_are_drawn_on_a_linear_axis():
    model = PreNorm()
    report = drift(model, [torch.randn(6, 8, generator=DRAW)], {"norms.1": torch.nn.LayerNorm(8)}, func="same")
    assert {ax.get_yscale() for ax in plot_drift([report]).axes} == {"linear"}


def test_refusals(reports):
    measured, _ = reports
    elsewhere = replace(measured[1], about={**ABOUT, "data": "other"})
    for drifts, message in (([], "no drift to draw"), ([measured[0], elsewhere], "several networks")):
        with pytest.raises(UsageError, match=message):
            plot_drift(drifts)


def test_the_headline_is_a_row_a_swap(reports):
    measured, _ = reports
    table = drift_table(measured)
    headers = "func,init,sites,inputs,L2,p90 of L2,cosine,p10 of cosine,≤ 0.1,KL,p90 of KL,top-1,top-5,of 5"
    assert table.headings == headers.split(",")
    for row, one in zip(cells(table), measured, strict=True):
        assert row[:4] == (published_name(one.func), one.init, "3", "12")
        assert float(row[4]) == pytest.approx(one.all.relative_l2.p50, rel=5e-3)  # three digits
        assert float(row[6]) == pytest.approx(one.all.cosine.p50, abs=5e-5)
        assert float(row[9]) == pytest.approx(one.all.kl.p50, rel=5e-3)
        assert row[11] == f"{100 * one.all.top1:.1f}%"


@pytest.mark.parametrize(("refit", "alone"), [("neighbours", ""), ("norms", " (functions alone)")])
def test_inputs_of_calibrated_rows_are_named(reports, refit, alone):
    measured, sites = reports
    calibration = DriftCalibration("noise", refit, 36, 12, 0, 0, {})
    calibrated = replace(measured[0], init="calibrated", calibration=calibration)
    assert legend_of(plot_drift([measured[0], calibrated], sites))[:2] == [
        *("DyT · paper", f"DyT · calibrated{alone} on 48 other samples")
    ]
    caption = " ".join(printed(drift_table([measured[0], calibrated])).split())
    assert "calibrated: each row by itself" in caption and "on 48 other samples than it is measured on" in caption
    assert ("functions alone" in caption) == bool(alone)
    assert "calibrated with that site alone swapped" in " ".join(printed(sites_table([calibrated])).split())
    assert "calibrated" not in printed(drift_table(measured)) + printed(sites_table(measured))


def test_values_that_are_not_finite_are_counted_in_the_table(reports):
    table = drift_table([spoilt(reports[0][0]), reports[0][1]])
    assert [row[-1] for row in cells(table)] == ["2 of 12", ""]
    assert cells(table)[0][5] == "∞" and cells(table)[0][7] == "NaN"
    assert "infinitely far" in table.caption and "infinitely far" not in drift_table(reports[0]).caption


def test_parts_and_sites_have_rows_of_their_own(reports):
    measured, _ = reports
    rows = cells(parts_table(measured))
    assert [row[2] for row in rows] == ["timestep 980", "timestep 0"] * 3
    assert [row[0] for row in rows] == ["DyT", "", "Derf", "", "rmsnorm", ""]
    rows = cells(sites_table(measured))
    assert [row[0] for row in rows] == ["norms.0", "norms.1", "norms.2"]
    for column, report in enumerate(measured, 1):
        alone = [float(row[column]) for row in rows]
        assert alone == pytest.approx([row.relative_l2.p50 for row in report.by_site], rel=5e-3)


def test_ends_and_frames_have_columns_where_they_were_measured(reports):
    report = reports[0][0]
    row = replace(report.all, kl=None, top5=None, frames=report.all.relative_l2)
    framed = replace(report, rows=[row, replace(row, at="end of trajectory")])
    headers = drift_table([framed]).headings
    assert (
        headers[-5:] == ["frame L2", "p90 of frame L2", "end L2", "p90 of end L2", "end cosine"] and "KL" not in headers
    )
