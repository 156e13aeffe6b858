"""The kernels against float64: the tests in launch/, in a process of their own, in the interpreter and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is made for Linux alone")

INTERPRETER = {"TRITON_INTERPRET": "1"}


def run_tests(path, mode):
    dropped = ("PYTEST_", "NORMSCOPE_KERNELS", "NORMSCOPE_KERNEL_TESTS", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", Path(__file__).parent / path],
        env={**environment, **mode, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.usefixtures("uncovered")
def test_the_kernels_agree_with_float64_in_the_interpreter():
    run_tests("launch", INTERPRETER)


@pytest.mark.gpu
@pytest.mark.xdist_group("gigabytes")
def test_the_kernels_agree_with_float64_on_a_gpu():
    if torch.cuda.is_available():
        run_tests("launch", {"NORMSCOPE_KERNEL_TESTS": "cuda"})
    else:  # a rehearsal of what the interpreter leaves out
        run_tests("launch/test_gpu.py", {**INTERPRETER, "NORMSCOPE_KERNEL_TESTS": "cpu"})
