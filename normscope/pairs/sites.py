"""What is known of a normalization layer: where it stands and over what it normalizes, or why it is skipped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NormSite:
    """One normalization layer of a network.

    Attributes:
        index: its number in the order of first calls.
        name: its module path.
        kind: its name in the table of norms.
        normalized_shape: sizes of the axes that share one statistic, at the first call.
        channel_axis: the axis or axes of the norm's input that number the channels.
        channels: number of channels.
        eps: what is added under the root.
        affine: whether it has a weight or a bias of its own.
        placement: ``pre-norm``, ``post-norm``, ``qk``, ``final``, or None for a norm beside the residual stream.
        calls: how often one forward pass calls it.
        tokens_per_sample: how many vectors it normalizes for one sample, over all calls.
        centred: whether it takes the token's mean away.
        bounded: whether the statistics are the token's own, so that √d bounds |y|.
        grouped: whether a token is a group of channels over all positions; its size may differ from input to input.
        form: name of the form by which a token's line follows from its elements, see
            :data:`normscope.pairs.formulas.FORMS`; None where it follows from something else: running statistics, or a
            formula that the user registered.
    """

    index: int
    name: str
    kind: str
    normalized_shape: tuple[int, ...]
    channel_axis: int | tuple[int, ...]
    channels: int
    eps: float
    affine: bool
    placement: str | None
    calls: int
    tokens_per_sample: int
    centred: bool
    bounded: bool = True
    grouped: bool = False
    form: str | None = None

    @property
    def d(self) -> int:
        """Number of elements of one token; of a grouped norm, at its first call."""
        return torch.Size(self.normalized_shape).numel()

    @property
    def has_diagonal(self) -> bool:
        """Whether the diagonal of its Jacobian follows from each token: what sums of the diagonal are kept of."""
        return self.form is not None and not self.grouped and self.d > 1

    @property
    def bound(self) -> float:
        """Largest possible |y|: √(d−1) with centring, √d without; infinite where nothing that is known bounds it."""
        return math.sqrt(self.d - self.centred) if self.bounded else math.inf


@dataclass(frozen=True)
class SkippedNorm:
    """A normalization that normscope saw and could not observe, and why."""

    name: str
    kind: str
    reason: str
