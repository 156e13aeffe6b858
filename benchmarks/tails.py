"""Made-up norm sites whose rows have heavy tails, as trained networks have them: what makes an S of straight lines."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def heavy_tailed(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Make tokens of lognormal σ, and two channels 30 and 20 times larger: float32 ``(tokens, channels)``."""
    channel = torch.exp(0.5 * torch.randn(channels, generator=torch.Generator().manual_seed(0)))
    channel[5] *= 30
    channel[77] *= -20
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(0.7 * torch.randn(tokens, 1, generator=generator))
    return scale * channel * torch.randn(tokens, channels, generator=generator)


class HeavyTailed(nn.Module):
    """LayerNorms one after the other, each of heavy-tailed tokens of its own, and a tenth larger than the last."""

    def __init__(self, sites: int, channels: int) -> None:
        """Make so many, without weights."""
        super().__init__()
        self.channels = channels
        self.norms = nn.ModuleList([nn.LayerNorm(channels, elementwise_affine=False) for _ in range(sites)])

    def rows(self, site: int, tokens: int) -> Tensor:
        """Make what a site normalizes: float32 ``(tokens, channels)``."""
        return 1.1**site * heavy_tailed(tokens, self.channels, seed=site)

    def forward(self, tokens: Tensor) -> None:
        """Run every norm on as many tokens as there are samples, and keep none of them."""
        for site, norm in enumerate(self.norms):
            norm(self.rows(site, len(tokens)))
