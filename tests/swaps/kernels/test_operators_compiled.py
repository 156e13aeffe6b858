"""The operators in compiled and exported programs.

Run as a script, in Triton's interpreter, this file sends the kernels themselves through opcheck and a compiled graph.
Where there is a GPU its tests run there, and more of them.
"""

import copy
import itertools
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.library import opcheck

from normscope.swaps.kernels import operators
from normscope.swaps.kernels.choice import CURVES, VARIABLE
from normscope.swaps.pointwise import DyISRU, DyT, PointwiseFunction

C = 6
ON_GPU = torch.cuda.is_available() and torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MODES = [
    *itertools.product(("default", "reduce-overhead"), (None, torch.bfloat16), (False, True)),
    ("max-autotune", None, False),  # which tries many kernels for each product of matrices
    ("max-autotune", torch.bfloat16, False),
]
pytestmark = [pytest.mark.usefixtures("on_device"), *([pytest.mark.gpu] if ON_GPU else [])]


@pytest.fixture(scope="module")
def on_device():
    """Whatever does not say where is made there."""
    with DEVICE:
        yield


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if ON_GPU else [])])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_network_compiles_into_one_graph(chosen, curve, backend, dynamic):
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(4, C), PointwiseFunction(curve, C, shift=0.1), nn.GELU(), nn.Linear(C, 3))
    held_against_eager(net, torch.compile(net, fullgraph=True, backend=backend, dynamic=dynamic), dynamic, 4)


def held_against_eager(net, compiled, dynamic: bool, width: int) -> None:
    for rows in (3, 8, 5) if dynamic else (3,):
        x = values(rows, width).requires_grad_()
        both = []
        for called in (net, compiled):
            y = called(x)
            both.append((y, *torch.autograd.grad(y.square().sum(), (x, *net.parameters()))))
        for one, other in zip(*both, strict=True):
            # float32 sums of some tens of terms of order 1, which compilers may take in another order.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_inductor_compiles_it_with_any_batch(chosen):
    torch._dynamo.reset()
    net = nn.Sequential(DyT(C), nn.GELU())
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        held_against_eager(net, torch.compile(net, fullgraph=True, dynamic=True), True, C)


def test_an_exported_program_runs_where_the_kernels_are_not(chosen, monkeypatch, tmp_path):
    net = nn.Sequential(nn.Linear(4, C), DyISRU(C))
    x = values(3, 4)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called[:2] == ["aten.linear.default", "normscope.pointwise.default"]
    assert set(called[2:]) <= {"aten._assert_tensor_metadata.default", "aten.to.dtype"}  # to the dtype that it has
    monkeypatch.undo()
    kept = tmp_path / "program.pt2"
    torch.export.save(program, kept)
    for rows in (3, 11):
        x = values(rows, 4)
        for one in (program, torch.export.load(kept)):
            torch.testing.assert_close(one.module()(x), net(x), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_kernels_themselves_in_a_compiled_graph():
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "NORMSCOPE_KERNELS": "triton"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def graphs_left_out() -> int:
    """Count how often the compiler let a CUDA graph be, in this process."""
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def network(curve: str = "erf") -> nn.Module:
    torch.manual_seed(0)
    own = PointwiseFunction(curve, 64, alpha=0.7, shift=0.1)
    return nn.Sequential(nn.Linear(32, 64), own, nn.GELU(), nn.Linear(64, 48))


def outputs_and_gradients(called, net: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> list:
    """Run forward and backward, under autocast where a dtype is given; in memory of their own."""
    x = x.detach().requires_grad_()
    with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
        y = called(x)
    return [one.detach().clone() for one in (y, *torch.autograd.grad(y.float().square().sum(), (x, *net.parameters())))]


def in_float64(net: nn.Module, x: torch.Tensor) -> list:
    exact = copy.deepcopy(net).double()
    x = x.detach().double().requires_grad_()
    y = exact(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *exact.parameters()))]


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["", "triton"])
@pytest.mark.parametrize(("mode", "dtype", "dynamic"), MODES, ids=str)
def test_compiled_for_a_gpu_and_replayed(monkeypatch, mode, dtype, dynamic, asked):
    """Called again and again, as CUDA graphs are warmed up, recorded and replayed."""
    monkeypatch.setenv(VARIABLE, asked)
    torch._dynamo.reset()
    net, before = network(), graphs_left_out()
    compiled = torch.compile(net, fullgraph=True, mode=mode, dynamic=dynamic)
    # Of the largest: float32 sums of up to 96 terms; bfloat16 rounds x, weights and what is between to 2⁻⁹, each of
    # some ten times, of terms that partly cancel.
    allowed = 1e-4 if dtype is None else 2**-4
    for rows in (96, 96, 96, 80, 80, 80) if dynamic else (96,) * 4:
        torch.compiler.cudagraph_mark_step_begin()
        x = values(rows, 32) + rows / 100
        for ours, truth in zip(outputs_and_gradients(compiled, net, x, dtype), in_float64(net, x), strict=True):
            assert (ours.double() - truth).abs().max() <= allowed * truth.abs().max()
    assert graphs_left_out() == before, "the compiler made no CUDA graph"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("curve", CURVES)
def test_a_graph_of_the_operators_themselves_is_recorded_and_replayed(curve, dtype):
    """Nothing in them waits for the GPU or takes memory that a recording may not: it would end with an error."""
    x, dy = (values(300, 64).to(dtype) * scale for scale in (1, 2))
    own = [torch.full((1,), 0.7), torch.full((1,), 0.1), values(64), values(64)]

    def both() -> list[torch.Tensor]:
        given = (x, *own, curve, 0)
        return [operators.pointwise(*given), *operators.pointwise_backward(dy, *given, True, True)]

    both()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = both()
    for scale in (1, -3):
        x.copy_(values(300, 64).to(dtype) * scale)
        graph.replay()
        for replayed, expected in zip(made, both(), strict=True):
            assert torch.equal(replayed, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["", "triton"])
def test_an_exported_program_is_compiled_for_a_gpu(monkeypatch, tmp_path, asked):
    monkeypatch.setenv(VARIABLE, asked)
    torch._dynamo.reset()
    net, x = network("tanh").eval(), values(96, 32)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for called in (loaded, torch.compile(loaded, fullgraph=True)):
        for rows in (96, 17):
            truth = in_float64(net, values(rows, 32))[0]
            # float32 sums of up to 64 terms, of the largest
            assert (called(values(rows, 32)).double() - truth).abs().max() <= 1e-5 * truth.abs().max()


def in_the_interpreter() -> None:
    for curve in CURVES:
        net = nn.Sequential(nn.Linear(4, C), PointwiseFunction(curve, C, alpha=0.7, shift=0.1), nn.Linear(C, 3))
        with mock.patch("normscope.runtime.launches.KernelCall.run", autospec=True, side_effect=RUN) as launched:
            held_against_float64(net, torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True))
            assert launched.call_count == 3  # forward, backward, and what adds up
            net.requires_grad_(False)
            net(values(3, 4).requires_grad_()).sum().backward()
            assert launched.call_count == 5  # with nothing to add up
    own = DyISRU(C)
    opcheck(operators.pointwise, (values(2, C, 3).requires_grad_(), own.alpha, None, own.weight, own.bias, "isru", 1))


def held_against_float64(net, compiled) -> None:
    x = values(3, 4).requires_grad_()
    y = compiled(x)
    ours = (y, *torch.autograd.grad(y.square().sum(), (x, *net.parameters())))
    with mock.patch.dict(os.environ, {"NORMSCOPE_KERNELS": "eager"}):
        exact, x = copy.deepcopy(net).double(), x.detach().double().requires_grad_()
        y = exact(x)
        truth = (y, *torch.autograd.grad(y.square().sum(), (x, *exact.parameters())))
    for one, other in zip(ours, truth, strict=True):
        # float32 through three layers and their gradients, of order 1.
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    from normscope.runtime.launches import KernelCall

    RUN = KernelCall.run
    in_the_interpreter()
