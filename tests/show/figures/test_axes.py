"""Axes of x and what lies beyond them, against the raw pairs; and E[y|x] of sums that are made by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from artists import shown
from matplotlib.figure import Figure
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.show.figures.axes import XAxis, mean_line, scales_of
from normscope.show.figures.scurves import plot
from normscope.show.figures.style import STYLES


def moments_of(x, y):
    """n, Σx, Σy, … of bins with a single x each."""
    x, y = torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.float64)
    places, which = x.unique(return_inverse=True)
    rows = [torch.ones_like(x), x, y, x * x, x * y, y * y]
    return torch.stack([torch.zeros(len(places), dtype=torch.float64).index_add(0, which, row) for row in rows])


def texts(ax):
    return [text.get_text().replace("\n", " ") for text in ax.texts]


@pytest.fixture(scope="module")
def tokens():
    """Tokens of different scales, and what large networks have: one channel of a few tokens reaches far beyond."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 100, 64, generator=draw) * torch.exp(0.7 * torch.randn(8, 100, 1, generator=draw))
    x[:, 0, 7] = 400 + 20 * torch.arange(8.0)
    return x


@pytest.fixture(scope="module")
def seen(tokens):
    return normscope.capture(nn.Sequential(nn.LayerNorm(64)), [tokens])


def test_a_linear_axis_ends_where_the_pairs_do_and_names_those_beyond(tokens, seen):
    ax, *others = shown(plot(seen))
    assert {other.get_xlim() for other in others} == {ax.get_xlim()}
    assert (ax.get_xscale(), ax.get_xlabel(), others[-1].get_xlabel()) == ("linear", "", "norm input x")
    low, high = ax.get_xlim()
    rest = tokens[tokens < 100]  # without the eight of channel 7 in token 0
    ends = np.array([float(rest.min()), float(rest.max())])
    assert low < ends[0] and high > ends[1]
    assert high - low == pytest.approx(1.06 * np.ptp(ends), rel=2**-5)  # edges of the bins
    assert "8 pairs of token 0 beyond" in texts(ax)
    assert not any("beyond" in text for other in others for text in texts(other))
    assert ax.images[0].get_array().sum() == pytest.approx(tokens.numel() - 8, rel=1e-3)


@pytest.mark.parametrize(("places", "words"), [((0, 1), "of channel 7 "), ((0,), "of token 0 "), ((1, 3), "")])
def test_pairs_beyond_are_of_a_token_or_of_a_channel_or_of_several(tokens, places, words):
    x = tokens.clone()
    x[:, 0, 7] = 0
    for place in places:
        x[:, place, 7 if words.startswith("of channel") else 7 + place] = 400.0
    ax = shown(plot(normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x]), color="density"))[0]
    assert f"{8 * len(places)} pairs {words}beyond" in texts(ax)


@pytest.mark.parametrize("side", [-1, 1])
def test_an_axis_is_as_long_on_either_side_as_the_pairs_reach(side):
    x = side * torch.rand(8, 50, 64, generator=torch.Generator().manual_seed(0)) * 5
    seen = normscope.capture(nn.Sequential(nn.RMSNorm(64)), [x])
    fits = normscope.fit(seen, "tanh")
    ax = shown(plot(seen, fits, color="density"))[0]
    for low, high, end in ((*ax.get_xlim(), 5), (*ax.get_ylim(), 2)):  # y = x over an RMS near 5/√3
        near, far = sorted((low, high), key=abs)
        assert abs(near) < 0.05 * abs(far) and end * 0.8 < side * far < end * 1.25
    (line,) = (line for line in ax.get_lines() if line.get_color() == STYLES["light"].looks()["tanh"][0])
    assert min(line.get_xdata()) >= x.min() and max(line.get_xdata()) <= x.max()  # no curve without pairs


def test_every_pair_is_on_an_asinh_axis(tokens, seen):
    ax, *others = shown(plot(seen, color="density,channel", xscale="asinh"))
    assert {panel.get_xscale() for panel in (ax, *others)} == {"asinh"}
    assert others[-1].get_xlabel() == "norm input x (asinh scale)"
    low, high = ax.get_xlim()
    assert low < float(tokens.min()) and high > float(tokens.max())
    assert ax.images[0].get_array().sum() == pytest.approx(tokens.numel(), rel=1e-6)
    assert not any("beyond" in text for text in texts(ax))


def test_a_spike_on_one_side_leaves_no_empty_part_of_the_axis():
    x = torch.randn(12, 6, 16, generator=torch.Generator().manual_seed(0))
    x[:, 0, 3] = 3000
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(16)), [x])
    axis = scales_of([(seen.sites[0], seen.stats["0"])], "asinh").x
    start, low, high, end = axis.along(np.array([axis.limits[0], float(x.min()), float(x.max()), axis.limits[1]]))
    assert (low - start) + (end - high) < 0.1 * (end - start)


def test_unknown_scales_are_refused(seen):
    with pytest.raises(UsageError, match="no scale of x 'auto'"):
        plot(seen, xscale="auto")


def test_straight_fits_are_marked():
    x = nn.functional.layer_norm(torch.randn(8, 50, 64, generator=torch.Generator().manual_seed(0)), (64,))
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x])
    fits = normscope.fit(seen, "tanh")
    assert fits[0].curve == "tanh" and fits[0].straight
    ax = shown(plot(seen, fits, color="density"))[0]
    assert ax.get_xlim()[1] > float(x.max())
    assert "straight" in texts(ax)


def test_a_curve_without_a_slope_whose_bend_no_pair_reaches_is_marked():
    x = nn.functional.layer_norm(torch.randn(8, 50, 64, generator=torch.Generator().manual_seed(0)), (64,))
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x])
    fits = normscope.fit(seen, "mine=x**3")
    for labels in ("short", "full"):
        assert "A and α not identified" in " ".join(texts(shown(plot(seen, fits, color="density", labels=labels))[0]))


def test_a_tokens_line_bends_as_the_axis_does_and_stays_its_own(seen):
    ax = shown(plot(seen, color="token", xscale="asinh"))[0]
    (lines,) = (one for one in ax.collections if hasattr(one, "get_segments"))
    for segment, sigma in zip(lines.get_segments(), lines.get_array(), strict=True):
        assert len(segment) > 20
        slopes = np.diff(segment[:, 1]) / np.diff(segment[:, 0])
        np.testing.assert_allclose(slopes, 1 / sigma, rtol=2e-3)  # samples are kept in float32


AXES = [XAxis((-50.0, 50.0)), XAxis((-50.0, 50.0), 0.5)]


@pytest.mark.parametrize("axis", AXES, ids=["linear", "asinh"])
def test_places_are_evenly_apart_on_paper(axis):
    ax = Figure().subplots()
    axis.set_on(ax, 3.0)
    places = ax.transData.transform(np.stack([axis.evenly(11), np.zeros(11)], 1))[:, 0]
    np.testing.assert_allclose(np.diff(places), np.diff(places)[0], rtol=1e-9)
    np.testing.assert_allclose(axis.at(axis.along(axis.evenly(11))), axis.evenly(11))


@pytest.mark.parametrize("inches", [0.9, 1.3, 2.0, 4.0])
def test_ticks_do_not_run_into_one_another(inches):
    figure = Figure(figsize=(inches, 2))
    ax = figure.add_axes((0, 0.3, 1, 0.6))
    ax.tick_params(labelsize=6)
    for reach, linear in ((540.0, 1.2), (9.0, None), (9.0, 2.0), (3e5, 0.01), (2.0, 0.05), (0.03, None)):
        XAxis((-reach, reach), linear).set_on(ax, inches)
        figure.draw_without_rendering()
        shown = [tick for tick in ax.xaxis.get_major_ticks() if abs(tick.get_loc()) <= reach]
        boxes = sorted((tick.label1.get_window_extent() for tick in shown), key=lambda box: box.x0)
        assert len(boxes) >= 1
        assert all(one.x1 < other.x0 for one, other in pairwise(boxes)), (reach, linear)


def test_the_mean_is_not_drawn_across_nearly_empty_bins():
    x = np.concatenate([np.repeat(np.linspace(-1, 1, 101), 10), [40.0] * 50, np.linspace(50, 99, 31), [300.0] * 99])
    at, mean = mean_line(moments_of(x, 2 * x), XAxis((-100.0, 100.0)), 2.0)
    finite = np.isfinite(at)
    np.testing.assert_allclose(mean[finite], 2 * at[finite])
    assert at[finite].max() == 40.0  # neither the 31 pairs beyond nor those off the axis
    (gap,) = np.flatnonzero(~finite)
    assert abs(at[gap - 1]) < 1.1 and at[gap + 1] == 40.0


def test_every_point_of_the_mean_averages_enough_pairs_nearby():
    x = np.random.default_rng(0).standard_t(2, 20_000)
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


def test_shared_axes_are_the_widest_of_all_panels(several):
    fits, rows = normscope.fit(several, "tanh"), "density,token,residual"
    shared, alone = (shown(plot(several, fits, color=rows, share_axes=share)) for share in (True, False))
    for number, side in ((0, min), (1, max)):
        assert {ax.get_xlim()[number] for ax in shared} == {side(ax.get_xlim()[number] for ax in alone)}
        assert {ax.get_ylim()[number] for ax in shared[:6]} == {side(ax.get_ylim()[number] for ax in alone[:6])}
    assert len({ax.get_ylim() for ax in shared[6:]}) == 1 and len({ax.get_ylim() for ax in alone[6:]}) == 3
    greys, sigmas = (
        [{limits(ax) for ax in of_figure} for of_figure in (shared[first : first + 3], alone[first : first + 3])]
        for first, limits in ((0, lambda ax: ax.images[0].get_clim()), (3, lambda ax: ax.collections[0].norm.vmin))
    )
    assert [len(distinct) for distinct in (*greys, *sigmas)] == [1, 3, 1, 3]


def test_the_panels_of_an_overview_share_axes_over_all_networks(several):
    captures = [several.only("0,1"), several.only([2])]
    overview = [ax for ax in normscope.figures.overview(captures, share_axes=True).axes if ax.images]
    assert len(overview) == 3
    assert len({(ax.get_xlim(), ax.get_ylim(), ax.images[0].get_clim(), ax.get_xscale()) for ax in overview}) == 1


def test_the_mean_of_dense_bins_is_drawn_between_sparse_ones():
    x = torch.tensor([0, 0.4, 0.8, 1.2, 5, 5.4, 5.8], dtype=torch.float64)
    n = torch.tensor([5, 5, 5000, 5, 5, 5, 5000], dtype=torch.float64)
    at, mean = mean_line(torch.stack([n, n * x, n * x / 2, n, n, n]), XAxis((-0.2, 10)), 2.0)
    assert at[[0, 2]] == pytest.approx([0.8, 5.8], abs=0.001) and np.isnan(at[1])
    assert mean[[0, 2]] == pytest.approx(at[[0, 2]] / 2)
