"""Norm sites: what is known of each, where it stands in the network, and how a user selects some."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from normscope.errors import UsageError, unknown


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
        """Whether the diagonal of its Jacobian follows from each token: what sums of the diagonal are kept of."""
        return self.form is not None and not self.grouped and self.d > 1

    @property
    def bound(self) -> float:
        """Largest possible |y|: √(d−1) with centring, √d without; infinite where nothing that is known bounds it."""
        return math.sqrt(self.d - self.centred) if self.bounded else math.inf


@dataclass(frozen=True)
class SkippedNorm:
    """A normalization that normscope saw and could not observe, and why."""

    name: str
    kind: str
    reason: str


_NAMED_IN_AN_ERROR = 30

Layers = str | int | Sequence[int | str]


def select(sites: Sequence[NormSite], layers: Layers = "all") -> list[NormSite]:
    """Pick norm sites.

    Args:
        sites: what :func:`normscope.pairs.norms.trace.find_norms` found.
        layers: ``"all"``; a lone number for that many sites evenly over the depth; or indices, ranges (``4-11``, both
            ends included), module paths and globs, as a list or separated by commas (``"8,"`` is the site 8 alone).

    Returns:
        The sites in the order of their first calls, each once.

    Raises:
        UsageError: if a part names no site.

    >>> from normscope.pairs.norms.sites import NormSite
    >>> names = [f"blocks.{i}.norm" for i in range(9)]
    >>> known = ("LayerNorm", (8,), -1, 8, 1e-6, True, None, 1, 1, True)
    >>> sites = [NormSite(i, name, *known) for i, name in enumerate(names)]
    >>> [site.index for site in select(sites, 3)], [site.index for site in select(sites, "0,6-7,blocks.3.*")]
    ([0, 4, 8], [0, 3, 6, 7])
    """
    if isinstance(layers, int) or (isinstance(layers, str) and re.fullmatch(r"\s*-?\d+\s*", layers)):
        return _evenly(sites, int(layers))
    parts = layers.split(",") if isinstance(layers, str) else layers
    chosen: set[int] = set()
    for part in parts:
        text = str(part).strip()
        if text:
            chosen.update(_matching(sites, text))
    if not chosen:
        raise UsageError(f"The layers {layers!r} name no norm site; for example: all, 4, '0,8,24', '4-11', '*.norm1'.")
    return [site for site in sites if site.index in chosen]


def _evenly(sites: Sequence[NormSite], count: int) -> list[NormSite]:
    if count < 1:
        hint = "" if count else " To name the norm site with the number 0, add a comma: '0,'."
        raise UsageError(f"The number of layers must be at least 1, not {count}.{hint}")
    if count >= len(sites):
        return list(sites)
    if count == 1:
        return [sites[len(sites) // 2]]
    return [sites[round(i * (len(sites) - 1) / (count - 1))] for i in range(count)]


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


ADDITIONS = {
    *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__),
    *(torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__rsub__),
    *(torch.addcmul, Tensor.addcmul, Tensor.addcmul_, torch.lerp, Tensor.lerp),
}

# As timm (q_norm), diffusers (norm_q, norm_added_k, q_rms_norm_t) and transformers (q_layernorm, qk_norm,
# q_layernorm.norms.0 of one head) say; a norm before the projection (pre_norm_q, q_a_layernorm) is none of them.
_QUERY_OR_KEY = re.compile(
    r"(^|[._])(q|k|qk|query|key)_?((layer|rms|img)_?)?norm\d*(_t|_und_for_gen)?(\.norms\.\d+)?$"
    r"|(^|\.)norm\d*_?((added|ip)_)?(q|k|query|key)$"
    r"|(^|\.)\w*att\w*\.((q|k)_ln|ln_(q|k))$",
    re.IGNORECASE,
)


class Ends(NamedTuple):
    """Input and output of a site's first call, of any shape and still alive, and how many additions came before it."""

    input: Tensor
    output: Tensor
    additions_before: int


class Addition(NamedTuple):
    """The operands of one addition of a forward pass, still alive, and whether the first of them took the sum."""

    operands: tuple[Tensor, ...]
    in_place: bool


def of_sites(ends: dict[str, Ends], additions: list[Addition]) -> dict[str, str | None]:
    """Tell the placement of each site.

    Args:
        ends: for each module path, in the order of first calls, what its first call took and gave.
        additions: every addition of the forward pass, in order.

    Returns:
        ``pre-norm``, ``post-norm``, ``qk``, ``final`` or None (beside the residual stream) for each path. Sites whose
        paths differ only in the numbers of their blocks share a placement: nothing is added after the last block of a
        post-norm network, and its norm is post-norm all the same.
    """
    last_added: dict[tuple[int, int], float] = {}
    for number, addition in enumerate(additions):
        for operand in addition.operands:
            # What was added to in place is, from then on, the sum; only what comes later takes it as it is now.
            overwritten = addition.in_place and operand is addition.operands[0]
            before = last_added.get(_identity(operand), -1)
            last_added[_identity(operand)] = max(before, number if overwritten else math.inf)
    placements = {name: _of_site(name, end, last_added) for name, end in ends.items()}
    by_pattern = {_pattern(name): found for name, found in reversed(placements.items()) if found is not None}
    placements = {name: found or by_pattern.get(_pattern(name)) for name, found in placements.items()}
    repeated = Counter(_pattern(name) for name in placements)
    if any(placements.values()):
        for name in reversed(placements):
            if placements[name] or repeated[_pattern(name)] > 1:
                break
            placements[name] = "final"
    return placements


def _of_site(name: str, end: Ends, last_added: dict[tuple[int, int], float]) -> str | None:
    def added(tensor: Tensor) -> bool:
        return last_added.get(_identity(tensor), -1) >= end.additions_before

    if _QUERY_OR_KEY.search(name):
        return "qk"
    if added(end.input):
        return "pre-norm"
    return "post-norm" if added(end.output) else None


def _identity(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _pattern(name: str) -> str:
    """Forget which block it is: a path's part that is a number. The 1 of ``norm1`` is none."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name)
