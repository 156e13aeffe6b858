"""The tokens of one call of one norm, as the loops of :mod:`normscope.pairs.binning` take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.pairs.formulas import Form
from normscope.pairs.layouts import group_channels
from normscope.pairs.sampling import NO_KEY, token_keys


@dataclass(frozen=True)
class Lines:
    """The straight line of each token, y = (x − shift) · rstd: how it follows from x, or the numbers themselves.

    Attributes:
        form: how it follows from the token's elements; None where the numbers are given.
        eps: of that form.
        shift: float64 ``(tokens,)``.
        rstd: float64 ``(tokens,)``.
    """

    form: Form | None = None
    eps: float = 0.0
    shift: Tensor | None = None
    rstd: Tensor | None = None

    def of(self, x: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return shift and rstd of the tokens ``rows``, whose elements are ``x``, float64: two ``(tokens, 1)``."""
        if self.form is not None:
            return self.form.line(x, self.eps)
        assert self.shift is not None and self.rstd is not None  # noqa: S101 - one of the two ways is given
        return self.shift[rows, None], self.rstd[rows, None]

    def y(self, rows: Tensor) -> Tensor:
        """Return y of every token as it is summed: float64 ``(tokens, d)``, from x as float32 holds it.

        Args:
            rows: the elements of all tokens, ``(tokens, d)``, of any floating dtype.
        """
        x = rows.float().double()
        shift, rstd = self.of(x, slice(None))
        return (x - shift) * rstd


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one sample.

    Attributes:
        start: row of the first.
        stop: row behind the last.
        fold: that they belong to.
        key: of the sample, from which the tokens' own keys follow.
        position: number of the first within its sample.
        sample: number of the sample within its data set; −1 where it is not known.
    """

    start: int
    stop: int
    fold: int
    key: int
    position: int
    sample: int


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call of one norm.

    Attributes:
        rows: their elements, ``(tokens, d)``, of any floating dtype.
        lines: how they are normalized.
        runs: which rows belong to which sample, in the order of the rows and without gaps.
        channels: number of channels of the norm.
        groups: number of groups of a grouped norm, whose tokens come group by group; None for other norms.
        valid: which tokens are data and not padding, bool ``(tokens,)``; None for all.
        gamma: weight of each channel, ``(channels,)``; where the sums weighted by its square are kept too.
    """

    rows: Tensor
    lines: Lines
    runs: Sequence[Run]
    channels: int
    groups: int | None = None
    valid: Tensor | None = None
    gamma: Tensor | None = None

    @property
    def positions(self) -> int:
        """Number of neighbouring elements of a token that are of one channel."""
        return 1 if self.groups is None else self.rows.shape[1] * self.groups // self.channels

    def channel_of(self, rows: slice) -> Tensor:
        """Number the channel of every element of some tokens: int64 ``(tokens, d)``."""
        taken = range(len(self.rows))[rows]
        if self.groups is None:
            return torch.arange(self.channels, device=self.rows.device).expand(len(taken), -1)
        of_all = group_channels(taken.stop, self.rows.shape[1], self.channels, self.groups)
        return of_all[rows].to(self.rows.device)

    def folds(self) -> Tensor:
        """Return the fold of every token: int64 ``(tokens,)``."""
        return self._of_runs([run.fold for run in self.runs]).to(self.rows.device)

    def keys(self) -> Tensor:
        """Return the key of every token: int64 ``(tokens,)``; the largest int64 for padding, which draws nothing."""
        keys = token_keys(self._of_runs([run.key for run in self.runs]), self._positions()).to(self.rows.device)
        return keys if self.valid is None else keys.where(self.valid, NO_KEY)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return of every token its number within its sample, and that sample's number: two int64 ``(tokens,)``."""
        samples = self._of_runs([run.sample for run in self.runs])
        return self._positions().to(self.rows.device), samples.to(self.rows.device)

    def sampled(self, count: int) -> Tokens:
        """Return the same tokens, of which only ``count`` of each run are data: those of least key, of the valid."""
        keys = self.keys()
        least = [
            run.start
            + keys[run.start : run.stop].topk(min(count, run.stop - run.start), largest=False, sorted=False).indices
            for run in self.runs
        ]
        taken = torch.zeros(len(keys), dtype=torch.bool, device=keys.device).index_fill_(0, torch.cat(least), True)
        return replace(self, valid=taken if self.valid is None else taken & self.valid)

    def _positions(self) -> Tensor:
        return torch.arange(len(self.rows)) + self._of_runs([run.position - run.start for run in self.runs])

    def _of_runs(self, values: Sequence[int]) -> Tensor:
        lengths = torch.tensor([run.stop - run.start for run in self.runs])
        return torch.tensor(values).repeat_interleave(lengths, output_size=len(self.rows))
