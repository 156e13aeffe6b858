"""Where Triton cannot build what launches kernels, plain torch computes, and says so once; seen without any GPU."""

import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

triton = pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.errors import UsageError  # noqa: E402
from normscope.pairs.norms.formulas import Lines, layer_norm  # noqa: E402
from normscope.pairs.sums import reference  # noqa: E402
from normscope.pairs.sums import stats as loops  # noqa: E402
from normscope.pairs.sums.binning import cuda  # noqa: E402
from normscope.pairs.sums.stats import PairStats  # noqa: E402
from normscope.pairs.sums.tokens import Run, Tokens  # noqa: E402
from normscope.runtime import launches  # noqa: E402
from normscope.runtime.launches import VARIABLE, why_no_launcher  # noqa: E402
from normscope.swaps.kernels import choice  # noqa: E402

CUDA = torch.device("cuda", 0)
NO_COMPILER = "there is no C compiler"


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    """Let it be tried anew, with a GPU of which no more is asked than that it is there."""
    config = triton.runtime.driver
    monkeypatch.setattr(config, "_active" if hasattr(config, "_active") else "active", object())  # 3.4 has no _active
    monkeypatch.setattr(choice, "_capability", lambda device: (8, 0))
    monkeypatch.delenv(VARIABLE, raising=False)
    forget()
    yield
    forget()


def forget():
    launches._tried.cache_clear()
    launches._warn.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """As in an image for running alone."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


@pytest.fixture
def said():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


needs_a_compiler = pytest.mark.skipif(
    not (shutil.which("gcc") or shutil.which("clang"))
    or not (Path(sysconfig.get_config_var("INCLUDEPY")) / "Python.h").exists(),
    reason="There is no C compiler here, or no Python.h.",
)


@needs_a_compiler
def test_a_compiler_and_headers_are_all_that_it_takes(said):
    assert why_no_launcher() == ""
    assert choice.by_kernels("tanh", CUDA, torch.float32)
    assert loops._loop_of("cuda") is cuda.add
    assert not said


def test_without_a_compiler_point_wise_functions_are_plain_torchs_after_one_warning(no_compiler, said):
    for curve in ("tanh", "isru", "erf"):
        assert not choice.by_kernels(curve, CUDA, torch.bfloat16)
    [warning] = said
    assert NO_COMPILER in str(warning.message)
    assert "a C compiler and Python's headers (on Debian and Ubuntu: gcc and python3-dev)" in str(warning.message)
    assert f"{VARIABLE}=eager" in str(warning.message)


def test_without_a_compiler_a_capture_on_cuda_is_the_references(no_compiler, said, monkeypatch):
    calls = []
    monkeypatch.setattr(reference, "add", lambda stats, tokens: calls.append(tokens.rows.device))
    loops._compiled_loop_of.cache_clear()
    with FakeTensorMode():
        stats = PairStats.empty(8, device=CUDA)
        tokens = Tokens(torch.randn(6, 8, device=CUDA), Lines(layer_norm, 1e-6), [Run(0, 6, 0, 1, 0, 0)], 8)
        loops.add(stats, tokens)
        loops.add(stats, tokens)
    assert calls == [CUDA, CUDA]
    assert not choice.by_kernels("tanh", CUDA, torch.float32)
    assert len(said) == 1  # of captures and point-wise functions together


def test_an_explicit_choice_is_met_without_a_warning_or_refused(no_compiler, said, monkeypatch):
    calls = (lambda: choice.by_kernels("tanh", CUDA, torch.float32), lambda: loops._loop_of("cuda"))
    monkeypatch.setenv(VARIABLE, "eager")
    assert [call() for call in calls] == [False, reference.add]
    monkeypatch.setenv(VARIABLE, "triton")
    for call in calls:
        with pytest.raises(
            UsageError,
            match=rf"^{VARIABLE}=triton cannot be met: Triton cannot build .*{NO_COMPILER}.* Unset it, or say ",
        ):
            call()
    assert not said


def test_a_compiler_or_header_that_is_not_there_is_named(monkeypatch, said):
    with monkeypatch.context() as patch:
        patch.setenv("CC", "/nowhere/cc")
        assert "(there is no C compiler /nowhere/cc)" in why_no_launcher()
        assert not choice.by_kernels("tanh", CUDA, torch.float32)
    forget()
    monkeypatch.setenv("CC", sys.executable)  # any program
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "/nowhere/include")
    assert "(there is no /nowhere/include/Python.h)" in why_no_launcher()


DRIVER = """
import torch
torch.cuda.is_available = lambda: True  # Triton asks nothing more before it builds
from normscope.runtime.launches import why_no_launcher
print(why_no_launcher())
"""


@needs_a_compiler
@pytest.mark.slow
def test_what_triton_asks_the_gpu_by_is_tried_as_well(tmp_path):
    """It is built before any launcher, and against libcuda."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", DRIVER], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Triton cannot build what launches its kernels (")
    assert NO_COMPILER not in done.stdout and done.stderr.count("UserWarning") == 1
