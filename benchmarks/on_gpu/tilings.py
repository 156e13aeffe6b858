"""What tuning needs: whether instructions bind the forward pass, and other tiles than those that were chosen."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch
from common import Measurement, ratios
from disassembly import code_of_launch
from machine_code import executed
from on_gpu import contenders
from on_gpu.contenders import CURVES, Operands, described, operands, own_parameters
from on_gpu.figures import BACKWARD, FORWARD, by_round, case_of, medians_of
from on_gpu.parts import Found, Part, Setting
from on_gpu.speed import DTYPES, SHAPES, first_of, shapes
from on_gpu.timers import GRAPH, ROUNDS, by_graph, by_wall_clock, one_stream
from torch import Tensor

from normscope.swaps.kernels import launch as launches_of_kernels
from normscope.swaps.kernels.choice import TRITON, VARIABLE
from normscope.swaps.kernels.eager import Gradients
from normscope.swaps.kernels.launch import LANES, Launch, Tiling, backward_launches, forward_launch, multiprocessors
from normscope.swaps.kernels.parameters import layout_of

SWEPT = ("tanh", "erf")  # the fewest instructions and the most, and registers likewise; isru lies between
# None of them spills on sm_90, in bfloat16 or float32: tests/benchmarks/test_gpu_speed.py compiles them.
TILINGS = {
    FORWARD: tuple(
        Tiling(warps, loads)
        for warps, loads in (
            (4, 1), (4, 2), (4, 4), (4, 16), (8, 1), (8, 2), (8, 4), (8, 8), (2, 4), (2, 8), (16, 2), (1, 8),
        )
    ),
    BACKWARD: tuple(
        Tiling(*numbers)
        for numbers in (
            (4, 1, 1, 3, 168), (4, 1, 2, 3, 168), (4, 1, 4, 2, 248), (4, 1, 6, 2, 248), (4, 2, 2, 2, 248),
            (4, 1, 2, 4, 128), (4, 1, 4, 4, 128), (8, 1, 2, 2, 128), (8, 1, 4, 1, 248), (2, 1, 4, 6, 168),
            (2, 1, 2, 8, 128), (16, 1, 2, 1, 128),
        )
    ),
}  # fmt: skip
OWN = {FORWARD: "FORWARD", BACKWARD: "BACKWARD"}  # the names of the defaults
ALIKE = 0.01  # of the largest: sums in another order may be rounded to the next number of half precision
ISSUE_SHAPES = SHAPES[2:]
TINY_CALL = (8, 64)


@dataclass(frozen=True)
class Prepared:
    """Launches on one buffer set, and the tensors that they fill."""

    launches: list[Launch]
    filled: list[Tensor]

    def run(self) -> None:
        for launch in self.launches:
            launch.run()


def parts(setting: Setting) -> list[Part]:
    """Return what is asked first, then a part for each pass and size, then what the host takes."""
    sizes = [("bfloat16", shape) for shape in shapes(setting)] + [("float32", shapes(setting)[-1])]
    return [
        *(Part(f"tilings issue {dtype}", issue, (dtype,), 90) for dtype in DTYPES[:2]),
        *(
            Part(f"tilings {passes} {dtype} {shape[0]}x{shape[1]}", sweep, (passes, dtype, shape), seconds)
            for passes, seconds in ((FORWARD, 100), (BACKWARD, 150))
            for dtype, shape in sizes
        ),
        Part("tilings host", host, (), 150),
    ]


def prepared(passes: str, curve: str, own: Operands) -> Prepared:
    """Return the launches of a pass as a layer with all its parameters has them."""
    parameters = own_parameters(curve, own.x.shape[1], own.x.dtype, own.x.device.type).each(Tensor.detach)
    layout, layout_backward = (layout_of([own.x] * tensors, 1, 2) for tensors in (2, 3))
    assert layout is not None and layout_backward is not None  # noqa: S101 - one tensor shares its layout with itself
    if passes == FORWARD:
        return Prepared([forward_launch(own.x, own.out, parameters, layout, curve)], [own.out])
    by_parameters = vars(parameters.each(torch.empty_like)).values()
    gradients = Gradients(own.out, *by_parameters)
    launches = backward_launches(own.dy, own.x, parameters, gradients, layout_backward, curve)
    return Prepared(launches, [part for part in gradients if part is not None])


def issue(setting: Setting, dtype: str) -> Found:
    """Time forward launches of the same bytes and of more and more instructions, beside the copy."""
    found = Found()
    with one_stream(setting):
        for shape in shapes(setting) if setting.rehearsal else ISSUE_SHAPES:
            sets = operands(shape, getattr(torch, dtype), setting.device)
            by_graph(setting, _copy, sets)  # clocks rise
            copy = _timed(setting, case_of("copy", FORWARD, dtype, shape), "copy", _copy, sets, found)
            for curve in CURVES:
                for precise in (False, True) if curve != "isru" else (False,):  # it has one function for both
                    each = [with_function(prepared(FORWARD, curve, own).launches[0], precise) for own in sets]
                    way = f"normscope, {'precise' if precise else 'cheap'}"
                    _issue_of(setting, case_of(CURVES[curve], FORWARD, dtype, shape), way, each, copy, found)
    return Found(found.measurements, first_of(found.failures), first_of(found.left_out))


def _copy(own: Operands) -> None:
    own.out.copy_(own.x)


def _issue_of(setting: Setting, case: str, way: str, each: list[Launch], copy: list[float], found: Found) -> None:
    x = each[0].arguments["x"]
    try:
        times = _timed(setting, case, way, Launch.run, each, found)
    except Exception as error:
        found.failures.append(f"{case} by {way}: {described(error)}")
        return
    values = {("of the copy's rate", "%"): [100 * share for share in ratios(copy, times)]}
    try:
        count = instructions(each[0], x, torch.cuda.get_device_capability())
    except Exception as error:
        found.left_out.append(f"{case} by {way}, instructions: {described(error)}")
    else:
        values["instructions", "per element"] = [count]
        warps = count * x.numel() / LANES / multiprocessors(x.device)
        # 10⁹ a second; four times the clock in GHz is all that a multiprocessor can begin.
        values["begun", "10⁹/s a multiprocessor"] = [warps / one / 1e3 for one in times]
    found.measurements.extend(_shown(case, way, values))


def with_function(launch: Launch, precise: bool) -> Launch:
    """Return the same launch with the cheap or the precise function, whatever x's dtype."""
    return replace(launch, arguments=launch.arguments | {"precise": precise})


def instructions(launch: Launch, x: Tensor, capability: tuple[int, int]) -> float:
    """Return how many instructions a launch executes for each element, on a GPU of a compute capability."""
    major, minor = capability
    return executed(code_of_launch(launch, 10 * major + minor), launch, x)


def sweep(setting: Setting, passes: str, dtype: str, shape: tuple[int, int]) -> Found:
    """Time a pass with other tiles, each held to what the default fills."""
    found = Found()
    with one_stream(setting):
        sets = operands(shape, getattr(torch, dtype), setting.device)
        for curve in SWEPT[:1] if setting.rehearsal else SWEPT:
            _sweep_of(setting, passes, curve, sets, case_of(CURVES[curve], passes, dtype, shape), found)
    return Found(found.measurements, first_of(found.failures), first_of(found.left_out))


def _sweep_of(setting: Setting, passes: str, curve: str, sets: list[Operands], case: str, found: Found) -> None:
    default: Tiling = getattr(launches_of_kernels, OWN[passes])
    candidates = TILINGS[passes][:2] if setting.rehearsal else TILINGS[passes]
    right: dict[Tiling, list[Prepared]] = {}
    expected: list[Tensor] = []
    for tiling in (default, *candidates):
        try:
            with mock.patch.object(launches_of_kernels, OWN[passes], tiling):
                each = [prepared(passes, curve, own) for own in sets]
            for tensor in each[0].filled:
                tensor.fill_(math.nan)
            each[0].run()
            expected = expected or [tensor.clone() for tensor in each[0].filled]
            off = furthest(each[0].filled, expected)
        except Exception as error:  # what a GPU has no room for is no candidate
            found.left_out.append(f"{case}, {named(tiling)}: {described(error)}")
            continue
        if off <= ALIKE:
            right[tiling] = each
        else:
            found.failures.append(
                f"{case}, {named(tiling)}: off by {off:.2g} of the largest from what the default fills."
            )
    del expected
    times: dict[Tiling, list[float]] = {tiling: [] for tiling in right}
    for number in range(ROUNDS):
        for tiling in list(right)[:: -1 if number % 2 else 1]:
            try:
                samples = by_graph(setting, Prepared.run, right[tiling])
            except Exception as error:
                found.failures.append(f"{case}, {named(tiling)}, while it was timed: {described(error)}")
                del right[tiling], times[tiling]
                continue
            times[tiling].append(statistics.median(samples))
            found.measurements.append(_samples(case, named(tiling), number + 1, samples))
    found.measurements.extend(best_of(case, times, default))


def best_of(case: str, times: dict[Tiling, list[float]], default: Tiling) -> list[Measurement]:
    """Return the row of the tiling that took least, with how far the default is from it, in percent of its time."""
    if default not in times:
        return []
    best = min(times, key=lambda tiling: statistics.median(times[tiling]))
    values = {
        ("best", "µs"): times[best],
        ("default", "µs"): times[default],
        ("default above it", "%"): [100 * (one - 1) for one in by_round(times[default], times[best])],
    }
    return _shown(case, named(best), values)


def named(tiling: Tiling) -> str:
    """Write a tiling as its numbers.

    >>> named(Tiling(4, 1, 2, 3, 168)), named(Tiling(8, 2))
    ('4 warps, 1 load, 2 steps, 3 programs, 168 registers', '8 warps, 2 loads')
    """

    def counted(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's'}"

    words = [counted(tiling.warps, "warp"), counted(tiling.loads, "load")]
    if tiling.per_multiprocessor:
        words += [counted(tiling.steps, "step"), counted(tiling.per_multiprocessor, "program")]
    if tiling.registers:
        words.append(f"{tiling.registers} registers")
    return ", ".join(words)


def furthest(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return how far results are from what is expected, as a share of the largest of each; infinite if one is NaN."""
    shares = [
        float((result.float() - held.float()).abs().max() / held.float().abs().max().clamp_min(1e-30))
        for result, held in zip(results, expected, strict=True)
    ]
    return max(math.inf if math.isnan(share) else share for share in shares)


def host(setting: Setting) -> Found:
    """Time calls of tiny tensors by the wall clock: what launching takes, since the GPU is done before the next."""
    found = Found()
    with mock.patch.dict(os.environ, {VARIABLE: TRITON}), one_stream(setting):
        dtype = torch.bfloat16
        [own] = operands(TINY_CALL, dtype, setting.device, number=1)
        where = TINY_CALL[1], dtype, setting.device
        all_of_them = [one for curve in CURVES for one in contenders.pointwise(curve, *where)]
        for one in [*all_of_them, *contenders.norms(*where), *contenders.peers(*where)]:
            if isinstance(one, str):
                found.left_out.append(f"{one}; it is not timed.")
                continue
            case = f"host, {one.of}, {DTYPES[0]}, {TINY_CALL[0]} × {TINY_CALL[1]}"
            try:
                taken: dict[tuple[str, str], Callable[[], object]] = {}
                if one.back is None:
                    taken["a forward call", "µs"] = lambda one=one: one.forward(own)
                taken["a backward call", "µs"] = one.backward(own)
                values = {quantity: by_wall_clock(setting, call) for quantity, call in taken.items()}
                found.measurements.extend(_shown(case, one.way, values))
            except Exception as error:
                (found.failures if one.ours else found.left_out).append(f"{case} by {one.way}: {described(error)}")
    return Found(found.measurements, first_of(found.failures), first_of(found.left_out))


def _timed(
    setting: Setting, case: str, way: str, run: Callable[..., object], sets: Sequence[object], found: Found
) -> list[float]:
    """Keep the samples of each round, and return its median."""
    run(sets[0])
    rounds = [by_graph(setting, run, sets) for _ in range(ROUNDS)]
    for number, samples in enumerate(rounds, 1):
        found.measurements.append(_samples(case, way, number, samples))
    found.measurements.extend(_shown(case, way, {("time", "µs"): medians_of(rounds)}))
    return medians_of(rounds)


def _samples(case: str, way: str, number: int, samples: list[float]) -> Measurement:
    return Measurement(case, way, f"{GRAPH}, samples of round {number}", "µs", samples, shown=False)


def _shown(case: str, way: str, values: dict[tuple[str, str], list[float]]) -> list[Measurement]:
    return [Measurement(case, way, quantity, unit, samples) for (quantity, unit), samples in values.items()]
