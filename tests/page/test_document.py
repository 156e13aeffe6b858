"""The page's document: captures, counterparts, curves, looks and warnings."""

import dataclasses

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import DataError, UsageError
from normscope.page.document import capture_data, document
from normscope.show.figures.style import STYLES


def test_captures_are_described(seen, documents):
    [capture] = documents[0]["data"]["captures"]
    assert capture["about"] == {**seen.about, "dtype": "float32"} and capture["samples"] == seen.n_samples
    assert [site["name"] for site in capture["sites"]] == [site.name for site in seen.sites]


@pytest.mark.parametrize(
    ("weights", "random"),
    [
        ("random weights, seed 0", True),
        ("swap dyt (random weights, seed 3)", True),
        ("made by net.py:make (sha256 0123456789ab)", False),  # whose weights only its author knows
        ("random weights.safetensors (sha256 0123456789ab)", False),
    ],
)
def test_weights_are_called_random_where_normscope_initialized_them(other, weights, random):
    seen = dataclasses.replace(other.only("off"), about={**other.about, "weights": weights})
    assert capture_data(seen, [], 4000)["random"] is random


def test_counterparts_are_those_of_the_comparison(seen, documents):
    assert documents[1]["data"]["matches"] == [{site.name: site.name for site in seen.sites}] * 2


def test_looks_are_those_of_the_figures(documents):
    styles = documents[0]["data"]["styles"]
    for name, style in STYLES.items():
        for curve, (colour, dashes) in style.looks(["mine"]).items():
            drawn = [] if dashes == "-" else list(dashes[1])
            assert styles[name]["curves"][curve] == {"colour": colour, "dashes": drawn}
        colours = {styles[name]["curves"][curve]["colour"] for curve in ("tanh", "isru", "derf", "mine")}
        assert len(colours) == 4


def test_a_users_function_alone_is_sampled(other):
    swish = normscope.curve_of(nn.functional.silu, "swish", "u·sigmoid(u)")
    seen = other.only("off")
    curves = document([seen], [normscope.fit(seen, [swish, "tanh", "free"])], {})["curves"]
    assert [curves[name]["sampled"] is not None for name in ("tanh", "swish", "free")] == [False, True, False]


def test_fits_of_channels_are_left_to_the_tables():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    seen = normscope.capture(nn.LayerNorm(8), [x], per_channel=True)
    [site] = capture_data(seen, normscope.fit(seen, "tanh", per="channel"), 4000)["sites"]
    assert site["fits"] == []


def test_points_are_weighted_as_the_fits_are():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    norm = nn.LayerNorm(8)
    nn.init.uniform_(norm.weight)
    weighted = normscope.capture(norm, [x], by_gamma=True)
    by_gamma = normscope.fit(weighted, "tanh", weights_by="gamma")
    assert capture_data(weighted, by_gamma, 4000)["weights_by"] == "gamma"
    with pytest.raises(UsageError, match="weight pairs by gamma and by pairs"):
        capture_data(weighted, [*by_gamma, *normscope.fit(weighted, "tanh")], 4000)
    with pytest.raises(DataError, match="no sums weighted by γ²"):
        capture_data(normscope.capture(norm, [x]), by_gamma, 4000)
