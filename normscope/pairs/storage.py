"""Captures as files: safetensors with a JSON header, described in docs/file-formats.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from torch import Tensor

from normscope.errors import DataError, UsageError
from normscope.norms.sites import NormSite, SkippedNorm
from normscope.pairs.captures import Capture, shared_input, sums_of
from normscope.pairs.kept_inputs import pack_inputs, unpack_inputs
from normscope.pairs.sums.binning import CHANNEL_GRID, DENSITY_X_GRID, DENSITY_Y_GRID, PAIR_GRID, TOKEN_GRID
from normscope.pairs.sums.sampling import LARGEST_TOKENS, NO_KEY, UNIFORM_TOKENS, SourcesSeen, TokenSample
from normscope.pairs.sums.stats import IN_FOLDS, PairStats
from normscope.runtime.checked_files import HEADER, read_checked, refusing_damage, write_checked
from normscope.runtime.records import converted

FORMAT = "normscope-capture"
FORMAT_VERSION = 9
_OTHER_SUFFIXES = (
    *(".csv", ".json", ".md", ".tex", ".html", ".png", ".pdf", ".svg"),
    *(".pt", ".pth", ".ckpt", ".bin", ".npy", ".npz", ".pkl"),
)
_AGAIN = "`normscope capture MODEL -o FILE` writes one"
_GRIDS = {
    "pairs": list(astuple(PAIR_GRID)),
    "density_x": list(astuple(DENSITY_X_GRID)),
    "density_y": list(astuple(DENSITY_Y_GRID)),
    "tokens": list(astuple(TOKEN_GRID)),
    "channels": list(astuple(CHANNEL_GRID)),
}
_DENSE = ("channel_sums", "channel_extremes", "token_offsets", "token_scales", "nonfinite_tokens")
_SAMPLES = {"tokens": UNIFORM_TOKENS, "largest": LARGEST_TOKENS}


def pack_sums(stats: PairStats) -> dict[str, Tensor]:
    """Return the tensors of one site by their names in docs/file-formats.md, without empty bins and cells."""
    stats = stats.to("cpu")
    tensors = {name: getattr(stats, name) for name in _DENSE}
    for numbers, sparse in _sparse(stats).items():
        filled = sparse["pairs.key"] != NO_KEY if "pairs.key" in sparse else next(iter(sparse.values())) != 0
        cells = (filled if filled.ndim == 1 else filled[0]).nonzero().squeeze(1)  # [0]: those with a count
        tensors |= {name: values[..., cells] for name, values in sparse.items()}
        tensors[numbers] = cells.int()
    for name in _SAMPLES:
        tensors |= {f"{name}.{f.name}": getattr(getattr(stats, name), f.name) for f in fields(TokenSample)}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _sparse(stats: PairStats) -> dict[str, dict[str, Tensor]]:
    """Return views of the sums that are stored without empty cells, by the tensor that numbers their cells.

    They are ``(cells,)`` or ``(6, cells)``.
    """
    moments = {name: sums for name in IN_FOLDS if (sums := getattr(stats, name)) is not None}
    sparse = {
        "moments.cells": {name: sums.movedim(1, 0).flatten(1) for name, sums in moments.items()},
        "density.cells": {"density": stats.density.flatten()},
        "pairs.places": {f"pairs.{name}": values.flatten() for name, values in vars(stats.pairs).items()},
        "position_sums.cells": {"position_sums": stats.position_sums},
        "first_moments.cells": {"first_moments": stats.first_moments.mT},
    }
    if stats.channel_moments is not None:
        sparse["channel_moments.cells"] = {"channel_moments": stats.channel_moments.flatten(1)}
    return sparse


def unpack_sums(site: NormSite, sources: SourcesSeen, seed: int, tensors: Mapping[str, Tensor]) -> PairStats:
    """Rebuild the sums of :func:`pack_sums`.

    Raises:
        ValueError: if a tensor has another shape or dtype than the sums of the site; KeyError if one is missing.
    """
    if tensors["channel_sums"].shape != (2, site.channels):  # before anything of the size in the header is allocated
        raise ValueError(f"channel_sums is {tuple(tensors['channel_sums'].shape)}, not (2, {site.channels})")
    stats = PairStats.empty(
        site.channels,
        seed,
        grouped=site.grouped,
        by_gamma="gamma_moments" in tensors,
        per_channel="channel_moments" in tensors,
        diagonal="diagonal_moments" in tensors,
    )
    stats.sources = sources

    def stored(name: str, like: Tensor) -> Tensor:
        tensor = tensors[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {like.dtype} {tuple(like.shape)}")
        return tensor

    for name in _DENSE:
        getattr(stats, name).copy_(stored(name, getattr(stats, name)))
    for sample, capacity in _SAMPLES.items():
        number, empty = min(len(tensors[f"{sample}.key"]), capacity), vars(getattr(stats, sample))
        like = {name: values.new_empty(number, *values.shape[1:]) for name, values in empty.items()}
        setattr(stats, sample, TokenSample(**{name: stored(f"{sample}.{name}", like[name]) for name in like}))
    for numbers, sparse in _sparse(stats).items():
        cells = tensors[numbers].long()
        for name, values in sparse.items():
            values[..., cells] = stored(name, values[..., cells])
    return stats


@dataclass(frozen=True)
class _Part:
    """Part of a capture in the header of a file; the whole has no name."""

    about: dict[str, Any]
    n_samples: int
    sites: list[dict[str, Any]]
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class _Header(_Part):
    seed: int
    versions: dict[str, str]
    grids: dict[str, Any]
    skipped: list[SkippedNorm]
    parts: list[_Part]
    skip: int
    inputs: list[Any] = field(default_factory=list)


def pack(capture: Capture) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a capture, whole or under way, as JSON and tensors, named as in docs/file-formats.md."""
    inputs, tensors = pack_inputs(capture.inputs, capture.sites)
    parts = {f"{number}/": part for number, part in enumerate(capture.parts.values())}
    for prefix, stored in {"": capture, **parts}.items():
        for site in _summed(stored):
            sums = pack_sums(stored.stats[site.name])
            tensors |= {f"{prefix}{site.index}.{name}": tensor for name, tensor in sums.items()}
    header = {
        "seed": capture.seed,
        "skip": capture.skip,
        "versions": dict(capture.versions),
        "grids": _GRIDS,
        "skipped": [norm.as_dict() for norm in capture.skipped],
        **_described(capture),
        "parts": [{"name": name, **_described(part)} for name, part in capture.parts.items()],
        **({"inputs": inputs} if inputs else {}),
    }
    return header, tensors


def _described(capture: Capture) -> dict[str, Any]:
    about = {key: str(value) for key, value in capture.about.items()}
    sites = [asdict(site) | {"sources": asdict(capture.stats[site.name].sources)} for site in _summed(capture)]
    return {"about": about, "n_samples": capture.n_samples, "sites": sites}


def _summed(capture: Capture) -> list[NormSite]:
    """Sites that have sums, as not all of a capture under way do."""
    return [site for site in capture.sites if site.name in capture.stats]


def unpack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Capture:
    """Rebuild the capture of :func:`pack`.

    Raises:
        ValueError: if it was summed on another grid; of malformed headers and tensors also other errors, see
            :func:`normscope.runtime.checked_files.refusing_damage`.
    """
    stored = converted(_Header, header, "capture")
    for name, grid in _GRIDS.items():
        if stored.grids.get(name) != grid:
            raise ValueError(f"it was summed on another grid: {name} {stored.grids.get(name)!r}, not {grid!r}")
    by_site: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        site, _, name = full_name.partition(".")
        by_site.setdefault(site, {})[name] = tensor
    parts: dict[str, Capture] = {}

    def capture_of(part: _Part, prefix: str | None) -> Capture:
        sites = [converted(NormSite, entry, "norm site") for entry in part.sites]
        if prefix is None:
            stats = sums_of(sites, [part.stats for part in parts.values()])
        else:
            sources = [converted(SourcesSeen, entry["sources"], "sources of a site") for entry in part.sites]
            stats = {
                site.name: unpack_sums(site, seen, stored.seed, by_site[f"{prefix}{site.index}"])
                for site, seen in zip(sites, sources, strict=True)
            }
        about = {key: str(value) for key, value in part.about.items()}
        common = (stored.seed, stored.versions)
        return Capture(about, sites, stored.skipped, stats, part.n_samples, *common, skip=stored.skip)

    for number, entry in enumerate(stored.parts):
        parts[entry.name] = capture_of(entry, f"{number}/")
    whole = capture_of(stored, "" if any("/" not in name for name in tensors) else None)
    sites = {site.index: site for part in (*parts.values(), whole) for site in part.sites}
    inputs = unpack_inputs(stored.inputs, list(sites.values()), tensors)
    for name, part in parts.items():
        part.inputs = [kept for kept in inputs if kept.part == name]
    return replace(whole, parts=parts, inputs=inputs)


def save_capture(capture: Capture, path: str | Path) -> Path:
    """Write a capture as one safetensors file, whole or not at all.

    Bins and cells without pairs take no space in it.

    Raises:
        UsageError: if it cannot be written there, or the path ends in the suffix of another format.
    """
    check_suffix(path)
    header, tensors = pack(capture)
    write_checked(Path(path), {"format": FORMAT, "version": FORMAT_VERSION, **header}, tensors)
    return Path(path)


def check_suffix(path: str | Path) -> None:
    """Raise UsageError if a path has the suffix of another format."""
    if (suffix := Path(path).suffix).lower() in _OTHER_SUFFIXES:
        raise UsageError(f"{path} ends in {suffix}, but a capture's file ends in .safetensors.")


def is_capture(path: str | Path) -> bool:
    """Return True if a file has the header of a capture, of any version; its content is not read."""
    try:
        with safe_open(path, framework="pt") as file:
            return bool(json.loads(file.metadata()[HEADER])["format"] == FORMAT)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return False


def load_capture(path: str | Path) -> Capture:
    """Read a capture that :func:`save_capture` wrote.

    Raises:
        DataError: if the file is missing, damaged, of another kind, of another format version or of other grids.
    """
    path = Path(path)
    header, tensors = read_checked(path, FORMAT, FORMAT_VERSION, _AGAIN)
    with refusing_damage(path, FORMAT, _AGAIN):
        return unpack(header, tensors)


Source: TypeAlias = Capture | str | Path


def merge_captures(captures: Sequence[Source]) -> Capture:
    """Return the capture of all inputs of several runs; in any order the same, up to float64's rounding of sums.

    Files are read one after the other: no more than two of them are in memory at once, however many there are.

    Args:
        captures: two or more, or the files that contain them.

    Raises:
        DataError: if a file is no capture, if they are not of the same model, weights, sites, seed and kind of sums,
            or if an input is in two of them.
        UsageError: if there are fewer than two.
    """
    if len(captures) < 2:
        list(map(_loaded, captures))  # whose own error is the first to mend
        raise UsageError(f"Merging takes two captures or more; there {'is one' if captures else 'is none'}.")
    merged = _loaded(captures[0])
    for number in range(1, len(captures)):
        latest = _loaded(captures[number])
        try:
            merged = merged.merge(latest)
        except DataError as error:
            first = next((i for i in range(number) if shared_input(_loaded(captures[i]), latest)), 0)
            names = [f"capture {i + 1}" if isinstance(captures[i], Capture) else captures[i] for i in (first, number)]
            reason = str(error).removeprefix("Cannot merge ").removeprefix("two captures: ")
            raise DataError(f"Cannot merge {names[0]} and {names[1]}: {reason}") from None
    return merged


def _loaded(source: Source) -> Capture:
    return source if isinstance(source, Capture) else load_capture(source)
