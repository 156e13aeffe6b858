"""How much a compiled network reads and writes around a norm, with kernels and without: no GPU is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from common import Measurement, finish, options
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from normscope.fits.curves.known import CURVES
from normscope.swaps.kernels import eager, operators
from normscope.swaps.kernels.parameters import Parameters

SAMPLES, TOKENS, CHANNELS = 32, 256, 1152  # of DiT-XL
H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472, L2_cache_size=50 * 2**20,
)  # fmt: skip
ABOUT = f"""
What torch.compile makes of a norm and its neighbours, by what it makes of DyT: plain torch, or normscope's
operator, whose kernel it cannot look into. Inductor compiles for an H100 until it has decided which operations
share a kernel, and says itself how many bytes each kernel and operator reads and writes
(get_read_write_buffers_sizes). There is no GPU, and no time was measured. In bfloat16, {SAMPLES} × {TOKENS}
tokens of {CHANNELS} channels, in units of one such tensor: reading x once and writing y once is 2. Modulated:
DiT's norm, times 1 + scale, plus shift, of which each sample has its own. Added: a residual connection, whose
sum the network goes on with, and the norm of it. Kernels: how many are launched.
"""


def modulated(norm: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


def added(norm: Callable[[Tensor], Tensor], x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    total = x + branch
    return total, norm(total)


def plain(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return eager.pointwise(x, CURVES["tanh"].function, Parameters(alpha, None, weight, bias), 0)


def fused(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y: Tensor = operators.pointwise(x, alpha, None, weight, bias, "tanh", 0)
    return y


def layer_norm(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


WAYS = {"LayerNorm": layer_norm, "DyT in plain torch": plain, "DyT by the operator": fused}
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "modulated norm": (modulated, ((SAMPLES, CHANNELS), (SAMPLES, CHANNELS))),
    "addition and norm": (added, ((SAMPLES, TOKENS, CHANNELS),)),
}


def main() -> None:
    args = options(__doc__, repeats=1).parse_args()
    measurements = []
    for case, (block, shapes) in CASES.items():
        for way, norm in WAYS.items():
            nbytes, kernels = compiled(block, norm, shapes)
            tensors = nbytes / (2 * SAMPLES * TOKENS * CHANNELS)
            measurements += [
                Measurement(case, way, "read and written", "tensors", [tensors]),
                Measurement(case, way, "launched", "kernels", [float(kernels)]),
            ]
    finish("compiled_bytes", ABOUT, measurements, args, threads=(), libraries=("triton",))


def compiled(block: Callable[..., Any], norm: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]) -> Any:
    """Compile for a GPU that is not there, and return the bytes that are moved, and the number of kernels."""
    made: list[tuple[int, int]] = []

    def counted(graph: GraphLowering, *_: object) -> None:
        graph.init_wrapper_code()
        graph._update_scheduler()
        launched = [node for node in graph.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
        made.append((sum(node.get_read_write_buffers_sizes() for node in launched), len(launched)))
        raise _Counted

    def whole(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, *others: Tensor) -> Any:
        return block(lambda x: norm(x, alpha, weight, bias), x, *others)

    sizes = ((SAMPLES, TOKENS, CHANNELS), (1,), (CHANNELS,), (CHANNELS,), *shapes)
    with FakeTensorMode() as mode:
        given = [torch.empty(size, dtype=torch.bfloat16, device="cuda:0") for size in sizes]
        graph = make_fx(whole, decomposition_table=select_decomp_table())(*given)
    stopping = mock.patch.object(GraphLowering, "compile_to_module", counted)
    tracing = torch._guards.tracing(torch._guards.TracingContext(mode))
    with a_gpu(), stopping, tracing, contextlib.suppress(_Counted):
        compile_fx_inner(graph, given)
    [found] = made
    return found


class _Counted(BaseException):
    """Ends a compilation where all is counted; no error, as which inductor would take it."""


@contextlib.contextmanager
def a_gpu() -> Iterator[None]:
    """Let torch say that there is one, to those who only ask."""
    answers: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: H100,
        "get_device_capability": lambda *_: (9, 0),
        "_lazy_init": lambda: None,
        "synchronize": lambda *_: None,
    }
    asked = {name: staticmethod(answers[name]) for name in ("get_device_properties", "current_device", "device_count")}
    no_context = mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None)
    uncached = config.patch(fx_graph_cache=False, compile_threads=1)
    with no_context, uncached, mock.patch.multiple(torch.cuda, **answers), mock.patch.multiple(CudaInterface, **asked):
        yield


if __name__ == "__main__":
    main()
