"""Point-wise functions in plain torch, and as operators that are opaque to torch.compile, torch.export and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normscope.curves.known import CURVES
from normscope.swaps import standalone
from normscope.swaps.kernels.choice import by_kernels
from normscope.swaps.kernels.parameters import Parameters, channel_axes

Function = Callable[[Tensor], Tensor]


def eager(x: Tensor, function: Function, parameters: Parameters, behind: int) -> Tensor:
    """Return weight · f(αx + s) + bias in plain torch, computed in float32 at least, in x's shape and dtype."""
    inside = torch.promote_types(x.dtype, torch.float32)
    y = standalone.pointwise(x.to(inside), function, *parameters, behind)
    if y.shape != x.shape:
        channel_axes(x, parameters, behind)
        y = y.reshape(x.shape)  # parameters of one number may have more axes than x
    return y.to(x.dtype)


def eager_backward(
    dy: Tensor, x: Tensor, function: Function, derivative: Function, parameters: Parameters, behind: int
) -> list[Tensor | None]:
    """Return the gradients of :func:`eager` by x and each parameter, summed in float64; ``derivative`` is f′."""
    inside = torch.promote_types(x.dtype, torch.float32)
    alpha, shift, weight, bias = (
        None if p is None else (p if p.numel() == 1 else p.view(*p.shape, *[1] * behind)).to(inside) for p in parameters
    )
    assert alpha is not None and weight is not None  # noqa: S101 - as they were
    values, upstream = x.to(inside), dy.to(inside)
    u = alpha * values if shift is None else alpha * values + shift
    by_shift = weight * upstream * derivative(u)
    terms = (by_shift * values, by_shift, upstream * function(u), upstream)
    sums = [
        None if p is None or along is None else term.double().sum_to_size(along.shape).reshape(p.shape).to(p.dtype)
        for term, along, p in zip(terms, (alpha, shift, weight, bias), parameters, strict=True)
    ]
    return [(alpha * by_shift).to(x.dtype).reshape(x.shape), *sums]


@torch.library.custom_op("normscope::pointwise", mutates_args=())
def pointwise(
    x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, curve: str, behind: int
) -> Tensor:
    """Return weight · f(αx + s) + bias from Triton's kernel if there is one, otherwise from plain torch.

    α, s, weight and bias are each one number, or one per channel. ``curve`` is ``tanh``, ``isru`` or ``erf``, and
    ``behind`` axes of x follow the channels. The result has x's shape and dtype, computed in float32 at least.

    Raises:
        UsageError: if parameters have other channels or another device, or ``NORMSCOPE_KERNELS`` cannot be met.

    >>> alpha = torch.ones(1)
    >>> pointwise(torch.tensor([[0.75, -3e38]]), alpha, None, torch.tensor([1.0, 2.0]), None, "isru", 0)
    tensor([[ 0.6000, -2.0000]])
    """
    parameters = alpha, shift, weight, bias
    if by_kernels(curve, x.device, x.dtype):
        from normscope.swaps.kernels import launch  # imports Triton

        return launch.forward(x, parameters, curve, behind)
    channel_axes(x, parameters, behind)
    return torch.empty_like(x).copy_(eager(x, CURVES[curve].function, parameters, behind))


@torch.library.custom_op("normscope::pointwise_backward", mutates_args=())
def pointwise_backward(
    dy: Tensor, x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, curve: str,
    behind: int,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of :func:`pointwise` by x and each parameter, where ``dy`` is that by its output."""
    parameters = alpha, shift, weight, bias
    if by_kernels(curve, x.device, x.dtype):
        from normscope.swaps.kernels import launch

        gradients = launch.backward(dy, x, parameters, curve, behind)
    else:
        channel_axes(x, parameters, behind)
        f, derivative = CURVES[curve].function, CURVES[curve].derivative
        dx, *sums = eager_backward(dy, x, f, derivative, parameters, behind)
        # An operator must not return its inputs, and for one row of float64 the gradient by the bias is dy itself.
        gradients = [
            torch.empty_like(x).copy_(cast(Tensor, dx)),
            *(None if gradient is None else gradient.clone() for gradient in sums),
        ]
    return [gradient for gradient in gradients if gradient is not None]


@pointwise.register_fake
def _(
    x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, curve: str, behind: int
) -> Tensor:
    channel_axes(x, (alpha, shift, weight, bias), behind)
    return torch.empty_like(x)


@pointwise_backward.register_fake
def _(dy: Tensor, x: Tensor, *arguments: Any) -> list[Tensor]:
    *parameters, _, behind = arguments
    channel_axes(x, tuple(parameters), behind)
    return [torch.empty_like(x), *(p.new_empty(p.shape) for p in parameters if p is not None)]


def _back(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, *parameters = ctx.saved_tensors
    batched = torch._C._functorch.is_batchedtensor(dy) or torch._C._functorch.is_legacy_batchedtensor(dy)
    if batched or torch.is_grad_enabled() or forward_ad._current_level >= 0:
        # The operator has no rule for further derivatives, nor for batched ones.
        f, derivative = CURVES[ctx.curve].function, CURVES[ctx.curve].derivative
        gradients = eager_backward(dy, x, f, derivative, tuple(parameters), ctx.behind)
    else:
        present = iter(pointwise_backward(dy, x, *parameters, ctx.curve, ctx.behind))
        gradients = [None if tensor is None else next(present) for tensor in (x, *parameters)]
    return (*gradients, None, None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.curve, ctx.behind = inputs
    ctx.save_for_backward(*tensors)


pointwise.register_autograd(_back, setup_context=_save)
