"""Replacements of every kind of norm, and the exact restoration of the norms."""

import itertools
import math
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from networks import State, network_of
from timm.layers import BatchNormAct2d, GroupNormAct, LayerNorm2d, LayerNormAct
from torch import nn
from transformers.models.bit.modeling_bit import BitConfig, BitGroupNormActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import normscope
from normscope.errors import ModelError, UsageError
from normscope.swaps.calibrate.calibrate import swap
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import Swap, replacements
from normscope.swaps.standalone import RMSNorm

WIDTH = 16


@pytest.fixture(scope="module")
def demos(made_on_demand):
    """Each embedded model, and its first batch."""

    def make(name):
        network = normscope.load(name, limit=2)
        return network.module.eval(), next(iter(network.inputs)).first(2)

    return made_on_demand(make)


@torch.no_grad()
def output_of(model, batch):
    result = model(*batch.args, **batch.kwargs)
    return (
        next(iter(result.values())) if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
    )


def net(seed=0, **changes):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, WIDTH), trained(nn.LayerNorm(WIDTH, **changes)), nn.Linear(WIDTH, 3)).eval()


def trained(module):
    """Give a norm weights, biases and running statistics as training leaves them."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, part in [*module.named_parameters(), *module.named_buffers()]:
            if part.is_floating_point():
                part.copy_(("bias" not in name) + 0.3 * torch.randn(part.shape, generator=generator))
            if "running_var" in name:
                part.abs_()
    return module.eval()


def seen_by(model, *shape):
    return normscope.capture(model, [2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))])


@pytest.mark.parametrize(("name", "curve"), [("demo_vit", "rmsnorm"), ("demo_wav2vec2", "tanh"), ("demo_dit", "tanh")])
def test_undo_restores_the_network_exactly(demos, name, curve):
    model, batch = demos[name]
    before, expected = State(model), output_of(model, batch)
    sites = [site for site in normscope.find_norms(model, batch).sites if not site.grouped]
    with swap(model, curve, sites, init="paper") as swapped:
        assert set(swapped.modules) == {site.name for site in sites}
        assert not any(module.training for module in model.modules())
        changed = output_of(model, batch)
        assert not torch.equal(changed, expected)
    before.assert_same(model)
    assert torch.equal(output_of(model, batch), expected)
    with pytest.raises(ZeroDivisionError), swap(model, curve, sites, init="paper"):
        assert torch.equal(output_of(model, batch), changed)
        _ = 1 / 0
    before.assert_same(model)
    lasting = swap(model, curve, sites, init="paper")
    assert torch.equal(output_of(model, batch), changed)
    lasting.undo()
    lasting.undo()
    before.assert_same(model)
    assert torch.equal(output_of(model, batch), expected)


def test_fitted_functions_move_the_outputs_less_than_the_papers(demos):
    model, batch = demos["demo_vit"]
    seen, expected = normscope.capture(model, [batch], layers=4), output_of(model, batch)

    def moved(init):
        with swap(model, "tanh", seen, init=init):
            return float((output_of(model, batch) - expected).norm() / expected.norm())

    # A least-squares fit on these very inputs is nearer than α = 0.5, which knows nothing of them; by how much differs.
    assert moved("fit") < moved("paper")


def test_weight_and_bias_are_those_of_the_norm():
    model = net()
    norm = model[1]
    nn.init.normal_(norm.bias, std=100.0)  # beside which the weight would lose its digits
    function = replacements(model, "tanh", seen_by(model, 8, 4), init="paper")["1"]
    assert torch.equal(function.weight, norm.weight)
    assert torch.equal(function.bias, norm.bias)
    assert (function.alpha.item(), function.shift) == (0.5, None)
    assert function.weight.data_ptr() != norm.weight.data_ptr()
    seen = seen_by(model, 64, 4)
    fit = normscope.fit(seen, "isru", shift=True)[0]
    function = replacements(model, "isru", [fit])["1"]
    torch.testing.assert_close(function.weight, (norm.weight.double() * fit.amplitude).float(), rtol=0, atol=0)
    assert (function.alpha.item(), function.shift.item()) == pytest.approx((fit.alpha, fit.shift), rel=6e-8)


def test_a_norm_with_two_parents():
    def forward(self, x):
        return self.inner["again"](self.second(self.first(x) + x) + x)

    norm = trained(nn.LayerNorm(WIDTH))
    shared = network_of(forward, first=norm, second=norm, inner=nn.ModuleDict({"again": norm}))
    model = nn.Sequential(nn.Identity(), shared).eval()
    before = State(model)
    with swap(model, "tanh", seen_by(model, 8, WIDTH), init="paper"):
        own = model[1]
        assert own.first is own.second is own.inner["again"]
        assert isinstance(own.first, PointwiseFunction)
    before.assert_same(model)


def test_nested_swaps_are_undone_in_turn():
    model = net()
    seen, before = seen_by(model, 8, 4), State(model)
    outer = Swap(model, {"1": PointwiseFunction("tanh", WIDTH)})
    with pytest.raises(ModelError, match=r"^1 is a point-wise function already; undo that swap first\.$"):
        swap(model, "isru", seen)
    inner = Swap(model, {"1": PointwiseFunction("isru", WIDTH)})
    with pytest.raises(ModelError, match="'1' has been replaced again since: undo the later swap first"):
        outer.undo()
    inner.undo()
    outer.undo()
    before.assert_same(model)
    assert (repr(inner), repr(Swap(model, {"0": nn.Identity(), "1": PointwiseFunction("derf", WIDTH)}))) == (
        "Swap: isru in place of 1 norm of Sequential, undone",
        "Swap: Identity, derf in place of 2 norms of Sequential",
    )


def test_a_swapped_in_rmsnorm_is_a_norm_site():
    model = net()
    seen = seen_by(model, 8, 4)
    swap(model, "rmsnorm", seen)
    (site,) = seen_by(model, 8, 4).sites
    assert (site.kind, site.centred, site.eps) == ("RMSNorm", False, 1e-5)


SMALL = {
    **{"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 2},
}
TOKENS = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
NETWORKS = {
    "convnext_atto": lambda: (timm.create_model("convnext_atto"), (torch.randn(2, 3, 32, 32),)),
    "resnet10t": lambda: (timm.create_model("resnet10t"), (torch.randn(2, 3, 32, 32),)),
    "test_vit": lambda: (timm.create_model("test_vit"), (torch.randn(2, 3, 160, 160),)),
    "gpt2": lambda: (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2)),
        {"input_ids": TOKENS},
    ),
    "llama": lambda: (transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), {"input_ids": TOKENS}),
    "t5": lambda: (
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=2)
        ),
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks(name):
    dtype = torch.float32 if name in ("resnet10t", "llama") else torch.bfloat16
    torch.manual_seed(0)
    model, call = NETWORKS[name]()
    model = model.to(dtype).eval()
    call = tuple(x.to(dtype) for x in call) if isinstance(call, tuple) else call
    seen = normscope.capture(model, [call])
    assert not seen.skipped

    @torch.no_grad()
    def run():
        return model(*call) if isinstance(call, tuple) else model(**call).logits

    before, expected = State(model), run()
    with swap(model, "dyisru", seen) as swapped:
        assert len(swapped.modules) == len(seen.sites) > 4
        output = run()
        assert output.isfinite().all()
        assert output.dtype == expected.dtype
        assert not torch.equal(output, expected)
    before.assert_same(model)
    assert torch.equal(run(), expected)


def test_t5_in_float16_with_layers_in_float32():
    torch.manual_seed(0)
    model, call = NETWORKS["t5"]()
    model = model.half().eval()
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    with swap(model, "tanh", normscope.capture(model, [call]), init="paper"), torch.no_grad():
        output = model(**call).logits
    assert output.dtype == torch.float16
    assert output.isfinite().all()


@pytest.fixture(scope="module")
def swappable():
    """A network, its capture, and fits of tanh."""
    model = net()
    seen = seen_by(model, 64, 4)
    return model, seen, normscope.fit(seen, "tanh")


def other_network(*widths):
    return nn.Sequential(*(nn.Linear(4, width) for width in widths))


def swap_groups():
    grouped = nn.Sequential(nn.GroupNorm(4, WIDTH), LayerNormAct(WIDTH)).eval()
    swap(grouped, "rmsnorm", seen_by(grouped, 2, WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda model, seen, fits: swap(other_network(4), "tanh", seen),
            "no module '1'; were the fits made of",
        ),
        (lambda model, seen, fits: swap(other_network(4, WIDTH), "tanh", seen), r"1 \(Linear\) cannot be"),
        (lambda *_: Swap(nn.LayerNorm(4), {"": PointwiseFunction("tanh", 4)}), "The LayerNorm is itself the norm"),
        (lambda *_: swap_groups(), "rmsnorm cannot take the place of 0: it is a GroupNorm"),
        (
            lambda model, seen, fits: swap(net().half(), "tanh", [replace(fits[0], amplitude=1e6)]),
            r"\(weight .*e\+06, α .*\) do not fit into torch.float16",
        ),
        (
            lambda model, seen, fits: swap(model, "tanh", [replace(seen.sites[0], channel_axis=(1, 2))], init="paper"),
            r"its axes \(1, 2\) are not the last",
        ),
        (lambda model, seen, fits: swap(model, "tanh,isru", fits), "'tanh,isru' names 2"),
        (
            lambda model, *_: Swap(model, {"1": PointwiseFunction("tanh", WIDTH)}, {"0.wieght": torch.ones(1)}),
            "no .*wieght",
        ),
    ],
)
def test_refusals(swappable, call, words):
    with pytest.raises((ModelError, UsageError, AttributeError), match=words):
        call(*swappable)
    assert isinstance(swappable[0][1], nn.LayerNorm)


def ones():
    return nn.Parameter(torch.ones(WIDTH))


def normalized():
    """RMSNorm as written with F.normalize."""
    return network_of(lambda self, x: F.normalize(x, dim=-1) * math.sqrt(WIDTH) * self.g, "Normalized", g=ones())


def unit_norm():
    """y/√d and no weight."""
    return network_of(lambda self, x: F.normalize(x, dim=-1), "UnitNorm")


def own_group_norm():
    """A subclass in no table, with a forward of its own."""
    return type("OwnGroupNorm", (nn.GroupNorm,), {"forward": lambda self, x: nn.GroupNorm.forward(self, x) * 1.0})(
        4, WIDTH
    )


def own_layer_norm(n_axes):
    """One in no table that takes tensors of so many axes alone; of four, pictures."""

    def forward(self, x):
        if x.ndim != n_axes:
            raise ValueError(f"{x.ndim} axes")
        axis = 1 if n_axes == 4 else -1
        return F.layer_norm(x.movedim(axis, -1), (WIDTH,), self.weight, self.bias, self.eps).movedim(-1, axis)

    return network_of(forward, "OwnLayerNorm", weight=ones(), bias=nn.Parameter(torch.zeros(WIDTH)), eps=1e-6)


def affine(gain, offset=None, ndim=None, then=None):
    """gain · tanh(x/2) + offset, along the last axis, or axis 1 of ``ndim``."""

    def expected(x):
        shape = [-1] + [1] * (0 if ndim is None else ndim - 2)
        y = torch.tanh(x.double() / 2) * gain.double().view(shape)
        y = y if offset is None else y + offset.double().view(shape)
        return (y if then is None else then(y)).float()

    return expected


def of(module, ndim=None, then=None, unit=0):
    return affine(unit + module.weight, getattr(module, "bias", None), ndim, then)


def transposed_layer_norm():
    return pytest.importorskip("torchaudio.models.wav2vec2.components", exc_type=Exception).LayerNorm(WIDTH)


PICTURE, VOLUME = (2, WIDTH, 5, 3), (2, WIDTH, 2, 4, 5)
ONES = torch.ones(WIDTH)

NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), (2, 5, WIDTH), of),
    "LayerNorm of two axes": (
        *(lambda: nn.LayerNorm((5, WIDTH)), (3, 5, WIDTH)),
        lambda m: lambda x: torch.tanh(x / 2) * m.weight + m.bias,
    ),
    "LayerNorm without bias": (lambda: nn.LayerNorm(WIDTH, bias=False), (2, 5, WIDTH), of),
    "LayerNorm of DiT": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), (2, 5, WIDTH), lambda m: affine(ONES)),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), (2, 5, WIDTH), of),
    "GemmaRMSNorm": (lambda: GemmaRMSNorm(WIDTH), (2, 5, WIDTH), lambda m: of(m, unit=1)),
    "LlamaRMSNorm": (lambda: LlamaRMSNorm(WIDTH), (2, 5, WIDTH), of),
    "T5LayerNorm": (lambda: T5LayerNorm(WIDTH), (2, 5, WIDTH), of),
    "F.normalize": (normalized, (2, 5, WIDTH), lambda m: affine(m.g)),
    "UnitNorm": (unit_norm, (2, 5, WIDTH), lambda m: affine(ONES / math.sqrt(WIDTH))),
    "TransposedLayerNorm": (transposed_layer_norm, (2, WIDTH, 7), lambda m: of(m, 3)),
    "LayerNorm2d": (lambda: LayerNorm2d(WIDTH), PICTURE, lambda m: of(m, 4)),
    "OwnLayerNorm of two axes": (lambda: own_layer_norm(2), (9, WIDTH), of),
    "OwnLayerNorm of three axes": (lambda: own_layer_norm(3), (2, 5, WIDTH), of),
    "OwnLayerNorm2d": (lambda: own_layer_norm(4), PICTURE, lambda m: of(m, 4)),
    "LayerNormAct": (lambda: LayerNormAct(WIDTH), (2, 5, WIDTH), lambda m: of(m, then=torch.relu)),
    "GroupNorm": (lambda: nn.GroupNorm(4, WIDTH), PICTURE, lambda m: of(m, 4)),
    "GroupNorm of volumes": (lambda: nn.GroupNorm(4, WIDTH), VOLUME, lambda m: of(m, 5)),
    "OwnGroupNorm": (own_group_norm, PICTURE, lambda m: of(m, 4)),
    "GroupNormAct": (lambda: GroupNormAct(WIDTH, 4), PICTURE, lambda m: of(m, 4, torch.relu)),
    "BitGroupNormActivation": (
        *(lambda: BitGroupNormActivation(BitConfig(num_groups=4), WIDTH), PICTURE, lambda m: of(m, 4, torch.relu)),
    ),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(WIDTH, affine=True), (2, WIDTH, 7), lambda m: of(m, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(WIDTH, affine=True), PICTURE, lambda m: of(m, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), (9, WIDTH), of),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(WIDTH), PICTURE, lambda m: of(m, 4)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(WIDTH), VOLUME, lambda m: of(m, 5)),
    "BatchNormAct2d": (lambda: BatchNormAct2d(WIDTH), PICTURE, lambda m: of(m, 4, torch.relu)),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_kind_of_norm_in_its_place(name):
    make, shape, truth = NORMS[name]
    norm = trained(make())
    model = nn.Sequential(nn.Identity(), norm)
    seen = seen_by(model, *shape)
    x = torch.randn(shape)
    with swap(model, "tanh", seen, init="paper"):
        assert isinstance(model[1], PointwiseFunction)
        output, seen_bias = model(x), model[1].bias
    # Float32's rounding of four operations, of numbers around one.
    torch.testing.assert_close(output, truth(norm)(x), rtol=1e-6, atol=1e-6)
    assert output.stride() == norm(x).stride()
    assert (seen_bias is None) == (getattr(norm, "bias", None) is None)


def layouts(shape):
    """Inputs of one shape: each order of up to four axes in memory, with and without gaps, and expanded."""
    axes = range(len(shape))
    orders = itertools.permutations(axes) if len(shape) < 5 else [axes, axes[::-1], (0, 2, 3, 4, 1), (0, 1, 3, 2, 4)]
    for order in list(orders)[::2]:
        back = torch.tensor(order).argsort().tolist()
        yield torch.randn([shape[axis] for axis in order]).permute(back)
        yield torch.randn([2 * shape[axis] for axis in order]).permute(back)[tuple(map(slice, shape))]
    yield torch.randn(1, *shape[1:]).expand(shape)


def strides(module, shape):
    return [module(x).stride() for x in layouts(shape)]


TURNED = ("TransposedLayerNorm", "LayerNorm2d", "OwnLayerNorm2d")  # which turn the axes, and a function does not


@pytest.mark.parametrize("name", [name for name in NORMS if name not in TURNED])
def test_outputs_have_the_strides_of_the_norms(name):
    make, shape, _ = NORMS[name]
    model = nn.Sequential(nn.Identity(), trained(make()))
    expected = strides(model, shape)
    with swap(model, "tanh", seen_by(model, *shape), init="paper"):
        assert strides(model, shape) == expected  # in plain torch, as gradients are wanted
        with torch.no_grad():
            assert strides(model, shape) == expected  # by the compiled loop
            assert all(torch.equal(model(x), model(x.contiguous())) for x in layouts(shape))


def test_an_input_without_an_axis_of_samples():
    model = nn.Sequential(nn.Identity(), trained(nn.InstanceNorm1d(WIDTH, affine=True)))
    x = torch.randn(WIDTH, 7)
    with swap(model, "tanh", seen_by(model, 2, WIDTH, 7), init="paper"):
        torch.testing.assert_close(model(x), of(model[1])(x.T).T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["RMSNorm", "LlamaRMSNorm", "T5LayerNorm", "GemmaRMSNorm", "F.normalize", "UnitNorm"])
def test_rmsnorm_replaces_an_rmsnorm_without_a_difference(name):
    make, shape, _ = NORMS[name]
    norm = trained(make())
    model, x = nn.Sequential(norm), torch.randn(shape)
    expected = norm(x)
    with swap(model, "rmsnorm", seen_by(model, *shape)):
        assert isinstance(model[0], RMSNorm)
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(model[0](hidden_states=x), model[0](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, WIDTH), PICTURE])
def test_rmsnorm_equals_layer_norm_on_tokens_of_mean_zero(shape, dtype):
    """With the mean taken away before, nothing is lost: LayerNorm and RMSNorm are one (arXiv 1910.07467)."""
    axis = 1 if shape == PICTURE else -1
    norm = trained(LayerNorm2d(WIDTH) if axis == 1 else nn.LayerNorm(WIDTH)).to(dtype)
    model = nn.Sequential(norm)
    x = torch.randn(shape)
    x = (x - x.mean(axis, keepdim=True)).to(dtype)
    expected = norm(x)
    with swap(model, "rmsnorm", normscope.capture(model, [x])):
        output = model(x)
        assert output.dtype == dtype
        # The mean that bfloat16's rounding leaves is a unit in its last place.
        unit = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(output, expected, rtol=2 * unit, atol=2 * unit)


def test_a_swap_changes_only_its_sites():
    model = net()
    model[0].weight.requires_grad_(False)
    model.register_buffer("mine", torch.ones(2))
    model.train()
    before = State(model)
    with swap(model, "derf", seen_by(model, 8, 4), init="paper") as swapped:
        assert swapped.modules["1"].training
        assert not model[0].weight.requires_grad
        assert list(model.state_dict()) == [
            *("mine", "0.weight", "0.bias", "1.alpha", "1.shift", "1.weight", "1.bias", "2.weight", "2.bias")
        ]
    before.assert_same(model)
