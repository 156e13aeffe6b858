"""The curves, the forward pass, the backward pass and the sum of its partial sums, as Triton computes them.

A tensor has outers × others × channels elements, with one stride each: ``others`` are all axes but the channels', and
``outers`` the part of them that shares no stride with the rest. A tile has ``block_others`` × ``block_channels``
elements; its columns, neighbours in memory, are channels if ``channels_in_columns``, otherwise others. Offsets have 64
bits. An argument that is None (a shift, a bias, a gradient that is not needed) costs no instruction.

The curves and their derivatives are computed in float32. ``precise`` is for float32 tensors, whose kernels are bound by
memory. Half precision would be bound by instructions, so its functions are cheaper, with errors below its rounding
(docs/kernels.md). ``portable`` replaces PTX instructions by ordinary operations. Tensors precede constants in products:
in the interpreter of Triton 3.8 a constexpr times a tensor is a constexpr.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SLOPE_OF_ERF = tl.constexpr(1.1283791670955126)  # 2/√π
# Up to |u| = NEAR, tanh u = u + u³·(c₀ + c₁u² + …) with minimax relative error in float32. Beyond, 1 − tanh|u| is so
# small that the errors of its two instructions hardly matter in 1 − (1 − tanh|u|).
# scripts/kernel_coefficients.py computes these and the next.
NEAR = tl.constexpr(1.2)
NEAR_TANH = tl.constexpr(
    (
        -0.333332926, 0.133323848, -0.0538921878, 0.0215684865,
        -0.00818258245, 0.00264358427, -0.000601832522, 6.77669886e-05,
    )
)  # fmt: skip
ERF_AS_TANH = tl.constexpr((1.12831378, 0.10364224, -0.00161636551))  # erf u ≈ tanh(u·(c₀ + c₁u² + c₂u⁴))
STRAIGHT = tl.constexpr(2.0**-7)  # |u| below which tanh u is u in half precision, with a relative error of 2·10⁻⁵
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
    """Return e/(1 + e) and 1/(1 + e) for e = e^(−2|u|), from which tanh and its derivative are computed."""
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
    """Return f(u) where f′(u) is computed too; if it ``shares``, tanh of half precision uses the same exponential.

    This saves one instruction of the unit for exponentials, roots and tanh, and costs a few others. The relative error
    is at most 5·10⁻⁵, with a jump of that size at STRAIGHT.
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
    """Return f′(u) without cancellation, to the same accuracy in every dtype."""
    if curve == "isru":
        root = isru_root(within_reach(u))
        return root * root * root
    elif curve == "tanh":
        rest, q = _exp_and_reciprocal(u, portable)
        return 4 * rest * q
    else:
        return _hardware_exp2(u * -LOG2_E * u, portable) * SLOPE_OF_ERF


@triton.jit
def _along(values: tl.tensor, columns: tl.constexpr) -> tl.tensor:
    """Let values run along the columns of a tile, or along its rows."""
    if columns:
        return values[None, :]
    else:
        return values[:, None]


@triton.jit
def _widened(values: tl.tensor, portable: tl.constexpr) -> tl.tensor:
    """Return values in float32; two bfloat16 of one register take two instructions instead of three."""
    if values.dtype == tl.bfloat16 and not portable:
        halves: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(halves, "=r,=r,r", [values], tl.float32, is_pure=True, pack=2)
    else:
        return values.to(tl.float32)


@triton.jit
def _of_channels(parameter: tl.tensor, channel: tl.tensor, channels: tl.tensor, each: tl.constexpr) -> tl.tensor:
    """Load a parameter of some channels, or the single one that they share."""
    if each:
        return tl.load(parameter + channel, mask=channel < channels, other=0).to(tl.float32)
    else:
        return tl.load(parameter).to(tl.float32) + tl.zeros_like(channel).to(tl.float32)


@triton.jit
def _places(
    start: tl.tensor, outer: tl.tensor, first: tl.tensor, other: tl.tensor, place: tl.tensor,
    outer_stride: tl.tensor, other_stride: tl.tensor, channel_stride: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the addresses of a tile's elements, whose others begin with the ``first``."""
    tl.assume(other_stride >= 0)  # as all strides in torch: the product with it is one instruction then
    begin = start + (outer * outer_stride + first * other_stride)
    return begin + place.to(tl.int64) * channel_stride + other.to(tl.int64) * other_stride


@triton.jit
def _parts(number: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Divide a number above zero and round up, without a sum that could overflow."""
    return (number - 1) // size + 1


@triton.jit
def _sizes_in_elements(
    others: tl.tensor, channels: tl.tensor, channels_in_columns: tl.constexpr, multiple: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the numbers of others and channels; the size of a row is passed in units of ``multiple``."""
    if channels_in_columns:
        return others, channels * multiple
    else:
        return others * multiple, channels


@triton.jit
def _strides_in_elements(
    outer: tl.tensor, other: tl.tensor, channel: tl.tensor,
    channels_in_columns: tl.constexpr, multiple: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the strides of outers, others and channels; those between rows are passed in units of ``multiple``."""
    if channels_in_columns:
        return outer * multiple, other * multiple, channel
    else:
        return outer * multiple, other, channel * multiple


@triton.jit
def _start(tile: tl.tensor, tiles: tl.tensor, outers: tl.tensor) -> tl.tensor:
    """Return the index of a tile's outer, and the tile's index within it."""
    if outers == 1:  # known when the kernel is compiled
        return tl.zeros((), tl.int64), tile.to(tl.int64)
    else:
        return (tile // tiles).to(tl.int64), (tile % tiles).to(tl.int64)


@triton.jit
def forward(
    x: tl.tensor, y: tl.tensor, alpha: tl.tensor, shift: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    outers: tl.tensor, others: tl.tensor, channels: tl.tensor,
    x_outer: tl.tensor, x_other: tl.tensor, x_channel: tl.tensor,
    y_outer: tl.tensor, y_other: tl.tensor, y_channel: tl.tensor,
    alpha_each: tl.constexpr, shift_each: tl.constexpr, weight_each: tl.constexpr, bias_each: tl.constexpr,
    curve: tl.constexpr, precise: tl.constexpr, portable: tl.constexpr, channels_in_columns: tl.constexpr,
    multiple: tl.constexpr, block_others: tl.constexpr, block_channels: tl.constexpr,
) -> None:  # fmt: skip
    """Fill y with weight · f(αx + s) + bias, one tile per program."""
    others, channels = _sizes_in_elements(others, channels, channels_in_columns, multiple)
    x_outer, x_other, x_channel = _strides_in_elements(x_outer, x_other, x_channel, channels_in_columns, multiple)
    y_outer, y_other, y_channel = _strides_in_elements(y_outer, y_other, y_channel, channels_in_columns, multiple)
    blocks = _parts(channels, block_channels).to(tl.uint32)
    program = tl.program_id(0).to(tl.uint32)
    channel = (program % blocks).to(channels.dtype) * block_channels + tl.arange(0, block_channels)
    outer, tile = _start(program // blocks, _parts(others, block_others).to(tl.uint32), outers)
    first = tile * block_others
    other = _along(tl.arange(0, block_others), not channels_in_columns)
    place = _along(channel, channels_in_columns)
    there = (other < others - first) & (place < channels)
    at_x = _places(x, outer, first, other, place, x_outer, x_other, x_channel)
    own_x = _widened(tl.load(at_x, mask=there, other=0), portable)
    u = _along(_of_channels(alpha, channel, channels, alpha_each), channels_in_columns) * own_x
    if shift is not None:
        u += _along(_of_channels(shift, channel, channels, shift_each), channels_in_columns)
    own_y = function(u, curve, precise, portable)
    own_y *= _along(_of_channels(weight, channel, channels, weight_each), channels_in_columns)
    if bias is not None:
        own_y += _along(_of_channels(bias, channel, channels, bias_each), channels_in_columns)
    at_y = _places(y, outer, first, other, place, y_outer, y_other, y_channel)
    tl.store(at_y, own_y, mask=there)


@triton.jit
def _keep(
    slots: tl.tensor, sums: tl.tensor, program: tl.tensor, block: tl.tensor, blocks: tl.tensor,
    channel: tl.tensor, channels: tl.tensor, each: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sums of a program's channels: into its row of slots, or as one sum into its single slot."""
    if slots is not None:
        if each:
            tl.store(slots + program.to(tl.int64) * channels + channel, sums, mask=channel < channels)
        else:
            tl.store(slots + program * blocks + block, tl.sum(sums, 0))


@triton.jit
def backward(
    dy: tl.tensor, x: tl.tensor, dx: tl.tensor, alpha: tl.tensor, shift: tl.tensor, weight: tl.tensor,
    alpha_slots: tl.tensor, shift_slots: tl.tensor, weight_slots: tl.tensor, bias_slots: tl.tensor,
    outers: tl.tensor, others: tl.tensor, channels: tl.tensor, programs: tl.tensor,
    dy_outer: tl.tensor, dy_other: tl.tensor, dy_channel: tl.tensor,
    x_outer: tl.tensor, x_other: tl.tensor, x_channel: tl.tensor,
    dx_outer: tl.tensor, dx_other: tl.tensor, dx_channel: tl.tensor,
    alpha_each: tl.constexpr, shift_each: tl.constexpr, weight_each: tl.constexpr, bias_each: tl.constexpr,
    curve: tl.constexpr, precise: tl.constexpr, portable: tl.constexpr, channels_in_columns: tl.constexpr,
    multiple: tl.constexpr, block_others: tl.constexpr, block_channels: tl.constexpr, steps: tl.constexpr,
    shares: tl.constexpr,
) -> None:  # fmt: skip
    """Fill dx, and each program's slots of the parameters' gradients.

    A program processes every ``programs``-th run of ``steps`` tiles within a block of channels. It loads a whole run
    before it uses any of it, so that enough loads are in flight. Its sums stay in registers until the end, and no other
    program writes its slots, so results are deterministic.
    """
    others, channels = _sizes_in_elements(others, channels, channels_in_columns, multiple)
    x_outer, x_other, x_channel = _strides_in_elements(x_outer, x_other, x_channel, channels_in_columns, multiple)
    dy_outer, dy_other, dy_channel = _strides_in_elements(dy_outer, dy_other, dy_channel, channels_in_columns, multiple)
    dx_outer, dx_other, dx_channel = _strides_in_elements(dx_outer, dx_other, dx_channel, channels_in_columns, multiple)
    blocks = _parts(channels, block_channels)
    block, program = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    channel = block * block_channels + tl.arange(0, block_channels)
    own_weight = _of_channels(weight, channel, channels, weight_each)
    own_alpha = _along(_of_channels(alpha, channel, channels, alpha_each), channels_in_columns)
    slope = own_alpha * _along(own_weight, channels_in_columns)
    if shift is not None:
        own_shift = _along(_of_channels(shift, channel, channels, shift_each), channels_in_columns)
    place = _along(channel, channels_in_columns)
    inside = place < channels
    rows: tl.constexpr = block_others if channels_in_columns else block_channels
    columns: tl.constexpr = block_channels if channels_in_columns else block_others
    by_alpha = tl.zeros((rows, columns), tl.float32)
    by_shift = tl.zeros((rows, columns), tl.float32)
    by_weight = tl.zeros((rows, columns), tl.float32)
    by_bias = tl.zeros((rows, columns), tl.float32)
    other = _along(tl.arange(0, block_others), not channels_in_columns)
    runs = _parts(others, steps * block_others)
    at = program
    while at < runs * outers:
        outer, run = _start(at, runs, outers)
        loaded_x: tl.tuple = ()
        loaded_dy: tl.tuple = ()
        for step in tl.static_range(steps):
            first = (run * steps + step) * block_others
            there = (other < others - first) & inside
            at_x = _places(x, outer, first, other, place, x_outer, x_other, x_channel)
            at_dy = _places(dy, outer, first, other, place, dy_outer, dy_other, dy_channel)
            loaded_x += (tl.load(at_x, mask=there, other=0),)
            loaded_dy += (tl.load(at_dy, mask=there, other=0),)
        for step in tl.static_range(steps):
            first = (run * steps + step) * block_others
            own_x, own_dy = _widened(loaded_x[step], portable), _widened(loaded_dy[step], portable)
            u = own_alpha * own_x
            if shift is not None:
                u += own_shift
            through = own_dy * derivative(u, curve, portable)
            if dx is not None:
                at_dx = _places(dx, outer, first, other, place, dx_outer, dx_other, dx_channel)
                tl.store(at_dx, slope * through, mask=(other < others - first) & inside)
            if alpha_slots is not None:
                by_alpha += through * own_x
            if shift_slots is not None:
                by_shift += through
            if weight_slots is not None:
                by_weight += own_dy * function_beside(u, curve, precise, shares, portable)
            if bias_slots is not None:
                by_bias += own_dy
        at += programs
    over: tl.constexpr = 0 if channels_in_columns else 1
    of_alpha, of_shift = own_weight * tl.sum(by_alpha, over), own_weight * tl.sum(by_shift, over)
    _keep(alpha_slots, of_alpha, program, block, blocks, channel, channels, alpha_each)
    _keep(shift_slots, of_shift, program, block, blocks, channel, channels, shift_each)
    _keep(weight_slots, tl.sum(by_weight, over), program, block, blocks, channel, channels, weight_each)
    _keep(bias_slots, tl.sum(by_bias, over), program, block, blocks, channel, channels, bias_each)


@triton.jit
def _add_up(
    slots: tl.tensor, gradient: tl.tensor, programs: tl.tensor, slots_in_all: tl.tensor, channels: tl.tensor,
    each: tl.constexpr, tile: tl.constexpr, block_channels: tl.constexpr,
) -> None:  # fmt: skip
    """Add the rows of ``(programs, channels)`` in float64, or all of the slots where a parameter is one number."""
    width: tl.constexpr = block_channels if each else 1
    first = tl.program_id(0).to(tl.int64) * width
    channel = first + tl.arange(0, width)[None, :]
    number, rows = (channels, programs) if each else (1, slots_in_all)
    if slots is not None and first < number:
        sums = tl.zeros((tile // width, width), tl.float64)
        row = tl.arange(0, tile // width)[:, None]
        while tl.min(row) < rows:
            place = row.to(tl.int64) * number + channel
            sums += tl.load(slots + place, mask=(row < rows) & (channel < number), other=0).to(tl.float64)
            row += tile // width
        # Via float32, because not every GPU converts float64 to half precision.
        tl.store(gradient + channel, tl.sum(sums, 0)[None, :].to(tl.float32), mask=channel < number)


@triton.jit
def add_slots(
    alpha_slots: tl.tensor, shift_slots: tl.tensor, weight_slots: tl.tensor, bias_slots: tl.tensor,
    dalpha: tl.tensor, dshift: tl.tensor, dweight: tl.tensor, dbias: tl.tensor,
    programs: tl.tensor, slots_in_all: tl.tensor, channels: tl.tensor,
    alpha_each: tl.constexpr, shift_each: tl.constexpr, weight_each: tl.constexpr, bias_each: tl.constexpr,
    tile: tl.constexpr, block_channels: tl.constexpr,
) -> None:  # fmt: skip
    """Fill the parameters' gradients with the sums of their slots: a row of programs for each parameter."""
    parameter = tl.program_id(1)
    if parameter == 0:
        _add_up(alpha_slots, dalpha, programs, slots_in_all, channels, alpha_each, tile, block_channels)
    elif parameter == 1:
        _add_up(shift_slots, dshift, programs, slots_in_all, channels, shift_each, tile, block_channels)
    elif parameter == 2:
        _add_up(weight_slots, dweight, programs, slots_in_all, channels, weight_each, tile, block_channels)
    else:
        _add_up(bias_slots, dbias, programs, slots_in_all, channels, bias_each, tile, block_channels)
