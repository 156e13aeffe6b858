"""Triton kernels of the point-wise functions: the curves, the forward pass and the backward pass.

Tensors are contiguous rows of channels, and everything is computed in float32. Half precision would be bound by
instructions rather than by memory, so its tanh is cheaper (not ``precise``), with an error below its rounding.
Tensors precede constants in products: in the interpreter of Triton 3.8 a constexpr times a tensor is a constexpr.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SLOPE_OF_ERF = tl.constexpr(1.1283791670955126)  # 2/√π
# Up to |u| = NEAR, tanh u = u + u³·(c₀ + c₁u² + …) with minimax relative error in float32. Beyond, 1 − tanh|u| is so
# small that the errors of its two instructions hardly matter in 1 − (1 − tanh|u|).
# scripts/kernel_coefficients.py computes these.
NEAR = tl.constexpr(1.2)
NEAR_TANH = tl.constexpr(
    (
        -0.333332926, 0.133323848, -0.0538921878, 0.0215684865,
        -0.00818258245, 0.00264358427, -0.000601832522, 6.77669886e-05,
    )
)  # fmt: skip
TERMS = tl.constexpr(8)
STRAIGHT = tl.constexpr(2.0**-7)  # |u| below which tanh u is u in half precision, with a relative error of 2·10⁻⁵
ROOT_IS_ALL = tl.constexpr(1e18)  # |u| above which u / √(1 + u²) is ±1, and whose square does not overflow


@triton.jit
def _exp_and_reciprocal(u: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return e/(1 + e) and 1/(1 + e) for e = e^(−2|u|), from which tanh and its derivative are computed."""
    e = tl.exp2(tl.abs(u) * (-2 * LOG2_E))
    q = 1 / (1 + e)
    return e * q, q


@triton.jit
def _tanh(u: tl.tensor, precise: tl.constexpr) -> tl.tensor:
    """Return tanh u to two units in the last place of float32; unless ``precise``, to a relative error of 2.1·10⁻⁵."""
    tail, _ = _exp_and_reciprocal(u)
    far = tl.where(u < 0, 2 * tail - 1, 1 - 2 * tail)
    if precise:
        square = u * u
        near = tl.zeros_like(u)
        for i in tl.static_range(TERMS):
            near = near * square + NEAR_TANH[TERMS - 1 - i]
        return tl.where(tl.abs(u) < NEAR, near * square * u + u, far)
    else:
        return tl.where(tl.abs(u) < STRAIGHT, u, far)


@triton.jit
def _clamped_and_root(u: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return u, no further from zero than where isru is ±1, and 1 / √(1 + u²); NaN stays."""
    clamped = tl.clamp(u, -ROOT_IS_ALL, ROOT_IS_ALL, propagate_nan=tl.PropagateNan.ALL)
    return clamped, tl.rsqrt(1 + clamped * clamped)


@triton.jit
def function(u: tl.tensor, curve: tl.constexpr, precise: tl.constexpr) -> tl.tensor:
    """Return f(u) of float32 u; ``curve`` is ``tanh``, ``isru`` or ``erf``; ``precise`` for a float32 result."""
    if curve == "isru":
        clamped, root = _clamped_and_root(u)
        return clamped * root
    elif curve == "tanh":
        return _tanh(u, precise)
    else:
        return tl.erf(u)


@triton.jit
def derivative(u: tl.tensor, curve: tl.constexpr) -> tl.tensor:
    """Return f′(u) without cancellation."""
    if curve == "isru":
        _, root = _clamped_and_root(u)
        return root * root * root
    elif curve == "tanh":
        tail, q = _exp_and_reciprocal(u)
        return 4 * tail * q
    else:
        return tl.exp2(u * -LOG2_E * u) * SLOPE_OF_ERF


@triton.jit
def _parameter(pointer: tl.tensor, channel: tl.tensor, channels: tl.tensor, per_channel: tl.constexpr) -> tl.tensor:
    """Load a parameter in float32: one number per channel, or one for all."""
    if per_channel:
        return tl.load(pointer + channel, mask=channel < channels, other=0).to(tl.float32)
    else:
        return tl.load(pointer).to(tl.float32)


@triton.jit
def forward(
    x: tl.tensor, y: tl.tensor, alpha: tl.tensor, shift: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    rows: tl.tensor, channels: tl.tensor, blocks: tl.tensor,
    alpha_each: tl.constexpr, shift_each: tl.constexpr, weight_each: tl.constexpr, bias_each: tl.constexpr,
    curve: tl.constexpr, precise: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
) -> None:  # fmt: skip
    """Fill y with weight · f(αx + s) + bias; each program computes one tile of a row of ``blocks`` tiles."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks * block_rows + tl.arange(0, block_rows)[:, None]
    channel = program % blocks * block_channels + tl.arange(0, block_channels)[None, :]
    at, inside = row * channels + channel, (row < rows) & (channel < channels)
    u = tl.load(x + at, mask=inside, other=0).to(tl.float32) * _parameter(alpha, channel, channels, alpha_each)
    if shift is not None:
        u += _parameter(shift, channel, channels, shift_each)
    value = function(u, curve, precise) * _parameter(weight, channel, channels, weight_each)
    if bias is not None:
        value += _parameter(bias, channel, channels, bias_each)
    tl.store(y + at, value, mask=inside)


@triton.jit
def backward(
    dy: tl.tensor, x: tl.tensor, dx: tl.tensor, alpha: tl.tensor, shift: tl.tensor, weight: tl.tensor,
    partial_sums: tl.tensor, rows: tl.tensor, channels: tl.tensor, blocks: tl.tensor, programs: tl.tensor,
    alpha_each: tl.constexpr, shift_each: tl.constexpr, weight_each: tl.constexpr,
    curve: tl.constexpr, precise: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
) -> None:  # fmt: skip
    """Fill dx, and the sums over rows for the gradients by α, s, weight and bias.

    Each program strides through the tiles of one block of channels and keeps its sums in registers. It alone writes its
    row of ``partial_sums``, float32 ``(4, programs, channels)``, so results are deterministic.
    """
    program, block = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0).to(tl.int64) % blocks
    channel = block * block_channels + tl.arange(0, block_channels)[None, :]
    own_alpha = _parameter(alpha, channel, channels, alpha_each)
    own_weight = _parameter(weight, channel, channels, weight_each)
    if shift is not None:
        own_shift = _parameter(shift, channel, channels, shift_each)
    by_alpha = tl.zeros((block_rows, block_channels), tl.float32)
    by_shift = tl.zeros((block_rows, block_channels), tl.float32)
    by_weight = tl.zeros((block_rows, block_channels), tl.float32)
    by_bias = tl.zeros((block_rows, block_channels), tl.float32)
    first_row = program * block_rows
    while first_row < rows:
        row = first_row + tl.arange(0, block_rows)[:, None]
        at, inside = row * channels + channel, (row < rows) & (channel < channels)
        own_x = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        own_dy = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
        u = own_x * own_alpha
        if shift is not None:
            u += own_shift
        through = own_dy * derivative(u, curve)
        tl.store(dx + at, through * (own_alpha * own_weight), mask=inside)
        by_alpha += through * own_x
        by_shift += through
        by_weight += own_dy * function(u, curve, precise)
        by_bias += own_dy
        first_row += programs * block_rows
    at, inside = partial_sums + program * channels + channel, channel < channels
    size = channels.to(tl.int64) * programs
    tl.store(at, tl.sum(by_alpha, 0)[None, :] * own_weight, mask=inside)
    tl.store(at + size, tl.sum(by_shift, 0)[None, :] * own_weight, mask=inside)
    tl.store(at + 2 * size, tl.sum(by_weight, 0)[None, :], mask=inside)
    tl.store(at + 3 * size, tl.sum(by_bias, 0)[None, :], mask=inside)
