"""The kernels held to float64 by the tests in launch/, in a process of their own: in the interpreter, and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is made for Linux alone")

FOLDER = Path(__file__).parent / "launch"
ERRORS = "NORMSCOPE_KERNEL_ERRORS"  # a folder for the largest of them, see launch/conftest.py
INTERPRETER = {"TRITON_INTERPRET": "1"}
GPU = {"NORMSCOPE_KERNEL_TESTS": "cuda"}
REHEARSED = {**INTERPRETER, "NORMSCOPE_KERNEL_TESTS": "cpu"}
GIGABYTES = FOR_A_GPU = ("test_gpu.py",)  # its tests take much memory, and are not for the interpreter
UNCOVERED = ("test_shapes.py",)  # the other files run the same lines


def held(file, way):
    own = ("PYTEST_", "NORMSCOPE_", "TRITON_INTERPRET")
    ours = {name: value for name, value in os.environ.items() if name == ERRORS or not name.startswith(own)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", FOLDER / file],
        env={**ours, **way, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("file", [file for file in FILES if file not in FOR_A_GPU])
def test_the_kernels_agree_with_float64_in_the_interpreter(request, file):
    if file in UNCOVERED:
        request.getfixturevalue("uncovered")
    held(file, INTERPRETER)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[pytest.mark.xdist_group("gigabytes")] * (file in GIGABYTES)) for file in FILES]
)
def test_the_kernels_agree_with_float64_on_a_gpu(file):
    held(file, GPU if torch.cuda.is_available() else REHEARSED)
