"""The three curves and their derivatives as Triton computes them, in float32.

``precise`` is for float32 tensors, whose kernels wait for memory anyhow. Of half precision they would wait for
instructions, and so there the functions are cheaper, with errors below the rounding of what they are for
(docs/kernels.md). ``portable`` puts ordinary operations in the place of the instructions that only PTX has.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NEAR = tl.constexpr(0.55)  # |u| up to which tanh is a polynomial: beyond, 1 − e^(−2|u|) keeps its digits
ROOT_IS_ALL = tl.constexpr(1e18)  # |u| above which u / √(1 + u²) is ±1, and whose square does not overflow
ERF_IS_ALL = tl.constexpr(9.0)  # u² above which erf u is ±1 in half precision


@triton.jit
def _hardware_tanh(u: tl.tensor, portable: tl.constexpr) -> tl.tensor:
    """Return tanh u with a relative error of at most 2⁻¹¹ (PTX ISA, tanh.approx.f32)."""
    if portable:
        return precise_tanh(u)
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], tl.float32, is_pure=True, pack=1)


@triton.jit
def _hardware_exp2(v: tl.tensor, portable: tl.constexpr) -> tl.tensor:
    """Return 2^v with a relative error of at most 2⁻²², zero where it is below 2⁻¹²⁶ (PTX ISA, ex2.approx.ftz.f32)."""
    if portable:
        return tl.exp2(v)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], tl.float32, is_pure=True, pack=1)


@triton.jit
def _hardware_reciprocal(v: tl.tensor, portable: tl.constexpr) -> tl.tensor:
    """Return 1/v with a relative error of at most 2⁻²³ (PTX ISA, rcp.approx.ftz.f32)."""
    if portable:
        return 1 / v
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], tl.float32, is_pure=True, pack=1)


@triton.jit
def precise_tanh(u: tl.tensor) -> tl.tensor:
    """Return tanh u to two units in the last place."""
    square = u * u
    near = -5.70498872745e-3
    near = near * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * u + u
    e = tl.exp(-2 * tl.abs(u))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(u) < NEAR, near, tl.where(u < 0, -far, far))


@triton.jit
def cheap_erf(u: tl.tensor, portable: tl.constexpr) -> tl.tensor:
    """Return erf u as tanh of a polynomial, with a relative error of at most 6e-5 beside that of tanh.approx."""
    square = tl.minimum(u * u, ERF_IS_ALL)
    return _hardware_tanh(u * ((-0.0016151442 * square + 0.10364078) * square + 1.1283139), portable)


@triton.jit
def isru_root(u: tl.tensor) -> tl.tensor:
    """Return 1 / √(1 + u²)."""
    return tl.rsqrt(1 + u * u)


@triton.jit
def within_reach(u: tl.tensor) -> tl.tensor:
    """Return u, but no further from zero than where isru is ±1; NaN stays."""
    return tl.clamp(u, -ROOT_IS_ALL, ROOT_IS_ALL, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def function(u: tl.tensor, curve: tl.constexpr, precise: tl.constexpr, portable: tl.constexpr) -> tl.tensor:
    """Return f(u) of float32 u; ``curve`` is ``tanh``, ``isru`` or ``erf``."""
    if curve == "isru":
        reached = within_reach(u)
        return reached * isru_root(reached)
    elif curve == "tanh":
        return precise_tanh(u) if precise else _hardware_tanh(u, portable)
    else:
        return tl.erf(u) if precise else cheap_erf(u, portable)


@triton.jit
def derivative(u: tl.tensor, curve: tl.constexpr, precise: tl.constexpr, portable: tl.constexpr) -> tl.tensor:
    """Return f′(u), in which nothing cancels."""
    if curve == "isru":
        root = isru_root(within_reach(u))
        return root * root * root
    elif curve == "tanh":
        e = tl.exp(-2 * tl.abs(u)) if precise else _hardware_exp2((-2 * LOG2_E) * tl.abs(u), portable)
        q = 1 / (1 + e) if precise else _hardware_reciprocal(1 + e, portable)
        return 4 * e * q * q
    else:
        e = tl.exp(-u * u) if precise else _hardware_exp2(-LOG2_E * u * u, portable)
        return 1.1283791670955126 * e
