"""The CPU's loop against float64 over the whole range of float32, and the calls that plain torch computes instead."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from normscope.swaps.kernels import cpu
from normscope.swaps.kernels.choice import LOOP_FROM, VARIABLE
from normscope.swaps.pointwise import PointwiseFunction

ROOT = Path(__file__).parents[3]
EPSILON = 2.0**-24  # the most that float32 rounds by, relative
LEAST = 2.0**-149  # and absolute, where it has no digits left
TRUTH = {"tanh": np.tanh, "isru": lambda v: v / np.hypot(v, 1), "erf": special.erf}
# As derived in cpu.py, for any processor; and what docs/kernels.md says was found, where a product and a sum are
# one rounding: erf's bound adds up errors that do not all go one way.
DERIVED = {"tanh": 6.2, "isru": 3.0, "erf": 19.0}
FOUND = {"tanh": 3.1, "isru": 2.5, "erf": 6.0}
CURVES = pytest.mark.parametrize("curve", TRUTH)
X = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
no_grad = torch.no_grad()


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def function(u, curve):
    """f(u) itself, by the loop."""
    one = torch.ones(1)
    return cpu.pointwise(torch.from_numpy(u), (one, None, one, None), curve, 0)


def furthest(u, curve):
    """How far off f(u) is, relative, in ε."""
    with np.errstate(invalid="ignore", under="ignore"):
        true = TRUTH[curve](u.astype(np.float64))
    off = np.abs(function(u, curve).numpy() - true) - LEAST
    return (off[true != 0] / np.abs(true[true != 0])).max() / EPSILON


def spread():
    """Every finite exponent of float32, 512 mantissas of each and more where the curves bend; ascending."""
    draw = np.random.default_rng(3)
    exponents = np.concatenate([np.repeat(np.arange(255), 512), np.repeat(np.arange(113, 132), 40_000)])
    patterns = exponents.astype(np.uint32) << 23 | draw.integers(2**23, size=len(exponents), dtype=np.uint32)
    return np.sort(patterns.view(np.float32))


@pytest.mark.slow
@CURVES
def test_no_float_is_further_off_than_was_found(curve):
    """All floats where the curves bend; below, f is a straight line, whose errors are those of every mantissa."""
    mantissas = np.arange(2**23, dtype=np.uint32)
    exponents = [1, 60, *range(127 - 8, 127 + 5), 220]
    every = [furthest((mantissas | np.uint32(exponent << 23)).view(np.float32), curve) for exponent in exponents]
    assert FOUND[curve] - 0.2 < max(every) <= FOUND[curve]


@CURVES
def test_functions_are_exact_odd_bounded_and_monotonic_up_to_their_errors(curve):
    u = spread()
    assert furthest(u, curve) <= DERIVED[curve]
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
    y = cpu.pointwise(patterns, (one, None, one, None), curve, 0)
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
    "one α a channel, and a shift": ((48,), -1, (6, 40, 48), {"each": True}),
    "more channels than are laid out at once": ((5000,), -1, (7, 5000), {}),
    "channels first": ((48,), 1, (6, 48, 19, 7), {"each": True}),
    "wide planes": ((3,), 1, (2, 3, 50, 50), {"bias": False}),
    "several axes, no affine": ((40, 48), -1, (6, 40, 48), {"elementwise_affine": False}),
    "a last row that is cut": ((3,), -1, (3001, 3), {}),
}


@CURVES
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_shape_are_those_of_float64(curve, name):
    shape, axis, input_shape, how = LAYERS[name]
    layer = layer_of(curve, shape, axis, **how).requires_grad_(False)
    x = 3 * torch.randn(input_shape, generator=torch.Generator().manual_seed(1))
    y = layer(x)
    assert by_loop(layer, x).equal(y) and y.shape == x.shape and y.dtype == x.dtype
    parts = (layer.alpha, layer.shift, layer.weight, layer.bias)
    alpha, shift, weight, bias = (
        torch.zeros(1) if part is None else part.double().view(*part.shape, *[1] * layer.axes_behind(x))
        for part in parts
    )
    scaled = alpha * x.double()
    term = weight * torch.from_numpy(TRUTH[curve]((scaled + shift).numpy()))
    # αx + s is rounded twice and moves f by as much at most (by 1.13 as much, erf); then f, the product and the sum.
    terms, inside = term.abs() + bias.abs(), weight.abs() * (scaled.abs() + shift.abs())
    bound = EPSILON * ((DERIVED[curve] + 2) * terms + 2 * 1.13 * inside)
    assert ((y.double() - (term + bias)).abs() <= bound).all()


def by_loop(layer, x):
    """The loop's result; None if plain torch computes the call."""
    parameters = (layer.alpha, layer.shift, layer.weight, layer.bias)
    return cpu.pointwise(x, parameters, layer.curve.function_name, layer.axes_behind(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@CURVES
def test_a_number_gives_the_same_bits_in_every_row_and_on_any_number_of_threads(curve, dtype):
    layer = layer_of(curve, (48,)).to(dtype).requires_grad_(False)
    row, threads = X[:1, :48].to(dtype), torch.get_num_threads()
    results = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(layer(row.expand(8301, 48).contiguous()))  # three times 2¹⁷ elements, and a few
    finally:
        torch.set_num_threads(threads)
    assert results[0].equal(results[1]) and results[0].equal(results[0][:1].expand(8301, 48))
    # Alone, an element is of no vector.
    single = [
        cpu.pointwise(row[0, j : j + 1], (layer.alpha, None, layer.weight[j : j + 1], layer.bias[j : j + 1]), curve, 0)
        for j in range(48)
    ]
    assert torch.equal(torch.cat(single), results[0][0])


class Own(torch.Tensor):
    """A subclass of tensors."""


def within(context, layer):
    with context:
        return layer(X)


def dual(layer):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


IN_PLAIN_TORCH = {
    "a gradient by the parameters": lambda layer: layer(X),
    "a gradient by x": lambda layer: layer.requires_grad_(False)(X.clone().requires_grad_()),
    "float64": no_grad(lambda layer: layer(X.double())),
    "transposed": no_grad(lambda layer: layer(X.T.contiguous().T)),
    "few elements": no_grad(lambda layer: layer(X[: LOOP_FROM // 64 - 1])),
    "a subclass": no_grad(lambda layer: layer(X.as_subclass(Own)).as_subclass(torch.Tensor)),
    "a dispatch mode": no_grad(lambda layer: within(FlopCounterMode(display=False), layer)),
    "a function mode": no_grad(lambda layer: within(torch.device("cpu"), layer)),
    "vmap": no_grad(lambda layer: torch.func.vmap(layer)(X)),
    "dual numbers": no_grad(dual),
    "torch.jit.trace": no_grad(lambda layer: torch.jit.trace(layer, X, check_trace=False)(X)),
    "torch.compile": no_grad(lambda layer: torch.compile(layer, fullgraph=True, backend="eager")(X)),
}


@pytest.mark.parametrize("name", IN_PLAIN_TORCH)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_calls_are_plain_torchs_to_the_bit(monkeypatch, name):
    result = IN_PLAIN_TORCH[name](layer_of("tanh", (64,)))
    monkeypatch.setenv(VARIABLE, "eager")
    torch._dynamo.reset()
    expected = IN_PLAIN_TORCH[name](layer_of("tanh", (64,)))
    assert result.dtype == expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loop_is_the_default_without_gradients(monkeypatch, dtype):
    layer = layer_of("tanh", (64,)).to(dtype)
    with torch.no_grad():
        y = layer(X)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(X), y)
    with torch.inference_mode():
        assert torch.equal(layer(X), y)
    assert by_loop(layer.requires_grad_(False), X).to(dtype).equal(y) and y.dtype == dtype
    monkeypatch.setenv(VARIABLE, "eager")
    torch.testing.assert_close(y, layer(X), rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    assert dtype == torch.bfloat16 or not torch.equal(y, layer(X))  # its roundings are others


CALLED = f"""
import warnings, torch
from normscope.swaps.pointwise import DyT
layer, x = DyT(64), torch.full(({LOOP_FROM} // 64, 64), 2.0)
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    layer(x), layer(x)
    print(round(layer(x)[0, 0].item(), 5), [str(w.message) for w in caught if "numba" in str(w.message)])
"""


@pytest.mark.slow
def test_plain_torch_computes_layers_after_one_warning_where_numba_does_not_work():
    code = "import sys; sys.modules['numba'] = None" + CALLED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed = r"0\.76159 \['numba does not work here [^']*plain torch.*slowly\.'\]"
    assert re.fullmatch(printed, done.stdout.strip().replace('"', "'"))


def constants():
    """Tuples of numbers in loops.py, as they are written there."""
    text = (ROOT / "normscope/swaps/kernels/loops.py").read_text(encoding="utf-8")
    tuples = re.findall(r"^(\w+) = tl.constexpr\(\s*\(([^()]*)\)", text, re.MULTILINE)
    return {name: [float(number) for number in numbers.split(",") if number.strip()] for name, numbers in tuples}


@pytest.mark.slow
def test_the_coefficients_are_those_that_their_script_makes():
    script = ROOT / "scripts/kernel_coefficients.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    expected = dict(line.split(" ", 1) for line in printed.splitlines())
    ours = constants() | {name: getattr(cpu, name) for name in ("EXPM1", "ERF_OVER", "ERF_UNDER")}
    for name, constant in ours.items():
        # To 1e-4: the last coefficient is what rounding in the search moves most, and still matters least.
        assert constant == pytest.approx([float(number) for number in expected[name].split(",")], rel=1e-4)
    assert len(ours) == 4
