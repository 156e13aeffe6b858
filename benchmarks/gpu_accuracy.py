"""How far off the kernels' functions are by a GPU's own instructions: ``python benchmarks/gpu_accuracy.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator

import accuracy
import numpy as np
from common import RESULTS, Measurement, finish, gpu_options, of_each, parsed_for_gpu

ABOUT = """
How far the functions of the fused kernels and their derivatives are off on this GPU, over the points and by the
measures of accuracy.py; beside it what is guaranteed of them, which that found from what NVIDIA says of the
instructions. Infinity and NaN are held too: f is ±1 and f′ 0 at ±∞, and NaN stays NaN.
"""
FUSED = 2.0**-24  # relative: a GPU may round a product and a sum at once, and so differ by one rounding of float32


def main() -> None:
    args = parsed_for_gpu(gpu_options(__doc__, repeats=1))
    measurements, failed = of_each(measured, {"f and f′ of every curve": (args.device,)})
    finish("gpu_accuracy", ABOUT, measurements, args, threads=(), libraries=("triton", "scipy"), failed=failed)


def measured(device: str) -> Iterator[Measurement | str]:
    """Measure all functions, and say which is further off than it may be."""
    # Here: whether Triton interprets kernels is decided when it is imported.
    import accuracy_kernel as kernel

    u, most = np.concatenate([accuracy.half_floats(), accuracy.drawn_floats()]), guaranteed()
    for of, curve, precise in accuracy.functions():
        case, way = accuracy.named(of, curve, precise)
        true, y = accuracy.exact(u, of, curve), kernel.run(u, of, curve, precise, device=device).astype(np.float64)
        there = np.abs(true) >= accuracy.LEAST
        off = np.nan_to_num(np.abs(y - true), nan=1e30, posinf=1e30)[there]
        worst = float((off / np.abs(true[there])).max())
        yield Measurement(case, way, "on the GPU", "relative", [worst])
        yield Measurement(case, way, "guaranteed", "relative", [most[case, way]])
        for dtype in accuracy.written(of, precise):
            ulps = float((off / accuracy.spacing(true[there], dtype)).max())
            yield Measurement(case, way, "on the GPU", f"ulp of {dtype}", [ulps])
        if worst > most[case, way] + FUSED:
            yield f"{case}, {way}: off by {worst:.3g}, and {most[case, way]:.3g} is guaranteed."
        if not np.abs(y[~there]).max(initial=0) <= 2 * accuracy.LEAST:
            yield f"{case}, {way}: more than 2⁻¹¹⁹ where the truth is below 2⁻¹²⁰."
        ends = kernel.run(np.float32([np.nan, np.inf, -np.inf]), of, curve, precise, device=device)
        at_the_ends = [np.nan, 0, 0] if of == "f′" else [np.nan, 1, -1]
        if not np.allclose(ends, at_the_ends, rtol=2**-20, atol=0, equal_nan=True):
            yield f"{case}, {way}: {ends.tolist()} at NaN, ∞ and −∞."


def guaranteed() -> dict[tuple[str, str], float]:
    """Return how far off functions may be, relative, by case and way, as accuracy.py found."""
    record = json.loads(min(RESULTS.glob("accuracy-*.json")).read_text(encoding="utf-8"))
    rows = [Measurement(**one) for one in record["measurements"]]
    return {
        (one.case, one.way): max(one.samples) for one in rows if one.quantity == "guaranteed" and one.unit == "relative"
    }


if __name__ == "__main__":
    main()
