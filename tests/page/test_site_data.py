"""What the page holds of a site: numbers as Python has them, drawn pairs, and places of inputs."""

import base64
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.previews import Preview
from normscope.page.document import capture_data
from normscope.page.site_data import COLUMNS, ROWS, places_of
from normscope.show.figures.axes import XAxis, scales_of
from normscope.show.figures.panels import image


def unpacked(array):
    """Return the numbers of a packed array."""
    return np.frombuffer(base64.b64decode(array["bytes"]), array["kind"]) * array.get("scale", 1)


@pytest.fixture(scope="module")
def sites(seen, fits):
    return {site["name"]: site for site in capture_data(seen, fits, 4000)["sites"]}


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
    sites = capture_data(seen, fits, 160)["sites"]
    shown, stats = sites[0]["drawn"]["shown"], seen.stats["first"]
    kept = [*stats.tokens.key[:6], *stats.largest.key[:4]]
    assert shown["key"] == [f"{int(key):x}" for key in kept] and shown["uniform"] == 6


def test_a_norm_that_is_no_line_keeps_its_x():
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.randn(32, 8)])
    stats = seen.stats["0"]
    stats.tokens.y.copy_(stats.tokens.x.tanh())
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    shown = unpacked(site["drawn"]["shown"]["x"]).reshape(-1, 8)
    np.testing.assert_array_equal(shown[: len(stats.tokens.x)], stats.tokens.x.numpy())


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
    seen = normscope.capture(nn.LayerNorm(16), [x])
    fits = normscope.fit(seen, "linear,isru,tanh")
    [site] = capture_data(seen, fits, 4000)["sites"]
    linear, asinh = site["drawn"]["axes"]["linear"], site["drawn"]["axes"]["asinh"]
    scales = scales_of([(seen.sites[0], seen.stats[""])], "linear", fits)
    assert linear["limits"] == scales.x.limits and linear["y"] == scales.y and linear["width"] is None
    assert 0 < linear["beyond"] == int((x.abs() > linear["limits"][1]).sum())
    assert asinh["limits"][1] >= x.abs().max() and asinh["beyond"] == 0 and asinh["width"] > 0


def test_the_card_is_the_command_line_s(sites, seen):
    printed = str(normscope.table(normscope.norm_cards(seen)["second"]))
    for question, answer in sites["second"]["card"]:
        assert question in printed and answer in printed


def test_a_point_wise_function_has_a_card_of_its_own():
    x = torch.randn(40, 5, 16, generator=torch.Generator().manual_seed(0))
    seen = normscope.capture(nn.Sequential(normscope.Derf(16, alpha=0.4, shift=0.1)), [x])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    card = {question: answer.partition(" ")[0] for question, answer in site["card"]}
    assert (card["f"], card["α"], card["s"], card["dead"]) == ("derf", "0.4", "0.1", "0")
    assert float(card[">1"]) == pytest.approx(100 * float(((0.4 * x + 0.1).abs() > 1).double().mean()), abs=0.05)
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


def test_what_nothing_went_through_says_so(sites):
    assert sites["off"]["nothing"] == "all zero" and sites["off"]["drawn"] is None
    assert [fit["nothing"] for fit in sites["off"]["fits"]] == ["all zero"] * 4
    seen = normscope.capture(nn.LayerNorm(4), [torch.full((3, 4), torch.nan)])
    [site] = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    assert site["nothing"] == "no finite pair" and site["drawn"] is None and site["left_out"] == 3


def test_a_norm_of_no_closed_form_says_why():
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


NORM = SimpleNamespace(placement="pre-norm", calls=1)
SPECTROGRAM = torch.zeros(8, 160, 1, dtype=torch.uint8)
PICTURE = Preview(pixels=torch.zeros(4, 4, 3, dtype=torch.uint8), size=(224, 224))


def captured(network, x, **options):
    return normscope.capture(network.eval(), [x], keep_inputs=1, **options)


def of_sites(seen):
    """What the page holds of the first input, by site."""
    sites = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["sites"]
    return {site["name"]: site["drawn"]["inputs"][0] for site in sites if site["drawn"]}


def changed(network, site, x, other):
    """Numbers of the tokens that differ at a site between two inputs."""
    lines = [captured(network, one, layers=site).inputs[0].tokens[site] for one in (x, other)]
    one, then = ((tokens.shift + 1j * tokens.sigma) for tokens in lines)
    return torch.nonzero(one != then).flatten().tolist()


TINY = {"depth": 1, "embed_dim": 48, "num_heads": 2}
# Options and first norm of a network; its grid of patches, and the tokens before them.
NETWORKS = {
    "vit_tiny_patch16_224": ({**TINY, "img_size": 96}, "blocks.0.norm1", (6, 6), 1),
    "deit_tiny_distilled_patch16_224": ({**TINY, "img_size": 64}, "blocks.0.norm1", (4, 4), 2),
    "vit_small_patch14_reg4_dinov2": ({**TINY, "img_size": 70}, "blocks.0.norm1", (5, 5), 5),
    "vit_base_patch32_224": ({**TINY, "img_size": (96, 192)}, "blocks.0.norm1", (3, 6), 1),
    "vit_base_patch16_siglip_224": ({**TINY, "img_size": 64, "global_pool": "avg"}, "blocks.0.norm1", (4, 4), 0),
    # (samples, height, width, channels)
    "swin_tiny_patch4_window7_224": ({"depths": (1, 1, 1, 1), "embed_dim": 24}, "patch_embed.norm", (56, 56), 0),
    "convnext_atto": ({"depths": (1, 1, 1, 1)}, "stem.1", (56, 56), 0),  # (samples, channels, height, width)
}


def network_of(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(name, **NETWORKS[name][0])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_token_of_a_patch_is_the_one_that_its_pixels_change(name):
    network, (options, site, (rows, columns), before) = network_of(name), NETWORKS[name]
    size = options.get("img_size", 224)
    height, width = size if isinstance(size, tuple) else (size, size)
    x = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    places = of_sites(captured(network, x, layers=site))[site]["places"]
    assert (places["kind"], places["grid"], places["before"]) == ("patches", (rows, columns), before)
    row, column = rows // 3, 2 * columns // 3
    other = x.clone()
    other[0, :, (2 * row + 1) * height // (2 * rows), (2 * column + 1) * width // (2 * columns)] += 3
    assert changed(network, site, x, other) == [before + row * columns + column]


def test_swin_is_laid_out_as_a_picture_down_to_its_last_stage():
    sites = of_sites(captured(network_of("swin_tiny_patch4_window7_224"), torch.randn(1, 3, 224, 224)))
    grids = {name: tokens["places"]["grid"] for name, tokens in sites.items() if name.endswith("norm1")}
    assert grids == {f"layers.{stage}.blocks.0.norm1": (56 >> stage, 56 >> stage) for stage in range(4)}


def test_a_frame_is_the_stretch_of_the_waveform_that_changes_it():
    class Ears(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv1d(1, 8, 10, stride=5), nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(self.convolution(x[:, None]).transpose(1, 2))

    torch.manual_seed(0)
    network, x = Ears(), torch.randn(1, 4000)
    places = of_sites(captured(network, x))["norm"]["places"]
    assert (places["kind"], places["grid"]) == ("frames", (1, 799))
    other = x.clone()
    other[0, 2511] += 3
    for frame in changed(network, "norm", x, other):
        assert abs((frame + 0.5) / places["grid"][1] - 2511 / 4000) * 4000 < 10


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
def test_places_are_said_in_words(shape, preview, site, kind, said):
    places = places_of(shape, preview, site)
    assert places.kind == kind and said in places.said


def test_heads_come_first_or_last():
    heads = SimpleNamespace(placement="qk", calls=1)
    assert places_of((3, 197), PICTURE, heads).steps == (197, 1)
    assert places_of((197, 3), PICTURE, heads).steps == (1, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.straight, self.groups = nn.LayerNorm(48), nn.BatchNorm1d(48), nn.GroupNorm(2, 48)

    def forward(self, x):
        x = nn.functional.pixel_unshuffle(x, 4).flatten(2)
        return self.norm(x.transpose(1, 2)), self.straight(x), self.groups(x)


def test_tokens_have_the_line_and_the_tail_of_their_own_elements():
    x = 2 * torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    x[:, :, :4] *= 4
    seen = captured(Net(), x)
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
    seen = normscope.capture(Net(), [torch.randn(4, 3, 16, 16)], keep_inputs=2)
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
    seen = normscope.capture(Net(), batches, keep_inputs=2)
    inputs = capture_data(seen, normscope.fit(seen, "tanh"), 4000)["inputs"]
    expected = [(f"path {at % 2}", f"timestep {(9, 1)[at // 2]}", at % 2, at) for at in range(4)]
    assert [(row["name"], row["part"], row["group"], row["sample"]) for row in inputs] == expected
    assert unpacked(inputs[0]["picture"]["pixels"]).shape == (16 * 16 * 3,) and inputs[0]["waveform"] is None


def test_waveforms_and_words_are_written_down(ears):
    x = torch.randn(2, 800)
    [heard] = capture_data(seen := captured(ears, x), normscope.fit(seen, "tanh"), 4000)["inputs"]
    assert heard["waveform"]["length"] == 800 and heard["words"] == [] and heard["picture"] is None
    assert unpacked(heard["waveform"]["low"]).min() == x[0].min()
    words = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8))
    [read] = capture_data(seen := captured(words, torch.arange(6).view(1, 6)), normscope.fit(seen), 4000)["inputs"]
    assert read["words"] == ["#0", "#1", "#2", "#3", "#4", "#5"]


def test_what_a_capture_did_not_keep_is_not_there(seen, fits):
    capture = capture_data(seen, fits, 4000)
    assert capture["inputs"] == [] and capture["sites"][0]["drawn"]["inputs"] == []
    assert capture["sites"][0]["drawn"]["tail_from"] is None
