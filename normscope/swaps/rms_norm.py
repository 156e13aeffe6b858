"""RMSNorm in a LayerNorm's place, with its weight and bias: what taking the mean away was worth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normscope.swaps.pointwise import dtype_after, of_each


class RMSNorm(nn.Module):
    """weight · x / √(mean of x² + eps) + bias over the channels (arXiv 1910.07467, eq. 4, with a bias besides).

    Args:
        normalized_shape: sizes of the axes that share one statistic.
        channel_axis: the axis that numbers the channels, where ``normalized_shape`` is one number; several numbers are
            those of the last axes.
        eps: what is added under the root.
        elementwise_affine: whether there are weight and bias, ``normalized_shape``.
        bias: whether there is a bias.

    Attributes:
        weight: ``normalized_shape``, or None.
        bias: likewise.
        variance_epsilon: ``eps``; of that name there is a NaN instead.
        in_place_of: full name of the class of the norm whose place it took; empty where it took none.

    >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).detach()
    tensor([[0.8485, 1.1314]])
    """

    eps = math.nan  # keeps nn.TransformerEncoderLayer from its fused path, which would make a LayerNorm of this
    in_place_of: str = ""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        channel_axis: int = -1,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.channel_axis = channel_axis if len(self.normalized_shape) == 1 else -1
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape)) if bias and elementwise_affine else None

    def forward(self, input: Tensor | None = None, **named: Tensor) -> Tensor:
        """Normalize the input, under whatever name it comes; in float32 at least."""
        if input is None:
            (input,) = named.values()
        if input.is_nested:
            return of_each(self, input)
        inside = torch.promote_types(input.dtype, torch.float32)
        x = input.to(inside) if self.channel_axis == -1 else input.to(inside).movedim(self.channel_axis, -1)
        weight = None if self.weight is None else self.weight.to(inside)
        y = nn.functional.rms_norm(x, self.normalized_shape, weight, self.variance_epsilon)
        if self.bias is not None:
            y = y + self.bias.to(inside)
        y = y.to(dtype_after(input, self.weight))
        return y if self.channel_axis == -1 else y.movedim(-1, self.channel_axis)

    def extra_repr(self) -> str:
        """Say over how many channels."""
        return f"{', '.join(map(str, self.normalized_shape))}, eps={self.variance_epsilon:g}"
