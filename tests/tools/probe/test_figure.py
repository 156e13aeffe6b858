"""Figures of timelines: pixels and lines are compared with numbers that numpy made, and with a norm's own output."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.colors import LogNorm
from timelines import timeline, written
from torch import nn

import normscope
from normscope.errors import DataError
from normscope.tools.probe.figure import plot_scurves_by_step, plot_timeline


def panels(figure):
    """The panels by title, without the word for a logarithmic scale."""
    titles = {ax.get_title(loc="left").removesuffix(", log"): ax for ax in figure.axes if ax.get_visible()}
    return {title: ax for title, ax in titles.items() if title}


def test_each_pixel_of_a_map_is_the_nearest_record():
    run = timeline((0, 50, 100, 400))
    ax = panels(plot_timeline(run))["σ: 95th/5th percentile"]
    [image] = ax.images
    first, last, below, above = image.get_extent()
    assert (first, last, below, above) == (0, 400, 5.5, -0.5)
    pixels = image.get_array()
    for share, step in ((0.0, 0), (0.1, 50), (0.3, 100), (0.6, 100), (0.7, 400), (1.0, 400)):
        [values] = run.values("spread")[run.steps == step]
        np.testing.assert_array_equal(pixels[:, round(share * (pixels.shape[1] - 1))], values)


def test_a_line_beside_maps_has_their_axis_of_steps_and_logarithmic_maps_are_called_so():
    run = timeline(norms=9)
    run = replace(run, numbers={**run.numbers, "spread": 10.0 ** np.arange(36).reshape(4, 9)})
    figure = plot_timeline(run)
    drawn = panels(figure)
    last = drawn["largest |x|"]
    assert drawn["loss"].get_xlim() == last.get_xlim() and list(drawn["loss"].get_xticks()) == list(last.get_xticks())
    logarithmic = [ax for ax in drawn.values() if ax.images and isinstance(ax.images[0].norm, LogNorm)]
    assert drawn["σ: 95th/5th percentile"] in logarithmic
    assert all(ax.get_title(loc="left").endswith(", log") for ax in logarithmic)
    assert "4 records" in figure.get_suptitle()


def test_maps_of_one_number_share_their_colours():
    drawn = panels(plot_timeline(timeline()))
    [(low, high)] = {drawn[f"R² of {curve}"].images[0].get_clim() for curve in ("tanh", "isru")}
    values = [timeline().values(f"r2/{curve}") for curve in ("tanh", "isru")]
    assert (low, high) == (np.min(values), np.max(values))


def test_up_to_four_sites_are_lines():
    run = timeline(norms=3)
    drawn = panels(plot_timeline(run))
    assert not any(ax.images for ax in drawn.values())
    for place, line in enumerate(drawn["largest |x|"].lines):
        np.testing.assert_array_equal(line.get_xdata(), [0, 50, 100, 400])
        np.testing.assert_array_equal(line.get_ydata(), run.values("largest")[:, place])
    np.testing.assert_allclose(drawn["loss"].lines[0].get_ydata(), [2, 1.95, 1.9, 1.6])


@pytest.mark.parametrize(("steps", "far_apart"), [((0, 100, 200, 300), True), ((0, 1, 2, 400), False)])
def test_ticks_and_markers_are_at_the_probed_steps(steps, far_apart):
    figure = plot_timeline(timeline(steps, norms=1))
    assert "blocks.0.norm" in figure.get_suptitle() and not figure.legends  # one line needs no legend
    for ax in panels(figure).values():
        assert {line.get_marker() for line in ax.lines} == {"o"}
        assert (list(ax.get_xticks()) == list(steps)) == far_apart
        low, high = ax.get_xlim()
        assert low < steps[0] and steps[-1] < high  # no line ends on an edge


def test_functions_have_alpha_beside_1_over_std_and_medians_of_saturated_shares():
    run = timeline(norms=2, functions=5)
    drawn = panels(plot_timeline(run))
    assert len(drawn["α and 1/std(x)"].lines) == 8  # of four functions
    product = drawn["α·std(x)"].images[0].get_array()
    assert product.mask[:2].all() and not product.mask[2:].any()  # norms have none
    expected = run.values("module_alpha")[:, 2:] / run.values("inverse_std")[:, 2:]
    np.testing.assert_allclose(product[2:, 0], expected[0])
    medians = [line.get_ydata() for line in drawn["saturated pairs [%]"].lines]
    expected = [100 * np.median(run.values(f"beyond_{end}")[:, 2:], axis=1) for end in (1, 2, 3)]
    np.testing.assert_allclose(medians, expected)
    assert "R² of tanh" in drawn and drawn["R² of tanh"].images[0].get_array().mask[2:].all()


def test_s_curves_are_the_fits_of_each_step_from_dark_to_light():
    run = timeline(tuple(range(0, 5000, 50)), norms=9)
    figure = plot_scurves_by_step(run)
    drawn = panels(figure)
    assert len(drawn) == 4
    lines = drawn["8.norm"].lines
    assert len(lines) == 10
    brightness = [sum(np.array(line.get_color()[:3]) * (0.2126, 0.7152, 0.0722)) for line in lines]
    assert (np.diff(brightness) > 0).all()
    for record in (0, -1):
        amplitude, alpha, shift = (run.values(f"{name}/tanh")[record, 8] for name in ("amplitude", "alpha", "shift"))
        line = lines[record]
        x = line.get_xdata()
        assert (x[0], x[-1]) == (-5, 7)
        np.testing.assert_allclose(line.get_ydata(), amplitude * np.tanh(alpha * x + shift), rtol=1e-12)


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A norm whose tokens have one mean and σ, so that its pairs are on one line, and a function behind it."""
    folder = tmp_path_factory.mktemp("probed")
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = 3 * (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, correction=0) + 1.5
    network = nn.Sequential(nn.LayerNorm(8), normscope.DyT(8))
    probe = normscope.Probe(network, x.float(), every=1, path=folder / "run.jsonl", keep=folder / "kept")
    for _ in range(3):
        with torch.no_grad():
            network[1].alpha += 0.25
        probe.step()
    return normscope.load_timeline(folder / "run.jsonl")


def test_pairs_that_do_not_bend_are_their_own_line(probed):
    norm, _ = panels(plot_scurves_by_step(replace(probed, captures=None))).values()
    for line in norm.lines:
        assert line.get_linestyle() == "--"
        # The norm's own output, (x − mean)/σ, by the binned sums: exact to float32's rounding of x and y.
        np.testing.assert_allclose(line.get_ydata(), (line.get_xdata() - 1.5) / 3, atol=1e-5)


def test_kept_captures_give_the_conditional_mean(probed):
    _, function = panels(plot_scurves_by_step(probed)).values()
    for line, alpha in zip(function.lines, (0.75, 1.0, 1.25), strict=True):
        x, y = line.get_xdata(), line.get_ydata()
        assert line.get_linestyle() == "-" and np.isfinite(y).sum() > 5
        # A point averages 32 pairs or more on a twentieth of the axis: E tanh is off tanh E by the curvature.
        np.testing.assert_allclose(y, np.tanh(alpha * x), atol=0.01)


def test_a_run_of_one_record_has_points_and_one_without_numbers_is_refused(tmp_path):
    one = timeline((7,), norms=2, functions=7)
    for plot in (plot_timeline, plot_scurves_by_step):
        normscope.figures.save_figure(plot(one), tmp_path / "one.png", one.about)
    norms = timeline((7,), norms=2)
    with pytest.raises(DataError, match="nothing to draw"):
        plot_timeline(replace(norms, losses=np.array([np.nan]), numbers={}))
    [line] = panels(plot_timeline(one))["loss"].lines
    assert line.get_marker() == "o"


def test_a_timeline_is_drawn_identically_from_its_file(tmp_path):
    read = normscope.load_timeline(written(tmp_path / "run.jsonl"))
    ours, theirs = (panels(plot_timeline(each))["α of tanh"].images[0].get_array() for each in (timeline(), read))
    np.testing.assert_allclose(theirs, ours, rtol=5e-6)  # six digits
