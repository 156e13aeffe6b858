"""Parameters of point-wise functions, and the check that they match an input."""

from __future__ import annotations

from torch import Tensor

from normscope.errors import UsageError

Parameters = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # α, s, weight, bias: one number or one per channel


def channel_axes(x: Tensor, parameters: Parameters, behind: int) -> tuple[int, int]:
    """Return the first channel axis of x and the axis after the last, where ``behind`` axes follow the channels.

    If all parameters are single numbers, the channels are the last axis.

    Raises:
        UsageError: if shapes or devices of x and the parameters do not match.

    >>> import torch
    >>> channel_axes(torch.ones(2, 3, 5, 5), (torch.ones(1), None, torch.ones(3), None), behind=2)
    (1, 2)
    """
    present = [parameter for parameter in parameters if parameter is not None]
    if elsewhere := [parameter.device for parameter in present if parameter.device != x.device]:
        raise UsageError(f"The input is on {x.device}, and a parameter on {elsewhere[0]}; move one to the other.")
    shapes = [tuple(parameter.shape) for parameter in present if parameter.numel() != 1]
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
