"""How the elements of a norm's input lie as tokens: rows that each share one mean and one scale.

A token of a LayerNorm is a vector of channels, at every position. A token of a GroupNorm, InstanceNorm or BatchNorm is
a group of channels of one sample over all positions, so that its size can differ from input to input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def token_rows(x: Tensor, axes: tuple[int, ...], batch_axis: int = 0) -> Tensor:
    """Move ``axes`` to the end and ``batch_axis`` to the front, and flatten to ``(tokens, d)``.

    >>> token_rows(torch.zeros(2, 8, 3, 3), axes=(1,)).shape
    torch.Size([18, 8])
    """
    others = token_axes(x, axes, batch_axis)
    d = math.prod(x.shape[axis] for axis in axes)
    return x.permute(*others, *(axis % x.ndim for axis in axes)).reshape(-1, d)


def token_axes(x: Tensor, axes: tuple[int, ...], batch_axis: int = 0) -> list[int]:
    """List the axes that number the tokens, in the order of :func:`token_rows`: samples first.

    >>> token_axes(torch.zeros(4, 2, 8), axes=(-1,), batch_axis=1)
    [1, 0]
    """
    normalized = {axis % x.ndim for axis in axes}
    others = [axis for axis in range(x.ndim) if axis not in normalized]
    if batch_axis in others:
        others = [batch_axis, *(axis for axis in others if axis != batch_axis)]
    return others


def group_rows(x: Tensor, groups: int) -> Tensor:
    """Lay ``(samples, channels, *positions)`` out as ``(samples · groups, channels of a group · positions)``.

    >>> group_rows(torch.zeros(2, 8, 3, 3), groups=4).shape
    torch.Size([8, 18])
    """
    return x.reshape(len(x) * groups, -1)


def group_channels(n_tokens: int, d: int, channels: int, groups: int) -> Tensor:
    """Number the channel of every element of :func:`group_rows`: int64 ``(tokens, d)``.

    >>> group_channels(2, 4, channels=4, groups=2)
    tensor([[0, 0, 1, 1],
            [2, 2, 3, 3]])
    """
    of_a_group = channels // groups
    first = torch.arange(n_tokens) % groups * of_a_group
    within = torch.arange(of_a_group).repeat_interleave(d // of_a_group)
    return first[:, None] + within


def by_channel(rows: Tensor, channels: int, groups: int) -> Tensor:
    """View :func:`group_rows` as ``(samples, channels, positions)``, where a weight per channel is easily applied."""
    return rows.reshape(len(rows) // groups, channels, -1)


def batch_axis(of_one_sample: torch.Size, shape: torch.Size, n_samples: int, positions: int | None) -> int | None:
    """Find the axis that grew with the number of samples: not the first one where sequences come first.

    It may also count all positions of all samples, and these may be more or fewer than those of the sample known.
    None where there is no such axis, and tokens cannot be told apart by sample: learned queries, for example.
    """
    if n_samples == 1:
        return 0
    if len(of_one_sample) != len(shape):
        return None
    counts = {n_samples * positions} if positions else set()
    grown = [axis for axis, one in enumerate(of_one_sample) if shape[axis] in {one * n_samples, *counts}]
    return min(grown, key=lambda axis: of_one_sample[axis], default=None)


def serves_all(
    of_one_sample: torch.Size, shape: torch.Size, positions_of_one: int | None, positions: int | None
) -> bool:
    """Tell of an input in which no axis grew with the number of samples whether none holds samples at all.

    Its axes are then as long as they are for one sample, except for positions. Where the samples have fewer positions
    than the sample known had, it cannot be told: two short samples may have the tokens of one long one.

    >>> one = torch.Size([1, 9, 8])
    >>> serves_all(one, torch.Size([1, 12, 8]), 9, 12), serves_all(one, torch.Size([3, 9, 8]), 9, 9)
    (True, False)
    """
    if positions_of_one is None or positions is None or positions < positions_of_one:
        return False
    sizes = list(zip(of_one_sample, shape, strict=False))
    return len(of_one_sample) == len(shape) and all(
        one == now or (one, now) == (positions_of_one, positions) for one, now in sizes
    )
