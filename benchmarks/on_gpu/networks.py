"""Whole networks on a GPU: with their norms, without, and with point-wise functions; and the published table."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import torch
from common import Measurement
from on_gpu.loading import WEIGHTS, load
from on_gpu.parts import Found, Part, Setting
from speed import of_rows

import normscope
from normscope.swaps.bench.bench import CURVES, PASSES_TIMED, TOKENS, published
from normscope.swaps.bench.reports import (
    COPY,
    NATIVE,
    NOT_RUN,
    PASSES,
    SOURCE,
    Case,
    Latency,
    Passes,
    Scope,
    Timing,
    Way,
)
from normscope.swaps.kernels.choice import TRITON, VARIABLE

DTYPE = "bfloat16"
NUMBERS = {"vit_b16": 64, "wav2vec2_large": 8, "dit_xl": 32, "llama_7b": TOKENS}
TINY = {"vit_b16": 2, "wav2vec2_large": 1, "dit_xl": 2, "llama_7b": 8}
EAGER: tuple[Way, ...] = ("eager", "fused")
COMPILED: tuple[Way, ...] = ("compile", "compile + fused")
# What is compiled takes a compilation of the whole network each, so that the first of these go before the others.
FIRST, OTHERS = (NATIVE, "identity", "dyt"), (NATIVE, "rmsnorm", "dyisru", "derf")
EVERY = tuple(dict.fromkeys(FIRST + OTHERS))
LIMITS = {  # seconds: eager, and for each of three compiled networks forward, and forward + backward
    "vit_b16": (240, 180, 300),
    "wav2vec2_large": (240, 300, 420),
    "dit_xl": (240, 300, 420),
    "llama_7b": (360, 360, 450),
}
BUDGETS: dict[Scope, float] = {"norm": 12.0, "model": 20.0}  # seconds, for rounds beyond the fewest
PASSES_OF_THE_TABLE = 25  # a quarter of the paper's: its 100 would take half of what a command may
SAMPLES = 50
LIGERS = ", Liger"  # as normscope.bench ends the name of what Liger computes


def parts(setting: Setting) -> list[Part]:
    """Return the parts: of each network what is soon done, then what has to be compiled, the most telling first."""
    eager = [
        Part(f"networks eager {model}", compared, (model, EAGER, PASSES, EVERY), seconds)
        for model, (seconds, *_) in LIMITS.items()
    ]
    compiled = [
        Part(f"networks {name} {model} {passes}", compared, (model, COMPILED, (passes,), variants), seconds)
        for variants, name in ((FIRST, "compiled"), (OTHERS, "others compiled"))
        for number, passes in enumerate(PASSES)
        for model, (_, *limits) in LIMITS.items()
        for seconds in limits[number : number + 1]
    ]
    table = Part("networks published llama_7b", published_table, (), 420)
    middle = len(LIMITS)
    return [*eager, *compiled[:middle], table, *compiled[middle:]]


def compared(
    setting: Setting, model: str, ways: Sequence[Way], passes: Sequence[Passes], variants: Sequence[str]
) -> Found:
    """Time the norm alone and the whole network."""
    try:
        network = load(model, (TINY if setting.rehearsal else NUMBERS)[model], DTYPE, setting)
    except ImportError as error:
        return Found(left_out=[f"{model}: {error}: its library has to be installed here."])
    if setting.rehearsal:
        variants = (variants[0], variants[-1])
    gc.collect()
    gc.freeze()  # a CUDA graph's capture collects garbage, and would look at all of torch each time
    rows: list[Timing] = []
    left_out: list[str] = []

    def timed(scope: Scope, those: Passes, case: Case) -> bool:
        variant = case.variant.removesuffix(LIGERS)
        return (case.scope, case.passes) == (scope, those) and case.way in ways and variant in (*variants, COPY)

    with _rehearsed(setting):
        for scope in BUDGETS:
            for those in passes:
                report = normscope.bench(
                    network.module,
                    network.batch,
                    [curve for curve in CURVES if curve in variants],
                    dtypes=[DTYPE],
                    full=True,
                    budget=2.0 if setting.rehearsal else BUDGETS[scope],
                    outputs=network.outputs,
                    only=functools.partial(timed, scope, those),
                    progress=lambda step: print(f"  {step}", flush=True),
                )
                rows += report.rows
                left_out += report.left_out
    failures = [sentence for row in rows for sentence in failures_of(model, row)]
    notes = [sentence for row in rows for sentence in notes_of(model, row)]
    return Found(
        [*measured(network.name, rows), *faster_compiled(network.name, rows)], failures, unique(left_out + notes)
    )


def failures_of(model: str, row: Timing) -> Iterator[str]:
    """Say what did not run that could have: what cannot take a norm's place, or is another's, is no failure of ours."""
    if row.verdict == NOT_RUN and "left as they are" not in row.note and not row.variant.endswith(LIGERS):
        yield f"{model}: {row.variant}, {row.way}, {row.scope}, {row.passes}: did not run: {row.note}"


def notes_of(model: str, row: Timing) -> Iterator[str]:
    """Say which norms a variant did not replace, and why another's is not timed."""
    if "left as they are" in row.note:
        yield f"{model}: {row.variant}: {row.note}"
    elif row.verdict == NOT_RUN and row.variant.endswith(LIGERS):
        yield f"{model}: {row.variant}, {row.passes}: did not run: {row.note}"


def measured(name: str, rows: Iterable[Timing]) -> Iterator[Measurement]:
    """Turn timings into measurements, with what can be claimed in words; whole networks' ratios are shown."""
    for row in rows:
        timer = f", {row.timer}" if row.scope == "norm" else ""
        verdict = f": {row.verdict}" if row.verdict else ""
        for one in of_rows(name, [row]):
            shown = row.scope == "model" and row.variant in FIRST
            shown = shown and (one.quantity == "of native" or (one.quantity, row.variant) == ("time", NATIVE))
            yield replace(one, way=f"{one.way}{timer}{verdict}", samples=thinned(one.samples), shown=shown)
        if row.compile_seconds is not None and row.samples:
            case = next(of_rows(name, [row])).case
            yield Measurement(case, f"{row.variant}, {row.way}", "compiling", "s", [row.compile_seconds], shown=False)


def faster_compiled(name: str, rows: Sequence[Timing]) -> Iterator[Measurement]:
    """Set a compiled network with kernels beside the same one without: the default there is to be the faster."""
    plain = {(row.variant, row.scope, row.passes): row for row in rows if row.way == "compile"}
    for row in rows:
        beside = plain.get((row.variant, row.scope, row.passes))
        if row.way == "compile + fused" and beside and row.samples and beside.samples:
            case = next(of_rows(name, [row])).case
            over = row.median / beside.median
            yield Measurement(case, f"{row.variant}, {row.way}: {row.verdict}", "of compile", "×", [over])


def published_table(setting: Setting) -> Found:
    """Repeat the published table, and set the paper's numbers beside ours: milliseconds a pass of either."""
    try:
        network = load("llama_7b", TINY["llama_7b"] if setting.rehearsal else 1, DTYPE, setting)
    except ImportError as error:
        return Found(left_out=[f"llama_7b: {error}: its library has to be installed here."])
    sizes = {"tokens": TINY["llama_7b"], "n_passes": 2} if setting.rehearsal else {"n_passes": PASSES_OF_THE_TABLE}
    with _rehearsed(setting):
        report = published(
            network.module,
            outputs=network.outputs,
            on_cpu=setting.rehearsal,
            progress=lambda step: print(f"  {step}", flush=True),
            **sizes,
        )
    case = f"{network.name}, one sequence of {report.tokens:,} tokens"
    ours = [one for row in report.rows for one in cells(case, row, report.n_passes)]
    theirs = [one for row in report.published for one in cells(f"LLaMA 7B, {SOURCE}", row, PASSES_TIMED)]
    return Found([*ours, *theirs], left_out=[f"The published table, {WEIGHTS}: {note}" for note in report.notes])


def cells(case: str, row: Latency, n_passes: int) -> Iterator[Measurement]:
    """Turn a row of the published table into measurements."""
    for quantity, seconds in (("its norms", row.layer), ("the network", row.model)):
        way = f"{row.variant}, {row.norms}"
        yield Measurement(f"{case}, {row.passes}", way, quantity, "ms a pass", [1000 * seconds / n_passes])


def thinned(samples: Sequence[float]) -> list[float]:
    """Return at most 50 of the samples, evenly over all.

    >>> thinned([1.0, 2.0]), len(thinned([0.0] * 1234))
    ([1.0, 2.0], 50)
    """
    if len(samples) <= SAMPLES:
        return list(samples)
    return [samples[index * len(samples) // SAMPLES] for index in range(SAMPLES)]


def unique(sentences: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(sentences))


def _rehearsed(setting: Setting) -> contextlib.ExitStack:
    """Rehearse with kernels on the CPU, and without inductor, which takes minutes there."""
    changed = contextlib.ExitStack()
    if setting.rehearsal:
        compiling = functools.partial(torch.compile, backend="aot_eager")
        changed.enter_context(mock.patch.object(torch, "compile", compiling))
        changed.enter_context(mock.patch.dict(os.environ, {VARIABLE: TRITON}))
    return changed
