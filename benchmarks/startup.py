"""How long normscope takes to start, beside the libraries that it imports: ``python benchmarks/startup.py``."""

from __future__ import annotations

import functools
import subprocess
import sys

from common import Measurement, finish, in_turn, options, peers_left, ratios

PEERS = ("typer", "rich", "numpy", "matplotlib", "torch", "timm", "torchaudio", "diffusers", "transformers")
ABOUT = """
How long whole processes take, from their start to their exit, after one of each that is not counted and fills the
disk's cache. normscope imports a library when the command needs it, so that its help and its list of models wait for
neither torch nor matplotlib.
"""
NORMSCOPE = {
    "import normscope": ("-c", "import normscope"),
    "normscope --help": ("-m", "normscope", "--help"),
    "normscope models": ("-m", "normscope", "models"),
}
STATEMENTS = {
    "matplotlib": "import matplotlib.pyplot",
    "diffusers": "from diffusers import DiTTransformer2DModel",
}
NOTHING = "python"


def main() -> None:
    parser = options(__doc__, repeats=5, peers=PEERS)
    args = parser.parse_args()
    statements = [STATEMENTS.get(name, f"import {name}") for name in peers_left(parser, args, PEERS)]
    commands = {NOTHING: ("-c", "pass"), **NORMSCOPE, **{line: ("-c", line) for line in statements}}
    seconds = in_turn({name: functools.partial(run, command) for name, command in commands.items()}, args.repeats)
    measurements = []
    for name, own in seconds.items():
        measurements.append(Measurement("", name, "from start to exit", "s", own))
        measurements.append(Measurement("", name, "of python alone", "×", ratios(own, seconds[NOTHING])))
    finish("startup", ABOUT, measurements, args, threads=[], libraries=PEERS)


def run(arguments: tuple[str, ...]) -> None:
    """Wait for a python; raise where it fails."""
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)


if __name__ == "__main__":
    main()
