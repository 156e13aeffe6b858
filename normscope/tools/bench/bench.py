"""Speed of a norm alone and of a whole network, with point-wise functions in place of the norms."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import platform
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from normscope.curves.expressions import split_names
from normscope.errors import ModelError, UsageError, count, first_line
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.norms.bound_inputs import unpacked
from normscope.norms.sites import NormSite
from normscope.norms.trace import NormReport, find_norms
from normscope.runtime.launches import TRITON, VARIABLE
from normscope.runtime.network import call, restoring, uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.runtime.spread import check_whole
from normscope.swaps.kernels import choice
from normscope.swaps.pointwise import PointwiseFunction, check_kernels
from normscope.swaps.replace import HOOKS, PRE_HOOKS, Swap, model_tensor, module_at, replacements
from normscope.swaps.start import RMS_NORM, replaceable, why_not_replaced
from normscope.tools.bench.reports import (
    FASTER,
    INCONCLUSIVE,
    NATIVE,
    NOT_RUN,
    PASSES,
    SLOWER,
    BenchReport,
    Passes,
    Timing,
    Way,
)

CURVES = ("dyt", "dyisru", "derf")
IDENTITY = "identity"
ROUNDS = 5
_BLOCK_SECONDS = 0.02  # per sample of a short call: a hundred times the overhead of clock and loop
# Three samples that all lie below three others are one draw in twenty where nothing differs; two are one in six.
_LEAST_SAMPLES = 3
_COMPILATIONS = 1000
_WAYS: tuple[tuple[Way, ...], ...] = (("eager", "fused"), ("compile",))  # those that take turns are together

Run = Callable[[], object]


def bench(
    model: nn.Module | LoadedModel,
    batch: Batch | None = None,
    curves: str | Sequence[str] = CURVES,
    *,
    full: bool = False,
    quick: bool = False,
    outputs: Outputs | None = None,
    about: dict[str, str] | None = None,
    progress: Progress = silent,
) -> BenchReport:
    """Time a network's native norms, an RMSNorm, the identity and point-wise functions in their places.

    The norm alone is the most common class and shape of the network's norms, on random values, forward and forward +
    backward: in plain torch (``eager``), by torch.compile (``compile``), and by normscope's kernels
    (``fused``, :mod:`normscope.swaps.kernels.choice`; on the CPU forward alone). The whole network runs on the batch in
    eval mode, forward, eager and fused; its backward pass computes the gradients of all parameters for a sum of squares
    of the output. Candidates take turns, so that a drift of the machine's speed affects all of them. The timer is
    torch.utils.benchmark on the CPU and triton.testing.do_bench on CUDA.

    Args:
        model: a result of :func:`normscope.load`, or any module; it does not change.
        batch: the input, on the network's device and in its dtype. None for a loaded model's first batch; on a CPU, for
            that batch's first sample.
        curves: names of curves that need no fit.
        full: also time the whole network compiled, and forward + backward.
        quick: take one round instead of five, and compile nothing.
        outputs: reader of the network's output; a loaded model has its own.
        about: model, weights and data, for the report.
        progress: called with the next step, 0 and 1.

    Raises:
        UsageError: if there is no such curve, a module comes without a batch, or ``NORMSCOPE_KERNELS`` asks for kernels
            that cannot run here.
        ModelError: if the network has no norm, is spread over ranks or devices, or does not run on the batch.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> report = bench(model, Batch((torch.ones(2, 4),)), ["dyt"], quick=True)
    >>> [row.variant for row in report.rows if row.scope == "model"]
    ['native', 'rmsnorm', 'identity', 'dyt']
    >>> import normscope
    >>> bench(normscope.load("demo_vit", device="cpu"), curves="dyt", quick=True).about["data"]
    '1 sample of 64 held-out digits'
    """
    if full and quick:
        raise UsageError("quick takes the fewest timings; leave full out.")
    model, batches, about, outputs = unpacked(model, None if batch is None else [batch], about, outputs)
    check_whole(model, "A timing", but=("quantized",))
    if batch is None:
        batch = next(iter(batches))
        batch = batch.first_sample() if model_tensor(model).device.type == "cpu" else batch
        about["data"] = f"{count(len(batch.samples), 'sample')} of {about['data']}"
    batch = batch if isinstance(batch, Batch) else next(iter(batches))
    inner, device = uncompiled(model), model_tensor(model, torch.empty(0)).device
    batch = batch.to(device, None)
    rounds = 1 if quick else ROUNDS
    rows: list[Timing] = []
    with restoring(inner, timed=True), compilations():
        progress("looking for norms", 0, 1)
        network_norms = find_norms(inner, batch)
        report = replace(network_norms, sites=replaceable(network_norms.sites))
        candidates = variants(inner, report.sites, curves)
        check_kernels([module for variant in candidates for module in variant.modules.values()])
        shapes = {site.name: tuple(report.shapes[site.name]) for site in report.sites}
        for passes in PASSES:
            for ways in _WAYS[: 1 if quick else 2]:
                progress(f"the norm alone, {' and '.join(ways)}, {passes}", 0, 1)
                rows += sampled(norm_cases(inner, candidates, commonest(report), ways, passes), device, rounds)
        for ways, passes in itertools.product(_WAYS, PASSES) if full else [(_WAYS[0], PASSES[0])]:
            progress(f"the whole network, {' and '.join(ways)}, {passes}", 0, 1)
            cases = network_cases(inner, batch, outputs, candidates, shapes, ways, passes)
            rows += sampled(cases, device, rounds) if ways == _WAYS[0] else compiled_one_by_one(cases, device, rounds)
    left_out = [] if full else ["Left to --full: the whole network compiled, and forward + backward."]
    if left := why_not_replaced(network_norms.sites):
        left_out.insert(0, f"Not all norms are replaced: {left}.")
    if device.type == "cuda" and not any(row.way == "fused" for row in rows):
        reason = choice.why_not_on(device) or "there is none for these functions in this dtype"
        left_out.append(f"Fused by normscope's kernels: none is timed: {reason}.")
    if os.environ.get(VARIABLE) == TRITON and device.type != "cuda":
        left_out.append("Fused rows ran in Triton's interpreter on the CPU, not on a GPU: the time says nothing.")
    return BenchReport(about, in_words(device), tuple(with_verdicts(rows)), tuple(left_out))


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
    """Allow one code object to be compiled for every curve and pass, and forget all of it afterwards.

    Beyond torch's limit of 8 it would silently run uncompiled. Inductor reads the CPU's instruction sets from its
    flags, instead of compiling a program for each, which takes 10 seconds and more.
    """
    dynamo = {"recompile_limit": _COMPILATIONS, "accumulated_recompile_limit": _COMPILATIONS}
    try:
        with torch._dynamo.config.patch(dynamo), torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            yield
    finally:
        torch._dynamo.reset()


@dataclass(frozen=True)
class Variant:
    """Replacements of the norms: ``native`` for the norms themselves, ``rmsnorm``, ``identity``, or a curve."""

    name: str
    modules: dict[str, nn.Module]  # by module path; none for ``native``
    note: str = ""  # the norms that it cannot replace, and why


def variants(model: nn.Module, sites: Sequence[NormSite], curves: str | Sequence[str]) -> list[Variant]:
    """Make replacements on the norms' device and in their dtype: native, rmsnorm, identity and the curves.

    The network stays as it is; ``curves`` are names, or names separated by commas.
    """
    asked = split_names(curves) if isinstance(curves, str) else curves
    names = dict.fromkeys((RMS_NORM, IDENTITY, *(name.strip().lower() for name in asked)))
    names.pop(NATIVE, None)
    result = [Variant(NATIVE, {})]
    for name in names:
        modules: dict[str, nn.Module] = {}
        reasons: list[str] = []
        for site in sites:
            try:
                modules |= replacements(model, name, [site], init="paper")
            except ModelError as error:
                reasons.append(str(error))
        note = f"{len(reasons)} of {len(sites)} norms left as they are: {reasons[0]}" if reasons else ""
        result.append(Variant(name, modules, note))
    return result


@dataclass(frozen=True)
class Norm:
    """The path of the first of several norms of one class and input shape, the shape, and their number."""

    name: str
    shape: tuple[int, ...]
    sites: int


def distinct(report: NormReport) -> list[Norm]:
    """Return the classes and shapes of a network's norms, in the order of their first calls."""
    names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for site in report.sites:
        names.setdefault((site.kind, tuple(report.shapes[site.name])), []).append(site.name)
    return [Norm(alike[0], shape, len(alike)) for (_, shape), alike in names.items()]


def commonest(report: NormReport) -> Norm:
    """Return the most common class and shape of a network's norms; of equally common ones, the first called."""
    return max(distinct(report), key=lambda norm: norm.sites)


def has_kernel(module: nn.Module, shape: Sequence[int], passes: Passes) -> bool:
    """True if normscope's kernels compute a module on its device, in its dtype, for an input of this shape.

    The CPU's loop computes the forward pass alone.
    """
    if not isinstance(module, PointwiseFunction) or module.curve.function_name not in choice.CURVES:
        return False
    key = (module.curve.function_name, module.alpha.device, module.alpha.dtype)
    return choice.by_kernels(*key) or (passes == "forward" and choice.loop_for(*key, math.prod(shape)) is not None)


@dataclass(frozen=True)
class Case:
    """A row without samples, and a context that yields the call to be timed; None if there is nothing to call."""

    row: Timing
    prepared: Callable[[], contextlib.AbstractContextManager[Run]] | None


def norm_cases(
    model: nn.Module, candidates: Sequence[Variant], norm: Norm, ways: Sequence[Way], passes: Passes
) -> list[Case]:
    """Return the cases of the norm alone, on random values of the device and dtype of the network."""
    where = model_tensor(model, torch.empty(0))
    generator = torch.Generator(where.device).manual_seed(0)
    x, dy = (torch.randn(norm.shape, generator=generator, device=where.device).to(where.dtype) for _ in range(2))
    x.requires_grad_(passes != "forward")
    dtype = str(x.dtype).removeprefix("torch.")
    cases = []
    for way, variant in itertools.product(ways, candidates):
        module = module_at(model, norm.name) if variant.name == NATIVE else variant.modules.get(norm.name)
        if way == "fused" and (module is None or not has_kernel(module, norm.shape, passes)):
            continue
        row = Timing(variant.name, way, "norm", passes, dtype, norm.shape, norm.sites)
        if module is None:
            cases.append(Case(replace(row, note=variant.note), None))
            continue
        module = _without_hooks(module)
        called = torch.compile(module, fullgraph=True, dynamic=False) if way == "compile" else module
        parameters = require_gradients(module)

        def run(called: Callable[[Tensor], Tensor] = called, parameters: Sequence[Tensor] = parameters) -> object:
            if passes == "forward":
                return called(x)
            with torch.enable_grad():
                return torch.autograd.grad(called(x), [x, *parameters], dy, allow_unused=True)

        cases.append(Case(row, functools.partial(_ready, run)))
    return cases


@contextlib.contextmanager
def _ready(run: Run) -> Iterator[Run]:
    yield run


def network_cases(
    model: nn.Module,
    batch: Batch,
    outputs: Outputs,
    candidates: Sequence[Variant],
    shapes: Mapping[str, Sequence[int]],
    ways: Sequence[Way],
    passes: Passes,
) -> list[Case]:
    """Return the cases of the whole network; ``shapes`` are of each norm's input."""
    values = (*batch.args, *batch.kwargs.values())
    shape = next((tuple(value.shape) for value in values if isinstance(value, Tensor)), ())
    dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
    called = cast(nn.Module, torch.compile(model, dynamic=False)) if "compile" in ways else model

    @contextlib.contextmanager
    def swapped_in(variant: Variant) -> Iterator[Run]:
        with Swap(model, variant.modules), contextlib.ExitStack() as restored:
            for parameter in model.parameters():
                restored.callback(parameter.requires_grad_, parameter.requires_grad)
            parameters = require_gradients(model) if passes != "forward" else []

            def run() -> object:
                inputs = batch.copied()  # the network may modify them
                if not parameters:
                    return call(called, inputs)
                with torch.enable_grad():
                    output = outputs.read(call(called, inputs), inputs)
                    return torch.autograd.grad(output.float().square().sum(), parameters, allow_unused=True)

            yield run

    cases = []
    for way, variant in itertools.product(ways, candidates):
        fused = any(has_kernel(module, shapes[name], passes) for name, module in variant.modules.items())
        if way == "fused" and not fused:
            continue
        sites = len(shapes if variant.name == NATIVE else variant.modules)
        name = str(dtype).removeprefix("torch.")
        row = Timing(variant.name, way, "model", passes, name, shape, sites, note=variant.note)
        exists = variant.name == NATIVE or variant.modules
        cases.append(Case(row, functools.partial(swapped_in, variant) if exists else None))
    return cases


def require_gradients(module: nn.Module) -> list[Tensor]:
    """Make every parameter require gradients, and return the parameters."""
    return [parameter.requires_grad_() for parameter in module.parameters() if parameter.is_floating_point()]


def _without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy that does not run the hooks of the network, nor copy what they refer to."""
    hooks = [getattr(owner, name) for owner in module.modules() for name in (*PRE_HOOKS, *HOOKS)]
    return copy.deepcopy(module, {id(registered): OrderedDict() for registered in hooks})


def sampled(cases: Sequence[Case], device: torch.device, rounds: int) -> list[Timing]:
    """Time cases in turns. One that fails, for example in a compiler, gets a note, and the others are timed."""
    samples: list[list[float]] = [[] for _ in cases]
    failed: dict[int, str] = {}
    for _ in range(rounds):
        for i, case in enumerate(cases):
            if case.prepared is None or i in failed:
                continue
            try:
                with computed(case.row.way), case.prepared() as run:
                    samples[i] += times_of(run, device)
            except Exception as error:
                failed[i] = str(error).partition("\n")[0] if isinstance(error, ModelError) else first_line(error)
    return [
        replace(case.row, note=failed[i]) if i in failed else replace(case.row, samples=tuple(samples[i]))
        for i, case in enumerate(cases)
    ]


def compiled_one_by_one(cases: Sequence[Case], device: torch.device, rounds: int) -> list[Timing]:
    """Time compiled networks, of which there is one at a time: replacing norms compiles the network anew."""
    rows = []
    for case in cases:
        torch._dynamo.reset()
        rows += sampled([case], device, rounds)
    return rows


@contextlib.contextmanager
def computed(way: Way) -> Iterator[None]:
    """Context in which networks are computed in a way: compiled or not, and by kernels or in plain torch."""
    with contextlib.ExitStack() as choices:
        if way != "fused":
            choices.enter_context(choice.plain_torch())
        if way != "compile":
            choices.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def times_of(run: Run, device: torch.device) -> list[float]:
    """Time a call, after a warm-up: seconds per call, several samples if it is short."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return [milliseconds / 1e3 for milliseconds in do_bench(run, return_mode="all")]
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return list(timer.blocked_autorange(min_run_time=_BLOCK_SECONDS).times)


def with_verdicts(rows: Sequence[Timing]) -> list[Timing]:
    """Add medians and quartiles, and compare each row with the native norm: the eager one for ``fused``."""
    rows = [_measured(row) for row in rows]
    natives = {_setting(row): row for row in rows if row.variant == NATIVE}
    result = []
    for row in rows:
        native = natives.get(_setting(row))
        if row.median is not None and row.variant != NATIVE and native and native.median is not None:
            row = replace(row, ratio=row.median / native.median, verdict=_verdict(row, native))
        result.append(row)
    return result


def _measured(row: Timing) -> Timing:
    if not row.samples:
        return replace(row, verdict=NOT_RUN)
    p25, median, p75 = (float(value) for value in np.quantile(row.samples, (0.25, 0.5, 0.75)))
    return replace(row, p25=p25, median=median, p75=p75)


def _setting(row: Timing) -> tuple[str, str, str]:
    return "eager" if row.way == "fused" else row.way, row.scope, row.passes


def _verdict(row: Timing, native: Timing) -> str:
    if min(len(row.samples), len(native.samples)) < _LEAST_SAMPLES:
        return INCONCLUSIVE
    if row.p75 < native.p25:  # type: ignore[operator]
        return FASTER
    return SLOWER if row.p25 > native.p75 else INCONCLUSIVE  # type: ignore[operator]
