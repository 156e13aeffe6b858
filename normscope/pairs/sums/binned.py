"""Sums and samples of a site: per bin, without memory for bins that contain no pair, and per channel and token."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, MOMENTS, PAIR_GRID, TILE
from normscope.pairs.sums.sampling import FOLDS, NO_KEY, PAIRS_PER_BIN, PairSample, TokenSample

OPTIONAL_MOMENTS = ("gamma_moments", "diagonal_moments")
PAIR_FIELDS = {"key": torch.int64, "x": torch.float32, "y": torch.float32, "channel": torch.int32}
_TILES = (-(-DENSITY_X_GRID.size // TILE), -(-DENSITY_Y_GRID.size // TILE))


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros; in the CPU's memory, pages are allocated once they are written."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take 2 MB for the first element
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


@dataclass(frozen=True)
class BinTable:
    """A row of values for each bin in use, in the order of their first use.

    Attributes:
        rows: row of each bin, 0 for a bin without one; the last entry counts the rows in use. Bits of uint16
            ``(bins + 1,)``, as int16.
        values: by name, ``(1 + bins, values of a bin)``; row 0 is unused.
    """

    rows: Tensor
    values: Mapping[str, Tensor]

    @classmethod
    def empty(cls, bins: int, length: int, dtypes: Mapping[str, torch.dtype]) -> BinTable:
        values = {name: zeros((bins + 1, length), dtype) for name, dtype in dtypes.items()}
        return cls(zeros((bins + 1,), torch.int16), values)

    @classmethod
    def of(cls, dense: Mapping[str, Tensor]) -> BinTable:
        """Compress tensors ``(bins, values of a bin)``, in which unused bins are zero."""
        bins, length = next(iter(dense.values())).shape
        table = cls.empty(bins, length, {name: values.dtype for name, values in dense.items()})
        table._insert(torch.stack([values.any(1) for values in dense.values()]).any(0))
        for name, values in dense.items():
            used, rows = table._used()
            table.values[name][rows] = values[used]
        return table

    def dense(self, name: str) -> Tensor:
        """Return the values of all bins: ``(bins, values of a bin)``."""
        values = self.values[name]
        dense = zeros((len(values) - 1, values.shape[1]), values.dtype)
        used, rows = self._used()
        dense[used] = values[rows]
        return dense

    def add(self, name: str, dense: Tensor) -> None:
        """Add the values of all bins to those of ``name``."""
        self._insert(dense.any(1))
        used, rows = self._used()
        self.values[name][rows] += dense[used]

    def _used(self) -> tuple[Tensor, Tensor]:
        used = self.rows[:-1].nonzero().squeeze(1)
        return used, self.rows[used].long() & 0xFFFF

    def _insert(self, filled: Tensor) -> None:
        new = (filled & (self.rows[:-1] == 0)).nonzero().squeeze(1)
        first = int(self.rows[-1]) & 0xFFFF
        self.rows[new] = torch.arange(first + 1, first + 1 + len(new)).short()
        self.rows[-1:] = torch.tensor([first + len(new)]).short()


@dataclass(frozen=True)
class DenseBins:
    """All bins as plain tensors, for a GPU, whose kernels address them directly."""

    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        """Return a tensor; None if it is not stored."""
        return self.tensors.get(name)

    def add(self, name: str, moments: Tensor) -> None:
        """Add to the moments ``name``, in place."""
        self.tensors[name].add_(moments)

    def replaced(self, tensors: Mapping[str, Tensor]) -> DenseBins:
        """Return the same with some tensors replaced."""
        return DenseBins({**self.tensors, **tensors})


@dataclass(frozen=True)
class CompactBins:
    """The bins that contain pairs, for the CPU.

    Indexing by name returns a new dense tensor; :meth:`add` and :meth:`replaced` change what is stored.

    Attributes:
        cells: the moments of each fold and bin, by name.
        tiles: the density in tiles of 8 × 8 cells: counts ``low + 65,536 · high``, where ``low`` has 16 bits.
        pairs: the drawn pairs of each bin; ``key`` is stored as the bits that differ from :data:`NO_KEY`.
    """

    cells: BinTable
    tiles: BinTable
    pairs: BinTable

    @classmethod
    def empty(cls, optional: Iterable[str] = ()) -> CompactBins:
        """Return the bins of no pairs."""
        moments = dict.fromkeys(("moments", *optional), torch.float64)
        return cls(
            BinTable.empty(FOLDS * PAIR_GRID.size, len(MOMENTS), moments),
            BinTable.empty(math.prod(_TILES), TILE**2, {"low": torch.int16, "high": torch.int64}),
            BinTable.empty(PAIR_GRID.size, PAIRS_PER_BIN, PAIR_FIELDS),
        )

    @property
    def nbytes(self) -> int:
        """Number of bytes once every bin is in use."""
        tables = (self.cells, self.tiles, self.pairs)
        return sum(tensor.nbytes for table in tables for tensor in (table.rows, *table.values.values()))

    def __contains__(self, name: str) -> bool:
        return name == "density" or name in self.cells.values or name in self.pairs.values

    def get(self, name: str) -> Tensor | None:
        """Return a tensor; None if it is not stored."""
        if name not in self:
            return None
        return self[name]

    def __getitem__(self, name: str) -> Tensor:
        if name == "density":
            low, high = self.tiles.dense("low"), self.tiles.dense("high")
            counts = (low.long() & 0xFFFF).add_(high, alpha=1 << 16).view(*_TILES, TILE, TILE)
            whole = counts.transpose(1, 2).reshape(_TILES[0] * TILE, -1)
            return whole[: DENSITY_X_GRID.size, : DENSITY_Y_GRID.size]
        if name in self.pairs.values:
            values = self.pairs.dense(name).T
            return values ^ NO_KEY if name == "key" else values
        return self.cells.dense(name).view(FOLDS, -1, len(MOMENTS)).mT

    def add(self, name: str, moments: Tensor) -> None:
        """Add to the moments ``name``, in place."""
        self.cells.add(name, moments.mT.reshape(-1, len(MOMENTS)))

    def replaced(self, tensors: Mapping[str, Tensor]) -> CompactBins:
        """Return the same with some tensors replaced; the others are shared."""
        bins = self
        if any(name in self.cells.values for name in tensors):
            every = {name: tensors[name] if name in tensors else self[name] for name in self.cells.values}
            cells = BinTable.of({name: moments.mT.reshape(-1, len(MOMENTS)) for name, moments in every.items()})
            bins = replace(bins, cells=cells)
        if "density" in tensors:
            density = tensors["density"]
            beyond = [tiles * TILE - size for tiles, size in zip(_TILES, density.shape, strict=True)]
            whole = torch.nn.functional.pad(density, (0, beyond[1], 0, beyond[0]))
            counts = whole.view(_TILES[0], TILE, _TILES[1], TILE).transpose(1, 2).reshape(-1, TILE**2)
            bins = replace(bins, tiles=BinTable.of({"low": counts.short(), "high": counts >> 16}))
        if "key" in tensors:
            pairs = {name: tensors[name].T for name in PAIR_FIELDS}
            bins = replace(bins, pairs=BinTable.of({**pairs, "key": pairs["key"] ^ NO_KEY}))
        return bins


Bins = DenseBins | CompactBins


def empty_bins(device: torch.device, optional: Iterable[str]) -> Bins:
    """Return the bins of no pairs, as the device stores them."""
    if device.type == "cpu":
        return CompactBins.empty(optional)
    tensors = {
        name: zeros((FOLDS, PAIR_GRID.size, len(MOMENTS)), torch.float64, device).mT for name in ("moments", *optional)
    }
    tensors["density"] = zeros((DENSITY_X_GRID.size, DENSITY_Y_GRID.size), torch.int64, device)
    tensors |= {name: zeros((PAIRS_PER_BIN, PAIR_GRID.size), dtype, device) for name, dtype in PAIR_FIELDS.items()}
    tensors["key"].fill_(NO_KEY)
    return DenseBins(tensors)


@dataclass(eq=False, repr=False, kw_only=True)
class SiteSums:
    """Sums and samples of one site, as the loops fill them.

    Binned sums and drawn pairs are properties. In the CPU's memory ``bins`` stores them without empty bins, and each
    access makes a new tensor.

    Attributes:
        bins: storage of the binned sums and the drawn pairs.
        channel_sums: Σx and Σx² per channel: float64 ``(2, d)``.
        channel_extremes: smallest and largest x per channel: float32 ``(2, d)``.
        token_offsets: number of tokens per bin of mean/σ: int64 ``(token bins,)``.
        token_scales: number of tokens per bin of σ = 1/rstd: int64 ``(token bins,)``.
        nonfinite_tokens: number of tokens that contain a NaN or an infinity; they are in no sum.
        tokens: a uniform sample of whole tokens.
        largest: the tokens that contain the largest |x|.
        grouped: whether a token is a group of channels over all positions. Its size may then differ, and the samples
            of whole tokens contain :data:`GROUPED_WIDTH` of its elements.
        position_sums: number of tokens and Σx² by the position of a token in its sample, of all beyond
            :data:`POSITIONS` together: float64 ``(2, POSITIONS + 1)``; not of tokens whose position is unknown.
        first_moments: the moments of the tokens at the first position alone, or the first that is not left out: float64
            ``(bins, 6)``, without folds.
        channel_moments: where requested, the moments per channel, on a coarser grid and without folds: float64
            ``(6, d, channel bins)``.
    """

    bins: Bins
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
    channel_moments: Tensor | None = None

    @property
    def moments(self) -> Tensor:
        """n, Σx, Σy, Σx², Σxy, Σy² per fold and bin of x: float64 ``(folds, 6, bins)``."""
        return self.bins["moments"]

    @property
    def gamma_moments(self) -> Tensor | None:
        """Where requested, the moments weighted by γ², as is the error that reaches the next layer."""
        return self.bins.get("gamma_moments")

    @property
    def diagonal_moments(self) -> Tensor | None:
        """Where requested, the moments of the pairs (x_i, g_i): n, Σx, Σg, Σx², Σxg, Σg².

        g_i = ∂y_i/∂x_i is the diagonal of the token's Jacobian, for sites with :attr:`NormSite.has_diagonal`.
        """
        return self.bins.get("diagonal_moments")

    @property
    def density(self) -> Tensor:
        """Number of pairs per cell of the two density grids: int64 ``(x bins, y bins)``."""
        return self.bins["density"]

    @property
    def pairs(self) -> PairSample:
        """Single pairs, drawn evenly over the bins."""
        return PairSample(*(self.bins[name] for name in PAIR_FIELDS))
