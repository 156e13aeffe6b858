"""Slope, log α and c in place of weight, α and s: the same function, and the gradients that autograd finds."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from normscope.swaps.heal.trained_parameters import TrainedParameters
from normscope.swaps.pointwise import PointwiseFunction

CHANNELS = 3
NAMES = ["weight", "alpha", "shift", "bias"]
numbers = st.floats(-3, 3)
alphas = st.tuples(st.floats(-6, 1), st.sampled_from([-1, 1])).map(lambda drawn: drawn[1] * 10 ** drawn[0])


@st.composite
def functions(draw):
    curve, shifted, per_channel = (
        draw(st.sampled_from(["tanh", "isru", "linear"])),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    size = CHANNELS if per_channel else 1
    alpha = torch.tensor(draw(st.lists(alphas, min_size=size, max_size=size)))
    shift = torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size))) * alpha if shifted else None
    function = PointwiseFunction(curve, CHANNELS, alpha=alpha, shift=shift).double()
    with torch.no_grad():
        slope = torch.tensor(draw(st.lists(numbers, min_size=CHANNELS, max_size=CHANNELS)), dtype=torch.float64)
        function.weight.copy_(slope / function.alpha)
    return function


def names_of(function):
    return [name for name, _ in function.named_parameters()]


@given(functions())
def test_it_stays_the_same_function_to_rounding(function):
    x = torch.linspace(-4, 4, 30, dtype=torch.float64).reshape(10, 3)
    before, values = function(x).detach(), copy.deepcopy(function.state_dict())
    trained = TrainedParameters(function, names_of(function))
    assert all(torch.equal(value, values[name]) for name, value in function.state_dict().items())
    trained.put()
    torch.testing.assert_close(function(x).detach(), before, rtol=1e-12, atol=1e-12)  # float64


@given(functions(), st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_gradients_are_those_of_the_function_written_out(function, by):
    x = torch.linspace(-4, 4, 30, dtype=torch.float64).reshape(10, 3)
    begun = function.alpha.detach().clone()
    trained = TrainedParameters(function, names_of(function))
    with torch.no_grad():
        for tensor, step in zip(trained.tensors.values(), by, strict=False):
            tensor += step
    trained.put()
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in trained.tensors.items()}
    alpha = begun * own["alpha"].exp()
    inside = x + own["shift"] if "shift" in own else x
    by_hand = own["weight"] / alpha * function.curve.function(alpha * inside) + own["bias"]
    torch.testing.assert_close(function(x), by_hand, rtol=1e-9, atol=1e-9)
    target = torch.cos(3 * x)
    (by_hand - target).square().sum().backward()
    (function(x) - target).square().sum().backward()
    trained.take_gradients()
    for name, tensor in trained.tensors.items():
        scale = max(1.0, float(own[name].grad.abs().max()))
        # Of log α large terms cancel: as large as weight · gradient of the weight, which hold 1/α and α.
        torch.testing.assert_close(tensor.grad, own[name].grad, rtol=1e-6, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize("alpha", [1e-5, 1.0])
def test_a_step_moves_a_nearly_straight_function_as_far_as_a_bent_one(alpha):
    """Trained as they are, one step of s by 3e-4 moves a function of weight 10⁵ by 30."""
    function = PointwiseFunction("tanh", CHANNELS, alpha=alpha, shift=0.0)
    with torch.no_grad():
        function.weight.fill_(1 / alpha)
    x = torch.linspace(-1, 1, 30).reshape(10, 3)
    before, trained = function(x).detach(), TrainedParameters(function, NAMES)
    with torch.no_grad():
        for tensor in trained.tensors.values():
            tensor += 3e-4
    trained.put()
    assert 0 < float((function(x).detach() - before).abs().max()) < 2e-3


def test_an_alpha_of_nought_can_be_trained():
    function = PointwiseFunction("tanh", CHANNELS, alpha=0.0)
    trained = TrainedParameters(function, ["weight", "alpha", "bias"])
    function(torch.ones(1, CHANNELS)).sum().backward()
    trained.take_gradients()
    trained.put()
    assert all(
        bool(tensor.isfinite().all()) and bool(tensor.grad.isfinite().all()) for tensor in trained.tensors.values()
    )


def test_other_parameters_are_trained_as_they_are():
    network = nn.Sequential(nn.Linear(2, CHANNELS), PointwiseFunction("tanh", CHANNELS))
    trained = TrainedParameters(network, ["0.weight", "1.alpha", "1.weight", "1.bias"])
    assert trained.tensors["0.weight"] is network[0].weight and trained.tensors["1.bias"] is network[1].bias
    assert math.isclose(float(trained.tensors["1.weight"][0]), 0.5)
    trained.load({name: torch.zeros_like(value) + 0.1 for name, value in trained.tensors.items()})
    assert float(network[0].weight.detach().mean()) == pytest.approx(0.1)
    assert float(network[1].alpha.detach()) == pytest.approx(0.5 * math.exp(0.1))
