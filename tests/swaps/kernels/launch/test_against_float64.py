"""Forward and every gradient of each curve, in each dtype and layout, with parameters of every shape and dtype."""

import math

import numpy as np
import pytest
import torch
from truth import BY_NUMPY, DEVICE, GPU, HALF_ULP, SLOPES, by_kernels, check, numbers, parameters, truth

from normscope.swaps.kernels import launch

ALL = "alpha shift weight bias"
HALF = torch.bfloat16
DTYPES = (torch.float32, HALF, torch.float16)
NAN, INF = math.nan, math.inf
CURVES = list(BY_NUMPY)
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, of the interpreter
each_curve = pytest.mark.parametrize("curve", CURVES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LAYOUTS = {  # x, the sizes of its channel axes, and the number of axes behind them
    "one row": (numbers((1, 12)), (12,), 0),
    "one channel": (numbers((7, 1)), (1,), 0),
    "no axis": (numbers(()), (1,), 0),
    "several tiles": (numbers((3, 267)), (267,), 0),
    "not at a multiple of 16 bytes": (numbers((5, 33), HALF)[:, 1:], (32,), 0),
    "every other channel": (numbers((5, 24))[..., ::2], (12,), 0),
    "transposed": (numbers((9, 7)).T, (9,), 0),
    "NCHW": (numbers((2, 6, 3, 5)), (6,), 2),
    "channels last": (numbers((2, 6, 3, 5)).contiguous(memory_format=torch.channels_last), (6,), 2),
    "expanded rows": (numbers((1, 16), HALF).expand(6, 16), (16,), 0),
    "rows that overlap": (numbers((20,)).as_strided((5, 8), (3, 1)), (8,), 0),
    "two channel axes": (numbers((3, 4, 6), HALF), (4, 6), 0),
    "permuted": (numbers((2, 4, 3, 5), HALF)[:, :, 1:, 1:].permute(3, 1, 0, 2), (4,), 2),
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Let a few elements fill several tiles, and a program take several of them."""
    for name, value in {"FORWARD_TILE": 16, "BACKWARD_TILE": 8, "COLUMNS": 8, "PROGRAMS": 2}.items():
        monkeypatch.setattr(launch, name, value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name):
    x, shape, behind = LAYOUTS[name]
    check(CURVES[list(LAYOUTS).index(name) % 3], x, parameters(shape, x.dtype, ALL), behind)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)], ids=str)
def test_an_empty_input_has_gradients_of_zero(shape):
    check("isru", torch.ones(shape, device=DEVICE), parameters(shape[-1:], HALF, "weight" if shape[-1] else ""))


# The channels, the parameters with one number per channel, and those that are absent.
KINDS = [(24, ALL, ""), (24, "weight bias", "shift"), (24, "alpha weight", "bias"), (24, "", "shift bias")]
KINDS += [(136, ALL, ""), (24, "alpha", "shift"), (24, "shift bias", "")]
DTYPE_PAIRS = [(dtype, dtype) for dtype in DTYPES]
DTYPE_PAIRS += [(DTYPES[i], DTYPES[j]) for i, j in ((0, 1), (1, 0), (2, 1), (1, 2))]


@each_curve
@pytest.mark.parametrize("case", range(len(KINDS)))
def test_every_kind_of_parameter_in_every_pair_of_dtypes(curve, case):
    channels, *kind = KINDS[case]
    for dtype, of_parameters in DTYPE_PAIRS[(case + CURVES.index(curve)) % 3 :: 3]:
        check(curve, numbers((13, channels), dtype), parameters((channels,), of_parameters, *kind))


@each_dtype
def test_programs_that_take_several_tiles(dtype, small_tiles):
    check("tanh", numbers((21, 12), dtype), parameters((12,), dtype))
    check("tanh", numbers((2, 4, 7), dtype), parameters((4,), dtype, ALL), behind=1)


def test_parameters_with_strides_and_inputs_that_stay_unchanged():
    x, spaced = numbers((9, 24)), [part[::2] for part in parameters((48,), each=ALL)]
    before = [tensor.clone() for tensor in (x, *spaced)]
    check("erf", x, spaced)
    check("isru", x, [part[:1].expand(24) for part in spaced])
    check("tanh", numbers((5, 4, 6)), [part.t() for part in parameters((6, 4), each=ALL)])
    assert all(map(torch.equal, (x, *spaced), before))


@each_curve
@each_dtype
def test_nan_and_infinity_as_in_plain_torch(curve, dtype):
    x = torch.tensor([[NAN, INF, -INF, 0.0, 0.5]] * 4, dtype=dtype).T
    dy = torch.tensor([[1.0, NAN, INF, -INF]] * 5, dtype=dtype)
    ones = [torch.full((4,), value, dtype=dtype, device=DEVICE) for value in (1, 0, 1, 0)]
    results = by_kernels(curve, x.to(DEVICE), ones, 0, dy.to(DEVICE))
    with np.errstate(all="ignore"):
        f = torch.from_numpy(np.array([NAN, 1, -1, 0, BY_NUMPY[curve](0.5)]))[:, None].expand(5, 4)
        dx = dy.double() * torch.from_numpy(SLOPES[curve](x.double().numpy()))
    terms = {"alpha": dx * x.double(), "shift": dx, "weight": dy.double() * f, "bias": dy.double()}
    expected = {"y": f, "x": dx} | {name: part.sum(0) for name, part in terms.items()}
    for name, result in results.items():
        torch.testing.assert_close(result.cpu().double(), expected[name], rtol=2**-6, atol=0, equal_nan=True, msg=name)


@each_curve
def test_nan_stays_in_its_channel(curve):
    x, dy = numbers((40, 12)), numbers((40, 12), seed=3)
    x[7, 3] = dy[9, 5] = NAN
    x[:, 8] = INF
    gradients = by_kernels(curve, x, parameters((12,), each=ALL), 0, dy)
    # The derivative at infinity is zero, and zero times x is none.
    nan_channels = {"alpha": [3, 5, 8], "shift": [3, 5], "weight": [3, 5], "bias": [5]}
    for name, channels in nan_channels.items():
        assert gradients[name].isnan().nonzero().flatten().tolist() == channels, name
    assert gradients["x"].isnan().nonzero().tolist() == [[7, 3], [9, 5]]


@each_curve
@each_dtype
@pytest.mark.parametrize("scale", [1e-4, 300.0])
def test_the_largest_and_the_smallest_numbers(curve, dtype, scale):
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    x = torch.tensor([[most, -most, 1e4, -300.0, least, -least, 0.0, 3e-3]]).to(dtype)
    given = torch.tensor([scale], device=DEVICE), None, torch.tensor([1.5], device=DEVICE), None
    u = torch.tensor(scale).double() * x.double()
    # Subnormal bfloat16 is not the interpreter's strength, and float32 may take its own for zero. About u = 1, a
    # GPU's instructions put twenty of these halves of an ulp together at most.
    close = {
        "rtol": 2**-6 if dtype != torch.float32 else (24 if GPU else 16) * HALF_ULP,
        "atol": 2.0**-24 if dtype == torch.float16 else 2e-38,
    }
    y = launch.forward(x.to(DEVICE), given, curve, 0)
    torch.testing.assert_close(y.cpu().double(), 1.5 * torch.from_numpy(BY_NUMPY[curve](u.numpy())), **close)
    dx, *_ = launch.backward(torch.ones_like(x, device=DEVICE), x.to(DEVICE), given, curve, 0)
    with np.errstate(all="ignore"):
        slope = torch.from_numpy(SLOPES[curve](u.numpy()))
    torch.testing.assert_close(dx.cpu().double(), 1.5 * given[0].cpu().double() * slope, **close)


@each_dtype
def test_sums_that_cancel_are_as_exact_as_their_terms(dtype):
    """The terms of α and s come in pairs of opposite signs and a little more: only their magnitudes bound the error."""
    half, small = numbers((60, 24), dtype), numbers((1, 24), dtype, seed=5)
    x = torch.cat([half, half, small])
    dy = torch.cat([numbers((60, 24), dtype, seed=3), -numbers((60, 24), dtype, seed=3), small])
    given = parameters((24,), dtype)
    expected = truth("tanh", x, given, 0, dy)
    magnitude = truth("tanh", x.abs(), [part.abs() for part in given], 0, dy.abs())
    assert expected["alpha"][0].abs() < magnitude["alpha"][0] / 20
    check("tanh", x, given, dy=dy)
