"""Parameters and memory layout of point-wise functions, and the functions in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad

from normscope.errors import UsageError

_PLAIN = (Tensor, nn.Parameter)


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


def unseen(*tensors: Tensor | None) -> bool:
    """True if no dispatch mode, tensor subclass or functorch transform is active, so the operator may be bypassed.

    >>> unseen(torch.ones(2), None)
    True
    """
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg()):
            return False
    return not (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or _get_tracing_state()
        or forward_ad._current_level >= 0
    )


class Strides(NamedTuple):
    """The strides of one tensor, in elements."""

    outer: int
    other: int
    channel: int


@dataclass(frozen=True)
class Layout:
    """Memory layout shared by several tensors of one shape: outers × others × channels elements."""

    outers: int  # 1 if one stride spans all axes but the channels'
    others: int
    channels: int
    channels_in_columns: bool  # neighbouring channels are closer together in memory than neighbouring others
    strides: tuple[Strides, ...]  # of each tensor


class _Axis(NamedTuple):
    size: int
    strides: tuple[int, ...]  # of each tensor


def layout_of(tensors: Sequence[Tensor], begin: int, end: int) -> Layout | None:
    """Return the layout of non-empty tensors of one shape, whose channel axes are ``begin`` to ``end`` - 1.

    Returns None if the strides of a tensor span its axes neither as one nor as two, apart from the channels.

    >>> import torch
    >>> layout_of([torch.empty(2, 6, 5, 4)[:, 1:]], begin=3, end=4)
    Layout(outers=2, others=25, channels=4, channels_in_columns=True, strides=(Strides(outer=120, other=4, channel=1),))
    >>> layout_of([torch.empty(2, 3, 5)], begin=1, end=2)
    Layout(outers=2, others=5, channels=3, channels_in_columns=False, strides=(Strides(outer=15, other=1, channel=5),))
    """
    axes = list(map(_Axis, tensors[0].shape, zip(*(tensor.stride() for tensor in tensors), strict=True)))
    channels = _merged(axes[begin:end])
    # An expanded tensor's strides of zero decide nothing.
    rest = _merged(sorted(axes[:begin] + axes[end:], key=lambda axis: max(axis.strides), reverse=True))
    if len(channels) > 1 or len(rest) > 2:
        return None
    none = _Axis(1, (0,) * len(tensors))
    [channel] = channels or [none]
    outer, other = [none, none, *rest][-2:]
    strides = tuple(map(Strides, outer.strides, other.strides, channel.strides))
    in_columns = channel.size > 1 and (other.size == 1 or max(channel.strides) <= max(other.strides))
    return Layout(outer.size, other.size, channel.size, in_columns, strides)


def _merged(axes: Sequence[_Axis]) -> list[_Axis]:
    """Drop axes of one element, and join neighbours that form one axis in the memory of every tensor."""
    merged: list[_Axis] = []
    for size, strides in axes:
        if size == 1:
            continue
        if merged and merged[-1].strides == tuple(stride * size for stride in strides):
            merged[-1] = _Axis(merged[-1].size * size, strides)
        else:
            merged.append(_Axis(size, strides))
    return merged


Function = Callable[[Tensor], Tensor]


class Gradients(NamedTuple):
    """Gradients of a loss by the input and each parameter; None without such a parameter, or if it is not needed."""

    x: Tensor | None
    alpha: Tensor | None
    shift: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


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
) -> Gradients:
    """Return the gradients of :func:`pointwise` in plain torch, summed in float64; ``derivative`` is f′."""
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
