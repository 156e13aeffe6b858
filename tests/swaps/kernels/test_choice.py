"""Which code computes a point-wise function, and refusals of ``NORMSCOPE_KERNELS`` before there is any work."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.errors import UsageError
from normscope.swaps.kernels.choice import VARIABLE, by_kernels
from normscope.swaps.pointwise import DyT, PointwiseFunction, check_kernels

CPU, MPS = torch.device("cpu"), torch.device("mps")


@pytest.mark.gpu
@pytest.mark.parametrize("curve", ["tanh", "isru", "erf"])
def test_kernels_are_the_default_on_cuda_unless_compiled(curve):
    cuda = torch.device("cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert by_kernels(curve, cuda, dtype)
    assert not torch.func.vmap(lambda x: x * by_kernels(curve, cuda, torch.float32))(torch.ones(2)).any()
    compiled = torch.compile(lambda x: x * by_kernels(curve, cuda, torch.float32), backend="eager", fullgraph=True)
    assert not compiled(torch.ones(2)).any()


@pytest.mark.parametrize(
    ("curve", "device", "dtype", "words"),
    [
        ("softsign", CPU, torch.float32, "there is no kernel for the curve softsign, only for tanh, isru, erf"),
        ("free", CPU, torch.float32, "there is no kernel for the curve free, only for tanh, isru, erf"),
        ("tanh", CPU, torch.float64, "no kernel takes an input of torch.float64"),
        ("tanh", CPU, torch.float32, "the input is in the CPU's memory, where only Triton's interpreter runs them"),
        ("tanh", MPS, torch.float32, "written for NVIDIA GPUs, and the input is on mps"),
    ],
)
def test_kernels_that_do_not_exist_are_refused_if_asked_for(monkeypatch, curve, device, dtype, words):
    monkeypatch.setenv(VARIABLE, "triton")
    remedy = f"Unset it, or say {VARIABLE}=eager."
    with pytest.raises(UsageError, match=f"^{VARIABLE}=triton cannot be met: .*{re.escape(words)}.*{remedy}$"):
        by_kernels(curve, device, dtype)
    for asked in ("eager", ""):
        monkeypatch.setenv(VARIABLE, asked)
        assert not by_kernels(curve, device, dtype)


def test_the_straight_line_is_plain_torchs_and_a_network_is_checked_before_it_runs(monkeypatch):
    modules = [nn.LayerNorm(3), PointwiseFunction("linear", 3, alpha=2.0), PointwiseFunction("softsign", 3)]
    check_kernels(modules)
    monkeypatch.setenv(VARIABLE, "triton")
    check_kernels(modules[:2])
    assert torch.equal(modules[1](torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with pytest.raises(UsageError, match="softsign"):
        check_kernels(modules)
    with pytest.raises(UsageError, match="float64"):
        check_kernels([DyT(3).double()])


@pytest.mark.parametrize(("curve", "asked"), [("tanh", "trition"), ("linear", " eager"), ("softsign", "trition")])
def test_a_wrong_value_is_refused_for_every_curve(monkeypatch, curve, asked):
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(UsageError, match=f"no {VARIABLE} '{asked}'.*CUDA has triton"):
        PointwiseFunction(curve, 3)(torch.ones(2, 3))


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
def test_without_a_gpu_triton_is_not_imported_and_without_a_launcher_there_is_one_warning(tmp_path):
    code = (
        "import sys, torch\n"
        "from normscope.runtime.launches import why_no_launcher\n"
        "from normscope.swaps.pointwise import DyT\n"
        "DyT(8)(torch.ones(2, 8, requires_grad=True)).sum().backward()\n"
        "print('triton' in sys.modules)\n"
        "print(why_no_launcher() == why_no_launcher() != '')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "CC")}
    environment |= {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert done.stderr.count("UserWarning") == 1
    assert "requires a C compiler and Python's headers" in done.stderr and f"{VARIABLE}=eager" in done.stderr
