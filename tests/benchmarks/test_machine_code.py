"""Counts in compiled GPU code, which need no GPU: instructions of kernels, and bytes that inductor's kernels move."""

import importlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that runs a benchmark within this process and returns its samples."""
    monkeypatch.syspath_prepend(FOLDER)

    def samples_of(name, *arguments):
        module = importlib.import_module(name)
        if name != "compiled_bytes":  # which pretends that there is a GPU, in a process of its own
            monkeypatch.setattr(module, "in_own_process", lambda run, *given, threads: run(*given), raising=False)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--repeats", "1", "--results", str(tmp_path), *arguments])
        module.main()
        (path,) = tmp_path.glob(f"{name}-*.json")
        measurements = json.loads(path.read_text(encoding="utf-8"))["measurements"]
        return {(each["case"], each["way"], each["quantity"]): each["samples"] for each in measurements}

    with mock.patch.dict(os.environ):
        yield samples_of


def test_machine_code(measured):
    samples = measured("machine_code", "--targets", "90", "--dtypes", "float32")
    case = "backward, float32, (32768, 4096)"
    executed, loop = (samples[case, "DyISRU", name][0] for name in ("sm_90", "sm_90 loop"))
    assert 0 < loop < executed
    assert samples[case, "DyISRU", "sm_90 loads of 128 bits"] == [8.0]


def test_machine_code_of_a_capture(measured):
    samples = measured("machine_code_capture", "--targets", "90", "--dtypes", "bfloat16")
    for kernel in ("describe", "add_pairs"):
        [instructions], [ceiling] = (samples["bfloat16", kernel, name] for name in ("sm_90", "sm_90 at most"))
        assert 10 < instructions <= ceiling
    assert 2 * 9.6 < samples["bfloat16", "add_pairs", "sm_90 atomic operations"][0] <= 20  # millions


def test_compiled_bytes(measured):
    samples = measured("compiled_bytes")
    by_hand = {"modulated": (2, 2, 4), "added": (4, 4, 5)}
    for block, tensors in by_hand.items():
        for channels in ("768", "1,152"):
            for way, count in zip(("LayerNorm", "DyT, plain torch", "DyT, operator"), tensors, strict=True):
                moved, stated, kernels = (
                    samples[f"{block}, {channels} channels", way, name][0]
                    for name in ("read and written", "loads and stores", "kernels")
                )
                assert count <= moved < count + 0.02  # scale and shift are 1/256 of x each, all others far less
                again = (way, channels) == ("LayerNorm", "1,152")  # whose rows do not stay in registers
                assert count + again <= stated < count + again + 0.02
                assert kernels == (2 if way == "DyT, operator" else 1)
