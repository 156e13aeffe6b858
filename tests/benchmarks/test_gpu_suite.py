"""What benchmarks/gpu.py says of tests that pass, fail and are skipped."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TESTS = """
import os

import pytest


def test_right():
    assert os.environ.get("NORMSCOPE_KERNEL_TESTS") == SAID


@pytest.mark.parametrize("size", [3, 4])
def test_wrong(size):
    assert size == 3, f"{size} is not\\n what is allowed"


@pytest.fixture
def broken():
    raise RuntimeError("no such fixture")


def test_error(broken):
    pass


@pytest.mark.parametrize("number", [1, 2])
def test_skipped(number):
    pytest.skip("no GPU here")
"""


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delenv("NORMSCOPE_KERNEL_TESTS", raising=False)
    return importlib.import_module("on_gpu.suite")


def setting(rehearsal):
    return importlib.import_module("on_gpu.parts").Setting(rehearsal)


def counts(found):
    return {one.quantity: one.samples for one in found.measurements}


def test_what_pytest_found_is_told(suite, tmp_path):
    path = tmp_path / "test_made.py"
    path.write_text(TESTS.replace("SAID", "'cuda'"), encoding="utf-8")
    found = suite.tested(setting(False), [str(path)], name="made")
    assert counts(found) == {"checks passed": [2.0], "checks failed": [2.0], "checks skipped": [2.0]}
    assert [sentence.split(" (")[0] for sentence in found.failures] == [
        "made: test_wrong[4]: AssertionError: 4 is not what is allowed assert 4 == 3",
        'made: test_error: failed on setup with "RuntimeError: no such fixture"',
    ]
    assert found.failures[0].endswith("test_made.py:13: AssertionError)")
    assert found.left_out == ["made: no GPU here"]


def test_only_so_many_sentences(suite, tmp_path):
    path = tmp_path / "test_made.py"
    path.write_text(TESTS.replace("[3, 4]", "range(4, 34)").replace("SAID", "'cpu'"), encoding="utf-8")
    found = suite.tested(setting(True), [str(path)], select="wrong or right", name="made")
    assert counts(found) == {"checks passed": [1.0], "checks failed": [30.0], "checks skipped": [0.0]}
    assert len(found.failures) == 21 and found.failures[-1] == "made: 10 more tests failed."


def test_no_test_at_all_is_wrong(suite, tmp_path):
    path = tmp_path / "test_made.py"
    path.write_text("x = 1", encoding="utf-8")
    found = suite.tested(setting(True), [str(path)])
    assert found.failures[-1].startswith("test_made: pytest ended with status 5")


def test_found_together(suite):
    found = importlib.import_module("on_gpu.parts").Found
    assert suite.joined([found([], ["a"], ["b"]), found([1], ["c"], [])]) == found([1], ["a", "c"], ["b"])
