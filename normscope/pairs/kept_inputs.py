"""Inputs that a capture keeps for display: a preview of each, and the line of each of its tokens at every norm."""

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
from normscope.norms.formulas import Lines
from normscope.norms.sites import NormSite
from normscope.pairs.sums.binning import FloatGrid
from normscope.runtime.records import converted

Previews = Callable[[Batch, int], Preview | None]

SIZE_GRID = FloatGrid(mantissa_bits=2, low=-8, high=10)
# Bins of |x|: the first contains what is below the grid, the last what is beyond.
_SIZES = SIZE_GRID.size - SIZE_GRID.centre
_PER_TOKEN = ("shift", "sigma", "sizes")


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens of one sample at one norm, in the order in which the norm receives them.

    Attributes:
        shape: sizes of the axes that number the tokens: ``(197,)`` of a ViT, ``(14, 14)`` of a Swin, ``(12, 197)`` of
            queries by head; of a norm that is called several times the calls come first.
        shift: subtracted from each token, float32 ``(tokens,)``: y = (x − shift)/σ.
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
        """Append the tokens of a later call of the norm; calls of one layout are numbered along a first axis."""
        both = {name: torch.cat([getattr(self, name), getattr(later, name)]) for name in _PER_TOKEN}
        calls, remainder = divmod(len(both["sigma"]), math.prod(later.shape))
        alike = not remainder and later.shape == self.shape[-len(later.shape) :]
        return KeptTokens((calls, *later.shape) if alike else (len(both["sigma"]),), **both)


def sizes_of(rows: Tensor) -> Tensor:
    """Count the elements of each token per bin of |x|: int32 ``(tokens, bins)`` of float32 ``(tokens, d)``."""
    finite = rows.float().abs().nan_to_num(math.inf).clamp_max(torch.finfo(torch.float32).max)
    bins = SIZE_GRID.index(finite) - SIZE_GRID.centre
    counts = torch.zeros(len(rows), _SIZES, dtype=torch.int32, device=rows.device)
    return counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.int32))


@dataclass(frozen=True, eq=False)
class KeptInput:
    """One sample that is kept for display.

    Attributes:
        sample: its identity.
        part: of the data that it belongs to, ``timestep 980``; empty where there are none.
        preview: its picture, waveform or text.
        tokens: its tokens at each norm site, by the site's name; not at norms whose tokens are groups of channels.
    """

    sample: Sample
    part: str
    preview: Preview
    tokens: dict[str, KeptTokens] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Identity and order of the input: part, data set, number of the sample."""
        return self.part, self.sample.data, self.sample.index

    @property
    def name(self) -> str:
        """Name for display: its source, and its number or the part of the data that it belongs to."""
        source, index = self.sample.source, self.sample.index
        return f"{source} · {self.part}" if self.part else f"{source}, sample {index}"

    def only(self, sites: set[str]) -> KeptInput:
        """Return it with its tokens at some sites."""
        return replace(self, tokens={name: tokens for name, tokens in self.tokens.items() if name in sites})


def first_inputs(inputs: Iterable[KeptInput], number: int | None = None) -> list[KeptInput]:
    """Return each input once, of each part and data set the ``number`` of least sample numbers; None for all.

    Parts come in the order of their first samples, in whichever process: a diffusion model's timesteps descend.
    """
    by_key = {kept.key: kept for kept in inputs}
    parts: dict[tuple[str, str], list[KeptInput]] = {}
    for kept in sorted(by_key.values(), key=lambda kept: kept.sample.index):
        parts.setdefault(kept.key[:2], []).append(kept)
    return [kept for group in parts.values() for kept in group[:number]]


class InputKeeper:
    """Records the tokens of a few inputs while batches run.

    Attributes:
        running: samples of the running batch that are kept, each with its index in the batch.
    """

    def __init__(self, number: int, previews: Previews) -> None:
        """Keep ``number`` inputs of each part of the data: those of least number that have a preview."""
        self._number, self._previews = number, previews
        self.running: list[tuple[int, KeptInput]] = []
        self._samples = 1

    def begin(self, batch: Batch, kept: Sequence[KeptInput]) -> list[KeptInput]:
        """Return the kept inputs with those of a batch; an input of a pass that ran in part keeps its tokens."""
        self.running, self._samples = [], len(batch.samples)
        for row, sample in enumerate(batch.samples if self._number else ()):
            key = batch.part, sample.data, sample.index
            if not any(earlier.key == key for earlier in kept):
                rivals = [earlier.sample.index for earlier in kept if earlier.key[:2] == key[:2]]
                if len(rivals) >= self._number and sample.index > max(rivals):
                    continue
                if (preview := self._previews(batch, row)) is None:
                    continue
                kept = first_inputs([*kept, KeptInput(sample, batch.part, preview)], self._number)
            self.running += [(row, running) for running in kept if running.key == key]
        return list(kept)

    def add(self, site: NormSite, rows: Tensor, lines: Lines, layout: Sequence[int], valid: Tensor | None) -> None:
        """Record the tokens of one call of a norm: ``rows`` ``(tokens, d)``, one sample after the other.

        ``layout`` contains the sizes of the axes that number the tokens, samples first. ``valid`` is False for padding,
        bool ``(tokens,)``; None for no padding.
        """
        # The first axis is longer than the samples where a network puts windows there; axes of size 1 are omitted.
        shape = tuple(size for size in (layout[0] // self._samples, *layout[1:]) if size != 1) or (1,)
        per_sample = math.prod(shape)
        for row, kept in self.running:
            within = slice(row * per_sample, (row + 1) * per_sample)
            x = rows[within].float().double()
            shift, rstd = (values.flatten() for values in lines.of(x, within))
            sigma = 1 / rstd
            finite = sigma.isfinite() & shift.isfinite() & x.isfinite().all(1)
            if valid is not None:
                finite &= valid[within]
            shift, sigma = (numbers.where(finite, math.nan).float().cpu() for numbers in (shift, sigma))
            tokens = KeptTokens(shape, shift, sigma, sizes_of(rows[within]).cpu())
            before = kept.tokens.get(site.name)
            kept.tokens[site.name] = tokens if before is None else before.joined(tokens)


_DRAWN = ("pixels", "envelope")


@dataclass(frozen=True)
class _Stored:
    """JSON of a kept input; its tensors are ``input/NUMBER.NAME`` and ``input/NUMBER/INDEX.NAME``."""

    sample: Sample
    part: str
    size: tuple[int, int]
    along_width: bool
    length: int
    words: tuple[str, ...]
    note: str
    tokens: dict[str, tuple[int, ...]]  # their shape, by the site's index


def pack_inputs(
    inputs: Sequence[KeptInput], sites: Sequence[NormSite]
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return kept inputs as JSON and tensors, named as in docs/file-formats.md."""
    entries: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, kept in enumerate(inputs):
        shown = dict(vars(kept.preview))
        drawn = {name: shown.pop(name) for name in _DRAWN}
        tensors |= {f"input/{number}.{name}": tensor for name, tensor in drawn.items() if tensor is not None}
        tokens = {str(site.index): kept.tokens[site.name] for site in sites if site.name in kept.tokens}
        for index, at_site in tokens.items():
            tensors |= {f"input/{number}/{index}.{name}": getattr(at_site, name) for name in _PER_TOKEN}
        shapes = {index: at_site.shape for index, at_site in tokens.items()}
        entries.append(asdict(_Stored(kept.sample, kept.part, **shown, tokens=shapes)))
    return entries, {name: tensor.contiguous() for name, tensor in tensors.items()}


def unpack_inputs(entries: Sequence[Any], sites: Sequence[NormSite], tensors: Mapping[str, Tensor]) -> list[KeptInput]:
    """Rebuild the inputs of :func:`pack_inputs`.

    Raises:
        ValueError: if the page could not draw such an input; KeyError if a tensor or a site is missing.
    """
    names = {str(site.index): site.name for site in sites}
    inputs = []
    for number, entry in enumerate(entries):
        stored = converted(_Stored, entry, "kept input")
        if max(stored.size) >= 2**20:  # a grid of patches is searched for in it
            raise ValueError(f"a kept input has the size {stored.size}")
        shown: dict[str, Any] = {name: tensors.get(f"input/{number}.{name}") for name in _DRAWN}
        shown |= {name: value for name, value in vars(stored).items() if name not in ("sample", "part", "tokens")}
        try:
            preview = Preview(**shown)
        except DataError as error:
            raise ValueError(str(error)) from None
        tokens = {
            names[index]: KeptTokens(shape, *(tensors[f"input/{number}/{index}.{name}"] for name in _PER_TOKEN))
            for index, shape in stored.tokens.items()
        }
        inputs.append(KeptInput(stored.sample, stored.part, preview, tokens))
    return inputs
