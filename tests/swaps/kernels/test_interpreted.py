"""The kernels in Triton's interpreter, held to float64: the tests in interpreted/, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is made for Linux alone")

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_the_kernels_agree_with_float64_in_the_interpreter(file):
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NORMSCOPE_"))}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", FOLDER / file],
        env={**ours, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
