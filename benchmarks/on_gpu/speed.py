"""How long the kernels take, beside everything that computes the same or takes their place."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch._functorch.config
from common import Measurement
from on_gpu import contenders
from on_gpu.contenders import CURVES, PUBLISHED, Contender, Operands, compiled, described, norms, operands
from on_gpu.figures import ADD, BACKWARD, COPY, FORWARD, NEGATIVE, RATE, Key, case_of, medians_of, rates, shares, table
from on_gpu.parts import Found, Part, Setting
from on_gpu.timers import DO_BENCH, GRAPH, ROUNDS, Times, one_stream, timed

from normscope.swaps.bench.bench import compilations
from normscope.swaps.kernels.choice import TRITON, VARIABLE

SHAPES = ((25216, 768), (4096, 4096), (32768, 4096), (131072, 1152))
TINY = ((24, 40),)
DTYPES = ("bfloat16", "float16", "float32")
SECONDS, TUNED_SECONDS = 240, 300
_COMPILING, _ENDING = 0.5, 0.85  # of a part's limit: after that, nothing more is compiled, and no sample begun
_SENTENCES = 20
Sampler = Callable[[], Times]


def parts(setting: Setting) -> list[Part]:
    """Return a part a shape and dtype, bfloat16 first; then the same with what torch.compile takes long to tune."""
    made = [
        Part(f"speed {dtype} {shape[0]}x{shape[1]}", run, (shape, dtype, False), SECONDS)
        for dtype in DTYPES
        for shape in shapes(setting)
    ]
    return made + [
        Part(f"speed max-autotune {dtype} {shape[0]}x{shape[1]}", run, (shape, dtype, True), TUNED_SECONDS)
        for dtype in (DTYPES[:1] if setting.rehearsal else DTYPES)
        for shape in shapes(setting)
    ]


def shapes(setting: Setting) -> Sequence[tuple[int, int]]:
    """Return rows and channels."""
    return TINY if setting.rehearsal else SHAPES


@dataclass
class Ready:
    """What is timed, and what is not.

    Attributes:
        samplers: of what was found right.
        measurements: how long the first calls took.
        failures: of normscope's own.
        left_out: of all others.
    """

    samplers: dict[Key, Sampler] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def run(setting: Setting, shape: tuple[int, int], dtype: str, tuned: bool) -> Found:
    """Time all of them, forward and backward, in two rounds."""
    begun, limit = time.monotonic(), TUNED_SECONDS if tuned else SECONDS
    kept = torch._functorch.config.patch(donated_buffer=False)  # a compiled backward pass runs more than once
    with mock.patch.dict(os.environ, {VARIABLE: TRITON}), compilations(), kept, one_stream(setting):
        sets = operands(shape, getattr(torch, dtype), setting.device)
        ready = Ready(_floors(setting, sets))
        for contender in _contenders(setting, shape[1], dtype, tuned, begun + _COMPILING * limit, ready):
            _prepare(setting, contender, sets, case_of(contender.of, "{}", dtype, shape, tuned), ready)
        with contextlib.suppress(Exception):  # clocks rise; what is wrong with it is said when it is timed
            ready.samplers[COPY, COPY, FORWARD]()
        taken = in_rounds(ready, begun + _ENDING * limit)
    measurements = ready.measurements + measured(taken, dtype, shape, tuned)
    return Found(measurements, first_of(ready.failures), first_of(ready.left_out))


def first_of(sentences: Sequence[str]) -> list[str]:
    """Return so many that they can be read, and how many more there are.

    >>> first_of(["a"] * 22)[-2:]
    ['a', 'And 2 more.']
    """
    more = len(sentences) - _SENTENCES
    return [*sentences[:_SENTENCES], *([f"And {more} more."] if more > 0 else [])]


def _contenders(
    setting: Setting, channels: int, dtype: str, tuned: bool, until: float, ready: Ready
) -> Iterator[Contender]:
    """Yield them, those first that the others are worth nothing without, others' packages last."""
    where = getattr(torch, dtype), setting.device
    ours, plain = [], []
    for curve in CURVES:
        for one in contenders.pointwise(curve, channels, *where):
            (ours if one.ours else plain).append(one)
    yield from ours
    yield from norms(channels, *where)
    if not tuned:
        yield from plain
    # In float32 the two ways to write it are one. Tuned, the one that computes in x's dtype is enough to wait for.
    plain = [one for one in plain if one.way.endswith(PUBLISHED) or not (tuned or dtype == "float32")]
    for one in [*plain, *norms(channels, *where)]:
        if time.monotonic() > until:
            ready.left_out.append(f"{one.of} by torch.compile, {one.way}, {dtype}: there was no time left to compile.")
        else:
            yield compiled(one, tuned, setting.rehearsal)
    for peer in () if tuned else contenders.peers(channels, *where):
        if isinstance(peer, str):
            ready.left_out.append(f"{peer}; it is not timed.")
        elif time.monotonic() > until:
            ready.left_out.append(f"{peer.of} by {peer.way}, {dtype}: there was no time left to compile.")
        else:
            yield peer


def _floors(setting: Setting, sets: Sequence[Operands]) -> dict[Key, Sampler]:
    """Return a copy of x's size, and what moves the bytes of a pass in a kernel: −x, and the sum of two tensors.

    The driver copies as it likes, in a CUDA graph otherwise than outside of it; −x shows whether that is a fair floor.
    """
    return {
        (COPY, COPY, FORWARD): lambda: timed(setting, lambda own: own.out.copy_(own.x), sets),
        (NEGATIVE, NEGATIVE, FORWARD): lambda: timed(setting, lambda own: torch.neg(own.x, out=own.out), sets),
        (ADD, ADD, BACKWARD): lambda: timed(setting, lambda own: torch.add(own.x, own.dy, out=own.out), sets),
    }


def _prepare(setting: Setting, contender: Contender, sets: Sequence[Operands], case: str, ready: Ready) -> None:
    begun = time.monotonic()
    try:
        why = contenders.wrong(contender, sets[0])
    except Exception as error:
        why = f"{case.format('forward and backward')} by {contender.way}: {described(error)}; it is not timed."
    if why:
        (ready.failures if contender.ours else ready.left_out).append(why)
        return
    seconds = [time.monotonic() - begun]
    ready.measurements.append(Measurement(case.format("at all"), contender.way, "first calls", "s", seconds, False))

    def backward() -> Times:
        return timed(setting, lambda again: again(), [contender.backward(own) for own in sets])

    if contender.back is None:
        ready.samplers[contender.of, contender.way, FORWARD] = lambda: timed(setting, contender.forward, sets)
    ready.samplers[contender.of, contender.way, BACKWARD] = backward


def in_rounds(ready: Ready, until: float) -> dict[Key, list[Times]]:
    """Take the samples of each round apart, every second round from the last to the first."""
    gc.collect()
    taken: dict[Key, list[Times]] = {key: [] for key in ready.samplers}
    failed: dict[Key, str] = {}
    late: dict[int, int] = {}
    for number in range(ROUNDS):
        for key in list(taken)[:: -1 if number % 2 else 1]:
            if key in failed:
                continue
            if time.monotonic() > until:
                late[number + 1] = late.get(number + 1, 0) + 1
                continue
            try:
                taken[key].append(ready.samplers[key]())
            except Exception as error:
                failed[key] = f"{' by '.join(key[:2])}, {key[2]}, while it was timed: {described(error)}"
    ready.failures.extend(why for key, why in failed.items() if key[1] in (contenders.OURS, contenders.OPERATOR))
    ready.left_out.extend(why for key, why in failed.items() if key[1] not in (contenders.OURS, contenders.OPERATOR))
    ready.left_out.extend(f"Round {number}: for {count} of {len(taken)} no time." for number, count in late.items())
    return taken


def measured(
    taken: Mapping[Key, Sequence[Times]], dtype: str, shape: tuple[int, int], tuned: bool
) -> list[Measurement]:
    """Return all samples, what they come to, and the rows of the short table."""
    made: list[Measurement] = []
    elements, itemsize = shape[0] * shape[1], getattr(torch, dtype).itemsize
    for timer in (GRAPH, DO_BENCH):
        medians = {key: medians_of([times[timer] for times in rounds]) for key, rounds in taken.items() if rounds}
        rate = rates(medians, elements, itemsize)
        found = {
            ("time", "µs"): medians,
            ("rate", "GB/s"): rate,
            (RATE, "%"): shares(rate, (COPY, COPY, FORWARD)),
            ("of the add's rate", "%"): shares(rate, (ADD, ADD, BACKWARD)),
        }
        for key, rounds in taken.items():
            case = case_of(key[0], key[2], dtype, shape, tuned)
            for number, times in enumerate(rounds, 1):
                samples = f"{timer}, samples of round {number}"
                made.append(Measurement(case, key[1], samples, "µs", times[timer], shown=False))
            for (quantity, unit), values in found.items():
                if values.get(key):
                    made.append(Measurement(case, key[1], f"{timer}, {quantity}", unit, values[key], shown=False))
        if timer == GRAPH:
            for passes in (FORWARD, BACKWARD):
                for of in CURVES.values():
                    made += table(medians, of, passes, dtype, shape, tuned)
    return made
