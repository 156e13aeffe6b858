"""The drawing sample: whole tokens and single pairs that a figure shows, of constant size however much was seen.

Every token has a key, a hash of the seed, its sample's identity and its place in it. The tokens of least keys are a
uniform sample without replacement, the same tokens at every site, whatever the batches, shards and order were; and
merging two samples is taking the least keys of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from normscope.batches import Sample
from normscope.pairs.binning import PAIR_GRID

UNIFORM_TOKENS = 64
LARGEST_TOKENS = 16
PAIRS_PER_BIN = 4
GROUPED_WIDTH = 256  # elements that are drawn of a token that is a group of channels over all positions

_NO_KEY = torch.iinfo(torch.int64).max
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio as int64: splitmix64's increment (Steele et al. 2014)
_MIX = (-4658895280553007687, -7723592293110705685)


def token_keys(samples: Sequence[Sample], positions: Tensor, seed: int) -> Tensor:
    """Give every token its key: non-negative int64, uniformly distributed.

    Args:
        samples: the samples of a batch.
        positions: number of each token within its sample, shape ``(samples, tokens of a sample)``, int64.
        seed: of the drawing sample.

    Returns:
        Shape ``(samples · tokens of a sample,)``.
    """
    identities = [f"{seed}\0{sample.data}\0{sample.source}\0{sample.index}" for sample in samples]
    digests = [hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest() for text in identities]
    starts = torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
    return _mix(starts.to(positions.device)[:, None] + positions * _GOLDEN).flatten()


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finalizer, without the sign bit: a bijection of 64 bits that looks random."""
    z = (z ^ _shift_right(z, 30)) * _MIX[0]
    z = (z ^ _shift_right(z, 27)) * _MIX[1]
    return (z ^ _shift_right(z, 31)) & _NO_KEY


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
    """Whole tokens, at most ``capacity`` of them, those of least ``rank`` (ties: of least ``key``).

    Attributes:
        rank: float64 ``(tokens,)``; what the sample is ordered by.
        key: int64 ``(tokens,)``.
        x: float32 ``(tokens, d)``; every channel, so that each token draws its straight line. Of tokens that are
            groups, :data:`GROUPED_WIDTH` elements.
        y: float32 ``(tokens, d)``.
        rstd: float32 ``(tokens,)``; the slope of that line.
    """

    rank: Tensor
    key: Tensor
    x: Tensor
    y: Tensor
    rstd: Tensor

    @classmethod
    def empty(cls, d: int, device: torch.device) -> TokenSample:
        shapes = {"rank": (0,), "key": (0,), "x": (0, d), "y": (0, d), "rstd": (0,)}
        dtypes = {"rank": torch.float64, "key": torch.int64}
        return cls(**{n: torch.empty(s, dtype=dtypes.get(n, torch.float32), device=device) for n, s in shapes.items()})

    def with_more(self, other: TokenSample, capacity: int) -> TokenSample:
        """Return the ``capacity`` tokens of least rank of both."""
        both = {f.name: torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)}
        by_key = both["key"].argsort()
        order = by_key[both["rank"][by_key].argsort(stable=True)][:capacity]
        return TokenSample(**{name: values[order] for name, values in both.items()})


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
        shape = (PAIRS_PER_BIN, PAIR_GRID.size)
        return cls(
            torch.full(shape, _NO_KEY, dtype=torch.int64, device=device),
            torch.zeros(shape, device=device),
            torch.zeros(shape, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
        )

    @property
    def filled(self) -> Tensor:
        """Which places hold a pair: bool ``(PAIRS_PER_BIN, bins)``."""
        return self.key != _NO_KEY

    def add(self, keys: Tensor, bins: Tensor, x: Tensor, y: Tensor, channel: Tensor) -> None:
        """Let the pairs of some tokens compete for the places of their bins.

        Args:
            keys: key of each token, int64 ``(tokens,)``.
            bins: bin of each pair, int64 ``(tokens, d)``.
            x: inputs, float32 ``(tokens, d)``.
            y: outputs, float32 ``(tokens, d)``.
            channel: of each pair, int64 ``(tokens, d)``.
        """
        element_keys = _mix((torch.arange(x.shape[1], device=x.device) + 1) * _GOLDEN)
        pair_keys = (((keys[:, None] ^ element_keys) * _MIX[0]) & _NO_KEY).flatten()
        places = pair_keys.remainder(PAIRS_PER_BIN) * PAIR_GRID.size + bins.flatten()
        key = self.key.view(-1)
        key.scatter_reduce_(0, places, pair_keys, "amin")
        won = (key[places] == pair_keys).nonzero().squeeze(1)
        self.x.view(-1)[places[won]] = x.flatten()[won]
        self.y.view(-1)[places[won]] = y.flatten()[won]
        self.channel.view(-1)[places[won]] = channel[won // x.shape[1], won % x.shape[1]].int()

    def merged(self, other: PairSample) -> PairSample:
        """Return, place by place, the pair of least key."""
        keep = self.key <= other.key
        return PairSample(*(torch.where(keep, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))
