"""PairStats: sums and samples of the pairs of one site, of the same size after one batch and after ten thousand."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from normscope.errors import DataError
from normscope.inputs.batch import Sample
from normscope.norms.formulas import Lines
from normscope.pairs.sums import loops
from normscope.pairs.sums.binning import CHANNEL_GRID, DENSITY_X_GRID, DENSITY_Y_GRID, MOMENTS, PAIR_GRID, TOKEN_GRID
from normscope.pairs.sums.memory import without_empty_pages, zeros, zeros_like
from normscope.pairs.sums.sampling import (
    FOLDS,
    GROUPED_WIDTH,
    LARGEST_TOKENS,
    UNIFORM_TOKENS,
    PairSample,
    SourcesSeen,
    TokenSample,
    sample_key,
)
from normscope.pairs.sums.site_sums import POSITIONS, Positions, Run, SiteSums, Tokens

_NO_SAMPLE = (Sample("tokens of no sample", 0, -1),)
_COUNTS = ("token_offsets", "token_scales", "nonfinite_tokens")
_OPTIONAL = ("gamma_moments", "channel_moments", "diagonal_moments")
_SUMS = ("moments", "density", "channel_sums", "position_sums", "first_moments", *_COUNTS, *_OPTIONAL)
IN_FOLDS = ("moments", "gamma_moments", "diagonal_moments")


@dataclass(eq=False, repr=False, kw_only=True)
class PairStats(SiteSums):
    """Sums over all pairs (x, y) of one norm site: exact, mergeable, of bounded size.

    Attributes:
        sources: whether the folds are sources or the samples of a single one.
        seed: of the drawing samples.
    """

    sources: SourcesSeen
    seed: int

    @classmethod
    def empty(
        cls,
        channels: int,
        seed: int = 0,
        device: torch.device | None = None,
        *,
        grouped: bool = False,
        by_gamma: bool = False,
        per_channel: bool = False,
        diagonal: bool = False,
    ) -> PairStats:
        """Return the sums over no pairs, for a norm with ``channels`` channels."""
        device = device or torch.device("cpu")
        infinity = torch.full((channels,), torch.inf, device=device)
        width = GROUPED_WIDTH if grouped else channels

        def sums(*shape: int) -> Tensor:
            return zeros(shape, torch.float64, device)

        per_fold = FOLDS, PAIR_GRID.size, len(MOMENTS)
        return cls(
            moments=sums(*per_fold).mT,
            density=zeros((DENSITY_X_GRID.size, DENSITY_Y_GRID.size), torch.int64, device),
            pairs=PairSample.empty(device),
            channel_sums=torch.zeros(2, channels, dtype=torch.float64, device=device),
            channel_extremes=torch.stack([infinity, -infinity]),
            token_offsets=torch.zeros(TOKEN_GRID.size, dtype=torch.int64, device=device),
            token_scales=torch.zeros(TOKEN_GRID.size, dtype=torch.int64, device=device),
            nonfinite_tokens=torch.zeros((), dtype=torch.int64, device=device),
            tokens=TokenSample.empty(width, device, UNIFORM_TOKENS),
            largest=TokenSample.empty(width, device, LARGEST_TOKENS),
            position_sums=sums(2, POSITIONS + 1),
            first_moments=sums(PAIR_GRID.size, len(MOMENTS)),
            sources=SourcesSeen(),
            seed=seed,
            grouped=grouped,
            gamma_moments=sums(*per_fold).mT if by_gamma else None,
            diagonal_moments=sums(*per_fold).mT if diagonal else None,
            channel_moments=sums(len(MOMENTS), channels, CHANNEL_GRID.size) if per_channel else None,
        )

    def __repr__(self) -> str:
        return f"PairStats: {self.n_pairs:,} pairs of {self.n_tokens:,} tokens, {self.channels:,} channels"

    @property
    def channels(self) -> int:
        """Number of channels: the elements of a token, unless tokens are groups."""
        return int(self.channel_sums.shape[1])

    @property
    def n_pairs(self) -> int:
        """Number of pairs in the sums."""
        return int(self.moments[:, 0].sum())

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the sums."""
        return int(self.token_scales.sum())

    @property
    def reach(self) -> Tensor:
        """Largest |x| of each channel, float32 ``(d,)``; 0 of a channel that no pair is in."""
        low, high = self.channel_extremes
        return torch.maximum(low.abs(), high.abs()).where(low <= high, 0.0)

    @property
    def nbytes(self) -> int:
        """Memory that the sums and samples take at most: a constant of the channels, whatever has been added."""
        token_bytes = (UNIFORM_TOKENS + LARGEST_TOKENS) * (4 * 8 + 4 * 2 * self.tokens.x.shape[1] + 4)
        tensors = [value for value in (*vars(self).values(), *vars(self.pairs).values()) if isinstance(value, Tensor)]
        return token_bytes + sum(tensor.nbytes for tensor in tensors)

    @property
    def fold_by(self) -> Literal["source", "sample"] | None:
        """Unit of the folds; None if there are fewer than two, so that nothing can be held out."""
        occupied = int((self.moments[:, 0].sum(1) > 0).sum())
        if occupied < 2:
            return None
        return "sample" if self.sources.number == "one" else "source"

    def update(
        self,
        rows: Tensor,
        lines: Lines,
        samples: Sequence[Sample],
        first_token: int = 0,
        gamma: Tensor | None = None,
        *,
        groups: int | None = None,
        valid: Tensor | None = None,
        sample: int | None = None,
        divided: bool = True,
        positions: Positions | None = None,
    ) -> Tensor | None:
        """Add the pairs of some tokens, and return the mask of those that were data; None for all.

        Args:
            rows: input token rows, ``(tokens, d)``, any floating dtype, one sample after the other.
            lines: of the tokens.
            samples: samples of the batch, in order. Without any, or if the tokens do not divide evenly among them, the
                tokens belong to no sample, and the site has no folds.
            first_token: number, within its sample, of each sample's first token here: for norms that are called
                several times in a forward pass.
            gamma: the norm's weight, ``(channels,)``, for the sums that are weighted by its square.
            groups: number of groups of a grouped norm, whose tokens come group by group.
            valid: False for padding, bool ``(tokens,)``; None for no padding.
            sample: number of tokens to draw uniformly from each sample; None for all.
            divided: whether the tokens divide among the samples; otherwise their keys depend on the first sample and
                their number in the batch.
            positions: of the tokens in their sequences; None if they are unknown.
        """
        self.tokens, self.largest = self.tokens.with_room(UNIFORM_TOKENS), self.largest.with_room(LARGEST_TOKENS)
        per_sample, remainder = divmod(len(rows), len(samples) or 1)
        keyed = samples
        if remainder or not samples or not divided:
            self._regroup(replace(self.sources, mapped=False))
            # Keys of tokens of no sample are distinct too, in every rank and run.
            keyed = [replace(first, source=f"the batch of {first.source}") for first in samples[:1]] or _NO_SAMPLE
            if not samples:
                first_token = self.n_tokens + int(self.nonfinite_tokens)
            samples, per_sample = _NO_SAMPLE, len(rows)
        self._regroup(self.sources.with_samples(samples))
        starts, folds = itertools.count(0, per_sample), self.sources.folds_of(samples)
        runs = [
            Run(start, start + per_sample, fold, sample_key(key, self.seed), first_token, owner.index)
            for start, owner, key, fold in zip(starts, samples, keyed, folds, strict=False)
        ]
        tokens = Tokens(rows, lines, runs, self.channels, groups, valid, gamma, positions)
        if sample is not None:
            tokens = tokens.sampled(sample)
        loops.add(self, tokens)
        return tokens.valid

    def merge(self, other: PairStats) -> PairStats:
        """Return the sums over the pairs of both; in any order and grouping the same, up to float64's rounding.

        Raises:
            DataError: if numbers of channels or seeds differ, or one of them lacks sums that the other has.
        """
        if (self.channels, self.grouped, self.seed) != (other.channels, other.grouped, other.seed):
            raise DataError(
                f"Cannot merge sums over {self.channels} channels (seed {self.seed}) with sums over {other.channels} "
                f"(seed {other.seed}); both must agree."
            )
        for name in _OPTIONAL:
            if (getattr(self, name) is None) != (getattr(other, name) is None):
                raise DataError(f"Cannot merge sums with {name} and sums without; capture both alike.")
        sources = self.sources.merged(other.sources)
        mine, theirs = copy.copy(self), copy.copy(other)
        mine._regroup(sources)
        theirs._regroup(sources)
        low, high = torch.stack([self.channel_extremes, other.channel_extremes]).unbind(1)
        totals: dict[str, Any] = {
            name: without_empty_pages(total + getattr(theirs, name)) for name, total in mine.sums.items()
        }
        return replace(
            mine,
            **totals,
            pairs=self.pairs.merged(other.pairs),
            channel_extremes=torch.stack([low.amin(0), high.amax(0)]),
            tokens=self.tokens.with_more(other.tokens, UNIFORM_TOKENS),
            largest=self.largest.with_more(other.largest, LARGEST_TOKENS),
        )

    @property
    def sums(self) -> dict[str, Tensor]:
        """All tensors that merging adds up, by name."""
        return {name: total for name in _SUMS if (total := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> PairStats:
        """Return the same sums in a device's memory; those that are there already share it."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value if value.device == device else without_empty_pages(value.to(device))
            if isinstance(value, TokenSample | PairSample):
                return type(value)(*map(moved, vars(value).values()))
            return value

        device = torch.device(device)
        same = PairStats(**{name: moved(value) for name, value in vars(self).items()})
        same.tokens, same.largest = same.tokens.kept(), same.largest.kept()
        return same

    def _regroup(self, sources: SourcesSeen) -> None:
        """Join all pairs in one fold if they are of a single source among others now, or of no known sample."""
        was_single = sources.mapped and (self.sources.number, sources.number) == ("one", "several")
        if was_single or (self.sources.mapped and not sources.mapped):
            for name in IN_FOLDS:
                if (moments := getattr(self, name)) is not None:
                    joined = zeros_like(moments)
                    joined[self.sources.fold if was_single else 0] = moments.sum(0)
                    setattr(self, name, joined)
        self.sources = sources
