"""Parameters of point-wise functions, and the functions in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.errors import UsageError


@dataclass  # not frozen: that would double the time to make one, at every call
class Parameters:
    """α, s, weight and bias: each one number, or one per channel in the shape of the channel axes."""

    alpha: Tensor
    shift: Tensor | None
    weight: Tensor
    bias: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> Parameters:
        """Apply a function to each parameter that is not None."""
        parts = {name: None if part is None else change(part) for name, part in vars(self).items()}
        return Parameters(**parts)  # type: ignore[arg-type]

    def along(self, behind: int) -> Parameters:
        """Append ``behind`` axes of one element, so that parameters broadcast against an input.

        >>> import torch
        >>> Parameters(torch.ones(1), None, torch.ones(3), None).along(behind=2).weight.shape
        torch.Size([3, 1, 1])
        """
        if behind == 0:
            return self
        return self.each(lambda part: part if part.numel() == 1 else part.view(*part.shape, *[1] * behind))

    def channel_axes(self, x: Tensor, behind: int) -> tuple[int, int]:
        """Return the first channel axis of x and the axis after the last, where ``behind`` axes follow the channels.

        If all parameters are single numbers, the channels are the last axis.

        Raises:
            UsageError: if shapes or devices of x and the parameters do not match.

        >>> import torch
        >>> Parameters(torch.ones(1), None, torch.ones(3), None).channel_axes(torch.ones(2, 3, 5, 5), behind=2)
        (1, 2)
        """
        parts = [part for part in vars(self).values() if part is not None]
        if elsewhere := [part.device for part in parts if part.device != x.device]:
            raise UsageError(f"The input is on {x.device}, and a parameter on {elsewhere[0]}; move one to the other.")
        shapes = [tuple(part.shape) for part in parts if part.numel() != 1]
        if not shapes:
            return x.ndim - min(x.ndim, 1), x.ndim
        end = x.ndim - behind
        begin = end - len(shapes[0])
        if begin < 0 or any(shape != tuple(x.shape[begin:end]) for shape in shapes):
            raise UsageError(
                f"Parameters of shape {' and '.join(dict.fromkeys(map(str, shapes)))} do not go with an input of "
                f"{tuple(x.shape)} that has {behind} axes after those of its channels."
            )
        return begin, end


Function = Callable[[Tensor], Tensor]


def pointwise(x: Tensor, function: Function, parameters: Parameters, behind: int) -> Tensor:
    """Return weight · f(αx + s) + bias in plain torch, computed in float32 at least, in x's shape and dtype.

    ``behind`` axes of x follow those of the channels.

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
) -> list[Tensor | None]:
    """Return the gradients of :func:`pointwise` by x, α, s, weight and bias; ``derivative`` is f′.

    Plain torch computes them, and sums in float64.
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

    return [
        (there.alpha * by_shift).to(x.dtype).reshape(x.shape),
        summed(by_shift * values, there.alpha, parameters.alpha),
        summed(by_shift, there.shift, parameters.shift),
        summed(upstream * function(u), there.weight, parameters.weight),
        summed(upstream, there.bias, parameters.bias),
    ]
