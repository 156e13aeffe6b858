"""Check every kernel on an NVIDIA GPU and measure it: ``python benchmarks/gpu.py``, again until nothing is left."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import ALWAYS_NAMED, RESULTS, names, versions
from on_gpu import machine, printed
from on_gpu.parts import Part, Setting, found_by
from on_gpu.record import Record

ABOUT = """
Run on the GPU itself, a part in a process of its own. Checks: tests that passed, and how far off the furthest result
was of what is allowed, of which 1 is all. Times: the replays of a CUDA graph that goes round buffers beyond the
cache, in two rounds, whose medians are the range behind each number. Of the copy's rate: bytes that cannot but be
moved, over the time, beside those of a copy of x. Of native: a network's time over that of the same one with its own
norms. Other ×: the other's time over ours. A figure is missed where either round misses it. In the hooks: by events
of the GPU around each, and by the host's clock. Whole networks have random weights.
"""
REHEARSED = "REHEARSAL on the CPU, kernels in Triton's interpreter: nothing ran on a GPU, and no time says anything."
LIBRARIES = ("triton", "timm", "torchaudio", "diffusers", "transformers", "liger_kernel", "quack-kernels")
# How parts' names begin. What is wrong is not worth timing; then what tells most, since a lent hour may not hold all.
ORDER = (
    *("kernels", "binning", "operators", "speed bfloat16", "tilings issue", "captures", "networks eager"),
    *("networks published", "speed float", "tilings", "networks compiled", "speed", "networks"),
)
RIGHT, WRONG, LEFT, STOPPED = 0, 1, 3, 130
MOST = 480  # seconds


def main() -> int:
    args = options().parse_args()
    setting = Setting(rehearsal=args.rehearse)
    if setting.rehearsal and args.results == RESULTS:
        sys.exit("A rehearsal is no result: name another folder with --results.")
    begun = time.monotonic()
    here = machine.with_gpu(setting.rehearsal)
    parts = chosen(all_parts(setting), args.only)
    head = {
        "benchmark": "gpu",
        "about": REHEARSED if setting.rehearsal else " ".join(ABOUT.split()),
        "command": "python benchmarks/gpu.py" + (" --rehearse" if setting.rehearsal else ""),
        "machine": here,
        "threads": [],
        "versions": versions([*ALWAYS_NAMED, *LIBRARIES]),
        "left_out": [],
    }
    words = re.findall(r"[a-z0-9]+", "rehearsal" if setting.rehearsal else here["gpu"].lower())
    record = Record(args.results / f"gpu-{'-'.join(words)}.json", head, anew=args.again and not args.only)
    if args.again:
        record.forget(parts)
    known = {part.name for part in parts if record.part(part.name) is not None}
    try:
        left = run(record, parts, setting, until=begun + args.seconds)
    except KeyboardInterrupt:
        done = sum(record.part(part.name) is not None for part in parts)
        print(f"\nStopped: {done} of {len(parts)} parts are done and kept. The same command goes on with the others.")
        return STOPPED
    ran = [part for part in parts if part not in left and part.name not in known]
    print(record.value["about"])
    print(printed.tables([record.part(part.name) for part in ran or parts if part not in left]))
    return summary(record, parts, left)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Exit status: {RIGHT} where every part was run and found nothing wrong, {WRONG} where one did, {LEFT} "
        f"where some are left, which the same command goes on with, {STOPPED} after Ctrl-C.",
    )
    parser.add_argument("--seconds", type=float, default=MOST, help="that the command takes at most (%(default)s)")
    parser.add_argument("--only", type=names, default=[], help="parts whose names begin so, by commas (all)")
    parser.add_argument("--again", action="store_true", help="run anew what was run before")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU: shows that all of it runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file (%(default)s)")
    return parser


def all_parts(setting: Setting) -> list[Part]:
    """Return all parts in the order in which they run, see :data:`ORDER`."""
    # Here, because each part's process imports this file again, and would take as long as all of them to begin.
    from on_gpu import binning, captures, kernels, networks, operators, speed, tilings

    modules = (kernels, binning, operators, speed, captures, networks, tilings)
    parts = [part for module in modules for part in module.parts(setting)]
    return sorted(parts, key=lambda part: [part.name.startswith(begin) for begin in ORDER].index(True))


def chosen(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Return the parts whose names begin with one of those asked for."""
    for begin in only:
        if not any(part.name.startswith(begin) for part in parts):
            sys.exit(f"No part's name begins with {begin!r}; the parts are {', '.join(part.name for part in parts)}.")
    return [part for part in parts if not only or part.name.startswith(tuple(only))]


def run(record: Record, parts: Sequence[Part], setting: Setting, until: float) -> list[Part]:
    """Run what the record does not have yet and there is time for; return what is left."""
    left: list[Part] = []
    for part in parts:
        if record.part(part.name) is not None:
            continue
        if time.monotonic() + part.seconds > until:
            left.append(part)
            continue
        print(f"{part.name} …", flush=True)
        before = machine.state()
        found, seconds = found_by(part, setting)
        record.keep(part, found, seconds, [before, machine.state()])
    return left


def summary(record: Record, parts: Sequence[Part], left: Sequence[Part]) -> int:
    """Print what came of the parts, in this run and before, and return the exit status."""
    wrong = 0
    for part in parts:
        own = record.part(part.name)
        if own is None:
            continue
        failures = own["failures"]
        wrong += bool(failures)
        print(f"{part.name}: {f'{len(failures)} WRONG' if failures else 'right'}, {own['seconds']:g} s")
        for sentence in [*failures, *own["left_out"]]:
            print(f"    {sentence}")
    print(record.path)
    if left:
        print(f"Left: {', '.join(part.name for part in left)}.")
        print(f"{len(left)} of {len(parts)} parts are left. The same command goes on with them.")
        return LEFT
    return WRONG if wrong else RIGHT


if __name__ == "__main__":
    sys.exit(main())
