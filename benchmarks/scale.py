"""Duration of a capture of a whole data set with 1, 2 and 3 processes: ``python benchmarks/scale.py``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from common import Measurement, finish, options, ratios, seconds_of
from PIL import Image

from normscope.pairs.storage import load_capture

FEW = 80  # inputs of a command that does little more than start and end


# Number of processes, and whether each has one thread or torch's default.
WAYS = {
    "1 process, 1 thread each": (1, True),
    "1 process, default threads": (1, False),
    "2 processes, 1 thread each": (2, True),
    "3 processes, 1 thread each": (3, True),
}
ALONE = "1 process, 1 thread each"


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--images", type=int, default=10_000, help="to capture (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images", args.images)
        measurements = list(speed(Path(folder), args))
    about = f"""
        normscope capture demo_vit, run on a folder of images with 8 per batch; whole commands take turns. "Each further
        input": difference in duration between a command of all images and one of {FEW}, per image. It excludes the
        start, which takes as long as about a thousand inputs of this toy. Captures of 1, 2 and 3 processes with one
        thread each have the same counts, to the bit.
    """
    finish("scale", about, measurements, args, threads=[1, 2], libraries=["timm", "numba"])


def write_images(folder: Path, number: int) -> None:
    """Write images of 8×8 noise, a thousand per folder."""
    generator = np.random.default_rng(0)
    for index in range(number):
        path = folder / str(index // 1000) / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)


def speed(folder: Path, args: argparse.Namespace) -> Iterator[Measurement]:
    """Compare numbers of processes, and the counts of their captures."""
    whole: dict[str, list[float]] = {way: [] for way in WAYS}
    each: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            few, many = (seconds_of(partial(capture, folder, way, number)) for number in (FEW, args.images))
            whole[way].append(many)
            each[way].append((many - few) / (args.images - FEW) * 1e3)
    for way in WAYS:
        _, one_thread = WAYS[way]
        if one_thread and counts(folder / f"{way}.safetensors") != counts(folder / f"{ALONE}.safetensors"):
            raise SystemExit(f"{way} and {ALONE} counted different pairs.")
        case = f"{args.images:,} images"
        yield Measurement(case, way, "command", "s", whole[way])
        yield Measurement(case, way, "speed-up", "×", ratios(whole[ALONE], whole[way]))
        yield Measurement(case, way, "each further input", "ms", each[way])
        yield Measurement(case, way, "speed-up of that", "×", ratios(each[ALONE], each[way]))


def capture(folder: Path, way: str, number: int) -> None:
    """Run ``normscope capture`` on some of the images, under torchrun if there are several processes."""
    ranks, one_thread = WAYS[way]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    given = ["--data", "images", "--limit", str(number), "-o", f"{way}.safetensors"]
    command = [sys.executable, *launcher, "-m", "normscope", "capture", "demo_vit", *given]
    threads = {"OMP_NUM_THREADS": "1"} if one_thread else {}
    subprocess.run(command, cwd=folder, env=os.environ | threads, capture_output=True, check=True)


def counts(path: Path) -> dict[str, bytes]:
    """Return the numbers of pairs per bin, by site."""
    return {name: stats.moments[:, 0].numpy().tobytes() for name, stats in load_capture(path).stats.items()}


if __name__ == "__main__":
    main()
