"""Targets of the fits: networks in which a norm is linear, so that the layer behind it can replace all of it."""

import copy
import threading

import pytest
import torch
from networks import PostNorm, network_of
from networks import numbered_batches as batches
from torch import nn

import normscope
from normscope.errors import ModelError
from normscope.inputs.held_out import Pool
from normscope.swaps.calibrate import linear_layers, refitting
from normscope.swaps.calibrate.calibrate import calibrate
from normscope.swaps.calibrate.closed_form import PENALTIES

# Of float32 sums, and of a ridge that shrinks towards the layer's own weights.
GIVEN_BACK = 2e-3


def of_one_spread(generator, size, tokens=6):
    """Tokens of many means and one σ: their LayerNorm is linear, (x − mean(x))/2, and no function of x alone."""
    signs = torch.tensor([2.0, 2, 2, 2, -2, -2, -2, -2])
    orders = torch.stack([torch.randperm(8, generator=generator) for _ in range(size * tokens)])
    means = 2 * torch.randn(size * tokens, 1, generator=generator)
    return (signs[orders] + means).reshape(size, tokens, 8)


def as_pictures(generator, size):
    return of_one_spread(generator, size, tokens=25).mT.reshape(size, 8, 5, 5)


def calibrated_with_and_without_layers(original, learn, replace):
    """Errors of two calibrations, of functions alone and with layers, and the report of the latter."""
    errors = []
    for refit in ("norms", "neighbours"):
        swapped = copy.deepcopy(original)
        replace(swapped)
        report = calibrate(original, swapped, learn, refit=refit)
        errors.append(report.after)
    return *errors, report


def behind_a_norm(name):
    torch.manual_seed(0)
    if name == "attention":
        attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            y = self.norm(x)
            return self.attention(y, y, y, need_weights=False)[0]

        network = network_of(forward, norm=nn.LayerNorm(8), attention=attention)
        return network.requires_grad_(False), "norm", "attention", of_one_spread
    if name == "linear":
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).requires_grad_(False), "0", "1", of_one_spread
    norm = pytest.importorskip("timm.layers").LayerNorm2d(8)
    kernel = 3 if name == "convolution" else 1
    return nn.Sequential(norm, nn.Conv2d(8, 4, kernel)).requires_grad_(False), "0", "1", as_pictures


@pytest.mark.parametrize("name", ["linear", "attention", "convolution", "convolution of one position"])
def test_a_layer_takes_over_the_linear_map_of_all_channels(name):
    original, norm, layer, x_of = behind_a_norm(name)
    function = normscope.PointwiseFunction("linear", 8, alpha=0.1, channel_axis=-3 if "convolution" in name else -1)
    functions, layers, report = calibrated_with_and_without_layers(
        original, batches(12, x_of), lambda swapped: swapped.set_submodule(norm, copy.deepcopy(function))
    )
    assert [module.path for module in report.modules] == [norm, layer]
    assert layers < GIVEN_BACK < 0.1 < functions


def test_weights_stored_as_offsets_from_one_are_calibrated_like_weights():
    """Two ways to write one network, so that one calibration comes of both."""
    offset_norm = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm
    generator = torch.Generator().manual_seed(3)
    offsets = [torch.randn(8, generator=generator) * 0.3 for _ in range(2)]

    def plain(place):
        norm = nn.RMSNorm(8, eps=1e-6)
        norm.weight.data = 1 + offsets[place]
        return norm

    def gemmas(place):
        norm = offset_norm(8, eps=1e-6)
        norm.weight.data = offsets[place].clone()
        return norm

    learn = batches(6, lambda generator, size: 2 * torch.randn(size, 5, 8, generator=generator))
    weights = []
    for norm_of in (plain, gemmas):
        original = PostNorm(8, 3, seed=1)
        original.first, original.last = norm_of(0), norm_of(1)
        original.requires_grad_(False)
        swapped = copy.deepcopy(original)
        normscope.swap(swapped, "tanh", normscope.capture(original, learn))
        calibrate(original, swapped, learn)
        weights.append(torch.cat([swapped.out.weight.flatten(), swapped.head.weight.flatten()]))
    # Gemma's norm computes in another order: float32, through a search for α and a choice of λ.
    torch.testing.assert_close(weights[0], weights[1], rtol=0.01, atol=0.01)


def unfolded(module, x):
    """Features of each group, ``(groups, tokens, features)``, from what the module gives with one weight of 1."""
    own, one_hot = copy.deepcopy(module).double(), []
    with torch.no_grad():
        own.bias.zero_()
        for feature in range(own.weight[0].numel()):
            own.weight.zero_()
            own.weight.flatten(1)[:, feature] = 1
            given = own(x.double()).flatten(2).mT.flatten(0, 1)
            one_hot.append(given.unflatten(1, (own.groups, -1))[:, :, 0])
    return torch.stack(one_hot, -1).movedim(1, 0)


@pytest.mark.parametrize(("groups", "room"), [(8, 10**9), (8, 3000), (2, 10**9)])
def test_a_convolution_in_groups_is_least_squares_in_each(monkeypatch, groups, room):
    """In float64, with a row for each penalty, on what the function gives, towards what the original gave."""
    monkeypatch.setattr(refitting, "MOST_NUMBERS", room)
    monkeypatch.setattr(linear_layers, "MOST_NUMBERS", room)
    torch.manual_seed(0)
    options = {"padding": 2, "padding_mode": "circular", "stride": 2, "dilation": 2, "groups": groups}
    norm = pytest.importorskip("timm.layers").LayerNorm2d(8)
    original = nn.Sequential(norm, nn.Conv2d(8, 8, 3, **options)).requires_grad_(False)
    swapped = copy.deepcopy(original)
    swapped[0] = normscope.PointwiseFunction("linear", 8, alpha=0.1, channel_axis=-3)
    learn = batches(8, lambda generator, size: torch.randn(size, 8, 7, 7, generator=generator).cumsum(-1) + 1)
    report = calibrate(original, swapped, learn)
    layer = report.modules[1]
    assert layer.path == "1" and layer.penalty in PENALTIES and layer.after < layer.before and not report.restored
    pool = Pool.of(learn)
    learned, every = (
        torch.cat([batch.args[0] for batch in part]) for part in (pool.learned, [*pool.learned, *pool.validation])
    )
    with torch.no_grad():
        given = swapped[0](every).double()
        expected = original.double()(every.double()).flatten(2).mT.flatten(0, 1)
        expected = expected.unflatten(1, (groups, -1)).movedim(1, 0)
    original.float()
    features, first = unfolded(original[1], given), unfolded(original[1], given[: len(learned)])
    spread = (first - first.mean(1, keepdim=True)).square().sum(1).mean() * features.shape[1] / first.shape[1]
    start = original[1].weight.double().unflatten(0, (groups, -1)).flatten(2)
    weights = (layer.penalty * spread).sqrt() * torch.eye(features.shape[-1], dtype=torch.float64)
    for group, (h, t) in enumerate(zip(features, expected, strict=True)):
        left = torch.cat([h - h.mean(0), weights])
        solution = torch.linalg.lstsq(left, torch.cat([t - t.mean(0), weights @ start[group].T])).solution
        mine = swapped[1].weight.unflatten(0, (groups, -1)).flatten(2)[group]
        torch.testing.assert_close(mine.double(), solution.T, rtol=2e-3, atol=2e-4)  # sums of float32 products
        offset = t.mean(0) - h.mean(0) @ solution
        torch.testing.assert_close(
            swapped[1].bias.unflatten(0, (groups, -1))[group].double(), offset, rtol=2e-3, atol=2e-3
        )


def test_a_network_of_rms_norms():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    original = transformers.LlamaModel(config).eval().requires_grad_(False)
    original.embed_tokens.weight.mul_(torch.rand(50, 1) * 60)  # tokens of many sizes
    learn = batches(10, lambda generator, size: torch.randint(0, 50, (size, 12), generator=generator))
    swapped = copy.deepcopy(original)
    normscope.swap(swapped, "tanh", normscope.capture(original, learn))
    report = calibrate(original, swapped, learn)
    assert report.after < report.before and not report.restored and not report.left  # made weights: little to gain
    refitted = {one.path for one in report.modules if not one.is_norm}
    projections = [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    assert refitted == {f"layers.{depth}.{name}" for depth in range(2) for name in projections}


def test_the_target_of_a_layer_before_a_norm_with_activation_is_its_own_output():
    """What such a norm gives is no x̂: behind a norm that is linear here, the layer gives back its own output."""
    layers = pytest.importorskip("timm.layers")
    torch.manual_seed(0)
    original = nn.Sequential(
        layers.LayerNorm2d(8), nn.Conv2d(8, 6, 3), layers.LayerNormAct2d(6, act_layer=nn.ReLU), nn.Flatten()
    ).requires_grad_(False)
    learn, swapped = batches(12, as_pictures), copy.deepcopy(original)
    normscope.swap(swapped, "identity", normscope.capture(original, learn))
    assert swapped[2].activations
    report = calibrate(original, swapped, learn)
    assert {one.path: one.after < GIVEN_BACK for one in report.modules} == {"0": False, "1": True}


def turning(self, x):
    """Call the layers in an order that depends on the input."""
    y = self.norm(x)
    return self.b(self.a(y)) if x.sum() > 0 else self.a(self.b(y))


def failing(self, x):
    """Cannot run large inputs once the norm is replaced."""
    y = self.norm(x)
    return self.a(y if len(x) < 4 or type(self.norm) is nn.LayerNorm else y @ torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (turning, r"Batch \d reaches (a|b|the end) where the first batch reached (a|b): the network"),
        (failing, r"Network raised RuntimeError on inputs of the shapes \(\d, 5, 8\)"),
    ],
)
def test_a_network_that_fails_ends_all_passes_and_removes_all_hooks(forward, message):
    torch.manual_seed(0)
    original = network_of(forward, norm=nn.LayerNorm(8), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).requires_grad_(False)
    before = threading.active_count()
    swapped = copy.deepcopy(original)
    swapped.norm = normscope.PointwiseFunction("tanh", 8)
    signs = iter([1, -1] * 8)
    learn = batches(8, lambda generator, size: torch.randn(size, 5, 8, generator=generator).abs() * next(signs))
    with pytest.raises(ModelError, match=message):
        calibrate(original, swapped, learn)
    assert threading.active_count() == before
    hooked = (module for model in (original, swapped) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hooked)
