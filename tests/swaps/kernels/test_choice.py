"""Who computes a point-wise function, and that an override of it is met or refused, before there is any work."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.errors import UsageError
from normscope.swaps.kernels import choice
from normscope.swaps.kernels.choice import VARIABLE, by_kernels
from normscope.swaps.pointwise import DyT, PointwiseFunction, check_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KERNELS = ("tanh", "isru", "erf")
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def called(seen_by_dispatch):
    """Names of the operators that a function calls, on a device that need not be there."""

    def names(curve, dtype, device):
        layer = PointwiseFunction(curve, 6)
        with FakeTensorMode(), seen_by_dispatch() as seen:
            own = {
                name: torch.empty(part.shape, device=device, dtype=dtype, requires_grad=True)
                for name, part in layer.named_parameters()
            }
            x = torch.empty(4, 6, device=device, dtype=dtype, requires_grad=True)
            y = torch.func.functional_call(layer, own, (x,))
            assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        return seen.names

    return names


CHOICES = [("", "cuda", curve, dtype, True) for curve in KERNELS for dtype in (torch.float32, *HALF)]
CHOICES += [("triton", "cuda", "erf", torch.float16, True), ("", "cpu", "tanh", torch.float32, False)]
CHOICES += [("eager", device, "tanh", torch.float32, False) for device in ("cuda", "cpu")]


@pytest.mark.parametrize(("asked", "device", "curve", "dtype", "by_kernel"), CHOICES)
def test_kernels_are_the_default_on_cuda_alone(
    fake_cuda, ampere, called, monkeypatch, asked, device, curve, dtype, by_kernel
):
    monkeypatch.setenv(VARIABLE, asked)
    names = set(called(curve, dtype, device))
    assert ("normscope::pointwise" in names) == by_kernel
    assert not by_kernel or not {"aten::tanh", "aten::erf", "aten::rsqrt", "aten::hypot"} & names


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.vmap])
def test_what_is_transformed_is_plain_torchs(ampere, monkeypatch, transform):
    """tests/swaps/kernels/test_cpu.py compares what comes of it."""

    def chosen(x):
        decided.append(by_kernels("tanh", CUDA, x.dtype))
        return x.sum()

    decided, x = [], torch.ones(2, 3)
    transform(chosen)(x)
    assert decided == [False] and by_kernels("tanh", CUDA, x.dtype)
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(UsageError, match=f"torch.func's transforms and .* do not go through kernels.*{VARIABLE}=eager"):
        transform(chosen)(x)


@pytest.mark.parametrize(("asked", "compiled"), [("", False), ("triton", True), ("eager", False)])
def test_what_is_compiled_for_cuda_has_kernels_only_where_they_are_asked_for(ampere, monkeypatch, asked, compiled):
    """The compiler merges plain torch with its neighbours, and cannot look into an operator."""
    torch._dynamo.reset()
    if asked:
        monkeypatch.setenv(VARIABLE, asked)
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def called(x):
        return x.exp() if by_kernels("tanh", CUDA, torch.float32) else x.sin()

    torch.compile(called, backend=backend, fullgraph=True)(torch.ones(3))
    assert ("exp" in seen) == compiled
    assert by_kernels("tanh", CUDA, torch.float32) == (asked != "eager")


def test_the_interpreter_meets_an_override_on_the_cpu(ampere, monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    assert all(by_kernels(curve, CPU, dtype) for curve in KERNELS for dtype in (torch.float32, *HALF))


def test_the_straight_line_is_plain_torchs_whatever_is_asked_for(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    assert not by_kernels("linear", CPU, torch.float32)
    layer = PointwiseFunction("linear", 3, alpha=2.0)
    assert torch.equal(layer(torch.ones(2, 3)), torch.full((2, 3), 2.0))


ASK = f"Unset it, or say {VARIABLE}=eager."


@pytest.mark.parametrize(
    ("curve", "device", "dtype", "patched", "sentence"),
    [
        ("softsign", CUDA, torch.float32, {}, "there is no kernel for the curve softsign, only for tanh, isru, erf"),
        ("free", CUDA, torch.float32, {}, "there is no kernel for the curve free, only for tanh, isru, erf"),
        ("tanh", CUDA, torch.float64, {}, "no kernel takes an input of torch.float64"),
        ("tanh", CUDA, torch.float32, {"_with_triton": lambda: False}, "Triton is not installed"),
        ("tanh", CPU, torch.float32, {}, "the input is in the CPU's memory, where only Triton's interpreter runs them"),
        ("tanh", torch.device("mps"), torch.float32, {}, "written for NVIDIA GPUs, and the input is on mps"),
        ("tanh", torch.device("meta"), torch.float32, {}, "written for NVIDIA GPUs, and the input is on meta"),
        ("tanh", CUDA, torch.float32, {"hip": "6.4"}, "written for NVIDIA GPUs, and the input is on cuda:0"),
        (
            "erf",
            CUDA,
            torch.float16,
            {"capability": (7, 5)},
            "the GPU has compute capability 7.5, and the kernels need 8.0",
        ),
    ],
)
def test_an_override_that_cannot_be_met_is_an_error(ampere, monkeypatch, curve, device, dtype, patched, sentence):
    monkeypatch.setenv(VARIABLE, "triton")
    for name, value in patched.items():
        if name == "capability":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=value: value)
        else:
            monkeypatch.setattr(torch.version if name == "hip" else choice, name, value)
    with pytest.raises(UsageError, match=f"^{VARIABLE}=triton cannot be met: .*{re.escape(sentence)}.*{ASK}$"):
        by_kernels(curve, device, dtype)
    for asked in ("eager", ""):
        monkeypatch.setenv(VARIABLE, asked)
        assert not by_kernels(curve, device, dtype)


@pytest.mark.parametrize("asked", ["trition", "Triton", "1", " eager"])
@pytest.mark.parametrize("curve", ["tanh", "linear", "softsign"])
def test_a_wrong_value_is_an_error_everywhere(monkeypatch, asked, curve):
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(UsageError, match=f"no {VARIABLE} '{asked}'.*CUDA has triton"):
        PointwiseFunction(curve, 3)(torch.ones(2, 3))


def test_a_network_is_looked_through_before_it_runs(monkeypatch):
    modules = [nn.LayerNorm(3), DyT(3), PointwiseFunction("linear", 3), PointwiseFunction("softsign", 3)]
    check_kernels(modules)
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    check_kernels(modules[:3])
    with pytest.raises(UsageError, match="softsign"):
        check_kernels(modules)
    with pytest.raises(UsageError, match="float64"):
        check_kernels([DyT(3).double()])


@pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="torch 2.8 raises an error of its own for ours")
def test_what_is_compiled_where_nothing_was_asked_for_goes_on_as_it_was_compiled(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    layer, x = DyT(8), torch.linspace(-3, 3, 24).view(3, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    expected = compiled(x)
    monkeypatch.setenv(VARIABLE, "triton")
    assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{VARIABLE}=triton cannot be met"):
        compiled(x)


@pytest.mark.slow
def test_the_command_line_refuses_before_there_is_any_work(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), VARIABLE: "triton"}
    command = [sys.executable, "-m", "normscope", "swap-bench", "demo_vit", "--device", "cpu", "-o", "outputs"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == UsageError.exit_status
    assert f"{VARIABLE}=triton cannot be met: the input is in the CPU's memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert "embedded demo_vit" not in done.stdout + done.stderr  # not yet loaded
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_plain_torch_imports_no_triton():
    code = (
        "import sys, torch\n"
        "from normscope.swaps.pointwise import DyT\n"
        "layer, x = DyT(8), torch.ones(2, 8, requires_grad=True)\n"
        "layer(x).sum().backward()\n"
        "print('triton' in sys.modules, 'normscope.swaps.kernels.launch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_without_a_c_compiler_plain_torch_computes_after_one_warning(tmp_path):
    """As in an image for running alone, with an empty cache: a point-wise function, and a capture."""
    code = (
        "import torch, warnings\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.get_device_capability = lambda device: (8, 0)\n"
        "from normscope.pairs.sums import loops, reference\n"
        "from normscope.swaps.kernels.choice import by_kernels\n"
        "cuda = torch.device('cuda', 0)\n"
        "print(*(by_kernels(curve, cuda, torch.bfloat16) for curve in ('tanh', 'erf')))\n"
        "print(loops.loop_of('cuda') is reference.add)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "CC")}
    environment |= {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
    assert done.stderr.count("UserWarning") == 1
    assert "requires a C compiler and Python's headers" in done.stderr and f"{VARIABLE}=eager" in done.stderr
    refused = subprocess.run(
        [sys.executable, "-c", code], env={**environment, VARIABLE: "triton"}, capture_output=True, text=True
    )
    assert f"{VARIABLE}=triton cannot be met: Triton cannot build" in refused.stderr
