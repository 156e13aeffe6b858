"""Cost of a probe in training: ``python benchmarks/probe.py``."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common import NO_GPU, Measurement, finish, gpu, names, of_each, options, ratios, seconds_of
from torch import Tensor, nn
from torch.nn import functional

import normscope

EVERY = 50
ABOUT = """
A network is trained by AdamW in blocks of {every} steps, in turn without a probe and with one, which runs once in such
a block, on a quarter of a training batch. Throughput is relative to the block before; a ratio of 1 is a probe for
nothing. The ViTs have created weights: ViT-S/16 of timm at batch 16, and demo_vit, whose steps take milliseconds, at
batch 64.
"""


def main() -> None:
    parser = options(__doc__, repeats=4, device=True)
    parser.add_argument("--every", type=int, default=EVERY, help="steps of a block (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument("--cases", type=names, default=list(CASES), help=f"to measure ({','.join(CASES)})")
    args = parser.parse_args()
    if args.device == "cuda" and not gpu():
        parser.error(NO_GPU)
    cases = {case: (case, *CASES[case], args.device, args.every, args.repeats) for case in args.cases}
    measurements, failed = of_each(in_training, cases, threads=args.threads)
    finish(
        "probe",
        ABOUT.format(every=args.every),
        measurements,
        args,
        threads=[args.threads],
        libraries=["timm"],
        failed=failed,
        added=True,
    )


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


CASES = {"ViT-S": (vit_s, 16), "demo_vit": (demo_vit, 64)}  # and the batch


def in_training(
    case: str,
    network: Callable[[int], tuple[nn.Module, Tensor]],
    batch: int,
    device: str,
    every: int,
    repeats: int,
) -> Iterator[Measurement]:
    """Train a network in blocks with and without a probe."""
    model, images = (part.to(device) for part in network(batch))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    labels = torch.arange(batch, device=device) % 10
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
            if device == "cuda":
                torch.cuda.synchronize()

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


if __name__ == "__main__":
    main()
