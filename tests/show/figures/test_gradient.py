"""Artists of the gradient figure against autograd and the raw pairs."""

import matplotlib.colors
import matplotlib.text
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.collections import PathCollection
from torch import nn
from torch.func import jacrev, vmap

import normscope
from normscope.fits.gradient import drawn_jacobians, gradient
from normscope.show.figures.gradient import plot_gradient
from normscope.show.figures.sheet import save_figure
from normscope.show.figures.style import STYLES

NAMES = ("layer", "group", "rms")


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 30, 64, generator=generator) * torch.exp(torch.randn(8, 30, 1, generator=generator))
    x[..., 5] *= 30
    return x


@pytest.fixture(scope="module")
def seen(inputs):
    model = nn.ModuleDict({"layer": nn.LayerNorm(64), "group": nn.GroupNorm(2, 30), "rms": nn.RMSNorm(64)})
    model.forward = lambda x: [norm(x) for norm in model.values()]
    about = {"model": "odd$name_{", "weights": "random weights, seed 0", "data": "noise & <more>"}
    return normscope.capture(model, [inputs], about=about, diagonal=True)


@pytest.fixture(scope="module")
def fits(seen):
    return normscope.fit(seen)


@pytest.fixture(scope="module")
def figure(seen, fits):
    return plot_gradient(seen, fits)


def line_of(ax, colour):
    """x and y of the line of a colour."""
    [line] = [line for line in ax.lines if matplotlib.colors.same_color(line.get_color(), colour)]
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def panels(figure, place):
    """The two panels of a site."""
    return [figure.axes[place], figure.axes[place + len(NAMES)]]


def heading(ax):
    """The title of a panel, and the words right above it."""
    return [text for text in (ax.get_title(loc="left"), *(text.get_text() for text in ax.texts)) if text]


def test_a_column_a_site_of_two_lines_and_what_is_not_covered_says_why(figure, seen, fits):
    views = gradient(seen, fits)
    for place, view in enumerate(views):
        above, below = panels(figure, place)
        if view.reason:
            assert not above.lines and not above.collections and not below.get_visible()
            assert heading(above)[0] == "group" and f"No closed form: {view.reason}." in said(figure)
            continue
        r2 = {**{f"{curve}′": value for curve, value in view.r2.items()}, "ceiling": view.r2_of_x}
        numbers = [f"{name} {value:.2f}".replace("-", "−") for name, value in r2.items()]
        assert heading(above) == [NAMES[place], "R²", *numbers]
        sign, centre, tail = "σ" if view.centred else "ρ", *map(view.constants.get, ("centre", "tail"))
        assert sorted(heading(below)) == [
            f"{name} ×{getattr(centre, term).ratio:.3g}, tail ×{getattr(tail, term).ratio:.3g}"
            for name, term in ((sign, "scale"), ("√C", "others"))
        ]
    shares = [100 * view.share for view in views if not view.reason]
    assert f"which holds {min(shares):.1f}% to {max(shares):.1f}% of ‖J‖²" in said(figure)


def test_the_curves_derivatives_are_drawn_as_far_as_the_axis(figure, fits):
    above, _ = panels(figure, 0)
    for fit in (fit for fit in fits if fit.site == "layer"):
        x, y = line_of(above, STYLES["light"].looks()[fit.curve][0])
        assert (x[0], x[-1]) == above.get_xlim()
        step = 1e-4 / fit.alpha
        at = torch.as_tensor(x)
        slope = (fit(at + step) - fit(at - step)) / (2 * step)  # right to 1e-8 of the slope at the origin
        np.testing.assert_allclose(y, slope.numpy(), atol=1e-7 * fit.slope)


def test_every_drawn_diagonal_is_a_point(figure, seen):
    above, _ = panels(figure, 2)
    drawn = drawn_jacobians(seen.sites[2], seen.stats["rms"])
    clouds = [collection for collection in above.collections if isinstance(collection, PathCollection)]
    for cloud, x, part in zip(clouds, (drawn.x, drawn.largest_x), (drawn.uniform, drawn.largest), strict=True):
        np.testing.assert_array_equal(cloud.get_offsets().T, np.stack([x.flatten(), part.diagonal.flatten()]))


def test_pairs_beyond_the_axis_are_counted(inputs):
    x = inputs.clone()
    x[:2, 0, 9] = -1e5
    above = plot_gradient(normscope.capture(nn.Sequential(nn.RMSNorm(64)), [x], diagonal=True)).axes[0]
    low, high = above.get_xlim()
    assert int(((x < low) | (x > high)).sum()) == 2 and above.get_xlabel() == "norm input x (2 pairs beyond)"


def test_the_mean_is_that_of_all_pairs(figure, seen, inputs):
    at, mean = line_of(panels(figure, 0)[0], STYLES["light"].ink)

    def off(tokens):
        """Median relative distance of the line from mean slopes, in twenty groups of as many pairs."""
        slopes = vmap(jacrev(lambda row: F.layer_norm(row, (64,))))(tokens.double()).diagonal(dim1=1, dim2=2).flatten()
        x = tokens.flatten().numpy()
        groups = np.array_split(np.argsort(x), 20)
        return np.median([abs(np.interp(x[group], at, mean).mean() / slopes[group].mean() - 1) for group in groups])

    assert off(inputs.flatten(0, 1)) < 0.02
    assert off(seen.stats["layer"].tokens.x) > 0.06


def test_terms_that_curves_hold_constant_are_drawn_by_x(figure, seen):
    _, below = panels(figure, 0)
    assert (below.get_xscale(), below.get_yscale()) == ("log", "log")
    drawn = drawn_jacobians(seen.sites[0], seen.stats["layer"])
    octaves = (2 * drawn.x.abs().log2()).floor()
    groups = [octaves == octave for octave in octaves.unique() if (octaves == octave).sum() >= 32]
    looks = STYLES["light"].channels[1], STYLES["light"].ink
    for values, colour in zip((drawn.uniform.scale[:, None] + 0 * drawn.x, drawn.uniform.others), looks, strict=True):
        truth = [np.median(values[inside].numpy()) for inside in groups]
        np.testing.assert_allclose(line_of(below, colour)[1], truth, rtol=1e-12)


def said(figure):
    texts = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    return " ".join(" ".join(texts).split())


def test_legend_entries_all_differ(figure):
    assert "odd$name_{ · random weights" in said(figure)
    assert "random weights, seed 0" in figure.caption and "noise & <more>" in figure.caption
    [legend] = figure.legends
    looks = {(handle.get_color(), handle.get_linestyle(), handle.get_lw()) for handle in legend.legend_handles}
    assert len(looks) == len(legend.get_texts()) == 5  # the curves are named above the panels, in their colours


def test_odd_sites_are_drawn_too(tmp_path):
    """Tokens of zeros, of one value each, and none at all; and no curve."""
    for x in (torch.zeros(9, 8), torch.ones(9, 8) * torch.arange(9)[:, None], torch.full((9, 8), torch.nan)):
        seen = normscope.capture(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)), [x], diagonal=True)
        figure = plot_gradient(seen, normscope.fit(seen, "tanh"), style="dark")
        save_figure(figure, tmp_path / "odd.svg", seen, 40)
        plot_gradient(seen, ())
