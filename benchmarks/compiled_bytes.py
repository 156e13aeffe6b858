"""Memory traffic of a compiled network around a norm, without a GPU: ``python benchmarks/compiled_bytes.py``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from common import Measurement, finish, in_own_process, options
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from normscope.curves.known import CURVES
from normscope.swaps.kernels import eager, operators
from normscope.swaps.kernels.eager import Parameters

SAMPLES, TOKENS, CHANNELS = 32, 256, (768, 1152)  # of DiT-B and DiT-XL
H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472, L2_cache_size=50 * 2**20,
)  # fmt: skip
ABOUT = f"""
Code that torch.compile generates for a norm and its neighbours. It compares LayerNorm, DyT in plain torch, and DyT as
normscope's operator, which is opaque to the compiler. make_fx traces each case with inductor's decompositions, and
inductor generates Triton source for an H100. No GPU is needed and no time is measured; the same versions give the same
numbers. The input is bfloat16, without gradients, {SAMPLES} × {TOKENS} tokens. The unit is one such tensor: reading x
once and writing y once is 2. Modulated: norm · (1 + scale) + shift, with one scale and shift per sample, as in DiT.
Added: the residual sum x + branch, which the network also uses later, and its norm. Read and written: inductor's own
count (get_read_write_buffers_sizes), which counts a tensor once per kernel that reads it and once per kernel that
writes it. Loads and stores: the number of times that statements of the generated source traverse a tensor; a second
load in the same kernel may come from a cache. The operator counts as reading x once and writing y once.
"""
QUANTITIES = (("read and written", "tensors"), ("loads and stores", "tensors"), ("kernels", "launched"))
TANH = CURVES["tanh"].function
KERNEL = re.compile(r"def (triton_\w+)\(([^)]*)\):\n(.*?)''', device_str", re.DOTALL)
LAUNCH = re.compile(r"(triton_\w+)\.run\((.*), stream=")
OPERATOR = re.compile(r"torch\.ops\.normscope\.pointwise\.default\((.*)\)")
LOAD_OR_STORE = re.compile(r"tl\.(?:load|store)\((\w+)")
Norm = Callable[..., Tensor]
Block = Callable[..., tuple[Tensor, ...]]
BLOCKS: dict[str, Block] = {
    "modulated": lambda norm, x, scale, shift: (norm(x) * (1 + scale[:, None]) + shift[:, None],),
    "added": lambda norm, x, branch: (total := x + branch, norm(total)),
}
WAYS: dict[str, Norm] = {
    "LayerNorm": lambda x, _, weight, bias: nn.functional.layer_norm(x, x.shape[-1:], weight, bias),
    "DyT, plain torch": lambda x, alpha, *affine: eager.pointwise(x, TANH, Parameters(alpha, None, *affine), 0),
    "DyT, operator": lambda x, alpha, *affine: operators.pointwise(x, alpha, None, *affine, "tanh", 0),
}


def main() -> None:
    args = options(__doc__).parse_args()
    measurements = in_own_process(measured, threads=1)  # because torch caches its answers about a GPU
    finish("compiled_bytes", ABOUT, measurements, args, threads=(), libraries=("triton",))


def measured() -> list[Measurement]:
    """Compile everything and return what was counted."""
    results = []
    for channels in CHANNELS:
        x, one_a_sample = (SAMPLES, TOKENS, channels), (SAMPLES, channels)
        tensor = SAMPLES * TOKENS * channels * torch.bfloat16.itemsize
        for name, others in {"modulated": (one_a_sample, one_a_sample), "added": (x,)}.items():
            for way, norm in WAYS.items():
                counts = compiled(BLOCKS[name], norm, (x, (1,), (channels,), (channels,), *others))
                for what, count, unit in zip(QUANTITIES, counts, (tensor, tensor, 1), strict=True):
                    results.append(Measurement(f"{name}, {channels:,} channels", way, *what, [count / unit]))
    return results


def compiled(block: Block, norm: Norm, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int, int]:
    """Compile for an H100; return the bytes by inductor's count and by the source, and the number of kernels."""
    counts: list[tuple[int, int, int]] = []

    def counted(graph: GraphLowering, *_: object) -> None:
        source = graph.codegen()[0].value
        moved = sum(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes)
        by_source = counted_in(source, lambda name: int(graph.get_numel(name)) * graph.get_dtype(name).itemsize)
        counts.append((int(moved), *by_source))
        raise _Counted

    def whole(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return block(lambda x: norm(x, *given[:3]), x, *given[3:])

    with FakeTensorMode() as mode:
        given = [torch.empty(shape, dtype=torch.bfloat16, device="cuda:0") for shape in shapes]
        graph = make_fx(whole, decomposition_table=select_decomp_table())(*given)
    stopping = mock.patch.object(GraphLowering, "compile_to_module", counted)
    with a_gpu(), stopping, torch._guards.tracing(torch._guards.TracingContext(mode)), contextlib.suppress(_Counted):
        compile_fx_inner(graph, given)
    return counts[0]


def counted_in(source: str, size: Callable[[str], int]) -> tuple[int, int]:
    """Return the bytes of all loads and stores in a generated module, and how many kernels it launches."""
    kernels = {name: (names.split(", "), body) for name, names, body in KERNEL.findall(source)}
    launches, calls = LAUNCH.findall(source), OPERATOR.findall(source)
    moved = 0
    for name, given in launches:
        names, body = kernels[name]
        tensors = dict(zip(names, given.split(", "), strict=False))  # the names' last ones are the compiler's to give
        moved += sum(size(tensors[pointer]) for pointer in LOAD_OR_STORE.findall(body))
    for call in calls:
        given = [name for name in call.split(", ") if name.isidentifier() and name != "None"]
        moved += sum(map(size, given)) + size(given[0])  # the result is as large as x
    return moved, len(launches) + len(calls)


class _Counted(BaseException):
    """Ends a compilation where all is counted; no Exception, as which inductor would take it."""


@contextlib.contextmanager
def a_gpu() -> Iterator[None]:
    """Patch torch to report an H100."""
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H100,
        "get_device_capability": (9, 0), "get_rng_state": torch.empty(16, dtype=torch.uint8), "set_rng_state": None,
        "_lazy_init": None, "synchronize": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    answers = {name: mock.Mock(return_value=answer) for name, answer in answers.items()}
    asked = {name: answers[name] for name in ("get_device_properties", "current_device", "device_count")}
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.multiple(CudaInterface, **asked),
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context"),
        mock.patch("torch.utils._triton.triton_hash_with_backend", return_value=""),
        config.patch(fx_graph_cache=False, compile_threads=1),
    ):
        yield


if __name__ == "__main__":
    main()
