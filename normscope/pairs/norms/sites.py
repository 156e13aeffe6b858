"""Norm sites: what is known of each, and how a user selects some."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from normscope.errors import UsageError, unknown
from normscope.runtime.records import Record

PLACEMENTS = ("pre-norm", "post-norm", "qk", "final")


@dataclass(frozen=True)
class NormSite:
    """One normalization layer of a network.

    Attributes:
        index: its number in the order of first calls.
        name: its module path.
        kind: its name in the table of norms.
        normalized_shape: sizes of the axes that share one statistic, at the first call.
        channel_axis: the axis or axes of the norm's input that number the channels.
        channels: number of channels.
        eps: what is added under the root.
        affine: whether it has a weight or a bias of its own.
        placement: ``pre-norm``, ``post-norm``, ``qk``, ``final``, or None for a norm beside the residual stream.
        calls: how often one forward pass calls it.
        tokens_per_sample: how many vectors it normalizes for one sample, over all calls.
        centred: whether it takes the token's mean away.
        bounded: whether the statistics are the token's own, so that √d bounds |y|.
        grouped: whether a token is a group of channels over all positions; its size may differ from input to input.
        form: name of the form by which a token's line follows from its elements, see
            :data:`normscope.pairs.norms.formulas.FORMS`; None where it follows from something else: running statistics,
            or a formula that the user registered.
    """

    index: int
    name: str
    kind: str
    normalized_shape: tuple[int, ...]
    channel_axis: int | tuple[int, ...]
    channels: int
    eps: float
    affine: bool
    placement: str | None
    calls: int
    tokens_per_sample: int
    centred: bool
    bounded: bool = True
    grouped: bool = False
    form: str | None = None

    @property
    def d(self) -> int:
        """Number of elements of one token; of a grouped norm, at its first call."""
        return torch.Size(self.normalized_shape).numel()

    @property
    def has_diagonal(self) -> bool:
        """True if the diagonal of its Jacobian has a closed form per token, as its sums require."""
        return self.form is not None and not self.grouped and self.d > 1

    @property
    def bound(self) -> float:
        """Largest possible |y|: √(d−1) with centring, √d without; infinite where nothing that is known bounds it."""
        return math.sqrt(self.d - self.centred) if self.bounded else math.inf


@dataclass(frozen=True)
class SkippedNorm(Record):
    """A normalization that normscope saw and could not observe, and why."""

    name: str
    kind: str
    reason: str


_NAMED_IN_AN_ERROR = 30

Layers = str | int | Sequence[int | str]


def kind_of_site(name: str) -> str:
    """The kind of a site: its module path with ``*`` for the parts that are numbers.

    >>> kind_of_site("blocks.11.norm1")
    'blocks.*.norm1'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def is_number(layers: str) -> bool:
    """True if layers are requested by a lone number, so that :func:`select` chooses them.

    >>> is_number("4"), is_number("4,")
    (True, False)
    """
    return re.fullmatch(r"\s*-?\d+\s*", layers) is not None


def select(sites: Sequence[NormSite], layers: Layers = "all") -> list[NormSite]:
    """Pick norm sites.

    Args:
        sites: what :func:`normscope.pairs.norms.trace.find_norms` found.
        layers: ``"all"``; a lone number for that many sites along the depth, one of each of as many equal stretches,
            by turns of every kind (:func:`kind_of_site`) that a stretch holds; or indices, ranges (``4-11``, both ends
            included), module paths and globs, as a list or separated by commas (``"8,"`` is the site 8 alone).

    Returns:
        The sites in the order of their first calls, each once.

    Raises:
        UsageError: if a part names no site.

    >>> from normscope.pairs.norms.sites import NormSite
    >>> names = [f"blocks.{i // 2}.norm{i % 2 + 1}" for i in range(8)] + ["norm"]
    >>> known = ("LayerNorm", (8,), -1, 8, 1e-6, True, None, 1, 1, True)
    >>> sites = [NormSite(i, name, *known) for i, name in enumerate(names)]
    >>> [site.name for site in select(sites, 3)]
    ['blocks.0.norm2', 'blocks.2.norm1', 'norm']
    >>> [site.index for site in select(sites, "0,4-5,blocks.3.*")]
    [0, 4, 5, 6, 7]
    """
    if isinstance(layers, str) and is_number(layers):
        layers = int(layers)
    if isinstance(layers, int):
        return _along_depth(sites, layers)
    parts = layers.split(",") if isinstance(layers, str) else layers
    chosen: set[int] = set()
    for part in parts:
        text = str(part).strip()
        if text:
            chosen.update(_matching(sites, text))
    if not chosen:
        raise UsageError(f"The layers {layers!r} name no norm site; for example: all, 4, '0,8,24', '4-11', '*.norm1'.")
    return [site for site in sites if site.index in chosen]


def select_by_placement(sites: Sequence[NormSite], wanted: Layers) -> list[NormSite]:
    """Pick norm sites by placement, or as :func:`select` does.

    Raises:
        UsageError: if a part names no site.
    """
    if isinstance(wanted, int):
        return select(sites, wanted)
    parts = [part.strip() for part in (wanted.split(",") if isinstance(wanted, str) else map(str, wanted))]
    placements = {part for part in parts if part in PLACEMENTS}
    there = {site.placement for site in sites if site.placement}
    if missing := sorted(placements - there):
        raise UsageError(
            f"No norm here is {missing[0]}; there are {', '.join(sorted(there)) or 'none with a placement'}."
        )
    others = [part for part in parts if part not in PLACEMENTS]
    names = {site.name for site in sites if site.placement in placements}
    if not placements or any(others):
        names |= {site.name for site in select(sites, wanted if not placements else others)}
    return [site for site in sites if site.name in names]


def _along_depth(sites: Sequence[NormSite], count: int) -> list[NormSite]:
    """Take one site of each of ``count`` equal stretches: of the kind taken least so far, nearest the middle.

    Sites alternate in most networks (norm1, norm2, norm1 …): any even step would see one kind alone.
    """
    if count < 1:
        hint = "" if count else " To name the norm site with the number 0, add a comma: '0,'."
        raise UsageError(f"The number of layers must be at least 1, not {count}.{hint}")
    count = min(count, len(sites))
    kinds = [(kind_of_site(site.name), site.kind) for site in sites]
    taken: Counter[tuple[str, str]] = Counter()
    chosen = []
    for stretch in range(count):
        first, end = (len(sites) * edge // count for edge in (stretch, stretch + 1))
        middle = (first + end - 1) / 2
        place = min(range(first, end), key=lambda n: (taken[kinds[n]], abs(n - middle)))
        taken[kinds[place]] += 1
        chosen.append(sites[place])
    return chosen


def _matching(sites: Sequence[NormSite], text: str) -> list[int]:
    names = {site.name: site.index for site in sites}
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if text == "all":
        return list(names.values())
    if text in names:
        return [names[text]]
    if numbers:
        wanted = range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
        if not wanted or not {wanted[0], wanted[-1]} <= set(names.values()):
            raise UsageError(f"There are no layers {text}: the norm sites are numbered {_numbered(names)}.")
        return [index for index in names.values() if index in wanted]
    matches = [index for name, index in names.items() if fnmatch.fnmatchcase(name, text)]
    if not matches:
        said = unknown("norm site", text, names)
        many = len(names) > _NAMED_IN_AN_ERROR and "Did you mean" not in said
        raise UsageError(
            f"There is no norm site {text!r} among {len(names)}; `normscope layers` lists them." if many else said
        )
    return matches


def _numbered(names: dict[str, int]) -> str:
    indices = list(names.values())
    dense = indices == list(range(indices[0], indices[-1] + 1))
    return f"{indices[0]} to {indices[-1]}" if dense else ", ".join(map(str, indices))
