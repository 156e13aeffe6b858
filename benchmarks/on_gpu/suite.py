"""Files of the test suite as a part: run by pytest on the GPU, each failing test a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from common import Measurement
from on_gpu.parts import Found, Setting

ROOT = Path(__file__).parents[2]
DEVICE = "NORMSCOPE_KERNEL_TESTS"  # that the tests are to take
ERRORS = "NORMSCOPE_KERNEL_ERRORS"  # the folder in which they leave how far off the furthest was
LARGEST = "largest error over what is allowed"
_SENTENCES, _LENGTH = 20, 400
_TESTS_FAILED = 1


def tested(setting: Setting, files: Sequence[str], select: str, name: str, workers: int = 0) -> Found:
    """Run the tests of some files in a process of their own, and say which failed.

    Args:
        setting: whose device the tests are told to take, by :data:`DEVICE`.
        files: their paths, from the root of the repository.
        select: which of their tests, as pytest's ``-k`` takes it; all, where it is empty.
        name: of these tests.
        workers: processes that run them side by side; 0 for none but the one.

    Returns:
        How many passed, failed and were skipped, and the largest errors that they wrote down; a sentence for each that
        failed, and one for each reason to skip.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder, "report.xml"), Path(folder, "errors")
        errors.mkdir()
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--maxprocesses", str(workers)]
        command += ["-p", "no:cacheprovider", "-c", "pyproject.toml", f"--junitxml={report}"]
        command += [*(("-k", select) if select else ()), *files]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=_environment(setting, errors),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            print(done.stdout[-6000:], flush=True)
        found = counted(name, report)
        found.measurements.extend(furthest(name, errors))
    if done.returncode not in (0, _TESTS_FAILED):
        last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
        found.failures.append(f"{name}: pytest ended with status {done.returncode}, and said last: {last}")
    return found


def counted(name: str, report: Path) -> Found:
    """Read the report that pytest has written."""
    outcomes: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}  # by what it is, which tests: behind a broken context all fail with the same
    reasons: Counter[str] = Counter()
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []  # noqa: S314 - our own
    for case in cases:
        outcome = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            outcomes["passed"] += 1
        elif outcome.tag == "skipped":
            outcomes["skipped"] += 1
            reasons[_message(outcome)] += 1
        else:
            outcomes["failed"] += 1
            wrong.setdefault(f"{_message(outcome)} ({_place(outcome)})", []).append(case.get("name", ""))
    sentences = [
        f"{name}: {tests[0]}{f' and {len(tests) - 1} more' if tests[1:] else ''}: {what}"
        for what, tests in wrong.items()
    ]
    if not cases:
        sentences.append(f"{name}: no test was run.")
    if len(sentences) > _SENTENCES:
        more = sum(len(tests) for tests in [*wrong.values()][_SENTENCES:])
        sentences[_SENTENCES:] = [f"{name}: {more} more tests failed."]
    return Found(
        [
            Measurement(name, "normscope", f"checks {how}", "tests", [float(outcomes[how])], shown=how == "passed")
            for how in ("passed", "failed", "skipped")
        ],
        sentences,
        [f"{name}: {number} of {len(cases)} tests: {reason}" for reason, number in reasons.items()],
    )


def furthest(name: str, folder: Path) -> list[Measurement]:
    """Read the largest errors that the processes of the tests have met, relative to what is allowed."""
    largest: dict[str, float] = {}
    for path in folder.glob("*.json"):
        for key, value in json.loads(path.read_text(encoding="utf-8")).items():
            largest[key] = max(value, largest.get(key, 0.0))
    found = [
        Measurement(f"{name}: {key.replace('torch.', '')}", "normscope", LARGEST, "×", [value], shown=False)
        for key, value in sorted(largest.items())
    ]
    return found + ([Measurement(name, "normscope", LARGEST, "×", [max(largest.values())])] if largest else [])


def _environment(setting: Setting, errors: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NORMSCOPE_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", DEVICE: setting.device, ERRORS: str(errors)}
    return ours | own


def _message(outcome: ElementTree.Element) -> str:
    """Return what a test failed with or was skipped for, in one line; of a file that cannot be imported, why."""
    message = " ".join(outcome.get("message", "").split()) or "nothing said"
    why = [line[1:].strip() for line in (outcome.text or "").splitlines() if line.startswith("E ")]
    return (why[0] if message == "collection failure" and why else message)[:_LENGTH]


def _place(outcome: ElementTree.Element) -> str:
    return ((outcome.text or "").strip().splitlines() or [""])[-1][:_LENGTH]
