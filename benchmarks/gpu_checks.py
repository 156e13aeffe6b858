"""Run every test that takes an NVIDIA GPU, and keep what came of it: ``python benchmarks/gpu_checks.py``.

``pytest -m gpu`` runs the same tests, and keeps nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from common import Measurement, finish, gpu_options, parsed_for_gpu

ROOT = Path(__file__).parents[1]
LARGEST = "largest error, of what is allowed"
ABOUT = """
The tests that take a GPU (pytest -m gpu): every kernel, forward and backward, in every dtype, against float64; tensors
as large as those of networks and beyond 2³¹ elements; streams, CUDA graphs, torch.compile, opcheck and export; the sums
of captures against the CPU's, and NCCL. Largest error: how far the furthest of all results is from float64, over
what is allowed there: at most 1.
"""


def main() -> None:
    parser = gpu_options(__doc__, repeats=1)
    parser.add_argument("--workers", type=int, default=4, help="processes that run tests (%(default)s)")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders (%(default)s)")
    parser.add_argument("--matching", default="", help="only tests whose names match, as of pytest -k")
    args = parsed_for_gpu(parser)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", str(args.workers), "--dist", "loadgroup"]
        environment = os.environ | {"NORMSCOPE_KERNEL_ERRORS": folder}
        subprocess.run([*command, f"--junitxml={report}", "-k", args.matching, *args.tests], cwd=ROOT, env=environment)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []  # noqa: S314 - our own
        measurements = [*counted(cases), *largest_errors(Path(folder))]
    failed = [f"{case.get('classname')}: {case.get('name')}" for case in cases if outcome(case) == "failed"]
    finish("gpu_checks", ABOUT, measurements, args, threads=(), failed=failed if cases else ["No test was run."])


def outcome(case: ElementTree.Element) -> str:
    """Say what became of a test."""
    tags = {one.tag for one in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def counted(cases: list[ElementTree.Element]) -> Iterator[Measurement]:
    """Count the tests of each file by what became of them."""
    counts = Counter((case.get("classname", ""), outcome(case)) for case in cases)
    for file in dict.fromkeys(file for file, _ in counts):
        for how in ("passed", "failed", "skipped"):
            yield Measurement(file, "", how, "tests", [float(counts[file, how])])


def largest_errors(folder: Path) -> Iterator[Measurement]:
    """Read the largest errors over what is allowed that the processes of the tests left, a file each."""
    largest: dict[str, float] = {}
    for path in folder.glob("*.json"):
        for name, error in json.loads(path.read_text(encoding="utf-8")).items():
            largest[name] = max(error, largest.get(name, 0.0))
    for name, error in sorted(largest.items()):
        yield Measurement(name.replace("torch.", ""), "normscope", LARGEST, "×", [error], shown=False)
    if largest:
        yield Measurement("every result of every kernel", "normscope", LARGEST, "×", [max(largest.values())])


if __name__ == "__main__":
    main()
