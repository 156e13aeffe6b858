"""Captures as files: safetensors with a JSON header, described in docs/file-formats.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from normscope.errors import DataError
from normscope.pairs.captures import Capture
from normscope.pairs.checked_files import read_checked, write_checked
from normscope.pairs.descriptions import (
    DAMAGES,
    described,
    grids,
    is_count,
    is_int,
    is_text,
    other_grid,
    sites_and_stats,
    tensors_of,
)
from normscope.pairs.sites import SkippedNorm

FORMAT = "normscope-capture"
FORMAT_VERSION = 4
_AGAIN = "`normscope capture MODEL -o FILE` writes one"


def save(capture: Capture, path: str | Path) -> Path:
    """Write a capture as one safetensors file, whole or not at all.

    Bins and cells that no pair fell into take no place in it.

    Raises:
        UsageError: if it cannot be written there.
    """
    write_checked(Path(path), {"format": FORMAT, "version": FORMAT_VERSION, **header_of(capture)}, all_tensors(capture))
    return Path(path)


def header_of(capture: Capture) -> dict[str, Any]:
    """Return what a file says of a capture and its parts, as JSON takes it."""
    return {
        "seed": capture.seed,
        "versions": dict(capture.versions),
        "grids": grids(),
        "skipped": [asdict(norm) for norm in capture.skipped],
        **described(capture),
        "parts": [{"name": name, **described(part)} for name, part in capture.parts.items()],
    }


def all_tensors(capture: Capture) -> dict[str, Tensor]:
    """Return the sums of a capture and its parts by their names in a file, no two in the same memory."""
    tensors = tensors_of(capture)
    for number, part in enumerate(capture.parts.values()):
        # Copied: the only part is the whole, and safetensors refuses tensors that share memory.
        tensors |= {name: tensor.clone() for name, tensor in tensors_of(part, f"{number}/").items()}
    return tensors


def load(path: str | Path) -> Capture:
    """Read a capture that :func:`save` wrote.

    Raises:
        DataError: if the file is missing, damaged, of another kind, of another format version or of other grids.
    """
    path = Path(path)
    return capture_from(*read_checked(path, FORMAT, FORMAT_VERSION, _AGAIN), path)


def capture_from(header: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Capture:
    """Make a capture again of what :func:`header_of` and :func:`all_tensors` gave; DataError, naming ``path``."""
    try:
        if other := other_grid(header["grids"]):
            raise DataError(
                f"The capture {path} was summed on another grid: {other}. Capture it again, or use the normscope that "
                "wrote it."
            )
        return _capture(header, tensors)
    except DAMAGES as error:
        raise DataError(f"The capture {path} is damaged: {type(error).__name__}: {error}.") from error


def _capture(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Capture:
    json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogateescape")  # fails on what no path or name holds
    parts = {}
    for number, entry in enumerate(header["parts"]):
        if not is_text(entry["name"]) or not entry["name"] or entry["name"] in parts:
            raise ValueError(f"the name of a part is {entry['name']!r}")
        own = {key: entry[key] for key in ("about", "n_samples", "sites")}
        parts[entry["name"]] = _whole({**header, **own}, tensors, f"{number}/")
    whole = _whole(header, tensors, "")
    names = {site.name for site in whole.sites}
    if any({site.name for site in part.sites} - names for part in parts.values()):
        raise ValueError("a part has norm sites that the whole has not")
    return replace(whole, parts=parts)


def _whole(header: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Capture:
    if not is_count(header["n_samples"]) or not is_int(header["seed"]):
        raise ValueError("its number of samples or its seed is none")
    sites, stats = sites_and_stats(header["sites"], header["seed"], tensors, prefix)
    about = {key: str(header["about"][key]) for key in ("model", "weights", "data")}
    return Capture(
        about={**{key: str(value) for key, value in header["about"].items()}, **about},
        sites=sites,
        skipped=[SkippedNorm(**{f.name: str(e[f.name]) for f in fields(SkippedNorm)}) for e in header["skipped"]],
        stats=stats,
        n_samples=header["n_samples"],
        seed=header["seed"],
        versions={str(key): str(value) for key, value in header["versions"].items()},
    )
