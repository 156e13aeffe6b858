"""Cost of a probe in training: ``python benchmarks/probe.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from common import Measurement, finish, in_turn, of_each, options, ratios, seconds_of
from torch import Tensor, nn
from torch.nn import functional

import normscope
from normscope.fits import timeline

EVERY = 50
PROBES, SITES, RECORDS = 30, 200, 1000
ABOUT = """
A network is trained by AdamW in blocks of {every} steps, in turn without a probe and with one, which runs once in such
a block, on a quarter of a training batch. Throughput is relative to the block before; a ratio of 1 is a probe for
nothing. The ViTs have created weights: ViT-S/16 of timm at batch 16, and demo_vit, whose steps take milliseconds, at
batch 64. Memory is that of the process after each of {probes} probes, relative to the tenth. A file has {sites} sites
and {records} records of random numbers; `command` is `normscope timeline` on it, with both figures.
"""


def main() -> None:
    parser = options(__doc__, repeats=4)
    parser.add_argument("--every", type=int, default=EVERY, help="steps of a block (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument("--cases", default="ViT-S,demo_vit,memory,file", help="to measure (%(default)s)")
    args = parser.parse_args()
    cases = {
        "ViT-S": (in_training, (vit_s, 16, args.every, args.repeats)),
        "demo_vit": (in_training, (demo_vit, 64, args.every, args.repeats)),
        "memory": (memory, ()),
        "file": (file, (args.repeats,)),
    }
    measurements, failed = [], []
    for case in args.cases.split(","):
        function, given = cases[case]
        rows, sentences = of_each(function, {case: (case, *given)}, threads=args.threads)
        measurements += rows
        failed += sentences
    text = ABOUT.format(every=args.every, probes=PROBES, sites=SITES, records=RECORDS)
    finish("probe", text, measurements, args, threads=[args.threads], libraries=["timm"], failed=failed, added=True)


def vit_s(batch: int) -> tuple[nn.Module, Tensor]:
    """Return ViT-S/16 with created weights, and images."""
    import timm

    torch.manual_seed(0)
    return timm.create_model("vit_small_patch16_224", pretrained=False), torch.randn(batch, 3, 224, 224)


def demo_vit(batch: int) -> tuple[nn.Module, Tensor]:
    """Return demo_vit with created weights, and digits."""
    network = normscope.load("demo_vit", weights="random", device="cpu")
    images = torch.cat([each.args[0] for each in network.calibration])[:batch]
    return network.module.requires_grad_(), images


def in_training(
    case: str, network: Callable[[int], tuple[nn.Module, Tensor]], batch: int, every: int, repeats: int
) -> Iterator[Measurement]:
    """Train a network in blocks with and without a probe."""
    model, images = network(batch)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    labels = torch.arange(batch) % 10
    walls: dict[str, list[float]] = {"without": [], "with": []}
    cpu: dict[str, list[float]] = {"without": [], "with": []}
    own: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        probe = normscope.Probe(model, images[: batch // 4], every=every, path=Path(folder, "run.jsonl"))
        probe.run()  # compiles the loops

        def block(probed: bool) -> None:
            for _ in range(every):
                loss = functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if probed and (record := probe.step(loss=loss)):
                    own.append(record.seconds)

        for _ in range(repeats):
            for way in walls:
                began = time.process_time()
                walls[way].append(seconds_of(lambda way=way: block(way == "with")))
                cpu[way].append(time.process_time() - began)
                print(f"{case} {way}: {walls[way][-1]:.1f} s, CPU {cpu[way][-1]:.1f} s", flush=True)
    steps, way = [seconds / every for seconds in walls["without"]], f"every {every}"
    yield Measurement(case, way, "step", "ms", [1000 * seconds for seconds in steps])
    yield Measurement(case, way, "throughput with the probe", "×", ratios(walls["without"], walls["with"]))
    yield Measurement(case, way, "the same by CPU time", "×", ratios(cpu["without"], cpu["with"]))
    yield Measurement(case, way, "a probe by its own clock", "steps", ratios(own, steps))


def memory(case: str) -> Iterator[Measurement]:
    """Run many probes of demo_vit."""
    model, images = demo_vit(16)
    probe, sizes = normscope.Probe(model, images, every=1), []
    for _ in range(PROBES):
        probe.step()
        sizes.append(resident_megabytes())
    yield Measurement(case, "", f"growth from probe 10 to {PROBES}", "MB", [sizes[-1] - sizes[9]])
    yield Measurement(case, "", "resident", "MB", sizes, shown=False)


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1000


def file(case: str, repeats: int) -> Iterator[Measurement]:
    """Write and read a long timeline of many sites."""
    sites = tuple(timeline.TimelineSite(f"blocks.{i}.norm1", "LayerNorm", "pre-norm", 384) for i in range(SITES))
    run = timeline.TimelineHeader("net", "created", "16 samples", ("tanh", "isru"), sites)
    names = [f"{name}/{curve}" for curve in run.curves for name in timeline.OF_CURVES]
    names += [*timeline.OF_SITES, *timeline.OF_NORMS]
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        with path.open("w", encoding="utf-8") as lines:
            lines.write(run.line())
            for step in range(RECORDS):
                numbers = {name: random.lognormal(size=SITES).tolist() for name in names}
                lines.write(timeline.StepRecord(500 * step, 1.7e9 + step, 0.5, numbers).line())
        yield Measurement(case, "", "size", "MB", [path.stat().st_size / 1e6])
        command = [sys.executable, "-m", "normscope", "timeline", str(path), "-o", folder, "--quiet"]
        ways = {"reading": lambda: timeline.load_timeline(path), "command": lambda: subprocess.run(command, check=True)}
        for way, seconds in in_turn(ways, repeats).items():
            yield Measurement(case, "", way, "s", seconds)


if __name__ == "__main__":
    sys.exit(main())
