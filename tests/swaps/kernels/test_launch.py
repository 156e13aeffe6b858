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


def run_tests(file, mode):
    dropped = ("PYTEST_", "NORMSCOPE_KERNELS", "NORMSCOPE_KERNEL_TESTS", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", Path(__file__).parent / file],
        env={**environment, **mode, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.usefixtures("uncovered")
def test_the_kernels_agree_with_float64_in_the_interpreter():
    run_tests("launch/test_against_float64.py", INTERPRETER)


@pytest.mark.gpu
@pytest.mark.xdist_group("gigabytes")
@pytest.mark.parametrize("file", ["launch/test_against_float64.py", "launch/test_gpu.py"])
def test_the_kernels_agree_with_float64_on_a_gpu(file):
    on_gpu = {"NORMSCOPE_KERNEL_TESTS": "cuda"}
    run_tests(file, on_gpu if torch.cuda.is_available() else {**INTERPRETER, "NORMSCOPE_KERNEL_TESTS": "cpu"})
