"""Point-wise functions as operators of torch, each opaque to torch.compile, torch.export and autograd."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from normscope.curves.known import CURVES
from normscope.errors import UsageError
from normscope.runtime.launches import EAGER, VARIABLE
from normscope.swaps.kernels import eager
from normscope.swaps.kernels.choice import asked_for_plain_torch, by_kernels
from normscope.swaps.kernels.eager import Parameters, unseen

launches: Any = None  # normscope.swaps.kernels.launch, which imports Triton, from the first launch on


def _launching() -> Any:
    global launches
    if launches is None:
        launches = import_module("normscope.swaps.kernels.launch")
    return launches


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
        y: Tensor = _launching().forward(x, parameters, curve, behind)
        return y
    parameters.channel_axes(x, behind)
    return torch.empty_like(x).copy_(eager.pointwise(x, CURVES[curve].function, parameters, behind))


@torch.library.custom_op("normscope::pointwise_backward", mutates_args=())
def pointwise_backward(
    dy: Tensor,
    x: Tensor,
    alpha: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    curve: str,
    behind: int,
    of_input: bool,
    of_parameters: bool,
) -> list[Tensor]:
    """Return the gradients of :func:`pointwise` by x, α, s, weight and bias, where ``dy`` is that by its output.

    ``of_input`` and ``of_parameters`` select gradients. Tensors that are not computed are empty, because an operator's
    lists contain nothing but tensors.

    Raises:
        UsageError: as :func:`pointwise`; if dy has another shape than x; for second derivatives and batched gradients.
    """
    parameters = Parameters(alpha, shift, weight, bias)
    _check_shape(dy, x)
    needed = (of_input, *[of_parameters] * len(vars(parameters)))
    gradients: tuple[Tensor | None, ...]
    if by_kernels(curve, x.device, x.dtype):
        gradients = _launching().backward(dy, x, parameters, curve, behind, needed)
    else:
        parameters.channel_axes(x, behind)
        f, derivative = CURVES[curve].function, CURVES[curve].derivative
        dx, *others = eager.pointwise_backward(dy, x, f, derivative, parameters, behind)
        # An operator must not return its inputs, and for one row of float64 the gradient by the bias is dy itself.
        by_parameters = [None if gradient is None else gradient.clone() for gradient in others]
        gradients = (None if dx is None else torch.empty_like(x).copy_(dx), *by_parameters)
    return [
        x.new_empty(0) if gradient is None or not asked else gradient
        for gradient, asked in zip(gradients, needed, strict=True)
    ]


@pointwise.register_fake
def _(
    x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, curve: str, behind: int
) -> Tensor:
    Parameters(alpha, shift, weight, bias).channel_axes(x, behind)
    return torch.empty_like(x)


@pointwise_backward.register_fake
def _(dy: Tensor, x: Tensor, *others: Any) -> list[Tensor]:
    *parameters, _, behind, of_input, of_parameters = others
    _check_shape(dy, x)
    Parameters(*parameters).channel_axes(x, behind)
    needed = [part if of_parameters else None for part in parameters]
    # Each absent gradient is a tensor of its own, as an operator's outputs must not share memory.
    by_parameters = [x.new_empty(0) if part is None else part.new_empty(part.shape) for part in needed]
    return [torch.empty_like(x) if of_input else x.new_empty(0), *by_parameters]


def _check_shape(dy: Tensor, x: Tensor) -> None:
    if dy.shape != x.shape or dy.device != x.device:
        received, expected = (f"{tuple(tensor.shape)} on {tensor.device}" for tensor in (dy, x))
        raise UsageError(f"The gradient is {received}, but the output {expected}.")


def check_no_tangents(*tensors: Tensor | None) -> None:
    """Raise UsageError if a tensor has a tangent: in forward mode torch would treat the operator as constant."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise _not_by_kernels("forward-mode derivative")


def _not_by_kernels(what: str) -> UsageError:
    return UsageError(f"The fused kernels have no {what}; plain torch has: set {VARIABLE}={EAGER}.")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.curve, ctx.behind = inputs
    ctx.save_for_backward(*tensors)


def back(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by :func:`pointwise`'s arguments; UsageError in forward mode and for batched gradients."""
    check_no_tangents(dy)
    # is_grads_batched=True uses torch's older vmap, for which an operator cannot register a batching rule.
    if torch._C._functorch.is_batchedtensor(dy) or torch._C._functorch.is_legacy_batchedtensor(dy):
        raise _not_by_kernels("batched gradients (vmap, is_grads_batched=True)")
    of_input, *of_each = ctx.needs_input_grad[:5]
    gradients = pointwise_backward(dy, *ctx.saved_tensors, ctx.curve, ctx.behind, of_input, any(of_each))
    selected = zip(gradients, (of_input, *of_each), strict=True)
    return (*(gradient if needed else None for gradient, needed in selected), None, None)


pointwise.register_autograd(back, setup_context=_save)


def _back_twice(ctx: Any, of_gradients: list[Tensor]) -> tuple[None, ...]:
    raise _not_by_kernels("second derivative")


pointwise_backward.register_autograd(_back_twice)


def bypassed(
    x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, curve: str, behind: int
) -> Tensor | None:
    """Compute :func:`pointwise` without torch's dispatcher; None if the operator has to be called.

    For small tensors, the dispatcher's work on an operator written in Python takes longer than everything else. The
    first call goes to the operator, which selects a kernel and caches its launch. Later calls do so if dispatch modes,
    tensor subclasses, transforms or forward mode have to see it.
    """
    if launches is None or asked_for_plain_torch() or not unseen(x, alpha, shift, weight, bias):
        return None
    parameters = Parameters(alpha, shift, weight, bias)
    plan = launches.plan_of(launches.kind_of(x, parameters, curve, behind))
    if plan is None:
        return None
    if torch.is_grad_enabled() and (
        x.requires_grad
        or alpha.requires_grad
        or weight.requires_grad
        or (shift is not None and shift.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _apply(x, alpha, shift, weight, bias, (parameters, curve, behind, plan))
    y: Tensor = launches.forward(x, parameters, curve, behind, plan)
    return y


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, call: Any
    ) -> Tensor:
        ctx.save_for_backward(x, alpha, shift, weight, bias)
        parameters, ctx.curve, ctx.behind, plan = call
        y: Tensor = launches.forward(x, parameters, ctx.curve, ctx.behind, plan)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *parts = saved = ctx.saved_tensors
        # Compilers see the operator, which refuses gradients of gradients and batched gradients.
        seen = torch.compiler.is_compiling() or torch.is_grad_enabled() or is_legacy_batchedtensor(dy)
        if seen or not unseen(dy, *saved):
            return back(ctx, dy)[:-1]  # curve and behind are one argument here
        needed = ctx.needs_input_grad[:-1]
        return (*launches.backward(dy, x, Parameters(*parts), ctx.curve, ctx.behind, needed), None)


# Function.apply without its support of torch.func's transforms, which bypassed() excludes.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Pointwise).apply
