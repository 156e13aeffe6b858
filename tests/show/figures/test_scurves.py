"""Artists of the S-curves against sums and fits, and their files."""

import json
import re
from dataclasses import replace

import matplotlib.colors
import numpy as np
import pytest
import torch
from artists import shown
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.show.figures.notes import lines_above, remarks
from normscope.show.figures.panel_data import image
from normscope.show.figures.panels import panels_of
from normscope.show.figures.scurves import plot
from normscope.show.figures.sheet import save_figure
from normscope.show.figures.style import STYLES

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
    return plot(seen, fits)


def texts(figure):
    figure.draw_without_rendering()
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text().strip()]


def foot(figure):
    return figure.texts[-1].get_text().split("\n")


def test_facts_of_all_panels_are_written_once(figure, seen):
    drawn = {
        tuple(token.tolist()) for of in (seen.stats[NAMES[0]],) for x in (of.tokens.x, of.largest.x) for token in x
    }
    assert figure.get_suptitle() == "odd$name_{ · random weights · 8 samples"
    assert foot(figure) == [
        "R² on held-out pairs, folds by source; ceiling: that of the best function of x",
        f"Lines: {len(drawn)} of 240 tokens, coloured by σ (log scale)",
        "LayerNorm, d = 64, 15,360 pairs a panel",
        "Input x of norms, and their output y before the affine step",
        "weights: random weights, seed 0 · data: noise & <more>",
    ]
    assert len(shown(figure)) == 6


def above(ax):
    """The texts above a panel, by line, from the top."""
    ax.figure.draw_without_rendering()
    lines = {}
    for text in ax.texts:
        if "beyond" not in text.get_text():
            lines.setdefault(-round(text.get_window_extent().y0), []).append(text.get_text())
    return [" ".join(lines[height]) for height in sorted(lines)]


@pytest.mark.parametrize("labels", ["none", "short"])
def test_headings_have_a_name_and_a_line_of_r2(seen, fits, labels):
    for number, ax in enumerate(shown(plot(seen, fits, color="density", labels=labels))):
        of_site = [fit for fit in fits if fit.site == NAMES[number]]
        numbers = " ".join(f"{fit.curve} {fit.r2_cv:.3f}" for fit in of_site)
        expected = [f"R² {numbers} ceiling {of_site[0].r2_ceiling:.3f}"]
        assert ax.get_title(loc="left") == ("" if labels == "none" else f"{number}.norm")
        assert above(ax) == ([] if labels == "none" else expected)


@pytest.mark.parametrize(
    ("inches", "words"),
    [(3.0, "R² tanh {} isru {} ceiling {}"), (1.5, "R² tanh {} isru {}"), (1.0, "R² {} {}"), (0.5, "R² {} | {}")],
)
def test_a_narrow_panel_drops_first_the_ceiling_then_names_and_breaks_the_line_last(seen, fits, inches, words):
    (panel,) = panels_of(seen, seen.sites[:1], fits, STYLES["light"], "linear", inches)
    of_site = [fit for fit in fits if fit.site == NAMES[0]]
    numbers = [f"{value:.3f}" for value in (*(fit.r2_cv for fit in of_site), of_site[0].r2_ceiling)]
    [[lines]] = lines_above([panel], ["density"], "short")
    assert " | ".join(" ".join(text for text, _ in line) for line in lines) == words.format(*numbers)
    looks = STYLES["light"].looks()
    assert [colour for line in lines for _, colour in line][1:3] == [looks["tanh"][0], looks["isru"][0]]
    assert ("; ceiling: that of" in remarks([panel], fits, "short")[0]) == ("ceiling" in words)


def test_all_panels_have_the_form_that_fits_everywhere(seen, fits):
    doubtful = [replace(fit, converged=fit.site != NAMES[1]) for fit in fits]
    panels = panels_of(seen, seen.sites, doubtful, STYLES["light"], "linear", 2.0)
    first, second = lines_above(panels, ["density"], "short")[0]
    assert [text.split()[0] for text, _ in first[0]] == ["R²", "tanh", "isru"]  # although its ceiling had room
    assert [text for text, _ in second[0]][-1] == "not converged"


def test_colours_shared_by_curves_do_not_replace_their_names(seen):
    fits = normscope.fit(seen.only([0]), "tanh,softcap")
    (panel,) = panels_of(seen, seen.sites[:1], fits, STYLES["light"], "linear", 0.9)
    [[lines]] = lines_above([panel], ["density"], "short")
    assert [text.split()[0] for line in lines for text, _ in line] == ["R²", "tanh", "softcap"]


@pytest.mark.parametrize("change", [{"x_repeats": True}, {"r2_ceiling": 0.5}], ids=["x repeats", "below the fit"])
def test_a_ceiling_that_is_too_low_is_not_written(seen, fits, change):
    assert fits[0].r2_cv > 0.51
    low = [replace(fit, **change) for fit in fits]
    for labels in ("short", "full"):
        figure = plot(seen, low, color="density", labels=labels)
        assert not any("ceiling" in text.get_text() for text in shown(figure)[0].texts)
        assert "No ceiling where it is known to be too low" in figure.caption
    assert "No ceiling" not in plot(seen, fits).caption


def test_full_labels_have_the_module_path(seen, fits):
    lines = {
        labels: [text.get_text() for text in shown(plot(seen, fits, color="density", labels=labels))[0].texts]
        for labels in ("short", "full")
    }
    assert NAMES[0] in "".join(lines["full"]) and NAMES[0] not in "".join(lines["short"])
    assert set(lines["short"]) < set(lines["full"])


@pytest.fixture(scope="module")
def functions():
    x = 4 * torch.randn(8, 30, 16, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.LayerNorm(16, elementwise_affine=False), normscope.Derf(16, alpha=2.0, shift=0.25))
    return normscope.capture(model, [x]), x.double()


@pytest.mark.parametrize("labels", ["none", "short", "full"])
def test_a_point_wise_function_has_its_own_scale_and_saturation_above_it(functions, labels):
    seen, x = functions
    norm, function = shown(plot(seen, normscope.fit(seen, "tanh"), color="density", labels=labels))
    u = 2 * nn.LayerNorm(16, elementwise_affine=False, dtype=torch.float64)(x) + 0.25
    saturated = 100 * (u.abs() > np.sqrt(np.log(20))).double().mean()  # where exp(−u²), erf′ over its peak, is 1/20
    above = ["  ".join(text.get_text() for text in ax.texts) for ax in (norm, function)]
    assert ("derf, α 2  s 0.25" in above[1] and f"{saturated:.2g}% saturated" in above[1]) == (labels != "none")
    assert "saturated" not in above[0]


def test_tokens_of_a_point_wise_function_are_points_without_lines(functions):
    figure = plot(functions[0], [], color="token")
    norm, function = shown(figure)
    assert any(line.startswith("Lines: ") for line in foot(figure))
    assert any(line.startswith("Points: ") for line in foot(plot(functions[0].only([1]), [], color="token")))
    lines = [[each for each in ax.collections if isinstance(each, LineCollection)] for ax in (norm, function)]
    assert list(map(len, lines)) == [1, 0]
    points = [[line for line in ax.findobj(Line2D) if line.get_marker() == "o"] for ax in (norm, function)]
    assert len(points[0]) == len(points[1]) > 60


def test_fitted_curves_and_the_bound_are_drawn_where_they_are(figure, seen, fits):
    ax = shown(figure)[0]
    for fit in (fit for fit in fits if fit.site == NAMES[0]):
        colour, _ = STYLES["light"].looks()[fit.curve]
        line = next(line for line in ax.get_lines() if line.get_color() == colour)
        np.testing.assert_allclose(line.get_ydata(), fit(torch.from_numpy(np.asarray(line.get_xdata()))).numpy())
    bound = seen.sites[0].bound
    assert bound == pytest.approx(np.sqrt(63))
    assert {float(line.get_ydata()[0]) for line in ax.get_lines() if line.get_linestyle() == ":"} == {-bound, bound}


@pytest.mark.parametrize(("suffix", "title"), [("txt", None), ("tex", "none")])
def test_a_caption_goes_into_a_file_beside_the_figure(seen, fits, tmp_path, suffix, title):
    figure = plot(seen.only([0]), fits, color="density", caption=suffix, title=title)
    assert not [text for text in texts(figure) if "noise" in text or "pairs a panel" in text]
    path = save_figure(figure, tmp_path / "figure.png", seen, dpi=40)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["figure.png", f"figure.{suffix}"]
    caption = path.with_suffix(f".{suffix}").read_text(encoding="utf-8")
    expected = {
        "txt": ("odd$name_{ · random weights · 8 samples. R² on", "d = 64,", "Input x", "data: noise & <more>.\n"),
        "tex": (
            r"\caption{odd\$name\_\{ \ensuremath{\cdot}",
            r"R\ensuremath{^{2}} on",
            r"data: noise \& \ensuremath{<}more\ensuremath{>}.}",
        ),
    }
    assert all(part in caption for part in expected[suffix])


def test_without_a_title_the_file_still_names_its_data(seen, fits, tmp_path):
    bare = plot(seen.only([0]), fits, color="density", title="none")
    written = " ".join(texts(bare))
    assert "odd$name_{" not in written and "noise" not in written and "random weights, seed 0" in written
    with Image.open(save_figure(bare, tmp_path / "bare.png", seen, dpi=40)) as image:
        assert json.loads(image.text["Description"])["data"] == "noise & <more>"
        assert "d = 64, 15,360 pairs a panel" in image.text["Title"] and "noise & <more>" in image.text["Title"]


@pytest.mark.parametrize("row", ["density", "token", "channel", "residual"])
def test_one_panel_goes_into_your_axes_and_stays_inside(seen, fits, row):
    mine = Figure(figsize=(6, 3), layout="constrained")
    ax, other = mine.subplots(1, 2)
    assert plot(seen, fits, layers=[1], color=row, ax=ax) is mine
    mine.draw_without_rendering()
    assert ax.has_data() and not other.has_data() and not mine.legends and not mine.texts
    words = [text.get_text() for text in ax.texts if "beyond" not in text.get_text()]
    assert words[0] == "1.norm" and len(words) == 3 and all("R² 0." in text for text in words[1:])
    box = ax.get_window_extent()
    assert all(box.contains(*corner) for text in ax.texts for corner in text.get_window_extent().corners())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ax": Figure().subplots()}, "ax takes one row of one site, but there are 3 rows of 2 sites"),
        ({"color": "chanel"}, r"no colouring 'chanel'\. Did you mean 'channel'"),
        ({"layers": "0"}, r"at least 1, not 0\. The norm site with the number 0 is '0-0', and \[0\] in Python"),
        ({"labels": "shrt"}, "no kind of labels 'shrt'. Did you mean 'short'"),
        ({"caption": "tx"}, "no kind of caption 'tx'"),
        ({"font": "DejaVu Sens"}, "no font 'DejaVu Sens'. Did you mean 'DejaVu Sans'"),
        ({"capture": []}, r"normscope.plot takes a Capture; normscope.capture\(network\) makes one"),
        ({"capture": nn.LayerNorm(8)}, "normscope.plot takes a Capture"),
        ({"widht": 5.5}, "no option of a figure 'widht'. Did you mean 'width'"),
        ({"rows": "density"}, "There are: layers, color, compact"),
    ],
)
def test_refusals(seen, fits, change, sentence):
    with pytest.raises(UsageError, match=sentence):
        plot(**{"capture": seen, "fits": fits, **change})


def test_all_letters_are_of_the_font(seen, fits):
    for compact in (False, True):
        figure = plot(seen.only([0]), fits, color="density", font="DejaVu Serif", compact=compact)
        figure.draw_without_rendering()
        assert {text.get_fontfamily()[0] for text in figure.findobj(matplotlib.text.Text)} == {"DejaVu Serif"}


def test_tokens_are_straight_lines_of_slope_one_over_sigma(figure, seen):
    ax = shown(figure)[2]
    lines = next(c for c in ax.collections if isinstance(c, LineCollection))
    sigma = lines.get_array()
    slopes = [(y[-1] - y[0]) / (x[-1] - x[0]) for x, y in (line.T for line in lines.get_segments())]
    np.testing.assert_allclose(slopes, 1 / sigma, rtol=1e-3)
    assert len(slopes) == 64 + 16


def test_the_number_of_artists_does_not_grow_with_the_pairs():
    draw = torch.Generator().manual_seed(0)
    points = []
    for n_tokens in (250, 8000):  # of few values, so that a few tokens fill every bin
        x = torch.linspace(-3, 3, 14).sinh()[torch.randint(14, (n_tokens, 32), generator=draw)]
        seen = normscope.capture(nn.Sequential(nn.LayerNorm(32)), x.split(50))
        figure = plot(seen, normscope.fit(seen))
        scattered = figure.findobj(lambda artist: isinstance(artist, PathCollection | LineCollection))
        assert all(artist.get_rasterized() for artist in scattered)
        lines = [len(line.get_xdata()) for line in figure.findobj(Line2D)]
        points.append([sum(lines), sum(len(artist.get_paths()) + len(artist.get_offsets()) for artist in scattered)])
    assert all(0 < many < 1.02 * few for few, many in zip(*points, strict=True))


def test_the_density_contains_every_pair(seen):
    stats = seen.stats[NAMES[0]]
    reach = 2 * float(stats.channel_extremes.abs().max())
    edges, heights = np.linspace(-reach, reach, 65), np.linspace(-64, 64, 65)
    assert image(stats, edges, heights).sum() == pytest.approx(stats.n_pairs)
    half = image(stats, np.linspace(0, reach, 65), heights)
    counts = stats.moments[:, 0].sum(0)
    assert half.sum() == pytest.approx(float(counts[len(counts) // 2 :].sum()), rel=1e-3)


def test_the_tallest_pair_is_on_the_panel_although_no_sample_contains_it():
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    x[1234] *= 1e-3
    x[1234, 9] = 0.5  # a small x, and nearly the largest y that is possible
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x])
    y = nn.functional.layer_norm(x, (64,)).abs().max()
    stats = seen.stats["0"]
    assert stats.tokens.y.abs().max() < y
    assert shown(plot(seen))[0].get_ylim()[1] >= y


def test_degenerate_straight_and_empty_sites_are_marked():
    names = ("constant", "straight", "empty")
    model = nn.ModuleDict({name: nn.LayerNorm(8) for name in names})
    model.forward = lambda x: [model[name](x * scale) for name, scale in zip(names, (0, 1, torch.nan), strict=True)]
    token = torch.tensor([[1.0, -1, 2, -2, 3, -3, 4, -4]])
    seen = normscope.capture(model, [token.repeat(4, 1)])
    fits = normscope.fit(seen, "tanh")
    constant, _, empty = fits
    assert constant.degenerate and empty.degenerate and empty.n_pairs == 0 and empty.r2_ceiling is None
    figures = {
        labels: " | ".join(texts(plot(seen, fits, color="density", labels=labels))) for labels in ("short", "full")
    }
    for written in figures.values():
        assert written.count("nothing to fit") == 2 and "R² | tanh 1.000 | straight" in written


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_files_contain_their_provenance(seen, fits, tmp_path, kind):
    figure = plot(seen.only([0]), fits)
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
        assert content.count(b"<image") >= 3  # points and densities are rasterized
        assert b"noise &amp; &lt;more&gt;" in content
    assert len(content) < 3_000_000
    with pytest.raises(UsageError, match="no figure format 'gif'"):
        save_figure(figure, tmp_path / "figure.gif", seen)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_many_sites_are_broken_into_blocks(fits):
    model = nn.Sequential(*(nn.LayerNorm(16) for _ in range(8)))
    seen = normscope.capture(model, [torch.randn(4, 16, generator=torch.Generator().manual_seed(0))])
    figure = plot(seen, color="token")
    assert len(shown(figure)) == 8
    assert figure.get_figwidth() < 16


def test_points_of_a_vector_graphic_have_300_dots_an_inch(seen, tmp_path):
    figure = plot(seen.only([0]), color="channel", width=2.5)
    content = save_figure(figure, tmp_path / "figure.pdf", seen, dpi=20).read_bytes()
    inches = shown(figure)[0].get_window_extent().width / figure.dpi
    assert max(int(width) for width in re.findall(rb"/Width (\d+)", content)) > 300 * 0.6 * inches
