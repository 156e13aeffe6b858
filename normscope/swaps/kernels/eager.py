"""Point-wise functions in plain torch: the truth for the kernels, and what runs where Triton does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from normscope.swaps.kernels.parameters import Parameters

Function = Callable[[Tensor], Tensor]


class Gradients(NamedTuple):
    """Gradients of a loss by the input and each parameter; None where there is no such parameter or none is wanted."""

    x: Tensor | None
    alpha: Tensor | None
    shift: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def pointwise(x: Tensor, function: Function, parameters: Parameters, behind: int) -> Tensor:
    """Weight · f(αx + s) + bias in plain torch, in float32 at least.

    Args:
        x: of any shape.
        function: f, elementwise.
        parameters: α, s, weight and bias.
        behind: how many axes of x come after those of the channels.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        UsageError: if x would have to grow to the parameters' shape.
    """
    inside = torch.promote_types(x.dtype, torch.float32)
    there = parameters.along(behind)
    u = there.alpha.to(inside) * x.to(inside)
    if there.shift is not None:
        u = u + there.shift.to(inside)
    y = there.weight.to(inside) * function(u)
    if there.bias is not None:
        y = y + there.bias.to(inside)
    if y.shape != x.shape:
        parameters.channel_axes(x, behind)
        y = y.reshape(x.shape)  # where parameters of one number have more axes than x
    return y.to(x.dtype)


def pointwise_backward(
    dy: Tensor, x: Tensor, function: Function, derivative: Function, parameters: Parameters, behind: int
) -> Gradients:
    """Go back through :func:`pointwise` in plain torch; the sums are float64.

    ``dy`` is the gradient of the loss by :func:`pointwise`'s output, of x's shape; ``derivative`` is f′, and the others
    are as there.

    Returns:
        Gradients of the shapes and dtypes of what they are by.
    """
    inside = torch.promote_types(x.dtype, torch.float32)
    there = parameters.along(behind).each(lambda part: part.to(inside))
    values, upstream = x.to(inside), dy.to(inside)
    u = there.alpha * values
    if there.shift is not None:
        u = u + there.shift
    by_shift = there.weight * upstream * derivative(u)

    def summed(terms: Tensor, along: Tensor | None, parameter: Tensor | None) -> Tensor | None:
        if along is None or parameter is None:
            return None
        return terms.double().sum_to_size(along.shape).reshape(parameter.shape).to(parameter.dtype)

    return Gradients(
        x=(there.alpha * by_shift).to(x.dtype).reshape(x.shape),
        alpha=summed(by_shift * values, there.alpha, parameters.alpha),
        shift=summed(by_shift, there.shift, parameters.shift),
        weight=summed(upstream * function(u), there.weight, parameters.weight),
        bias=summed(upstream, there.bias, parameters.bias),
    )
