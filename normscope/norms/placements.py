"""Placements of norms in the residual stream: pre-norm, post-norm, qk or final."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from normscope.norms.sites import kind_of_site
from normscope.norms.traced_pass import TracedCall, TracedPass
from normscope.runtime.spread import is_sharded

# Names in timm (q_norm), diffusers (norm_q, norm_added_k, q_rms_norm_t) and transformers (q_layernorm, qk_norm,
# q_layernorm.norms.0 of one head); a norm before the projection (pre_norm_q, q_a_layernorm) is none of them.
QUERY_OR_KEY = re.compile(
    r"(^|[._])(q|k|qk|query|key)_?((layer|rms|img)_?)?norm\d*(_t|_und_for_gen)?(\.norms\.\d+)?$"
    r"|(^|\.)norm\d*_?((added|ip)_)?(q|k|query|key)$"
    r"|(^|\.)\w*att\w*\.((q|k)_ln|ln_(q|k))$",
    re.IGNORECASE,
)


def placements(calls: Sequence[TracedCall], traced: TracedPass) -> dict[str, str | None]:
    """Identify the placement of each site by its path, from the order of its first call and the additions.

    It is ``pre-norm``, ``post-norm``, ``qk``, ``final`` or None, beside the residual stream. Sites whose paths differ
    only in the numbers of their blocks share a placement: nothing is added after the last block of a post-norm network.
    """
    last_added: dict[tuple[int, int] | None, float] = {}
    for number, (operands, in_place) in enumerate(traced.additions):
        for operand in filter(_identity, operands):
            # What was added to in place is, from then on, the sum; only what comes later takes it as it is now.
            overwritten = in_place and operand is operands[0]
            before = last_added.get(_identity(operand), -1)
            last_added[_identity(operand)] = max(before, number if overwritten else math.inf)
    attended = set(map(_identity, traced.queries_and_keys)) - {None}

    def placement_of(call: TracedCall) -> str | None:
        if QUERY_OR_KEY.search(call.name):
            return "qk"
        for tensor, placement in ((call.input, "pre-norm"), (call.output, "post-norm")):
            if last_added.get(_identity(tensor), -1) >= call.additions_before:
                return placement
        return "qk" if _identity(call.output) in attended else None

    by_call = {call.name: placement_of(call) for call in calls}
    by_kind = {kind_of_site(name): placement for name, placement in reversed(by_call.items()) if placement}
    by_name = {name: placement or by_kind.get(kind_of_site(name)) for name, placement in by_call.items()}
    repeated = Counter(map(kind_of_site, by_name))
    if any(by_name.values()):
        for name in reversed(by_name):
            if by_name[name] or repeated[kind_of_site(name)] > 1:
                break
            by_name[name] = "final"
    return by_name


def _identity(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address and size of a tensor or shard; None for one that torch.vmap made, which has no address."""
    try:
        local: Any = tensor
        local = local.to_local() if is_sharded(tensor) else tensor
        return local.data_ptr(), local.numel()
    except RuntimeError:
        return None
