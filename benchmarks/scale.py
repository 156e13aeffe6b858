"""Measure captures of a whole data set: memory as it grows, and 1, 2 and 3 processes against one another."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import Measurement, finish, in_own_process, options, peak_megabytes, ratios
from runs import CaptureRun, differences, write_images

import normscope
from normscope.pairs.storage import load_capture

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


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--images", type=int, default=10_000, help="to capture (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = write_images(Path(folder) / "images", args.images)
        measurements = [*memory(data, args), *speed(Path(folder), data, args)]
    about = f"""
        normscope capture demo_vit of images in a folder, 8 in a batch: whole commands, in turn. "Each further input" is
        what a command of all images takes more than one of {FEW}: the start, about as long as a thousand inputs of this
        toy, is not in it. Memory is the most that a process had held, in one capture. Captures of 1, 2 and 3 processes
        of one thread were compared: counts equal to the bit, sums to 1e-12.
    """
    finish("scale", about, measurements, args, threads=[1, 2], libraries=["timm", "numba"])


def memory(data: Path, args: argparse.Namespace) -> Iterator[Measurement]:
    """Compare the peak after a tenth of the images with that at the end of the same capture."""
    peaks = [in_own_process(peaks_of, data, args.images // 10, threads=1) for _ in range(args.repeats)]
    case, way = f"{args.images:,} images", str(ALONE)
    yield Measurement(case, way, "peak memory after a tenth", "MB", [early for early, _ in peaks])
    yield Measurement(case, way, "at the end", "MB", [late for _, late in peaks])
    yield Measurement(case, way, "of that after a tenth", "×", [late / early for early, late in peaks])


def peaks_of(data: Path, tenth: int) -> tuple[float, float]:
    """Capture all images; return the most megabytes that the process had held after a tenth of them, and after all."""
    network = normscope.load("demo_vit", data=data, device="cpu")
    early = 0.0

    def taken() -> Iterator[Any]:
        nonlocal early
        for number, batch in enumerate(network.inputs, start=1):
            yield batch
            if number * len(batch.samples) == tenth:
                early = peak_megabytes()

    normscope.capture(network.module, taken())
    return early, peak_megabytes()


def speed(folder: Path, data: Path, args: argparse.Namespace) -> Iterator[Measurement]:
    """Compare numbers of processes, and what they captured."""
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
        if way.threads and (found := differences(load_capture(outputs[ALONE]), load_capture(outputs[way]))):
            raise SystemExit(f"{way} captured something else than {ALONE}: {found}")
        case = f"{args.images:,} images"
        yield Measurement(case, str(way), "command", "s", whole[way])
        yield Measurement(case, str(way), "speed-up", "×", ratios(whole[ALONE], whole[way]))
        yield Measurement(case, str(way), "each further input", "ms", each[way])
        yield Measurement(case, str(way), "speed-up of that", "×", ratios(each[ALONE], each[way]))


def given(data: Path, number: int) -> tuple[str, ...]:
    return ("--data", str(data), "--limit", str(number))


def seconds(run: CaptureRun) -> float:
    """Run a command to its end, and return how long it took."""
    start = time.perf_counter()
    if run.finish():
        raise SystemExit(run.said())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
