"""How fast a network is with point-wise functions in the place of its norms, and how fast they are by themselves."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch._inductor.config
from torch import Tensor, nn

from normscope.batches import Batch
from normscope.errors import UsageError, count, unknown
from normscope.outputs import Outputs
from normscope.pairs.trace import find_norms
from normscope.speeds import FUSED, PASSES, BenchReport
from normscope.state import left_as_found
from normscope.swaps import bench_model
from normscope.swaps.bench_model import ModelBench
from normscope.swaps.bench_norm import NormBench, Only, commonest, every, norm_bench
from normscope.swaps.kernels.choice import EAGER, VARIABLE, why_not_on
from normscope.swaps.pointwise import check_kernels
from normscope.swaps.replace import uncompiled
from normscope.swaps.speed import Measured, judged
from normscope.swaps.variants import variants

CURVES = ("dyt", "dyisru", "derf")
DTYPES = ("float32", "bfloat16", "float16")
BUDGET = 30.0
INTERPRETED = "in Triton's interpreter on the CPU, not on a GPU: the time says nothing"
_COMPILATIONS = 1000


def bench(
    model: nn.Module,
    batch: Batch,
    curves: str | Sequence[str] = CURVES,
    *,
    dtypes: Sequence[str] | None = None,
    full: bool = False,
    budget: float | None = None,
    outputs: Outputs | None = None,
    about: dict[str, str] | None = None,
    only: Only = every,
    progress: Callable[[str], object] = lambda step: None,
) -> BenchReport:
    """Time a network's native norms, an RMSNorm, the identity and point-wise functions in their places.

    The norm alone is the commonest class and shape among the network's norms at this batch, on random values; its
    GB/s count x and y forward, and x, y, dy and dx forward + backward. The whole network runs on the batch, forward +
    backward to the gradients of all parameters, of a sum of squares of its output. All of it in eval mode. What is
    compared is timed in turns; only a network that is compiled as a whole is compiled anew for each variant, one after
    the other. What torch.compile holds of other modules is forgotten.

    Eager and compiled, point-wise functions are plain torch on every device. Where normscope's kernels would compute
    them (:func:`normscope.swaps.kernels.choice.by_kernels`), they are timed so too: ``fused``, alone and in the eager
    network, and of ``full`` ``compile + fused``, in the compiled one.

    On the CPU by torch.utils.benchmark; on CUDA by triton.testing.do_bench and by a CUDA graph's replay that rotates
    buffers beyond the L2 cache.

    Args:
        model: the network; it is left as found, to the bit. Trained weights do not change how fast it is.
        batch: what it runs on, on its device and in its dtype.
        curves: any curve that needs no fit, by name.
        dtypes: ``float32``, ``bfloat16``, ``float16``; None for the network's own, and of ``full`` for all three.
        full: the whole matrix. Otherwise the norm alone, eager, fused and compiled, and the whole network eager and
            fused, forward.
        budget: seconds that decide on the number of rounds, and whether there is time to compile; the fewest rounds are
            taken even so (of the norm 4, of the network 1). None for 30, and of ``full`` for no limit: 10 rounds of
            everything.
        outputs: how to read what the network returns.
        about: model, weights and data, for the report.
        only: whether a case is timed, of those that are otherwise; of the norm alone it is asked before there is a
            timer. Without the native norm's no row has a ratio or a verdict.
        progress: is told what is being timed.

    Returns:
        A :class:`BenchReport`; ``left_out`` says what was not timed.

    Raises:
        UsageError: if there is no such curve or dtype, or ``NORMSCOPE_KERNELS`` asks for kernels that cannot run here.
        ModelError: if the network has no norm, or does not run on the batch.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> report = bench(model, Batch((torch.ones(2, 4),)), ["dyt"], budget=0)
    >>> [row.variant for row in report.rows if row.scope == "model"]
    ['native', 'rmsnorm', 'identity', 'dyt']
    """
    own = _tensor_of(model)
    wanted = _dtypes(dtypes, full, own.dtype)
    budget = (math.inf if full else BUDGET) if budget is None else budget
    inner, until = uncompiled(model), time.monotonic() + budget
    measured: list[Measured] = []
    left_out: list[str] = []
    with left_as_found(inner, timed=True), compilations():
        progress("looking for norms")
        begun = time.monotonic()
        found = find_norms(inner, batch)
        a_pass = time.monotonic() - begun
        for dtype in wanted:
            cast = inner if dtype == own.dtype else copy.deepcopy(inner).to(dtype)
            made = variants(cast, found.sites, curves)
            check_kernels([module for variant in made for module in variant.modules.values()])
            norm = norm_bench(cast, made, commonest(found), own.new_empty(0, dtype=dtype))
            # In its own dtype on the CPU the network has just run; seconds a pass are not spent twice.
            warm = full or own.device.type != "cpu" or dtype != own.dtype
            cast_batch = batch.to(own.device, None if dtype == own.dtype else dtype)
            whole = ModelBench(cast, cast_batch, outputs or Outputs(), made, len(found.sites), warm)
            for_model = 0.0 if full else bench_model.AT_LEAST * (len(made) + len(whole.fused)) * a_pass
            if not whole.fused:
                left_out += without_kernels(own.device)
            measured += _norm_alone(norm, until, for_model, only, progress, left_out)
            measured += _whole_network(whole, full, until, only, progress)
    if not full:
        left_out.append(_without_full([str(dtype).removeprefix("torch.") for dtype in wanted]))
    device = in_words(own.device)
    if own.device.type != "cuda" and any(row.case.way in FUSED for row in measured):
        measured = [_interpreted(row) if row.case.way in FUSED else row for row in measured]
        device = f"{device}; fused {INTERPRETED}"
    return BenchReport(about or {}, device, tuple(judged(measured)), tuple(dict.fromkeys(left_out)))


def in_words(device: torch.device) -> str:
    """Say what a device is, with the number of threads or the name of the card.

    >>> in_words(torch.device("cpu"))  # doctest: +ELLIPSIS
    'cpu, ... thread...'
    """
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu, {count(torch.get_num_threads(), 'thread')}, {platform.machine()}"
    return str(device)


@contextlib.contextmanager
def compilations() -> Iterator[None]:
    """Let one code object be compiled for every curve, dtype and pass, and forget all of it afterwards.

    Beyond torch's own limit of 8 it would run uncompiled, without a word. The processor's flags say which instructions
    it has; inductor would compile a program for each and start it, which takes 10 seconds and more.
    """
    dynamo = {"recompile_limit": _COMPILATIONS, "accumulated_recompile_limit": _COMPILATIONS}
    try:
        with torch._dynamo.config.patch(dynamo), torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            yield
    finally:
        torch._dynamo.reset()


def _norm_alone(
    norm: NormBench, until: float, for_model: float, only: Only, progress: Callable[[str], object], left_out: list[str]
) -> Iterator[Measured]:
    took = 0.0
    for ways, passes in itertools.product(norm.ways, PASSES):
        if not norm.any(ways, passes, only):
            continue
        # A compiler that was started goes on; with the backward pass it takes twice as long, and the network waits.
        ends = time.monotonic() + (0.0 if passes == PASSES[0] else 2 * took + for_model)
        if "compile" in ways and ends > until:
            left_out.append(f"The norm alone, compiled, {passes}: there was no room for it in the budget.")
            continue
        progress(f"the norm alone, {' and '.join(ways)}, {passes}")
        begun = time.monotonic()
        yield from norm.measured(ways, passes, until - for_model, only)
        took = time.monotonic() - begun


def _whole_network(
    whole: ModelBench, full: bool, until: float, only: Only, progress: Callable[[str], object]
) -> Iterator[Measured]:
    parts = itertools.product(whole.ways, PASSES)
    for ways, passes in parts if full else itertools.islice(parts, 1):
        if not whole.any(ways, passes, only):
            continue
        progress(f"the whole network, {' and '.join(ways)}, {passes}")
        yield from whole.measured(ways, passes, until, only)


def _interpreted(row: Measured) -> Measured:
    return dataclasses.replace(row, note="; ".join(note for note in (INTERPRETED, row.note) if note))


def without_kernels(device: torch.device) -> list[str]:
    """Say that nothing is timed with kernels, where that is not a matter of course."""
    if os.environ.get(VARIABLE) == EAGER:
        return [f"Fused by normscope's kernels: {VARIABLE}={EAGER} leaves them out."]
    if device.type == "cuda":
        reason = why_not_on(device) or "there is none for these functions in this dtype"
        return [f"Fused by normscope's kernels: none is timed: {reason}."]
    return []


def _without_full(dtypes: Sequence[str]) -> str:
    others = [name for name in DTYPES if name not in dtypes]
    parts = ["the whole network forward + backward", "the whole network compiled", *others]
    return f"Left to --full: {'; '.join(parts)}."


def _dtypes(names: Sequence[str] | None, full: bool, own: torch.dtype) -> list[torch.dtype]:
    if names is None:
        return list(dict.fromkeys([own, *(getattr(torch, name) for name in DTYPES)])) if full else [own]
    for name in names:
        if name not in DTYPES:
            raise UsageError(unknown("dtype", name, DTYPES))
    return [getattr(torch, name) for name in dict.fromkeys(names)]


def _tensor_of(model: nn.Module) -> Tensor:
    """Return a tensor on the network's device and in its dtype."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.detach() for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
