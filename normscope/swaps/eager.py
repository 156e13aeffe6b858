"""Point-wise functions in plain torch, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normscope.swaps import standalone
from normscope.swaps.kernels.parameters import Parameters, channel_axes

Function = Callable[[Tensor], Tensor]


def pointwise(x: Tensor, function: Function, parameters: Parameters, behind: int) -> Tensor:
    """Return weight · f(αx + s) + bias, computed in float32 at least, in x's shape and dtype.

    Raises:
        UsageError: if x would have to grow to the parameters' shape.
    """
    inside = torch.promote_types(x.dtype, torch.float32)
    y = standalone.pointwise(x.to(inside), function, *parameters, behind)
    if y.shape != x.shape:
        channel_axes(x, parameters, behind)
        y = y.reshape(x.shape)  # parameters of one number may have more axes than x
    return y.to(x.dtype)


def pointwise_backward(
    dy: Tensor, x: Tensor, function: Function, derivative: Function, parameters: Parameters, behind: int
) -> list[Tensor | None]:
    """Return the gradients of :func:`pointwise` by x and each parameter, summed in float64; ``derivative`` is f′."""
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
