"""Answer every question that takes an NVIDIA GPU, one after the other: ``python benchmarks/gpu.py``.

Each is a command of its own, whose options are given to it; what it finds is in ``gpu_…-NAME.json`` once it is done.
All of it, with what the machine is, goes into one file to send back: ``gpu-NAME.tar.gz``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from common import NO_GPU, RESULTS, commit, gpu, machine

QUESTIONS = ("gpu_checks", "gpu_accuracy", "gpu_kernels", "gpu_captures", "gpu_networks")
ON_A_GPU = {  # what keeps all of them within an hour
    "gpu_kernels": ("--repeats", "5"),
    "gpu_networks": ("--seconds", "30"),
}
REHEARSED = {  # tiny, so that a CPU is done within minutes
    "gpu_checks": ("--workers=1", "--matching=backend", "--tests=tests/pairs/sums/binning/test_cuda_capture.py"),
    "gpu_accuracy": ("--skip",),
    "gpu_kernels": ("--shapes", "8x16", "--dtypes", "bfloat16", "--ways", "eager,fused", "--repeats", "1"),
    "gpu_captures": ("--models", "demo_vit", "--dtypes", "float32", "--repeats", "1"),
    "gpu_networks": ("--models", "demo_vit", "--dtype", "float32", "--seconds", "0", "--eager"),
}
REHEARSAL = "This is a rehearsal on the CPU, of tiny shapes: its times and errors say nothing of a GPU."
REHEARSED_WITH = {
    "gpu_checks": {"NORMSCOPE_KERNEL_TESTS": "cpu"},
    "gpu_kernels": {"TRITON_INTERPRET": "1", "NORMSCOPE_KERNELS": "triton"},
}
MINUTES = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", help=f"of {', '.join(QUESTIONS)} (all)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, of tiny shapes, into --results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="that all of it takes at most (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of all files (%(default)s)")
    args, given = parser.parse_known_args()
    if unknown := set(args.questions) - set(QUESTIONS):
        parser.error(f"there is no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    if args.rehearse and args.results == RESULTS:
        parser.error("a rehearsal on the CPU is no result; name another folder with --results")
    if not args.rehearse and "cpu" not in given and not gpu():
        parser.error(NO_GPU)
    begun, until = time.time(), time.monotonic() + 60 * args.minutes
    if args.rehearse:
        print(REHEARSAL)
    wrong = []
    for name in args.questions or QUESTIONS:
        print(f"== {name}", flush=True)
        if problem := asked(name, args, given, until):
            print(problem)
            wrong.append(problem)
    sent = packed(args.results, begun, args.rehearse, wrong)
    print(REHEARSAL if args.rehearse else "Send this file back:", sent, sep="\n")
    if wrong:
        sys.exit("\n".join(["Something failed; it is in the file too:", *wrong]))


def asked(name: str, args: argparse.Namespace, given: list[str], until: float) -> str:
    """Ask a question in a process of its own, until the time is over, and say what was wrong; empty if nothing was."""
    own = REHEARSED[name] if args.rehearse else ON_A_GPU.get(name, ())
    where = ("--device", "cpu") if args.rehearse else ()
    if own == ("--skip",):
        print("It asks the GPU's own instructions, of which a CPU has none: not rehearsed.")
        return ""
    command = [sys.executable, Path(__file__).with_name(f"{name}.py"), "--results", args.results, *where, *own, *given]
    environment = os.environ | (REHEARSED_WITH.get(name, {}) if args.rehearse else {})
    left = until - time.monotonic()
    if left <= 0:
        return f"{name}: not begun, as the {args.minutes:g} minutes were over."
    try:
        status = subprocess.run(command, env=environment, timeout=left).returncode
    except subprocess.TimeoutExpired:
        return f"{name}: stopped when the {args.minutes:g} minutes were over; --minutes gives it more."
    return f"{name}: ended with status {status}, and said why above." if status else ""


def packed(results: Path, begun: float, rehearsed: bool, wrong: list[str]) -> Path:
    """Put everything found since then, and what the machine is, into one archive."""
    results.mkdir(parents=True, exist_ok=True)
    surroundings = environment() | {"rehearsal": REHEARSAL if rehearsed else "", "wrong": wrong}
    files = [path for path in sorted(results.glob("gpu_*.json")) if path.stat().st_mtime >= begun - 1]
    place = surroundings["machine"].get("gpu", "rehearsal" if rehearsed else "cpu")
    sent = results / f"gpu-{'-'.join(re.findall(r'[a-z0-9]+', place.lower()))}.tar.gz"
    with tarfile.open(sent, "w:gz") as archive:
        for path in files:
            archive.add(path, path.name)
        text = (json.dumps(surroundings, indent=1, ensure_ascii=False) + "\n").encode()
        entry = tarfile.TarInfo("environment.json")
        entry.size, entry.mtime = len(text), int(time.time())
        archive.addfile(entry, io.BytesIO(text))
    return sent


def environment() -> dict[str, Any]:
    """Say what the machine, its driver, its compiler and all installed packages are."""
    packages = sorted({f"{one.name}=={one.version}" for one in importlib.metadata.distributions()})
    return {
        "commit": commit(),
        "machine": machine() | gpu(),
        "python": sys.version,
        "compiler": said_by(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc", "--version"),
        "nvidia-smi": said_by("nvidia-smi"),
        "packages": packages,
    }


def said_by(*command: str) -> str:
    """Return what a command prints; why it does not where it does not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
