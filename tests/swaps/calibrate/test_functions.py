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


def test_lines_between_points_are_fitted_where_they_are_and_go_back_to_a_gpu():
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
