"""The three curves and their derivatives as Triton computes them, in float32.

``precise`` is for float32 tensors, whose kernels wait for memory anyhow. Of half precision they would wait for
instructions, and so there the functions are cheaper, with errors below the rounding of what they are for
(docs/kernels.md). ``portable`` puts ordinary operations in the place of the instructions that only PTX has.
Tensors stand before constants: in the interpreter of Triton 3.8 a constexpr times a tensor is a constexpr.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SLOPE_OF_ERF = tl.constexpr(1.1283791670955126)  # 2/√π
# Up to |u| = NEAR, tanh u = u + u³·(c₀ + c₁u² + …), float32 of the smallest largest relative error. Beyond,
# 1 − tanh|u| is so small that the errors of the two instructions which make it come to little in 1 − (1 − tanh|u|).
# scripts/kernel_coefficients.py makes these and the next again.
NEAR = tl.constexpr(1.2)
NEAR_TANH = tl.constexpr(
    (
        -0.333332926, 0.133323848, -0.0538921878, 0.0215684865,
        -0.00818258245, 0.00264358427, -0.000601832522, 6.77669886e-05,
    )
)  # fmt: skip
ERF_AS_TANH = tl.constexpr((1.12831378, 0.10364224, -0.00161636551))  # erf u ≈ tanh(u·(c₀ + c₁u² + c₂u⁴))
STRAIGHT = tl.constexpr(2.0**-7)  # |u| below which tanh u is u in half precision: off by 2·10⁻⁵, relative
ERF_IS_ALL = tl.constexpr(9.0)  # u² above which erf u is ±1 in half precision, and up to which the polynomial rises
ROOT_IS_ALL = tl.constexpr(1e18)  # |u| above which u / √(1 + u²) is ±1, and whose square does not overflow


@triton.jit
def _hardware_tanh(u: tl.tensor, portable: tl.constexpr) -> tl.tensor:
    """Return tanh u with a relative error of at most 2⁻¹¹ (PTX ISA, tanh.approx.f32)."""
    if portable:
        return precise_tanh(u, portable)
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
def _exp_and_reciprocal(u: tl.tensor, portable: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return e/(1 + e) and 1/(1 + e) of e = e^(−2|u|), of which tanh and its derivative are made."""
    e = _hardware_exp2(tl.abs(u) * (-2 * LOG2_E), portable)
    q = _hardware_reciprocal(1 + e, portable)
    return e * q, q


@triton.jit
def precise_tanh(u: tl.tensor, portable: tl.constexpr) -> tl.tensor:
    """Return tanh u to two units in the last place."""
    square = u * u
    near = square * NEAR_TANH[7] + NEAR_TANH[6]
    near = near * square + NEAR_TANH[5]
    near = near * square + NEAR_TANH[4]
    near = near * square + NEAR_TANH[3]
    near = near * square + NEAR_TANH[2]
    near = near * square + NEAR_TANH[1]
    near = near * square + NEAR_TANH[0]
    near = near * square * u + u
    rest, _ = _exp_and_reciprocal(u, portable)
    far = 1 - 2 * rest
    return tl.where(tl.abs(u) < NEAR, near, tl.where(u < 0, -far, far))


@triton.jit
def cheap_erf(u: tl.tensor, portable: tl.constexpr) -> tl.tensor:
    """Return erf u as tanh of a polynomial, with a relative error of at most 5.8e-5 beside that of tanh.approx."""
    square = tl.minimum(u * u, ERF_IS_ALL)
    slope = (square * ERF_AS_TANH[2] + ERF_AS_TANH[1]) * square + ERF_AS_TANH[0]
    return _hardware_tanh(u * slope, portable)


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
        return precise_tanh(u, portable) if precise else _hardware_tanh(u, portable)
    else:
        return tl.erf(u) if precise else cheap_erf(u, portable)


@triton.jit
def function_beside(
    u: tl.tensor, curve: tl.constexpr, precise: tl.constexpr, shares: tl.constexpr, portable: tl.constexpr
) -> tl.tensor:
    """Return f(u) where f′(u) is computed too: tanh of half precision, where it ``shares``, from the same exponential.

    That is one instruction less for the unit of exponentials, roots and tanh, and a few more for the others. Its
    relative error is at most 5·10⁻⁵; at STRAIGHT it jumps by that much.
    """
    if shares and curve == "tanh" and not precise:
        rest, _ = _exp_and_reciprocal(u, portable)
        sign = u.to(tl.int32, bitcast=True) & -0x80000000
        far = ((1 - 2 * rest).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(u) < STRAIGHT, u, far)
    else:
        return function(u, curve, precise, portable)


@triton.jit
def derivative(u: tl.tensor, curve: tl.constexpr, portable: tl.constexpr) -> tl.tensor:
    """Return f′(u), in which nothing cancels; as accurate for float32 as for half precision."""
    if curve == "isru":
        root = isru_root(within_reach(u))
        return root * root * root
    elif curve == "tanh":
        rest, q = _exp_and_reciprocal(u, portable)
        return 4 * rest * q
    else:
        return _hardware_exp2(u * -LOG2_E * u, portable) * SLOPE_OF_ERF
