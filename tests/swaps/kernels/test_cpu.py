"""The CPU's loop against float64 over the whole range of float32, and who gets plain torch instead."""

import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import special
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from normscope.swaps.kernels import choice, cpu
from normscope.swaps.kernels.choice import LOOP_FROM, VARIABLE
from normscope.swaps.kernels.eager import Parameters
from normscope.swaps.pointwise import PointwiseFunction

EPSILON = 2.0**-24  # the most that float32 rounds by, relative
LEAST = 2.0**-149  # and absolute, where it has no digits left
TRUTH = {"tanh": np.tanh, "isru": lambda v: v / np.hypot(v, 1), "erf": special.erf}
# As derived in cpu.py, for any processor; and what docs/kernels.md says was found, where a product and a sum are
# one rounding: erf's bound adds up errors that do not all go one way.
DERIVED = {"tanh": 6.2, "isru": 3.0, "erf": 19.0}
FOUND = {"tanh": 3.1, "isru": 2.5, "erf": 6.0}
CURVES = pytest.mark.parametrize("curve", TRUTH)


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def calls(monkeypatch):
    """The loop's calls, each the number of its lines."""
    made, fill = [], cpu.fill
    monkeypatch.setattr(cpu, "fill", lambda *args: (made.append(args[-1] - args[-2]), fill(*args)))
    return made


def function(u, curve, dtype=torch.float32):
    """f(u) itself, by the loop."""
    one = torch.ones(1)
    return cpu.pointwise(torch.from_numpy(u).to(dtype), Parameters(one, None, one, None), curve, 0)


def furthest(u, curve):
    """How far off f(u) is, relative, in ε."""
    with np.errstate(invalid="ignore", under="ignore"):
        true = TRUTH[curve](u.astype(np.float64))
    off = np.abs(function(u, curve).numpy() - true) - LEAST
    return (off[true != 0] / np.abs(true[true != 0])).max() / EPSILON


def spread():
    """Every finite exponent of float32, 4,096 mantissas of each and more where the curves bend; ascending."""
    draw = np.random.default_rng(3)
    exponents = np.concatenate([np.repeat(np.arange(255), 4096), np.repeat(np.arange(113, 132), 200_000)])
    patterns = exponents.astype(np.uint32) << 23 | draw.integers(2**23, size=len(exponents), dtype=np.uint32)
    return np.sort(patterns.view(np.float32))


@CURVES
def test_functions_are_as_close_to_float64_as_derived_over_all_of_float32(curve):
    assert furthest(spread(), curve) <= DERIVED[curve]


@pytest.mark.slow
@CURVES
def test_no_float_is_further_off_than_was_found(curve):
    """All floats where the curves bend; below, f is a straight line, whose errors are those of every mantissa."""
    mantissas = np.arange(2**23, dtype=np.uint32)
    exponents = [1, 60, *range(127 - 8, 127 + 5), 220]
    every = [furthest((mantissas | np.uint32(exponent << 23)).view(np.float32), curve) for exponent in exponents]
    assert FOUND[curve] - 0.2 < max(every) <= FOUND[curve]


@CURVES
def test_functions_are_odd_bounded_and_go_one_way_as_far_as_their_errors_let_them(curve):
    u = spread()
    y = function(u, curve).numpy()
    assert np.array_equal(function(-u, curve).numpy(), -y)
    assert (y >= 0).all() and (y <= 1).all()
    assert (np.diff(y.astype(np.float64)) >= -2 * FOUND[curve] * EPSILON * y[1:] - LEAST).all()


@CURVES
def test_zeros_infinities_nan_and_the_smallest_numbers(curve):
    u = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45, -1e-45, 1e-40])
    y = function(u, curve).numpy()
    assert np.array_equal(y[:7], np.float32([0, 0, 1, -1, np.nan, 1, -1]), equal_nan=True)
    assert np.array_equal(np.signbit(np.delete(y, 4)), np.signbit(np.delete(u, 4)))  # NaN has none
    np.testing.assert_allclose(y[7:], u[7:] * (2 / np.sqrt(np.pi) if curve == "erf" else 1), rtol=1e-5, atol=2e-45)


@CURVES
def test_bfloat16_is_the_nearest_of_what_float32_gives(curve):
    """Every bfloat16; NaN stays."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    one = torch.ones(1)
    y = cpu.pointwise(patterns, Parameters(one, None, one, None), curve, 0)
    wide = function(patterns.float().numpy(), curve)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, wide.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def layer_of(curve, shape, axis=-1, each=False, **how):
    """A layer whose parameters are numbers that training might leave."""
    draw = torch.Generator().manual_seed(0)
    n = int(np.prod(shape))
    alpha, shift = 0.3 + torch.rand(n if each else 1, generator=draw), 0.2 * torch.randn(n, generator=draw)
    layer = PointwiseFunction(curve, shape, channel_axis=axis, alpha=alpha, shift=shift if each else None, **how)
    with torch.no_grad():
        for part in (layer.weight, layer.bias):
            if part is not None:
                part.normal_(generator=draw)
    return layer


LAYERS = {
    "channels last": ((48,), -1, (6, 40, 48), {}),
    "one α a channel, and a shift": ((48,), -1, (6, 40, 48), {"each": True}),
    "several axes": ((40, 48), -1, (6, 40, 48), {}),
    "more channels than are laid out at once": ((5000,), -1, (7, 5000), {}),
    "channels first": ((48,), 1, (6, 48, 19, 7), {"each": True}),
    "wide planes": ((3,), 1, (2, 3, 50, 50), {}),
    "no affine": ((48,), -1, (6, 40, 48), {"elementwise_affine": False}),
    "no bias": ((48,), -1, (6, 40, 48), {"bias": False}),
    "a last row that is cut": ((3,), -1, (3001, 3), {}),
}


@CURVES
@pytest.mark.parametrize("which", LAYERS)
def test_layers_of_every_shape_are_those_of_float64(calls, curve, which):
    shape, axis, of_input, how = LAYERS[which]
    layer = layer_of(curve, shape, axis, **how)
    x = 3 * torch.randn(of_input, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = layer(x)
    assert sum(calls) > 0 and y.shape == x.shape and y.dtype == x.dtype
    true, terms, inside = expected(layer, x)
    # αx + s is rounded twice and moves f by as much at most (by 1.13 as much, erf); then f, the product and the sum.
    bound = EPSILON * ((DERIVED[curve] + 2) * terms + 2 * 1.13 * inside)
    assert ((y.double() - true).abs() <= bound).all()


def expected(layer, x):
    """Return the layer's output in float64, the size of its terms, and that of αx and s as they meet the weight."""
    parts = (layer.alpha, layer.shift, layer.weight, layer.bias)
    along = Parameters(*(None if part is None else part.detach().double() for part in parts)).along(
        layer.axes_behind(x)
    )
    shift = torch.zeros(1) if along.shift is None else along.shift
    bias = torch.zeros(1) if along.bias is None else along.bias
    scaled = along.alpha * x.double()
    term = along.weight * torch.from_numpy(TRUTH[layer.curve.function_name]((scaled + shift).numpy()))
    return term + bias, term.abs() + bias.abs(), along.weight.abs() * (scaled.abs() + shift.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@CURVES
def test_a_number_gives_the_same_bits_wherever_it_stands_and_on_as_many_threads(calls, curve, dtype):
    layer = layer_of(curve, (48,)).to(dtype)
    row = torch.randn(1, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    seen = []
    with torch.inference_mode(), mock.patch.object(choice, "LOOP_FROM", 1), mock.patch.object(cpu, "_A_THREAD", 1):
        for rows, threads in ((1, 1), (1001, 1), (1001, 3), (2, 5)):
            with mock.patch.object(torch, "get_num_threads", lambda threads=threads: threads):
                seen.append(layer(row.expand(rows, 48).contiguous()))
    assert sorted(calls) == [1, 1, 1, 333, 334, 334, 1001]
    assert all(torch.equal(y, seen[0].expand_as(y)) for y in seen)
    # Alone, an element is of no vector.
    alone = [cpu.pointwise(row[0, j : j + 1].contiguous(), one_channel(layer, j), curve, 0) for j in range(48)]
    assert torch.equal(torch.cat(alone), seen[0][0])


def one_channel(layer, j):
    weight, bias = (part.detach()[j : j + 1] for part in (layer.weight, layer.bias))
    return Parameters(layer.alpha.detach(), None, weight, bias)


X = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))


class Own(torch.Tensor):
    """A subclass of tensors."""


def within(context, layer):
    with context:
        return layer(X)


no_grad = torch.no_grad()


def parameters_of(layer):
    return {name: part.detach() for name, part in layer.named_parameters()}


LEFT = {
    "a gradient by the parameters": lambda layer: layer(X),
    "a gradient by x": lambda layer: layer.requires_grad_(False)(X.clone().requires_grad_()),
    "float64": no_grad(lambda layer: layer(X.double())),
    "float16": no_grad(lambda layer: layer(X.half())),
    "rows with gaps": no_grad(lambda layer: layer(torch.cat([X, X], 1)[:, :64])),
    "transposed": no_grad(lambda layer: layer(X.T.contiguous().T)),
    "few elements": no_grad(lambda layer: layer(X[: LOOP_FROM // 64 - 1])),
    "a subclass": no_grad(lambda layer: layer(X.as_subclass(Own)).as_subclass(torch.Tensor)),
    "a dispatch mode": no_grad(lambda layer: within(FlopCounterMode(display=False), layer)),
    "a function mode": no_grad(lambda layer: within(torch.device("cpu"), layer)),
    "vmap": no_grad(lambda layer: torch.func.vmap(layer)(X)),
    "functional gradients": lambda layer: torch.func.grad(
        lambda own: torch.func.functional_call(layer, own, (X,)).sum()
    )(parameters_of(layer))["bias"],
    "forward mode": no_grad(lambda layer: torch.func.jvp(layer, (X,), (torch.ones_like(X),))[1]),
    "dual numbers": no_grad(lambda layer: dual(layer)),
    "torch.jit.trace": no_grad(lambda layer: torch.jit.trace(layer, X, check_trace=False)(X)),
    "torch.compile": no_grad(lambda layer: torch.compile(layer, fullgraph=True, backend="eager")(X)),
    "torch.export": no_grad(lambda layer: torch.export.export(layer, (X,)).module()(X)),
}


def dual(layer):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


@pytest.mark.parametrize("what", LEFT)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_everything_else_is_plain_torchs_to_the_bit(calls, monkeypatch, what):
    layer = layer_of("tanh", (64,))
    found = LEFT[what](layer)
    assert calls == []
    monkeypatch.setenv(VARIABLE, "eager")
    torch._dynamo.reset()
    expected = LEFT[what](layer_of("tanh", (64,)))
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_the_loop_is_the_default_without_gradients(calls, grad):
    layer = layer_of("tanh", (64,))
    with grad():
        y = layer(X)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(X), y)
    assert len(calls) == 2 and not y.requires_grad
    assert layer.requires_grad_(False)(X).equal(y) and len(calls) == 3
    torch.testing.assert_close(y, layer_of("tanh", (64,))(X), rtol=1e-6, atol=1e-6)


def test_parameters_of_another_dtype_are_taken_as_plain_torch_takes_them(calls, monkeypatch):
    layer = layer_of("tanh", (64,)).to(torch.bfloat16).requires_grad_(False)
    y = layer(X)
    assert calls == [200] and y.dtype == torch.bfloat16
    monkeypatch.setenv(VARIABLE, "eager")
    torch.testing.assert_close(y, layer(X))


CALLED = f"""
import warnings, torch
from normscope.swaps.pointwise import DyT
layer, x = DyT(64), torch.full(({LOOP_FROM} // 64, 64), 2.0)
with warnings.catch_warnings(record=True) as said, torch.no_grad():
    warnings.simplefilter("always")
    layer(x), layer(x)
    print(round(layer(x)[0, 0].item(), 5), [str(w.message) for w in said if "numba" in str(w.message)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "printed"),
    [
        (
            "import sys; sys.modules['numba'] = None",
            r"0\.76159 \['numba does not work here [^']*plain torch.*slowly\.'\]",
        ),
        ("from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []", r"0\.76159 \[\]"),
    ],
    ids=["no numba", "no folder to keep what is compiled"],
)
def test_where_numba_cannot_do_all_layers_are_computed_all_the_same(before, printed):
    done = subprocess.run([sys.executable, "-c", before + CALLED], capture_output=True, text=True, check=True)
    assert re.fullmatch(printed, done.stdout.strip().replace('"', "'"))
