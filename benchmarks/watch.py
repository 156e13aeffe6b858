"""Cost of watching for calls of norm functions in a network without any: ``python benchmarks/watch.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from common import Measurement, finish, names, of_each, options, ratios
from timm.models import VisionTransformer

from normscope.inputs.batch import as_batches
from normscope.pairs.norms.trace import find_norms
from normscope.pairs.recorder import Recorder, Summing
from normscope.runtime.network import left_as_found, run

ABOUT = """
Cost of the function mode and the module hooks by which every capture sees calls of norm functions. The recorder
observes no site of a ViT-B/16 of timm, which calls no norm function outside of its norms. Watched: processor time of a
pass that the recorder runs, divided by that of a bare pass of the same round. Weights are random.
"""


def main() -> None:
    parser = options(__doc__, repeats=15)
    parser.add_argument("--images", type=names, default=["1", "8"], help="in a pass (1,8)")
    args = parser.parse_args()
    cases = {f"{images} at once, 1 thread": (int(images), args.repeats) for images in args.images}
    measurements, failed = of_each(measured, cases, threads=1)
    finish("watch", ABOUT, measurements, args, threads=(1,), libraries=("timm",), failed=failed)


def measured(images: int, repeats: int) -> Iterator[Measurement]:
    """Time bare and watched passes in turn; runs in a process of its own."""
    model = VisionTransformer().eval()
    batch = next(as_batches([torch.randn(images, 3, 224, 224)]))
    recorder = Recorder(model, Summing(), find_norms(model, batch.first_sample()), [])

    seconds: dict[str, list[float]] = {"bare": [], "watched": []}
    with left_as_found(model):
        for _ in range(repeats + 1):
            seconds["bare"].append(processor_seconds(lambda: run(model, batch)))
            with recorder.hooked():  # once a capture
                seconds["watched"].append(processor_seconds(lambda: recorder.run(batch)))
    seconds = {way: samples[1:] for way, samples in seconds.items()}  # the first warmed up
    case = f"ViT-B/16, {images} at once, 1 thread"
    for way, samples in seconds.items():
        yield Measurement(case, way, "pass", "s", samples)
    yield Measurement(case, "watched", "pass, of a bare one", "×", ratios(seconds["watched"], seconds["bare"]))


def processor_seconds(function: Callable[[], object]) -> float:
    """Return the processor time of a call, which other processes on the machine disturb less than its duration."""
    begun = time.process_time()
    function()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
