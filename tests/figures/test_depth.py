"""Fits over the depth, heat maps of planted massive activations, and curves: artists against their data."""

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.errors import DataError, UsageError
from normscope.figures.depth import ALPHAS, plot_curves, plot_depth, plot_tails, shares_of, spread
from normscope.fits.curves.known import BUILT_IN, CURVES


def noise():
    x = torch.randn(8, 40, 32, generator=torch.Generator().manual_seed(0))
    return x * torch.exp(torch.randn(8, 40, 1, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def seen():
    model = nn.Module()
    blocks = [nn.ModuleDict({"norm1": nn.LayerNorm(32), "norm2": nn.LayerNorm(32)}) for _ in range(3)]
    model.blocks = nn.ModuleList(blocks)
    model.forward = lambda x: [
        block[kind](x * (i + 1) * (3 if kind == "norm2" else 1)) for i, block in enumerate(blocks) for kind in block
    ]
    return normscope.capture(model, [noise()], about={"model": "net", "weights": "random weights", "data": "noise"})


@pytest.fixture(scope="module")
def fits(seen):
    return normscope.fit(seen, "tanh,isru")


def test_a_line_a_kind_of_site_and_a_row_a_number(seen, fits):
    figure = plot_depth(seen, fits)
    axes = np.array(figure.axes).reshape(4, 2)
    assert [ax.get_title() for ax in axes[0]] == ["tanh", "isru"]
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ["A", "α", "R²", "α"]
    for column, curve in enumerate(("tanh", "isru")):
        for row, value in enumerate((lambda f: f.amplitude, lambda f: f.alpha, lambda f: f.r2)):
            lines = [line for line in axes[row, column].lines if line.get_marker() in "os"]
            for line, kind in zip(lines, ("norm1", "norm2"), strict=True):
                own = [fit for fit in fits if fit.curve == curve and fit.site.endswith(kind)]
                assert list(line.get_ydata()) == [value(fit) for fit in own]
                assert list(line.get_xdata()) == [i for i, site in enumerate(seen.sites) if site.name.endswith(kind)]
    ceilings = [line for line in axes[2, 0].lines if line.get_linestyle() == ":"]
    assert sorted(y for line in ceilings for y in line.get_ydata()) == sorted(
        fit.r2_ceiling for fit in fits if fit.curve == "tanh"
    )
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["blocks.*.norm1", "blocks.*.norm2"]


def test_alpha_stands_against_one_over_the_spread_of_the_input(seen, fits):
    # float32 inputs, and a float64 sum of their squares by bin
    assert spread(seen.stats["blocks.0.norm1"]) == pytest.approx(float(noise().double().std(correction=0)), rel=1e-6)
    axes = np.array(plot_depth(seen, fits).axes).reshape(4, 2)
    points = [line.get_xydata() for line in axes[3, 0].lines if line.get_marker() in "os"]
    for own, kind in zip(points, ("norm1", "norm2"), strict=True):
        of_kind = [fit for fit in fits if fit.curve == "tanh" and fit.site.endswith(kind)]
        np.testing.assert_allclose(own[:, 0], [1 / spread(seen.stats[fit.site]) for fit in of_kind])
        np.testing.assert_allclose(own[:, 1], [fit.alpha for fit in of_kind])
    assert "1 / std" in axes[3, 0].get_xlabel()


def test_what_is_not_told_is_left_out_and_what_is_none_said():
    model = nn.Sequential(nn.LayerNorm(8))
    token = torch.tensor([[1.0, -1, 2, -2, 3, -3, 4, -4]])
    seen = normscope.capture(model, [token.repeat(4, 1)])
    figure = plot_depth(seen, normscope.fit(seen, "tanh"))
    amplitude, alpha, r2, against = figure.axes
    assert [len(ax.lines[0].get_xdata()) for ax in (amplitude, alpha, r2)] == [0, 0, 1]  # straight
    assert [text.get_text() for text in against.texts] == ["no α is told"]
    with pytest.raises(DataError, match="no fit of a site"):
        plot_depth(seen, [])


@pytest.fixture(scope="module")
def massive():
    model = nn.Module()
    model.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(3))

    def forward(x):
        massive = x.clone()
        massive[:, 0, 7] = 3000
        return [norm(one) for norm, one in zip(model.norms, (x, massive, massive), strict=True)]

    model.forward = forward
    x = torch.randn(20, 9, 48, generator=torch.Generator().manual_seed(0))
    return normscope.capture(model, [x], about={"model": "net", "weights": "none", "data": "noise"}), x


def test_a_column_holds_its_sites_shares_and_massive_ones_are_named(massive):
    capture, x = massive
    figure = plot_tails(capture, normscope.norm_cards(capture))
    channels, tokens = figure.axes[:2]
    image = channels.images[0].get_array()
    squares = (x.double() ** 2).sum((0, 1))
    np.testing.assert_allclose(image[:, 0], squares / squares.sum(), rtol=1e-6)  # float32 inputs
    for column in range(3):
        np.testing.assert_allclose(image[:, column], shares_of(capture, f"norms.{column}"))
    assert [text.get_text() for text in channels.texts if text.get_text() != "×"] == ["7"]
    assert [text.xy[0] for text in channels.texts if text.get_text() == "×"] == [1, 2]  # the sites that have them
    assert any("massive activations" in text.get_text() for text in figure.texts)
    assert tokens.get_xlabel() == "norm site, in the order of calls"


def test_tokens_of_largest_x_are_counted_by_position(massive):
    capture, _ = massive
    cards = normscope.norm_cards(capture)
    tokens = plot_tails(capture, cards).axes[1]
    image = tokens.images[0].get_array().filled(0)
    assert image.sum(0).tolist() == [16, 16, 16]
    assert image[0, 1] == image[0, 2] == 16  # the planted first token
    assert "0" in [text.get_text() for text in tokens.texts]


def test_wide_sites_show_the_largest_channel_of_each_pixel():
    x = torch.randn(6, 4, 900, generator=torch.Generator().manual_seed(0))
    x[..., 613] *= 50
    capture = normscope.capture(nn.Sequential(nn.LayerNorm(900)), [x])
    channels = plot_tails(capture, normscope.norm_cards(capture), width=5.5).axes[0]
    image = channels.images[0].get_array()
    each = -(-900 // 200)
    assert image.shape[0] == 900 / each and int(np.argmax(image[:, 0])) == 613 // each
    assert image.max() == pytest.approx(shares_of(capture, "0").max())
    assert [text.get_text() for text in channels.texts] == ["613"]


def test_without_a_pair_there_is_nothing_to_draw():
    capture = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.full((2, 8), torch.nan)])
    with pytest.raises(DataError, match="No site holds a pair"):
        plot_tails(capture, normscope.norm_cards(capture))


def shown(figure):
    return [ax for ax in figure.axes if ax.get_visible()]


def test_every_curve_has_a_panel_with_its_formula_and_three_scales():
    figure = plot_curves()
    figure.draw_without_rendering()
    axes = shown(figure)
    assert [ax.get_title(loc="left") for ax in axes] == [curve.name for curve in BUILT_IN]
    for ax, curve in zip(axes, BUILT_IN, strict=True):
        written = " ".join(text.get_text() for text in reversed(ax.texts))
        assert written == f"f(u) = {curve.formula}"
        for line, alpha in zip(ax.lines, ALPHAS, strict=False):
            x = torch.from_numpy(np.asarray(line.get_xdata()))
            np.testing.assert_array_equal(line.get_ydata(), curve.function(alpha * x))
        assert all(text.get_window_extent().y0 >= ax.get_window_extent().y1 for text in ax.texts)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["α = 0.5", "α = 1", "α = 2"]


def test_curves_can_be_chosen_and_made():
    axes = shown(plot_curves("dyt,mine=x/(1+abs(x))", width=5.5))
    assert [ax.get_title(loc="left") for ax in axes] == [CURVES["tanh"].name, "mine"]
    assert axes[1].texts[0].get_text() == "f(u) = u/(1+abs(u))"
    with pytest.raises(UsageError, match="no curve 'tangh'"):
        plot_curves("tangh")
