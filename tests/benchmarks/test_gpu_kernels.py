"""What benchmarks/gpu.py finds of kernels that are wrong, and of tests that cannot run."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is made for Linux alone")

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("on_gpu.kernels")


@pytest.fixture
def rehearsal(kernels):
    return importlib.import_module("on_gpu.parts").Setting(rehearsal=True)


def test_each_file_of_tests_has_a_part(kernels, rehearsal):
    files = {path.stem.removeprefix("test_") for path in (FOLDER.parent / kernels.HELD).glob("test_*.py")}
    assert {f"kernels {file}" for file in files} | {"kernels functions"} == {
        part.name for part in kernels.parts(rehearsal)
    }


class Kernel:
    """The functions as numpy has them, a little off."""

    def __init__(self, accuracy, off, where):
        self.exact, self.off, self.where = accuracy.exact, off, where

    def run(self, u, of, curve, precise, device):
        with np.errstate(all="ignore"):
            y = np.where(np.isnan(u), u, self.exact(np.clip(u, -1e30, 1e30), of, curve))
        return (y * (1 + self.off * (np.abs(u) == self.where))).astype(np.float32)


def functions(kernels, rehearsal, monkeypatch, off, where):
    accuracy = importlib.import_module("accuracy")
    monkeypatch.setattr(accuracy, "half_floats", lambda: np.repeat(np.float32([0.5, -1, 2, 1e20]), 101))
    monkeypatch.setattr(accuracy, "drawn_floats", lambda: np.float32([1e-30] * 101))
    monkeypatch.setitem(sys.modules, "accuracy_kernel", Kernel(accuracy, off, where))
    return kernels.functions(rehearsal)


def test_a_function_is_held_to_what_is_guaranteed(kernels, rehearsal, monkeypatch):
    right = functions(kernels, rehearsal, monkeypatch, off=0, where=0)
    assert right.failures == []
    assert all(max(one.samples) <= 2**-24 for one in right.measurements if one.unit == "relative")
    # A thousandth is more than the hardware's tanh may be off by; a hundred-thousandth only more than the others.
    assert len(functions(kernels, rehearsal, monkeypatch, off=1e-3, where=1).failures) == 9
    found = functions(kernels, rehearsal, monkeypatch, off=1e-5, where=1).failures
    assert len(found) == 7
    assert found[0] == "f of tanh, float32: off by 9.97e-06 at u = -1, and 2.06e-07 is guaranteed."


def test_nan_that_is_lost_and_infinity_are_found(kernels, rehearsal, monkeypatch):
    found = functions(kernels, rehearsal, monkeypatch, off=1e-3, where=np.inf).failures
    assert len(found) == 6
    assert all("at NaN, ±∞ and ±0, not [nan, 1.0, -1.0, 0.0, 0.0]." in sentence for sentence in found)


def test_bounds_are_those_of_the_benchmark(kernels):
    recorded = json.loads(min(kernels.RESULTS.glob("accuracy-*.json")).read_text(encoding="utf-8"))
    assert len(kernels.guaranteed()) == 9 == len({(one["case"], one["way"]) for one in recorded["measurements"]})
    assert kernels.guaranteed()["f of tanh", "half precision"] == pytest.approx(2**-11, rel=1e-3)


@pytest.mark.faults
def test_a_kernel_that_is_wrong_is_found(kernels, rehearsal, monkeypatch, tmp_path):
    """It takes all channels for one: Python runs what says so first in every process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import normscope.swaps.kernels.launch as launch\n"
        "each = launch._each\n"
        "launch._each = lambda own: each(own) | {'weight_each': False}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as in a rehearsal
    file, tests = f"{kernels.HELD}/test_values.py", "several_tiles_and_programs and float32"
    found = kernels.suite.tested(rehearsal, [file], tests, "values")
    assert len(found.failures) == 3
    assert all("of what is allowed" in sentence for sentence in found.failures)
    assert max(found.measurements[-1].samples) > 100 and found.measurements[-1].quantity == kernels.suite.LARGEST
