"""Calls past torch's dispatcher, by a driver that notes launches: what they launch, and who is asked otherwise."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.errors import UsageError
from normscope.swaps.kernels import loops, operators
from normscope.swaps.kernels.choice import EAGER, TRITON, VARIABLE
from normscope.swaps.pointwise import Derf, DyT

C = 64
SHORT = "_PointwiseBackward"


@pytest.fixture(autouse=True)
def by_kernels(driver, monkeypatch):
    monkeypatch.setenv(VARIABLE, TRITON)
    return driver


def used(layer, x):
    """Run it forward and backward, that later calls may go the short way."""
    for _ in range(2):
        layer(x).backward(torch.ones_like(x))
    x.grad = None
    layer.zero_grad()
    return layer, x


@pytest.fixture
def known():
    return used(DyT(C), torch.randn(8, C, requires_grad=True))


def kernels(driver):
    names = [one.kernel for one in driver.launches]
    driver.launches.clear()
    return names


def by_the_operator(layer, x):
    """Whether it is the operator that computes."""
    with mock.patch.object(operators, "pointwise", wraps=operators.pointwise) as called:
        layer(x)
    return called.called


def test_the_first_call_is_the_operators_and_the_next_is_not(driver):
    layer, x = DyT(C), torch.randn(8, C, requires_grad=True)
    assert type(layer(x).grad_fn).__name__ != SHORT
    y = layer(x)
    assert type(y.grad_fn).__name__ == SHORT
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.sum().backward()
    assert kernels(driver) == ["forward", "forward", "backward", "add_slots"]
    assert all(part.grad.shape == part.shape and part.grad.dtype == part.dtype for part in layer.parameters())
    with torch.no_grad():
        assert not by_the_operator(layer, x)
    with torch.inference_mode():
        assert layer(x).is_inference()


@pytest.mark.parametrize("frozen", ["alpha", "weight bias", "alpha shift weight bias"])
@pytest.mark.parametrize("of_input", [False, True])
def test_no_gradient_is_computed_that_nobody_wants(driver, frozen, of_input):
    layer, x = Derf(C), torch.randn(8, C, requires_grad=of_input)
    for name in frozen.split():
        getattr(layer, name).requires_grad_(False)
    for _ in range(3):
        y = layer(x)
        if y.requires_grad:
            y.sum().backward()
    computed = {}
    for one in driver.launches[-2:] if y.requires_grad else ():
        computed |= dict(zip(loops.__dict__[one.kernel].arg_names, one.arguments, strict=True))
    for name, tensor in (("dx", x), *((f"{name}_slots", part) for name, part in layer.named_parameters())):
        assert (tensor.grad is not None) == tensor.requires_grad
        assert not computed or (computed[name] is not None) == tensor.requires_grad


def test_parameters_are_looked_up_at_each_call(driver, known):
    layer, x = known
    layer.alpha = nn.Parameter(torch.full((1,), 2.0))
    layer(x)
    assert driver.launches[-1].arguments[2] == layer.alpha.data_ptr()
    own = {name: part.detach().clone() for name, part in layer.named_parameters()}
    torch.func.functional_call(layer, own, (x,))
    assert driver.launches[-1].arguments[2] == own["alpha"].data_ptr()
    parametrize.register_parametrization(layer, "weight", Doubled())
    layer(x)
    assert driver.launches[-1].arguments[4] != layer.parametrizations.weight.original.data_ptr()
    fresh = Derf(C)
    parametrize.register_parametrization(fresh, "shift", Doubled())
    fresh(x)
    assert driver.launches[-1].arguments[3] is not None


class Doubled(nn.Module):
    def forward(self, part):
        return 2 * part


class Subclass(torch.Tensor):
    pass


def test_modes_and_subclasses_see_the_operator(known, seen_by_dispatch):
    layer, x = known
    assert not by_the_operator(layer, x)
    with seen_by_dispatch() as seen:
        layer(x).sum().backward()
    assert {"normscope::pointwise", "normscope::pointwise_backward"} <= set(seen.names)
    y = layer(x)
    with seen_by_dispatch() as seen:
        y.sum().backward()
    assert "normscope::pointwise_backward" in seen.names
    assert by_the_operator(layer, x.detach().as_subclass(Subclass))
    own = copy.deepcopy(layer)
    own.weight = nn.Parameter(own.weight.detach().as_subclass(Subclass))
    assert by_the_operator(own, x)
    with torch.device("cpu"):  # a mode that sees torch's functions
        assert by_the_operator(layer, x)
    with forward_ad.dual_level():
        assert by_the_operator(layer, x)


def test_plain_torch_is_asked_for_at_any_time(driver, known, monkeypatch):
    layer, x = known
    driver.launches.clear()
    monkeypatch.setenv(VARIABLE, EAGER)
    torch.testing.assert_close(layer(x), (layer.alpha * x).tanh(), rtol=1e-6, atol=0)
    assert not kernels(driver)
    monkeypatch.setenv(VARIABLE, "trition")
    with pytest.raises(UsageError, match="trition"):
        layer(x)
    monkeypatch.setenv(VARIABLE, "")
    layer(x)
    assert kernels(driver) == ["forward"]
    monkeypatch.delenv(VARIABLE)
    layer(x)
    assert kernels(driver) == ["forward"]


def test_what_the_kernels_cannot_is_refused_as_by_the_operator(known):
    layer, x = known
    [slope] = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(UsageError, match=r"no second derivative.*NORMSCOPE_KERNELS=eager"):
        torch.autograd.grad(slope.sum(), x)
    y = layer(x)
    with pytest.raises(UsageError, match="no batched gradients"):
        torch.autograd.grad(y, x, torch.randn(3, 8, C), is_grads_batched=True)
    with pytest.raises(UsageError, match="no forward-mode derivative"), forward_ad.dual_level():
        layer(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(UsageError, match=r"do not go with an input of \(8, 65\)"):
        layer(torch.randn(8, C + 1))


def test_what_is_kept_for_backward_is_autograds(driver, known):
    layer, x = known
    y = layer(x)
    with torch.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        y = layer(x)
    y.sum().backward()
    driver.launches.clear()
    for reentrant in (True, False):
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert kernels(driver) == ["forward", "forward", "backward", "add_slots"]
