"""Answer every question that takes an NVIDIA GPU, one after the other: ``python benchmarks/gpu.py``.

Each is a command of its own, whose options are given to it; what it finds is in ``gpu_…-NAME.json`` once it is done.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from common import NO_GPU, gpu

QUESTIONS = ("gpu_checks", "gpu_accuracy", "gpu_kernels", "gpu_captures", "gpu_networks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", help=f"of {', '.join(QUESTIONS)} (all)")
    args, given = parser.parse_known_args()
    if unknown := set(args.questions) - set(QUESTIONS):
        parser.error(f"there is no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    if "cpu" not in given and not gpu():
        parser.error(NO_GPU)
    wrong = []
    for name in args.questions or QUESTIONS:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, Path(__file__).with_name(f"{name}.py"), *given]).returncode:
            wrong.append(name)
    if wrong:
        sys.exit(f"Something failed in {', '.join(wrong)}: see above.")


if __name__ == "__main__":
    main()
