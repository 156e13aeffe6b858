"""What is drawn of single tokens and pairs: the samples that a capture keeps."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.pairs.stats import PairStats

Array = NDArray[np.float64]
_EXTREME_CHANNELS = 4


def extreme_channels(stats: PairStats) -> list[int]:
    """Return the channels that reach the largest |x|, the largest first."""
    return [int(i) for i in stats.reach.argsort(descending=True)[:_EXTREME_CHANNELS]]


def token_scales(stats: PairStats) -> tuple[float, float]:
    """Return the smallest and largest σ among the drawn tokens."""
    scale = 1 / drawn_tokens(stats)[2]
    return (float(np.min(scale)), float(np.max(scale))) if len(scale) else (float("nan"), float("nan"))


def drawn_tokens(stats: PairStats) -> tuple[Array, Array, Array]:
    """Return x and y, float64 ``(tokens, d)``, and 1/σ, ``(tokens,)``, of the sampled and of the largest tokens."""

    def both(name: str) -> Array:
        drawn: Array = torch.cat([getattr(stats.tokens, name), getattr(stats.largest, name)]).double().numpy()
        return drawn

    return both("x"), both("y"), both("rstd")


def drawn_pairs(stats: PairStats) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return x, y and channel, ``(pairs,)``, of those tokens and of the pairs that are drawn evenly over x."""
    token_x, token_y, _ = drawn_tokens(stats)
    if stats.grouped:  # of whose tokens only the single pairs know their channel
        token_x, token_y = token_x[:0], token_y[:0]
    channels = np.broadcast_to(np.arange(token_x.shape[1]), token_x.shape)
    filled = stats.pairs.filled
    return (
        np.concatenate([token_x.ravel(), stats.pairs.x[filled].double().numpy()]),
        np.concatenate([token_y.ravel(), stats.pairs.y[filled].double().numpy()]),
        np.concatenate([channels.ravel(), stats.pairs.channel[filled].long().numpy()]),
    )
