"""Duration of normscope's commands, beside imports: ``python benchmarks/commands.py``."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common import Measurement, finish, in_turn, installed, options, ratios, seconds_of

PEERS = ("typer", "rich", "numpy", "matplotlib", "torch", "torchaudio", "diffusers", "transformers")
ABOUT = """
How long whole processes take, from their start to their exit, after one of each that is not counted and fills the
disk's cache and the cache of compiled loops. The peer is an import of torch and timm, without which no network of
timm can be looked at. normscope imports a library when the command needs it: its help and its list of models wait for
neither torch nor matplotlib. plot without a model draws the three embedded ones; stats, compare and fit read captures
of demo_vit and demo_dit. swap-bench, without arguments, is timed to its first table, too: the drift of demo_vit.
"""
PEER = "import torch, timm"
STATEMENTS = {
    "matplotlib": "import matplotlib.pyplot",
    "diffusers": "from diffusers import DiTTransformer2DModel",
}
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
LONG, TABLE = "swap-bench", "func"  # the first word of its first table


def main() -> None:
    args = options(__doc__, repeats=5).parse_args()
    imports = [
        PEER,
        "import normscope",
        *(STATEMENTS.get(name, f"import {name}") for name in installed(PEERS)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        run_here = functools.partial(run, folder=Path(folder))
        for model in CAPTURES:
            run_here(("-m", "normscope", "capture", model, "-o", f"{model}.safetensors"))
        ways = {line: functools.partial(run_here, ("-c", line)) for line in imports}
        ways |= {f"normscope {line}": functools.partial(run_here, normscope(line)) for line in COMMANDS}
        seconds = in_turn(ways, args.repeats)
        measurements = [one for way, own in seconds.items() for one in to_exit(way, own, seconds[PEER])]
        measurements += long_command(ways[PEER], Path(folder), min(args.repeats, 3))
    finish("commands", ABOUT, measurements, args, threads=[], libraries=["timm", *PEERS])


def normscope(line: str) -> tuple[str, ...]:
    """Return what python is given for a command."""
    return ("-m", "normscope", *line.split())


def to_exit(way: str, own: Sequence[float], peer: Sequence[float]) -> list[Measurement]:
    return [
        Measurement("", way, "from start to exit", "s", own),
        Measurement("", way, f"of {PEER}", "×", ratios(own, peer)),
    ]


def long_command(peer: Callable[[], None], folder: Path, repeats: int) -> list[Measurement]:
    """Time the one that takes minutes, each time after its peer; by now nothing is left to warm up."""
    peers, firsts, wholes = [], [], []
    for number in range(1, repeats + 1):
        print(f"{LONG}, {number} of {repeats} …", flush=True)
        peers.append(seconds_of(peer))
        first, whole = to_first_table(normscope(LONG), folder)
        firsts.append(first)
        wholes.append(whole)
    first_table = Measurement("", f"normscope {LONG}", "to the first table", "s", firsts)
    return [*to_exit(f"normscope {LONG}", wholes, peers), first_table]


def run(arguments: Sequence[str], folder: Path) -> None:
    """Wait for a python; raise where it fails."""
    subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, check=True)


def to_first_table(arguments: Sequence[str], folder: Path) -> tuple[float, float]:
    """Wait for a python; return the seconds to the first table that it printed, and to its exit."""
    start, tables = time.perf_counter(), []
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout or ():
            if line.split()[:1] == [TABLE]:
                tables.append(time.perf_counter() - start)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return tables[0], time.perf_counter() - start


if __name__ == "__main__":
    main()
