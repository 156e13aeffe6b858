"""Duration of a capture of a whole data set with 1, 2 and 3 processes: ``python benchmarks/scale.py``."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common import Measurement, finish, options, ratios
from runs import CaptureRun, differences, write_images

from normscope.pairs.storage import load_capture

FEW = 80  # inputs of a command that does little more than start and end


class Way(NamedTuple):
    """Numbers of processes and of their threads; None for torch's default."""

    ranks: int
    threads: int | None

    def __str__(self) -> str:
        processes = f"{self.ranks} process{'es' if self.ranks > 1 else ''}"
        return f"{processes}, {'default threads' if self.threads is None else f'{self.threads} thread each'}"


ALONE, DEFAULT = Way(1, 1), Way(1, None)
WAYS = (ALONE, DEFAULT, Way(2, 1), Way(3, 1))


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--images", type=int, default=10_000, help="to capture (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = write_images(Path(folder) / "images", args.images)
        measurements = list(speed(Path(folder), data, args))
    about = f"""
        normscope capture demo_vit, run on a folder of images with 8 per batch; whole commands take turns. "Each further
        input": difference in duration between a command of all images and one of {FEW}, per image. It excludes the
        start, which takes as long as about a thousand inputs of this toy. Captures of 1, 2 and 3 processes with one
        thread each are compared: counts are equal to the bit, and sums agree to 1e-12.
    """
    finish("scale", about, measurements, args, threads=[1, 2], libraries=["timm", "numba"])


def speed(folder: Path, data: Path, args: argparse.Namespace) -> Iterator[Measurement]:
    """Compare numbers of processes, and their captures."""
    whole: dict[Way, list[float]] = {way: [] for way in WAYS}
    each: dict[Way, list[float]] = {way: [] for way in WAYS}
    outputs = {way: folder / f"{way.ranks}-{way.threads}.safetensors" for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            environment = {"OMP_NUM_THREADS": "1"} if way.threads else {}
            few, many = (
                seconds(CaptureRun("demo_vit", outputs[way], given(data, number), way.ranks, (), environment))
                for number in (FEW, args.images)
            )
            whole[way].append(many)
            each[way].append((many - few) / (args.images - FEW) * 1e3)
    for way in WAYS:
        if way.threads and (differing := differences(load_capture(outputs[ALONE]), load_capture(outputs[way]))):
            raise SystemExit(f"{way} captured something else than {ALONE}: {differing}")
        case = f"{args.images:,} images"
        yield Measurement(case, str(way), "command", "s", whole[way])
        yield Measurement(case, str(way), "speed-up", "×", ratios(whole[ALONE], whole[way]))
        yield Measurement(case, str(way), "each further input", "ms", each[way])
        yield Measurement(case, str(way), "speed-up of that", "×", ratios(each[ALONE], each[way]))


def given(data: Path, number: int) -> tuple[str, ...]:
    return ("--data", str(data), "--limit", str(number))


def seconds(run: CaptureRun) -> float:
    """Run a command to its end, and return its duration."""
    start = time.perf_counter()
    if run.finish():
        raise SystemExit(run.said())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
