"""The operators in what torch does with operators: opcheck, autograd, autocast, vmap, torch.compile and torch.export.

Where there is a GPU they run there, and Triton's kernels compute what is not float64. Run as a script, in Triton's
interpreter, this file sends the kernels themselves through opcheck and a compiled graph.
"""

import copy
import itertools
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
from normscope.swaps import pointwise as module
from normscope.swaps.kernels import operators
from normscope.swaps.kernels.choice import EAGER, VARIABLE, plain_torch
from normscope.swaps.pointwise import Derf, DyISRU, DyT, PointwiseFunction

CURVES = {"tanh": torch.tanh, "isru": lambda u: u / (1 + u * u).sqrt(), "erf": torch.erf}
ON_GPU = torch.cuda.is_available() and torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# A unit in the last place.
ONE = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float64: 2.0**-52}
if ON_GPU:
    ONE[torch.float16] = 2.0**-10
C = 6
# x by name, and how many axes come after those of its channels.
LAYOUTS = {
    "plain": (lambda x: x(5, C), 0),
    "no rows": (lambda x: x(0, C), 0),
    "transposed": (lambda x: x(C, 5).T, 0),
    "sliced": (lambda x: x(5, 2 * C)[:, ::2], 0),
    "sliced rows": (lambda x: x(9, C + 3)[::2, 2:-1], 0),
    "expanded": (lambda x: x(1, C).expand(5, C), 0),
    "expanded channels": (lambda x: x(5, 1).expand(5, C), 0),
    "NCHW": (lambda x: x(2, C, 3, 2), 2),
    "channels_last": (lambda x: x(2, C, 3, 2).contiguous(memory_format=torch.channels_last), 2),
    "permuted": (lambda x: x(3, C, 2, 4).permute(0, 3, 1, 2), 1),
    "one row": (lambda x: x(C), 0),
}
everywhere = pytest.mark.parametrize("curve", CURVES)
pytestmark = [pytest.mark.usefixtures("on_device"), *([pytest.mark.gpu] if ON_GPU else [])]


@pytest.fixture(scope="module")
def on_device():
    """Whatever does not say where is made there."""
    with DEVICE:
        yield


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    made = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(DEVICE, dtype)


def parameters(dtype, *, shift=True, bias=True, each=False, needed=True) -> list[torch.Tensor | None]:
    """Numbers that training might leave: α, s, weight, bias."""
    made = [values(C if each else 1, seed=1) + 1, values(C if each else 1, seed=2) if shift else None]
    made += [values(C, seed=3), values(C, seed=4) if bias else None]
    return [None if part is None else part.to(dtype).requires_grad_(needed) for part in made]


def plain(x, alpha, shift, weight, bias, curve, behind):
    """Do what the papers write, in plain torch and the dtype of what is given."""
    alpha, shift, weight, bias = (
        None if part is None else part if part.numel() == 1 else part.reshape(-1, *[1] * behind)
        for part in (alpha, shift, weight, bias)
    )
    y = weight * CURVES[curve](alpha * x + (0 if shift is None else shift))
    return y if bias is None else y + bias


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("dtype", ONE)
@pytest.mark.parametrize(("shift", "bias", "each", "needed"), [(True, True, True, True), (False, False, False, False)])
def test_opcheck(curve, dtype, shift, bias, each, needed):
    own = parameters(dtype, shift=shift, bias=bias, each=each, needed=needed)
    for name in ("plain", "channels_last") if needed else ("transposed",):
        make, behind = LAYOUTS[name]
        x = make(values).to(dtype)
        # Half precision's gradients differ by a rounding where the compiler's differ.
        tolerance = {"rtol": 4 * ONE[dtype], "atol": 4 * ONE[dtype]}
        opcheck(operators.pointwise, (x.detach().requires_grad_(needed), *own, curve, behind), **tolerance)
        frozen = [None if part is None else part.detach() for part in own]
        given = (values(*x.shape, seed=9).to(dtype), x, *frozen, curve, behind)
        opcheck(operators.pointwise_backward, given, **tolerance, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_fake_tensors_have_the_strides_of_real_ones(name):
    make, behind = LAYOUTS[name]
    x, own = make(lambda *shape: values(*shape, dtype=torch.float32)), parameters(torch.float32, needed=False)
    given = (x, *own, "tanh", behind)
    dy = torch.ones(1, dtype=x.dtype).expand(x.shape)
    made = [operators.pointwise(*given), *operators.pointwise_backward(dy, *given)]
    with FakeTensorMode() as mode:
        x, dy, *own = (None if part is None else mode.from_tensor(part) for part in (x, dy, *own))
        given = (x, *own, "tanh", behind)
        faked = [operators.pointwise(*given), *operators.pointwise_backward(dy, *given)]
    for real, fake in zip(made, faked, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@everywhere
@pytest.mark.parametrize("name", ["plain", "NCHW", "sliced"])
@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_those_of_autograd(curve, name, each):
    make, behind = LAYOUTS[name]
    x, own = make(values).requires_grad_(), parameters(torch.float64, each=each)
    assert torch.autograd.gradcheck(lambda *given: operators.pointwise(*given, curve, behind), (x, *own))
    dy = values(*x.shape, seed=5)
    ours = torch.autograd.grad(operators.pointwise(x, *own, curve, behind), (x, *own), dy)
    truth = torch.autograd.grad(plain(x, *own, curve, behind), (x, *own), dy)
    for one, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)  # a sum of 24 float64 in another order


def test_gradients_of_parameters_are_in_their_dtypes_and_in_plain_torch_summed_in_float64(monkeypatch):
    monkeypatch.setenv(VARIABLE, EAGER)
    x, (alpha, *_) = torch.ones(3, 1), parameters(torch.float32, needed=False)
    weight, bias = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16)
    dy = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]])  # of which float32 loses the one
    given = (dy, x, alpha, None, weight, bias, "tanh", 0)
    _, _, by_weight, by_bias = made = operators.pointwise_backward(*given)
    assert by_bias.item() == 1
    # The two large products are each other's opposites, rounded alike: what is left is the small one.
    torch.testing.assert_close(by_weight, alpha.tanh().double(), rtol=2.0**-20, atol=0)
    with FakeTensorMode() as mode:
        faked = operators.pointwise_backward(*(mode.from_tensor(one) if torch.is_tensor(one) else one for one in given))
    assert [one.dtype for one in made] == [one.dtype for one in faked]


def test_autocast_changes_nothing(monkeypatch):
    net = nn.Sequential(nn.Linear(4, C), DyT(C), nn.Linear(C, C), Derf(C))
    x, outputs = values(3, 4, dtype=torch.float32), []
    for by_operator in (False, True):
        monkeypatch.setattr(module, "by_kernels", lambda *_, chosen=by_operator: chosen)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = net(x)
        outputs.append((y, *torch.autograd.grad(y.float().sum(), list(net.parameters()))))
    assert outputs[0][0].dtype == torch.bfloat16
    for one, other in zip(*outputs, strict=True):
        assert one.dtype == other.dtype
        # The gradient of a bfloat16 output is rounded once in one, and after each operation in the other. On a GPU
        # the curve of a bfloat16 input is approximate too, and moves some of the roundings.
        tolerance = 2**-5 if ON_GPU else 2**-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_the_dtype_is_that_of_norms(monkeypatch, own, given):
    layer, x = DyT(C).to(own), values(3, C).to(given)
    expected = layer(x)
    monkeypatch.setattr(module, "by_kernels", lambda *_: True)
    assert layer(x).dtype == expected.dtype == (own if given == torch.float32 else given)
    assert torch.equal(layer(x), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_under_vmap_the_operator_is_called_for_each():
    x, own = values(3, 4, C), parameters(torch.float64, needed=False)
    ours = torch.func.vmap(lambda x: operators.pointwise(x, *own, "erf", 0))(x)
    torch.testing.assert_close(ours, plain(x, *own, "erf", 0), rtol=1e-13, atol=1e-14)


WRONG = {  # x's shape, those of α, s, weight and bias, and the axes behind
    "more channels": ((4, C), [(1,), None, (C + 1,), None], 0),
    "fewer channels": ((4, C), [(1,), None, (C - 1,), None], 0),
    "one channel": ((4, 1), [(1,), None, (C,), None], 0),
    "α alone": ((4, C), [(C + 1,), None, (C,), (C,)], 0),
    "s of two axes": ((4, C), [(1,), (4, C), (C,), (C,)], 0),
    "bias alone": ((4, C), [(1,), None, (1,), (2 * C,)], 0),
    "another axis": ((C, 4), [(1,), None, (C,), None], 0),
    "too few axes": ((C,), [(1,), None, (C,), None], 1),
    "as many numbers": ((2, 3), [(1,), None, (C,), None], 0),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("fake", [False, True])
def test_parameters_of_other_channels_are_refused(case, fake):
    shape, sizes, behind = WRONG[case]
    with FakeTensorMode() if fake else torch.no_grad():
        x, *own = (None if size is None else torch.ones(size) for size in (shape, *sizes))
        with pytest.raises(UsageError, match=rf"do not go with an input of {re.escape(str(shape))}"):
            operators.pointwise(x, *own, "tanh", behind)
        with pytest.raises(UsageError, match="do not go with"):
            operators.pointwise_backward(x, x, *own, "tanh", behind)


@pytest.mark.parametrize("fake", [False, True])
def test_a_gradient_of_another_shape_is_refused(fake):
    with FakeTensorMode() if fake else torch.no_grad():
        own = [torch.ones(1), None, torch.ones(C), None]
        with pytest.raises(UsageError, match=rf"gradient is \(3, 6\) on {DEVICE.type}\S*, but the output \(4, 6\)"):
            operators.pointwise_backward(torch.ones(3, C), torch.ones(4, C), *own, "tanh", 0)


def test_a_parameter_on_another_device_is_refused():
    with FakeTensorMode():
        own = [torch.ones(1, device="cpu"), None, torch.ones(C, device="cuda"), None]
        with pytest.raises(UsageError, match="input is on cpu, and a parameter on cuda:0; move one to the other"):
            operators.pointwise(torch.ones(4, C, device="cpu"), *own, "tanh", 0)


@pytest.mark.parametrize("by_operator", [False, True])
def test_an_input_never_grows_to_the_parameters(monkeypatch, by_operator):
    monkeypatch.setattr(module, "by_kernels", lambda *_: by_operator)
    with pytest.raises(UsageError, match=r"Parameters of shape \(6,\) do not go with an input of \(4, 1\)"):
        DyT(C)(torch.ones(4, 1))


def second(layer, x):
    [slope] = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), x)[0]


def tangents(layer, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def tangents_of_gradients(layer, x):
    with forward_ad.dual_level():
        weights = forward_ad.make_dual(torch.ones_like(x), torch.ones_like(x))
        return forward_ad.unpack_dual(torch.autograd.grad((layer(x) * weights).sum(), x)[0]).tangent


def along(layer, x):
    return torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]


def batched(layer, x):
    return torch.autograd.grad(layer(x), x, values(2, *x.shape, seed=5), is_grads_batched=True)[0]


def by_vmap(layer, x):
    y = layer(x)
    return torch.func.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(values(2, *x.shape, seed=5))


DERIVATIVES = [second, tangents, tangents_of_gradients, along, batched, by_vmap]


@everywhere
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("asked", DERIVATIVES, ids=lambda asked: asked.__name__)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_further_derivatives_are_those_of_plain_torch(chosen, curve, frozen, asked):
    layer = PointwiseFunction(curve, C, alpha=0.7, shift=0.3).requires_grad_(not frozen)
    x = values(3, C, dtype=torch.float32)
    x.requires_grad_(asked not in (tangents, along))
    expected = asked(lambda x: CURVES[curve](0.7 * x + 0.3), x)
    torch.testing.assert_close(asked(layer, x), expected, rtol=1e-4, atol=1e-5)


@everywhere
def test_the_gradient_of_a_gradient_outside_of_a_level_and_back_in_one(chosen, curve):
    """Forward mode over the backward pass alone, whose operator would be constant to it."""
    layer, x = PointwiseFunction(curve, C, alpha=0.7), values(3, C, dtype=torch.float32).requires_grad_()
    y, ones = layer(x), torch.ones(3, C)
    with forward_ad.dual_level():
        [dx] = torch.autograd.grad(y, x, forward_ad.make_dual(ones, ones))
        tangent = forward_ad.unpack_dual(dx).tangent
    torch.testing.assert_close(tangent, torch.autograd.grad(layer(x).sum(), x)[0])


MODES = [
    *itertools.product(("default", "reduce-overhead"), (None, torch.bfloat16), (False, True)),
    ("max-autotune", None, False),  # which tries many kernels for each product of matrices
    ("max-autotune", torch.bfloat16, False),
]


def singles(*shape: int) -> torch.Tensor:
    return values(*shape, dtype=torch.float32)


def network(curve: str = "erf", inner: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(inner // 2, inner), PointwiseFunction(curve, inner, alpha=0.7, shift=0.1)),
        *(nn.GELU(), nn.Linear(inner, 48)),
    )


def results(called, net: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Copies of output and gradients, under autocast where a dtype is given."""
    x = x.detach().requires_grad_()
    with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
        y = called(x)
    gradients = torch.autograd.grad(y.float().square().sum(), (x, *net.parameters()))
    return [tensor.detach().clone() for tensor in (y, *gradients)]


def check(called, net: nn.Module, x: torch.Tensor, allowed: float, dtype: torch.dtype | None = None) -> None:
    """Compare with plain torch in float64: at most ``allowed`` times the largest number of each result."""
    ours = results(called, net, x, dtype)
    with plain_torch():
        exact = copy.deepcopy(net).double()
        y = exact(leaf := x.detach().double().requires_grad_())
        truth = [y.detach(), *torch.autograd.grad(y.square().sum(), (leaf, *exact.parameters()))]
    for tensor, expected in zip(ours, truth, strict=True):
        assert (tensor.double() - expected).abs().max() <= allowed * expected.abs().max()


@pytest.fixture
def asked_for(chosen, monkeypatch):
    """NORMSCOPE_KERNELS=triton, which keeps the operators in compiled and exported networks."""
    monkeypatch.setenv(VARIABLE, "triton")
    if not ON_GPU:
        monkeypatch.setattr(operators, "by_kernels", lambda *_: False)


@everywhere
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if ON_GPU else [])])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_network_compiles_into_one_graph(asked_for, curve, backend, dynamic):
    torch._dynamo.reset()
    net = network(curve, C)
    compiled = torch.compile(net, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 8, 5) if dynamic else (3,):
        # float32 sums of some tens of terms of order 1
        check(compiled, net, singles(rows, C // 2), 1e-5)


def test_an_exported_program_runs_where_the_kernels_are_not(asked_for, monkeypatch, tmp_path):
    net = nn.Sequential(nn.Linear(4, C), DyISRU(C))
    program = torch.export.export(net, (singles(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called[:2] == ["aten.linear.default", "normscope.pointwise.default"]
    assert set(called[2:]) <= {"aten._assert_tensor_metadata.default", "aten.to.dtype"}  # to the dtype that it has
    monkeypatch.undo()
    torch.export.save(program, tmp_path / "program.pt2")
    for rows, loaded in itertools.product((3, 11), (program, torch.export.load(tmp_path / "program.pt2"))):
        x = singles(rows, 4)
        torch.testing.assert_close(loaded.module()(x), net(x), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_kernels_themselves_in_a_compiled_graph():
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    environment = {**os.environ, "TRITON_INTERPRET": "1", VARIABLE: "triton"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["", "triton"])
@pytest.mark.parametrize(("mode", "dtype", "dynamic"), MODES, ids=str)
def test_compiled_for_a_gpu_and_replayed(monkeypatch, mode, dtype, dynamic, asked):
    """Called again and again, as CUDA graphs are warmed up, recorded and replayed."""
    monkeypatch.setenv(VARIABLE, asked)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["inductor"]
    net, before = network(), counters["cudagraph_skips"]
    compiled = torch.compile(net, fullgraph=True, mode=mode, dynamic=dynamic)
    # float32 sums of up to 96 terms; bfloat16 rounds x, weights and what is between to 2⁻⁹, each of some ten times, of
    # terms that partly cancel.
    allowed = 1e-4 if dtype is None else 2**-4
    for rows in (96, 96, 96, 80, 80, 80) if dynamic else (96,) * 4:
        torch.compiler.cudagraph_mark_step_begin()
        check(compiled, net, singles(rows, 32) + rows / 100, allowed, dtype)
    assert counters["cudagraph_skips"] == before, "the compiler made no CUDA graph"


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["", "triton"])
def test_an_exported_program_is_compiled_for_a_gpu(monkeypatch, tmp_path, asked):
    monkeypatch.setenv(VARIABLE, asked)
    torch._dynamo.reset()
    net = network("tanh").eval()
    program = torch.export.export(net, (singles(96, 32),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for called, rows in itertools.product((loaded, torch.compile(loaded, fullgraph=True)), (96, 17)):
        x = singles(rows, 32)
        torch.testing.assert_close(called(x), net(x), rtol=1e-5, atol=1e-5)  # float32 sums of up to 64 terms


def in_the_interpreter() -> None:
    for curve in CURVES:
        net = network(curve, C)
        check(torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True), net, singles(3, C // 2), 1e-5)
    layer = DyISRU(C)
    opcheck(
        operators.pointwise, (singles(2, C, 3).requires_grad_(), layer.alpha, None, layer.weight, layer.bias, "isru", 1)
    )


if __name__ == "__main__":
    in_the_interpreter()
