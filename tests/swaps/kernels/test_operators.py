"""The operators in what torch does with operators: opcheck, autograd, autocast, vmap, torch.compile and torch.export.

Where there is a GPU they run there, and Triton's kernels compute what is not float64. Run as a script, in Triton's
interpreter, this file sends the kernels themselves through opcheck and a compiled graph.
"""

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck

from normscope.errors import UsageError
from normscope.swaps import operators
from normscope.swaps.kernels.choice import EAGER, VARIABLE, plain_torch
from normscope.swaps.pointwise import DyISRU, DyT, PointwiseFunction

CURVES = {"tanh": torch.tanh, "isru": lambda u: u / (1 + u * u).sqrt(), "erf": torch.erf}
ON_GPU = torch.cuda.is_available() and torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float64: 2.0**-52}
if ON_GPU:
    ULP[torch.float16] = 2.0**-10
C = 6
LAYOUTS = {  # x by name, and the number of axes behind those of its channels
    "plain": (lambda x: x(5, C), 0),
    "no rows": (lambda x: x(0, C), 0),
    "transposed": (lambda x: x(C, 5).T, 0),
    "sliced": (lambda x: x(9, 2 * C)[::2, ::2], 0),
    "expanded": (lambda x: x(5, 1).expand(5, C), 0),
    "NCHW": (lambda x: x(2, C, 3, 2), 2),
    "channels_last": (lambda x: x(2, C, 3, 2).contiguous(memory_format=torch.channels_last), 2),
    "permuted": (lambda x: x(3, C, 2, 4).permute(0, 3, 1, 2), 1),
    "one row": (lambda x: x(C), 0),
}
each_curve = pytest.mark.parametrize("curve", CURVES)
pytestmark = [pytest.mark.usefixtures("on_device"), *([pytest.mark.gpu] if ON_GPU else [])]


@pytest.fixture(scope="module")
def on_device():
    with DEVICE:
        yield


def values(*shape, dtype=torch.float64, seed=0):
    drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(DEVICE, dtype)


def singles(*shape):
    return values(*shape, dtype=torch.float32)


def parameters(dtype, *, shift=True, bias=True, each=False, needed=True):
    """α, s, weight and bias as training might leave them."""
    drawn = [values(C if each else 1, seed=1) + 1, values(C if each else 1, seed=2) if shift else None]
    drawn += [values(C, seed=3), values(C, seed=4) if bias else None]
    return [None if part is None else part.to(dtype).requires_grad_(needed) for part in drawn]


def plain(x, alpha, shift, weight, bias, curve, behind):
    """The papers' formula in plain torch, in the dtype of its arguments."""
    alpha, shift, weight, bias = (
        None if part is None else part if part.numel() == 1 else part.reshape(-1, *[1] * behind)
        for part in (alpha, shift, weight, bias)
    )
    y = weight * CURVES[curve](alpha * x + (0 if shift is None else shift))
    return y if bias is None else y + bias


@pytest.mark.slow
@each_curve
@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("needed", [True, False])
def test_opcheck(curve, dtype, needed):
    given = parameters(dtype, shift=needed, bias=needed, each=needed, needed=needed)
    for name in ("plain", "channels_last") if needed else ("transposed",):
        make, behind = LAYOUTS[name]
        x = make(values).to(dtype)
        # Half precision's gradients differ by a rounding where the compiler's differ.
        tolerance = {"rtol": 4 * ULP[dtype], "atol": 4 * ULP[dtype]}
        opcheck(operators.pointwise, (x.detach().requires_grad_(needed), *given, curve, behind), **tolerance)
        frozen = [None if part is None else part.detach() for part in given]
        arguments = (values(*x.shape, seed=9).to(dtype), x, *frozen, curve, behind)
        opcheck(operators.pointwise_backward, arguments, **tolerance, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_fake_tensors_have_the_strides_of_real_ones(name):
    make, behind = LAYOUTS[name]
    x, given = make(singles), parameters(torch.float32, needed=False)
    dy = torch.ones(1, dtype=x.dtype).expand(x.shape)

    def results(x, dy, *given):
        arguments = (x, *given, "tanh", behind)
        return [operators.pointwise(*arguments), *operators.pointwise_backward(dy, *arguments)]

    real = results(x, dy, *given)
    with FakeTensorMode() as mode:
        fake = results(*(mode.from_tensor(part) for part in (x, dy, *given)))
    assert [(a.shape, a.stride(), a.dtype) for a in real] == [(b.shape, b.stride(), b.dtype) for b in fake]


@each_curve
@pytest.mark.parametrize(("name", "each"), [("NCHW", True), ("sliced", False)])
def test_gradients_are_those_of_autograd(curve, name, each):
    make, behind = LAYOUTS[name]
    x, given = make(values).requires_grad_(), parameters(torch.float64, each=each)
    assert torch.autograd.gradcheck(lambda *given: operators.pointwise(*given, curve, behind), (x, *given))
    dy = values(*x.shape, seed=5)
    gradients = torch.autograd.grad(operators.pointwise(x, *given, curve, behind), (x, *given), dy)
    expected = torch.autograd.grad(plain(x, *given, curve, behind), (x, *given), dy)
    # a sum of 24 float64 in another order
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-13)


def test_gradients_of_parameters_are_in_their_dtypes_and_in_plain_torch_summed_in_float64(monkeypatch):
    monkeypatch.setenv(VARIABLE, EAGER)
    x, (alpha, *_) = torch.ones(3, 1), parameters(torch.float32, needed=False)
    weight, bias = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16)
    dy = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]])  # of which float32 loses the one
    given = (dy, x, alpha, None, weight, bias, "tanh", 0)
    *_, by_weight, by_bias = gradients = operators.pointwise_backward(*given)
    assert by_bias.item() == 1
    # The two large products are each other's opposites, rounded alike: the small one is left.
    torch.testing.assert_close(by_weight, alpha.tanh().double(), rtol=2.0**-20, atol=0)
    with FakeTensorMode() as mode:
        fake = operators.pointwise_backward(*(mode.from_tensor(a) if torch.is_tensor(a) else a for a in given))
    assert [gradient.dtype for gradient in gradients] == [gradient.dtype for gradient in fake]


WRONG = {  # x's shape, those of α, s, weight and bias, and the axes behind
    "more channels": ((4, C), [(1,), None, (C + 1,), None], 0),
    "α alone": ((4, C), [(C + 1,), None, (C,), (C,)], 0),
    "s of two axes": ((4, C), [(1,), (4, C), (C,), (C,)], 0),
    "too few axes": ((C,), [(1,), None, (C,), None], 1),
    "as many numbers": ((2, 3), [(1,), None, (C,), None], 0),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("fake", [False, True])
def test_parameters_of_other_channels_are_refused(case, fake):
    shape, sizes, behind = WRONG[case]
    with FakeTensorMode() if fake else torch.no_grad():
        x, *given = (None if size is None else torch.ones(size) for size in (shape, *sizes))
        with pytest.raises(UsageError, match=rf"do not go with an input of {re.escape(str(shape))}"):
            operators.pointwise(x, *given, "tanh", behind)
        with pytest.raises(UsageError, match="do not go with"):
            operators.pointwise_backward(x, x, *given, "tanh", behind)


def test_other_shapes_and_devices_are_refused():
    with pytest.raises(UsageError, match=r"Parameters of shape \(6,\) do not go with an input of \(4, 1\)"):
        DyT(C)(torch.ones(4, 1))
    with FakeTensorMode():
        given = [torch.ones(1, device="cpu"), None, torch.ones(C, device="cuda"), None]
        with pytest.raises(UsageError, match="input is on cpu, and a parameter on cuda:0; move one to the other"):
            operators.pointwise(torch.ones(4, C, device="cpu"), *given, "tanh", 0)


def second(function, x):
    [slope] = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), x)[0]


def tangents_of_gradients(function, x):
    """Forward mode over the backward pass alone, whose operator would be constant to it."""
    y, ones = function(x), torch.ones_like(x)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(torch.autograd.grad(y, x, forward_ad.make_dual(ones, ones))[0]).tangent


def batched(function, x):
    return torch.autograd.grad(function(x), x, values(2, *x.shape, seed=5), is_grads_batched=True)[0]


def output_by_vmap(function, x):
    return torch.func.vmap(function)(x)


def by_vmap(function, x):
    y = function(x)
    return torch.func.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(values(2, *x.shape, seed=5))


DERIVATIVES = [second, tangents_of_gradients, batched, by_vmap, output_by_vmap]


@each_curve
@pytest.mark.parametrize("derivative", DERIVATIVES, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_further_derivatives_are_those_of_plain_torch(curve, derivative):
    x, given = values(3, C).requires_grad_(), parameters(torch.float64)
    result = derivative(lambda x: operators.pointwise(x, *given, curve, 0), x)
    torch.testing.assert_close(result, derivative(lambda x: plain(x, *given, curve, 0), x))


class ByOperator(PointwiseFunction):
    """A point-wise function that calls the operator on every device."""

    def applied(self, input):
        return operators.pointwise(input, self.alpha, self.shift, self.weight, self.bias, self.curve.name, 0)


def network(curve="erf", inner=64, kind=PointwiseFunction):
    torch.manual_seed(0)
    norm = kind(curve, inner, alpha=0.7, shift=0.1)
    return nn.Sequential(nn.Linear(inner // 2, inner), norm, nn.GELU(), nn.Linear(inner, 48))


def check(called, net, x, allowed):
    """Compare output and gradients with plain torch in float64: at most ``allowed`` of the largest number of each."""
    leaf = x.detach().requires_grad_()
    y = called(leaf)
    results = [y.detach(), *torch.autograd.grad(y.square().sum(), (leaf, *net.parameters()))]
    with plain_torch():
        exact, leaf = copy.deepcopy(net).double(), x.detach().double().requires_grad_()
        y = exact(leaf)
        expected = [y.detach(), *torch.autograd.grad(y.square().sum(), (leaf, *exact.parameters()))]
    for result, truth in zip(results, expected, strict=True):
        assert (result.double() - truth).abs().max() <= allowed * truth.abs().max()


@pytest.mark.parametrize(("curve", "dynamic"), [("tanh", True), ("isru", True), ("erf", True), ("erf", False)])
def test_a_network_compiles_into_one_graph(curve, dynamic):
    torch._dynamo.reset()
    net = network(curve, C, ByOperator)
    backend = "inductor" if ON_GPU else "aot_eager"
    compiled = torch.compile(net, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 8) if dynamic else (3,):
        check(compiled, net, singles(rows, C // 2), 1e-5)  # float32 sums of some tens of terms of order 1


def test_an_exported_program_runs_where_the_kernels_are_not(tmp_path):
    net = network("isru", C, ByOperator)
    program = torch.export.export(net, (singles(3, C // 2),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert "normscope.pointwise.default" in [str(node.target) for node in program.graph.nodes]
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for rows in (3, 11):
        x = singles(rows, C // 2)
        torch.testing.assert_close(loaded(x), net(x), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_kernels_themselves_in_a_compiled_graph():
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    environment = {**os.environ, "TRITON_INTERPRET": "1", VARIABLE: "triton"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def in_the_interpreter():
    for curve in CURVES:
        net = network(curve, C)
        check(torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True), net, singles(3, C // 2), 1e-5)
    layer, x = DyISRU(C), singles(2, C, 3).requires_grad_()
    opcheck(operators.pointwise, (x, layer.alpha, None, layer.weight, layer.bias, "isru", 1))


if __name__ == "__main__":
    in_the_interpreter()
