"""Scales and shifts that a linear layer gives each sample behind a norm, as adaLN does: found, and fitted.

A function of x alone serves all timesteps of a diffusion transformer, though σ differs from one to the next. What
modulates its output knows the timestep, and can make up for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Of sums that the network itself takes in its own precision.
_SAME = 1e-2
_MOST_PARTS = 12  # that a layer's output is cut into
_SHRUNK = 0.02  # of a channel's mean variance, by which a sample's own scale is held to the present one


@dataclass(frozen=True)
class Modulation:
    """What becomes of a norm's output y: y · (1 + scale) + shift, both parts of what one layer gives for the sample.

    Attributes:
        layer: path of the linear layer.
        scale: the first of its channels that are the scale.
        shift: likewise.
    """

    layer: str
    scale: int
    shift: int

    def channels(self, size: int) -> Tensor:
        """The layer's channels that are scale and shift, in this order, of a norm of so many channels."""
        return torch.cat([first + torch.arange(size) for first in (self.scale, self.shift)])


def modulation_of(output: Tensor, taken: Tensor, layers: Sequence[tuple[str, Tensor]]) -> Modulation | None:
    """Tell what modulates a norm's output from what the next layer takes; None where nothing does.

    Args:
        output: of the norm: ``(samples, tokens, channels)``.
        taken: what the next layer takes, likewise.
        layers: paths of linear layers that were called before, and what they gave.

    >>> y, given = torch.randn(2, 9, 4), torch.randn(2, 12)
    >>> modulation_of(y, y * (1 + given[:, None, 8:]) + given[:, None, :4], [("adaln", given)])
    Modulation(layer='adaln', scale=8, shift=0)
    """
    if output.ndim != 3 or output.shape != taken.shape:
        return None
    size = output.shape[-1]
    for path, given in layers:
        if given.ndim != 2 or len(given) != len(output) or given.shape[1] % size or given.shape[1] > _MOST_PARTS * size:
            continue
        parts = list(enumerate(given[:, None].chunk(given.shape[1] // size, dim=-1)))
        for (first, scale), (second, shift) in itertools.permutations(parts, 2):
            if _is(output * (1 + scale) + shift, taken):
                return Modulation(path, first * size, second * size)
    return None


def best_for_each_sample(given: Tensor, wanted: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and shift for each sample and channel with which given · (1 + scale) + shift comes nearest to wanted.

    Args:
        given: ``(samples, tokens, channels)``.
        wanted: likewise.
        present: scales, which those of channels that hardly vary are held to: ``(samples, channels)``.

    Returns:
        Scale and shift, each float64 ``(samples, channels)``, on the CPU.
    """
    given, wanted, present = (value.cpu().double() for value in (given, wanted, present))
    centres = given.mean(1), wanted.mean(1)
    about = given - centres[0][:, None]
    spread, common = about.square().mean(1), (about * (wanted - centres[1][:, None])).mean(1)
    held = (_SHRUNK * spread.mean(0)).clamp_min(torch.finfo(torch.float64).tiny)
    slope = (common + held * (1 + present)) / (spread + held)
    return slope - 1, centres[1] - slope * centres[0]


def _is(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _SAME * other.norm())
