"""Point-wise functions on the CPU in one pass over memory: tanh, isru and erf in loops that numba vectorizes.

The compiler may contract a product and a sum into one rounding, but neither reorder operations nor assume finite
numbers: NaN, infinities and the sign of zero are preserved. Error bounds count one relative error of at most ε = 2⁻²⁴
per operation; contraction only lowers them. All compiled code is in this file, whose changes alone invalidate numba's
cache.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor, nn
from torch.autograd import forward_ad

from normscope.errors import UsageError
from normscope.runtime.compiled_loops import compiled, threads
from normscope.swaps.kernels.parameters import Parameters, channel_axes

TANH, ISRU, ERF = 0, 1, 2
_CURVES = {"tanh": TANH, "isru": ISRU, "erf": ERF}
_A_THREAD = 2**17  # elements, at least: with fewer, another thread costs more than it saves
_NONE = np.full(1, -0.0, np.float32)  # in place of an absent shift or bias
_AT_ONCE = 1024  # elements, at least, for which α, s, weight and bias are laid out: they stay in the first-level cache

_f4, _i4 = np.float32, np.int32
_ONE, _TWO = _f4(1), _f4(2)
_LOG2_E = _f4(1.4426950408889634)
# ln 2 = high + low, where any whole number up to 32 times the first is exact: it has 15 bits.
_LN_2_HIGH, _LN_2_LOW = _f4(0.693145751953125), _f4(1.42860677e-06)
_WHOLE = _f4(1.5 * 2**23)  # near it, float32 only has whole numbers: a summand is rounded into the lowest bits
_TANH_IS_ALL = _f4(19)  # 2|u| beyond which tanh u is ±1
_ROOT_IS_ALL = _f4(1e9)  # |u| beyond which u / √(1 + u²) is ±1, and whose square does not overflow
_ERF_IS_ALL = _f4(3.92)  # |u| beyond which erf u is ±1
# e^r − 1 ≈ r + r²·(c₀ + c₁r + …) for |r| ≤ ½ ln 2, and erf u ≈ u·P(u²)/Q(u²), with minimax relative error;
# scripts/kernel_coefficients.py computes these.
EXPM1 = (0.49999997, 0.16666539, 0.041667223, 0.00836718082, 0.00138824061)
ERF_OVER = (1.12837911, 0.190407589, 0.0527488664, 0.00376566313, 0.000284883485, 2.05007541e-06)
ERF_UNDER = (1.0, 0.502077043, 0.114109568, 0.0149693098, 0.00116254622, 3.80916317e-05)
_E0, _E1, _E2, _E3, _E4 = map(_f4, EXPM1)
_P0, _P1, _P2, _P3, _P4, _P5 = map(_f4, ERF_OVER)
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5 = map(_f4, ERF_UNDER)

_MAGNITUDE, _SIGN = _i4(0x7FFFFFFF), _i4(-(2**31))
_EXPONENT_OF_ONE, _INFINITY = _i4(127 << 23), _i4(255 << 23)

_fused = compiled(fastmath={"contract"})


@intrinsic
def _bits(typing_context: Any, number: Any) -> Any:
    """Return a float32 number's bits as int32."""
    return types.int32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float(typing_context: Any, bits: Any) -> Any:
    """Return the float32 number of these bits."""
    return types.float32(types.int32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@_fused
def _tanh(u: Any) -> Any:
    """Return tanh u as m/(m + 2), m = e^v − 1, v = 2|u|, to a relative error of 6.2ε at most; it is never beyond ±1.

    v = k·ln 2 + r with whole k, and m = 2^k·p + (2^k − 1) with p = e^r − 1 = r + r²·q. A relative error of m counts
    2/(m + 2) in the quotient; the sum m + 2 and the quotient itself add ε each.
    k = 0: r is exact, the error of q is below 2ε (its last sum and first coefficient), that of r²·q, at most 0.15 of p,
    is 4ε. With p's own sum and the polynomial's 0.3ε, m contributes less than 2ε: 4ε in total.
    k ≥ 1: r has an error of 0.35ε and p a further 2ε·|p|; m has 2^k times that, and its sum adds ε. The maximum is at
    the smallest such m, k = 1 and r = −0.35: m = 0.41 has an error of 5ε, which counts 4.2ε; then 6.2ε in total.
    """
    bits: Any = _bits(u)  # type: ignore[call-arg]
    magnitude = _float(_i4(bits & _MAGNITUDE))
    v = magnitude + magnitude
    v = _TANH_IS_ALL if v > _TANH_IS_ALL else v
    rounded = v * _LOG2_E + _WHOLE
    k = rounded - _WHOLE
    r = (v - k * _LN_2_HIGH) - k * _LN_2_LOW
    p = ((((_E4 * r + _E3) * r + _E2) * r + _E1) * r + _E0) * (r * r) + r
    power = _float(_i4(_i4(_bits(rounded) << _i4(23)) + _EXPONENT_OF_ONE))
    m = power * p + (power - _ONE)
    return _float(_i4(_bits(m / (m + _TWO)) | _i4(bits & _SIGN)))


@_fused
def _isru(u: Any) -> Any:
    """Return u / √(1 + u²) to a relative error of 3ε: half of those of u² and the sum, the root's, the quotient's.

    It is never beyond ±1: the rounded root of u² is |u| to the bit, and adding 1 under it makes it no smaller.
    """
    u = _ROOT_IS_ALL if u > _ROOT_IS_ALL else (-_ROOT_IS_ALL if u < -_ROOT_IS_ALL else u)
    return u / _f4(math.sqrt(_ONE + u * u))


@_fused
def _erf(u: Any) -> Any:
    """Return erf u to a relative error of 19ε at most; it is never beyond ±1.

    The formula's error is 0.32ε. All terms of both polynomials are positive: each sum and product adds ε times its
    share of the whole, at most 6.9ε above and 7.7ε below the line, at u² = 15.4. Coefficients add ½ε each, u² as much
    in the quotient, the last product and the quotient ε each.
    """
    u = _ERF_IS_ALL if u > _ERF_IS_ALL else (-_ERF_IS_ALL if u < -_ERF_IS_ALL else u)
    s = u * u
    over = ((((_P5 * s + _P4) * s + _P3) * s + _P2) * s + _P1) * s + _P0
    under = ((((_Q5 * s + _Q4) * s + _Q3) * s + _Q2) * s + _Q1) * s + _Q0
    y = u * over / under
    y = _ONE if u >= _ERF_IS_ALL or y > _ONE else y
    return -_ONE if u <= -_ERF_IS_ALL or y < -_ONE else y


def _widened(number: Any) -> Any:
    """Return float32 of a float32 number, or of bfloat16's bits."""


def _narrowed(number: Any, into: Any) -> Any:
    """Return a float32 number as an element of ``into``: float32, or the bits of the nearest bfloat16."""


@overload(_widened, strict=False)  # numba does not know the annotations' types
def _of_widened(number: Any) -> Any:
    if number == types.float32:
        return lambda number: number
    return lambda number: _float(_i4(_i4(number) << _i4(16)))  # type: ignore[call-arg]


@overload(_narrowed, strict=False)
def _of_narrowed(number: Any, into: Any) -> Any:
    if into.dtype == types.float32:
        return lambda number, into: number

    def narrowed(number: Any, into: Any) -> Any:
        bits: Any = _bits(number)  # type: ignore[call-arg]
        half = _i4(_i4(0x7FFF) + _i4(_i4(bits >> _i4(16)) & _i4(1)))  # ties go to even
        nearest = _i4(_i4(bits + half) >> _i4(16))
        return np.int16(nearest) if _i4(bits & _MAGNITUDE) <= _INFINITY else np.int16(0x7FC0)

    return narrowed


@_fused
def _apply(curve: int, x: Any, y: Any, alpha: Any, shift: Any, weight: Any, bias: Any) -> None:
    """Fill y with weight · f(αx + s) + bias, all at least as long as y."""
    if curve == TANH:
        for j in range(y.size):
            y[j] = _narrowed(weight[j] * _tanh(alpha[j] * _widened(x[j]) + shift[j]) + bias[j], y)
    elif curve == ISRU:
        for j in range(y.size):
            y[j] = _narrowed(weight[j] * _isru(alpha[j] * _widened(x[j]) + shift[j]) + bias[j], y)
    else:
        for j in range(y.size):
            y[j] = _narrowed(weight[j] * _erf(alpha[j] * _widened(x[j]) + shift[j]) + bias[j], y)


@_fused
def _lay_out(parameter: Any, into: Any) -> None:
    """Repeat a parameter, of one number or one a channel, until the array is full."""
    for first in range(0, into.size, parameter.size):
        for j in range(min(parameter.size, into.size - first)):
            into[first + j] = parameter[j]


@_fused
def fill(
    curve: int, x: Any, y: Any, alpha: Any, shift: Any, weight: Any, bias: Any, inner: int, start: int, stop: int
) -> None:
    """Fill the lines of y from ``start`` to ``stop`` with weight · f(αx + s) + bias.

    A line contains all channels at one position; or, if ``inner`` > 1 elements of a channel are contiguous, those.
    x and y are float32, or the bits of bfloat16 as int16. Parameters are float32, one number or one per channel; an
    absent shift or bias is −0, which added to anything preserves even the sign of zero.
    """
    channels = max(alpha.size, shift.size, weight.size, bias.size)
    if inner == 1:
        width = channels * max(1, _AT_ONCE // channels)
        laid_out = np.empty((4, width), np.float32)
        _lay_out(alpha, laid_out[0])
        _lay_out(shift, laid_out[1])
        _lay_out(weight, laid_out[2])
        _lay_out(bias, laid_out[3])
        for first in range(start * channels, stop * channels, width):
            last = min(first + width, stop * channels)
            _apply(curve, x[first:last], y[first:last], laid_out[0], laid_out[1], laid_out[2], laid_out[3])
        return
    width = min(inner, _AT_ONCE)
    laid_out = np.empty((4, width), np.float32)
    for line in range(start, stop):
        channel = line % channels
        laid_out[0], laid_out[1] = alpha[channel % alpha.size], shift[channel % shift.size]
        laid_out[2], laid_out[3] = weight[channel % weight.size], bias[channel % bias.size]
        for first in range(line * inner, (line + 1) * inner, width):
            last = min(first + width, (line + 1) * inner)
            _apply(curve, x[first:last], y[first:last], laid_out[0], laid_out[1], laid_out[2], laid_out[3])


def pointwise(x: Tensor, parameters: Parameters, curve: str, behind: int) -> Tensor | None:
    """Return weight · f(αx + s) + bias, computed in float32; None to leave it to plain torch.

    The loop takes contiguous float32 and bfloat16 tensors if no gradient is needed and no dispatch mode, tensor
    subclass or functorch transform is active. Plain torch reports parameters that do not fit. Rows are shared among
    torch's threads; the result is the same to the bit whatever their number. ``curve`` is ``tanh``, ``isru`` or
    ``erf``; ``behind`` counts the axes of x after the channels.

    >>> alpha = torch.ones(1)
    >>> with torch.no_grad():
    ...     pointwise(torch.tensor([[0.75, -3e38]]), (alpha, None, torch.tensor([1.0, 2.0]), None), "isru", 0)
    tensor([[ 0.6000, -2.0000]])
    """
    if not x.numel() or not x.is_contiguous() or not _plain(x, *parameters):
        return None
    if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (x, *parameters)):
        return None
    try:
        _, end = channel_axes(x, parameters, behind)
    except UsageError:
        return None
    y = torch.empty_like(x)
    inner = math.prod(x.shape[end:])
    numbers = [_NONE if p is None else p.detach().float().numpy().reshape(-1) for p in parameters]
    lines = x.numel() // (inner if inner > 1 else max(array.size for array in numbers))
    bits = torch.int16 if x.dtype == torch.bfloat16 else x.dtype
    elements = (tensor.detach().view(bits).numpy().reshape(-1) for tensor in (x, y))
    arguments = (_CURVES[curve], *elements, *numbers, inner)
    number = min(torch.get_num_threads(), x.numel() // _A_THREAD, lines)
    if number < 2:
        fill(*arguments, 0, lines)
        return y
    first, *shares = itertools.pairwise(lines * share // number for share in range(number + 1))
    futures = [threads().submit(fill, *arguments, *share) for share in shares]
    fill(*arguments, *first)
    for future in futures:
        future.result()
    return y


def _plain(*tensors: Tensor | None) -> bool:
    """True if no tensor subclass, dispatch mode, tracer or transform has to see what is computed."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in (Tensor, nn.Parameter) or tensor.is_neg()):
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or forward_ad._current_level >= 0
    )
