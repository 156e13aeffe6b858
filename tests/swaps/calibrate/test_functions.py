"""Point-wise functions by least squares."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from normscope.fits.solving.ceiling import Piecewise, curve_along
from normscope.swaps.calibrate.functions import least_squares
from normscope.swaps.pointwise import PointwiseFunction


@pytest.mark.parametrize("curve", ["tanh", "isru", "erf"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_a_norm_that_is_straight_needs_no_weight_that_half_precision_does_not_hold(curve, per_channel, spread):
    x = spread * torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = 2 * x / spread + 0.5
    function = PointwiseFunction(
        curve, 3, alpha=torch.full((3 if per_channel else 1,), 0.1 / spread), shift=torch.full((1,), 0.01)
    )
    found = {name: value.double() for name, value in least_squares(function, x, y).items()}
    assert found["weight"].abs().max() < 2 * 4 / 0.01 * 1.2  # no token reaches farther than 4 standard deviations
    fitted = found["weight"] * function.curve.function(found["alpha"] * x + found["shift"]) + found["bias"]
    assert (fitted - y).norm() < 1e-3 * y.norm()  # a trace of the bend, and float32 parameters


@pytest.mark.parametrize("alpha", [[-0.4], [-0.4, 0.4, -0.4]])
@pytest.mark.parametrize("straight", [False, True])
def test_alpha_is_positive_and_the_weight_has_the_sign(alpha, straight):
    """A search that begins below 0 ends there; the same function is written with α above it."""
    x = torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = -2 * x + 0.5 if straight else 3 * torch.tanh(-0.7 * x + 0.4) - 1
    starts = [torch.tensor(alpha), torch.tensor(alpha).abs()]
    ends = []
    for start in starts:
        function = PointwiseFunction("tanh", 3, alpha=start, shift=-0.1 * start.sign())
        found = {name: value.double() for name, value in least_squares(function, x, y).items()}
        assert (found["alpha"] > 0).all() and (found["weight"] < 0).all()
        ends.append(found["weight"] * torch.tanh(found["alpha"] * x + found["shift"]) + found["bias"])
    torch.testing.assert_close(*ends, rtol=1e-3 if straight else 1e-4, atol=1e-3 if straight else 1e-4)  # float32
    assert (ends[0] - y).norm() < 1e-3 * y.norm()


def test_what_is_not_odd_keeps_its_sign():
    x = torch.randn(400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = 3 * torch.sigmoid(-0.7 * x) - 1
    function = PointwiseFunction("sigmoid", 2, alpha=-0.4)
    found = {name: value.double() for name, value in least_squares(function, x, y).items()}
    fitted = found["weight"] * torch.sigmoid(found["alpha"] * x) + found["bias"]
    assert (found["alpha"] < 0).all() and (fitted - y).norm() < 1e-4 * y.norm()  # where the search ends


def test_one_shift_for_alphas_of_both_signs_leaves_them():
    x = torch.randn(400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([0.7, -0.7], dtype=torch.float64)
    y = 3 * torch.tanh(slopes * x + 0.3) - 1
    for alpha, shift, signs in (([0.4, -0.4], 0.1, [1, -1]), ([-0.4, -0.4], -0.1, [1, 1])):
        function = PointwiseFunction("tanh", 2, alpha=torch.tensor(alpha), shift=torch.tensor([shift]))
        found = {name: value.double() for name, value in least_squares(function, x, y).items()}
        assert found["alpha"].sign().tolist() == signs
        if signs == [1, -1]:
            fitted = found["weight"] * torch.tanh(found["alpha"] * x + found["shift"]) + found["bias"]
            assert (fitted - y).norm() < 1e-5 * y.norm()


def test_lines_between_points_are_fitted_where_they_are_and_go_back_to_a_gpu(fake_cuda):
    lines = curve_along(Piecewise(np.array([0.0, 1.0]), np.array([0.0, 3.0]), beyond=0.0))
    with FakeTensorMode():
        with torch.device("cuda"):
            function = PointwiseFunction(lines, 4)
        function.table.to("cuda")
        x, y = torch.randn(2, 9, 4, dtype=torch.float64)
        found = least_squares(function, x, y)
    assert {name: value.device.type for name, value in found.items()} == dict.fromkeys(
        ("alpha", "weight", "bias"), "cuda"
    )
