"""How long the kernels take beside a copy, torch's norms and plain torch: ``python benchmarks/gpu_kernels.py``."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
from common import Measurement, finish, first_line, gpu_options, names, of_each, parsed_for_gpu
from torch import Tensor, nn

from normscope.swaps.bench.bench import compilations
from normscope.swaps.bench.timing import flushed, in_turns, once
from normscope.swaps.bench.whole_network import computed, fused, has_kernel, require_gradients
from normscope.swaps.pointwise import Derf, DyISRU, DyT

SHAPES = ("25216x768", "4096x4096", "32768x4096", "131072x1152")  # of docs/kernels.md
DTYPES = ("bfloat16", "float32")
WAYS = ("eager", "compile", "fused")
OF: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "DyT": DyT,
    "DyISRU": DyISRU,
    "Derf": Derf,
}
TENSORS = {"forward": 2, "backward": 3}  # that cannot but be moved: x and y; x, dy and dx
APART = "normscope, f and f′ apart"
COPY, NATIVE = ("copy", "copy", "forward"), ("LayerNorm", "eager")
MILLISECONDS, KEPT = 50, 50  # of a round of calls; samples of it that are kept
ABOUT = """
How long normscope's kernels take on tokens × channels of random values, beside plain torch eager and compiled,
F.layer_norm and F.rms_norm with their weights, and Liger's DyT where it is installed. By triton.testing.do_bench, which
clears the L2 cache before each call and times it by events of the GPU, all of them in turns. Backward: the gradients by
x and all parameters. Of the copy's rate: the bytes that a pass cannot but move (forward x and y, backward x, dy and dx)
over its time, beside those of a copy of x. f and f′ apart: DyT's backward pass of half precision with tanh by an
instruction of its own, where otherwise it is made of the exponential of f′. Of F.layer_norm: the median over that of
eager F.layer_norm.
"""

Key = tuple[str, str, str]  # of what, who, which pass
Runs = dict[Key, Callable[[], list[float]]]


def main() -> None:
    parser = gpu_options(__doc__, repeats=2)
    parser.add_argument("--shapes", type=names, default=list(SHAPES), help=f"({','.join(SHAPES)})")
    parser.add_argument("--dtypes", type=names, default=list(DTYPES), help=f"({','.join(DTYPES)})")
    parser.add_argument("--ways", type=names, default=list(WAYS), help=f"({','.join(WAYS)})")
    args = parsed_for_gpu(parser)
    cases = {
        f"{dtype}, {' × '.join(shape.split('x'))}": (shape, dtype, args.device, args.ways, args.repeats)
        for dtype in args.dtypes
        for shape in args.shapes
    }
    measurements, failed = of_each(measured, cases)
    libraries = ("triton", "liger_kernel")
    finish("gpu_kernels", ABOUT, measurements, args, threads=(), libraries=libraries, failed=failed)


def measured(shape: str, dtype: str, device: str, ways: Sequence[str], repeats: int) -> Iterator[Measurement | str]:
    """Time everything on one shape, in rounds."""
    x, dy = torch.randn(2, *map(int, shape.split("x")), device=device, dtype=getattr(torch, dtype))
    place = f"{dtype}, {x.shape[0]:,} × {x.shape[1]:,}"
    # A compiled backward pass runs more than once.
    with compilations(), torch._functorch.config.patch(donated_buffer=False):
        copied = torch.empty_like(x)
        runs: Runs = {COPY: lambda: sampled(lambda: copied.copy_(x))}
        for of, make in OF.items():
            module = make(x.shape[1]).to(x)
            for who, way, own in contenders(of, module, ways):
                try:
                    with tiled(who):
                        runs |= {(of, who, passes): run for passes, run in passes_of(own, way, x, dy, who).items()}
                except Exception as error:
                    yield f"{of} by {who}, {place}: {first_line(error)}"
        samples = in_turns(runs, at_least=repeats, at_most=repeats)
    yield from compared(samples, place)


def contenders(of: str, module: nn.Module, ways: Sequence[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield who computes it, in which way of normscope.bench, and the module that does."""
    if "eager" in ways:
        yield "eager", "eager", module
    if "compile" in ways:
        yield "torch.compile", "compile", torch.compile(module, fullgraph=True, dynamic=False)
    for name, own in fused(of, module, (), "forward + backward").items() if "fused" in ways else ():
        yield name.replace(f"{of}, ", "").replace(of, "normscope"), "fused", own
    if "fused" in ways and of == "DyT" and has_kernel(module, (), "forward + backward") and is_half(module):
        yield APART, "fused", module


def is_half(module: nn.Module) -> bool:
    return next(module.parameters()).dtype != torch.float32


@functools.cache
def apart() -> Any:
    from normscope.swaps.kernels.launch import BACKWARD

    return replace(BACKWARD, shares=False)


def tiled(who: str) -> contextlib.AbstractContextManager[object]:
    """Let tanh of half precision take an instruction of its own backward, where it is asked for."""
    if who != APART:
        return contextlib.nullcontext()
    return mock.patch("normscope.swaps.kernels.launch.BACKWARD", apart())


def passes_of(module: nn.Module, way: str, x: Tensor, dy: Tensor, who: str) -> dict[str, Callable[[], list[float]]]:
    """Run both passes once, and return what samples each."""
    x = x.detach().requires_grad_()
    parameters = require_gradients(module)

    def forward() -> list[float]:
        with computed(way), torch.no_grad():
            return sampled(lambda: module(x))

    with computed(way):
        y = module(x)
        with torch.no_grad():
            module(x)  # compiles
    gradients = [x, *parameters]

    def backward() -> list[float]:
        with tiled(who):
            return sampled(lambda: torch.autograd.grad(y, gradients, dy, retain_graph=True))

    torch.autograd.grad(y, gradients, dy, retain_graph=True)
    return {"forward": forward, "backward": backward}


def sampled(run: Callable[[], object]) -> list[float]:
    """Time calls by do_bench, or, to rehearse, one of them by the clock: seconds."""
    taken = flushed(run, MILLISECONDS) if torch.cuda.is_available() else once(run)
    return taken[:: -(-len(taken) // KEPT)]


def compared(samples: Mapping[Key, Sequence[float]], place: str) -> Iterator[Measurement]:
    """Set each beside the copy and the norm."""
    medians = {key: statistics.median(taken) for key, taken in samples.items()}
    for key, taken in samples.items():
        of, who, passes = key
        case = f"{of} {passes}, {place}"
        share = TENSORS[passes] / TENSORS["forward"] * medians[COPY] / medians[key]
        yield Measurement(case, who, "time", "µs", [1e6 * one for one in taken])
        yield Measurement(case, who, "of the copy's rate", "%", [100 * share])
        if (native := (*NATIVE, passes)) in medians:
            yield Measurement(case, who, "of F.layer_norm", "×", [medians[key] / medians[native]])


if __name__ == "__main__":
    main()
