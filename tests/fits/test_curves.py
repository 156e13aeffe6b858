import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import UsageError
from normscope.fits.curves import CURVES, curves_named, isru

arguments = st.floats(-1e4, 1e4)


@given(st.sampled_from(sorted(CURVES)), arguments)
def test_the_derivative_is_that_of_the_function(name, u):
    curve = CURVES[name]
    at = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    curve.function(at).backward()
    # autograd's 1 − tanh² cancels for large u, so that the comparison is absolute.
    assert curve.derivative(at.detach()).item() == pytest.approx(at.grad.item(), abs=1e-12)


@given(st.sampled_from(sorted(CURVES)), arguments)
def test_curves_are_odd_bounded_and_of_slope_one(name, u):
    curve = CURVES[name]
    at = torch.tensor([u, -u, 0.0], dtype=torch.float64)
    plus, minus, origin = curve.function(at).tolist()
    assert plus == -minus and abs(plus) <= 1 and origin == 0
    assert curve.derivative(at)[2].item() == 1


@given(st.floats(-1e150, 1e150))
def test_isru_is_its_formula(u):
    assert isru(torch.tensor(u, dtype=torch.float64)).item() == pytest.approx(math.sin(math.atan(u)), rel=1e-9)


def test_curves_go_by_the_names_of_their_modules_too():
    assert [curve.name for curve in curves_named(["DyT", "dyisru"])] == ["tanh", "isru"]
    with pytest.raises(UsageError, match="no curve 'isur'\\. Did you mean 'isru'"):
        curves_named("tanh,isur")
