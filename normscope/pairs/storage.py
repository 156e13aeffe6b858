"""Captures as files: safetensors with a JSON header, described in docs/file-formats.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from normscope.errors import DataError
from normscope.files import whole_file
from normscope.pairs.binning import MOMENTS, PAIR_GRID
from normscope.pairs.captures import Capture
from normscope.pairs.folds import FOLDS, SourcesSeen
from normscope.pairs.formulas import FORMS, form_name
from normscope.pairs.sampling import LARGEST_TOKENS, UNIFORM_TOKENS, PairSample, TokenSample
from normscope.pairs.sites import NormSite, SkippedNorm
from normscope.pairs.stats import PairStats

FORMAT = "normscope-capture"
FORMAT_VERSION = 3
_HEADER = "normscope"
_DENSE = ("channel_sums", "channel_extremes", "token_offsets", "token_scales", "nonfinite_tokens")
_COUNTS = ("density", "token_offsets", "token_scales", "nonfinite_tokens")
_MOST = 2**53  # pairs that float64 counts one by one
_LARGEST_SQUARE = torch.finfo(torch.float32).max ** 2


def _is_int(value: Any) -> bool:
    return type(value) is int  # a bool is an int to isinstance


def _is_count(value: Any) -> bool:
    return _is_int(value) and 0 <= value < 2**63


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_shape(value: Any) -> bool:
    positive = isinstance(value, tuple) and value != () and all(_is_count(size) and size > 0 for size in value)
    return positive and math.prod(value) < 2**63


_SITE_FIELDS: dict[str, Callable[[Any], bool]] = {
    "index": _is_count,
    "name": _is_text,
    "kind": _is_text,
    "normalized_shape": _is_shape,
    "channel_axis": lambda value: all(map(_is_int, value if isinstance(value, tuple) else (value,))),
    "channels": lambda value: _is_count(value) and value > 0,
    "eps": lambda value: isinstance(value, float) and math.isfinite(value),
    "affine": _is_bool,
    "placement": lambda value: value in (None, "pre-norm", "post-norm", "qk", "final"),
    "calls": _is_count,
    "tokens_per_sample": _is_count,
    "centred": _is_bool,
    "bounded": _is_bool,
    "grouped": _is_bool,
    "form": lambda value: value is None or value in [form_name(form) for form in FORMS.values()],
}


def save(capture: Capture, path: str | Path) -> Path:
    """Write a capture as one safetensors file, whole or not at all.

    Bins and cells that no pair fell into take no place in it.

    Raises:
        UsageError: if it cannot be written there.
    """
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "seed": capture.seed,
        "versions": dict(capture.versions),
        "skipped": [asdict(norm) for norm in capture.skipped],
        **_described(capture),
        "parts": [{"name": name, **_described(part)} for name, part in capture.parts.items()],
    }
    tensors = _tensors(capture, "")
    for number, part in enumerate(capture.parts.values()):
        # Copied: the only part is the whole, and safetensors refuses tensors that share memory.
        tensors |= {name: tensor.clone() for name, tensor in _tensors(part, f"{number}/").items()}
    with whole_file(Path(path)) as partial:
        save_file(tensors, partial, metadata={_HEADER: json.dumps(header)})
    return Path(path)


def _described(capture: Capture) -> dict[str, Any]:
    """Return what differs between a capture and its parts."""
    sites = [asdict(site) | {"sources": asdict(capture.stats[site.name].sources)} for site in capture.sites]
    return {"about": dict(capture.about), "n_samples": capture.n_samples, "sites": sites}


def _tensors(capture: Capture, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}{site.index}.{name}": tensor.contiguous()
        for site in capture.sites
        for name, tensor in _packed(capture.stats[site.name]).items()
    }


def load(path: str | Path) -> Capture:
    """Read a capture that :func:`save` wrote.

    Raises:
        DataError: if the file is missing, damaged, of another kind or of a newer format version.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise DataError(f"Cannot read the capture {path}: {error}.") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{path} is a safetensors file, but no capture; `normscope capture MODEL -o FILE` writes one.")
    if header.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{path} has capture format version {header.get('version')!r}; this normscope reads version "
            f"{FORMAT_VERSION}. Capture it again, or use the normscope that wrote it."
        )
    try:
        return _capture(header, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise DataError(f"The capture {path} is damaged: {type(error).__name__}: {error}.") from error


def _capture(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Capture:
    json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogateescape")  # fails on what no path or name holds
    parts = {}
    for number, entry in enumerate(header["parts"]):
        if not _is_text(entry["name"]) or not entry["name"] or entry["name"] in parts:
            raise ValueError(f"the name of a part is {entry['name']!r}")
        own = {key: entry[key] for key in ("about", "n_samples", "sites")}
        parts[entry["name"]] = _whole({**header, **own}, tensors, f"{number}/")
    whole = _whole(header, tensors, "")
    known = {site.name for site in whole.sites}
    if any(site.name not in known for part in parts.values() for site in part.sites):
        raise ValueError("a part has norm sites that the whole has not")
    return replace(whole, parts=parts)


def _whole(header: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Capture:
    if not _is_count(header["n_samples"]) or not _is_int(header["seed"]):
        raise ValueError("its number of samples or its seed is none")
    sites, stats = [], {}
    for entry in header["sites"]:
        site = _site(entry)
        start = f"{prefix}{site.index}."
        own = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        stats[site.name] = _unpacked(site, _sources(entry["sources"]), header["seed"], own)
        sites.append(site)
    if not sites or not len(sites) == len(stats) == len({site.index for site in sites}):
        raise ValueError("it names no norm site, or one twice")
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


def _site(entry: Mapping[str, Any]) -> NormSite:
    values = {name: _tuples(entry[name]) for name in _SITE_FIELDS}
    for name, holds in _SITE_FIELDS.items():
        if not holds(values[name]):
            raise ValueError(f"the {name} of a norm site is {values[name]!r}")
    site = NormSite(**values)
    if not site.grouped and site.d != site.channels:
        raise ValueError(f"the tokens of {site.name} have {site.d} elements, but {site.channels} channels")
    return site


def _sources(entry: Mapping[str, Any]) -> SourcesSeen:
    sources = SourcesSeen(**entry)
    for field in fields(sources):
        value = getattr(sources, field.name)
        if type(value) is not type(field.default):
            raise ValueError(f"the {field.name} of the sources is {value!r}")
    if sources.number not in ("none", "one", "several"):
        raise ValueError(f"the number of the sources is {sources.number!r}")
    return sources


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _packed(stats: PairStats) -> dict[str, Tensor]:
    bins = stats.moments[:, 0].sum(0).nonzero().squeeze(1)
    cells = stats.density.flatten().nonzero().squeeze(1)
    places = stats.pairs.filled.flatten().nonzero().squeeze(1)
    packed = {name: getattr(stats, name) for name in _DENSE}
    packed |= {"moments": stats.moments[:, :, bins], "moments.bins": bins.int()}
    if stats.gamma_moments is not None:
        packed["gamma_moments"] = stats.gamma_moments[:, :, bins]
    if stats.channel_moments is not None:
        own = stats.channel_moments[0].flatten().nonzero().squeeze(1)
        packed["channel_moments"] = stats.channel_moments.flatten(1)[:, own]
        packed["channel_moments.cells"] = own.int()
    packed |= {"density": stats.density.flatten()[cells], "density.cells": cells.int()}
    packed |= {f"pairs.{f.name}": getattr(stats.pairs, f.name).flatten()[places] for f in fields(PairSample)}
    packed["pairs.places"] = places.int()
    for name in ("tokens", "largest"):
        packed |= {f"{name}.{f.name}": getattr(getattr(stats, name), f.name) for f in fields(TokenSample)}
    return packed


def _unpacked(site: NormSite, sources: SourcesSeen, seed: int, tensors: Mapping[str, Tensor]) -> PairStats:
    sums = tensors["channel_sums"].shape
    if sums != (2, site.channels):  # before anything of a size that only the header names is made
        raise ValueError(f"channel_sums is {tuple(sums)}, not (2, {site.channels})")
    stats = PairStats.empty(
        site.channels,
        seed,
        grouped=site.grouped,
        by_gamma="gamma_moments" in tensors,
        per_channel="channel_moments" in tensors,
    )
    for name in _DENSE:
        getattr(stats, name).copy_(_like(getattr(stats, name), tensors[name], name))
    bins = _within(tensors["moments.bins"].long(), PAIR_GRID.size)
    kept = torch.empty(FOLDS, len(MOMENTS), len(bins), dtype=torch.float64)
    stats.moments[:, :, bins] = _like(kept, tensors["moments"], "moments")
    if stats.gamma_moments is not None:
        stats.gamma_moments[:, :, bins] = _like(kept, tensors["gamma_moments"], "gamma_moments")
    if stats.channel_moments is not None:
        own = _within(tensors["channel_moments.cells"].long(), stats.channel_moments[0].numel())
        kept = torch.empty(len(MOMENTS), len(own), dtype=torch.float64)
        stats.channel_moments.flatten(1)[:, own] = _like(kept, tensors["channel_moments"], "channel_moments")
    cells = _within(tensors["density.cells"].long(), stats.density.numel())
    stats.density.view(-1)[cells] = _like(torch.empty(len(cells), dtype=torch.int64), tensors["density"], "density")
    places = _within(tensors["pairs.places"].long(), stats.pairs.key.numel())
    for field in fields(PairSample):
        whole = getattr(stats.pairs, field.name).view(-1)
        name = f"pairs.{field.name}"
        whole[places] = _like(whole.new_empty(len(places)), tensors[name], name)
    for name, capacity in (("tokens", UNIFORM_TOKENS), ("largest", LARGEST_TOKENS)):
        width = stats.tokens.x.shape[1]
        setattr(stats, name, _token_sample(width, capacity, name, tensors))
    stats.sources = sources
    _check(stats)
    return stats


def _check(stats: PairStats) -> None:
    """Raise ValueError where there is something that no finite pairs leave, and that a fit or a figure trips over."""
    n = stats.moments[:, :1]
    if not bool((n.ge(0) & n.eq(n.floor())).all()) or not float(n.sum()) <= _MOST:
        raise ValueError("its counts of pairs are no counts")
    if not bool((stats.moments.abs() <= n * _LARGEST_SQUARE).all()):
        raise ValueError("its sums are not finite, or larger than those of so many pairs")
    for name in _COUNTS:
        if bool((getattr(stats, name) < 0).any()):
            raise ValueError(f"{name} holds negative counts")
    if not bool((stats.pairs.channel.ge(0) & stats.pairs.channel.lt(stats.channels)).all()):
        raise ValueError("its pairs name channels that do not exist")
    if any(bool((own.position < 0).any()) for own in (stats.tokens, stats.largest)):
        raise ValueError("its tokens name places that do not exist")
    drawn = {name: getattr(stats, name) for name in _DENSE}
    for name in ("pairs", "tokens", "largest"):
        sample = getattr(stats, name)
        drawn |= {f"{name}.{f.name}": getattr(sample, f.name) for f in fields(sample)}
    if not stats.n_pairs:
        del drawn["channel_extremes"]  # ±∞ until the first token comes
    for name, values in drawn.items():
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
