"""Duration of normscope's commands, beside imports: ``python benchmarks/commands.py``."""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import Measurement, finish, in_turn, options

ABOUT = """
Duration of whole processes, from start to exit. A first run of each, which is not counted, fills the disk's cache and
the cache of compiled loops. The peer is an import of torch and timm, which any work with a timm network requires.
normscope imports a library only when the command needs it: its help and its list of models load neither torch nor
matplotlib. plot without a model draws the three embedded networks; stats, compare and fit read captures of demo_vit and
demo_dit. Ratios are relative to the peer's median.
"""
PEER = "import torch, timm"
CAPTURES = ("demo_vit", "demo_dit")
COMMANDS = (
    "--help",
    "models",
    "plot demo_vit",
    "plot",
    "stats demo_dit.safetensors",
    "compare demo_vit.safetensors demo_dit.safetensors",
    "fit demo_vit.safetensors --func all",
)
LONG = "normscope swap-bench"  # minutes


def main() -> None:
    args = options(__doc__, repeats=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_here = functools.partial(run, folder=Path(folder))
        for model in CAPTURES:
            run_here(("-m", "normscope", "capture", model, "-o", f"{model}.safetensors"))
        ways = {line: functools.partial(run_here, ("-c", line)) for line in (PEER, "import normscope")}
        ways |= {f"normscope {line}": functools.partial(run_here, normscope(line)) for line in COMMANDS}
        seconds = in_turn(ways, args.repeats)
        seconds |= in_turn({LONG: functools.partial(run_here, normscope("swap-bench"))}, min(args.repeats, 2))
    measurements = []
    for way, durations in seconds.items():
        over = [duration / statistics.median(seconds[PEER]) for duration in durations]
        measurements += [Measurement("", way, "from start to exit", "s", durations)]
        measurements += [Measurement("", way, f"of {PEER}", "×", over)]
    finish("commands", ABOUT, measurements, args, threads=[], libraries=["timm"])


def normscope(line: str) -> tuple[str, ...]:
    """Return what python is given for a command."""
    return ("-m", "normscope", *line.split())


def run(arguments: Sequence[str], folder: Path) -> None:
    """Wait for a python; raise where it fails."""
    subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, check=True)


if __name__ == "__main__":
    main()
