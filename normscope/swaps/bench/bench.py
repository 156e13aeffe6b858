"""Speed of a network with point-wise functions in place of its norms; DyT's published table, repeated."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.utils.benchmark.utils.timer import timer as clock  # synchronizes with CUDA

from normscope.errors import DeviceError, UsageError, count, unknown
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.norms.trace import NormReport, find_norms
from normscope.runtime.launches import EAGER, TRITON, VARIABLE
from normscope.runtime.network import left_as_found, uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.runtime.spread import check_whole
from normscope.swaps.bench.timing import (
    AT_LEAST,
    LEAST_SAMPLES,
    ModelBench,
    NormBench,
    Only,
    Variant,
    commonest,
    compiled,
    computed,
    distinct,
    every,
    judged,
    variants,
)
from normscope.swaps.kernels.choice import why_not_on
from normscope.swaps.pointwise import check_kernels
from normscope.swaps.replace import model_tensor, module_at
from normscope.swaps.reports import NATIVE, PASSES, BenchReport, Latency, Norms, Passes, PublishedReport, Timing
from normscope.swaps.start import replaceable, why_not_replaced

CURVES = ("dyt", "dyisru", "derf")
DTYPES = ("float32", "bfloat16", "float16")
BUDGET = 15.0
INTERPRETED = "in Triton's interpreter on the CPU, not on a GPU: the time says nothing"
_COMPILATIONS = 1000
_BY_DEFAULT = (
    "Timed in bfloat16, in which networks run on a GPU: in float32 the products of matrices hide the norms. "
    "dtypes=['float32'], --dtype float32, times the network's own."
)


def bench(
    model: nn.Module | LoadedModel,
    batch: Batch | None = None,
    curves: str | Sequence[str] = CURVES,
    *,
    dtypes: Sequence[str] | None = None,
    full: bool = False,
    budget: float | None = None,
    outputs: Outputs | None = None,
    about: dict[str, str] | None = None,
    only: Only = every,
    progress: Progress = silent,
) -> BenchReport:
    """Time a network's native norms, an RMSNorm, the identity and point-wise functions in their places.

    The norm alone is the most common class and shape of the network's norms, on random values. Its GB/s count x and y
    forward, and x, y, dy and dx forward + backward. The whole network runs on the batch in eval mode; its backward pass
    computes the gradients of all parameters for a sum of squares of the output. Compared cases are timed in turns, but
    a compiled network is recompiled for each variant, which discards other compiled code.

    ``eager`` and ``compile`` compute point-wise functions in plain torch. ``fused`` uses normscope's kernels
    (:mod:`normscope.swaps.kernels.choice`), on the CPU forward alone; ``compile + fused``, with ``full``, in the
    compiled network. The timer is torch.utils.benchmark on the CPU; on CUDA, triton.testing.do_bench and replays of a
    CUDA graph over buffers beyond the L2 cache.

    Args:
        model: a result of :func:`normscope.load`, or any module; it is left as found, to the bit.
        batch: the input, on the network's device and in its dtype. None for a loaded model's first batch; on a CPU, for
            that batch's first sample.
        curves: names of curves that need no fit.
        dtypes: ``float32``, ``bfloat16``, ``float16``; None for the network's own, but bfloat16 instead of float32 on
            CUDA, and all three with ``full``.
        full: time everything. Otherwise the norm alone in all ways, and the whole network forward, fused if kernels
            compute a curve and eager if not.
        budget: seconds, for rounds and compiling: 4 to 10 rounds of the norm, and 3 of the network if they fit, else 1;
            no more once each verdict is faster or slower. None for 15; with ``full`` for 10 rounds of everything.
        outputs: reader of the network's output; a loaded model has its own.
        about: model, weights and data, for the report.
        only: selects the cases; without the native norm's row there are no ratios and verdicts.
        progress: called with the next step, 0 and 1.

    Raises:
        UsageError: if there is no such curve or dtype, a module comes without a batch, or ``NORMSCOPE_KERNELS`` asks
            for kernels that cannot run here.
        ModelError: if the network has no norm, is spread over ranks or devices, or does not run on the batch.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> report = bench(model, Batch((torch.ones(2, 4),)), ["dyt"], budget=0)
    >>> [row.variant for row in report.rows if row.scope == "model"]
    ['native', 'rmsnorm', 'identity', 'dyt']
    >>> import normscope
    >>> bench(normscope.load("demo_vit", device="cpu"), curves="dyt", budget=0).about["data"]
    '1 sample of 64 held-out digits'
    """
    model, batches, about, outputs = unpacked(model, None if batch is None else [batch], about, outputs)
    check_whole(model, "A timing", but=("quantized",))
    if batch is None:
        batch = next(iter(batches))
        batch = batch.first_sample() if model_tensor(model).device.type == "cpu" else batch
        about["data"] = f"{count(len(batch.samples), 'sample')} of {about['data']}"
    batch = batch if isinstance(batch, Batch) else next(iter(batches))
    tensor = model_tensor(model, torch.empty(0))
    chosen = _dtypes(dtypes, full, tensor)
    budget = (math.inf if full else BUDGET) if budget is None else budget
    inner = uncompiled(model)
    rows: list[Timing] = []
    left_out: list[str] = [] if dtypes or full or chosen == [tensor.dtype] else [_BY_DEFAULT]
    with left_as_found(inner, timed=True), compilations():
        progress("looking for norms", 0, 1)
        if tensor.device.type == "cuda":
            find_norms(inner, batch)  # the first pass loads libraries for seconds
        begun = clock()
        found = find_norms(inner, batch)
        a_pass, report = clock() - begun, _replaceable(found)
        if left := why_not_replaced(found.sites):
            left_out.append(f"Not all norms are replaced: {left}.")
        until = time.monotonic() - a_pass + budget
        for dtype in chosen:
            cast = inner if dtype == tensor.dtype else copy.deepcopy(inner).to(dtype)
            candidates = variants(cast, report.sites, curves)
            check_kernels([module for variant in candidates for module in variant.modules.values()])
            norm = NormBench(cast, candidates, commonest(report), tensor.new_empty(0, dtype=dtype))
            # On the CPU the network has just run in its own dtype; no need to warm it up again, at seconds a pass.
            warm = full or tensor.device.type != "cpu" or dtype != tensor.dtype
            cast_batch = batch.to(tensor.device, None if dtype == tensor.dtype else dtype)
            shapes = {site.name: report.shapes[site.name] for site in report.sites}
            whole = ModelBench(cast, cast_batch, outputs, candidates, shapes, warm)
            # A curve's fused row is what the network does by default; its eager row is left to --full.
            doubled = set() if full else {variant.name for variant in whole.fused}
            a_round = (len(candidates) + (len(whole.fused) if full else 0)) * a_pass
            rounds = LEAST_SAMPLES if LEAST_SAMPLES * a_round <= budget else AT_LEAST
            if not whole.fused:
                left_out += without_kernels(tensor.device)
            rows += _norm_alone(norm, until, 0.0 if full else rounds * a_round, only, progress, left_out)
            for ways, passes in list(itertools.product(whole.ways, PASSES))[: None if full else 1]:
                cases = whole.cases(ways, passes, only)
                cases = [case for case in cases if case[0].way != "eager" or case[0].variant not in doubled]
                if cases:
                    progress(f"the whole network, {' and '.join(ways)}, {passes}", 0, 1)
                    rows += whole.measured(cases, until, rounds)
    if not full:
        others = [name for name in DTYPES if getattr(torch, name) not in chosen]
        plain = ["functions with kernels in plain torch, in the whole network"] if whole.fused else []
        parts = [*plain, "the whole network forward + backward", "the whole network compiled", *others]
        left_out.append(f"Left to --full: {'; '.join(parts)}.")
    device = in_words(tensor.device)
    if os.environ.get(VARIABLE) == TRITON and tensor.device.type != "cuda":
        device = f"{device}; fused {INTERPRETED}"
        left_out.append(f"Fused rows ran {INTERPRETED}.")
    return BenchReport(about, device, tuple(judged(rows)), tuple(dict.fromkeys(left_out)))


def _replaceable(report: NormReport) -> NormReport:
    return replace(report, sites=replaceable(report.sites))


def in_words(device: torch.device) -> str:
    """Name a device, with its number of threads or the name of the card.

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
    """Allow one code object to be compiled for every curve, dtype and pass, and forget all of it afterwards.

    Beyond torch's limit of 8 it would silently run uncompiled. Inductor reads the CPU's instruction sets from its
    flags, instead of compiling a program for each, which takes 10 seconds and more.
    """
    dynamo = {"recompile_limit": _COMPILATIONS, "accumulated_recompile_limit": _COMPILATIONS}
    try:
        with torch._dynamo.config.patch(dynamo), torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            yield
    finally:
        torch._dynamo.reset()


def _norm_alone(
    norm: NormBench, until: float, for_model: float, only: Only, progress: Progress, left_out: list[str]
) -> Iterator[Timing]:
    took = 0.0
    for ways, passes in itertools.product(norm.ways, PASSES):
        if not (cases := norm.cases(ways, passes, only)):
            continue
        # A compiler that was started goes on; with the backward pass it takes twice as long, and the network waits.
        ends = time.monotonic() + (0.0 if passes == PASSES[0] else 2 * took + for_model)
        if "compile" in ways and ends > until:
            left_out.append(f"The norm alone, compiled, {passes}: there was no room for it in the budget.")
            continue
        progress(f"the norm alone, {' and '.join(ways)}, {passes}", 0, 1)
        begun = time.monotonic()
        yield from norm.measured(cases, until - for_model)
        took = time.monotonic() - begun


def without_kernels(device: torch.device) -> list[str]:
    """Remark on missing timings with kernels, where a user would expect them."""
    if os.environ.get(VARIABLE) == EAGER:
        return [f"Fused by normscope's kernels: {VARIABLE}={EAGER} leaves them out."]
    if device.type == "cuda":
        reason = why_not_on(device) or "there is none for these functions in this dtype"
        return [f"Fused by normscope's kernels: none is timed: {reason}."]
    return []


def _dtypes(names: Sequence[str] | None, full: bool, of_network: Tensor) -> list[torch.dtype]:
    for name in names or ():
        if name not in DTYPES:
            raise UsageError(unknown("dtype", name, DTYPES))
    if names is not None:
        return [getattr(torch, name) for name in dict.fromkeys(names)]
    if full:
        return list(dict.fromkeys([of_network.dtype, *(getattr(torch, name) for name in DTYPES)]))
    on_gpu = of_network.device.type == "cuda" and of_network.dtype == torch.float32
    return [torch.bfloat16 if on_gpu else of_network.dtype]


TOKENS, PASSES_TIMED = 4096, 100
# GB for 6.74 billion weights of two bytes; their gradients, and the activations of a backward pass of 4096 tokens.
_NEEDED: dict[Passes, int] = {"forward": 16, "forward + backward": 70}
_NORMS: tuple[Norms, ...] = ("eager", "compile", "fused")


def why_not(device: torch.device, passes: Passes = "forward") -> str | None:
    """Return the reason why the published table is not repeated on a device; None if it can be.

    >>> why_not(torch.device("cpu"))
    'The published table is not repeated on the cpu: LLaMA 7B takes 13.5 GB of weights and 100 passes over 4096 tokens, which are hours without CUDA.'
    """  # noqa: E501 - one sentence
    if device.type != "cuda":
        return (
            f"The published table is not repeated on the {device.type}: LLaMA 7B takes 13.5 GB of weights and "
            f"{PASSES_TIMED} passes over {TOKENS} tokens, which are hours without CUDA."
        )
    memory, needed = torch.cuda.get_device_properties(device).total_memory / 1e9, _NEEDED[passes]
    if memory >= needed:
        return None
    return (
        f"The published table's passes {passes} are not run: they need {needed} GB for 13.5 GB of weights"
        f" and what else a pass over {TOKENS} tokens keeps, and the device has {memory:.0f} GB."
    )


def published(
    model: nn.Module,
    curves: Sequence[str] = ("dyt",),
    *,
    tokens: int = TOKENS,
    n_passes: int = PASSES_TIMED,
    on_cpu: bool = False,
    outputs: Outputs | None = None,
    progress: Progress = silent,
) -> PublishedReport:
    """Repeat the published table: seconds of a network's norms, and of the whole network, over ``n_passes`` passes.

    The norms' time is that of each class and shape alone, times their number. The model is ``llama_7b`` in bfloat16,
    or another causal language model of transformers, with any weights; it is left as found. It runs on one random
    sequence of ``tokens``, on a CPU only if ``on_cpu``; other arguments are as of :func:`bench`.

    Raises:
        DeviceError: if :func:`why_not` has a reason, unless ``on_cpu``.
    """
    where = next(model.parameters())
    reason = why_not(where.device)
    if reason and not (on_cpu and where.device.type == "cpu"):
        raise DeviceError(reason)
    batch = of_tokens(model, tokens)
    ours = {"tokens": tokens, "passes": n_passes, "dtype": str(where.dtype).removeprefix("torch.")}
    theirs = {"tokens": TOKENS, "passes": PASSES_TIMED, "dtype": "bfloat16"}
    notes = [f"Ours has {key} {ours[key]}, the paper {theirs[key]}." for key in ours if ours[key] != theirs[key]]
    rows: list[Latency] = []
    with left_as_found(model, timed=True), compilations():
        report = _replaceable(find_norms(model, batch))
        candidates = [each for each in variants(model, report.sites, curves) if each.name in (NATIVE, *curves)]
        shapes = {site.name: tuple(report.shapes[site.name]) for site in report.sites}
        whole = ModelBench(model, batch, outputs or Outputs(), candidates, shapes, True)
        if not whole.fused:
            notes += without_kernels(where.device)
        for way, passes, variant in itertools.product(_NORMS, PASSES, candidates):
            if way == "fused" and variant not in whole.by_kernels(way, passes):
                continue
            if where.is_cuda and (too_little := why_not(where.device, passes)):
                notes.append(too_little)
                continue
            progress(f"{variant.name}, {way} norms, {n_passes} passes {passes}", 0, 1)
            placed = variant
            if way == "compile":  # each norm by itself, as in the paper
                modules = variant.modules or {name: module_at(model, name) for name in shapes}
                placed = Variant(variant.name, {name: compiled(module) for name, module in modules.items()})
            layer = 0.0
            with computed(way):
                for norm in distinct(report):
                    alone = NormBench(model, [variant], norm, where.detach())
                    layer += alone.seconds(variant.name, way, passes, n_passes) * norm.sites
                rows.append(Latency(variant.name, way, passes, layer, whole.seconds(placed, passes, n_passes)))
    return PublishedReport(in_words(where.device), tuple(rows), tokens, n_passes, tuple(dict.fromkeys(notes)))


def of_tokens(model: nn.Module, number: int) -> Batch:
    """Return one sequence of random tokens for a causal language model of transformers, on its device."""
    numbers = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    ids = torch.randint(vocabulary, (1, number), generator=numbers).to(next(model.parameters()).device)
    return Batch((), {"input_ids": ids, "use_cache": False}, (Sample("random tokens", 0, 0),))
