"""Files of the test suite as a part: run by pytest on the GPU, each failing test a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from common import Measurement
from on_gpu.parts import Found, Setting

ROOT = Path(__file__).parents[2]
VARIABLE = "NORMSCOPE_KERNEL_TESTS"  # the device that the tests are to take
_SENTENCES = 20
_LENGTH = 400
_TESTS_FAILED = 1


def tested(setting: Setting, files: Sequence[str], select: str = "", name: str = "") -> Found:
    """Run the tests of some files, one after the other in one process, and say which failed.

    Args:
        setting: whose device the tests are told to take, by :data:`VARIABLE`.
        files: their paths, from the root of the repository.
        select: which of their tests, as pytest's ``-k`` takes it; all, where it is empty.
        name: of these tests; the files' own without one.

    Returns:
        How many passed, failed and were skipped; a sentence for each that failed, and one for each reason to skip.
    """
    case = name or ", ".join(Path(file).stem for file in files)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
        command += ["--junitxml", str(kept), *(("-k", select) if select else ()), *files]
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(setting), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(done.stdout[-4000:], flush=True)
        tests = list(ElementTree.parse(kept).iter("testcase")) if kept.exists() else []  # noqa: S314 - our own
    wrong = [test for test in tests if _why(test, "failure") or _why(test, "error")]
    skipped = [test for test in tests if _why(test, "skipped")]
    sentences = [f"{case}: {_said(test)}" for test in wrong]
    if len(sentences) > _SENTENCES:
        sentences[_SENTENCES:] = [f"{case}: {len(sentences) - _SENTENCES} more tests failed."]
    if done.returncode > _TESTS_FAILED or done.returncode < 0 or not tests:
        last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
        sentences.append(f"{case}: pytest ended with status {done.returncode}, and said: {last}")
    counts = {"passed": len(tests) - len(wrong) - len(skipped), "failed": len(wrong), "skipped": len(skipped)}
    reasons = dict.fromkeys(f"{case}: {_why(test, 'skipped')}" for test in skipped)
    return Found(
        [
            Measurement(case, "normscope", f"checks {how}", "tests", [float(number)], shown=how == "passed")
            for how, number in counts.items()
        ],
        sentences,
        list(reasons),
    )


def joined(parts: Sequence[Found]) -> Found:
    """Return what several have found, as one."""
    return Found(*([one for part in parts for one in getattr(part, name)] for name in vars(Found())))


def _environment(setting: Setting) -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    return {**os.environ, **own, VARIABLE: setting.device}


def _why(test: ElementTree.Element, what: str) -> str:
    """Return what a test ended with, in one line; nothing where it did not end so."""
    found = test.find(what)
    return "" if found is None else " ".join(found.get("message", "").split()) or what


def _said(test: ElementTree.Element) -> str:
    found = test.find("failure") if test.find("failure") is not None else test.find("error")
    place = ((found.text or "").strip().splitlines() or [""])[-1] if found is not None else ""
    message = _why(test, "failure") or _why(test, "error")
    return f"{test.get('name')}: {message[:_LENGTH]} ({place[:_LENGTH]})"
