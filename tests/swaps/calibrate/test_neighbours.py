"""Which layers stand beside norms, against what the libraries' own modules are called."""

import pytest
import torch
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.pairs.norms.trace import find_norms
from normscope.swaps.calibrate.neighbours import neighbours_of


def found(network, batch, swapped=None):
    sites = find_norms(network, batch).sites
    return neighbours_of(network, sites, [site.name for site in sites] if swapped is None else swapped, batch)


def of(network, x, swapped=None):
    return found(network, Batch((x,), samples=tuple(Sample("a", 0, i) for i in range(len(x)))), swapped)


@pytest.fixture(scope="module")
def vit():
    return normscope.load("demo_vit", limit=2, device="cpu")


def test_a_vits_layers_feed_the_stream_through_their_layer_scale(vit):
    near = found(vit.module, vit.inputs.first_sample())
    layers = {one.path: one.feeds for one in near.stations if not one.is_norm}
    assert [one.path for one in near.stations][:8] == [
        "patch_embed.proj",
        *(f"blocks.0.{name}" for name in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")),
        "blocks.1.norm1",
    ]
    assert not near.left and layers["patch_embed.proj"] is None
    for depth in range(8):
        into = layers[f"blocks.{depth}.attn.proj"]
        assert (into.path, into.base, into.of_output) == (f"blocks.{depth}.norm2", f"blocks.{depth}.norm1", False)
        scale = vit.module.get_submodule(f"blocks.{depth}.ls1").gamma
        torch.testing.assert_close(into.gain.float(), scale, rtol=1e-3, atol=1e-4)  # of sums in float32
        assert layers[f"blocks.{depth}.attn.qkv"] is None and layers[f"blocks.{depth}.mlp.fc1"] is None
    assert layers["blocks.7.mlp.fc2"].path == "norm" and layers["head"] is None


def test_only_layers_between_a_swapped_norm_and_the_next_are_beside_it(vit):
    near = found(vit.module, vit.inputs.first_sample(), ["blocks.3.norm2"])
    beside = [one.path for one in near.stations if not one.is_norm]
    assert beside == [f"blocks.3.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.out = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.last, self.head = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x)
        return self.head(self.last(x + self.out(torch.relu(self.inner(x)))))


def test_behind_post_norms_a_layer_is_added_to_the_norms_output():
    torch.manual_seed(0)
    near = of(PostNorm(), torch.randn(3, 5, 6))
    layers = {one.path: one.feeds for one in near.stations if not one.is_norm}
    assert list(layers) == ["inner", "out", "head"]
    assert (layers["out"].path, layers["out"].base, layers["out"].of_output) == ("last", "first", True)
    assert layers["inner"] is None and layers["head"] is None


def test_through_a_gate_that_is_shut_a_layer_feeds_nothing():
    """As a DiT's blocks begin: nothing could be divided by such a gain."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)
            self.gate = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return self.last(x + self.gate * self.inner(self.first(x)))

    torch.manual_seed(0)
    gated, x = Gated(), torch.randn(3, 5, 6)
    assert [one.feeds for one in of(gated, x).stations if not one.is_norm] == [None]
    gated.gate.data.fill_(0.5)
    (into,) = (one.feeds for one in of(gated, x).stations if not one.is_norm)
    torch.testing.assert_close(into.gain.float(), gated.gate.data, rtol=1e-4, atol=0)


def test_what_cannot_be_refitted_is_left_with_its_reason():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(6)
            self.twice, self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.other.weight = self.one.weight
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
            self.unused = nn.Linear(6, 6)

        def forward(self, x):
            return self.normed(self.other(self.one(self.twice(self.twice(self.norm(x))))))

    assert of(Odd(), torch.randn(2, 3, 6)).left == {
        "twice": "it is called 2 times in one pass",
        "one": "its weights are another module's too",
        "other": "its weights are another module's too",
        "normed": "its weight is computed from other tensors",
        "unused": "it is not called as a module",
    }


def test_a_convolution_right_before_a_norm_feeds_it_alone():
    """As in the feature extractor of wav2vec 2.0; what also goes past a norm, in a stream, does not feed that alone."""
    norm_of = pytest.importorskip("timm.layers").LayerNorm2d
    torch.manual_seed(0)

    class Stem(nn.Module):
        def __init__(self, *, goes_on):
            super().__init__()
            self.goes_on = goes_on
            self.first, self.norm, self.inner = nn.Conv2d(1, 6, 3), norm_of(6), nn.Conv2d(6, 6, 3, groups=6)
            self.last, self.head = norm_of(6), nn.Conv2d(6, 2, 1)

        def forward(self, x):
            x = self.first(x)
            y = self.norm(x)
            return self.head(self.last(x + y if self.goes_on else self.inner(y)))

    x = torch.randn(2, 1, 9, 9)
    near = of(Stem(goes_on=False), x)
    layers = {one.path: one for one in near.stations if not one.is_norm}
    assert near.left == {} and list(layers) == ["first", "inner", "head"]
    for layer, norm in (("first", "norm"), ("inner", "last")):  # in groups or not
        assert (layers[layer].feeds.path, layers[layer].feeds.base) == (norm, None)
    assert {one.channel_axis for one in near.stations} == {-3}
    assert [one.feeds for one in of(Stem(goes_on=True), x).stations if one.path == "first"] == [None]
