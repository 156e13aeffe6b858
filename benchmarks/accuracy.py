"""Largest errors of the kernels' functions, by dtype: ``python benchmarks/accuracy.py``.

Triton's interpreter computes them on the CPU, and with ``--device cuda`` a GPU's own instructions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np
from common import NO_GPU, Measurement, finish, gpu, of_each, options
from numpy.typing import NDArray
from scipy.special import erf

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
ABOUT = """
Largest errors of the functions of the fused kernels (docs/kernels.md) and of their derivatives, over the whole range of
float32: every bfloat16, every float16, and random float32 of all exponents. The functions take float32 and are compared
with float64. bfloat16 and float16 use a cheaper tanh; all three dtypes use the same derivatives. On a CPU, Triton's
interpreter runs them, in which every instruction is correctly rounded; a GPU's are not. In ulp: units in the last place
of the output's dtype; rounding to that dtype adds half a unit. These errors apply where the value exceeds 2⁻¹²⁰; for
smaller values the result is below 2⁻¹¹⁹. At ±∞, f is ±1 and f′ is 0; NaN stays NaN.
"""
CURVES = ("tanh", "isru", "erf")
DIGITS = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126)}  # significant bits, least exponent
LEAST = 2.0**-120


def main() -> None:
    args = options(__doc__, device=True).parse_args()
    if args.device == "cuda" and not gpu():
        raise SystemExit(NO_GPU)
    measurements, failed = of_each(measured, {"f and f′ of every curve": (args.device,)}, threads=1)
    finish("accuracy", ABOUT, measurements, args, threads=[1], libraries=["triton", "scipy"], failed=failed)


def measured(device: str) -> Iterator[Measurement | str]:
    """Measure all functions, in a process that has not imported Triton; yield a sentence for each wrong limit."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import accuracy_kernel as kernel

    u = np.concatenate([half_floats(), drawn_floats()])
    for of, curve, precise in functions():
        case, way = f"{of} of {curve}", "float32" if precise else "half precision"
        dtypes = ["float32"] if precise else ["bfloat16", "float16"]
        if of == "f′":
            way, dtypes = "float32 and half precision", list(DIGITS)
        true, y = exact(u, of, curve), kernel.run(u, of, curve, precise, device).astype(np.float64)
        there = np.abs(true) >= LEAST
        off = np.nan_to_num(np.abs(y - true), nan=1e30, posinf=1e30)[there]
        yield Measurement(case, way, "largest error", "relative", [float((off / np.abs(true[there])).max())])
        for dtype in dtypes:
            ulps = float((off / spacing(true[there], dtype)).max())
            yield Measurement(case, way, "largest error", f"ulp of {dtype}", [ulps])
        if not np.abs(y[~there]).max(initial=0) <= 2 * LEAST:
            yield f"{case}, {way}: more than 2⁻¹¹⁹ where the exact value is below 2⁻¹²⁰."
        ends = kernel.run(np.float32([np.nan, np.inf, -np.inf]), of, curve, precise, device)
        limits = [np.nan, 0, 0] if of == "f′" else [np.nan, 1, -1]
        if not np.allclose(ends, limits, rtol=2**-20, atol=0, equal_nan=True):
            yield f"{case}, {way}: {ends.tolist()} at NaN, ∞ and −∞."


def functions() -> Iterator[tuple[str, str, bool]]:
    """Yield f or f′, the curve, and True for the function for float32."""
    for curve in CURVES:
        yield from (("f", curve, True), ("f", curve, False), ("f′", curve, True))


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


def spacing(true: Array, dtype: str) -> Array:
    """Return the spacing of a dtype's numbers near a value."""
    digits, least = DIGITS[dtype]
    exponent = np.frexp(true)[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, least) - (digits - 1))


if __name__ == "__main__":
    main()
