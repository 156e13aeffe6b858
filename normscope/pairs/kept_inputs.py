"""Inputs that a capture keeps to be looked at: what they show, and the line of each of their tokens at every norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from normscope.errors import DataError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.previews import Preview
from normscope.pairs.norms.formulas import Lines
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.sums.binning import FloatGrid
from normscope.runtime.records import checked, converted, is_shape

Previews = Callable[[Batch, int], Preview | None]
_Key = tuple[str, str, int]

SIZE_GRID = FloatGrid(mantissa_bits=2, low=-8, high=10)
# Bins of |x|: the first holds what is below the grid, the last what is beyond.
_SIZES = SIZE_GRID.size - SIZE_GRID.centre


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens of one sample at one norm, in the order in which the norm sees them.

    Attributes:
        shape: how they are laid out, the sizes of the axes that number them: ``(197,)`` of a ViT, ``(14, 14)`` of a
            Swin, ``(12, 197)`` of queries by head; of a norm that is called several times the calls come first.
        shift: what is subtracted from each, float32 ``(tokens,)``: y = (x − shift)/σ.
        sigma: σ of each, float32 ``(tokens,)``; NaN of padding.
        sizes: number of elements of each token per bin of |x|, of the positive half of :data:`SIZE_GRID`: int32
            ``(tokens, bins)``.
    """

    shape: tuple[int, ...]
    shift: Tensor
    sigma: Tensor
    sizes: Tensor

    def tail(self, beyond: float) -> tuple[float, Tensor]:
        """Return the edge of the grid nearest to ``beyond``, and each token's share of elements with |x| at it or more.

        >>> tokens = KeptTokens((1,), torch.zeros(1), torch.ones(1), sizes_of(torch.tensor([[0.1, -2.0, 3.0, 0.0]])))
        >>> tokens.tail(2.1)
        (2.0, tensor([0.5000]))
        """
        edges = SIZE_GRID.edges()[SIZE_GRID.centre + 1 : -1]
        nearest = int((edges.log2() - math.log2(beyond)).abs().argmin())
        counts = self.sizes.double()
        return float(edges[nearest]), (counts[:, nearest + 1 :].sum(1) / counts.sum(1).clamp_min(1)).float()

    def joined(self, later: KeptTokens) -> KeptTokens:
        """Return these tokens and behind them those of a later call of the norm; calls of one layout come first."""
        both = {name: torch.cat([getattr(self, name), getattr(later, name)]) for name in _TENSORS}
        calls, rest = divmod(len(both["sigma"]), math.prod(later.shape))
        alike = not rest and later.shape == self.shape[-len(later.shape) :]
        return KeptTokens((calls, *later.shape) if alike else (len(both["sigma"]),), **both)


_TENSORS = ("shift", "sigma", "sizes")


def sizes_of(rows: Tensor) -> Tensor:
    """Count the elements of each token per bin of |x|: int32 ``(tokens, bins)`` of float32 ``(tokens, d)``."""
    finite = rows.float().abs().nan_to_num(math.inf).clamp_max(torch.finfo(torch.float32).max)
    bins = SIZE_GRID.index(finite) - SIZE_GRID.centre
    counts = torch.zeros(len(rows), _SIZES, dtype=torch.int32, device=rows.device)
    return counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.int32))


@dataclass(frozen=True, eq=False)
class KeptInput:
    """One sample that can be looked at.

    Attributes:
        sample: which it is.
        part: of the data that it belongs to, ``timestep 980``; empty where there are none.
        preview: what it shows.
        tokens: its tokens at each norm site, by the site's name; not at norms whose tokens are groups of channels.
    """

    sample: Sample
    part: str
    preview: Preview
    tokens: dict[str, KeptTokens] = field(default_factory=dict)

    @property
    def key(self) -> _Key:
        """Identity and order of the input: part, data set, number of the sample."""
        return self.part, self.sample.data, self.sample.index

    @property
    def name(self) -> str:
        """Name it for people: its source, and its number or the part of the data that it belongs to."""
        source, index = self.sample.source, self.sample.index
        return f"{source} · {self.part}" if self.part else f"{source}, sample {index}"

    def only(self, sites: set[str]) -> KeptInput:
        """Return it with its tokens at some sites."""
        return replace(self, tokens={name: tokens for name, tokens in self.tokens.items() if name in sites})


def first_inputs(inputs: Iterable[KeptInput], number: int | None = None) -> list[KeptInput]:
    """Return each input once, of each part and data set those of the ``number`` least sample numbers; None for all.

    Parts come in the order of their first samples, whoever saw which: a diffusion model's timesteps go down.
    """
    by_key = {one.key: one for one in inputs}
    parts: dict[tuple[str, str], list[KeptInput]] = {}
    for one in sorted(by_key.values(), key=lambda one: one.sample.index):
        parts.setdefault(one.key[:2], []).append(one)
    return [one for of_part in parts.values() for one in of_part[:number]]


class InputKeeper:
    """Takes down the tokens of a few inputs while batches run."""

    def __init__(self, number: int, previews: Previews) -> None:
        """Keep of each part of the data so many inputs, those of least number that can be looked at."""
        self._number, self._previews = number, previews
        self._running: list[tuple[int, KeptInput]] = []
        self._samples = 1

    def begin(self, batch: Batch, kept: list[KeptInput]) -> list[KeptInput]:
        """Choose which samples of a batch join those that are kept; of one that ran in part, what is there stays."""
        self._running, self._samples = [], len(batch.samples)
        for place, sample in enumerate(batch.samples if self._number else ()):
            key = batch.part, sample.data, sample.index
            if not any(one.key == key for one in kept):
                rivals = [one.sample.index for one in kept if one.key[:2] == key[:2]]
                if len(rivals) >= self._number and sample.index > max(rivals):
                    continue
                if (preview := self._previews(batch, place)) is None:
                    continue
                kept = first_inputs([*kept, KeptInput(sample, batch.part, preview)], self._number)
            self._running += [(place, one) for one in kept if one.key == key]
        return kept

    @property
    def running(self) -> bool:
        """True if any sample of the running batch is kept."""
        return bool(self._running)

    def add(self, site: NormSite, rows: Tensor, lines: Lines, layout: Sequence[int], valid: Tensor | None) -> None:
        """Take down the tokens of one call of a norm.

        Args:
            site: the norm.
            rows: the elements of all tokens, ``(tokens, d)``; tokens of one sample lie together.
            lines: how each token is normalized.
            layout: sizes of the axes that number the tokens, samples first.
            valid: which tokens are data and not padding, bool ``(tokens,)``; None for all.
        """
        # More than samples lie along the first axis where a network puts windows there; axes of one number nothing.
        shape = tuple(size for size in (layout[0] // self._samples, *layout[1:]) if size != 1) or (1,)
        per_sample = math.prod(shape)
        for place, one in self._running:
            own = slice(place * per_sample, (place + 1) * per_sample)
            tokens = _tokens(rows[own], lines, own, shape, None if valid is None else valid[own])
            before = one.tokens.get(site.name)
            one.tokens[site.name] = tokens if before is None else before.joined(tokens)


def _tokens(rows: Tensor, lines: Lines, own: slice, shape: tuple[int, ...], valid: Tensor | None) -> KeptTokens:
    x = rows.float().double()
    shift, rstd = (of_rows.flatten() for of_rows in lines.of(x, own))
    sigma = 1 / rstd
    known = sigma.isfinite() & shift.isfinite() & x.isfinite().all(1)
    if valid is not None:
        known &= valid
    shift, sigma = (numbers.where(known, math.nan).float().cpu() for numbers in (shift, sigma))
    return KeptTokens(shape, shift, sigma, sizes_of(rows).cpu())


def described(inputs: Sequence[KeptInput], sites: Sequence[NormSite]) -> list[dict[str, Any]]:
    """Return what JSON holds of kept inputs; their tensors are those of :func:`tensors_of`."""
    return [
        {
            "sample": asdict(one.sample),
            "part": one.part,
            **{name: getattr(one.preview, name) for name in _SHOWN},
            "tokens": {str(site.index): one.tokens[site.name].shape for site in sites if site.name in one.tokens},
        }
        for one in inputs
    ]


def tensors_of(inputs: Sequence[KeptInput], sites: Sequence[NormSite]) -> dict[str, Tensor]:
    """Return the tensors of kept inputs by their names in a file, ``input/NUMBER.NAME`` and ``…/INDEX.NAME``."""
    tensors: dict[str, Tensor] = {}
    for number, one in enumerate(inputs):
        drawn = {name: getattr(one.preview, name) for name in _DRAWN}
        tensors |= {f"input/{number}.{name}": value for name, value in drawn.items() if value is not None}
        for site in sites:
            if (tokens := one.tokens.get(site.name)) is not None:
                tensors |= {f"input/{number}/{site.index}.{name}": getattr(tokens, name) for name in _TENSORS}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def rebuilt(
    entries: Sequence[Mapping[str, Any]], sites: Sequence[NormSite], tensors: Mapping[str, Tensor]
) -> list[KeptInput]:
    """Rebuild what :func:`described` and :func:`tensors_of` took apart.

    Raises:
        ValueError: if a value is none that a kept input can have; KeyError if one is missing.
    """
    return [_rebuilt(number, entry, sites, tensors) for number, entry in enumerate(entries)]


_DRAWN = ("pixels", "envelope")
_SHOWN = {"size": tuple[int, int], "along_width": bool, "length": int, "words": tuple[str, ...], "note": str}


def _rebuilt(
    number: int, entry: Mapping[str, Any], sites: Sequence[NormSite], tensors: Mapping[str, Tensor]
) -> KeptInput:
    sample = converted(Sample, entry["sample"], "sample")
    part: str = checked(entry, {"part": str}, "kept input")["part"]
    shown = checked(entry, _SHOWN, "kept input")
    if min(shown["size"]) < 0 or max(shown["size"]) >= 2**20 or shown["length"] < 0:
        raise ValueError(f"a kept input has the size {shown['size']} and length {shown['length']}")
    pixels, envelope = (tensors.get(f"input/{number}.{name}") for name in _DRAWN)
    try:
        preview = Preview(pixels=pixels, envelope=envelope, **shown)
    except DataError as error:
        raise ValueError(str(error)) from None
    names = {str(site.index): site.name for site in sites}
    tokens = {
        names[index]: _kept(f"input/{number}/{index}", shape, tensors) for index, shape in entry["tokens"].items()
    }
    return KeptInput(sample, part, preview, tokens)


def _kept(prefix: str, shape: Sequence[int], tensors: Mapping[str, Tensor]) -> KeptTokens:
    shift, sigma, sizes = (tensors[f"{prefix}.{name}"] for name in _TENSORS)
    count = math.prod(shape)
    if not is_shape(tuple(shape)) or not shift.shape == sigma.shape == (count,) or sizes.shape != (count, _SIZES):
        raise ValueError(f"{prefix} holds {len(sigma):,} tokens of {tuple(sizes.shape)[1:]} bins, laid out as {shape}")
    if (shift.dtype, sigma.dtype, sizes.dtype) != (torch.float32, torch.float32, torch.int32) or bool(
        (sizes < 0).any()
    ):
        raise ValueError(f"{prefix} holds numbers of another kind")
    return KeptTokens(tuple(shape), shift, sigma, sizes)
