"""The axis of x, and E[y|x] along it, of sums that are made by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.figures.axes import XAxis, mean_line, x_axis
from normscope.figures.scurves import plot


def moments_of(x, y):
    """n, Σx, Σy, … of bins that hold one place of x each."""
    x, y = torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.float64)
    places, which = x.unique(return_inverse=True)
    rows = [torch.ones_like(x), x, y, x * x, x * y, y * y]
    return torch.stack([torch.zeros(len(places), dtype=torch.float64).index_add(0, which, row) for row in rows])


@pytest.fixture(scope="module")
def massive():
    """What large networks have: one channel of one token in a hundred reaches hundreds of times beyond the others."""
    x = torch.randn(8, 100, 64, generator=torch.Generator().manual_seed(0))
    x[:, 0, 7] = 400 + 20 * torch.arange(8.0)
    return normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x])


def panels(figure):
    return [ax for ax in figure.axes if ax.get_visible()]


def test_massive_activations_have_an_asinh_axis_that_says_so(massive):
    figure = plot(massive, normscope.fit(massive))
    for ax in panels(figure):
        assert ax.get_xscale() == "asinh"
        assert not [child for child in ax.child_axes if child.get_xlim()[1] > 64]  # a colour bar, and no inset
        low, high = ax.get_xlim()
        assert high >= 540 and low == -high
        left, right = (ax.transAxes.inverted().transform(ax.transData.transform((x, 0)))[0] for x in (-3, 3))
        assert right - left > 0.2  # that hold 99.7 % of the pairs, in 0.5 % of a linear axis
    assert panels(figure)[-1].get_xlabel() == "norm input x (asinh scale)"
    ticks = [label.get_text() for label in panels(figure)[0].get_xticklabels()]
    assert {"0", "100", "−100"} <= set(ticks)
    linear = plot(massive, xscale="linear")
    assert [ax.get_xscale() for ax in panels(linear)] == ["linear"] * 3
    assert panels(linear)[-1].get_xlabel() == "norm input x"


def test_the_density_stands_where_its_pairs_are_on_an_asinh_axis(massive):
    ax = panels(plot(massive, rows="density"))[0]
    (image,) = ax.images
    counts = image.get_array().filled(0)
    assert counts.sum() == pytest.approx(massive.stats["0"].n_pairs, rel=1e-6)
    assert image.get_transform().contains_branch(ax.transAxes) and image.get_extent() == [0, 1, 0, 1]
    low, high = np.arcsinh(np.array(ax.get_xlim()) / ax.xaxis.get_transform().linear_width)
    share = (np.arcsinh(1 / ax.xaxis.get_transform().linear_width) - low) / (high - low)
    x = np.random.default_rng(0).normal(size=10**6)
    right = counts[:, round(share * counts.shape[1]) :].sum() / counts.sum()
    # A pixel about 1 is 0.02 wide, and a cell of the counts an eighth octave.
    assert right == pytest.approx((x > 1).mean(), abs=0.015)


def test_a_tokens_line_is_bent_as_the_axis_is_and_stays_its_own(massive):
    ax = panels(plot(massive, rows="token"))[0]
    (lines,) = (one for one in ax.collections if hasattr(one, "get_segments"))
    for segment, sigma in zip(lines.get_segments(), lines.get_array(), strict=True):
        assert len(segment) > 20
        slopes = np.diff(segment[:, 1]) / np.diff(segment[:, 0])
        np.testing.assert_allclose(slopes, 1 / sigma, rtol=2e-3)  # samples are kept in float32


def test_auto_is_linear_where_a_tenth_of_the_width_holds_less():
    x = np.concatenate([np.linspace(-1, 1, 980), np.linspace(5, 8, 20)])
    far = np.concatenate([np.linspace(-1, 1, 999), [100.0]])
    near, wide = ([moments_of(x, x)], 8.0), ([moments_of(far, far)], 100.0)
    assert x_axis(*near, "auto").linear_width is None and x_axis(*wide, "linear").linear_width is None
    assert x_axis(*wide, "auto").linear_width == pytest.approx(0.9, abs=0.01)  # nine tenths of the pairs
    assert x_axis(*near, "asinh").linear_width is not None
    with pytest.raises(UsageError, match="no scale of x 'log'"):
        x_axis(*near, "log")


def test_places_are_evenly_apart_on_paper():
    axis = XAxis((-50.0, 50.0), 0.5)
    ax = Figure().subplots()
    axis.set_on(ax, 3.0)
    places = ax.transData.transform(np.stack([axis.evenly(11), np.zeros(11)], 1))[:, 0]
    np.testing.assert_allclose(np.diff(places), np.diff(places)[0], rtol=1e-9)


@pytest.mark.parametrize("inches", [0.9, 1.3, 2.0, 4.0])
def test_ticks_do_not_run_into_one_another(inches):
    figure = Figure(figsize=(inches, 2))
    ax = figure.add_axes((0, 0.3, 1, 0.6))
    ax.tick_params(labelsize=6)
    for reach, linear in ((540.0, 1.2), (9.0, 2.0), (3e5, 0.01), (2.0, 0.05)):
        XAxis((-reach, reach), linear).set_on(ax, inches)
        figure.draw_without_rendering()
        boxes = sorted((t.get_window_extent() for t in ax.get_xticklabels() if t.get_text()), key=lambda box: box.x0)
        assert len(boxes) >= 1
        assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


def test_the_mean_is_not_drawn_across_nearly_empty_bins():
    x = np.concatenate([np.repeat(np.linspace(-1, 1, 101), 10), [40.0] * 50, np.linspace(50, 99, 31)])
    at, mean = mean_line(moments_of(x, 2 * x), XAxis((-100.0, 100.0)), 2.0)
    known = np.isfinite(at)
    np.testing.assert_allclose(mean[known], 2 * at[known])
    assert at[known].max() == 40.0  # and not the 31 pairs beyond
    (gap,) = np.flatnonzero(~known)
    assert abs(at[gap - 1]) < 1.1 and at[gap + 1] == 40.0


def test_every_point_of_the_mean_averages_enough_pairs_nearby():
    generator = np.random.default_rng(0)
    x = generator.standard_t(2, 20_000)
    axis = XAxis((-60.0, 60.0), 0.5)
    at, mean = mean_line(moments_of(x, np.tanh(x)), axis, 2.0)
    at, mean = at[np.isfinite(at)], mean[np.isfinite(mean)]
    assert len(at) > 20
    span = np.ptp(axis.along(np.array(axis.limits))) / 20
    for place, value in zip(at, mean, strict=True):
        near = x[np.abs(axis.along(x) - axis.along(place)) <= span * 1.01]
        assert len(near) >= 32
        assert math.tanh(near.min()) <= value <= math.tanh(near.max())
    assert mean_line(torch.zeros(6, 4, dtype=torch.float64), axis, 2.0)[0].size == 0


@pytest.fixture(scope="module")
def several():
    """Two sites alike, and one whose tokens reach a hundred times farther; of d = 16 and 64, whose bounds differ."""
    model = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(64)])
    model.forward = lambda x: [model[0](x[..., :16]), model[1](3 * x[..., :16]), model[2](100 * x)]
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 40, 64, generator=draw) * torch.exp(0.5 * torch.randn(8, 40, 1, generator=draw))
    return normscope.capture(model, [x])


def by_row(figure, rows=4):
    shown = panels(figure)
    return [shown[row * len(shown) // rows : (row + 1) * len(shown) // rows] for row in range(rows)]


def test_shared_axes_have_one_place_for_one_number_in_every_panel(several):
    fits = normscope.fit(several)
    shared = plot(several, fits, rows="density,token,channel,residual", share_axes=True)
    *of_y, residual = by_row(shared)
    reach = max(float(stats.reach.max()) for stats in several.stats.values())
    assert {ax.get_xlim() for ax in panels(shared)} == {(-1.06 * reach, 1.06 * reach)}
    assert len({ax.get_ylim() for row in of_y for ax in row}) == 1
    low, high = of_y[0][0].get_ylim()
    largest = max(float(stats.tokens.y.abs().max()) for stats in several.stats.values())
    assert high > largest and low == -high
    assert len({ax.get_ylim() for ax in residual}) == 1
    alone = by_row(plot(several, fits, rows="density,token,channel,residual"))[3]
    drawn = [np.abs(np.asarray(line.get_ydata(), dtype=float)).max() for ax in residual for line in ax.get_lines()]
    assert residual[0].get_ylim()[1] == pytest.approx(1.08 * max(drawn))
    assert len({ax.get_ylim() for ax in alone}) == 3  # not without being asked for
    # A number has one place on paper, on the asinh axis that one site calls for.
    assert len({ax.transScale.transform((3.0, 0.0))[0] for ax in panels(shared)}) == 1


def test_shared_colours_stand_for_the_same_in_every_panel(several):
    shared, alone = (plot(several, share_axes=share) for share in (True, False))
    limits = [[ax.images[0].get_clim() for ax in by_row(figure, 3)[0]] for figure in (shared, alone)]
    assert set(limits[0]) == {(0.1, max(float(ax.images[0].get_array().max()) for ax in by_row(shared, 3)[0]))}
    assert len(set(limits[1])) == 3
    sigmas = [{ax.collections[0].norm.vmin for ax in by_row(figure, 3)[1]} for figure in (shared, alone)]
    assert [len(found) for found in sigmas] == [1, 3]
    label = shared.legends[0].get_texts()[0].get_text()
    assert label == "all pairs (log scale, one for all panels)"


def test_nothing_is_enlarged_where_axes_are_shared():
    """Each centre would be enlarged differently, and what looks alike would not be."""
    x = torch.randn(8, 100, 64, generator=torch.Generator().manual_seed(0))
    x[:, :2] *= 12  # tails that reach far, yet over one in a hundred pairs lies in them
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x])
    enlarged, shared = (by_row(plot(seen, rows="density", share_axes=share), 1)[0][0] for share in (False, True))
    assert enlarged.get_xscale() == shared.get_xscale() == "linear"
    assert len(enlarged.child_axes) == 1 and not shared.child_axes


@pytest.mark.parametrize(
    ("look", "scale"),
    [({}, "linear"), ({"share_axes": True}, "asinh"), ({"share_axes": True, "xscale": "linear"}, "linear")],
)
def test_one_site_that_calls_for_an_asinh_axis_gives_it_to_all(several, look, scale):
    assert [ax.get_xscale() for ax in panels(plot(several, rows="token", **look))] == [scale] * 3


def test_the_panels_of_an_overview_share_axes_over_all_networks(several):
    captures = [several.only("0,1"), several.only("2,")]
    shown = [ax for ax in normscope.overview(captures, share_axes=True).axes if ax.images]
    assert len(shown) == 3
    assert len({(ax.get_xlim(), ax.get_ylim(), ax.images[0].get_clim(), ax.get_xscale()) for ax in shown}) == 1
