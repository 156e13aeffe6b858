"""What a point-wise function has learned, and which axes of an input it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from normscope.errors import UsageError


@dataclass(frozen=True)
class Parameters:
    """α, s, weight and bias: each one number, or one a channel in the shape of the axes that number the channels."""

    alpha: Tensor
    shift: Tensor | None
    weight: Tensor
    bias: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> Parameters:
        """Return what ``change`` makes of those that there are."""
        return Parameters(
            alpha=change(self.alpha),
            shift=None if self.shift is None else change(self.shift),
            weight=change(self.weight),
            bias=None if self.bias is None else change(self.bias),
        )

    def along(self, behind: int) -> Parameters:
        """View them such that they meet their channels in an input with ``behind`` axes after those of the channels.

        >>> import torch
        >>> Parameters(torch.ones(1), None, torch.ones(3), None).along(behind=2).weight.shape
        torch.Size([3, 1, 1])
        """
        if behind == 0:
            return self
        return self.each(lambda part: part if part.numel() == 1 else part.view(*part.shape, *[1] * behind))

    def channel_axes(self, x: Tensor, behind: int) -> tuple[int, int]:
        """Return which axis of x is the first that numbers channels, and which is the one after the last.

        Where no parameter has a number for each, it does not matter what a channel is: it is the last axis.

        Args:
            x: the input.
            behind: how many axes of it come after those of the channels.

        Raises:
            UsageError: if x has other channels than the parameters, or they differ among themselves, or are elsewhere.

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
