"""Point-wise functions against NumPy and SciPy in float64, and in everything that a network does with its modules."""

import copy
import math
import pickle

import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import network_of
from torch import nn

from normscope.curves.expressions import curve_from
from normscope.curves.known import CURVES, Curve, curve_of
from normscope.errors import UsageError
from normscope.fits.ceiling import Piecewise
from normscope.swaps.pointwise import Derf, DyISRU, DyT, PointwiseFunction

# Held in float32, of which half precision would lose digits.
LINES = Piecewise(*(np.float32(row).astype(float) for row in ([-1.1, 0.1, 2.0], [-2.3, 0.7, 1.5])), beyond=0.0)
WIDTH = 6


def piecewise_curve() -> Curve:
    return Curve("free", (), "E[y|x]", LINES, LINES.slope, "", None, False, False, 0.5, 2.5, False)


OTHERS = {
    "formula": (
        curve_from("mine=clip(x/(1+abs(x)**3)**(1/3), -0.9, pi)"),
        lambda u: np.maximum(u / np.cbrt(1 + np.abs(u) ** 3), -0.9),
    ),
    "function": (curve_of(F.silu, "swish"), lambda u: u * scipy.special.expit(u)),
    "free": (piecewise_curve(), lambda u: np.interp(u, LINES.at, LINES.mean)),
}


def in_numpy(curve):
    """f in float64; tests/curves/test_known.py compares every f with extended precision."""
    return lambda u: curve.function(torch.from_numpy(np.asarray(u, float))).numpy()


FUNCTIONS = {**{name: (curve, in_numpy(curve)) for name, curve in CURVES.items()}, **OTHERS}
everywhere = pytest.mark.parametrize("name", FUNCTIONS)


def trained(curve, dtype=torch.float64, **changes) -> PointwiseFunction:
    """Make one whose parameters are all of them numbers that training might leave."""
    layer = PointwiseFunction(curve, WIDTH, **{"shift": 0.0, **changes})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, part in layer.named_parameters():
            part.copy_((0.8 if name in ("alpha", "weight") else 0) + 0.3 * torch.randn(part.shape, generator=generator))
    return layer.to(dtype)


def in_float64(layer: PointwiseFunction, truth, x: torch.Tensor, axis: int = -1) -> np.ndarray:
    """weight · f(αx + s) + bias in NumPy, of what the parameters hold."""
    shape = [1] * x.ndim
    shape[axis] = -1
    alpha, shift, weight, bias = (
        None if part is None else part.detach().double().numpy().reshape(shape)
        for part in (layer.alpha, layer.shift, layer.weight, layer.bias)
    )
    u = alpha * x.detach().double().numpy() + (0 if shift is None else shift)
    return weight * truth(u) + (0 if bias is None else bias)


def inputs(dtype=torch.float64, shape=(50, WIDTH)) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)


@everywhere
def test_forward_in_float64(name):
    curve, truth = FUNCTIONS[name]
    layer, x = trained(curve), inputs()
    unit = 2.0**-24 if name == "free" else 1e-13  # a table's slopes are rounded to float32
    np.testing.assert_allclose(layer(x).detach().numpy(), in_float64(layer, truth, x), rtol=unit, atol=4 * unit)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(name, dtype):
    curve, truth = FUNCTIONS[name]
    layer, x = trained(curve, dtype), inputs(dtype)
    output = layer(x)
    assert output.dtype == dtype
    expected = torch.from_numpy(in_float64(layer, truth, x))
    # Inside, five operations of float32, of terms no larger than |weight|·6 + |bias| here, and the rounding of αx + s
    # times the slope of f; then half a unit in the last place of the result.
    inside = 8 * torch.finfo(torch.float32).eps * (1 + expected.abs()) * max(1, curve.peak)
    once = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 * expected.abs() + 2.0**-24
    assert bool(((output.double() - expected).abs() <= inside + once).all())


@pytest.mark.parametrize("name", ["tanh", "isru", "erf", "softsign", "arctan", "relsign", "expsign"])
def test_no_digit_is_lost_over_all_of_float32(name):
    curve, truth = FUNCTIONS[name]
    size = torch.logspace(-37, 38.5, 3001, dtype=torch.float64).float()
    x = torch.cat([-size, size])
    layer = PointwiseFunction(curve, 1, alpha=1.0, bias=False)
    expected = truth(x.double().numpy())
    # Six units in the last place: of sums and roots that are rounded one after the other.
    np.testing.assert_allclose(layer(x[:, None])[:, 0].detach().numpy(), expected, rtol=6 * 2.0**-24, atol=1e-44)


@settings(max_examples=60, deadline=None)
@given(x=st.floats(-(2.0**127), 2.0**127, width=32), alpha=st.floats(2.0**-10, 1024, width=32))
def test_isru_reaches_its_amplitude_and_never_nan(x, alpha):
    layer = DyISRU(1, C=1 / alpha**2)
    y = layer(torch.tensor([x])).item()
    exact = layer.alpha.item() * x
    assert y == pytest.approx(exact / math.hypot(exact, 1), rel=6 * 2.0**-24, abs=1e-44)
    layer(torch.tensor([x])).sum().backward()
    assert layer.alpha.grad.isfinite().all()


def test_huge_inputs_return_the_amplitude():
    x = torch.tensor([[1e30, -1e30, 3e38, -math.inf]])
    for layer in (DyT(4), DyISRU(4), Derf(4)):
        nn.init.constant_(layer.weight, 2.5)
        assert layer(x).tolist() == [[2.5, -2.5, 2.5, -2.5]]


@pytest.mark.parametrize("axis", [1, -3, 2, -1])
@pytest.mark.parametrize("per_channel", [False, True])
def test_channels_on_any_axis(axis, per_channel):
    shape = [2, 3, 4, 5]
    shape[axis] = WIDTH
    each = torch.linspace(0.5, 1.5, WIDTH) if per_channel else 0.7
    layer = trained("tanh", channel_axis=axis, alpha=each, shift=each)
    x = inputs(shape=shape)
    np.testing.assert_allclose(layer(x).detach().numpy(), in_float64(layer, np.tanh, x, axis), rtol=1e-13, atol=1e-14)


def test_without_affine_the_weight_is_the_amplitude_alone():
    layer = PointwiseFunction("tanh", WIDTH, elementwise_affine=False)
    assert {name: tuple(part.shape) for name, part in layer.state_dict().items()} == {"alpha": (1,), "weight": (1,)}
    nn.init.constant_(layer.weight, 3.0)
    x = inputs(torch.float32)
    np.testing.assert_allclose(layer(x).detach().numpy(), 3 * np.tanh(0.5 * x.double().numpy()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: PointwiseFunction("tanh", 4, alpha=torch.ones(3)),
            "3 numbers; it takes one, or one for each of",
        ),
        (lambda: PointwiseFunction("tanh,isru", 4), "'tanh,isru' names 2 curves"),
        (lambda: PointwiseFunction("tahn", 4), "tahn"),
        (lambda: DyISRU(4, C=-1), "C is -1"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def authors_layer(f, width, channels_last):
    """Equation 3 of arXiv 2503.10622 (tanh), and of 2512.10938 (erf, with a shift), with the appendix's names."""
    axes = (...,) if channels_last else (..., None, None)
    parts = {"alpha": torch.ones(1) * 0.5, "weight": torch.ones(width), "bias": torch.zeros(width)}
    parts |= {"shift": torch.zeros(1)} if f is torch.erf else {}

    def forward(self, x):
        return f(self.alpha * x + getattr(self, "shift", 0)) * self.weight[axes] + self.bias[axes]

    return network_of(forward, **{name: nn.Parameter(values) for name, values in parts.items()})


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("f", "ours"), [(torch.tanh, DyT), (torch.erf, Derf)])
def test_published_layers_load(f, ours, channels_last):
    published, layer = authors_layer(f, WIDTH, channels_last), ours(WIDTH, channel_axis=-1 if channels_last else 1)
    torch.manual_seed(0)
    for part in published.parameters():
        nn.init.normal_(part)
    layer.load_state_dict(published.state_dict(), strict=True)
    x = inputs(torch.float32, (2, 3, 4, WIDTH) if channels_last else (2, WIDTH, 3, 4))
    torch.testing.assert_close(layer(x), published(x), rtol=1e-6, atol=1e-6)  # the order of two roundings


@settings(max_examples=50, deadline=None)
@given(
    x=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=24),
    eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
)
def test_on_one_token_it_is_rms_norm(x, eps):
    """DyISRU's own derivation (arXiv 2503.21708): C = Σ_{j≠i} x_j² + d·eps is RMSNorm exactly in x_i."""
    token = torch.tensor(x, dtype=torch.float64)
    d = len(x)
    others = torch.stack([torch.cat([token[:i], token[i + 1 :]]).square().sum() for i in range(d)])
    layer = PointwiseFunction("isru", d, alpha=(others + d * eps).rsqrt(), bias=False)
    nn.init.constant_(layer.weight, math.sqrt(d))
    expected = F.rms_norm(token, (d,), eps=eps).float()
    torch.testing.assert_close(layer(token.float()), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["tanh", "isru", "erf", "formula", "free", "function"])
def test_copies_and_half_precision_and_back(name):
    layer, x = trained(FUNCTIONS[name][0], torch.float32), inputs(torch.float32)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    assert twin.alpha is not layer.alpha
    for half in (torch.float16, torch.bfloat16):
        there = copy.deepcopy(layer).to(half)
        assert all(part.dtype == half for part in there.parameters())
        expected = copy.deepcopy(layer)
        with torch.no_grad():
            for part in expected.parameters():
                part.copy_(part.to(half).float())
        assert torch.equal(there.float()(x), expected(x))  # a table stays in float32 all the while
    again = trained(FUNCTIONS[name][0], torch.float32, alpha=2.0)
    again.load_state_dict(pickle.loads(pickle.dumps(layer.state_dict())))  # noqa: S301 - of our own
    assert torch.equal(again(x), layer(x))
    if name not in ("formula", "function"):
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))  # noqa: S301 - of our own


@pytest.mark.parametrize("inside", [torch.bfloat16, torch.float16])
def test_autocast_leaves_it_in_float32(inside):
    layer, x = trained("isru", torch.float32), inputs(inside)
    expected = layer(x)
    with torch.autocast("cpu", dtype=inside):
        linear = nn.Linear(WIDTH, WIDTH)
        assert linear(x).dtype == inside
        output = layer(x)
        assert output.dtype == inside
        assert torch.equal(output, expected)
        assert layer(linear(x)).dtype == inside


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tanh", "cubsign", "formula", "free"])
def test_compiles_into_one_graph(name):
    torch._dynamo.reset()
    layer, x = trained(FUNCTIONS[name][0], torch.float32), inputs(torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = compiled(mine), layer(theirs)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    (given_,) = torch.autograd.grad(output.square().sum(), mine)
    (expected_,) = torch.autograd.grad(expected.square().sum(), theirs)
    torch.testing.assert_close(given_, expected_, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["isru", "free"])
def test_exports_with_any_number_of_tokens(name):
    layer, x = trained(FUNCTIONS[name][0], torch.float32), inputs(torch.float32)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    more = inputs(torch.float32, (9, WIDTH))
    torch.testing.assert_close(program.module()(more), layer(more), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [lambda width: trained("tanh", torch.float32), None], ids=["pointwise", "rmsnorm"])
def test_torchs_fused_encoder_runs_replacements_instead_of_a_layer_norm(make):
    from normscope.swaps.standalone import RMSNorm

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)
    native = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x, padding = torch.randn(3, 5, WIDTH), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    swapped = copy.deepcopy(native)
    for block in swapped.layers:
        block.norm1, block.norm2 = (make(WIDTH) if make else RMSNorm(WIDTH) for _ in range(2))
    for model, is_fused in ((native, True), (swapped, False)):
        called = []
        for block in model.layers:
            whole = block.norm1.forward  # hooks would switch the fused path off
            block.norm1.forward = lambda x, whole=whole, called=called: (called.append(1), whole(x))[1]
        with torch.no_grad():
            output = model(x)
            assert (not called) == is_fused
            masked = model(x, src_key_padding_mask=padding)
        slow = model(x)  # with gradients there is no fused path
        torch.testing.assert_close(output, slow.detach(), rtol=1e-4, atol=1e-5)  # another order of sums
        torch.testing.assert_close(masked[0], output[0], rtol=1e-4, atol=1e-5)


@everywhere
def test_gradients_of_everything(name):
    curve, _ = FUNCTIONS[name]
    each = torch.linspace(0.5, 1.5, WIDTH)
    layer = trained(curve, alpha=each, shift=each)
    x = inputs(shape=(5, WIDTH)).requires_grad_()
    names = [key for key, _ in layer.named_parameters()]
    assert torch.autograd.gradcheck(
        lambda x, *parts: torch.func.functional_call(layer, dict(zip(names, parts, strict=True)), (x,)),
        (x, *layer.parameters()),
    )


def test_empty_transposed_and_named_inputs():
    layer = trained("isru", torch.float32)
    assert layer(torch.zeros(0, WIDTH)).shape == (0, WIDTH)
    assert layer(torch.zeros(WIDTH)).shape == (WIDTH,)
    x = inputs(torch.float32, (WIDTH, 50))
    assert torch.equal(layer(x.T), layer(x.T.contiguous()))
    assert torch.equal(layer(x=x.T), layer(hidden_states=x.T))  # under the name that the norm's own input had
    one = trained(piecewise_curve(), torch.float32)
    assert torch.equal(one(x.T), one(x.T.contiguous()))
    single = PointwiseFunction("tanh", 1, channel_axis=1, alpha=torch.tensor([2.0]))
    assert torch.equal(single(torch.ones(2, 1, 3)), torch.tanh(torch.tensor(2.0)).expand(2, 1, 3))
