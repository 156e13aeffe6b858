"""What the gradient figure holds is read from its artists."""

import matplotlib.colors
import matplotlib.text
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.collections import PathCollection, PolyCollection
from torch import nn
from torch.func import jacrev, vmap

import normscope
from normscope.figures.gradient import plot_gradient
from normscope.figures.scurves import save_figure
from normscope.figures.style import STYLES
from normscope.fits.gradient import gradient

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


def shown(figure):
    return [ax for ax in figure.axes if ax.get_visible()]


def texts(ax):
    return [text.get_text() for text in ax.findobj(matplotlib.text.Text) if text.get_text()]


def line_of(ax, colour, width):
    """The line of a colour and width, as x and y."""
    [line] = [
        line for line in ax.lines if matplotlib.colors.same_color(line.get_color(), colour) and line.get_lw() == width
    ]
    return line.get_xdata(), line.get_ydata()


def test_a_column_a_site_and_what_is_not_covered_says_why(figure, seen):
    axes = shown(figure)
    assert len(axes) == 5  # two a site, and one that declines
    titles = [ax.get_title(loc="left") for ax in axes if ax.get_title(loc="left")]
    assert titles == [
        "0  layer\nLayerNorm d=64\n64 of 240 tokens",
        "1  group\nGroupNorm d=960\n16 tokens",
        "2  rms\nRMSNorm d=64\n64 of 240 tokens",
    ]
    [declined] = [ax for ax in axes if "group" in ax.get_title(loc="left")]
    assert not declined.lines and not declined.collections
    [reason] = [view.reason for view in gradient(seen) if view.reason]
    assert f"No closed form: {reason}." in " ".join(texts(declined)).replace("\n", " ")


def test_the_curves_derivatives_are_drawn_where_they_are(figure, fits):
    ax = shown(figure)[0]
    for found in (one for one in fits if one.site == "layer"):
        x, y = line_of(ax, STYLES["light"].looks()[found.curve][0], 1.1)
        assert x[0] == pytest.approx(ax.get_xlim()[0]) and x[-1] == pytest.approx(ax.get_xlim()[1])
        step = 1e-4 / found.alpha
        at = torch.as_tensor(np.asarray(x))
        slope = (found(at + step) - found(at - step)) / (2 * step)  # right to 1e-8 of the slope at the origin
        np.testing.assert_allclose(np.asarray(y), slope.numpy(), atol=1e-7 * found.slope)


def test_every_drawn_diagonal_is_a_point(figure, seen):
    tokens, largest = seen.stats["rms"].tokens, seen.stats["rms"].largest
    [ax] = [ax for ax in shown(figure) if "rms" in ax.get_title(loc="left")]
    clouds = [collection for collection in ax.collections if isinstance(collection, PathCollection)]
    for cloud, drawn in zip(clouds, (tokens, largest), strict=True):
        x, slope = np.asarray(cloud.get_offsets()).T
        np.testing.assert_array_equal(x, drawn.x.flatten().numpy())
        y = drawn.y.double()
        truth = drawn.rstd.double()[:, None] * (1 - y**2 / 64)  # y and rstd are float32
        np.testing.assert_allclose(slope, truth.flatten().numpy(), rtol=1e-5, atol=1e-5 * float(truth.max()))
    low, high = ax.get_xlim()
    assert low < float(largest.x.min()) and float(largest.x.max()) < high


def test_the_mean_is_that_of_all_pairs(figure, seen, inputs):
    at, mean = map(np.asarray, line_of(shown(figure)[0], STYLES["light"].ink, 1.4))
    between = np.concatenate([[-np.inf], (at[1:] + at[:-1]) / 2, [np.inf]])

    def off(tokens):
        slopes = vmap(jacrev(lambda row: F.layer_norm(row, (64,))))(tokens.double()).diagonal(dim1=1, dim2=2).flatten()
        group = np.digitize(tokens.flatten().numpy(), between) - 1
        means = np.bincount(group, slopes.numpy(), len(at)) / np.maximum(np.bincount(group, minlength=len(at)), 1)
        return np.median(np.abs(means / mean - 1))

    # Groups do not end half-way between their means, as those here do.
    assert off(inputs.flatten(0, 1)) < 0.02
    assert off(seen.stats["layer"].tokens.x) > 0.06


def test_what_is_held_constant_is_drawn_by_x(figure, seen):
    ax = shown(figure)[3]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    x, y = (seen.stats["layer"].tokens.x.double().numpy(), seen.stats["layer"].tokens.y.double().numpy())
    sigma = np.sqrt(x.var(1, keepdims=True) + 1e-5) + 0 * x
    t = (x - x.mean(1, keepdims=True)) * 64 / 63
    root = np.sqrt(t**2 * (63 / y**2 - 1) * 63) / 64  # (22) and (28) of docs/theory.md
    octaves = np.floor(2 * np.log2(np.abs(x)))
    groups = [octaves == octave for octave in np.unique(octaves) if (octaves == octave).sum() >= 32]
    for values, curve in ((sigma, "tanh"), (root, "isru")):
        _, drawn = line_of(ax, STYLES["light"].looks()[curve][0], 1.2)
        truth = [np.median(values[inside]) for inside in groups]
        np.testing.assert_allclose(np.asarray(drawn), truth, rtol=1e-4)  # C is a difference, of float32's y


def test_the_notes_say_what_the_view_says(figure, seen, fits):
    view = gradient(seen, fits)[0]
    above, below = shown(figure)[0], shown(figure)[3]
    written = texts(above)
    assert f"diagonal: {100 * view.share:.1f} % of ‖J‖²" in " | ".join(written)
    low, high = view.intervals["tanh"]
    assert f"tanh's derivative  R² {view.r2['tanh']:.2f} ± {(high - low) / 2:.2g}".replace("-", "−") in written
    assert f"best f(x)  R² {view.r2_of_x:.2f}" in " | ".join(written)
    tail = view.constants["tail"]
    assert f"p84/p16 in the tail:  σ {tail.scale.ratio:.3g}  √C {tail.others.ratio:.3g}" in texts(below)


def test_notes_stand_above_the_panels_and_one_range_alone_is_filled(figure):
    figure.draw_without_rendering()
    for ax in (ax for ax in shown(figure) if ax.axison):
        assert all(text.get_window_extent().y0 >= ax.get_window_extent().y1 for text in ax.texts)
    below = shown(figure)[3]
    assert len([one for one in below.collections if isinstance(one, PolyCollection)]) == 1


def test_the_figure_says_what_it_shows(figure):
    heading = f"{figure.get_suptitle()} {figure.texts[-1].get_text()}"
    assert "odd$name_{" in heading and "random weights, seed 0" in heading and "noise & <more>" in heading
    [legend] = figure.legends
    assert len(legend.get_texts()) == 9


def test_odd_sites_are_drawn_too(tmp_path):
    """Tokens of zeros, of one value each, and none at all; and no curve."""
    for x in (torch.zeros(9, 8), torch.ones(9, 8) * torch.arange(9)[:, None], torch.full((9, 8), torch.nan)):
        seen = normscope.capture(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)), [x], diagonal=True)
        figure = plot_gradient(seen, normscope.fit(seen, "tanh"), style="dark")
        save_figure(figure, tmp_path / "odd.svg", seen, 40)
        plot_gradient(seen, ())
