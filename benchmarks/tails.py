"""Token rows with heavy tails, as trained networks have them: what makes an S of a norm's straight lines."""

from __future__ import annotations

import torch
from torch import Tensor


def heavy_tailed(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Make tokens of lognormal σ, and two channels 30 and 20 times larger: float32 ``(tokens, channels)``."""
    channel = torch.exp(0.5 * torch.randn(channels, generator=torch.Generator().manual_seed(0)))
    channel[5] *= 30
    channel[77] *= -20
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(0.7 * torch.randn(tokens, 1, generator=generator))
    return scale * channel * torch.randn(tokens, channels, generator=generator)
