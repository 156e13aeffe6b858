"""From times to what the project wants to reach: ratios of the same run, each beside its figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from common import Measurement, ratios
from on_gpu.contenders import COMPILED, EAGER, LAYER_NORM, LIGER, OURS

FORWARD, BACKWARD = "forward", "backward"
TENSORS = {FORWARD: 2, BACKWARD: 3}  # that cannot but be moved: x and y; x, dy and dx
COPY, NEGATIVE, ADD = "copy", "negative", "add"
RATE = "of the copy's rate"
LARGE = 10**8  # elements from which on the figures for the share of the copy hold
SHARE = {
    FORWARD: {"DyT": 95.0, "DyISRU": 95.0, "Derf": 92.0},
    BACKWARD: {"DyT": 90.0, "DyISRU": 90.0, "Derf": 85.0},
}  # percent
AT_LEAST = {
    LIGER: {FORWARD: 1.25, BACKWARD: 1.2},
    COMPILED: {FORWARD: 1.2, BACKWARD: 2.0},  # in bfloat16
    LAYER_NORM: {FORWARD: 1.15, BACKWARD: 1.8},
}  # times ours

Key = tuple[str, str, str]  # of what, who, which pass


def case_of(of: str, passes: str, dtype: str, shape: Sequence[int], tuned: bool = False) -> str:
    """Name what is timed."""
    rows, channels = shape
    return f"{of} {passes}, {dtype}, {rows:,} × {channels:,}{', beside max-autotune' if tuned else ''}"


def rates(medians: Mapping[Key, Sequence[float]], elements: int, itemsize: int) -> dict[Key, list[float]]:
    """Return GB/s: the bytes that cannot but be moved, over the microseconds of each round.

    >>> rates({("DyT", "normscope", "backward"): [2.0]}, elements=1000, itemsize=4)
    {('DyT', 'normscope', 'backward'): [6.0]}
    """
    return {
        key: [TENSORS[key[2]] * elements * itemsize / median / 1e3 for median in own] for key, own in medians.items()
    }


def shares(own: Mapping[Key, Sequence[float]], floor: Key) -> dict[Key, list[float]]:
    """Return each rate as percent of a floor's in the same round; nothing where that was not timed."""
    under = own.get(floor, ())
    return {key: [100 * share for share in by_round(rate, under)] for key, rate in own.items() if under}


def table(
    medians: Mapping[Key, Sequence[float]], of: str, passes: str, dtype: str, shape: Sequence[int], tuned: bool
) -> list[Measurement]:
    """Return a row of the short table: normscope's time, how many times that others take, and what is to be reached.

    A figure is missed where either round misses it. Of eager and compiled plain torch the fastest counts.

    Args:
        medians: microseconds of each round.
        of: the point-wise function.
        passes: ``forward`` or ``backward``.
        dtype: of x.
        shape: of x.
        tuned: whether torch.compile was told to tune.
    """
    own = medians.get((of, OURS, passes), ())
    if not own:
        return []
    elements = shape[0] * shape[1]
    case = f"{of}, {dtype}, {shape[0]:,} × {shape[1]:,}{', max-autotune' if tuned else ''}"
    rate = rates(medians, elements, 1)
    rows = {RATE: ("%", shares(rate, (COPY, COPY, FORWARD)).get((of, OURS, passes), []))}
    others = {
        EAGER: [key for key in medians if key[0] == of and key[1].startswith(EAGER)],
        COMPILED: [key for key in medians if key[0] == of and key[1].startswith(COMPILED)],
        LIGER: [(of, LIGER, passes)],
        LAYER_NORM: [("LayerNorm", LAYER_NORM, passes)],
    }
    for name, keys in others.items():
        there = [medians[key] for key in keys if key[2] == passes and medians.get(key)]
        rows[name] = ("×", by_round([min(round_) for round_ in zip(*there, strict=False)], own))
    made, missed = [Measurement(case, passes, f"{passes}, time", "µs", list(own))], 0
    for name, (unit, found) in rows.items():
        least = to_reach(name, of, passes, dtype, elements)
        if found:
            made.append(Measurement(case, passes, f"{passes}, {name}{_aim(name, passes)}", unit, found))
        if found and name == RATE and least is not None:
            made.append(Measurement(case, passes, f"{passes}, {RATE}, to reach", unit, [least]))
        missed += bool(found) and least is not None and min(found) < least
    return [*made, Measurement(case, passes, f"{passes}, figures missed", "number", [float(missed)])]


def _aim(name: str, passes: str) -> str:
    """Say in a column's heading what is to be reached in all of its rows."""
    if name not in AT_LEAST:
        return ""
    return f" ≥ {AT_LEAST[name][passes]:g}{' in bfloat16' if name == COMPILED else ''}"


def to_reach(name: str, of: str, passes: str, dtype: str, elements: int) -> float | None:
    """Return the least that is aimed at; None where nothing is.

    >>> to_reach(RATE, "Derf", "forward", "float32", 10**8), to_reach("Liger", "DyT", "backward", "float16", 10)
    (92.0, 1.2)
    """
    if name == RATE:
        return SHARE[passes][of] if elements >= LARGE else None
    if name == COMPILED and dtype != "bfloat16":
        return None
    return AT_LEAST.get(name, {}).get(passes)


def by_round(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Divide what was taken in the same round, as far as both were."""
    rounds = min(len(over), len(under))
    return ratios(over[:rounds], under[:rounds])


def medians_of(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each round's samples."""
    return [statistics.median(samples) for samples in rounds]
