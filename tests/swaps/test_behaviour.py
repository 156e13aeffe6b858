"""A replacement behaves as its norm did: the arguments it takes, the dtype it returns, the memory it writes."""

import copy
import itertools
import re

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from networks import OneNorm, loaded_from, network_of
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import normscope
from normscope.errors import ModelError, UsageError
from normscope.norms import formulas
from normscope.norms.trace import find_norms
from normscope.swaps.calibrate.calibrate import swap
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import replacements
from normscope.swaps.standalone import RMSNorm
from normscope.swaps.store.store import restored

WIDTH = 32
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def inputs(number=3, dtype=FLOAT32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 9, 16, generator=generator).to(dtype) for _ in range(number)]


def paper(model, func, seen=None):
    """Swap with the papers' start values, which need no fit."""
    return swap(model, func, seen or find_norms(model, normscope.Batch((inputs()[0],))).sites, init="paper")


def functions_of(norm, func, x):
    """The function, as a list, that replaces a norm on its own."""
    return replacements(OneNorm(norm), func, normscope.capture(OneNorm(norm), [x, x]), init="paper").values()


def restored_in(model, folder):
    restored(model, folder)
    return model


def rms_norm(forward, kind="MyRMSNorm"):
    """A norm with a weight, whose forward is a function of it and its arguments."""
    norm = network_of(forward, kind)
    norm.weight, norm.eps = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), 1e-6
    return norm


def network(norm, call=lambda norm, x: norm(x)):
    """A linear layer, a norm called in a way, and a head."""
    torch.manual_seed(0)
    parts = {"linear": nn.Linear(16, WIDTH), "norm": norm, "head": nn.Linear(WIDTH, 3)}
    return network_of(lambda self, x: self.head(call(self.norm, self.linear(x)).float()), **parts).eval()


def with_residual(self, x, residual=None, prenorm=False):
    assert residual is None and not prenorm
    return F.rms_norm(x, (WIDTH,), self.weight, self.eps)


def of_hidden_states(self, *, hidden_states, gate=None):
    return with_residual(self, hidden_states, gate)


def masked(self, x, mask=None):
    return with_residual(self, x)


def masked_by_name(self, *, x, factor=1.0, mask=None):
    return with_residual(self, x) * factor


CALLS = {
    "by place": (with_residual, lambda norm, x: norm(x, None, False)),
    "all by name": (with_residual, lambda norm, x: norm(residual=None, x=x)),
    "keywords alone": (of_hidden_states, lambda norm, x: norm(hidden_states=x, gate=None)),
    "a tensor": (masked, lambda norm, x: norm(x, torch.ones(x.shape[:-1]))),
    "a tensor by name": (masked_by_name, lambda norm, x: norm(x=x, mask=torch.ones(x.shape[:-1]))),
}


@pytest.mark.parametrize(("way", "func"), [*((way, "dyt") for way in CALLS), ("all by name", "rmsnorm")])
def test_arguments_that_change_nothing_are_ignored(way, func, tmp_path):
    forward, call = CALLS[way]
    plain, model = network(rms_norm(with_residual)), network(rms_norm(forward), call)
    seen = normscope.capture(model, inputs(), verify=True)
    (x, *_) = inputs()
    with torch.no_grad(), paper(plain, func):
        truth = plain(x)
    fresh = copy.deepcopy(model)
    with torch.no_grad(), paper(model, func, seen):
        assert torch.equal(model(x), truth)
        normscope.save_swapped(model, tmp_path / "swap")
        loaded = loaded_from(tmp_path / "swap").swapped(copy.deepcopy(fresh))
        assert torch.allclose(loaded(x), truth, rtol=1e-5, atol=1e-6)
        assert torch.equal(restored_in(fresh, tmp_path / "swap")(x), truth)


def test_a_norm_that_takes_a_second_tensor_in_one_of_its_calls_is_no_site():
    """Fused residual norms: the first block has no residual yet, and a shared norm is called with one later."""

    def fused(self, x, residual=None):
        x = x if residual is None else x + residual
        return F.rms_norm(x, (WIDTH,), self.weight, self.eps)

    def prenormed(self, x, prenorm=False):
        y = F.rms_norm(x, (WIDTH,), self.weight, self.eps)
        return (y, x) if prenorm else y

    for forward, call in (
        (fused, lambda norm, x: norm(norm(x), x)),
        (fused, lambda norm, x: norm(norm(x), residual=x)),
        (prenormed, lambda norm, x: norm(norm(x), prenorm=True)[0]),
    ):
        model = network(rms_norm(forward), call)
        model.last = nn.LayerNorm(3)
        model.register_forward_hook(lambda module, args, output: module.last(output))
        report = find_norms(model, normscope.Batch((inputs()[0],)))
        assert [site.name for site in report.sites] == ["norm:rms_norm.0", "last"] and not report.skipped


def normed(norm, x):
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)


def scaled(self, x, scale=1.0):
    return normed(self, x) * scale


def scaled_by(self, x, scale):
    return normed(self, x) * (1.0 if scale is None else scale)


def overwriting(self, x, inplace=False):
    return x.copy_(normed(self, x)) if inplace else normed(self, x)


def scaled_by_any(self, x, **named):
    return normed(self, x) * named.get("scale", 1.0)


@pytest.mark.parametrize(
    ("forward", "call", "named"),
    [
        (scaled, lambda norm, x: norm(x, scale=2.0), "scale=2.0"),
        (scaled_by, lambda norm, x: norm(x, 2.0), "scale=2.0"),
        (scaled_by_any, lambda norm, x: norm(x, scale=2.0), "named={'scale': 2.0}"),
        (overwriting, lambda norm, x: x + norm(x, inplace=True), "inplace=True"),
        (scaled_by, lambda norm, x: norm(x, 1), ""),
    ],
)
def test_an_argument_that_changes_the_output_prevents_the_swap(forward, call, named):
    model = network(rms_norm(forward), call)
    seen = normscope.capture(model, inputs(), verify=True)
    assert (seen.sites[0].called_with, seen.sites[0].replaceable) == (named, not named)
    if not named:
        paper(model, "dyt", seen).undo()
        return
    with pytest.raises(UsageError, match=re.escape(f"norm (it is called with {named}, which changes its output)")):
        paper(model, "dyt", seen)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: (normed(self, x), x), "it does not take and return one tensor"),
        (lambda self, x: [normed(self, x)], "it does not take and return one tensor"),
        (lambda self, x: normed(self, x).flatten(0, 1), "floating-point numbers and return as many"),
        (lambda self, x: normed(self, x).to(BFLOAT16), "it returns bfloat16 for float32"),
    ],
)
def test_a_lone_norm_with_another_output_is_listed_with_the_reason(forward, reason):
    def first(norm, x):
        return y if isinstance(y := norm(x), torch.Tensor) else y[0]

    with pytest.raises(ModelError, match=rf"norm \(MyRMSNorm\): .*{reason}"):
        find_norms(network(rms_norm(forward), first), normscope.Batch((inputs()[0],)))


class ChannelsLastNorm(nn.LayerNorm):
    """Of the channels of (batch, channels, time), which are last in the memory of its output."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(
    ("norm", "shape", "func"),
    [
        (timm.layers.LayerNorm2d, (2, WIDTH, 5, 6), "dyt"),
        (timm.layers.LayerNorm2d, (2, WIDTH, 5, 6), "rmsnorm"),
        (ChannelsLastNorm, (2, WIDTH, 5), "derf"),
        (nn.LayerNorm, (2, 5, WIDTH), "rmsnorm"),
    ],
)
def test_the_output_has_the_strides_of_the_norms(norm, shape, func, tmp_path):
    """Also those of channels_last for a contiguous input, of which a view may follow."""
    model, x = OneNorm(norm(WIDTH)), torch.randn(shape)
    truth, fresh = model(x), copy.deepcopy(model)
    with torch.no_grad(), paper(model, func, normscope.capture(model, [x, x])):
        normscope.save_swapped(model, tmp_path / "swap")
        loaded = loaded_from(tmp_path / "swap").swapped(copy.deepcopy(fresh))
        for network in (model, loaded, restored_in(fresh, tmp_path / "swap")):
            outputs = network(x), network(x.mT.contiguous().mT)
            assert [y.stride() for y in outputs] == [truth.stride()] * 2, func


def test_a_second_tensor_is_no_input_of_a_function():
    function = PointwiseFunction("tanh", 4)
    x = torch.ones(2, 4)
    for module in (function, RMSNorm(4)):
        with pytest.raises(TypeError, match=r"takes one tensor, and got \(2, 4\), \(2, 4\)"):
            module(x, residual=x)
        with pytest.raises(TypeError, match="takes one tensor, and got none"):
            module(residual=None)


def promoted(self, h):
    """weight · x̂ in the dtype that both are promoted to, as Llama's."""
    x = h.float()
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).to(h.dtype)


def promoting():
    return rms_norm(promoted, "Promoting")


NORMS = {
    "Llama": lambda: LlamaRMSNorm(WIDTH),
    "T5": lambda: T5LayerNorm(WIDTH),
    "Gemma": lambda: GemmaRMSNorm(WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "timm, float32": lambda: timm.layers.LayerNormFp32(WIDTH),
    "timm, simple": lambda: timm.layers.SimpleNorm(WIDTH),
    "diffusers": lambda: DiffusersRMSNorm(WIDTH, eps=1e-6),
    "diffusers, float32": lambda: FP32LayerNorm(WIDTH),
    "own": promoting,
    "own, float32": lambda: network_of(lambda self, x: F.layer_norm(x.float(), (WIDTH,)), "InFloat32Norm"),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(
    ("name", "func"), [*((name, "dyt") for name in NORMS), ("Llama", "rmsnorm"), ("T5", "rmsnorm")]
)
def test_the_output_has_the_dtype_of_the_norms(name, func):
    """For each dtype of weight and input that the norm takes, also if the swapped network is converted afterwards."""
    norm, x = NORMS[name](), torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    (function,) = functions_of(norm, func, x)
    tried = 0
    for weight, dtype in itertools.product((FLOAT32, BFLOAT16, FLOAT16), repeat=2):
        try:
            truth = norm.to(weight)(x.to(dtype))
        except RuntimeError:  # torch's LayerNorm refuses a float32 input for a half weight
            continue
        tried += 1
        output = function.to(weight)(x.to(dtype))
        assert (output.dtype, output.shape) == (truth.dtype, truth.shape), (weight, dtype)
    assert tried >= 4


def test_a_float32_output_of_a_half_input_has_the_digits_of_float32():
    norm, x = promoting(), torch.randn(64, WIDTH).to(BFLOAT16)
    (function,) = functions_of(norm, "dyt", x)
    truth = function.weight.double() * torch.tanh(function.alpha.double() * x.double())
    assert (function(x) - truth).abs().max() < 1e-6 * truth.abs().max()


def test_a_half_network_with_float32_norms_runs_swapped_calibrated_and_stored(tmp_path):
    """peft and transformers keep norms in float32, and what follows takes float32."""
    torch.manual_seed(0)
    parts = [nn.Linear(16, WIDTH).to(BFLOAT16), promoting(), nn.Linear(WIDTH, 8)]
    model, batches = nn.Sequential(*parts).eval(), inputs(dtype=BFLOAT16)
    seen = normscope.capture(model, batches, verify=True)
    fresh, again = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for options in ({}, {"init": "calibrated", "learn": batches, "refit": "norms"}):
            with swap(model, "dyt", seen, **options):
                truth = model(batches[0])
                normscope.save_swapped(model, tmp_path / "swap")
            assert truth.dtype == FLOAT32
            assert torch.equal(restored_in(fresh, tmp_path / "swap")(batches[0]), truth)
            assert torch.equal(loaded_from(tmp_path / "swap").swapped(copy.deepcopy(again))(batches[0]), truth)
            fresh = copy.deepcopy(again)
    assert normscope.drift(model, batches, replacements(model, "dyt", seen, init="paper")).all.nonfinite == 0


@pytest.mark.parametrize(
    ("norm", "rules"),
    [
        (nn.LayerNorm(WIDTH), ("input", "float32")),
        (timm.layers.LayerNormFp32(WIDTH), ("input", "")),
        (LlamaRMSNorm(WIDTH), ("promoted", "")),
        (T5LayerNorm(WIDTH), ("weight", "")),
    ],
)
def test_autocast_of_accelerators_returns_layer_norms_in_float32(norm, rules):
    """torch's list of functions that autocast runs in float32 names layer_norm."""
    x = torch.randn(64, WIDTH)
    (function,) = functions_of(norm, "dyt", x)
    assert (function.returns, function.under_autocast) == rules
    with torch.autocast("cpu", BFLOAT16):
        for dtype in (FLOAT32, BFLOAT16):
            assert function(x.to(dtype)).dtype == norm(x.to(dtype)).dtype


def in_place(self, x):
    return x.mul_(torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).mul_(self.weight)


def in_float32(self, x):
    """Overwrite a float32 input, and the copy of another: nano-vllm's."""
    dtype = x.dtype
    x = x.float()
    x.mul_(torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))
    return x.to(dtype).mul_(self.weight)


def copied_back(self, x):
    return x.copy_(F.rms_norm(x, (WIDTH,), self.weight, self.eps))


@pytest.mark.parametrize(
    ("forward", "func"),
    [(in_place, "dyt"), (in_float32, "dyt"), (copied_back, "softsign"), (in_place, "rmsnorm")],
)
def test_a_norm_that_overwrites_its_input_is_replaced_by_a_function_that_does(forward, func, tmp_path):
    """The stream of a pre-norm block is then the norm's output: x + f(x) with x overwritten."""

    def stream(self, x):
        h = self.linear(x)
        return self.head(h + torch.relu(self.norm(h)))

    torch.manual_seed(0)
    parts = {"linear": nn.Linear(16, WIDTH), "head": nn.Linear(WIDTH, 3)}
    model = network_of(stream, **parts, norm=rms_norm(forward)).eval()
    batches = inputs()
    seen, fresh = normscope.capture(model, batches, verify=True), copy.deepcopy(model)
    modules = replacements(model, func, seen, init="paper")
    with torch.no_grad(), paper(model, func, seen):
        function, h = model.norm, model.linear(batches[0])
        y = function(h.clone())
        expected = model.head(y + torch.relu(y))
        assert torch.allclose(model(batches[0]), expected, rtol=1e-5, atol=1e-6)
        again = function(written := h.clone())
        assert again.data_ptr() == written.data_ptr() and torch.equal(written, y)
        double = h.double()
        assert torch.equal(function(double), double) == (forward is not in_float32)
        half = h.to(BFLOAT16)
        assert torch.equal(function(half), half) == (forward is not in_float32)
        normscope.save_swapped(model, tmp_path / "swap")
        loaded = loaded_from(tmp_path / "swap").swapped(copy.deepcopy(fresh))
        assert torch.allclose(loaded(batches[0]), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(restored_in(fresh, tmp_path / "swap")(batches[0]), expected)
    report = normscope.drift(model, batches, modules)
    assert report.all.relative_l2.p50 < (1e-5 if func == "rmsnorm" else 1)


def test_an_overwriting_function_has_gradients():
    norm = rms_norm(in_place)
    x = torch.randn(64, WIDTH)
    (function,) = functions_of(norm, "dyt", x)
    plain = copy.deepcopy(function)
    plain.overwrites = ()
    gradients = []
    for module in (function, plain):
        h = x.clone().requires_grad_()
        module(h * 1).square().sum().backward()
        gradients.append((h.grad, module.alpha.grad))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


def gated(self, x, mask=None):
    return normed(self, x) if mask is None else normed(self, x) * mask[..., None]


def of_odd_dtypes(self, x):
    y = F.rms_norm(x.float(), (WIDTH,), self.weight.float(), self.eps)
    return y.to({BFLOAT16: FLOAT16, FLOAT16: BFLOAT16}.get(x.dtype, x.dtype))


def centring(self, x):
    x.sub_(x.mean(-1, keepdim=True))
    return normed(self, x)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (gated, "depends on a second tensor"),  # although of ones
        (of_odd_dtypes, r"norm .* follows no rule: float32 for float32, float16 for bfloat16"),
        (centring, "it overwrites its input with other values than its output"),
    ],
)
def test_refusals(forward, words):
    call = (lambda norm, x: norm(x, torch.ones(x.shape[:-1]))) if forward is gated else (lambda norm, x: norm(x))
    model = network(rms_norm(forward, f"Norm_{forward.__name__}"), call)
    if forward is of_odd_dtypes:
        normscope.register_norm(type(model.norm), axes=-1, normalize=formulas.rms_norm)
    with pytest.raises(ModelError, match=words):
        paper(model, "dyt", normscope.capture(model, inputs()))
