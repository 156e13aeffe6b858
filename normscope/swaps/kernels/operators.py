"""Point-wise functions as operators of torch, each opaque to torch.compile, torch.export and autograd."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normscope.curves.known import CURVES
from normscope.errors import UsageError
from normscope.swaps.kernels import eager
from normscope.swaps.kernels.choice import by_kernels
from normscope.swaps.kernels.eager import Parameters


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
    parameters = Parameters(alpha, shift, weight, bias)
    if by_kernels(curve, x.device, x.dtype):
        from normscope.swaps.kernels import launch  # imports Triton

        return launch.forward(x, parameters, curve, behind)
    parameters.channel_axes(x, behind)
    return torch.empty_like(x).copy_(eager.pointwise(x, CURVES[curve].function, parameters, behind))


@torch.library.custom_op("normscope::pointwise_backward", mutates_args=())
def pointwise_backward(
    dy: Tensor, x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, curve: str,
    behind: int,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of :func:`pointwise` by x and each parameter, where ``dy`` is that by its output.

    Raises:
        UsageError: as :func:`pointwise`; if dy has another shape than x.
    """
    parameters = Parameters(alpha, shift, weight, bias)
    _check_shape(dy, x)
    if by_kernels(curve, x.device, x.dtype):
        from normscope.swaps.kernels import launch

        gradients = launch.backward(dy, x, parameters, curve, behind)
    else:
        parameters.channel_axes(x, behind)
        f, derivative = CURVES[curve].function, CURVES[curve].derivative
        dx, *others = eager.pointwise_backward(dy, x, f, derivative, parameters, behind)
        # An operator must not return its inputs, and for one row of float64 the gradient by the bias is dy itself.
        gradients = [
            torch.empty_like(x).copy_(cast(Tensor, dx)),
            *(None if part is None else part.clone() for part in others),
        ]
    return [gradient for gradient in gradients if gradient is not None]


@pointwise.register_fake
def _(
    x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, curve: str, behind: int
) -> Tensor:
    Parameters(alpha, shift, weight, bias).channel_axes(x, behind)
    return torch.empty_like(x)


@pointwise_backward.register_fake
def _(dy: Tensor, x: Tensor, *others: Any) -> list[Tensor]:
    *parts, _, behind = others
    _check_shape(dy, x)
    Parameters(*parts).channel_axes(x, behind)
    return [torch.empty_like(x), *(part.new_empty(part.shape) for part in parts if part is not None)]


def _check_shape(dy: Tensor, x: Tensor) -> None:
    if dy.shape != x.shape or dy.device != x.device:
        received, expected = (f"{tuple(tensor.shape)} on {tensor.device}" for tensor in (dy, x))
        raise UsageError(f"The gradient is {received}, but the output {expected}.")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.curve, ctx.behind = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, *parts = ctx.saved_tensors
    if _in_plain_torch(dy):
        curve = CURVES[ctx.curve]
        gradients = eager.pointwise_backward(dy, x, curve.function, curve.derivative, Parameters(*parts), ctx.behind)
    else:
        present = iter(pointwise_backward(dy, x, *parts, ctx.curve, ctx.behind))
        gradients = [None if part is None else next(present) for part in (x, *parts)]
    return (*gradients, None, None)


def _in_plain_torch(dy: Tensor) -> bool:
    """True if further derivatives are taken, or batched ones, for which the operator has no rule."""
    batched = torch._C._functorch.is_batchedtensor(dy) or torch._C._functorch.is_legacy_batchedtensor(dy)
    return batched or torch.is_grad_enabled() or forward_ad._current_level >= 0


pointwise.register_autograd(_back, setup_context=_save)
