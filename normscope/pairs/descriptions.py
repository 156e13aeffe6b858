"""Captures in words: what their files say of them and of their norm sites, as JSON and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor

from normscope.pairs.binning import CHANNEL_GRID, DENSITY_X_GRID, DENSITY_Y_GRID, PAIR_GRID, TOKEN_GRID, FloatGrid
from normscope.pairs.captures import Capture
from normscope.pairs.folds import SourcesSeen
from normscope.pairs.formulas import FORMS, form_name
from normscope.pairs.packing import packed, unpacked
from normscope.pairs.sites import NormSite
from normscope.pairs.stats import PairStats

_GRIDS = {
    "pairs": PAIR_GRID,
    "density_x": DENSITY_X_GRID,
    "density_y": DENSITY_Y_GRID,
    "tokens": TOKEN_GRID,
    "channels": CHANNEL_GRID,
}


def is_int(value: Any) -> bool:
    return type(value) is int  # a bool is an int to isinstance


def is_count(value: Any) -> bool:
    return is_int(value) and 0 <= value < 2**63


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_shape(value: Any) -> bool:
    positive = isinstance(value, tuple) and value != () and all(is_count(size) and size > 0 for size in value)
    return positive and math.prod(value) < 2**63


_SITE_FIELDS: dict[str, Callable[[Any], bool]] = {
    "index": is_count,
    "name": is_text,
    "kind": is_text,
    "normalized_shape": _is_shape,
    "channel_axis": lambda value: all(map(is_int, value if isinstance(value, tuple) else (value,))),
    "channels": lambda value: is_count(value) and value > 0,
    "eps": lambda value: isinstance(value, float) and math.isfinite(value),
    "affine": _is_bool,
    "placement": lambda value: value in (None, "pre-norm", "post-norm", "qk", "final"),
    "calls": is_count,
    "tokens_per_sample": is_count,
    "centred": _is_bool,
    "bounded": _is_bool,
    "grouped": _is_bool,
    "form": lambda value: value is None or value in [form_name(form) for form in FORMS.values()],
}


def described(capture: Capture) -> dict[str, Any]:
    """Return what differs between a capture and its parts, as JSON takes it: about, number of samples, sites."""
    sites = [asdict(site) | {"sources": asdict(capture.stats[site.name].sources)} for site in capture.sites]
    return {"about": dict(capture.about), "n_samples": capture.n_samples, "sites": sites}


def tensors_of(capture: Capture, prefix: str = "") -> dict[str, Tensor]:
    """Return the sums of every site, without those of the parts: contiguous tensors named ``prefix + INDEX.NAME``."""
    return {
        f"{prefix}{site.index}.{name}": tensor.contiguous()
        for site in capture.sites
        for name, tensor in packed(capture.stats[site.name]).items()
    }


def sites_and_stats(
    entries: Sequence[Mapping[str, Any]], seed: int, tensors: Mapping[str, Tensor], prefix: str = ""
) -> tuple[list[NormSite], dict[str, PairStats]]:
    """Make again what :func:`described` gave as ``sites`` and :func:`tensors_of` as tensors.

    Args:
        entries: the ``sites``.
        seed: of the drawing samples.
        tensors: by name; those without the prefix are left alone.
        prefix: that the tensors were named with.

    Raises:
        ValueError: if a value is none that a capture can have. What else damaged entries raise, KeyError, TypeError,
            AttributeError, RuntimeError and OverflowError among it, is in :data:`DAMAGES`.
    """
    sites, stats = [], {}
    for entry in entries:
        site = _site(entry)
        start = f"{prefix}{site.index}."
        own = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        stats[site.name] = unpacked(site.channels, _sources(entry["sources"]), seed, own, grouped=site.grouped)
        sites.append(site)
    if not sites or not len(sites) == len(stats) == len({site.index for site in sites}):
        raise ValueError("it names no norm site, or one twice")
    return sites, stats


DAMAGES = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def grids() -> dict[str, list[int]]:
    """Return the grids that sums are taken on: mantissa bits, low and high exponent of each."""
    return {name: _numbers(grid) for name, grid in _GRIDS.items()}


def other_grid(found: Mapping[str, Any]) -> str | None:
    """Say which of the grids in a file is another than this normscope's; None where all are the same."""
    for name, grid in _GRIDS.items():
        if found.get(name) != _numbers(grid):
            return f"{name} {found.get(name)!r}, where this normscope has {_numbers(grid)!r}"
    return None


def _numbers(grid: FloatGrid) -> list[int]:
    return [grid.mantissa_bits, grid.low, grid.high]


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
