"""The sums of one site as the tensors of a file, and back; empty bins take no space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from normscope.pairs.sums.binned import OPTIONAL_MOMENTS, PAIR_FIELDS
from normscope.pairs.sums.binning import DENSITY_X_GRID, DENSITY_Y_GRID, MOMENTS, PAIR_GRID
from normscope.pairs.sums.sampling import (
    FOLDS,
    LARGEST_TOKENS,
    NO_KEY,
    PAIRS_PER_BIN,
    UNIFORM_TOKENS,
    SourcesSeen,
    TokenSample,
)
from normscope.pairs.sums.stats import PairStats

_DENSE = ("channel_sums", "channel_extremes", "token_offsets", "token_scales", "nonfinite_tokens")
_COUNTS = ("density", "token_offsets", "token_scales", "nonfinite_tokens")
_FINITE = ("channel_sums", "channel_extremes", "diagonal_moments", "pairs.", "tokens.", "largest.")
_MOST = 2**53  # pairs that float64 counts one by one
_LARGEST_SQUARE = torch.finfo(torch.float32).max ** 2


def packed(stats: PairStats) -> dict[str, Tensor]:
    """Return the tensors of one site by their names in docs/file-formats.md; bins and cells of no pair are left out."""
    packed = {name: getattr(stats, name) for name in _DENSE}
    rows = _rows(stats.moments)
    cells = rows[:, 0].nonzero().squeeze(1)
    packed |= {"moments": rows[cells].T, "moments.cells": cells.int()}
    packed |= {name: _rows(stats.bins[name])[cells].T for name in OPTIONAL_MOMENTS if name in stats.bins}
    if stats.channel_moments is not None:
        cells = stats.channel_moments[0].flatten().nonzero().squeeze(1)
        packed["channel_moments"] = stats.channel_moments.flatten(1)[:, cells]
        packed["channel_moments.cells"] = cells.int()
    density, pairs = stats.density.flatten(), stats.pairs
    cells = density.nonzero().squeeze(1)
    packed |= {"density": density[cells], "density.cells": cells.int()}
    places = pairs.filled.flatten().nonzero().squeeze(1)
    packed |= {f"pairs.{name}": values.flatten()[places] for name, values in vars(pairs).items()}
    packed["pairs.places"] = places.int()
    for name in ("tokens", "largest"):
        packed |= {f"{name}.{f.name}": getattr(getattr(stats, name), f.name) for f in fields(TokenSample)}
    return packed


def unpacked(
    channels: int, sources: SourcesSeen, seed: int, tensors: Mapping[str, Tensor], *, grouped: bool
) -> PairStats:
    """Rebuild the sums that :func:`packed` took apart.

    Raises:
        ValueError: if a tensor is none that finite pairs leave; KeyError if one is missing.
    """
    sums = tensors["channel_sums"].shape
    if sums != (2, channels):  # before anything of a size that only the header names is made
        raise ValueError(f"channel_sums is {tuple(sums)}, not (2, {channels})")
    stats = PairStats.empty(
        channels,
        seed,
        grouped=grouped,
        by_gamma="gamma_moments" in tensors,
        per_channel="channel_moments" in tensors,
        diagonal="diagonal_moments" in tensors,
    )
    for name in _DENSE:
        getattr(stats, name).copy_(_like(getattr(stats, name), tensors[name], name))
    cells, shape = _cells(tensors)
    binned: dict[str, Tensor] = {}
    for name in ("moments", *OPTIONAL_MOMENTS):
        if name in stats.bins:
            rows = torch.zeros(FOLDS * PAIR_GRID.size, len(MOMENTS), dtype=torch.float64)
            rows[cells] = _rows(_like(torch.empty(shape, dtype=torch.float64), tensors[name], name))
            binned[name] = rows.view(FOLDS, -1, len(MOMENTS)).mT
    if stats.channel_moments is not None:
        cells = _within(tensors["channel_moments.cells"].long(), stats.channel_moments[0].numel())
        kept = torch.empty(len(MOMENTS), len(cells), dtype=torch.float64)
        stats.channel_moments.flatten(1)[:, cells] = _like(kept, tensors["channel_moments"], "channel_moments")
    density = torch.zeros(DENSITY_X_GRID.size, DENSITY_Y_GRID.size, dtype=torch.int64)
    cells = _within(tensors["density.cells"].long(), density.numel())
    density.view(-1)[cells] = _like(density.new_empty(len(cells)), tensors["density"], "density")
    places = _within(tensors["pairs.places"].long(), PAIRS_PER_BIN * PAIR_GRID.size)
    for name, dtype in PAIR_FIELDS.items():
        values = torch.full((PAIRS_PER_BIN, PAIR_GRID.size), NO_KEY if name == "key" else 0, dtype=dtype)
        values.view(-1)[places] = _like(values.new_empty(len(places)), tensors[f"pairs.{name}"], f"pairs.{name}")
        binned[name] = values
    stats.bins = stats.bins.replaced({"density": density, **binned})
    for name, capacity in (("tokens", UNIFORM_TOKENS), ("largest", LARGEST_TOKENS)):
        width = stats.tokens.x.shape[1]
        setattr(stats, name, _token_sample(width, capacity, name, tensors))
    stats.sources = sources
    _check(stats, tensors)
    return stats


def _rows(moments: Tensor) -> Tensor:
    """Lay moments out with a row for each fold and bin: ``(folds · bins, 6)``, without a copy of those in memory."""
    return moments.mT.reshape(-1, len(MOMENTS))


def _cells(tensors: Mapping[str, Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """Return which folds and bins a file holds moments of, fold · bins + bin each, and the shape of the moments."""
    if "moments.bins" in tensors:  # of captures of format version 4: every fold of a bin
        bins = _within(tensors["moments.bins"].long(), PAIR_GRID.size)
        folds = torch.arange(FOLDS)[:, None] * PAIR_GRID.size
        return (folds + bins).flatten(), (FOLDS, len(MOMENTS), len(bins))
    cells = _within(tensors["moments.cells"].long(), FOLDS * PAIR_GRID.size)
    return cells, (len(MOMENTS), len(cells))


def _check(stats: PairStats, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for numbers that finite pairs never give, on which a fit or a figure would fail."""
    moments = _rows(tensors["moments"])
    n = moments[:, :1]
    if not bool((n.ge(0) & n.eq(n.floor())).all()) or not float(n.sum()) <= _MOST:
        raise ValueError("its counts of pairs are no counts")
    if not bool((moments.abs() <= n * _LARGEST_SQUARE).all()):
        raise ValueError("its sums are not finite, or larger than those of so many pairs")
    for name in _COUNTS:
        if bool((tensors[name] < 0).any()):
            raise ValueError(f"{name} holds negative counts")
    channel = tensors["pairs.channel"]
    if not bool((channel.ge(0) & channel.lt(stats.channels)).all()):
        raise ValueError("its pairs name channels that do not exist")
    if any(bool((sample.position < 0).any()) for sample in (stats.tokens, stats.largest)):
        raise ValueError("its tokens name places that do not exist")
    low, high = stats.channel_extremes
    untouched = low.isposinf() & high.isneginf() & (stats.channel_sums == 0).all(0)  # until the first token comes
    finite = {name: tensor for name, tensor in tensors.items() if name.startswith(_FINITE)}
    if stats.grouped or not n.any():  # a group's tokens come without the others'
        finite["channel_extremes"] = stats.channel_extremes[:, ~untouched]
    for name, values in finite.items():
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name} is not finite")


def _token_sample(width: int, capacity: int, name: str, tensors: Mapping[str, Tensor]) -> TokenSample:
    count = len(tensors[f"{name}.key"])
    if count > capacity:
        raise ValueError(f"{name} holds {count} tokens, more than {capacity}")
    empty = TokenSample.empty(width, torch.device("cpu"))
    parts = {}
    for field in fields(TokenSample):
        expected = getattr(empty, field.name).new_empty(count, *getattr(empty, field.name).shape[1:])
        parts[field.name] = _like(expected, tensors[f"{name}.{field.name}"], f"{name}.{field.name}")
    return TokenSample(**parts)


def _like(expected: Tensor, tensor: Tensor, name: str) -> Tensor:
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    return tensor


def _within(indices: Tensor, size: int) -> Tensor:
    if indices.ndim != 1 or bool(((indices < 0) | (indices >= size)).any()):
        raise ValueError("it names bins that do not exist")
    return indices
