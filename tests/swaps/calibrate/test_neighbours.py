"""Linear layers beside norms, and linear layers as matrices, against the libraries' own modules."""

import copy
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import PostNorm, network_of
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.norms.trace import find_norms
from normscope.swaps.calibrate import linear_layers
from normscope.swaps.calibrate.calibrate import calibrate
from normscope.swaps.calibrate.linear_layers import MOST_FEATURES, LinearLayer
from normscope.swaps.calibrate.neighbours import Modulation, best_for_each_sample, modulation_of, neighbours_of


def neighbours_in(network, batch, swapped=None):
    sites = find_norms(network, batch).sites
    return neighbours_of(network, sites, [site.name for site in sites] if swapped is None else swapped, batch)


def of(network, x, swapped=None):
    return neighbours_in(network, Batch((x,), samples=tuple(Sample("a", 0, i) for i in range(len(x)))), swapped)


@pytest.fixture(scope="module")
def vit():
    return normscope.load("demo_vit", limit=2, device="cpu")


def test_a_vits_layers_feed_the_stream_through_their_layer_scale(vit):
    near = neighbours_in(vit.module, vit.inputs.first_sample())
    layers = {one.path: one.feeds for one in near.called_modules if not one.is_norm}
    assert [one.path for one in near.called_modules][:8] == [
        "patch_embed.proj",
        *(f"blocks.0.{name}" for name in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")),
        "blocks.1.norm1",
    ]
    assert not near.left and layers["patch_embed.proj"] is None
    for depth in range(8):
        into = layers[f"blocks.{depth}.attn.proj"]
        assert (into.path, into.base, into.base_is_output) == (f"blocks.{depth}.norm2", f"blocks.{depth}.norm1", False)
        scale = vit.module.get_submodule(f"blocks.{depth}.ls1").gamma
        torch.testing.assert_close(into.gain.float(), scale, rtol=1e-3, atol=1e-4)  # of sums in float32
        assert layers[f"blocks.{depth}.attn.qkv"] is None and layers[f"blocks.{depth}.mlp.fc1"] is None
    assert layers["blocks.7.mlp.fc2"].path == "norm" and layers["head"] is None


def test_only_layers_between_a_swapped_norm_and_the_next_are_beside_it(vit):
    near = neighbours_in(vit.module, vit.inputs.first_sample(), ["blocks.3.norm2"])
    beside = [one.path for one in near.called_modules if not one.is_norm]
    assert beside == [f"blocks.3.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


def test_behind_post_norms_a_layer_is_added_to_the_norms_output():
    torch.manual_seed(0)
    near = of(PostNorm(), torch.randn(3, 5, 6))
    layers = {one.path: one.feeds for one in near.called_modules if not one.is_norm}
    assert list(layers) == ["inner", "out", "head"]
    assert (layers["out"].path, layers["out"].base, layers["out"].base_is_output) == ("last", "first", True)
    assert layers["inner"] is None and layers["head"] is None


def test_a_layer_behind_a_closed_gate_feeds_no_norm():
    """As a DiT's blocks begin: nothing could be divided by such a gain."""

    def forward(self, x):
        return self.last(x + self.gate * self.inner(self.first(x)))

    torch.manual_seed(0)
    parts = {"first": nn.LayerNorm(6), "inner": nn.Linear(6, 6), "last": nn.LayerNorm(6)}
    gated, x = network_of(forward, **parts, gate=nn.Parameter(torch.zeros(6))), torch.randn(3, 5, 6)
    assert [one.feeds for one in of(gated, x).called_modules if not one.is_norm] == [None]
    gated.gate.data.fill_(0.5)
    (into,) = (one.feeds for one in of(gated, x).called_modules if not one.is_norm)
    torch.testing.assert_close(into.gain.float(), gated.gate.data, rtol=1e-4, atol=0)


def test_layers_that_cannot_be_refitted_are_listed_with_reasons():
    def forward(self, x):
        return self.normed(self.tied(self.first(self.twice(self.twice(self.norm(x))))))

    layers = {name: nn.Linear(6, 6) for name in ("twice", "first", "tied", "normed", "unused")}
    layers["tied"].weight = layers["first"].weight
    nn.utils.parametrizations.weight_norm(layers["normed"])
    assert of(network_of(forward, norm=nn.LayerNorm(6), **layers), torch.randn(2, 3, 6)).left == {
        "twice": "it is called 2 times in one pass",
        "first": "its weights are another module's too",
        "tied": "its weights are another module's too",
        "normed": "its weight is computed from other tensors",
        "unused": "it is not called as a module",
    }


def test_a_convolution_right_before_a_norm_feeds_it_alone():
    """As in the feature extractor of wav2vec 2.0; what also goes past a norm, in a stream, does not feed that alone."""
    norm_of = pytest.importorskip("timm.layers").LayerNorm2d
    torch.manual_seed(0)

    def forward(self, x):
        x = self.first(x)
        y = self.norm(x)
        return self.head(self.last(x + y if self.goes_on else self.inner(y)))

    parts = {"first": nn.Conv2d(1, 6, 3), "norm": norm_of(6), "inner": nn.Conv2d(6, 6, 3, groups=6)}
    stem = network_of(forward, **parts, last=norm_of(6), head=nn.Conv2d(6, 2, 1), goes_on=False)
    x = torch.randn(2, 1, 9, 9)
    near = of(stem, x)
    layers = {one.path: one for one in near.called_modules if not one.is_norm}
    assert near.left == {} and list(layers) == ["first", "inner", "head"]
    for layer, norm in (("first", "norm"), ("inner", "last")):  # in groups or not
        assert (layers[layer].feeds.path, layers[layer].feeds.base) == (norm, None)
    assert {one.channel_axis for one in near.called_modules} == {-3}
    stem.goes_on = True
    assert [one.feeds for one in of(stem, x).called_modules if one.path == "first"] == [None]


def modulated():
    """A norm whose output is scaled and shifted by what a linear layer makes of the sample's class."""

    def forward(self, x, classes):
        shift, _, scale = self.ada(classes)[:, None].chunk(3, dim=-1)
        return self.head(self.norm(x) * (1 + scale) + shift)

    torch.manual_seed(0)
    norm = nn.LayerNorm(8, elementwise_affine=False)
    return network_of(forward, ada=nn.Linear(4, 24), norm=norm, head=nn.Linear(8, 3)).requires_grad_(False)


def of_classes(number=10, size=8):
    """Tokens of mean zero, whose σ is that of their sample's class: 0.5, 1, 2 or 4."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])
    batches = []
    for n in range(number):
        classes = torch.randint(0, 4, (size,), generator=generator)
        orders = torch.stack([torch.randperm(8, generator=generator) for _ in range(size * 6)])
        x = signs[orders].reshape(size, 6, 8) * 2.0 ** (classes[:, None, None] - 1)
        samples = tuple(Sample(f"{i}", i, i) for i in range(n * size, (n + 1) * size))
        batches.append(Batch((x, nn.functional.one_hot(classes, 4).float()), samples=samples))
    return batches


def test_the_modulating_layer_of_adaln_is_fitted():
    original, learn, errors = modulated(), of_classes(), {}
    for refit in ("norms", "neighbours"):
        swapped = copy.deepcopy(original)
        swapped.norm = normscope.PointwiseFunction("linear", 8, alpha=0.5)
        report = calibrate(original, swapped, learn, refit=refit)
        errors[refit] = report.after
    assert [one.path for one in report.modules] == ["norm", "ada", "head"]
    # Scales are held to the present ones by a fiftieth of a channel's variance, and a ridge shrinks.
    assert errors["neighbours"] < 0.25 * errors["norms"] and errors["norms"] > 0.1
    assert torch.equal(swapped.ada.weight[8:16], original.ada.weight[8:16])  # the part that modulates nothing


@pytest.mark.parametrize("what", ["swap", "drift"])
def test_hooks_of_users_run_in_passes_of_the_whole_network_alone(what):
    """A norm, its function and the layers beside it also run alone here, or in a copy of the network."""
    original, learn, calls = modulated(), of_classes(), Counter()
    seen = normscope.capture(original, learn)
    modules = normscope.replacements(original, "tanh", seen)
    for path, module in original.named_modules():
        module.register_forward_pre_hook(lambda module, args, path=path: calls.update([path]))
    if what == "swap":
        report = normscope.swap(original, "tanh", seen, init="calibrated", learn=learn).calibration
        assert [module.path for module in report.modules] == ["norm", "ada", "head"]
    else:
        normscope.drift(original, learn[:2], modules, init="calibrated", learn=learn[2:])
    assert calls["norm"] == calls["ada"] == calls["head"] == calls[""] > 0


def test_scale_and_shift_are_identified_by_their_values():
    torch.manual_seed(0)
    y, given = torch.randn(3, 7, 4), torch.randn(3, 16)
    parts = given[:, None].split(4, dim=-1)
    layers = [("other", torch.randn(3, 16)), ("ada", given)]
    assert modulation_of(y, y * (1 + parts[1]) + parts[3], layers) == Modulation("ada", 4, 12)
    assert modulation_of(y, y * parts[1] + parts[3], layers) is None
    assert modulation_of(y, y, layers) is None
    assert modulation_of(y[:, 0], y[:, 0], layers) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_best_scale_is_that_of_a_straight_line_held_to_the_present_one(seed):
    """As a straight line through the tokens and, far out, tokens that lie on the present one."""
    torch.manual_seed(seed)
    given, expected, present = torch.randn(2, 50, 3), torch.randn(2, 50, 3), torch.randn(2, 3)
    scale, shift = best_for_each_sample(given, expected, present)
    held = 0.02 * given.double().var(1, correction=0).mean(0)
    for n in range(2):
        for c in range(3):
            x, z = given[n, :, c].double(), expected[n, :, c].double()
            rows = torch.stack([x - x.mean(), torch.ones(50).double()], 1)
            far = torch.tensor([[float((50 * held[c]).sqrt()), 0.0]], dtype=torch.float64)
            aimed = torch.cat([z, far[:, 0] * (1 + present[n, c].double())])
            line = torch.linalg.lstsq(torch.cat([rows, far]), aimed[:, None]).solution.flatten()
            torch.testing.assert_close(scale[n, c] + 1, line[0], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(shift[n, c], line[1] - line[0] * x.mean(), rtol=1e-9, atol=1e-12)


ROUNDING = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums of up to a hundred products, in another order

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d}


def rows_given(layer, x, valid=None):
    h = layer.inputs(x, valid)
    by_group = layer.matrix.unflatten(0, (h.shape[1] if h.ndim == 3 else 1, -1))
    given = torch.einsum("ngf,gcf->ngc", h.reshape(len(h), *by_group.shape[::2]), by_group).flatten(1)
    return given if layer.offset is None else given + layer.offset


@settings(max_examples=40, deadline=None)
@given(
    axes=st.sampled_from([1, 2]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    mode=st.sampled_from(["zeros", "replicate", "circular", "reflect"]),
    bias=st.booleans(),
    groups=st.sampled_from([1, 2, 6]),
)
def test_a_convolution_is_a_matrix_between_rows(axes, kernel, stride, dilation, padding, mode, bias, groups):
    """Its features are what it gives with weights of which one is 1, and all others 0."""
    torch.manual_seed(0)
    options = {"stride": stride, "dilation": dilation, "padding": padding, "padding_mode": mode, "bias": bias}
    module = CONVOLUTIONS[axes](6, 12, kernel, groups=groups, **options).requires_grad_(False)
    layer, x = LinearLayer.of(module), torch.randn(2, 6, *[8] * axes)
    torch.testing.assert_close(rows_given(layer, x), layer.outputs(x, module(x)), **ROUNDING)
    assert layer.reason == "" and layer.outputs(x, module(x)).shape[1] == 12
    features = layer.inputs(x).reshape(-1, groups, layer.matrix.shape[1])
    if module.bias is not None:
        module.bias.zero_()
    for feature in range(layer.matrix.shape[1]):
        module.weight.flatten(1).copy_(torch.eye(layer.matrix.shape[1])[feature].expand(12, -1))
        given = layer.outputs(x, module(x)).unflatten(1, (groups, -1))
        torch.testing.assert_close(given, features[:, :, feature, None].expand_as(given), rtol=0, atol=0)


def test_only_valid_frames_are_rows():
    torch.manual_seed(0)
    module = nn.Conv1d(3, 5, 3, padding=1).requires_grad_(False)
    x, valid = torch.randn(2, 3, 6), torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    layer = LinearLayer.of(module)
    assert layer.inputs(x, valid).shape == (8, 9)
    torch.testing.assert_close(rows_given(layer, x, valid), module(x).mT[valid], **ROUNDING)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_the_matrix_of_its_queries_keys_and_values(batch_first):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first).requires_grad_(False)
    module.in_proj_bias.normal_()
    layer, x = LinearLayer.of(module), torch.randn(2, 5, 8)
    expected = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    of_samples = expected if batch_first else expected.transpose(0, 1)
    torch.testing.assert_close(layer.outputs(x, None), of_samples.reshape(-1, 24), **ROUNDING)
    torch.testing.assert_close(rows_given(layer, x), layer.outputs(x, None), **ROUNDING)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(3, 5, 4, padding="same"), (2, 3, 9)),
        (lambda: nn.Conv1d(3, 5, 4, padding="valid"), (2, 3, 9)),
        (lambda: pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 5), (2, 5)),
    ],
)
def test_padding_by_name_and_a_transposed_weight(make, shape):
    torch.manual_seed(0)
    module = make().requires_grad_(False)
    layer, x = LinearLayer.of(module), torch.randn(shape)
    torch.testing.assert_close(rows_given(layer, x), layer.outputs(x, module(x)), **ROUNDING)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(2, 3, 2), lambda: nn.Conv2d(4, 3, 1)])
def test_put_sets_the_weights_that_the_module_uses(make):
    module = make().requires_grad_(False)
    layer = LinearLayer.of(module)
    before = layer.matrix.clone()
    matrix, offset = torch.randn(before.shape), torch.randn(3)
    layer.put(matrix, offset, torch.tensor([True, False, True]))
    assert torch.equal(layer.matrix[[0, 2]], matrix[[0, 2]]) and torch.equal(layer.matrix[1], before[1])
    assert torch.equal(module.bias[[0, 2]], offset[[0, 2]]) and module.bias[1] != offset[1]


@pytest.mark.parametrize("room", [1, 3 * 4 * 3 * 6, 10**9])
def test_pieces_equal_the_whole(monkeypatch, room):
    monkeypatch.setattr(linear_layers, "MOST_NUMBERS", room)
    valid = torch.arange(6) < torch.tensor([6, 2, 5, 1, 6])[:, None]
    for module in (nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Linear(6, 2)):
        layer, x = LinearLayer.of(module), torch.randn(5, 4, 6)
        pieces = list(layer.inputs_in_pieces(x, valid))
        assert torch.equal(torch.cat(pieces), layer.inputs(x, valid))
        assert len(pieces) == (1 if room > 10**6 or isinstance(module, nn.Linear) else 5 if room == 1 else 2)


def test_layers_that_are_too_wide_have_a_reason():
    reasons = {
        nn.Conv1d(8, 8, 3, groups=8): "",
        nn.Conv1d(1024, 1024, 128, groups=16): f"it is a convolution over 8192 numbers, more than {MOST_FEATURES}",
        nn.Conv2d(512, 8, 3): f"it is a convolution over 4608 numbers, more than {MOST_FEATURES}",
        nn.Conv3d(2, 2, 2): "it is a convolution over three axes",
        nn.Conv3d(2, 2, 1): "",
        nn.MultiheadAttention(
            8, 2, kdim=4
        ): "its queries, keys and values have weights of their own, which torch uses without calling a module",
    }
    assert {module: LinearLayer.of(module).reason for module in reasons} == reasons
    assert LinearLayer.of(nn.GELU()) is None
