"""Artists of the figure of a comparison against captures and fits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.show.figures.comparison import plot_comparison, told_apart

ABOUT = {"model": "net$x_{", "weights": "random", "data": "noise"}
NAMES = ["n0", "n1", "n2", "n3"]


def captured(names=NAMES, scale=1.0, spread=0.7, **about):
    """Norm by norm the input grows, so that α falls; without spread the norms are straight."""
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.LayerNorm(8))
    model.forward = lambda x: [norm(x * scale * (i + 1)) for i, norm in enumerate(model.children())]
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, 8, generator=draw)
    if not spread:
        x = x - x.mean(-1, keepdim=True)
        x = x / x.std(-1, keepdim=True)
    return normscope.capture(
        model, [x * torch.exp(spread * torch.randn(24, 6, 1, generator=draw))], about={**ABOUT, **about}
    )


def drawn(captures, curves="tanh", **options):
    fits = [normscope.fit(capture, curves) for capture in captures]
    return fits, plot_comparison(captures, fits, **options)


def series(ax):
    """The lines of the captures, without intervals and ceilings: x and y of each."""
    return [np.asarray(line.get_xydata()).T for line in ax.lines if line.get_lw() == 0.9 and line.get_ls() == "-"]


def said(ax):
    return [text.get_text() for text in ax.texts]


@pytest.fixture(scope="module")
def pair():
    captures = [captured(weights="step 1"), captured(scale=3, weights="step 2")]
    return captures, *drawn(captures, "tanh,isru")


def test_each_curve_has_a_column_and_each_number_a_row(pair):
    _, fits, figure = pair
    values = (lambda f: f.alpha, lambda f: f.slope, lambda f: f.r2_cv)
    for axes, value in zip(np.array(figure.axes).reshape(3, 2), values, strict=True):
        for ax, curve in zip(axes, ("tanh", "isru"), strict=True):
            for (x, y), of_capture in zip(series(ax), fits, strict=True):
                assert list(y) == [value(fit) for fit in of_capture if fit.curve == curve]
                assert np.allclose(np.round(x), [0, 1, 2, 3])
    assert [ax.get_title() for ax in figure.axes[:2]] == ["tanh", "isru"]
    assert [figure.axes[n].get_ylabel() for n in (0, 2, 4)] == ["α, log", "slope at 0, log", "held-out R²"]


def test_the_legend_names_differences_and_the_heading_what_captures_share(pair):
    _, _, figure = pair
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["1  step 1", "2  step 2", "ceiling: held-out R² of the best function of x", "95% interval"]
    assert figure.get_suptitle() == "net$x_{ · sites matched by name"
    assert figure.texts[-1].get_text() == "data: noise"
    parts = [captured(data=f"noise · timestep {n}", part=f"timestep {n}") for n in (980, 0)]
    assert told_apart(parts)[0] == ["1  timestep 980", "2  timestep 0"]
    assert drawn(parts)[1].texts[-1].get_text().endswith("data: noise")
    assert told_apart([captured(), captured()])[0] == ["1  24 samples", "2  24 samples"]
    others = [captured(), captured(model="other", data="a long text"), captured(model="third", data="a long text")]
    assert told_apart(others)[0] == ["1  net$x_{", "2  other", "3  third"]  # which suffices
    assert drawn(others)[1].texts[-1].get_text() == "1: noise; 2: a long text; 3: a long text\nweights: random"


def test_a_straight_fit_is_open_and_has_no_point_in_the_panel_of_alpha():
    captures = [captured(), captured(spread=0, data="a sphere")]
    fits, figure = drawn(captures)
    assert all(fit.straight for fit in fits[1])
    bent, straight = series(figure.axes[0])
    assert np.isfinite(bent).all() and np.isnan(straight[1]).all()
    for ax in figure.axes:
        empty = [line for line in ax.lines if line.get_marker() == "s" and line.get_mfc() == ax.get_facecolor()]
        assert [round(line.get_xdata()[0]) for line in empty] == ([] if ax is figure.axes[0] else [0, 1, 2, 3])
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "open: straight, so no A and α" in legend


def test_other_networks_share_their_relative_depth():
    captures = [captured(), captured([f"layer{n}" for n in range(7)], model="other", data="noise")]
    _, figure = drawn(captures)
    (short, _), (long, _) = series(figure.axes[0])
    # The lines are moved aside by less than a tenth of the distance of two sites.
    assert np.allclose(short, [0, 1 / 3, 2 / 3, 1], atol=0.1 / 3) and np.allclose(long, np.arange(7) / 6, atol=0.1 / 6)
    assert figure.axes[-1].get_xlabel() == "relative depth of the norm site"
    assert "placement and relative depth" in figure.get_suptitle()


def test_a_panel_without_values_is_marked():
    straight = drawn([captured(NAMES[:2], spread=0), captured(NAMES[:2], spread=0, scale=2)])[1]
    assert [said(ax) for ax in straight.axes] == [["no α\nidentified"], [], []]
    free = drawn([captured(NAMES[:2]), captured(NAMES[:2], scale=2)], "free")[1]
    assert [said(ax) for ax in free.axes] == [["no α\nidentified"], ["no slope at 0"], []]


def test_many_curves_go_into_even_rows_with_one_scale():
    captures = [captured(["n0", "n1"]), captured(["n0", "n1"], scale=2)]
    fits = [
        [replace(fit, curve=f"curve {n}", alpha=fit.alpha * (n + 1)) for n in range(6) for fit in of_capture]
        for of_capture in (normscope.fit(capture, "tanh") for capture in captures)
    ]
    titled = {ax.get_title(): ax for ax in plot_comparison(captures, fits).axes if ax.get_title()}
    assert list(titled) == [f"curve {n}" for n in range(6)]
    assert [ax.get_subplotspec().rowspan.start for ax in titled.values()] == [0] * 3 + [3] * 3
    [(low, high)] = {ax.get_ylim() for ax in titled.values()}
    alphas = [y for ax in titled.values() for _, values in series(ax) for y in values]
    assert low < min(alphas) and max(alphas) < high


def test_point_wise_functions_have_a_column_and_a_row_of_saturated_shares():
    x = torch.randn(24, 6, 8, generator=torch.Generator().manual_seed(0))

    def step(number):
        model = nn.Sequential(nn.LayerNorm(8), *(normscope.DyT(8, alpha=0.5 * number * (n + 1)) for n in range(2)))
        return normscope.capture(model, [3 * x], about={**ABOUT, "weights": f"step {number}"})

    captures = [step(1), step(2)]
    _, figure = drawn(captures)
    axes = np.array(figure.axes).reshape(4, 2)
    assert [ax.get_title() for ax in axes[0]] == ["tanh", "module's f"]
    assert [ax.get_ylabel().removesuffix(", log") for ax in axes[:, 0]] == [
        "α",
        "slope at 0",
        "held-out R²",
        "saturated",
    ]
    for number, capture in enumerate(captures):
        records = normscope.saturation(capture)
        for row, values in ((0, [0.5, 1]), (1, [0.5, 1]), (3, [each.saturated for each in records])):
            places, drawn_values = series(axes[row, 1])[number]
            assert np.round(places).tolist() == [1, 2]
            assert drawn_values == pytest.approx(np.array(values) * (number + 1 if row < 2 else 1))
    assert said(axes[2, 1]) == ["no held-out R²"]


@pytest.mark.parametrize(("n_captures", "message"), [(1, "two or more captures"), (2, "the fits of 1")])
def test_refusals(pair, n_captures, message):
    captures, fits, _ = pair
    with pytest.raises(UsageError, match=message):
        plot_comparison(captures[:n_captures], fits[:1])
