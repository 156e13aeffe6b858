"""Heat maps of where the squares lie, of massive activations that are planted."""

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.errors import DataError
from normscope.figures.depth import plot_tails, shares_of


@pytest.fixture(scope="module")
def seen():
    norms = nn.ModuleList([nn.LayerNorm(48), nn.LayerNorm(48), nn.LayerNorm(48)])
    model = nn.Module()
    model.norms = norms

    def forward(x):
        massive = x.clone()
        massive[:, 0, 7] = 3000
        return norms[0](x), norms[1](massive), norms[2](massive)

    model.forward = forward
    x = torch.randn(20, 9, 48, generator=torch.Generator().manual_seed(0))
    return normscope.capture(model, [x], about={"model": "net", "weights": "none", "data": "noise"}), x


def test_a_column_holds_its_sites_shares_and_massive_ones_are_named(seen):
    capture, x = seen
    figure = plot_tails(capture, normscope.norm_cards(capture))
    channels, tokens = figure.axes[:2]
    image = channels.images[0].get_array()
    squares = (x.double() ** 2).sum((0, 1))
    np.testing.assert_allclose(image[:, 0], squares / squares.sum(), rtol=1e-6)  # float32 inputs
    for column in range(3):
        np.testing.assert_allclose(image[:, column], shares_of(capture, f"norms.{column}"))
    assert [text.get_text() for text in channels.texts if text.get_text() != "×"] == ["7"]
    assert [text.xy[0] for text in channels.texts if text.get_text() == "×"] == [1, 2]  # the sites that have them
    assert any("massive activations" in text.get_text() for text in figure.texts)
    assert tokens.get_xlabel() == "norm site, in the order of calls"


def test_tokens_of_largest_x_are_counted_by_position(seen):
    capture, _ = seen
    cards = normscope.norm_cards(capture)
    tokens = plot_tails(capture, cards).axes[1]
    image = tokens.images[0].get_array().filled(0)
    assert image.sum(0).tolist() == [16, 16, 16]
    assert image[0, 1] == image[0, 2] == 16  # the planted first token
    assert "0" in [text.get_text() for text in tokens.texts]


def test_wide_sites_show_the_largest_channel_of_each_pixel():
    x = torch.randn(6, 4, 900, generator=torch.Generator().manual_seed(0))
    x[..., 613] *= 50
    capture = normscope.capture(nn.Sequential(nn.LayerNorm(900)), [x])
    channels = plot_tails(capture, normscope.norm_cards(capture), width=5.5).axes[0]
    image = channels.images[0].get_array()
    each = -(-900 // 200)
    assert image.shape[0] == 900 / each and int(np.argmax(image[:, 0])) == 613 // each
    assert image.max() == pytest.approx(shares_of(capture, "0").max())
    assert [text.get_text() for text in channels.texts] == ["613"]


def test_without_a_pair_there_is_nothing_to_draw():
    capture = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.full((2, 8), torch.nan)])
    with pytest.raises(DataError, match="No site holds a pair"):
        plot_tails(capture, normscope.norm_cards(capture))
