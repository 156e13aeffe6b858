"""What the overview holds is read from its artists; its files from outside."""

import html
import json
import math
import re

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from PIL import Image
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.figures.overview import overview
from normscope.figures.scurves import plot, save_figure
from normscope.figures.style import STYLES
from normscope.pairs.norms.sites import NormSite

SHOWN = (0, 3, 4, 7)  # of eight, norm1 and norm2 by turns
ODD = {"model": "odd$name_{", "weights": "random weights, seed 0 $x_{", "data": "noise & <more>"}


def capture_of(names, d=8, scale=1.0, **about):
    model = nn.Module()
    norms = [nn.LayerNorm(d) for _ in names]
    for name, norm in zip(names, norms, strict=True):
        *path, last = name.split(".")
        parent = model
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, norm)
    model.forward = lambda x: [norm(x * (i + 1)) for i, norm in enumerate(norms)]
    x = scale * torch.randn(40, d, generator=torch.Generator().manual_seed(0))
    return normscope.capture(model, [x], about={**ODD, **about})


def demo(weights):
    network = normscope.load("demo_vit", weights=weights, limit=8, device="cpu")
    return normscope.capture(network.module, network.inputs, layers="0-7", about=network.about)


@pytest.fixture(scope="module")
def seen():
    return [demo("pretrained"), demo("random")]


@pytest.fixture(scope="module")
def fits(seen):
    return [normscope.fit(capture.only(4)) for capture in seen]


@pytest.fixture(scope="module")
def crowded():
    seen = [
        capture_of([f"encoder.transformer.layers.{i}.final_layer_norm" for i in range(12)], scale=1e-6),
        capture_of([f"transformer_blocks.{i}.norm1.norm" for i in range(28)], model="m" * 200, scale=3e7),
        capture_of(["a$b_{c}^$", "<b>&", "W" * 60], weights="a_folder/that has a name/" * 30, data="x" * 1000),
    ]
    return overview(seen, [normscope.fit(capture.only(4), "tanh") for capture in seen])


@pytest.fixture(scope="module")
def figure(seen, fits):
    return overview(seen, fits)


def panels(figure):
    """The axes of each row that show a site, from left to right."""
    rows = {}
    for ax in figure.axes:
        if ax.axison:
            rows.setdefault(ax.get_subplotspec().rowspan.start, []).append(ax)
    return [rows[start] for start in sorted(rows)]


def titles(row):
    return [ax.get_title(loc="left") for ax in row]


def title_of(ax):
    return next(t for t in ax.get_children() if isinstance(t, Text) and t.get_text() == ax.get_title(loc="left"))


def headings(figure):
    return ["\n".join(text.get_text() for text in ax.texts) for ax in figure.axes if not ax.axison]


def test_a_row_a_model_and_four_sites_along_its_depth(figure, seen):
    rows = panels(figure)
    n = seen[0].stats["blocks.0.norm1"].n_pairs
    for row, capture, heading in zip(rows, seen, headings(figure), strict=True):
        sites, about = [capture.sites[i] for i in SHOWN], capture.about
        assert titles(row) == [f"{site.index}  {site.name}\nLayerNorm d=64 · {site.placement}" for site in sites]
        weights = re.sub(r", sha256 \w+", "", about["weights"])
        assert heading == f"demo_vit\nweights: {weights}\ndata (8 samples, {n:,} pairs a panel): {about['data']}"
    assert "weights: random weights, seed 0" in headings(figure)[1].splitlines()
    assert figure.get_figwidth() == 7


def test_parts_of_the_data_are_told_apart():
    seen = [capture_of(["norm"], model="net", part=f"timestep {t}") for t in (980, 0)]
    assert [text.splitlines()[0] for text in headings(overview(seen))] == ["net · timestep 980", "net · timestep 0"]
    assert plot(seen[0]).get_suptitle() == "net · timestep 980 · 40 samples"


def test_each_panel_shows_its_own_pairs_and_curves(figure, seen, fits):
    for row, capture, own in zip(panels(figure), seen, fits, strict=True):
        for ax, site in zip(row, (capture.sites[i] for i in SHOWN), strict=True):
            reach = float(capture.stats[site.name].channel_extremes.abs().max())
            np.testing.assert_allclose(ax.get_xlim(), (-1.06 * reach, 1.06 * reach))
            assert ax.images[0].get_array().sum() == pytest.approx(capture.stats[site.name].n_pairs, rel=1e-6)
            for found in (one for one in own if one.site == site.name):
                colour, _ = STYLES["light"].looks()[found.curve]
                line = next(line for line in ax.get_lines() if line.get_color() == colour)
                np.testing.assert_allclose(line.get_ydata(), found(torch.from_numpy(np.asarray(line.get_xdata()))))
                assert f"{found.curve}  R² {found.r2:.3f}" in [text.get_text() for text in ax.texts]
            ceiling = f"best f(x)  R² {found.r2_ceiling:.3f}{'*' * found.x_repeats}"
            assert ceiling in [text.get_text() for text in ax.texts]
            assert any(line.get_color() == STYLES["light"].ink for line in ax.get_lines())


def test_fewer_than_four_sites_make_fewer_panels():
    seen = [capture_of(list("abc"[:n]), model=f"with {n}") for n in (1, 2, 3)]
    figure = overview(seen, [normscope.fit(capture, "tanh") for capture in seen])
    assert [len(row) for row in panels(figure)] == [1, 2, 3]
    labelled = [[bool(ax.get_xlabel()) for ax in row] for row in panels(figure)]
    assert labelled == [[False], [False, False], [True, True, True]]  # x is named once a column, at its foot
    alone = overview(seen[:1])
    assert len(panels(alone)) == 1
    assert alone.get_figwidth() == 3.5


def test_what_is_no_fit_is_said_so():
    empty, constant, far = (capture_of(["norm"], scale=scale) for scale in (math.nan, 0.0, 1e9))
    found = normscope.fit(far, "tanh")
    assert not found[0].converged
    figure = overview(
        [empty, constant, far, capture_of(["full"])], [normscope.fit(empty), normscope.fit(constant), found, []]
    )
    rows = [ax for (ax,) in panels(figure)]
    assert [[text.get_text() for text in ax.texts] for ax in rows] == [
        ["no finite pair"],
        ["isru: nothing to fit", "tanh: nothing to fit"],
        ["not converged", f"tanh  R² {found[0].r2:.3f}"],  # upwards
        [],
    ]
    assert not rows[0].images and rows[-1].images
    assert "data (40 samples, 0 pairs a panel): noise" in headings(figure)[0]


def test_odd_names_are_written_as_they_are(crowded):
    row = panels(crowded)[2]
    assert [title.splitlines()[0] for title in titles(row)[:2]] == ["0  a$b_{c}^$", "1  <b>&"]
    assert headings(crowded)[0].splitlines()[0] == "odd$name_{"
    written = [title_of(ax) for ax in row] + [text for ax in crowded.axes if not ax.axison for text in ax.texts]
    assert not any(text.get_parse_math() for text in written)


def test_long_names_keep_their_ends():
    names = [f"encoder.transformer.layers.{i}.final_layer_norm" for i in range(12)]
    figure = overview([capture_of(names)])
    for title, i in zip(titles(panels(figure)[0]), (1, 4, 7, 10), strict=True):
        name = title.splitlines()[0].removeprefix(f"{i}  ")
        assert name[0] == "…" and names[i].endswith(name[1:]) and f"{i}.final_layer_norm" in name


def test_what_is_far_too_long_ends_in_an_ellipsis():
    seen = capture_of(["norm"], data="one word " * 200, weights="/folder" * 200, model="m" * 200)
    model, *lines = headings(overview([seen]))[0].splitlines()
    assert model.startswith("…m")
    assert len(lines) == 6
    assert lines[2].endswith("…") and lines[5].endswith("…")
    assert lines[:2] == ["weights:", ("/folder" * 200)[: len(lines[1])]] and len(lines[1]) > 40
    assert all(line.rsplit(" ")[-1] in ("one", "word") for line in lines[3:5])


def test_mistakes_are_refused(seen, fits):
    with pytest.raises(UsageError, match="2 captures, but the fits of 1"):
        overview(seen, fits[:1])
    with pytest.raises(UsageError, match="no capture to draw"):
        overview([])


def test_its_file_names_every_model_weights_and_versions(figure, seen, tmp_path):
    path = save_figure(figure, tmp_path / "overview.png", seen, dpi=40)
    with Image.open(path) as image:
        described = json.loads(image.text["Description"])
        assert image.width == 7 * 40
    assert described == [
        {**capture.about, "versions": dict(capture.versions), "seed": capture.seed} for capture in seen
    ]
    content = html.unescape(save_figure(figure, tmp_path / "overview.svg", seen, dpi=40).read_text())
    assert ">weights: random weights, seed 0<" in content
    assert json.dumps(described) in content


@pytest.fixture
def one_unbounded(monkeypatch):
    """The second site is bounded by nothing, as where running statistics normalize."""
    seen = capture_of(["bounded", "unbounded"])
    of, unbounded = NormSite.bound.fget, "unbounded"
    monkeypatch.setattr(NormSite, "bound", property(lambda site: math.inf if site.name == unbounded else of(site)))
    assert [site.bound for site in seen.sites] == [math.sqrt(7), math.inf]
    return seen


@pytest.mark.parametrize("drawn", [plot, lambda seen: overview([seen])], ids=["plot", "overview"])
def test_what_nothing_bounds_has_no_bound(one_unbounded, drawn):
    figure = drawn(one_unbounded)
    figure.draw_without_rendering()
    axes = [ax for ax in figure.axes if ax.axison and ax.get_visible()]
    dotted = [sum(line.get_linestyle() == ":" for line in ax.get_lines()) for ax in axes]
    assert dotted == [2, 0] * (len(axes) // 2)
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert not [text for text in texts if "inf" in text or "off the panel" in text]
    assert all(math.isfinite(limit) for ax in axes for limit in (*ax.get_xlim(), *ax.get_ylim()))
    assert "bound: ±√(d−1), without centring ±√d" in texts


def test_a_norm_of_one_element_is_drawn_without_a_warning(recwarn):
    seen = capture_of(["one"], d=1)
    overview([seen], [normscope.fit(seen)]).draw_without_rendering()
    assert [str(warning.message) for warning in recwarn] == []
