"""Fits over the depth, maps of planted massive activations, and curves: figures against their data."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from artists import legend_of, shown
from torch import nn

import normscope
from normscope.curves.known import BUILT_IN, CURVES
from normscope.errors import DataError, UsageError
from normscope.fits.saturation import spread
from normscope.fits.spikes import stream_of
from normscope.show.figures.curves import ALPHAS, plot_curves
from normscope.show.figures.depth import plot_depth, plot_saturation
from normscope.show.figures.style import STYLES
from normscope.show.figures.tails import plot_tails, shares_of

MANY = "over 10 times the mean share"


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


def series(ax, marker, colour=None):
    """x and y of the points of a marker and colour, by x."""
    points = [line for line in ax.lines if line.get_marker() == marker and line.get_ls() == "None"]
    return sorted(tuple(line.get_xydata()[0]) for line in points if colour in (None, line.get_color()))


def colour_of(curve):
    return STYLES["light"].looks()[curve][0]


def test_a_colour_a_curve_a_marker_a_kind_of_site_and_a_panel_a_number(seen, fits):
    figure = plot_depth(seen, fits)
    assert [ax.get_ylabel().removesuffix(", log") for ax in figure.axes] == ["A", "α", "held-out R²", "α"]
    values = (lambda f: f.amplitude, lambda f: f.alpha, lambda f: f.r2_cv)
    for curve, (marker, kind) in itertools.product(("tanh", "isru"), zip("os", ("norm1", "norm2"), strict=True)):
        of_kind = [fit for fit in fits if fit.curve == curve and fit.site.endswith(kind)]
        at = [place for place, site in enumerate(seen.sites) if site.name.endswith(kind)]
        for ax, value in zip(figure.axes, values, strict=False):
            assert series(ax, marker, colour_of(curve)) == list(zip(at, map(value, of_kind), strict=True))
    ceilings = {tuple(point) for line in figure.axes[2].lines if line.get_ls() == ":" for point in line.get_xydata()}
    assert ceilings == {(seen.sites.index(site), fits[site.name, "tanh"].r2_ceiling) for site in seen.sites}
    ceiling = "ceiling: held-out R² of the best function of x"
    assert legend_of(figure)[:5] == ["tanh", "isru", "*.norm1", "*.norm2", ceiling]
    assert legend_of(plot_depth(seen, fits, labels="full"))[2] == "blocks.*.norm1"


def test_alpha_stands_against_one_over_the_spread_of_the_input(seen, fits):
    # float32 inputs, and a float64 sum of their squares by bin
    assert spread(seen.stats["blocks.0.norm1"]) == pytest.approx(float(noise().double().std(correction=0)), rel=1e-6)
    ax = plot_depth(seen, [fit for fit in fits if fit.curve == "tanh"]).axes[3]
    of_tanh = [fit for fit in fits if fit.curve == "tanh"]
    expected = sorted((1 / spread(seen.stats[fit.site]), fit.alpha) for fit in of_tanh)
    np.testing.assert_allclose(sorted(series(ax, "o") + series(ax, "s")), expected)
    [line] = [line for line in ax.lines if len(line.get_xdata()) == 2]
    np.testing.assert_allclose(line.get_ydata() / line.get_xdata(), np.median([alpha / x for x, alpha in expected]))
    assert "1 / std" in ax.get_xlabel()


def test_straight_sites_are_open_and_have_no_point_in_the_panels_of_a_and_alpha():
    token = torch.tensor([[1.0, -1, 2, -2, 3, -3, 4, -4]])
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [token.repeat(4, 1)])
    figure = plot_depth(seen, normscope.fit(seen, "tanh"))
    amplitude, alpha, r2, against = figure.axes
    (mark,) = [line for line in r2.lines if line.get_marker() == "o"]
    assert mark.get_mfc() == r2.get_facecolor()
    assert not any(line.get_marker() == "o" for ax in (amplitude, alpha, against) for line in ax.lines)
    assert [text.get_text() for text in against.texts] == ["no α\nidentified"]
    assert "open: straight, so no A and α" in legend_of(figure)


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


def test_a_column_holds_its_sites_shares(massive):
    capture, x = massive
    figure = plot_tails(capture, normscope.norm_cards(capture))
    _, channels, tokens = figure.axes[:3]
    image = channels.images[0].get_array()
    squares = (x.double() ** 2).sum((0, 1))
    np.testing.assert_allclose(image[:, 0], 100 * squares / squares.sum(), rtol=1e-6)  # float32 inputs
    for column in range(3):
        np.testing.assert_allclose(image[:, column], 100 * shares_of(capture, f"norms.{column}"))
    assert written(channels) == ["7", MANY]
    assert [tick.get_text() for tick in tokens.get_xticklabels()] == ["0", "1", "2"]


def test_births_ends_and_massive_norms_are_marked_on_the_ratio(massive):
    """A spike that one FFN writes, massive at once, and a later attention removes."""
    capture, _ = massive
    depth = plot_tails(capture, normscope.norm_cards(capture)).axes[0]
    assert marks(depth) == {"x": [1], "^": [1]} and written(depth) == ["7"]
    network = PreNormPairs()
    network.written = {1: 3000.0, 4: -3000.0}  # behind norms 1 and 4
    x = torch.randn(20, 9, 48, generator=torch.Generator().manual_seed(0))
    seen = normscope.capture(network, [x], about=capture.about)
    figure = plot_tails(seen, normscope.norm_cards(seen))
    depth = figure.axes[0]
    ratios, sigmas = (line.get_ydata() for line in depth.lines[:2])
    norms = stream_of(seen).norms
    assert list(ratios) == [norm.ratio for norm in norms]
    assert list(sigmas) == [norm.sigma / norms[0].sigma for norm in norms]
    assert marks(depth) == {"x": [2, 3, 4], "^": [2], "v": [4]} and written(depth) == ["7, FFN"]
    assert {"spike (over 100) born", "last seen"} < set(legend_of(figure))


class PreNormPairs(nn.Module):
    """Three blocks of two norms; behind some, the stream is written to at one channel of the first token."""

    def __init__(self):
        super().__init__()
        self.written = {}
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.LayerNorm(48), "b": nn.LayerNorm(48)}) for _ in range(3))
        self.norm = nn.LayerNorm(48)

    def forward(self, x):
        for number, norm in enumerate(norm for block in self.blocks for norm in block.values()):
            update = 0.1 * norm(x)
            update[:, 0, 7] += self.written.get(number, 0.0)
            x = x + update
        return self.norm(x)


def marks(ax):
    """Return the sites that each kind of marker is drawn at."""
    drawn = {}
    for line in ax.lines:
        if line.get_marker() in ("x", "^", "v"):
            drawn.setdefault(line.get_marker(), []).extend(line.get_xdata())
    return drawn


def written(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.filterwarnings("error")
def test_without_a_norm_there_is_no_stream_to_draw():
    seen = normscope.capture(nn.Sequential(normscope.DyT(8)), [torch.randn(4, 6, 8)])
    figure = plot_tails(seen, normscope.norm_cards(seen))
    assert next(label for ax in figure.axes if (label := ax.get_ylabel())) == "channel"


def test_the_area_of_a_dot_is_the_number_of_tokens_of_largest_x(massive):
    capture, _ = massive
    figure = plot_tails(capture, normscope.norm_cards(capture))
    [dots] = figure.axes[2].collections
    areas = dots.get_sizes() / dots.get_sizes().max() * 16
    sites = dots.get_offsets()[:, 0]
    assert [round(float(areas[sites == site].sum()), 6) for site in range(3)] == [16, 16, 16]
    planted = {tuple(at): round(float(n)) for at, n in zip(dots.get_offsets().tolist(), areas, strict=True)}
    assert planted[1, 0] == planted[2, 0] == 16  # the planted first token
    sizes = [handle.get_markersize() ** 2 for handle in figure.legends[0].legend_handles[-3:]]
    assert np.allclose(np.array(sizes) / dots.get_sizes().max() * 16, [1, 4, 16])
    assert legend_of(figure)[-3:] == ["1 token", "4 tokens", "16 tokens"]


def test_wide_sites_show_the_largest_channel_of_each_pixel():
    x = torch.randn(6, 4, 900, generator=torch.Generator().manual_seed(0))
    x[..., 613] *= 50
    capture = normscope.capture(nn.Sequential(nn.LayerNorm(900)), [x])
    channels = plot_tails(capture, normscope.norm_cards(capture), width=5.5).axes[1]
    image = channels.images[0].get_array()
    each = -(-900 // 200)
    assert image.shape[0] == 900 / each and int(np.argmax(image[:, 0])) == 613 // each
    assert image.max() == pytest.approx(100 * shares_of(capture, "0").max())
    assert [text.get_text() for text in channels.texts] == ["613", MANY]


@pytest.fixture(scope="module")
def functions():
    """Three blocks of a function of each kind, whose α follows 1/std but at one site, and a LayerNorm."""
    blocks = nn.ModuleList(
        nn.ModuleDict({"norm1": normscope.DyT(32, alpha=0.5 / (i + 1)), "norm2": normscope.Derf(32, alpha=0.2)})
        for i in range(3)
    )
    model = nn.Module()
    model.blocks, model.norm = blocks, nn.LayerNorm(32)
    model.forward = lambda x: [
        model.norm(x),
        *(block[kind](x * (i + 1)) for i, block in enumerate(blocks) for kind in block),
    ]
    return normscope.capture(model, [noise()], about={"model": "net", "weights": "none", "data": "noise"})


def test_a_point_for_each_function_stands_against_one_over_the_spread(functions):
    records = normscope.saturation(functions)
    against, _ = plot_saturation(functions).axes
    points = series(against, "o") + series(against, "s")
    assert sorted(points) == sorted((each.inverse_std, each.alpha.p50) for each in records)
    assert points[0] == pytest.approx((1 / float(noise().double().std(correction=0)) / 3, 0.5 / 3), rel=1e-6)
    (line,) = [line for line in against.lines if len(line.get_xdata()) == 2]
    np.testing.assert_array_equal(line.get_xdata(), line.get_ydata())  # α = 1/std
    assert against.get_xlim() == pytest.approx(against.get_ylim())


def test_shares_stand_over_the_depth_a_line_a_kind(functions):
    records = normscope.saturation(functions)
    figure = plot_saturation(functions)
    lines = {(line.get_color(), line.get_marker()): line for line in figure.axes[1].lines}
    labels = {
        text.get_text(): handle
        for text, handle in zip(figure.legends[0].get_texts(), figure.legends[0].legend_handles, strict=True)
    }
    shares = {f"|αx + s| > {end}": f"beyond_{end}" for end in (1, 2, 3)}
    shares["saturated: |f′| under 5% of its peak"] = "saturated"
    assert len(lines) == 8
    for label, share in shares.items():
        for first, kind in enumerate(("*.norm1", "*.norm2")):
            line = lines[labels[label].get_color(), labels[kind].get_marker()]
            assert list(line.get_xdata()) == [first, first + 2, first + 4]
            expected = [100 * getattr(records[place], share) for place in line.get_xdata()]
            np.testing.assert_allclose(line.get_ydata(), expected)
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == [
        f"{n}.norm{k}" for n in range(3) for k in (1, 2)
    ]
    assert figure.axes[1].get_ylim()[0] == 0


def test_a_function_without_slope_or_spread_is_on_no_logarithmic_axis():
    model = nn.Sequential(normscope.DyT(8, alpha=0.5), normscope.DyT(8, alpha=0.25), normscope.DyT(8, alpha=2.0))
    nn.init.zeros_(model[0].weight)
    capture = normscope.capture(model, [torch.randn(16, 8, generator=torch.Generator().manual_seed(0))])
    sites = capture.sites
    sites[2] = replace(sites[2], pointwise=replace(sites[2].pointwise, alpha=(0.0,)))
    figure = plot_saturation(capture)
    figure.draw_without_rendering()
    (point,) = [points for points in figure.axes[0].lines if points.get_marker() == "o"]
    assert point.get_ydata() == [0.5]


def test_every_function_has_a_panel_with_its_typeset_formula_and_three_scales():
    figure = plot_curves()
    axes = shown(figure)
    titles = [ax.get_title(loc="left").split("\n") for ax in axes]
    assert sorted(name for names, *_ in titles for name in names.split(", ")) == sorted(c.name for c in BUILT_IN)
    assert titles[0] == ["tanh, softcap", r"$\tanh(u)$"]  # softcap differs in its amplitude alone
    for ax, (names, *_) in zip(axes, titles, strict=True):
        for line, alpha in zip(ax.lines, ALPHAS, strict=False):
            x = torch.from_numpy(np.asarray(line.get_xdata()))
            np.testing.assert_array_equal(line.get_ydata(), CURVES[names.split(", ")[0]].function(alpha * x))
    assert legend_of(figure) == ["α = 0.5", "α = 1", "α = 2"]
    assert (axes[0].get_ylabel(), axes[-1].get_xlabel()) == ("f(αx)", "x")


def test_curves_can_be_chosen_and_made():
    axes = shown(plot_curves("dyt,mine=x/(1+abs(x))+x/(2+abs(x))+x/(3+abs(x))", width=2))
    titles = [ax.get_title(loc="left").split("\n") for ax in axes]
    assert titles[0] == [CURVES["tanh"].name, r"$\tanh(u)$"]
    name, *lines = titles[1]
    assert name == "mine" and len(lines) > 1  # a formula goes into several lines, and is not cut
    assert "".join(lines).replace(" ", "") == "u/(1+abs(u))+u/(2+abs(u))+u/(3+abs(u))"


def plot_tails_of_nan():
    capture = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.full((2, 8), torch.nan)])
    plot_tails(capture, normscope.norm_cards(capture))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda seen: plot_depth(seen, []), DataError, "no fit of a site"),
        (lambda seen: plot_saturation(seen), DataError, "no point-wise function"),
        (lambda _: plot_tails_of_nan(), DataError, "No site holds a pair"),
        (lambda _: plot_curves("tangh"), UsageError, "no curve 'tangh'"),
    ],
)
def test_refusals(seen, call, error, words):
    with pytest.raises(error, match=words):
        call(seen)
