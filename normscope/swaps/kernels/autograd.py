"""Calls of the kernels by the shortest way on the host: past torch's dispatcher, where nothing looks on there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from normscope.swaps.kernels import operators
from normscope.swaps.kernels.choice import asked_for_plain_torch, unseen


def pointwise(
    x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, curve: str, behind: int
) -> Tensor | None:
    """Return what the operator :func:`normscope.swaps.kernels.operators.pointwise` returns, without calling it.

    For small tensors, what torch does around an operator that is written in Python takes longer than all else.

    Returns:
        None where the operator has to be called: the first time, for it decides whether there is a kernel and leaves a
        plan of its launch; and where modes, subclasses or transforms of torch are to see it, or forward mode.
    """
    plans = operators.plans
    if plans is None or asked_for_plain_torch() or not unseen(x, alpha, shift, weight, bias):
        return None
    kind, at_x, at_parts = plans.kind_of((curve, behind), x, alpha, shift, weight, bias)
    plan = plans.known(kind)
    if plan is None:
        return None
    if torch.is_grad_enabled() and (
        x.requires_grad
        or alpha.requires_grad
        or weight.requires_grad
        or (shift is not None and shift.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _apply(x, alpha, shift, weight, bias, (curve, behind, plan, at_x, at_parts))
    y: Tensor = plans.follow(x, plan, at_x, at_parts)
    return y


_GIVEN = 6  # of what the operator is given, curve and behind are one here


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, call: Any
    ) -> Tensor:
        ctx.save_for_backward(x, alpha, shift, weight, bias)
        ctx.curve, ctx.behind, plan, at_x, at_parts = call
        y: Tensor = operators.plans.follow(x, plan, at_x, at_parts)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # The operator is what compilers see, and says so of what it cannot do: gradients of gradients, several at once.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_legacy_batchedtensor(dy):
            return operators.back(ctx, dy)[:_GIVEN]
        saved = ctx.saved_tensors
        if not unseen(dy, *saved):
            return operators.back(ctx, dy)[:_GIVEN]
        gradients = operators.plans.backward(dy, saved, ctx.curve, ctx.behind, ctx.needs_input_grad[:-1])
        return (*gradients, None)


# Of Function.apply, what is not for torch.func's transforms, of which there are none here.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Pointwise).apply
