"""Parts that hold the swaps' kernels to float64: by the tests that the suite has, and their functions by themselves."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from common import RESULTS, Measurement
from on_gpu import suite
from on_gpu.parts import Found, Part, Setting

HELD = "tests/swaps/kernels/held"
A_ROUNDING = 2.0**-24  # relative: a GPU may round a product and a sum at once, and so round otherwise


@dataclass(frozen=True)
class Tests:
    """A file of tests.

    Attributes:
        file: its name without ``test_``.
        workers: processes on a GPU; most of the time goes into compiling. 0 where a test takes gigabytes.
        seconds: of its part.
        few: what pytest chooses of it in a rehearsal.
    """

    file: str
    workers: int
    seconds: int
    few: str = ""


FILES = (
    Tests("edges", workers=4, seconds=180, few="cancel or float64 or alone"),
    Tests("values", workers=8, seconds=240, few="test_several_tiles_and_programs and not float16"),
    Tests("shapes", workers=8, seconds=300, few="odd or zero or channels_last or few_tiles"),
    Tests("memory", workers=0, seconds=300, few="31 or stay or asked"),
    Tests("large", workers=6, seconds=400, few="odd_widths or found"),
    Tests("far", workers=0, seconds=300),
    Tests("streams", workers=0, seconds=180),
)


def parts(setting: Setting) -> list[Part]:
    """Return the part of the functions, and one for each file of tests."""
    held = [Part(f"kernels {tests.file}", held_to_float64, (tests,), tests.seconds) for tests in FILES]
    return [Part("kernels functions", functions, seconds=180), *held]


def held_to_float64(setting: Setting, tests: Tests) -> Found:
    """Run a file of tests in a process of its own."""
    few, workers = (tests.few, 0) if setting.rehearsal else ("", tests.workers)
    return suite.tested(setting, [f"{HELD}/test_{tests.file}.py"], few, f"kernels {tests.file}", workers)


def functions(setting: Setting) -> Found:
    """Hold f and f′, by the GPU's own instructions, to what is guaranteed of them (docs/kernels.md)."""
    import accuracy
    import accuracy_kernel as kernel

    u = np.concatenate([accuracy.half_floats(), accuracy.drawn_floats()])
    found, bounds = Found(), guaranteed()
    for of, curve, precise in accuracy.functions():
        at = u[::101] if setting.rehearsal else u
        case, way = accuracy.named(of, curve, precise)
        y = kernel.run(at, of, curve, precise, device=setting.device).astype(np.float64)
        true = accuracy.exact(at, of, curve)
        there = np.abs(true) >= accuracy.LEAST
        off = np.abs(y - true)[there]
        relative = off / np.abs(true[there])
        worst = float(np.nan_to_num(relative, nan=np.inf).max())
        most = bounds[case, way] + A_ROUNDING
        if not worst <= most:
            where = at[there][np.nan_to_num(relative, nan=np.inf).argmax()]
            found.failures.append(
                f"{case}, {way}: off by {worst:.3g} at u = {where:.9g}, and {most:.3g} is guaranteed."
            )
        below = np.abs(y[~there]).max(initial=0)
        if not below <= 2 * accuracy.LEAST:
            found.failures.append(f"{case}, {way}: {below:.3g} where the truth is below 2⁻¹²⁰.")
        found.failures.extend(at_the_ends(kernel, setting, of, curve, precise))
        found.measurements.append(Measurement(case, way, "on the GPU", "relative", [finite(worst)]))
        for dtype in accuracy.written(of, precise):
            ulps = float((off / accuracy.spacing(true[there], dtype)).max())
            found.measurements.append(Measurement(case, way, "on the GPU", f"ulp of {dtype}", [finite(ulps)]))
    return found


def at_the_ends(kernel: ModuleType, setting: Setting, of: str, curve: str, precise: bool) -> list[str]:
    """Say what is not right of a function at NaN, infinity and zero."""
    u = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0], np.float32)
    y = kernel.run(u, of, curve, precise, device=setting.device)
    middle = 2 / math.sqrt(math.pi) if curve == "erf" else 1.0
    true = np.array([math.nan, 1, -1, 0, 0] if of == "f" else [math.nan, 0, 0, middle, middle])
    if np.allclose(y, true, rtol=2**-20, atol=0, equal_nan=True):
        return []
    return [f"{of} of {curve}{', precise' if precise else ''}: {y.tolist()} at NaN, ±∞ and ±0, not {true.tolist()}."]


def guaranteed() -> dict[tuple[str, str], float]:
    """Return how far off functions may be, relative, by case and way, as accuracy.py found and the docs have it."""
    path = min(RESULTS.glob("accuracy-*.json"))
    measurements = [Measurement(**one) for one in json.loads(path.read_text(encoding="utf-8"))["measurements"]]
    return {
        (one.case, one.way): max(one.samples)
        for one in measurements
        if (one.quantity, one.unit) == ("guaranteed", "relative")
    }


def finite(value: float) -> float:
    """Return what JSON can hold."""
    return value if math.isfinite(value) else 1e30
