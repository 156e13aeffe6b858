"""PairStats: sums and samples of the pairs of one site, of the same size after one batch and after ten thousand."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import DataError
from normscope.inputs.batch import Sample
from normscope.norms.formulas import Lines
from normscope.pairs.sums import binned, reference
from normscope.pairs.sums.binned import OPTIONAL_MOMENTS, PAIR_FIELDS, CompactBins, DenseBins, SiteSums, empty_bins
from normscope.pairs.sums.binning import CHANNEL_GRID, MOMENTS, PAIR_GRID, TOKEN_GRID
from normscope.pairs.sums.sampling import (
    GROUPED_WIDTH,
    LARGEST_TOKENS,
    UNIFORM_TOKENS,
    PairSample,
    SourcesSeen,
    TokenSample,
    sample_key,
)
from normscope.pairs.sums.tokens import POSITIONS, Positions, Run, Tokens
from normscope.runtime.launches import TRITON, VARIABLE, cannot_be_met, why_no_launcher

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Magnitudes:
    """Numbers in bins, spread evenly over each bin.

    Attributes:
        n: count of each bin, ``(bins,)``, positive, in ascending order of the bins.
        low: lower end of the numbers of a bin, likewise.
        high: upper end, likewise; ``low`` where all numbers are the same.
    """

    n: Array
    low: Array
    high: Array

    @property
    def count(self) -> float:
        """Total number."""
        return float(self.n.sum())

    def quantile(self, share: float) -> float:
        """Return the quantile at ``share``, accurate to the width of its bin.

        >>> Magnitudes(np.array([1.0, 3.0]), np.array([0.0, 1.0]), np.array([1.0, 2.0])).quantile(0.5)
        1.3333333333333333
        """
        below = np.concatenate([[0], np.cumsum(self.n)])
        bin_ = min(int(np.searchsorted(below[1:], share * below[-1])), len(self.n) - 1)
        within = (share * below[-1] - below[bin_]) / self.n[bin_]
        return float(self.low[bin_] + within * (self.high[bin_] - self.low[bin_]))

    def below(self, value: float) -> float:
        """Return the count of numbers up to ``value``."""
        width = self.high - self.low
        within = np.divide(value - self.low, width, out=np.where(value >= self.low, 1.0, 0.0), where=width > 0)
        return float(self.n @ np.clip(within, 0, 1))

    def mean(self, function: Callable[[Array], Array]) -> float:
        """Return the mean of a function of the numbers that is nearly linear within a bin."""
        return float(self.n @ function((self.low + self.high) / 2) / self.n.sum())


def of_pairs(moments: Tensor, *, signed: bool = False) -> Magnitudes:
    """Return the distribution of |x| over all pairs; within a bin, by its mean and variance.

    A bin with a single pair, as in the tails, places it at its x.

    Args:
        moments: n, Σx, Σy, Σx², Σxy, Σy² per bin, float64 ``(6, bins)``, on a grid that is symmetric about zero.
        signed: return the distribution of x itself.
    """
    rows = [row.numpy() for row in (moments[0], moments[1] if signed else moments[1].abs(), moments[3])]
    n, x, xx = rows if signed else map(_folded, rows)
    filled = n > 0
    n, x, xx = n[filled], x[filled], xx[filled]
    mean = x / n
    half = np.sqrt(3 * np.maximum(xx / n - mean**2, 0))  # an even spread's, from its standard deviation
    half *= half > 1e-7 * np.abs(mean)  # below that it is rounding
    return Magnitudes(n, mean - half if signed else np.maximum(mean - half, 0), mean + half)


def of_tokens(counts: Tensor) -> Magnitudes:
    """Return the distribution over tokens of the counted magnitude, μ/σ or σ, in bins of at most 12 %.

    Args:
        counts: number of tokens per bin of the grid of tokens, int64 ``(bins,)``.
    """
    edges = TOKEN_GRID.edges().numpy()[TOKEN_GRID.centre + 1 :]
    low, high = np.concatenate([[0.0], edges[:-1]]), edges
    high = np.where(np.isfinite(high), high, low)
    n = _folded(counts.double().numpy())
    filled = n > 0
    return Magnitudes(n[filled], low[filled], high[filled])


def _folded(row: Array) -> Array:
    """Add the bins of negative numbers to those of the positive ones of the same magnitude."""
    centre = len(row) // 2
    folded = row[centre:].copy()
    folded[1:] += row[:centre][::-1]
    return folded


_NOBODY = (Sample("tokens of no sample", 0, -1),)
_COUNTS = ("token_offsets", "token_scales", "nonfinite_tokens")
_SUMS = ("moments", "density", "channel_sums", "position_sums", "first_moments", *_COUNTS)
_OPTIONAL = ("gamma_moments", "channel_moments", "diagonal_moments")
_BINNED = ("moments", "density", *OPTIONAL_MOMENTS)
_COMPILED_BY = {"cpu": "numba", "cuda": "triton"}


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
        on = device or torch.device("cpu")
        infinity = torch.full((channels,), torch.inf, device=on)
        width = GROUPED_WIDTH if grouped else channels
        kept = zip(OPTIONAL_MOMENTS, (by_gamma, diagonal), strict=True)
        by_channel = (len(MOMENTS), channels, CHANNEL_GRID.size) if per_channel else None
        return cls(
            bins=empty_bins(on, [name for name, asked in kept if asked]),
            channel_sums=torch.zeros(2, channels, dtype=torch.float64, device=on),
            channel_extremes=torch.stack([infinity, -infinity]),
            token_offsets=torch.zeros(TOKEN_GRID.size, dtype=torch.int64, device=on),
            token_scales=torch.zeros(TOKEN_GRID.size, dtype=torch.int64, device=on),
            nonfinite_tokens=torch.zeros((), dtype=torch.int64, device=on),
            tokens=TokenSample.empty(width, on, UNIFORM_TOKENS),
            largest=TokenSample.empty(width, on, LARGEST_TOKENS),
            position_sums=binned.zeros((2, POSITIONS + 1), torch.float64, on),
            first_moments=binned.zeros((PAIR_GRID.size, len(MOMENTS)), torch.float64, on),
            sources=SourcesSeen(),
            seed=seed,
            grouped=grouped,
            channel_moments=torch.zeros(by_channel, dtype=torch.float64, device=on) if by_channel else None,
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
        tensors = [tensor for tensor in vars(self).values() if isinstance(tensor, Tensor)]
        return token_bytes + self.bins.nbytes + sum(tensor.nbytes for tensor in tensors)

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
        per_sample, rest = divmod(len(rows), len(samples) or 1)
        keyed = samples
        if rest or not samples or not divided:
            self._regroup(replace(self.sources, mapped=False))
            # Keys of tokens of no sample are distinct too, in every rank and run.
            keyed = [replace(first, source=f"the batch of {first.source}") for first in samples[:1]] or _NOBODY
            if not samples:
                first_token = self.n_tokens + int(self.nonfinite_tokens)
            samples, per_sample = _NOBODY, len(rows)
        self._regroup(self.sources.with_samples(samples))
        starts, folds = itertools.count(0, per_sample), self.sources.folds_of(samples)
        runs = [
            Run(start, start + per_sample, fold, sample_key(key, self.seed), first_token, each.index)
            for start, each, key, fold in zip(starts, samples, keyed, folds, strict=False)
        ]
        tokens = Tokens(rows, lines, runs, self.channels, groups, valid, gamma, positions)
        if sample is not None:
            tokens = tokens.sampled(sample)
        add(self, tokens)
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
        mine, theirs = self.regrouped(sources), other.regrouped(sources)
        low, high = torch.stack([self.channel_extremes, other.channel_extremes]).unbind(1)
        totals = {name: total + getattr(theirs, name) for name, total in mine.sums.items()}
        return replace(
            mine._with(totals, self.pairs.merged(other.pairs)),
            channel_extremes=torch.stack([low.amin(0), high.amax(0)]),
            tokens=self.tokens.with_more(other.tokens, UNIFORM_TOKENS),
            largest=self.largest.with_more(other.largest, LARGEST_TOKENS),
        )

    def _with(self, sums: Mapping[str, Tensor], pairs: PairSample) -> PairStats:
        """Return the same with other :attr:`sums` and drawn pairs."""
        of_bins = {name: total for name, total in sums.items() if name in _BINNED}
        others: dict[str, Any] = {name: total for name, total in sums.items() if name not in _BINNED}
        return replace(self, bins=self.bins.replaced({**of_bins, **vars(pairs)}), **others)

    @property
    def sums(self) -> dict[str, Tensor]:
        """All tensors that merging adds up, by name."""
        every = {name: getattr(self, name) for name in (*_SUMS, *_OPTIONAL)}
        return {name: total for name, total in every.items() if total is not None}

    def regrouped(self, sources: SourcesSeen) -> PairStats:
        """Return the same sums with the folds that they have among ``sources``."""
        regrouped = copy.copy(self)
        regrouped._regroup(sources)
        return regrouped

    def to(self, device: torch.device | str) -> PairStats:
        """Return the same sums in a device's memory; those that are there already share it."""
        if self.channel_sums.device == torch.device(device):
            same = copy.copy(self)
            same.tokens, same.largest = self.tokens.kept(), self.largest.kept()
            return same

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device)
            if isinstance(value, TokenSample):
                return TokenSample(*(moved(getattr(value, f.name)) for f in fields(value))).kept()
            return value

        names = [name for name in (*_BINNED, *PAIR_FIELDS) if name in self.bins]
        tensors = {name: self.bins[name].to(device) for name in names}
        to_cpu = torch.device(device).type == "cpu"
        bins = CompactBins.empty(set(names) & set(OPTIONAL_MOMENTS)).replaced(tensors) if to_cpu else DenseBins(tensors)
        return PairStats(bins=bins, **{f.name: moved(getattr(self, f.name)) for f in fields(self) if f.name != "bins"})

    def _regroup(self, sources: SourcesSeen) -> None:
        fold = self._joined_fold(sources)
        if fold is not None:
            joined = {}
            for name in ("moments", *OPTIONAL_MOMENTS):
                if name in self.bins:
                    moments = self.bins[name]
                    joined[name] = torch.zeros_like(moments)
                    joined[name][fold] = moments.sum(0)
            self.bins = self.bins.replaced(joined)
        self.sources = sources

    def _joined_fold(self, sources: SourcesSeen) -> int | None:
        """Return the fold that all pairs join, as a single source among others; None if folds stay."""
        if self.sources.mapped and not sources.mapped:
            return 0
        if sources.mapped and (self.sources.number, sources.number) == ("one", "several"):
            return self.sources.fold
        return None


def add(stats: SiteSums, tokens: Tokens) -> None:
    """Add the pairs of ``tokens`` to all of ``stats``, on the same device, by the device's fastest loop.

    All loops assign each pair to the same bin.

    Raises:
        UsageError: on CUDA, if ``NORMSCOPE_KERNELS=triton`` asks for kernels and Triton cannot launch any.
    """
    if tokens.rows.numel():
        device = tokens.rows.device.type
        # The kernels compute y from shift and rstd alone.
        by_reference = device == "cuda" and tokens.lines.explicit_y is not None
        (reference.add if by_reference else _loop_of(device))(stats, tokens)


def _loop_of(device: str) -> Callable[[SiteSums, Tokens], None]:
    loop = _compiled_loop_of(device)
    if device != "cuda" or loop is reference.add or not (reason := why_no_launcher()):
        return loop
    if os.environ.get(VARIABLE) == TRITON:
        raise cannot_be_met(reason)
    return reference.add


@functools.cache
def _compiled_loop_of(device: str) -> Callable[[SiteSums, Tokens], None]:
    if device not in _COMPILED_BY:
        return reference.add
    try:
        loop: Callable[[SiteSums, Tokens], None] = import_module(f"normscope.pairs.sums.binning.{device}").add
    except ImportError as error:
        warnings.warn(
            f"{_COMPILED_BY[device]} does not work here ({error}): the same sums are taken in plain torch, and slowly.",
            stacklevel=2,
        )
        return reference.add
    return loop
