"""What the page holds of a site: numbers as Python has them, and pairs as they were drawn."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.figures.axes import ASINH, scales_of
from normscope.figures.panels import image
from normscope.page.document import capture_data
from normscope.page.site_data import COLUMNS, ROWS, unpacked


@pytest.fixture(scope="module")
def sites(seen, fits):
    return {site["name"]: site for site in capture_data(seen, fits, 4000)["sites"]}


def test_the_points_give_each_fits_r2(sites, fits):
    for fit in fits:
        if fit.degenerate:
            continue
        nodes = sites[fit.site]["nodes"]
        x, y, weight, scatter = (unpacked(nodes[name]) for name in ("x", "y", "weight", "scatter"))
        left = (weight * (y - fit(torch.tensor(x)).numpy()) ** 2 + scatter).sum()
        assert abs(1 - left / nodes["total"] - fit.r2) < 1e-12


def test_tokens_are_the_drawn_ones(sites, seen):
    shown, stats = sites["first"]["shown"], seen.stats["first"]
    assert shown["key"] == [f"{int(key):x}" for key in [*stats.tokens.key, *stats.largest.key]]
    x = torch.cat([stats.tokens.x, stats.largest.x]).numpy()
    y = unpacked(shown["y"]).reshape(x.shape)
    lines = unpacked(shown["offset"])[:, None] + unpacked(shown["sigma"])[:, None] * y
    # y has eleven bits, and x is σ times as large.
    assert np.abs(lines - x).max() < 1e-3 * np.abs(x).max()
    assert "x" not in shown


def test_few_elements_leave_the_largest_and_the_first_of_the_uniform(seen, fits):
    sites = capture_data(seen, fits, 160)["sites"]
    shown, stats = sites[0]["shown"], seen.stats["first"]
    kept = [*stats.tokens.key[:6], *stats.largest.key[:4]]
    assert shown["key"] == [f"{int(key):x}" for key in kept] and shown["uniform"] == 6
    assert shown["drawn"] == len(stats.tokens.key) + len(stats.largest.key)


def test_a_norm_that_is_no_line_keeps_its_x():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(x)

    seen = normscope.capture(Odd(), [torch.randn(32, 8)])
    stats = seen.stats["norm"]
    stats.tokens.y.copy_(stats.tokens.x.tanh())
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    shown = unpacked(site["shown"]["x"]).reshape(-1, 8)
    np.testing.assert_array_equal(shown[: len(stats.tokens.x)], stats.tokens.x.numpy())


def test_the_density_is_the_figures(sites, seen):
    density, stats = sites["first"]["density"], seen.stats["first"]
    scales = scales_of([(seen.sites[0], stats)], ASINH)
    counts = image(stats, scales.x.evenly(COLUMNS + 1), np.linspace(*scales.y, ROWS + 1))
    first, length, levels = (unpacked(density[name]).astype(int) for name in ("first", "length", "levels"))
    drawn, place = np.zeros_like(counts), 0
    for column in range(COLUMNS):
        drawn[first[column] : first[column] + length[column], column] = levels[place : place + length[column]]
        place += length[column]
    assert place == len(levels)
    here = drawn > 0
    np.testing.assert_array_equal(here, counts >= density["fewest"])
    step = math.log(density["most"] / density["fewest"]) / 254
    # A level is one of 254 equal factors.
    assert np.abs(np.log(counts[here] / density["fewest"]) - (drawn[here] - 1) * step).max() <= 1.01 * step


def test_the_card_is_the_command_line_s(sites, seen):
    printed = str(normscope.table(normscope.norm_cards(seen)["second"]))
    for question, answer in sites["second"]["card"]:
        assert question in printed and answer in printed


def test_massive_channels_and_tokens_are_counted(sites):
    numbers = sites["first"]["numbers"]
    assert numbers["massive_channels"] == 0  # 300 is beyond 100, and not beyond 1000 times the median
    x = torch.randn(40, 5, 16, generator=torch.Generator().manual_seed(0))
    x[:7, 0, 2], x[:, 1, 9] = 4000, -5000
    seen = normscope.capture(nn.LayerNorm(16), [x])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    assert site["numbers"]["massive_channels"] == 2 and site["numbers"]["massive_tokens"] == 16
    assert site["numbers"]["massive"] == 47


def test_grouped_norms_show_pairs_that_know_their_channel(sites, seen):
    by_channel = sites["groups"]["by_channel"]
    assert sites["groups"]["channels"] is None
    x, channel = unpacked(by_channel["x"]), unpacked(by_channel["channel"])
    reach = unpacked(by_channel["reach"])
    assert len(x) and (np.abs(x) <= reach[channel] * (1 + 1e-6)).all()


def test_what_nothing_went_through_says_so(sites):
    assert sites["off"]["nothing"] == "all zero" and sites["off"]["nodes"] is None
    assert [fit["nothing"] for fit in sites["off"]["fits"]] == ["all zero"] * 4
    seen = normscope.capture(nn.LayerNorm(4), [torch.full((3, 4), torch.nan)])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    assert site["nothing"] == "no finite pair" and "density" not in site and site["left_out"] == 3


def test_a_norm_of_no_closed_form_says_why():
    norm = nn.BatchNorm1d(4).eval()
    seen = normscope.capture(norm, [torch.randn(32, 4)])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    assert site["diagonal"]["reason"] and site["bound"] is None


def test_derivatives_are_beside_the_norms_own(sites, seen, fits):
    diagonal = sites["first"]["diagonal"]
    x, slopes = unpacked(diagonal["x"]), unpacked(diagonal["y"])
    tokens = torch.cat([seen.stats["first"].tokens.x, seen.stats["first"].largest.x]).double().requires_grad_()
    y = nn.functional.layer_norm(tokens, (16,))
    truth = {
        tokens[token, channel].item(): float(
            torch.autograd.grad(y[token, channel], tokens, retain_graph=True)[0][token, channel]
        )
        for token in range(0, len(tokens), 20)
        for channel in range(16)
    }
    met = [(slope, truth[at]) for at, slope in zip(x.tolist(), slopes.tolist(), strict=True) if at in truth]
    assert len(met) > 20
    for slope, expected in met:
        assert math.isclose(slope, expected, rel_tol=1e-6, abs_tol=1e-9)  # float32
    assert len(unpacked(diagonal["mean"]["x"])) > 10
