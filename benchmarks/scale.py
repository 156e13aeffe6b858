"""Measure captures of a whole data set: memory as it grows, and 1, 2 and 3 processes against one another."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common import Measurement, finish, options, ratios
from runs import CaptureRun, differences, write_images

from normscope.pairs.storage import load

FEW = 80  # inputs of a command that does little more than start and end


class Way(NamedTuple):
    """How many processes of how many threads; None for as many as torch takes by itself."""

    ranks: int
    threads: int | None

    def __str__(self) -> str:
        processes = f"{self.ranks} process{'es' if self.ranks > 1 else ''}"
        return f"{processes}, {'default threads' if self.threads is None else f'{self.threads} thread each'}"


ALONE, DEFAULT = Way(1, 1), Way(1, None)
WAYS = (ALONE, DEFAULT, Way(2, 1), Way(3, 1))


class Taken(NamedTuple):
    """What a command took: its seconds, and the most megabytes that its first process held."""

    seconds: float
    megabytes: float


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--images", type=int, default=10_000, help="to capture (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = write_images(Path(folder) / "images", args.images)
        measurements = [*memory(Path(folder), data, args), *speed(Path(folder), data, args)]
    about = f"""
        normscope capture demo_vit of images in a folder, 8 in a batch: whole commands, in turn. "Each further input" is
        what a command of all images takes more than one of {FEW}: the start, about as long as a thousand inputs of this
        toy, is not in it. Memory is the most that the process held. Captures of 1, 2 and 3 processes of one thread were
        compared: counts equal to the bit, sums to 1e-12.
    """
    finish("scale", about, measurements, args, threads=[1, 2], libraries=["timm", "numba"])


def memory(folder: Path, data: Path, args: argparse.Namespace) -> Iterator[Measurement]:
    """Compare the peak of a tenth of the images with that of all."""
    tenth = args.images // 10
    peaks: dict[int, list[float]] = {tenth: [], args.images: []}
    for _ in range(args.repeats):
        for number, own in peaks.items():
            own.append(taken(CaptureRun("demo_vit", folder / "memory.safetensors", given(data, number))).megabytes)
    for number, own in peaks.items():
        yield Measurement(f"{number:,} images", str(ALONE), "peak memory", "MB", own)
    grown = ratios(peaks[args.images], peaks[tenth])
    yield Measurement(f"{args.images:,} images", str(ALONE), f"of that with {tenth:,}", "×", grown)


def speed(folder: Path, data: Path, args: argparse.Namespace) -> Iterator[Measurement]:
    """Compare numbers of processes, and what they captured."""
    whole: dict[Way, list[float]] = {way: [] for way in WAYS}
    each: dict[Way, list[float]] = {way: [] for way in WAYS}
    outputs = {way: folder / f"{way.ranks}-{way.threads}.safetensors" for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            environment = {"OMP_NUM_THREADS": "1"} if way.threads else {}
            seconds = [
                taken(CaptureRun("demo_vit", outputs[way], given(data, number), way.ranks, (), environment)).seconds
                for number in (FEW, args.images)
            ]
            whole[way].append(seconds[1])
            each[way].append((seconds[1] - seconds[0]) / (args.images - FEW) * 1e3)
    for way in WAYS:
        if way.threads and (found := differences(load(outputs[ALONE]), load(outputs[way]))):
            raise SystemExit(f"{way} captured something else than {ALONE}: {found}")
        case = f"{args.images:,} images"
        yield Measurement(case, str(way), "command", "s", whole[way])
        yield Measurement(case, str(way), "speed-up", "×", ratios(whole[ALONE], whole[way]))
        yield Measurement(case, str(way), "each further input", "ms", each[way])
        yield Measurement(case, str(way), "speed-up of that", "×", ratios(each[ALONE], each[way]))


def given(data: Path, number: int) -> tuple[str, ...]:
    return ("--data", str(data), "--limit", str(number))


def taken(run: CaptureRun) -> Taken:
    """Run a command to its end."""
    start, megabytes = time.perf_counter(), 0.0
    process = run.start()
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        except OSError:  # it has just ended, or this is no Linux
            continue
        if peak := re.search(r"VmHWM:\s+(\d+) kB", status):
            megabytes = max(megabytes, int(peak[1]) / 1000)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(run.said())
    return Taken(time.perf_counter() - start, megabytes)


if __name__ == "__main__":
    main()
