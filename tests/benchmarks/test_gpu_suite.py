"""What benchmarks/gpu.py says of tests that pass, fail and are skipped."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TESTS = """
import json
import os
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", [1, 2])
def test_right(number):
    own = json.dumps({"tanh, torch.float16, y": number / 4})
    Path(os.environ["NORMSCOPE_KERNEL_ERRORS"], f"{number}.json").write_text(own)
    assert os.environ["NORMSCOPE_KERNEL_TESTS"] == SAID


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


def samples(found):
    return {(one.case, one.quantity): one.samples for one in found.measurements}


def test_what_pytest_found_is_told(suite, tmp_path):
    path = tmp_path / "test_made.py"
    path.write_text(TESTS.replace("SAID", "'cuda'"), encoding="utf-8")
    found = suite.tested(setting(False), [str(path)], "", "made")
    assert samples(found) == {
        ("made", "checks passed"): [3.0],
        ("made", "checks failed"): [2.0],
        ("made", "checks skipped"): [2.0],
        ("made: tanh, float16, y", suite.LARGEST): [0.5],
        ("made", suite.LARGEST): [0.5],
    }
    assert [sentence.split(" (")[0] for sentence in found.failures] == [
        "made: test_wrong[4]: AssertionError: 4 is not what is allowed assert 4 == 3",
        'made: test_error: failed on setup with "RuntimeError: no such fixture"',
    ]
    assert found.failures[0].endswith(
        f"test_made.py:{TESTS[: TESTS.index('size == 3')].count(chr(10)) + 1}: AssertionError)"
    )
    assert found.left_out == ["made: 2 of 7 tests: no GPU here"]


def test_only_so_many_sentences(suite, tmp_path):
    path = tmp_path / "test_made.py"
    path.write_text(TESTS.replace("[3, 4]", "range(4, 34)").replace("SAID", "'cpu'"), encoding="utf-8")
    found = suite.tested(setting(True), [str(path)], "wrong or right", "made", workers=1)
    assert [samples(found)["made", f"checks {how}"] for how in ("passed", "failed")] == [[2.0], [30.0]]
    assert len(found.failures) == 21 and found.failures[-1] == "made: 10 more tests failed."


def test_what_failed_alike_is_one_sentence(suite, tmp_path):
    """Behind an illegal access every test of a process fails with the same."""
    failure = '<failure message="CUDA error">E\nlaunch.py:9: AcceleratorError</failure>'
    cases = [f'<testcase name="{name}">{failure if name in "bcd" else ""}</testcase>' for name in "abcd"]
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuite>{''.join(cases)}</testsuite>", encoding="utf-8")
    found = suite.counted("made", report)
    assert found.failures == ["made: b and 2 more: CUDA error (launch.py:9: AcceleratorError)"]
    assert samples(found)["made", "checks failed"] == [3.0]


@pytest.mark.parametrize(("source", "why"), [("import not_there", "No module named 'not_there'"), ("x = 1", "no test")])
def test_a_file_with_no_test_that_can_run_is_wrong(suite, tmp_path, source, why):
    path = tmp_path / "test_made.py"
    path.write_text(source, encoding="utf-8")
    found = suite.tested(setting(True), [str(path)], "", "made")
    assert why in found.failures[0]
    assert found.failures[-1].startswith("made: pytest ended with status ")
