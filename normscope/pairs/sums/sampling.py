"""The drawing sample: whole tokens and single pairs, of constant size; and the folds that samples belong to."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from normscope.inputs.batch import Sample
from normscope.inputs.held_out import permutation
from normscope.pairs.sums.binning import PAIR_GRID
from normscope.pairs.sums.memory import zeros

FOLDS = 8


@dataclass(frozen=True)
class SourcesSeen:
    """Number of sources, and of a single one its data set, name and number.

    ``mapped`` is False for a site whose tokens belong to no known sample; it has no folds.
    """

    number: Literal["none", "one", "several"] = "none"
    data: str = ""
    source: str = ""
    source_index: int = 0
    mapped: bool = True

    def with_samples(self, samples: Sequence[Sample]) -> SourcesSeen:
        """Return the sources including those of ``samples``."""
        if self.number == "several":
            return self
        seen = (SourcesSeen("one", sample.data, sample.source, sample.source_index, self.mapped) for sample in samples)
        return functools.reduce(SourcesSeen.merged, seen, self)

    def merged(self, other: SourcesSeen) -> SourcesSeen:
        """Return the sources of both."""
        mapped = self.mapped and other.mapped
        if self.number == "none":
            return replace(other, mapped=mapped)
        if other.number == "none" or replace(self, mapped=mapped) == replace(other, mapped=mapped):
            return replace(self, mapped=mapped)
        return SourcesSeen("several", mapped=mapped)

    @property
    def fold(self) -> int:
        """The fold of the single source among several."""
        return self._fold_of(self.data, self.source_index)

    def folds_of(self, samples: Sequence[Sample]) -> list[int]:
        """Return the fold of each sample."""
        if not self.mapped:
            return [0] * len(samples)
        if self.number == "one":
            return [self._fold_of(None, sample.index) for sample in samples]
        return [self._fold_of(sample.data, sample.source_index) for sample in samples]

    def _fold_of(self, data: str | None, index: int) -> int:
        """Return the fold of a source of a data set, or of a sample of a single source.

        Each block of eight fills all folds, in its own order, so that every fold has alternating kinds of sources.
        """
        block, within = divmod(index, FOLDS)
        return permutation(FOLDS, f"folds\0{data or ''}\0{block}")[within]


UNIFORM_TOKENS = 64
LARGEST_TOKENS = 16
PAIRS_PER_BIN = 4  # a power of two
GROUPED_WIDTH = 256  # elements that are drawn of a token that is a group of channels over all positions

NO_KEY = torch.iinfo(torch.int64).max
ONE_ELEMENT_IN = 8  # one element in eight, chosen by the token's key, competes for a slot
GOLDEN = -7046029254386353131  # 2^64 / golden ratio as int64: splitmix64's increment (Steele et al. 2014)
MIX = (-4658895280553007687, -7723592293110705685)


@functools.lru_cache(maxsize=4096)
def sample_key(sample: Sample, seed: int) -> int:
    """Return a number of 64 bits that depends only on the identity of a sample and the seed."""
    identity = f"{seed}\0{sample.data}\0{sample.source}\0{sample.index}"
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def token_keys(sample_keys: Tensor, positions: Tensor) -> Tensor:
    """Return the keys of tokens: non-negative int64, uniformly distributed.

    ``sample_keys`` are of :func:`sample_key`, and ``positions`` number the tokens of a sample: int64 of one shape.
    """
    return _mix(positions * GOLDEN + sample_keys)


def element_keys(d: int) -> Tensor:
    """Return a number for every place in a token, int64 ``(d,)``, by which the keys of its pairs differ."""
    return _mix((torch.arange(d) + 1) * GOLDEN)


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finalizer, without the sign bit: a bijection of 64 bits that looks random."""
    z = (z ^ _shift_right(z, 30)) * MIX[0]
    z = (z ^ _shift_right(z, 27)) * MIX[1]
    return (z ^ _shift_right(z, 31)) & NO_KEY


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def evenly(x: Tensor, y: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Take ``width`` elements of each token, evenly over it, its smallest and its largest x among them.

    >>> evenly(torch.tensor([[3.0, 1.0, 2.0, 9.0, 4.0, 5.0]]), torch.zeros(1, 6), width=4)[0]
    tensor([[1., 1., 9., 9.]])
    """
    places = (torch.arange(width, device=x.device) * x.shape[1] // width).repeat(len(x), 1)
    places[:, 0], places[:, -1] = x.argmin(1), x.argmax(1)
    return x.gather(1, places), y.gather(1, places)


@dataclass
class TokenSample:
    """The tokens of least ``rank`` (ties: of least ``key``).

    While a capture runs, a sample may have free places, whose key is the largest int64.

    Attributes:
        rank: float64 ``(tokens,)``; what the sample is ordered by.
        key: int64 ``(tokens,)``.
        x: float32 ``(tokens, d)``; of tokens that are groups, :data:`GROUPED_WIDTH` elements.
        y: float32 ``(tokens, d)``.
        rstd: float32 ``(tokens,)``; the slope of that line.
        position: int64 ``(tokens,)``; number of the token within its sample, including padding; within its batch, if
            the sample is not known.
        sample: int64 ``(tokens,)``; number of the sample within its data set; −1 if it is not known.
    """

    rank: Tensor
    key: Tensor
    x: Tensor
    y: Tensor
    rstd: Tensor
    position: Tensor
    sample: Tensor

    @classmethod
    def empty(cls, d: int, device: torch.device, places: int = 0) -> TokenSample:
        """Return a sample with ``places`` free places, of largest rank and key."""
        rank = torch.full((places,), torch.inf, dtype=torch.float64, device=device)
        key = torch.full((places,), NO_KEY, dtype=torch.int64, device=device)
        x, y = torch.zeros(2, places, d, device=device)
        position, sample = torch.zeros(2, places, dtype=torch.int64, device=device)
        return cls(rank, key, x, y, torch.zeros(places, device=device), position, sample)

    def with_more(self, other: TokenSample, capacity: int) -> TokenSample:
        """Return the ``capacity`` tokens of least rank of both samples; free places come last."""
        both = {f.name: torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)}
        by_key = both["key"].argsort()
        order = by_key[both["rank"][by_key].argsort(stable=True)][:capacity]
        return TokenSample(**{name: values[order] for name, values in both.items()})

    def with_room(self, places: int) -> TokenSample:
        """Return the sample with ``places`` places, some of them free."""
        if len(self.key) == places:
            return self
        return self.with_more(TokenSample.empty(self.x.shape[1], self.x.device, places), places)

    def kept(self) -> TokenSample:
        """Return the tokens without the free places, in order."""
        number = int((self.key != NO_KEY).sum())
        return self.with_more(TokenSample.empty(self.x.shape[1], self.x.device), number)


@dataclass
class PairSample:
    """Single pairs, at most :data:`PAIRS_PER_BIN` in each bin of x, so that rare tails are drawn like the centre.

    Attributes:
        key: int64 ``(PAIRS_PER_BIN, bins)``; the largest int64 where there is no pair.
        x: float32 of the same shape.
        y: float32 of the same shape.
        channel: int32 of the same shape.
    """

    key: Tensor
    x: Tensor
    y: Tensor
    channel: Tensor

    @classmethod
    def empty(cls, device: torch.device) -> PairSample:
        """Return a sample of no pairs."""
        shape = PAIRS_PER_BIN, PAIR_GRID.size
        x, y, channel = (zeros(shape, dtype, device) for dtype in (torch.float32, torch.float32, torch.int32))
        return cls(torch.full(shape, NO_KEY, device=device), x, y, channel)

    @property
    def filled(self) -> Tensor:
        """Mask of the places in use: bool ``(PAIRS_PER_BIN, bins)``."""
        return self.key != NO_KEY

    def add(self, keys: Tensor, bins: Tensor, x: Tensor, y: Tensor, channel: Tensor) -> None:
        """Let one in :data:`ONE_ELEMENT_IN` pairs of some tokens compete for the places of their bins.

        ``keys`` are those of the tokens, int64 ``(tokens,)``; tokens with :data:`NO_KEY` do not compete. The others
        are ``(tokens, d)``: ``bins`` and ``channel`` int64, ``x`` and ``y`` float32.
        """
        element = torch.arange(x.shape[1], device=x.device)
        first = _shift_right(keys, 8) % ONE_ELEMENT_IN  # by bits of the key that choose no place in a bin
        competes = (element % ONE_ELEMENT_IN == first[:, None]) & (keys != NO_KEY)[:, None]
        pair_keys = ((keys[:, None] ^ element_keys(x.shape[1]).to(x.device)) * MIX[0]) & NO_KEY
        places = pair_keys.remainder(PAIRS_PER_BIN) * PAIR_GRID.size + bins
        key = self.key.flatten()
        key.scatter_reduce_(0, places.flatten(), pair_keys.where(competes, NO_KEY).flatten(), "amin")
        self.key = key.view(PAIRS_PER_BIN, -1)
        won = competes & (key[places] == pair_keys)
        # Pairs that lost write to a place that is discarded: selecting the winners would have to wait for a GPU.
        target = places.where(won, len(key)).flatten()
        for name, values in (("x", x), ("y", y), ("channel", channel.int())):
            drawn = getattr(self, name).flatten()
            longer = torch.cat([drawn, drawn[:1]]).scatter_(0, target, values.flatten())
            setattr(self, name, longer[:-1].view(PAIRS_PER_BIN, -1))

    def merged(self, other: PairSample) -> PairSample:
        """Return, place by place, the pair of least key."""
        keep = self.key <= other.key
        return PairSample(*(torch.where(keep, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))
