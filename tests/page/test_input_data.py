"""Kept inputs as the page shows them: places of tokens, previews, and lines and tails of tokens."""

import base64
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from networks import network_of
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.previews import Preview
from normscope.page.document import capture_data
from normscope.page.input_data import inputs_data, places_of


def unpacked(array):
    """Return the numbers of a packed array."""
    return np.frombuffer(base64.b64decode(array["bytes"]), array["kind"]) * array.get("scale", 1)


NORM = SimpleNamespace(placement="pre-norm", calls=1)
SPECTROGRAM = torch.zeros(8, 160, 1, dtype=torch.uint8)
PICTURE = Preview(pixels=torch.zeros(4, 4, 3, dtype=torch.uint8), size=(224, 224))


def captured(network, x, **options):
    return normscope.capture(network.eval(), [x], keep_inputs=1, **options)


def places_by_site(seen):
    """Places of the first input that tokens are, by site."""
    [kept] = seen.inputs
    return {site.name: places_of(kept.tokens[site.name].shape, kept.preview, site) for site in seen.sites}


def changed(network, site, x, other):
    """Numbers of the tokens that differ at a site between two inputs."""
    tokens = [captured(network, images, layers=site).inputs[0].tokens[site] for images in (x, other)]
    before, after = (of_input.shift + 1j * of_input.sigma for of_input in tokens)
    return torch.nonzero(before != after).flatten().tolist()


TINY = {"depth": 1, "embed_dim": 48, "num_heads": 2}
# Options and first norm of a network; its grid of patches, and the tokens before them.
NETWORKS = {
    "vit_tiny_patch16_224": ({**TINY, "img_size": 96}, "blocks.0.norm1", (6, 6), 1),
    "vit_small_patch14_reg4_dinov2": ({**TINY, "img_size": 70}, "blocks.0.norm1", (5, 5), 5),
    "vit_base_patch32_224": ({**TINY, "img_size": (96, 192)}, "blocks.0.norm1", (3, 6), 1),
    # (samples, height, width, channels)
    "swin_tiny_patch4_window7_224": ({"depths": (1, 1, 1, 1), "embed_dim": 24}, "patch_embed.norm", (56, 56), 0),
    "convnext_atto": ({"depths": (1, 1, 1, 1)}, "stem.1", (56, 56), 0),  # (samples, channels, height, width)
}


def timm_network(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(name, **NETWORKS[name][0])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_token_of_a_patch_is_the_one_that_its_pixels_change(name):
    network, (options, site, (rows, columns), before) = timm_network(name), NETWORKS[name]
    size = options.get("img_size", 224)
    height, width = size if isinstance(size, tuple) else (size, size)
    x = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    places = places_by_site(captured(network, x, layers=site))[site]
    assert (places.kind, places.grid, places.before) == ("patches", (rows, columns), before)
    row, column = rows // 3, 2 * columns // 3
    other = x.clone()
    other[0, :, (2 * row + 1) * height // (2 * rows), (2 * column + 1) * width // (2 * columns)] += 3
    assert changed(network, site, x, other) == [before + row * columns + column]


def test_swin_is_laid_out_as_a_picture_down_to_its_last_stage():
    seen = captured(timm_network("swin_tiny_patch4_window7_224"), torch.randn(1, 3, 224, 224), layers="*.norm1")
    grids = {name: places.grid for name, places in places_by_site(seen).items()}
    assert grids == {f"layers.{stage}.blocks.0.norm1": (56 >> stage, 56 >> stage) for stage in range(4)}


def test_a_frame_is_the_stretch_of_the_waveform_that_changes_it():
    torch.manual_seed(0)
    network = network_of(
        lambda self, x: self.norm(self.convolution(x[:, None]).transpose(1, 2)),
        convolution=nn.Conv1d(1, 8, 10, stride=5),
        norm=nn.LayerNorm(8),
    )
    x = torch.randn(1, 4000)
    places = places_by_site(captured(network, x))["norm"]
    assert (places.kind, places.grid) == ("frames", (1, 799))
    other = x.clone()
    other[0, 2511] += 3
    for frame in changed(network, "norm", x, other):
        assert abs((frame + 0.5) / places.grid[1] - 2511 / 4000) * 4000 < 10


LAYOUTS = [
    ((1,), PICTURE, NORM, "", "one token stands for the whole input"),
    ((32,), PICTURE, NORM, "", "the tokens of this norm are no places of the input: they lie as 32"),
    ((100,), PICTURE, NORM, "", "the tokens of this norm are no places of the input: they lie as 100"),
    ((64, 49), PICTURE, NORM, "", "the tokens of this norm are no places of the input: they lie as 64 × 49"),
    ((2, 197), PICTURE, SimpleNamespace(placement=None, calls=2), "patches", "in each of 2 calls"),
    ((256, 16), PICTURE, SimpleNamespace(placement="qk", calls=1), "patches", "16 × 16 patches of 14 × 14 pixels"),
    ((57, 57), PICTURE, NORM, "patches", "57 × 57 patches of about 3.93 × 3.93 pixels"),
    ((5,), Preview(words=tuple("abcde")), NORM, "words", "5 positions of the text"),
    ((6,), Preview(words=tuple("abcde")), NORM, "", "no places of the input"),
    ((1500,), Preview(pixels=SPECTROGRAM, size=(80, 3000), along_width=True), NORM, "frames", "every 2 col"),
    ((12, 101), Preview(pixels=SPECTROGRAM, size=(128, 1024), along_width=True), NORM, "", "no places"),
    ((77,), Preview(pixels=PICTURE.pixels, size=(224, 224), words=("a",) * 77), NORM, "words", "77 positions"),
    ((50,), Preview(pixels=PICTURE.pixels, size=(224, 224), words=("a",) * 77), NORM, "patches", "7 × 7 patches"),
]


@pytest.mark.parametrize(("shape", "preview", "site", "kind", "said"), LAYOUTS)
def test_places_are_described(shape, preview, site, kind, said):
    places = places_of(shape, preview, site)
    assert places.kind == kind and said in places.said


def test_heads_come_first_or_last():
    heads = SimpleNamespace(placement="qk", calls=1)
    assert places_of((3, 197), PICTURE, heads).steps == (197, 1)
    assert places_of((197, 3), PICTURE, heads).steps == (1, 3)


def patches():
    """A LayerNorm, a BatchNorm and a GroupNorm of patches of 4 × 4 pixels."""

    def forward(self, x):
        x = nn.functional.pixel_unshuffle(x, 4).flatten(2)
        return self.norm(x.transpose(1, 2)), self.straight(x), self.groups(x)

    return network_of(forward, norm=nn.LayerNorm(48), straight=nn.BatchNorm1d(48), groups=nn.GroupNorm(2, 48))


def test_tokens_have_the_line_and_the_tail_of_their_own_elements():
    x = 2 * torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    x[:, :, :4] *= 4
    seen = captured(patches(), x)
    capture = capture_data(seen, normscope.fit(seen, "tanh"), 4000)
    sites = {site["name"]: site for site in capture["sites"]}
    rows = nn.functional.pixel_unshuffle(x[0], 4).flatten(1).T.double()
    [tokens] = sites["norm"]["drawn"]["inputs"]
    np.testing.assert_allclose(unpacked(tokens["offset"]), rows.mean(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(unpacked(tokens["sigma"]), rows.std(1, correction=0), rtol=1e-4)
    tail_from = sites["norm"]["drawn"]["tail_from"]
    np.testing.assert_allclose(unpacked(tokens["tail"]), (rows.abs() >= tail_from).double().mean(1), atol=1e-3)
    tanh = normscope.fit(seen, "tanh")["norm", "tanh"]
    assert math.tanh(tanh.alpha * tail_from) / (tanh.alpha * tail_from) == pytest.approx(0.95, abs=0.01)
    # Of running statistics y is a line of x: there is no tail. Tokens of groups are no places.
    assert sites["straight"]["drawn"]["tail_from"] is None and sites["groups"]["drawn"]["inputs"] == [None]


def test_drawn_tokens_are_found_among_the_kept_ones():
    """The page marks the place of a drawn token by its sample and its position."""
    seen = normscope.capture(patches(), [torch.randn(4, 3, 16, 16)], keep_inputs=2, layers="norm")
    capture = capture_data(seen, normscope.fit(seen, "tanh"), 4000)
    site, kept = capture["sites"][0], {one["sample"]: place for place, one in enumerate(capture["inputs"])}
    sample, position, sigma = (unpacked(site["drawn"]["shown"][name]) for name in ("sample", "position", "sigma"))
    met = [at for at in range(len(sample)) if sample[at] in kept]
    assert len(met) > 10
    for at in met:
        of_input = unpacked(site["drawn"]["inputs"][kept[sample[at]]]["sigma"])
        assert of_input[position[at]] == pytest.approx(sigma[at], rel=1e-6)


def test_an_input_of_several_parts_is_one_input():
    x = torch.randn(2, 3, 16, 16)
    batches = []
    for first, step in ((0, 9), (2, 1)):
        samples = tuple(Sample(f"path {number}", number, first + number, "paths") for number in range(2))
        batches.append(Batch((x,), samples=samples, part=f"timestep {step}"))
    inputs = inputs_data(normscope.capture(patches(), batches, keep_inputs=2, layers="norm").inputs)
    expected = [(f"path {at % 2}", f"timestep {(9, 1)[at // 2]}", at % 2, at) for at in range(4)]
    assert [(row["name"], row["part"], row["group"], row["sample"]) for row in inputs] == expected
    assert unpacked(inputs[0]["picture"]["pixels"]).shape == (16 * 16 * 3,) and inputs[0]["waveform"] is None


def test_previews_of_waveforms_and_words(ears):
    x = torch.randn(2, 800)
    [recording] = inputs_data(captured(ears, x).inputs)
    assert recording["waveform"]["length"] == 800 and recording["words"] == [] and recording["picture"] is None
    assert unpacked(recording["waveform"]["low"]).min() == x[0].min()
    words = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8))
    [read] = inputs_data(captured(words, torch.arange(6).view(1, 6)).inputs)
    assert read["words"] == ["#0", "#1", "#2", "#3", "#4", "#5"]


def test_a_capture_without_kept_inputs_has_none(documents):
    drawn = documents[0]["drawn-0-0"]
    assert documents[0]["data"]["captures"][0]["inputs"] == drawn["inputs"] == [] and drawn["tail_from"] is None
