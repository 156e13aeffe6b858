"""Artists of the overview, and its files."""

import html
import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.norms.sites import NormSite
from normscope.show.figures.scurves import overview, plot
from normscope.show.figures.sheet import save_figure
from normscope.show.figures.style import STYLES

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
def figure(seen, fits):
    return overview(seen, fits)


def panels(figure):
    """The panels of each row, from left to right."""
    rows = {}
    for ax in (ax for ax in figure.axes if ax.get_visible()):
        rows.setdefault(ax.get_subplotspec().rowspan.start, []).append(ax)
    return [rows[start] for start in sorted(rows)]


def words(ax):
    return [text.get_text() for text in ax.texts]


def foot(figure):
    return " ".join(text.get_text().replace("\n", " ") for text in figure.texts)


def test_a_row_a_model_and_four_sites_along_its_depth(figure, seen):
    rows = panels(figure)
    names = [row[0].get_ylabel() for row in rows]
    assert names == ["demo_vit\noutput y", "demo_vit\nrandom weights\noutput y"]
    for row, capture in zip(rows, seen, strict=True):
        assert [ax.get_title(loc="left") for ax in row] == ["0.norm1", "1.norm2", "2.norm1", "3.norm2"]
        n = capture.stats["blocks.0.norm1"].n_pairs
        weights = re.sub(r", sha256 \w+", "", capture.about["weights"])
        facts = f"demo_vit: LayerNorm, d = 64, pre-norm, {n:,} pairs a panel"
        assert f"{facts} · weights: {weights} · data: {capture.about['data']}." in figure.caption
    assert figure.get_figwidth() == 7 and figure.get_suptitle() == ""


def test_a_compact_plot_is_the_overview_of_one_model(seen, fits):
    compact = plot(seen[0], fits[0], compact=True)
    assert [len(row) for row in panels(compact)] == [4]
    alone = overview(seen[:1], fits[:1])
    assert [words(ax) for ax in compact.axes] == [words(ax) for ax in alone.axes]


def test_named_sites_are_all_drawn_in_rows_of_four(seen):
    chosen = plot(seen[0], compact=True, layers=[0, 1, 2, 4, 6, 7], labels="none")
    assert [len(row) for row in panels(chosen)] == [4, 2]
    assert not any(ax.get_title(loc="left") for row in panels(chosen) for ax in row)


@pytest.mark.parametrize(("networks", "width"), [(1, 3.25), (2, 3.25), (2, 5.5)])
def test_a_page_contains_it_and_words_take_little_of_its_height(seen, fits, networks, width):
    figure = overview(seen[:networks], fits[:networks], width=width)
    figure.draw_without_rendering()
    top = max(artist.get_window_extent().y1 for artist in (*figure.legends, *figure.texts))
    assert figure.get_figheight() <= 9 and top <= 0.15 * figure.bbox.height + 1  # a pixel
    assert {len(row) for row in panels(figure)} == {2 if width < 5 else 4}


def test_parts_of_the_data_are_named():
    seen = [capture_of(["norm"], model="net", part=f"timestep {t}", weights="w") for t in (980, 0)]
    names = [row[0].get_ylabel().split("\n")[0] for row in panels(overview(seen))]
    assert names == ["net · timestep 980", "net · timestep 0"]
    assert plot(seen[0], color="token").get_suptitle() == "net · timestep 980 · 40 samples"


def test_rows_of_one_network_are_named_by_their_data():
    seen = [
        capture_of(["norm"], model="net", weights="w", data=data) for data in ("12 texts", "12 texts · without token 0")
    ]
    names = [row[0].get_ylabel().replace("\n", " ") for row in panels(overview(seen))]
    assert names == ["net output y", "net without token 0 output y"]
    model = nn.Sequential(nn.LayerNorm(8))
    x, about = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0)), {"model": "net", "data": "2 texts"}
    skipping = [normscope.capture(model, [x], about=about, skip=skip) for skip in range(3)]
    names = [row[0].get_ylabel().replace("\n", " ") for row in panels(overview(skipping))]
    assert names == ["net output y", "net without token 0 output y", "net without 2 first tokens output y"]


def test_each_panel_shows_its_own_pairs_and_curves(figure, seen, fits):
    for row, capture, own in zip(panels(figure), seen, fits, strict=True):
        for ax, site in zip(row, (capture.sites[i] for i in SHOWN), strict=True):
            inside = ax.images[0].get_array().sum()
            beyond = sum(int(text.split()[0].replace(",", "")) for text in words(ax) if "beyond" in text)
            assert inside == pytest.approx(capture.stats[site.name].n_pairs - beyond, rel=1e-2)
            for fit in (fit for fit in own if fit.site == site.name):
                colour, _ = STYLES["light"].looks()[fit.curve]
                line = next(line for line in ax.get_lines() if line.get_color() == colour)
                np.testing.assert_allclose(line.get_ydata(), fit(torch.from_numpy(np.asarray(line.get_xdata()))))
                assert f"{fit.curve} {fit.r2_cv:.3f}" in words(ax)


def test_fewer_than_four_sites_make_fewer_panels():
    seen = [capture_of(list("abc"[:n]), model=f"with {n}") for n in (1, 2, 3)]
    figure = overview(seen)
    assert [len(row) for row in panels(figure)] == [1, 2, 3]
    labelled = [[bool(ax.get_xlabel()) for ax in row] for row in panels(figure)]
    assert labelled == [[False], [False, False], [True, True, True]]  # x is named once a column, at its foot
    alone = overview(seen[:1])
    assert len(panels(alone)) == 1
    assert alone.get_figwidth() == 3.5


def test_sites_without_a_fit_are_marked():
    empty, constant, far = (capture_of(["norm"], scale=scale) for scale in (math.nan, 0.0, 1e9))
    fits = normscope.fit(far, "tanh")
    assert not fits[0].converged
    figure = overview(
        [empty, constant, far, capture_of(["full"])], [normscope.fit(empty), normscope.fit(constant), fits, []]
    )
    rows = [ax for (ax,) in panels(figure)]
    r2 = fits[0].r2 if fits[0].r2_cv is None else fits[0].r2_cv
    assert [words(ax) for ax in rows] == [
        *(["nothing to fit"], ["nothing to fit"]),
        *(["R²", f"tanh {r2:.3f}", "not converged"], []),
    ]
    assert not rows[0].images and rows[-1].images
    assert "0 pairs a panel" in figure.caption


def test_odd_names_are_written_as_they_are():
    seen = capture_of(["a$b_{c}^$", "<b>&", "W" * 60], weights="a_folder/that has a name/" * 30, data="x" * 1000)
    odd = overview([seen])
    (row,) = panels(odd)
    assert [ax.get_title(loc="left") for ax in row[:2]] == ["a$b_{c}^$", "<b>&"]
    assert row[0].get_ylabel() == "odd$name_{\noutput y"
    assert "x" * 1000 in odd.caption and "xxx" not in foot(odd)  # as it would be cut
    written = [*odd.texts, *(ax._left_title for ax in row), row[0].yaxis.label]
    assert not any(text.get_parse_math() for text in written)


def test_refusals(seen, fits):
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
    assert "weights: random weights, seed 0" in content
    assert json.dumps(described) in content


@pytest.mark.parametrize("drawn", [plot, lambda seen: overview([seen])], ids=["plot", "overview"])
def test_a_norm_without_a_bound_has_no_dotted_line(monkeypatch, drawn):
    seen, of = capture_of(["bounded", "unbounded"]), NormSite.bound.fget
    monkeypatch.setattr(NormSite, "bound", property(lambda site: math.inf if site.name == "unbounded" else of(site)))
    axes = [ax for ax in drawn(seen).axes if ax.get_visible()]
    dotted = [sum(line.get_linestyle() == ":" for line in ax.get_lines()) for ax in axes]
    assert dotted == [2, 0] * (len(axes) // 2)
    assert all(math.isfinite(limit) for ax in axes for limit in (*ax.get_xlim(), *ax.get_ylim()))


def test_a_norm_of_one_element_is_drawn_without_a_warning(recwarn):
    seen = capture_of(["one"], d=1)
    overview([seen], [normscope.fit(seen)]).draw_without_rendering()
    assert [str(warning.message) for warning in recwarn] == []
