"""Largest errors of the kernels' functions, by dtype: ``python benchmarks/accuracy.py``.

By default it needs no GPU; ``--device cuda`` compares a GPU's own instructions with the guarantees of an earlier run.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
from common import NO_GPU, RESULTS, Measurement, finish, gpu, in_own_process, of_each, options
from numpy.typing import NDArray
from scipy.special import erf

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
ABOUT = """
Largest errors of the functions of the fused kernels (docs/kernels.md) and of their derivatives, over the whole range of
float32. The points are every bfloat16, every float16, and {drawn:,} random float32 from all exponents: {points:,} in
all. The functions take float32 and are compared with float64. bfloat16 and float16 use the same cheap functions; all
three dtypes use the same derivatives. Rounded: every instruction is correctly rounded, as in Triton's interpreter.
Guaranteed: every instruction is off by the most that NVIDIA's PTX ISA allows, in every combination of signs, plus
rounding. The relative errors are 2⁻¹¹ for tanh.approx, 2⁻²² for ex2.approx, 2⁻²³ for rcp.approx and 2⁻²²·⁹ for
rsqrt.approx. float32's erf is NVIDIA's own, off by two ulp according to the CUDA C++ Programming Guide. No GPU is
involved. In ulp: the guaranteed error in units in the last place of the output's dtype; rounding to that dtype adds
half a unit. These errors apply where the value exceeds 2⁻¹²⁰; for smaller values the result is below 2⁻¹¹⁹. In a sum:
the rounded error of a sum of {terms:,} terms, relative to Σ|terms|. The terms are dy·f (as in the weight's gradient) or
dy·f′·x (as in α's), with normally distributed dy and u = x. For any terms, this error is at most the guaranteed
relative error. f beside f′: tanh in the backward pass in half precision, which only the weight's gradient uses.
"""
ABOUT_GPU = """
Largest errors of the functions of the fused kernels and their derivatives on this GPU, beside the guarantees that
accuracy.py derives from NVIDIA's documents. Points and measures are those of accuracy.py. At ±∞, f is ±1 and f′ is 0;
NaN stays NaN.
"""
FUSED = 2.0**-24  # relative: a GPU may round a product and a sum at once, and differ by one rounding of float32
CURVES = ("tanh", "isru", "erf")
DIGITS = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126)}  # significant bits, least exponent
LEAST = 2.0**-120
TERMS = 65_536
# What the instructions may be off by, relative (PTX ISA), and erf, in ulp (CUDA C++ Programming Guide).
EXP2, RECIPROCAL, ROOT, TANH, ERF_ULP = 2**-22, 2**-23, 2**-22.9, 2**-11, 2
LAST = {  # of a function that is what its last instruction returns, times u, or its cube
    ("f", "tanh", False): TANH,
    ("f", "erf", False): TANH,
    ("f", "isru", False): ROOT,
    ("f", "isru", True): ROOT,
    ("f′", "isru", True): (1 + ROOT) ** 3 - 1,
}


def main() -> None:
    args = options(__doc__, device=True).parse_args()
    libraries = ["triton", "scipy"]
    if args.device == "cuda":
        if not gpu():
            raise SystemExit(NO_GPU)
        measurements, failed = of_each(on_gpu, {"f and f′ of every curve": ()})
        finish("accuracy", ABOUT_GPU, measurements, args, libraries=libraries, failed=failed)
        return
    drawn, points, measurements = in_own_process(measured, threads=1)
    about = ABOUT.format(drawn=drawn, points=points, terms=TERMS)
    finish("accuracy", about, measurements, args, threads=[1], libraries=libraries)


def measured() -> tuple[int, int, list[Measurement]]:
    """Measure all functions, in a process that has not imported Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    drawn = drawn_floats()
    u = np.concatenate([half_floats(), drawn])
    rows = [row for of, curve, precise in functions() for row in of_function(u, of, curve, precise)]
    return len(drawn), len(u), rows


def on_gpu() -> Iterator[Measurement | str]:
    """Measure all functions by the GPU's instructions; yield a sentence for each error beyond the guarantee."""
    import accuracy_kernel as kernel

    record = json.loads(min(RESULTS.glob("accuracy-*-cores.json")).read_text(encoding="utf-8"))
    most = {
        (row["case"], row["way"]): max(row["samples"])
        for row in record["measurements"]
        if (row["quantity"], row["unit"]) == ("guaranteed", "relative")
    }
    u = np.concatenate([half_floats(), drawn_floats()])
    for of, curve, precise in functions():
        case, way = named(of, curve, precise)
        true, y = exact(u, of, curve), kernel.run(u, of, curve, precise, device="cuda").astype(np.float64)
        there = np.abs(true) >= LEAST
        off = np.nan_to_num(np.abs(y - true), nan=1e30, posinf=1e30)[there]
        worst = float((off / np.abs(true[there])).max())
        yield Measurement(case, way, "on the GPU", "relative", [worst])
        yield Measurement(case, way, "guaranteed", "relative", [most[case, way]])
        for dtype in written(of, precise):
            ulps = float((off / spacing(true[there], dtype)).max())
            yield Measurement(case, way, "on the GPU", f"ulp of {dtype}", [ulps])
        if worst > most[case, way] + FUSED:
            yield f"{case}, {way}: off by {worst:.3g}, and {most[case, way]:.3g} is guaranteed."
        if not np.abs(y[~there]).max(initial=0) <= 2 * LEAST:
            yield f"{case}, {way}: more than 2⁻¹¹⁹ where the exact value is below 2⁻¹²⁰."
        ends = kernel.run(np.float32([np.nan, np.inf, -np.inf]), of, curve, precise, device="cuda")
        limits = [np.nan, 0, 0] if of == "f′" else [np.nan, 1, -1]
        if not np.allclose(ends, limits, rtol=2**-20, atol=0, equal_nan=True):
            yield f"{case}, {way}: {ends.tolist()} at NaN, ∞ and −∞."


def functions() -> Iterator[tuple[str, str, bool]]:
    """Yield f or f′, the curve, and True for the function for float32."""
    for curve in CURVES:
        yield from (("f", curve, True), ("f", curve, False), ("f′", curve, True))
    yield ("f beside f′", "tanh", False)


def half_floats() -> Floats:
    """Return every finite bfloat16 and float16 as float32."""
    patterns = np.arange(2**16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        every = np.concatenate([(patterns << 16).view(np.float32), patterns.astype(np.uint16).view(np.float16)])
    return every[np.isfinite(every)].astype(np.float32)


def drawn_floats(each: int = 1024, each_inside: int = 16_384) -> Floats:
    """Return random positive float32 of every exponent, more of them where the curves bend."""
    draw = np.random.default_rng(0)
    exponents = np.repeat(np.arange(255), each), np.repeat(np.arange(127 - 12, 127 + 7), each_inside)
    patterns = np.concatenate(exponents).astype(np.uint32) << 23
    return (patterns | draw.integers(2**23, size=len(patterns), dtype=np.uint32)).view(np.float32)


def exact(u: Floats, of: str, curve: str) -> Array:
    """Evaluate f or f′ in float64."""
    v = u.astype(np.float64)
    if of != "f′":
        return {"tanh": np.tanh, "isru": lambda v: v / np.hypot(v, 1), "erf": erf}[curve](v)
    if curve == "tanh":
        e = np.exp(-2 * np.abs(v))
        return 4 * e / (1 + e) ** 2
    return np.hypot(v, 1) ** -3.0 if curve == "isru" else 2 / math.sqrt(math.pi) * np.exp(-v * v)


def of_function(u: Floats, of: str, curve: str, precise: bool) -> list[Measurement]:
    """Measure one function at u."""
    true = exact(u, of, curve)
    there = np.abs(true) >= LEAST
    rounded = evaluated(u, of, curve, precise)
    furthest = np.max([np.abs(y - true) for y in perturbed(u, of, curve, precise)], axis=0)
    x, dy = np.random.default_rng(1).standard_normal((2, TERMS)).astype(np.float32)
    factor = dy * (x if of == "f′" else 1)
    terms, computed = factor * exact(x, of, curve), factor * evaluated(x, of, curve, precise)
    relative = {
        "rounded": np.abs(rounded - true)[there] / np.abs(true[there]),
        "guaranteed": furthest[there] / np.abs(true[there]),
    }
    case, way = named(of, curve, precise)
    rows = [Measurement(case, way, name, "relative", [float(off.max())]) for name, off in relative.items()]
    of_sum = float(abs((computed - terms).sum()) / np.abs(terms).sum())
    rows.append(Measurement(case, way, "in a sum", "relative", [of_sum]))
    for dtype in written(of, precise):
        ulps = furthest[there] / spacing(true[there], dtype)
        rows.append(Measurement(case, way, "guaranteed", f"ulp of {dtype}", [float(ulps.max())]))
    return rows


def named(of: str, curve: str, precise: bool) -> tuple[str, str]:
    """Return the case and the way of a function's measurements."""
    if of == "f′":
        return f"{of} of {curve}", "float32 and half precision"
    return f"{of} of {curve}", "float32" if precise else "half precision"


def written(of: str, precise: bool) -> list[str]:
    """Return the dtypes that are written of what a function returns."""
    return list(DIGITS) if of == "f′" else ["float32"] if precise else ["bfloat16", "float16"]


def spacing(true: Array, dtype: str) -> Array:
    """Return the spacing of a dtype's numbers near a value."""
    digits, least = DIGITS[dtype]
    exponent = np.frexp(true)[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, least) - (digits - 1))


def perturbed(u: Floats, of: str, curve: str, precise: bool) -> Iterator[Array]:
    """Yield f or f′ with the instructions' largest errors, for every choice of their signs."""
    if (of, curve, precise) == ("f", "erf", True):
        true = exact(u, of, curve)
        yield from (true + sign * ERF_ULP * spacing(true, "float32") for sign in (-1, 1))
        return
    last = LAST.get((of, curve, precise), 0.0)
    for first, second in itertools.product((-1, 1), repeat=2):
        y = evaluated(u, of, curve, precise, (first * EXP2, second * RECIPROCAL))
        yield from (y * (1 - last), y * (1 + last))


def evaluated(u: Floats, of: str, curve: str, precise: bool, off: Sequence[float] = (0.0, 0.0)) -> Array:
    """Run the kernels' function in Triton's interpreter, with relative errors ``off`` of 2^v and 1/v."""
    import accuracy_kernel

    return accuracy_kernel.run(u, of, curve, precise, off).astype(np.float64)


if __name__ == "__main__":
    main()
