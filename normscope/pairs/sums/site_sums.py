"""Sums and samples of one norm site, as the loops fill them: per bin of x, per channel and per token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from normscope.pairs.sums.sampling import PairSample, TokenSample


@dataclass(eq=False, repr=False, kw_only=True)
class SiteSums:
    """Sums and samples of one site.

    Attributes:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per fold and bin of x: float64 ``(folds, 6, bins)``; in memory, the six
            numbers of a bin are neighbours.
        density: number of pairs per cell of the two density grids: int64 ``(x bins, y bins)``.
        pairs: single pairs, drawn evenly over the bins.
        channel_sums: Σx and Σx² per channel: float64 ``(2, d)``.
        channel_extremes: smallest and largest x per channel: float32 ``(2, d)``.
        token_offsets: number of tokens per bin of mean/σ: int64 ``(token bins,)``.
        token_scales: number of tokens per bin of σ = 1/rstd: int64 ``(token bins,)``.
        nonfinite_tokens: number of tokens that contain a NaN or an infinity; they are in no sum.
        tokens: a uniform sample of whole tokens.
        largest: the tokens that contain the largest |x|.
        position_sums: number of tokens and Σx² by the position of a token in its sample, of all beyond
            :data:`POSITIONS` together: float64 ``(2, POSITIONS + 1)``; not of tokens whose position is unknown.
        first_moments: the moments of the tokens at the first position alone, or the first that is not left out: float64
            ``(bins, 6)``, without folds.
        grouped: whether a token is a group of channels over all positions. Its size may then differ, and the samples
            of whole tokens contain :data:`GROUPED_WIDTH` of its elements.
        gamma_moments: where requested, the moments weighted by γ², as is the error that reaches the next layer.
        diagonal_moments: where requested, the moments of the pairs (x_i, g_i): n, Σx, Σg, Σx², Σxg, Σg².
            g_i = ∂y_i/∂x_i is the diagonal of the token's Jacobian, for sites with :attr:`NormSite.has_diagonal`.
        channel_moments: where requested, the moments per channel, on a coarser grid and without folds: float64
            ``(6, d, channel bins)``.
    """

    moments: Tensor
    density: Tensor
    pairs: PairSample
    channel_sums: Tensor
    channel_extremes: Tensor
    token_offsets: Tensor
    token_scales: Tensor
    nonfinite_tokens: Tensor
    tokens: TokenSample
    largest: TokenSample
    position_sums: Tensor
    first_moments: Tensor
    grouped: bool = False
    gamma_moments: Tensor | None = None
    diagonal_moments: Tensor | None = None
    channel_moments: Tensor | None = None
