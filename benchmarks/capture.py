"""How much longer a forward pass takes under a capture, and what stays in memory: ``python benchmarks/capture.py``.

Every way runs in a process of its own, in turn with the bare forward pass. ``--threads 1,2`` measures both.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import torch
from common import Measurement, finish, in_own_process, names, options, peak_megabytes, peers_left, ratios, seconds_of
from torch import nn
from ways import PEERS, WAYS, Clock, elements, sites, time_normscope

import normscope
from normscope import Batch, Sample
from normscope.inputs.loaded_model import LoadedModel
from normscope.models.registry import find

MODELS = ("vit_b16", "wav2vec2_large", "dit_xl")
ABOUT = """
What it costs to see what every norm of a network does while it runs. Weights are random: the time does not depend on
them. Waiting threads of OpenMP sleep, as the command line has it (OMP_WAIT_POLICY=PASSIVE). normscope sums up every
pair, with all its folds, statistics and samples, and its number of pairs was found equal to the number of elements that
the norms took; naive hooks keep x and y before the affine step; nnsight saves the inputs and outputs of the norms;
torchlens, by record(), the outputs of layer_norm and group_norm alone. In the hooks: the time within the hooks over
that of the rest of the same pass. Pass: a pass with it over a bare one, which differs from run to run by some percent.
Kept: by how much the peak of the process's memory rises with each further batch. First capture: how much longer one
takes than the next in a process, on a machine that has never captured anything (compiling) and later. {networks}
"""


def main() -> None:
    parser = options(__doc__, repeats=3, peers=PEERS)
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"({','.join(MODELS)})")
    parser.add_argument("--threads", type=names, default=[str(torch.get_num_threads())], help="(all cores)")
    parser.add_argument("--batches", type=int, default=64, help="of one sample, for the peak memory (%(default)s)")
    args = parser.parse_args()
    ways = ["normscope", "naive hooks", *peers_left(parser, args, PEERS)]
    threads = [int(number) for number in args.threads]

    measurements, networks = [], {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = cache
        for case in ("first capture on a machine", "first capture of a process"):
            extra = in_own_process(first_capture, threads=threads[0])
            measurements.append(Measurement(case, "normscope", "longer than the next", "s", [extra]))
        for number in threads:
            for model in args.models:
                for way in ways:
                    taken = in_own_process(measure, model, way, args.repeats, threads=number)
                    networks[model] = taken.description or networks[model]
                    case = f"{model}, {number} thread{'s' * (number > 1)}"
                    measurements += measured(case, way, taken)
        peaks = in_own_process(peaks_of_many, args.models[0], args.batches, threads=threads[-1])
        case = f"{args.models[0]}, {args.batches} batches of one sample"
        growth = peaks[-1] / peaks[0]
        measurements.append(Measurement(case, "normscope", "peak memory, of that after one", "×", [growth]))
        measurements.append(Measurement(case, "normscope", "peak", "MB", peaks, shown=False))
    about = ABOUT.format(networks=" ".join(f"{model}: {text}." for model, text in networks.items()))
    libraries = ["numba", "timm", "torchaudio", "diffusers", *PEERS]
    finish("capture", about, measurements, args, threads=threads, libraries=libraries)


def measured(case: str, way: str, taken: Passes) -> list[Measurement]:
    """Make ratios of what a process measured."""
    measurements = [
        Measurement(case, way, "pass", "s", taken.seen, shown=False),
        Measurement(case, way, "bare pass", "s", taken.bare),
    ]
    if any(taken.in_hooks):
        rest = [whole - inside for whole, inside in zip(taken.seen, taken.in_hooks, strict=True)]
        share = [100 * one for one in ratios(taken.in_hooks, rest)]
        measurements += [
            Measurement(case, way, "in the hooks", "s", taken.in_hooks, shown=False),
            Measurement(case, way, "in the hooks, of the rest", "%", share),
        ]
    return [
        *measurements,
        Measurement(case, way, "pass, of a bare one", "×", ratios(taken.seen, taken.bare)),
        Measurement(case, way, "kept", "MB a batch", [after - before for before, after in pairwise(taken.peaks)]),
        Measurement(case, way, "peak after each pass", "MB", taken.peaks, shown=False),
    ]


@dataclass
class Passes:
    """What was measured of some passes: bare ones in turn with those that a way saw."""

    bare: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    in_hooks: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    description: str = ""
    memory: Callable[[], float] = peak_megabytes

    def keep(self, seconds: float, in_hooks: float) -> None:
        """Add a pass that was seen."""
        self.seen.append(seconds)
        self.in_hooks.append(in_hooks)
        self.peaks.append(self.memory())


def measure(model: str, way: str, repeats: int) -> Passes:
    """Time bare and seen passes of a network in turn, after one of each; runs in a process of its own."""
    network, batch = network_and_batch(model)
    module, passes = network.module.eval(), Passes()
    with torch.no_grad():
        if way == "normscope":
            norms = sites(module, batch)
            pairs = elements(module, batch, norms)
            counted = by_normscope(module, batch, repeats, passes)
            if counted != pairs * (repeats + 1):
                raise SystemExit(f"normscope counted {counted:,} pairs in {repeats + 1} passes of {pairs:,} elements.")
            passes.description = f"{described(network, batch)}; {len(norms)} norms, {pairs:,} pairs a pass"
        else:
            by_peer(way, module, batch, repeats, passes)
    for samples in (passes.seen, passes.in_hooks):
        del samples[0]  # it warmed up
    return passes


def described(network: Any, batch: Batch) -> str:
    """Say what goes into which network."""
    tensors = [value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, torch.Tensor)]
    return (
        f"{' '.join(str(tuple(one.shape)) for one in tensors)} of {network.about['data']}; {network.about['weights']}"
    )


def by_normscope(
    module: nn.Module, batch: Batch, repeats: int, passes: Passes, make: Callable[[], Clock] = Clock
) -> int:
    """Capture batches that run a bare pass before each, and return the number of pairs."""
    clock, forward = make(), module.forward

    def batches() -> Iterator[Batch]:
        yield batch
        passes.keep(*clock.read())
        for _ in range(repeats):
            module(*batch.args, **batch.kwargs)
            passes.bare.append(clock.read()[0])
            yield batch
            passes.keep(*clock.read())

    module.forward = clock.timed_whole(forward)
    try:
        with time_normscope(clock):
            seen = normscope.capture(module, batches())
    finally:
        module.forward = forward
    return sum(stats.n_pairs for stats in seen.stats.values())


def by_peer(way: str, module: nn.Module, batch: Batch, repeats: int, passes: Passes) -> None:
    """Run bare passes and those of a peer in turn."""
    clock = Clock()
    see = WAYS[way](module, batch, clock)
    passes.keep(seconds_of(lambda: see(batch)), clock.seconds)
    for _ in range(repeats):
        with see.away():
            passes.bare.append(seconds_of(lambda: module(*batch.args, **batch.kwargs)))
        clock.seconds = 0.0
        passes.keep(seconds_of(lambda: see(batch)), clock.seconds)


def network_and_batch(
    model: str, number: int | None = None, device: str = "cpu", dtype: str | None = None
) -> tuple[LoadedModel, Batch]:
    """Load a network with random weights, and a batch of so many samples: images, latents, or the longest utterance.

    None is eight images or one noisy latent. Where there are fewer samples, some are taken again.
    """
    family = find(model).family
    number = number or {"vision": 8}.get(family, 1)
    limit = None if family == "speech" else number
    network = normscope.load(model, weights="random", limit=limit, batch_size=number, device=device, dtype=dtype)
    batches = islice(network.inputs, limit and 1)
    largest = max(batches, key=lambda batch: sum(one.numel() for one in batch.args))
    if len(largest.samples) < number:
        again = largest.take([index % len(largest.samples) for index in range(number)])
        largest = replace(again, samples=tuple(Sample(f"sample {index}", index, index) for index in range(number)))
    return network, largest.first(number)


def peaks_of_many(model: str, number: int) -> list[float]:
    """Return the peak memory after each of many captured batches of one sample: MB; runs in a process of its own."""
    network, batch = network_and_batch(model)
    peaks: list[float] = []

    def batches() -> Iterator[Batch]:
        for index in range(number):
            yield replace(batch.first(1), samples=(Sample(f"sample {index}", index, index),))
            peaks.append(peak_megabytes())

    normscope.capture(network.module, batches())
    return peaks


def first_capture(device: str = "cpu") -> float:
    """Return how much longer the first capture of this process took than the second: seconds."""
    model = nn.Sequential(nn.Linear(768, 768), nn.LayerNorm(768)).to(device)
    x = torch.randn(1, 197, 768).to(device)
    first, second = (seconds_of(lambda: normscope.capture(model, [x])) for _ in range(2))
    return first - second


if __name__ == "__main__":
    main()
