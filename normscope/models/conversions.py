"""Weights that were converted: from which dtypes to which, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from normscope.models.base import Provenance

_NAMED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dtypes_by_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, torch.dtype]:
    """Return the dtype of each floating-point tensor."""
    return {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}


def dtypes_of_files(paths: Iterable[Path]) -> dict[str, torch.dtype]:
    """Return the dtype of each floating-point tensor of safetensors files, by its name there; no values are read."""
    dtypes: dict[str, torch.dtype] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            own = {name: _NAMED.get(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
        dtypes |= {name: dtype for name, dtype in own.items() if dtype is not None}
    return dtypes


def converted(
    provenance: Provenance, before: Mapping[str, torch.dtype], after: Mapping[str, torch.dtype]
) -> Provenance:
    """Say in a provenance from which dtypes to which weights were converted; as it was where none of them were.

    Args:
        provenance: of the weights.
        before: dtypes by name; those that ``after`` does not have are left out.
        after: likewise.

    >>> before = {"0.weight": torch.bfloat16, "1.weight": torch.float32}
    >>> converted(Provenance.random(0), before, dict.fromkeys(before, torch.float32)).description
    'random weights, seed 0, converted from bfloat16 to float32'
    """
    changed = [name for name in before if name in after and before[name] != after[name]]
    if not changed:
        return provenance
    old, new = ([str(dtypes[name]).removeprefix("torch.") for name in changed] for dtypes in (before, after))
    said = f"converted from {_listed(old)} to {_listed(new)}"
    return replace(provenance, description=f"{provenance.description}, {said}")


def _listed(names: Iterable[str]) -> str:
    return " and ".join(sorted(set(names)))
