"""What the page holds of a site: numbers as Python has them, drawn pairs, and places of inputs."""

import base64
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.page.document import capture_data
from normscope.page.site_data import COLUMNS, ROWS
from normscope.show.figures.axes import XAxis, scales_of
from normscope.show.figures.panel_data import image
from normscope.show.tables.glossary import definitions


def unpacked(array):
    """Return the numbers of a packed array."""
    return np.frombuffer(base64.b64decode(array["bytes"]), array["kind"]) * array.get("scale", 1)


@pytest.fixture(scope="module")
def sites(documents):
    """The sites of a file, with what their figures need."""
    page = documents[0]
    sites = page["data"]["captures"][0]["sites"]
    return {site["name"]: site | {"drawn": page[f"drawn-0-{place}"]} for place, site in enumerate(sites)}


def test_the_points_give_each_fits_r2(sites, fits):
    for fit in fits:
        if fit.degenerate:
            continue
        nodes = sites[fit.site]["drawn"]["nodes"]
        x, y, weight, scatter = (unpacked(nodes[name]) for name in ("x", "y", "weight", "scatter"))
        left = (weight * (y - fit(torch.tensor(x)).numpy()) ** 2 + scatter).sum()
        assert abs(1 - left / nodes["total"] - fit.r2) < 1e-12


def test_tokens_are_the_drawn_ones(sites, seen):
    shown, stats = sites["first"]["drawn"]["shown"], seen.stats["first"]
    assert shown["key"] == [f"{int(key):x}" for key in [*stats.tokens.key, *stats.largest.key]]
    x = torch.cat([stats.tokens.x, stats.largest.x]).numpy()
    y = unpacked(shown["y"]).reshape(x.shape)
    lines = unpacked(shown["offset"])[:, None] + unpacked(shown["sigma"])[:, None] * y
    # y is a multiple of a 32,767th of the largest one, and x is σ times as large.
    assert np.abs(lines - x).max() < 1e-3 * np.abs(x).max()
    assert "x" not in shown


def test_few_elements_leave_the_largest_and_the_first_of_the_uniform(seen, fits):
    [site] = capture_data(seen.only("first"), fits["first"], 160)["sites"]
    shown, stats = site["drawn"]["shown"], seen.stats["first"]
    kept = [*stats.tokens.key[:6], *stats.largest.key[:4]]
    assert shown["key"] == [f"{int(key):x}" for key in kept] and shown["uniform"] == 6


@pytest.mark.parametrize("scale", ["linear", "asinh"])
def test_the_density_is_the_figures(sites, seen, scale):
    drawn, stats = sites["first"]["drawn"], seen.stats["first"]
    axis, density = drawn["axes"][scale], drawn["axes"][scale]["density"]
    x_edges = XAxis(axis["limits"], axis["width"]).evenly(COLUMNS + 1)
    counts = image(stats, x_edges, np.linspace(*axis["y"], ROWS + 1))
    first, length, levels = (unpacked(density[name]).astype(int) for name in ("first", "length", "levels"))
    shown, place = np.zeros_like(counts), 0
    for column in range(COLUMNS):
        shown[first[column] : first[column] + length[column], column] = levels[place : place + length[column]]
        place += length[column]
    assert place == len(levels) and density["most"] == round(counts.max())
    here = shown > 0
    assert not here[counts == 0].any() and here[counts >= 0.5].all()
    step = math.log(density["most"]) / 254
    # A level is one of 254 equal factors from a single pair.
    assert np.abs(np.log(counts[here].clip(1)) - (shown[here] - 1) * step).max() <= 1.01 * step


def test_axes_are_the_figures_and_count_the_pairs_beyond():
    x = torch.randn(400, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 400)[:, None]
    x[0, 3] = -3000
    seen = normscope.capture(nn.LayerNorm(16), [x])
    fits = normscope.fit(seen, "linear,isru,tanh")
    [site] = capture_data(seen, fits, 4000)["sites"]
    linear, asinh = site["drawn"]["axes"]["linear"], site["drawn"]["axes"]["asinh"]
    scales = scales_of([(seen.sites[0], seen.stats[""])], "linear")
    assert linear["limits"] == scales.x.limits and linear["y"] == scales.y and linear["width"] is None
    low, high = linear["limits"]
    assert 1 == linear["beyond"] == int(((x < low) | (x > high)).sum())
    assert asinh["limits"][0] <= -3000 and asinh["limits"][1] >= x.max() and asinh["beyond"] == 0 and asinh["width"] > 0


def test_the_card_is_the_command_line_s(sites, seen):
    printed = str(normscope.table(normscope.norm_cards(seen)["second"]))
    assert len(sites["second"]["card"]) > 15
    for heading, cell, definition in sites["second"]["card"]:
        assert heading in printed and cell in printed and definition in [*definitions("stats").values(), ""]


def test_a_point_wise_function_has_a_card_of_its_own():
    x = torch.randn(40, 5, 16, generator=torch.Generator().manual_seed(0))
    seen = normscope.capture(nn.Sequential(normscope.Derf(16, alpha=0.4, shift=0.1)), [x])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    card = {heading: cell.partition(" ")[0] for heading, cell, _ in site["card"]}
    assert (card["f"], card["α"], card["s"], card["dead"]) == ("derf", "0.4", "0.1", "0")
    beyond = float(((0.4 * x + 0.1).abs() > 1).double().mean())
    assert float(card[">1"].removesuffix("%")) == pytest.approx(100 * beyond, abs=0.05)
    assert "σ" not in card and site["numbers"]["sigma"] is None
    shown = site["drawn"]["shown"]
    assert "x" in shown  # as no line contains a token


def test_massive_channels_and_tokens_are_counted(sites):
    numbers = sites["first"]["numbers"]
    assert numbers["massive_channels"] == 0  # 300 is beyond 100, and not beyond 1000 times the median
    x = torch.randn(40, 5, 16, generator=torch.Generator().manual_seed(0))
    x[:7, 0, 2], x[:, 1, 9] = 4000, -5000
    seen = normscope.capture(nn.LayerNorm(16), [x])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    assert site["numbers"]["massive_channels"] == 2 and site["numbers"]["massive_tokens"] == 16
    assert site["numbers"]["massive"] == 47
    squares = x.double().square().sum((0, 1))
    share = float(squares.topk(3).values.sum() / squares.sum())
    assert site["numbers"]["channel_share"] == pytest.approx(share, abs=1e-9)


def test_grouped_norms_show_pairs_that_know_their_channel(sites, seen):
    by_channel = sites["groups"]["drawn"]["by_channel"]
    assert sites["groups"]["channels"] is None
    x, channel = unpacked(by_channel["x"]), unpacked(by_channel["channel"])
    reach = unpacked(by_channel["reach"])
    assert len(x) and (np.abs(x) <= reach[channel] * (1 + 1e-6)).all()


def test_a_site_without_pairs_gives_the_reason(sites):
    assert sites["off"]["nothing"] == "all zero" and sites["off"]["drawn"] is None
    assert [fit["nothing"] for fit in sites["off"]["fits"]] == ["all zero"] * 4
    seen = normscope.capture(nn.LayerNorm(4), [torch.full((3, 4), torch.nan)])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    assert site["nothing"] == "no finite pair" and site["drawn"] is None and site["left_out"] == 3


def test_a_norm_without_closed_form_gives_the_reason():
    norm = nn.BatchNorm1d(4).eval()
    seen = normscope.capture(norm, [torch.randn(32, 4)])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    assert site["drawn"]["diagonal"]["reason"] and site["bound"] is None


def test_derivatives_are_beside_the_norms_own(sites, seen, fits):
    diagonal = sites["first"]["drawn"]["diagonal"]
    x, slopes = unpacked(diagonal["x"]), unpacked(diagonal["y"])
    tokens = torch.cat([seen.stats["first"].tokens.x, seen.stats["first"].largest.x]).double().requires_grad_()
    y = nn.functional.layer_norm(tokens, (16,))
    truth = {}
    for token, channel in itertools.product(range(0, len(tokens), 20), range(16)):
        (slope,) = torch.autograd.grad(y[token, channel], tokens, retain_graph=True)
        truth[tokens[token, channel].item()] = float(slope[token, channel])
    met = [(slope, truth[at]) for at, slope in zip(x.tolist(), slopes.tolist(), strict=True) if at in truth]
    assert len(met) > 20
    for slope, expected in met:
        assert math.isclose(slope, expected, rel_tol=1e-6, abs_tol=1e-9)  # float32
    assert len(unpacked(diagonal["mean"]["x"])) > 10
