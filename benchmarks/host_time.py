"""Host time of a fused call, without a GPU: ``python benchmarks/host_time.py``."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
from common import Measurement, finish, in_own_process, options, ratios
from recorded_launches import recorded
from torch import Tensor, nn

from normscope.swaps.kernels import operators
from normscope.swaps.kernels.choice import TRITON, VARIABLE
from normscope.swaps.pointwise import DyT

SHAPE = (8, 64)
BLOCKS, CALLS = 30, 50
NATIVE, FUSED, OPERATOR = "nn.LayerNorm", "DyT", "DyT by torch's operator"
PASSES = {"forward": "forward, no gradient wanted", "graph": "forward, gradients wanted", "backward": "backward"}
ABOUT = f"""
Host time of a fused call on one thread, without a GPU to wait for. Triton {{triton}} launches DyT's kernels as usual,
but into a driver that discards the launches (a GPU's driver takes a few more microseconds). CPU tensors of {SHAPE[0]} ×
{SHAPE[1]} float32 replace those of a GPU. The peer is torch's nn.LayerNorm on the CPU over the same tensors, including
its computation. Backward is y.backward(dy), for the input and all parameters, with gradients set to None before. By
torch's operator: the path of the first call of each kind, and of calls under torch.compile, torch's modes or tensor
subclasses. A sample is the median of {BLOCKS} blocks of {CALLS} calls, in turn with the other ways. A ratio divides a
sample by that of nn.LayerNorm in the same round.
"""


def main() -> None:
    args = options(__doc__, repeats=9).parse_args()
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.repeats):
        for key, seconds in in_own_process(measured, threads=1).items():
            samples.setdefault(key, []).append(seconds * 1e6)
    measurements = []
    for way in (NATIVE, FUSED, OPERATOR):
        for name, case in PASSES.items():
            measurements.append(Measurement(case, way, "host time", "µs", samples[way, name]))
            if way != NATIVE:
                over = ratios(samples[way, name], samples[NATIVE, name])
                measurements.append(Measurement(case, way, f"over {NATIVE}", "×", over))
    about = ABOUT.format(triton=triton.__version__)
    finish("host_time", about, measurements, args, threads=(1,), libraries=("triton",))


def measured() -> dict[tuple[str, str], float]:
    """Time every way and pass in turn, and return the median seconds of a call."""
    taken: dict[tuple[str, str], list[float]] = {}
    with recorded() as driver:
        driver.noting = False
        x, dy = torch.randn(SHAPE), torch.randn(SHAPE)
        layers = {NATIVE: nn.LayerNorm(SHAPE[-1]), FUSED: DyT(SHAPE[-1]), OPERATOR: DyT(SHAPE[-1])}
        with mock.patch.dict(os.environ, {VARIABLE: TRITON}):  # the first calls ask whether there is a kernel
            for layer in layers.values():
                list(passes(layer, x, dy, calls=3))
        gc.disable()
        try:
            for _ in range(BLOCKS):
                for way, layer in layers.items():
                    for name, seconds in timed(way, layer, x, dy):
                        taken.setdefault((way, name), []).append(seconds)
        finally:
            gc.enable()
    return {key: statistics.median(seconds) for key, seconds in taken.items()}


def timed(way: str, layer: nn.Module, x: Tensor, dy: Tensor) -> list[tuple[str, float]]:
    if way != OPERATOR:
        return list(passes(layer, x, dy))
    asked = {VARIABLE: TRITON}  # without it, a tensor on the CPU is plain torch's
    with mock.patch.dict(os.environ, asked), mock.patch.object(operators, "bypassed", lambda *_: None):
        return list(passes(layer, x, dy))


def passes(layer: nn.Module, x: Tensor, dy: Tensor, calls: int = CALLS) -> Iterator[tuple[str, float]]:
    """Yield the seconds of a call of each pass."""
    with torch.no_grad():
        yield "forward", per_call(lambda: layer(x), calls)
    leaf_x = x.clone().requires_grad_()
    yield "graph", per_call(lambda: layer(leaf_x), calls)
    leaves: list[Any] = [leaf_x, *layer.parameters()]
    seconds = 0.0
    for _ in range(calls):
        y = layer(leaf_x)
        start = time.perf_counter()
        y.backward(dy)
        seconds += time.perf_counter() - start
        for leaf in leaves:
            leaf.grad = None
    yield "backward", seconds / calls


def per_call(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
