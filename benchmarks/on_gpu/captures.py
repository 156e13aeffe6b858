"""Captures on a GPU: what the hooks cost beside the rest of a forward pass, by the GPU's clock and by the host's."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from capture import Passes, by_normscope, first_capture
from common import Measurement, peak_megabytes, ratios
from on_gpu.loading import Network, load
from on_gpu.parts import Found, Part, Setting
from ways import Clock, elements, sites

CASES = {  # how many at once, and in which dtypes
    "vit_b16": [(8, "float32"), (8, "bfloat16"), (64, "float32"), (64, "bfloat16")],
    "wav2vec2_large": [(1, "float32"), (1, "bfloat16")],
    "dit_xl": [(8, "float32"), (8, "bfloat16")],
}
MOST = 10  # percent of the rest of the pass, that hooks are to take
REPEATS, FEW = 20, 2
CONSTANT = 0.1  # MB that batches may differ by


def parts(setting: Setting) -> list[Part]:
    """Return the parts: a network each, and the first capture of all."""
    of_networks = [Part(f"captures {model}", captured, (model,), 240) for model in CASES]
    return [*of_networks, Part("captures first", first, (), 120)]


def captured(setting: Setting, model: str) -> Found:
    """Capture a network's passes in turn with bare ones, in every case."""
    found = Found()
    for number, dtype in CASES[model]:
        try:
            network = load(model, min(number, 2) if setting.rehearsal else number, dtype, setting)
        except ImportError as error:
            return Found(left_out=[f"{model}: {error}: its library has to be installed here."])
        with torch.no_grad():
            measure(network, f"{network.name}, {_size(network)}", setting, found)
    return found


def measure(network: Network, case: str, setting: Setting, found: Found) -> None:
    """Time passes as a whole, then what is within the hooks, and check what was counted."""
    module, batch = network.module, network.batch
    repeats, (whole_clock, inner_clock, memory, peak) = FEW if setting.rehearsal else REPEATS, _clocks(setting)
    expected = elements(module, batch, sites(module, batch))
    whole, inner, on_host = Passes(memory=memory), Passes(memory=memory), list[float]()
    for passes, make in ((whole, whole_clock), (inner, functools.partial(inner_clock, on_host))):
        counted = by_normscope(module, batch, repeats, passes, make)
        if counted != expected * (repeats + 1):
            found.failures.append(
                f"{case}: {counted:,} pairs were counted in {repeats + 1} passes of {expected:,} elements."
            )
        passes.seen, passes.in_hooks = passes.seen[1:], passes.in_hooks[1:]  # the first compiles and warms up
    rest = [seen - inside for seen, inside in zip(inner.seen, inner.in_hooks, strict=True)]
    share = [100 * one for one in ratios(inner.in_hooks, rest)]
    longer = [100 * (seen - bare) / bare for seen, bare in zip(whole.seen, whole.bare, strict=True)]
    kept = [after - before for before, after in pairwise(whole.peaks[1:])]
    if not setting.rehearsal and max(kept) > CONSTANT:
        found.failures.append(f"{case}: a further batch keeps {max(kept):.3g} MB more of the GPU's memory.")
    shown = {
        ("bare pass", "ms"): _ms(whole.bare),
        ("captured pass longer by", "%"): longer,
        ("in the hooks, of the rest", "%"): share,
        ("in the hooks, by the host", "ms"): _ms(on_host[2::2]),
        ("kept", "MB a batch"): kept,
    }
    others = {
        ("captured pass", "ms"): _ms(whole.seen),
        ("in the hooks", "ms"): _ms(inner.in_hooks),
        ("beside the hooks", "ms"): _ms(rest),
        (f"passes above {MOST} % in the hooks", "%"): [100 * sum(one > MOST for one in share) / len(share)],
        ("pairs a pass", ""): [float(expected)],
        ("peak", "MB"): [peak()],
    }
    for table, is_shown in ((shown, True), (others, False)):
        for (quantity, unit), samples in table.items():
            found.measurements.append(Measurement(case, "normscope", quantity, unit, samples, is_shown))


def first(setting: Setting) -> Found:
    """Time the first capture of all, which compiles, and the first of a process."""
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        extra = first_capture(setting.device)
    return Found([Measurement("the first capture on a machine", "normscope", "longer than the next", "s", [extra])])


class WholeClock(Clock):
    """Times whole passes by the host's clock, which waits for the GPU before it looks; hooks run untouched."""

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def timed_whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def on_the_clock(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            output = function(*args, **kwargs)
            torch.cuda.synchronize()
            self.whole = time.perf_counter() - start
            return output

        return on_the_clock


class EventClock(Clock):
    """Times by the GPU's clock: events around a pass and around each function, which nothing waits for before the end.

    Where the GPU waits for the host within a function, that counts; how long the host itself was there is beside it.

    Attributes:
        on_host: the host's seconds within the functions, a number for each time that the clock was read.
    """

    def __init__(self, on_host: list[float]) -> None:
        super().__init__()
        self.on_host = on_host
        self._around: tuple[torch.cuda.Event, torch.cuda.Event] = _events()
        self._within: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def on_the_clock(*args: Any, **kwargs: Any) -> Any:
            begin, end = _events()
            begin.record()
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                end.record()
                self._within.append((begin, end))

        return on_the_clock

    def timed_whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def on_the_clock(*args: Any, **kwargs: Any) -> Any:
            self.seconds, self._within, self._around = 0.0, [], _events()
            torch.cuda.synchronize()
            self._around[0].record()
            output = function(*args, **kwargs)
            self._around[1].record()
            return output

        return on_the_clock

    def read(self) -> tuple[float, float]:
        self.on_host.append(self.seconds)
        torch.cuda.synchronize()
        whole, *within = (begin.elapsed_time(end) / 1e3 for begin, end in (self._around, *self._within))
        return whole, sum(within)


class OnTheCpu(Clock):
    """In a rehearsal, in the place of both."""

    def __init__(self, on_host: list[float] | None = None) -> None:
        super().__init__()
        self.on_host = [] if on_host is None else on_host

    def read(self) -> tuple[float, float]:
        self.on_host.append(self.seconds)
        return super().read()


def _clocks(setting: Setting) -> tuple[type[Clock], type[Clock], Callable[[], float], Callable[[], float]]:
    """Return the clocks of whole passes and of hooks, the memory that is held now, and its peak: MB."""
    if setting.rehearsal:
        return OnTheCpu, OnTheCpu, peak_megabytes, peak_megabytes
    return (
        WholeClock,
        EventClock,
        lambda: torch.cuda.memory_allocated() / 1e6,
        lambda: torch.cuda.max_memory_allocated() / 1e6,
    )


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _size(network: Network) -> str:
    tensors = (*network.batch.args, *network.batch.kwargs.values())
    return next("×".join(map(str, one.shape)) for one in tensors if isinstance(one, torch.Tensor))


def _ms(seconds: list[float]) -> list[float]:
    return [1000 * one for one in seconds]
