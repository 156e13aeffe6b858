"""How much of a forward pass on a GPU a capture takes: ``python benchmarks/gpu_captures.py``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from capture import MODELS, Passes, by_normscope, first_capture, network_and_batch
from capture import measured as compared
from common import Measurement, finish, gpu_options, names, of_each, parsed_for_gpu, peak_megabytes
from ways import Clock, elements, sites

NUMBERS = {"vit_b16": (8, 64), "dit_xl": (8,)}  # samples at once; of others one
DTYPES = ("float32", "bfloat16")
ABOUT = """
What it costs on a GPU to see what every norm of a network does while it runs, in turn with bare passes, with random
weights. All pairs are summed up; their number was held equal to the number of elements that the norms took. In the
hooks: the time within the hooks over that of the rest of the same pass, by events of the GPU around each hook, where
what the GPU waits for the host counts. Those events are not in the passes of the other row. Kept: how much more of the
GPU's memory is held after each further batch. First capture: how much longer it takes than the next in a process, with
nothing compiled before.
"""


def main() -> None:
    parser = gpu_options(__doc__, repeats=20)
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"({','.join(MODELS)})")
    parser.add_argument("--dtypes", type=names, default=list(DTYPES), help=f"({','.join(DTYPES)})")
    args = parsed_for_gpu(parser)
    cases = {
        f"{model}, {number} at once, {dtype}": (model, number, dtype, args.device, args.repeats)
        for model in args.models
        for number in NUMBERS.get(model, (1,))
        for dtype in args.dtypes
    }
    measurements, failed = of_each(measured, cases)
    first, failed_first = of_each(first_of_all, {"the first capture": (args.device,)})
    libraries = ("triton", "timm", "torchaudio", "diffusers")
    finish(
        "gpu_captures", ABOUT, measurements + first, args, threads=(), libraries=libraries, failed=failed + failed_first
    )


def measured(model: str, number: int, dtype: str, device: str, repeats: int) -> Iterator[Measurement | str]:
    """Capture a network's passes in turn with bare ones: as a whole, then with the hooks timed within."""
    network, batch = network_and_batch(model, number, device, dtype)
    case = f"{model}, {number} at once, {dtype}"
    with torch.no_grad():
        expected = (repeats + 1) * elements(network.module.eval(), batch, sites(network.module, batch))
        for way, within in (("normscope", False), ("normscope, hooks timed", True)):
            passes = Passes(memory=held_megabytes if device == "cuda" else peak_megabytes)
            clock = EventClock(within) if device == "cuda" else Clock()
            counted = by_normscope(network.module, batch, repeats, passes, lambda clock=clock: clock)
            if counted != expected:
                yield f"{case}: {counted:,} pairs were counted of {expected:,} elements."
            for samples in (passes.seen, passes.in_hooks):
                del samples[0]  # it compiled and warmed up
            yield from compared(case, way, passes)


def first_of_all(device: str) -> Iterator[Measurement]:
    """Time the first capture, which compiles."""
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        seconds = first_capture(device)
    yield Measurement("the first capture on a machine", "normscope", "longer than the next", "s", [seconds])


def held_megabytes() -> float:
    """Return how much of the GPU's memory tensors hold."""
    return torch.cuda.memory_allocated() / 1e6


class EventClock(Clock):
    """Times by the GPU's clock: events around a pass, and around each function within where that is asked for.

    Nothing waits for an event before the clock is read.
    """

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.within = within
        self._around: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._with_events(function) if self.within else function

    def timed_whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._with_events(function)

        def on_the_clock(*args: Any, **kwargs: Any) -> Any:
            self._around.clear()
            torch.cuda.synchronize()
            return timed(*args, **kwargs)

        return on_the_clock

    def read(self) -> tuple[float, float]:
        torch.cuda.synchronize()
        *within, whole = (begin.elapsed_time(end) / 1e3 for begin, end in self._around)
        return whole, sum(within)

    def _with_events(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def on_the_clock(*args: Any, **kwargs: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                return function(*args, **kwargs)
            finally:
                end.record()
                self._around.append((begin, end))

        return on_the_clock


if __name__ == "__main__":
    main()
