"""Check every kernel on an NVIDIA GPU against float64, then measure: ``python benchmarks/gpu.py``.

Each question runs in a process of its own and gets the options that this script does not know. All results, with the
packages and the driver of the machine, are packed into one file to send back: ``gpu-NAME.tar.gz``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from common import NO_GPU, RESULTS, Measurement, commit, finish, gpu, machine, output_of

ROOT = Path(__file__).parents[1]
CHECKS = "checks"
ON_A_GPU = {
    CHECKS: (),
    "accuracy": ("--device", "cuda"),
    "speed": ("--device", "cuda"),
    "llama": ("--device", "cuda"),
    "capture": ("--device", "cuda", "--repeats", "10"),
    "probe": ("--device", "cuda", "--every", "50", "--repeats", "2"),
}
REHEARSED = {  # tiny, so that a CPU is done within minutes
    CHECKS: ("--matching=backend", "--tests=tests/pairs/sums/binning/test_cuda_capture.py", "--workers=1"),
    "speed": ("--norms", "8x16", "--models", "demo_vit", "--dtypes", "float32", "--quick"),
    "llama": ("--device", "cpu", "--tokens", "8", "--passes", "1", "--tiny"),
    "capture": ("--models", "demo_vit", "--repeats", "1", "--batches", "2", "--plain"),
    "probe": ("--cases", "demo_vit", "--every", "2", "--repeats", "1"),
}
REHEARSAL = "This is a rehearsal on the CPU with tiny shapes: its numbers do not describe a GPU."
LARGEST = "largest error, of what is allowed"
ABOUT = """
Tests that need a GPU (pytest -m gpu). They compare every kernel, forward and backward, in every dtype, with float64,
including tensors as large as those of networks and beyond 2³¹ elements. They also cover streams, CUDA graphs,
torch.compile, opcheck and export, the sums of captures against the CPU's, and NCCL. Largest error: the largest distance
of a result from float64, divided by its tolerance; at most 1 is correct.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", help=f"of {', '.join(ON_A_GPU)} (all)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes, into --results")
    parser.add_argument("--minutes", type=float, default=12.0, help="limit of all questions (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of all files (%(default)s)")
    parser.add_argument("--workers", default="4", help="processes of the tests (%(default)s)")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders (%(default)s)")
    parser.add_argument("--matching", default="", help="as of pytest -k")
    args, given = parser.parse_known_args()
    if unknown := set(args.questions) - set(ON_A_GPU):
        parser.error(f"There is no question {', '.join(sorted(unknown))}; there are {', '.join(ON_A_GPU)}.")
    if args.rehearse and args.results == RESULTS:
        parser.error("A rehearsal needs another folder: --results.")
    if not args.rehearse and not gpu():
        parser.error(NO_GPU)
    begun, failed = time.time(), []
    settings = REHEARSED if args.rehearse else ON_A_GPU
    if args.rehearse:
        print(REHEARSAL)
        args = parser.parse_args([*REHEARSED[CHECKS], "--results", str(args.results), "--rehearse", *args.questions])
    for name in [name for name in args.questions or settings if name in settings]:
        print(f"== {name}", flush=True)
        left = begun + 60 * args.minutes - time.time()
        try:
            if name == CHECKS:
                checked(args, left)
                continue
            script = Path(__file__).with_name(f"{name}.py")
            command = [sys.executable, script, "--results", args.results, *settings[name], *given]
            if status := subprocess.run(command, timeout=left).returncode:
                failed.append(f"{name}: exit status {status}, see above.")
        except subprocess.TimeoutExpired:
            failed.append(f"{name}: stopped after {args.minutes:g} minutes in all; --minutes sets another limit.")
        except SystemExit as end:
            failed.append(f"{name}: {end.code}")
    print(REHEARSAL if args.rehearse else "Send this file back:", packed(args, begun, failed), sep="\n")
    if failed:
        sys.exit("\n".join(failed))


def checked(args: argparse.Namespace, seconds: float) -> None:
    """Run the tests that take a GPU; with ``--rehearse``, those that the CPU can run."""
    args.device = "cpu" if args.rehearse else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", args.workers, "--dist", "loadgroup"]
        environment = os.environ | {"NORMSCOPE_KERNEL_ERRORS": folder}
        environment |= {"NORMSCOPE_KERNEL_TESTS": "cpu"} if args.rehearse else {}
        command += [f"--junitxml={report}", "-k", args.matching, *args.tests]
        subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []  # noqa: S314 - our own
        measurements = [*counted(cases), *largest_errors(Path(folder))]
    failed = [f"{case.get('classname')}: {case.get('name')}" for case in cases if outcome(case) == "failed"]
    finish("gpu", ABOUT, measurements, args, failed=failed if cases else ["No test was run."])


def outcome(case: ElementTree.Element) -> str:
    """Return the outcome of a test."""
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def counted(cases: list[ElementTree.Element]) -> Iterator[Measurement]:
    """Count the tests of each file by outcome."""
    counts = Counter((case.get("classname", ""), outcome(case)) for case in cases)
    for file in dict.fromkeys(file for file, _ in counts):
        for result in ("passed", "failed", "skipped"):
            yield Measurement(file, "", result, "tests", [float(counts[file, result])])


def largest_errors(folder: Path) -> Iterator[Measurement]:
    """Read the largest errors over their tolerance from the files of the test processes."""
    largest: dict[str, float] = {}
    for path in folder.glob("*.json"):
        for name, error in json.loads(path.read_text(encoding="utf-8")).items():
            largest[name] = max(error, largest.get(name, 0.0))
    for name, error in sorted(largest.items()):
        yield Measurement(name.replace("torch.", ""), "normscope", LARGEST, "×", [error], shown=False)
    if largest:
        yield Measurement("every result of every kernel", "normscope", LARGEST, "×", [max(largest.values())])


def packed(args: argparse.Namespace, begun: float, failed: list[str]) -> Path:
    """Pack all files since then, and a description of the machine, into one archive."""
    here = machine() | gpu()
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"
    described = {
        "commit": commit(),
        "machine": here,
        "python": sys.version,
        "compiler": output_of(compiler, "--version"),
        "nvidia-smi": output_of("nvidia-smi"),
        "packages": sorted({f"{each.name}=={each.version}" for each in importlib.metadata.distributions()}),
        "rehearsal": args.rehearse,
        "failed": failed,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    environment = args.results / "environment.json"
    environment.write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    name = "rehearsal" if args.rehearse else "-".join(re.findall(r"[a-z0-9]+", here["gpu"].lower()))
    archive = args.results / f"gpu-{name}.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for path in sorted(args.results.glob("*.json")):
            if path.stat().st_mtime >= begun - 1:
                file.add(path, path.name)
    environment.unlink()
    return archive


if __name__ == "__main__":
    main()
