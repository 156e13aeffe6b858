"""The arguments of the loops: the tokens of one call of a norm, and the sums of its site that they are added to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from normscope.norms.formulas import Lines
from normscope.pairs.sums.sampling import NO_KEY, PairSample, TokenSample, token_keys

POSITIONS = 4096  # whose tokens are summed apart; those of all further positions are summed together


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one sample.

    Attributes:
        start: row of the first.
        stop: row behind the last.
        fold: of the sample.
        key: of the sample, from which the keys of its tokens follow.
        position: number of the first within its sample.
        sample: number of the sample within its data set; −1 if it is not known.
    """

    start: int
    stop: int
    fold: int
    key: int
    position: int
    sample: int


class Positions(NamedTuple):
    """Positions of tokens in their sequences: samples, or the heads of samples."""

    numbers: Tensor  # number of each among the data of its sequence, int64 (tokens,); of padding, any number
    first: int  # the position whose pairs are also summed apart
    sequences: int  # each has one token at a position, at most


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call of one norm.

    Attributes:
        rows: their elements, ``(tokens, d)``, of any floating dtype.
        lines: of the tokens.
        runs: the rows of each sample, in order and without gaps.
        channels: number of channels of the norm.
        groups: number of groups of a grouped norm, whose tokens come group by group; None for other norms.
        valid: False for padding, bool ``(tokens,)``; None for no padding.
        gamma: weight of each channel, ``(channels,)``, for the sums that are weighted by its square.
        in_sequence: positions of the tokens in their sequences; None if they are unknown.
    """

    rows: Tensor
    lines: Lines
    runs: Sequence[Run]
    channels: int
    groups: int | None = None
    valid: Tensor | None = None
    gamma: Tensor | None = None
    in_sequence: Positions | None = None

    @property
    def positions(self) -> int:
        """Number of neighbouring elements of a token that are of one channel."""
        return 1 if self.groups is None else self.rows.shape[1] * self.groups // self.channels

    def channel_of(self, rows: slice) -> Tensor:
        """Number the channel of every element of some tokens: int64 ``(tokens, d)``."""
        n, d = self.rows.shape
        group = torch.arange(n, device=self.rows.device)[rows] % (self.groups or 1)
        within = torch.arange(d, device=self.rows.device) // self.positions
        return group[:, None] * (d // self.positions) + within

    def folds(self) -> Tensor:
        """Return the fold of every token: int64 ``(tokens,)``."""
        return self._of_runs([run.fold for run in self.runs]).to(self.rows.device)

    def keys(self) -> Tensor:
        """Return the key of every token: int64 ``(tokens,)``; :data:`NO_KEY` for padding, which is never drawn."""
        keys = token_keys(self._of_runs([run.key for run in self.runs]), self._positions()).to(self.rows.device)
        return keys if self.valid is None else keys.where(self.valid, NO_KEY)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return each token's number within its sample, and the sample's number: two int64 ``(tokens,)``."""
        samples = self._of_runs([run.sample for run in self.runs])
        return self._positions().to(self.rows.device), samples.to(self.rows.device)

    def sampled(self, count: int) -> Tokens:
        """Return the same tokens with ``count`` valid ones in each run: those of least key."""
        keys = self.keys()
        least = [
            run.start
            + keys[run.start : run.stop].topk(min(count, run.stop - run.start), largest=False, sorted=False).indices
            for run in self.runs
        ]
        drawn = torch.zeros(len(keys), dtype=torch.bool, device=keys.device).index_fill_(0, torch.cat(least), True)
        return replace(self, valid=drawn if self.valid is None else drawn & self.valid)

    def _positions(self) -> Tensor:
        return torch.arange(len(self.rows)) + self._of_runs([run.position - run.start for run in self.runs])

    def _of_runs(self, values: Sequence[int]) -> Tensor:
        lengths = torch.tensor([run.stop - run.start for run in self.runs])
        return torch.tensor(values).repeat_interleave(lengths, output_size=len(self.rows))


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
