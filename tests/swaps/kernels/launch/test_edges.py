"""Numbers at the edges: NaN, infinity, the largest that there are, and sums that cancel."""

import math

import numpy as np
import pytest
import torch
from truth import BY_NUMPY, BY_TORCH, DEVICE, GPU, HALF_ULP, hold, made_by_kernels, numbers, parameters, truth

from normscope.swaps.kernels import launch
from normscope.swaps.kernels.eager import Parameters

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOPES = {"tanh": lambda u: np.cosh(u) ** -2, "isru": lambda u: np.hypot(u, 1) ** -3, "erf": None}
SLOPES["erf"] = lambda u: 2 / math.sqrt(math.pi) * np.exp(-(u**2))

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, of the interpreter
each_curve = pytest.mark.parametrize("curve", BY_NUMPY)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def ones(channels: int, dtype: torch.dtype = torch.float32) -> Parameters:
    return Parameters(*(torch.full((channels,), value, dtype=dtype, device=DEVICE) for value in (1, 0, 1, 0)))


@each_curve
@each_dtype
def test_nan_and_infinity_come_through_as_in_plain_torch(curve, dtype):
    x = torch.tensor([[NAN, INF, -INF, 0.0, 0.5]] * 4, dtype=dtype).T
    dy = torch.tensor([[1.0, NAN, INF, -INF]] * 5, dtype=dtype)
    results = made_by_kernels(curve, x.to(DEVICE), ones(4, dtype), 0, dy.to(DEVICE))
    with np.errstate(all="ignore"):
        f = torch.from_numpy(np.array([NAN, 1, -1, 0, BY_NUMPY[curve](0.5)]))[:, None].expand(5, 4)
        slope = torch.from_numpy(SLOPES[curve](x.double().numpy()))
    dx = dy.double() * slope
    if curve != "isru":  # whose plain formula is ∞/∞ at infinity, and not its limit
        leaf = x.double().requires_grad_()
        BY_TORCH[curve](leaf).backward(dy.double())
        torch.testing.assert_close(leaf.grad, dx, rtol=1e-15, atol=0, equal_nan=True)
    terms = {"alpha": dx * x.double(), "shift": dx, "weight": dy.double() * f, "bias": dy.double()}
    expected = {"y": f, "x": dx} | {name: own.sum(0) for name, own in terms.items()}
    for name, made in results.items():
        torch.testing.assert_close(made.cpu().double(), expected[name], rtol=2**-6, atol=0, equal_nan=True, msg=name)


@each_curve
def test_a_channel_of_nan_stays_alone(curve):
    x, dy = numbers((40, 12)), numbers((40, 12), seed=3)
    x[7, 3] = dy[9, 5] = NAN
    x[:, 8] = INF
    own = parameters(curve, (12,), each="alpha shift weight bias")
    gradients = made_by_kernels(curve, x, own, 0, dy)
    # The derivative at infinity is zero, and zero times x is none.
    spoilt = {"alpha": [3, 5, 8], "shift": [3, 5], "weight": [3, 5], "bias": [5]}
    for name, where in spoilt.items():
        assert gradients[name].isnan().nonzero().flatten().tolist() == where, name
    assert gradients["x"].isnan().nonzero().tolist() == [[7, 3], [9, 5]]


@each_curve
@each_dtype
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_the_largest_and_the_smallest_numbers(curve, dtype, scale):
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    x = torch.tensor([[most, -most, 1e4, -300.0, least, -least, 0.0, 3e-3]]).to(dtype)
    own = Parameters(torch.tensor([scale], device=DEVICE), None, torch.tensor([1.5], device=DEVICE), None)
    u = torch.tensor(scale).double() * x.double()
    y = launch.forward(x.to(DEVICE), own, curve, 0)
    # Subnormal bfloat16 is not the interpreter's strength, and float32 may take its own for zero. About u = 1, a
    # GPU's instructions put twenty of these halves of an ulp together at most.
    close = {
        "rtol": 2**-6 if dtype != torch.float32 else (24 if GPU else 16) * HALF_ULP,
        "atol": 2.0**-24 if dtype == torch.float16 else 2e-38,
    }
    torch.testing.assert_close(y.cpu().double(), 1.5 * torch.from_numpy(BY_NUMPY[curve](u.numpy())), **close)
    dx, *_ = launch.backward(torch.ones_like(x, device=DEVICE), x.to(DEVICE), own, curve, 0)
    with np.errstate(all="ignore"):
        slope = torch.from_numpy(SLOPES[curve](u.numpy()))
    torch.testing.assert_close(dx.cpu().double(), 1.5 * own.alpha.cpu().double() * slope, **close)


@each_dtype
def test_sums_that_cancel_are_as_exact_as_their_terms(dtype):
    """The terms of α and s come in pairs of opposite signs and a little more: only their magnitudes bound the error."""
    half, small = numbers((60, 24), dtype), numbers((1, 24), dtype, seed=5)
    x = torch.cat([half, half, small])
    dy = torch.cat([numbers((60, 24), dtype, seed=3), -numbers((60, 24), dtype, seed=3), small])
    own = parameters("tanh", (24,), dtype)
    held = truth("tanh", x, own, 0, dy)
    magnitude = truth("tanh", x.abs(), own.each(torch.abs), 0, dy.abs())
    assert held["alpha"].value.abs() < magnitude["alpha"].value / 20
    hold("tanh", x, own, dy=dy)
