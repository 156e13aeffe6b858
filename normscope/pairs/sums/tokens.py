"""Tokens of one call of one norm: rows that each share one mean and one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from normscope.norms.formulas import Lines
from normscope.pairs.sums.sampling import NO_KEY, token_keys

POSITIONS = 4096  # whose tokens are summed apart; those of all further positions are summed together


def group_channels(n_tokens: int, d: int, channels: int, groups: int) -> Tensor:
    """Number the channel of every element of the tokens of a grouped norm: int64 ``(tokens, d)``.

    >>> group_channels(2, 4, channels=4, groups=2)
    tensor([[0, 0, 1, 1],
            [2, 2, 3, 3]])
    """
    per_group = channels // groups
    first = torch.arange(n_tokens) % groups * per_group
    within = torch.arange(per_group).repeat_interleave(d // per_group)
    return first[:, None] + within


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
        numbers = range(len(self.rows))[rows]
        if self.groups is None:
            return torch.arange(self.channels, device=self.rows.device).expand(len(numbers), -1)
        channels = group_channels(numbers.stop, self.rows.shape[1], self.channels, self.groups)
        return channels[rows].to(self.rows.device)

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
