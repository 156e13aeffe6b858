"""What the figure holds is read from its artists; its files from outside."""

import json
import re

import matplotlib.colors
import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from PIL import Image
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.figures import panels
from normscope.figures.scurves import plot, save_figure
from normscope.figures.style import STYLES

NAMES = ("blocks.0.norm", "blocks.1.norm")


@pytest.fixture(scope="module")
def seen():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 30, 64, generator=generator) * torch.exp(torch.randn(8, 30, 1, generator=generator))
    x[..., 5] *= 30
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(64)}) for _ in range(2)])})
    model.forward = lambda x: [block["norm"](x + i) for i, block in enumerate(model["blocks"])]
    about = {"model": "odd$name_{", "weights": "random weights, seed 0", "data": "noise & <more>"}
    return normscope.capture(model, [x], about=about)


@pytest.fixture(scope="module")
def fits(seen):
    return normscope.fit(seen)


@pytest.fixture(scope="module")
def figure(seen, fits):
    return plot(seen, fits, xscale="linear")


def shown(figure):
    return [ax for ax in figure.axes if ax.get_visible()]


def texts(figure):
    figure.draw_without_rendering()
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_titles_and_foot_are_written_as_they_are(figure):
    axes = shown(figure)
    assert len(axes) == 6
    titles = [ax.get_title(loc="left") for ax in axes if ax.get_title(loc="left")]
    assert titles == [f"{i}  {name}\nLayerNorm d=64\n15,360 pairs" for i, name in enumerate(NAMES)]
    assert figure.get_suptitle() == "odd$name_{ · 8 samples"
    assert "weights: random weights, seed 0 · data: noise & <more>" in figure.texts[-1].get_text()


def test_panels_span_every_pair_on_linear_axes(figure, seen):
    stats = seen.stats[NAMES[0]]
    reach = float(stats.channel_extremes.abs().max())
    largest_y = max(float(part.y.abs().max()) for part in (stats.tokens, stats.largest, stats.pairs))
    for ax in shown(figure)[::2]:
        for (low, high), most in ((ax.get_xlim(), reach), (ax.get_ylim(), largest_y)):
            assert low <= -most and high >= most
        assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "linear")
        assert len(ax.child_axes) >= 1  # tails reach 30 times beyond the centre: it is enlarged


def test_fitted_curves_are_drawn_where_they_are(figure, fits):
    ax = shown(figure)[0]
    for found in (one for one in fits if one.site == NAMES[0]):
        colour, _ = STYLES["light"].looks()[found.curve]
        line = next(line for line in ax.get_lines() if line.get_color() == colour)
        np.testing.assert_allclose(line.get_ydata(), found(torch.from_numpy(np.asarray(line.get_xdata()))).numpy())


def test_parameters_ceiling_and_bound_are_written_above_the_panel(figure, fits, seen):
    figure.draw_without_rendering()
    density = shown(figure)[0]
    written = [text.get_text() for text in density.texts]
    for found in (fit for fit in fits if fit.site == NAMES[0]):
        assert f"{found.curve}  A {found.amplitude:.3g}  α {found.alpha:.3g}  R² {found.r2:.3f}" in written
    assert f"best f(x)  R² {fits[0].r2_ceiling:.3f}" in written
    assert any("R² of the best function of x that was found, folds by source" in text for text in texts(figure))
    for ax in shown(figure):  # over curves and points none can be read
        top = ax.get_window_extent().y1
        assert ax.texts and all(text.get_window_extent().y0 >= top for text in ax.texts)
    bound = seen.sites[0].bound
    assert bound == pytest.approx(np.sqrt(63))
    heights = {float(line.get_ydata()[0]) for line in density.get_lines() if line.get_linestyle() == ":"}
    assert heights == {-bound, bound}


def test_without_a_title_the_file_still_says_what_it_shows(seen, fits, tmp_path):
    bare = plot(seen, fits, title="none")
    written = " ".join(texts(bare))
    assert "odd$name_{" not in written and "noise" not in written
    with Image.open(save_figure(bare, tmp_path / "bare.png", seen, dpi=40)) as image:
        assert json.loads(image.text["Description"])["data"] == "noise & <more>"


def test_one_panel_goes_into_axes_of_ones_own(seen, fits):
    mine = Figure()
    ax, other = mine.subplots(1, 2)
    assert plot(seen, fits, sites=NAMES[1], rows="density", ax=ax) is mine
    assert ax.images and not other.has_data()
    assert ax.get_title(loc="left").startswith(f"1  {NAMES[1]}")
    with pytest.raises(UsageError, match="ax takes one row of one site, but there are 3 rows of 2 sites"):
        plot(seen, fits, ax=ax)


def test_tokens_are_straight_lines_of_slope_one_over_sigma(figure, seen):
    ax = shown(figure)[2]
    lines = next(c for c in ax.collections if isinstance(c, LineCollection))
    sigma = lines.get_array()
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in lines.get_segments()]
    np.testing.assert_allclose(slopes, 1 / sigma, rtol=1e-3)
    assert len(slopes) == 64 + 16


def test_what_is_drawn_does_not_grow_with_the_pairs():
    few, many = (plot(capture, normscope.fit(capture)) for capture in map(steps, (250, 8000)))
    for kind, number in drawn(many).items():
        assert 0 < number < 1.02 * drawn(few)[kind], kind
    for artist in few.findobj(lambda one: isinstance(one, PathCollection | LineCollection)):
        assert artist.get_rasterized()
    vectors = [line for line in few.findobj(Line2D) if not line.get_rasterized()]
    assert max(len(line.get_xdata()) for line in vectors) <= 600  # a curve


def steps(n_tokens):
    """A capture of tokens whose elements are of few values, so that a few tokens fill every bin of it."""
    generator = torch.Generator().manual_seed(0)
    values = torch.linspace(-3, 3, 14).sinh()
    x = values[torch.randint(len(values), (n_tokens, 32), generator=generator)]
    return normscope.capture(nn.Sequential(nn.LayerNorm(32)), x.split(50))


def drawn(figure):
    """How many points each kind of artist holds."""
    return {
        "lines": sum(len(line.get_xdata()) for line in figure.findobj(Line2D)),
        "points": sum(len(points.get_offsets()) for points in figure.findobj(PathCollection)),
        "tokens": sum(len(lines.get_segments()) for lines in figure.findobj(LineCollection)),
        "pixels": sum(image.get_array().size for image in figure.findobj(AxesImage)),
    }


def test_the_density_holds_every_pair(seen):
    stats = seen.stats[NAMES[0]]
    reach = 2 * float(stats.channel_extremes.abs().max())
    edges, heights = np.linspace(-reach, reach, 65), np.linspace(-64, 64, 65)
    image = panels.image(stats, edges, heights)
    assert image.sum() == pytest.approx(stats.n_pairs)
    half = panels.image(stats, np.linspace(0, reach, 65), heights)
    counts = stats.moments[:, 0].sum(0)
    assert half.sum() == pytest.approx(float(counts[len(counts) // 2 :].sum()), rel=1e-3)


def test_the_tallest_pair_is_on_the_panel_although_no_sample_holds_it():
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    x[1234] *= 1e-3
    x[1234, 9] = 0.5  # a small x, and nearly the largest y that is possible
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x])
    y = nn.functional.layer_norm(x, (64,)).abs().max()
    stats = seen.stats["0"]
    assert stats.tokens.y.abs().max() < y
    assert shown(plot(seen))[0].get_ylim()[1] >= y


def test_rows_can_be_chosen(seen, fits):
    assert len(shown(plot(seen, fits, rows="channel"))) == 2
    with pytest.raises(UsageError, match=r"no colouring 'chanel'\. Did you mean 'channel'"):
        plot(seen, fits, rows="chanel")


def test_degenerate_straight_and_empty_sites_are_said_so():
    names = ("constant", "straight", "empty")
    model = nn.ModuleDict({name: nn.LayerNorm(8) for name in names})
    model.forward = lambda x: [model[name](x * scale) for name, scale in zip(names, (0, 1, torch.nan), strict=True)]
    token = torch.tensor([[1.0, -1, 2, -2, 3, -3, 4, -4]])
    seen = normscope.capture(model, [token.repeat(4, 1)])
    fits = normscope.fit(seen, "tanh")
    constant, _, empty = fits
    assert constant.degenerate and empty.degenerate and empty.n_pairs == 0 and empty.r2_ceiling is None
    written = texts(plot(seen, fits))
    assert written.count("tanh: nothing to fit") == 2
    assert re.search(r"tanh  slope 0\.\d+, straight  R² 1\.000", " | ".join(written))


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_files_say_what_they_show(figure, seen, tmp_path, kind):
    path = save_figure(figure, tmp_path / f"figure.{kind}", seen, dpi=60)
    content = path.read_bytes()
    if kind == "png":
        with Image.open(path) as image:
            description = json.loads(image.text["Description"])
            assert len(image.convert("RGB").getcolors(10**6)) > 500
        assert description["weights"] == "random weights, seed 0"
    else:
        assert b"random weights, seed 0" in content
    assert content[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    if kind == "svg":
        assert content.count(b"<image") >= 6  # points and densities are rasterized
        assert b"noise &amp; &lt;more&gt;" in content
    assert len(content) < 3_000_000
    with pytest.raises(UsageError, match="no figure format 'gif'"):
        save_figure(figure, tmp_path / "figure.gif", seen)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ["png", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("svg", "pdf"))])
def test_a_figure_is_laid_out_and_drawn_once(seen, fits, tmp_path, kind, monkeypatch):
    """Its file is the one that matplotlib makes, which draws all of it a second time."""
    done = []
    execute = ConstrainedLayoutEngine.execute
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *given: done.append("layout") or execute(*given))
    figure, other = (plot(seen, fits, sites=NAMES[1]) for _ in range(2))
    engine, canvas, dpi = figure.get_layout_engine(), figure.canvas, figure.dpi
    figure.canvas.mpl_connect("draw_event", lambda event: done.append("draw"))
    path = save_figure(figure, tmp_path / f"figure.{kind}", seen, dpi=60)
    assert done == ["layout", "draw"]
    assert (figure.get_layout_engine(), figure.canvas, figure.dpi) == (engine, canvas, dpi)
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "normscope", "pdf.fonttype": 42}):
        other.savefig(tmp_path / f"other.{kind}", dpi=60, metadata=dates)
    for ours, theirs in zip(shown(figure), shown(other), strict=True):
        np.testing.assert_allclose(ours.get_position().bounds, theirs.get_position().bounds, rtol=0, atol=1e-12)
    if kind == "png":
        pixels = [np.asarray(Image.open(file)) for file in (path, tmp_path / "other.png")]
        assert np.array_equal(*pixels)


def test_many_sites_are_broken_into_blocks(fits):
    model = nn.Sequential(*(nn.LayerNorm(16) for _ in range(8)))
    seen = normscope.capture(model, [torch.randn(4, 16, generator=torch.Generator().manual_seed(0))])
    figure = plot(seen, rows="token")
    assert len(shown(figure)) == 8
    assert figure.get_figwidth() < 16


@pytest.mark.parametrize("width", [None, pytest.param(5.5, marks=pytest.mark.slow)])
def test_no_number_of_pairs_is_cut(width):
    seen = normscope.capture(normscope.load("demo_vit", limit=8, device="cpu"), layers="0,6,9,norm")
    figure = normscope.plot(seen, normscope.fit(seen), width=width)
    heads = [ax.get_title(loc="left").split("\n") for ax in figure.axes if "pairs" in ax.get_title(loc="left")]
    assert len(heads) == 4
    assert all(lines[-1].startswith("8,192 pairs") and "…" not in lines[-1] for lines in heads)
