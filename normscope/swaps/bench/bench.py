"""Speed of a network with point-wise functions in place of its norms; DyT's published table, repeated."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch._inductor.config
from torch import Tensor, nn

from normscope.errors import DeviceError, UsageError, count, unknown
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.norms.trace import find_norms
from normscope.runtime.network import left_as_found, uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.swaps.bench import whole_network
from normscope.swaps.bench.timing import LEAST_SAMPLES, Measured, judged, warmed
from normscope.swaps.bench.whole_network import (
    ModelBench,
    Norm,
    NormBench,
    Only,
    Variant,
    commonest,
    compiled,
    computed,
    every,
    norm_bench,
    variants,
)
from normscope.swaps.kernels.choice import EAGER, TRITON, VARIABLE, why_not_on
from normscope.swaps.pointwise import check_kernels
from normscope.swaps.replace import module_at
from normscope.swaps.reports import FUSED, NATIVE, PASSES, BenchReport, Latency, Norms, Passes, PublishedReport

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

    The norm alone is the commonest class and shape among the network's norms at this batch, on random values; its
    GB/s count x and y forward, and x, y, dy and dx forward + backward. The whole network runs on the batch, forward +
    backward to the gradients of all parameters, of a sum of squares of its output. All of it in eval mode. What is
    compared is timed in turns; only a network that is compiled as a whole is compiled anew for each variant, one after
    the other. What torch.compile holds of other modules is forgotten.

    Eager and compiled, point-wise functions are plain torch on every device. Where normscope's kernels would compute
    them (:mod:`normscope.swaps.kernels.choice`), they are timed so too: ``fused``, alone and in the eager network, and
    of ``full`` ``compile + fused``, in the compiled one; on the CPU, forward and eager alone.

    On the CPU by torch.utils.benchmark; on CUDA by triton.testing.do_bench and by a CUDA graph's replay that rotates
    buffers beyond the L2 cache.

    Args:
        model: the network: what :func:`normscope.load` returned, or any module; it is left as found, to the bit.
            Trained weights do not change how fast it is.
        batch: what it runs on, on its device and in its dtype. None for a loaded model's first; on a CPU, where a whole
            one would leave time for one pass, of its first sample.
        curves: any curve that needs no fit, by name.
        dtypes: ``float32``, ``bfloat16``, ``float16``; None for the network's own, on CUDA for
            bfloat16 in the place of float32, and of ``full`` for all three.
        full: the whole matrix. Otherwise the norm alone, eager, fused and compiled, and the whole network eager and
            fused, forward.
        budget: seconds that decide on the number of rounds, and whether there is time to compile; the fewest rounds are
            taken even so: of the norm 4; of the network as many as a verdict takes, 3, where these fit into the budget,
            and else 1. None for 15, and of ``full`` for no limit: 10 rounds of everything.
        outputs: how to read what the network returns; a loaded model says it, and
        about: model, weights and data, for the report.
        only: whether a case is timed, of those that are otherwise; of the norm alone it is asked before there is a
            timer. Without the native norm's no row has a ratio or a verdict.
        progress: called with what is timed next, 0 and 1, as nothing tells how far it is.

    Returns:
        A :class:`BenchReport`; ``left_out`` says what was not timed.

    Raises:
        UsageError: if there is no such curve or dtype, a module comes without a batch, or ``NORMSCOPE_KERNELS`` asks
            for kernels that cannot run here.
        ModelError: if the network has no norm, or does not run on the batch.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> report = bench(model, Batch((torch.ones(2, 4),)), ["dyt"], budget=0)
    >>> [row.variant for row in report.rows if row.scope == "model"]
    ['native', 'rmsnorm', 'identity', 'dyt']
    >>> import normscope
    >>> bench(normscope.load("demo_vit", device="cpu"), curves="dyt", budget=0).about["data"]
    '1 sample of 64 held-out digits'
    """
    model, batch, about, outputs = _first_batch(model, batch, about, outputs)
    tensor = _tensor_of(model)
    wanted = _dtypes(dtypes, full, tensor)
    budget = (math.inf if full else BUDGET) if budget is None else budget
    inner = uncompiled(model)
    measured: list[Measured] = []
    left_out: list[str] = [] if dtypes or full or wanted == [tensor.dtype] else [_BY_DEFAULT]
    with left_as_found(inner, timed=True), compilations():
        progress("looking for norms", 0, 1)
        report, a_pass = warmed(lambda: find_norms(inner, batch), tensor.device)
        until = time.monotonic() - a_pass + budget
        for dtype in wanted:
            cast = inner if dtype == tensor.dtype else copy.deepcopy(inner).to(dtype)
            candidates = variants(cast, report.sites, curves)
            check_kernels([module for variant in candidates for module in variant.modules.values()])
            norm = norm_bench(cast, candidates, commonest(report), tensor.new_empty(0, dtype=dtype))
            # On the CPU the network has just run in its own dtype; no need to warm it up again, at seconds a pass.
            warm = full or tensor.device.type != "cpu" or dtype != tensor.dtype
            cast_batch = batch.to(tensor.device, None if dtype == tensor.dtype else dtype)
            shapes = {site.name: report.shapes[site.name] for site in report.sites}
            whole = ModelBench(cast, cast_batch, outputs, candidates, shapes, warm)
            a_round = (len(candidates) + len(whole.fused)) * a_pass
            rounds = LEAST_SAMPLES if LEAST_SAMPLES * a_round <= budget else whole_network.AT_LEAST
            for_model = 0.0 if full else rounds * a_round
            if not whole.fused:
                left_out += without_kernels(tensor.device)
            measured += _norm_alone(norm, until, for_model, only, progress, left_out)
            measured += _whole_network(whole, full, rounds, until, only, progress)
    if not full:
        left_out.append(_without_full([str(dtype).removeprefix("torch.") for dtype in wanted]))
    device = in_words(tensor.device)
    if os.environ.get(VARIABLE) == TRITON and tensor.device.type != "cuda":
        measured = [_interpreted(row) if row.case.way in FUSED else row for row in measured]
        device = f"{device}; fused {INTERPRETED}"
    return BenchReport(about, device, tuple(judged(measured)), tuple(dict.fromkeys(left_out)))


def _first_batch(
    model: nn.Module | LoadedModel, batch: Batch | None, about: Mapping[str, str] | None, outputs: Outputs | None
) -> tuple[nn.Module, Batch, dict[str, str], Outputs]:
    """The module, a batch to time it on, what is known of both, and how outputs are read."""
    module, batches, said, outputs = unpacked(model, None if batch is None else [batch], about, outputs)
    if batch is None:
        batch = next(iter(batches))
        batch = batch.first_sample() if _tensor_of(module).device.type == "cpu" else batch
        said["data"] = f"{count(len(batch.samples), 'sample')} of {said['data']}"
    return module, batch, said, outputs


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
    norm: NormBench, until: float, for_model: float, only: Only, progress: Progress, left_out: list[str]
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
        progress(f"the norm alone, {' and '.join(ways)}, {passes}", 0, 1)
        begun = time.monotonic()
        yield from norm.measured(ways, passes, until - for_model, only)
        took = time.monotonic() - begun


def _whole_network(
    whole: ModelBench, full: bool, rounds: int, until: float, only: Only, progress: Progress
) -> Iterator[Measured]:
    parts = itertools.product(whole.ways, PASSES)
    for ways, passes in parts if full else itertools.islice(parts, 1):
        if not whole.any(ways, passes, only):
            continue
        progress(f"the whole network, {' and '.join(ways)}, {passes}", 0, 1)
        yield from whole.measured(ways, passes, until, only, rounds)


def _interpreted(row: Measured) -> Measured:
    return dataclasses.replace(row, note="; ".join(note for note in (INTERPRETED, row.note) if note))


def without_kernels(device: torch.device) -> list[str]:
    """A remark that nothing is timed with kernels, where one would expect them."""
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


def _dtypes(names: Sequence[str] | None, full: bool, of_network: Tensor) -> list[torch.dtype]:
    if names is None:
        if not full and of_network.device.type == "cuda" and of_network.dtype == torch.float32:
            return [torch.bfloat16]
        return (
            list(dict.fromkeys([of_network.dtype, *(getattr(torch, name) for name in DTYPES)]))
            if full
            else [of_network.dtype]
        )
    for name in names:
        if name not in DTYPES:
            raise UsageError(unknown("dtype", name, DTYPES))
    return [getattr(torch, name) for name in dict.fromkeys(names)]


def _tensor_of(model: nn.Module) -> Tensor:
    """Return a tensor on the network's device and in its dtype."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.detach() for tensor in tensors if tensor.is_floating_point()), torch.empty(0))


TOKENS, PASSES_TIMED = 4096, 100
_GB = 1e9
# 6.74 billion weights of two bytes; their gradients, and without recomputation what the backward pass of 4096 tokens
# needs besides.
_FORWARD_BYTES, _BACKWARD_BYTES = 16 * _GB, 70 * _GB
_NORMS: tuple[Norms, ...] = ("eager", "compile", "fused")


def why_not(device: torch.device, passes: Passes = "forward") -> str | None:
    """Why the table cannot be repeated on a device, in a sentence; None where it can.

    >>> why_not(torch.device("cpu"))
    'The published table is not repeated on the cpu: LLaMA 7B takes 13.5 GB of weights and 100 passes over 4096 tokens, which are hours without CUDA.'
    """  # noqa: E501 - one sentence
    if device.type != "cuda":
        return (
            f"The published table is not repeated on the {device.type}: LLaMA 7B takes 13.5 GB of weights and "
            f"{PASSES_TIMED} passes over {TOKENS} tokens, which are hours without CUDA."
        )
    there, needed = torch.cuda.get_device_properties(device).total_memory, _FORWARD_BYTES
    if passes != "forward":
        needed = _BACKWARD_BYTES
    if there < needed:
        return (
            f"The published table's passes {passes} are not run: they need {needed / _GB:.0f} GB for 13.5 GB of weights"
            f" and what else a pass over {TOKENS} tokens keeps, and the device has {there / _GB:.0f} GB."
        )
    return None


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
    """Repeat the published table with a network: the time of its norms, and its own, over so many passes.

    The norms' time is that of each class and shape alone, times how many there are.

    Args:
        model: ``llama_7b`` in bfloat16, with any weights; it is left as found. Another causal language model of
            transformers is timed just so, and is another table.
        curves: what takes the norms' places.
        tokens: of one sequence, drawn at random.
        n_passes: of each number.
        on_cpu: run it without CUDA too, with as many passes as are asked for.
        outputs: how to read what the network returns.
        progress: as of :func:`bench`.

    Raises:
        DeviceError: where :func:`why_not` says why, unless ``on_cpu``.
    """
    where = next(model.parameters())
    reason = why_not(where.device)
    if reason and not (on_cpu and where.device.type == "cpu"):
        raise DeviceError(reason)
    batch = of_tokens(model, tokens)
    notes = _differences(where, tokens, n_passes)
    rows: list[Latency] = []
    with left_as_found(model, timed=True), compilations():
        report = find_norms(model, batch)
        candidates = [one for one in variants(model, report.sites, curves) if one.name in (NATIVE, *curves)]
        shapes = [(site.name, site.kind, tuple(report.shapes[site.name])) for site in report.sites]
        by_name = {name: shape for name, _, shape in shapes}
        whole = ModelBench(model, batch, outputs or Outputs(), candidates, by_name, True)
        if not whole.fused:
            notes += without_kernels(where.device)
        for way, passes, one in itertools.product(_NORMS, PASSES, candidates):
            if way == "fused" and one not in whole.by_kernels(way, passes):
                continue
            too_little = why_not(where.device, passes) if where.is_cuda else None
            if too_little:
                notes.append(too_little)
                continue
            progress(f"{one.name}, {way} norms, {n_passes} passes {passes}", 0, 1)
            placed = _compiled(model, one, [name for name, *_ in shapes]) if way == "compile" else one
            with computed(way):
                layer = _norms_seconds(model, one, way, passes, shapes, n_passes)
                rows.append(Latency(one.name, way, passes, layer, whole.seconds(placed, passes, n_passes)))
    return PublishedReport(in_words(where.device), tuple(rows), tokens, n_passes, tuple(dict.fromkeys(notes)))


def of_tokens(model: nn.Module, number: int) -> Batch:
    """Return one sequence of so many random tokens for a causal language model of transformers, on its device."""
    numbers = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    ids = torch.randint(vocabulary, (1, number), generator=numbers).to(next(model.parameters()).device)
    return Batch((), {"input_ids": ids, "use_cache": False}, (Sample("random tokens", 0, 0),))


def _differences(where: torch.Tensor, tokens: int, n_passes: int) -> list[str]:
    ours = {"tokens": tokens, "passes": n_passes, "dtype": str(where.dtype).removeprefix("torch.")}
    theirs = {"tokens": TOKENS, "passes": PASSES_TIMED, "dtype": "bfloat16"}
    return [f"Ours has {name} {ours[name]}, the paper {theirs[name]}." for name in ours if ours[name] != theirs[name]]


def _compiled(model: nn.Module, one: Variant, names: Sequence[str]) -> Variant:
    """The same, each norm compiled by itself: what the paper compiles."""
    norms: Mapping[str, nn.Module] = one.modules or {name: module_at(model, name) for name in names}
    return Variant(one.name, {name: compiled(module) for name, module in norms.items()}, one.note)


def _norms_seconds(
    model: nn.Module,
    one: Variant,
    norms: Norms,
    passes: Passes,
    shapes: Sequence[tuple[str, str, tuple[int, ...]]],
    n_passes: int,
) -> float:
    """Seconds of all norms by themselves: one of each class and shape, times their number."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, kind, shape in shapes:
        alike.setdefault((kind, shape), []).append(name)
    total = 0.0
    for (kind, shape), names in alike.items():
        norm = Norm(names[0], kind, shape, len(names))
        bench = norm_bench(model, [one], norm, next(model.parameters()).detach())
        total += bench.seconds(one.name, norms, passes, n_passes) * len(names)
    return total
