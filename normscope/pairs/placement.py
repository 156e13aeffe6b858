"""Where a norm stands, read from the data flow: on the residual stream, before a branch of it, or on queries and keys.

A pre-norm's input is the residual stream itself, which an addition takes too, past the norm. A post-norm's output is
what an addition takes. Names and flags say nothing reliable here; additions do.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

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
    last_added: dict[tuple[int, int] | None, float] = {}
    for number, addition in enumerate(additions):
        for operand in filter(_identity, addition.operands):
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


def _of_site(name: str, end: Ends, last_added: dict[tuple[int, int] | None, float]) -> str | None:
    def added(tensor: Tensor) -> bool:
        return last_added.get(_identity(tensor), -1) >= end.additions_before

    if _QUERY_OR_KEY.search(name):
        return "qk"
    if added(end.input):
        return "pre-norm"
    return "post-norm" if added(end.output) else None


def _identity(tensor: Tensor) -> tuple[int, int] | None:
    """Return where a tensor lies and how large it is; None of one that torch.vmap made, which lies nowhere."""
    try:
        return tensor.data_ptr(), tensor.numel()
    except RuntimeError:
        return None


def _pattern(name: str) -> str:
    """Forget which block it is: a path's part that is a number. The 1 of ``norm1`` is none."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name)
