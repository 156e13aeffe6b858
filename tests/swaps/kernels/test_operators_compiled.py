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

from normscope.runtime.launches import VARIABLE, KernelCall
from normscope.swaps.kernels import operators
from normscope.swaps.kernels.choice import CURVES, plain_torch
from normscope.swaps.pointwise import DyISRU, PointwiseFunction

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
    with DEVICE:
        yield


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE)


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


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if ON_GPU else [])])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_network_compiles_into_one_graph(chosen, curve, backend, dynamic):
    torch._dynamo.reset()
    net = network(curve, C)
    compiled = torch.compile(net, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 8, 5) if dynamic else (3,):
        # float32 sums of some tens of terms of order 1
        check(compiled, net, values(rows, C // 2), 1e-5)


def test_an_exported_program_runs_where_the_kernels_are_not(chosen, monkeypatch, tmp_path):
    net = nn.Sequential(nn.Linear(4, C), DyISRU(C))
    program = torch.export.export(net, (values(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called[:2] == ["aten.linear.default", "normscope.pointwise.default"]
    assert set(called[2:]) <= {"aten._assert_tensor_metadata.default", "aten.to.dtype"}  # to the dtype that it has
    monkeypatch.undo()
    torch.export.save(program, tmp_path / "program.pt2")
    for rows, loaded in itertools.product((3, 11), (program, torch.export.load(tmp_path / "program.pt2"))):
        x = values(rows, 4)
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
        check(compiled, net, values(rows, 32) + rows / 100, allowed, dtype)
    assert counters["cudagraph_skips"] == before, "the compiler made no CUDA graph"


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["", "triton"])
def test_an_exported_program_is_compiled_for_a_gpu(monkeypatch, tmp_path, asked):
    monkeypatch.setenv(VARIABLE, asked)
    torch._dynamo.reset()
    net = network("tanh").eval()
    program = torch.export.export(net, (values(96, 32),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for called, rows in itertools.product((loaded, torch.compile(loaded, fullgraph=True)), (96, 17)):
        x = values(rows, 32)
        torch.testing.assert_close(called(x), net(x), rtol=1e-5, atol=1e-5)  # float32 sums of up to 64 terms


def in_the_interpreter() -> None:
    run = KernelCall.run
    for curve in CURVES:
        net = network(curve, C)
        with mock.patch.object(KernelCall, "run", autospec=True, side_effect=run) as launched:
            check(torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True), net, values(3, C // 2), 1e-5)
            assert launched.call_count == 3  # forward, backward, and the sum of the slots
            net.requires_grad_(False)
            net(values(3, C // 2).requires_grad_()).sum().backward()
            assert launched.call_count == 5  # without slots
    layer = DyISRU(C)
    opcheck(
        operators.pointwise, (values(2, C, 3).requires_grad_(), layer.alpha, None, layer.weight, layer.bias, "isru", 1)
    )


if __name__ == "__main__":
    in_the_interpreter()
