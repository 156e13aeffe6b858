"""Captures as files: safetensors with a JSON header, described in docs/file-formats.md. Raw pairs as files."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normscope.errors import DataError, UsageError
from normscope.inputs.chunks import Done, LeftOut
from normscope.pairs import kept_inputs
from normscope.pairs.captures import Capture, shared_input, sums_of
from normscope.pairs.norms.formulas import FORMS
from normscope.pairs.norms.sites import PLACEMENTS, NormSite, SkippedNorm
from normscope.pairs.recorder import Recorder, Seen
from normscope.pairs.sums.binned import OPTIONAL_MOMENTS, PAIR_FIELDS
from normscope.pairs.sums.binning import (
    CHANNEL_GRID,
    DENSITY_X_GRID,
    DENSITY_Y_GRID,
    MOMENTS,
    PAIR_GRID,
    TOKEN_GRID,
    FloatGrid,
)
from normscope.pairs.sums.sampling import (
    FOLDS,
    LARGEST_TOKENS,
    NO_KEY,
    PAIRS_PER_BIN,
    UNIFORM_TOKENS,
    Assignment,
    SourcesSeen,
    TokenSample,
)
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.files import file_stem, umask, write_tensors
from normscope.runtime.records import checked, converted, is_shape
from normscope.runtime.sealed_files import HEADER, digest, read_checked, write_checked

_DENSE = ("channel_sums", "channel_extremes", "token_offsets", "token_scales", "nonfinite_tokens")
_COUNTS = ("density", "token_offsets", "token_scales", "nonfinite_tokens")
_FINITE = ("channel_sums", "channel_extremes", "diagonal_moments", "pairs.", "tokens.", "largest.")
_MOST = 2**53  # pairs that float64 counts one by one
_LARGEST_SQUARE = torch.finfo(torch.float32).max ** 2


def packed(stats: PairStats) -> dict[str, Tensor]:
    """Return the tensors of one site by their names in docs/file-formats.md; bins and cells of no pair are left out."""
    packed = {name: getattr(stats, name) for name in _DENSE}
    rows = _rows(stats.moments)
    cells = rows[:, 0].nonzero().squeeze(1)
    packed |= {"moments": rows[cells].T, "moments.cells": cells.int()}
    packed |= {name: _rows(stats.bins[name])[cells].T for name in OPTIONAL_MOMENTS if name in stats.bins}
    if stats.channel_moments is not None:
        cells = stats.channel_moments[0].flatten().nonzero().squeeze(1)
        packed["channel_moments"] = stats.channel_moments.flatten(1)[:, cells]
        packed["channel_moments.cells"] = cells.int()
    density, pairs = stats.density.flatten(), stats.pairs
    cells = density.nonzero().squeeze(1)
    packed |= {"density": density[cells], "density.cells": cells.int()}
    places = pairs.filled.flatten().nonzero().squeeze(1)
    packed |= {f"pairs.{name}": values.flatten()[places] for name, values in vars(pairs).items()}
    packed["pairs.places"] = places.int()
    for name in ("tokens", "largest"):
        packed |= {f"{name}.{f.name}": getattr(getattr(stats, name), f.name) for f in fields(TokenSample)}
    return packed


def unpacked(
    channels: int, sources: SourcesSeen, seed: int, tensors: Mapping[str, Tensor], *, grouped: bool
) -> PairStats:
    """Rebuild the sums that :func:`packed` took apart.

    Raises:
        ValueError: if a tensor is none that finite pairs leave; KeyError if one is missing.
    """
    sums = tensors["channel_sums"].shape
    if sums != (2, channels):  # before anything of a size that only the header names is made
        raise ValueError(f"channel_sums is {tuple(sums)}, not (2, {channels})")
    stats = PairStats.empty(
        channels,
        seed,
        grouped=grouped,
        by_gamma="gamma_moments" in tensors,
        per_channel="channel_moments" in tensors,
        diagonal="diagonal_moments" in tensors,
    )
    for name in _DENSE:
        getattr(stats, name).copy_(_like(getattr(stats, name), tensors[name], name))
    cells, shape = _cells(tensors)
    binned: dict[str, Tensor] = {}
    for name in ("moments", *OPTIONAL_MOMENTS):
        if name in stats.bins:
            rows = torch.zeros(FOLDS * PAIR_GRID.size, len(MOMENTS), dtype=torch.float64)
            rows[cells] = _rows(_like(torch.empty(shape, dtype=torch.float64), tensors[name], name))
            binned[name] = rows.view(FOLDS, -1, len(MOMENTS)).mT
    if stats.channel_moments is not None:
        cells = _within(tensors["channel_moments.cells"].long(), stats.channel_moments[0].numel())
        kept = torch.empty(len(MOMENTS), len(cells), dtype=torch.float64)
        stats.channel_moments.flatten(1)[:, cells] = _like(kept, tensors["channel_moments"], "channel_moments")
    density = torch.zeros(DENSITY_X_GRID.size, DENSITY_Y_GRID.size, dtype=torch.int64)
    cells = _within(tensors["density.cells"].long(), density.numel())
    density.view(-1)[cells] = _like(density.new_empty(len(cells)), tensors["density"], "density")
    places = _within(tensors["pairs.places"].long(), PAIRS_PER_BIN * PAIR_GRID.size)
    for name, dtype in PAIR_FIELDS.items():
        values = torch.full((PAIRS_PER_BIN, PAIR_GRID.size), NO_KEY if name == "key" else 0, dtype=dtype)
        values.view(-1)[places] = _like(values.new_empty(len(places)), tensors[f"pairs.{name}"], f"pairs.{name}")
        binned[name] = values
    stats.bins = stats.bins.replaced({"density": density, **binned})
    for name, capacity in (("tokens", UNIFORM_TOKENS), ("largest", LARGEST_TOKENS)):
        width = stats.tokens.x.shape[1]
        setattr(stats, name, _token_sample(width, capacity, name, tensors))
    stats.sources = sources
    _check(stats, tensors)
    return stats


def _rows(moments: Tensor) -> Tensor:
    """Lay moments out with a row for each fold and bin: ``(folds · bins, 6)``, without a copy of those in memory."""
    return moments.mT.reshape(-1, len(MOMENTS))


def _cells(tensors: Mapping[str, Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """Return which folds and bins a file holds moments of, fold · bins + bin each, and the shape of the moments."""
    if "moments.bins" in tensors:  # of captures of format version 4: every fold of a bin
        bins = _within(tensors["moments.bins"].long(), PAIR_GRID.size)
        folds = torch.arange(FOLDS)[:, None] * PAIR_GRID.size
        return (folds + bins).flatten(), (FOLDS, len(MOMENTS), len(bins))
    cells = _within(tensors["moments.cells"].long(), FOLDS * PAIR_GRID.size)
    return cells, (len(MOMENTS), len(cells))


def _check(stats: PairStats, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for numbers that finite pairs never give, on which a fit or a figure would fail."""
    moments = _rows(tensors["moments"])
    n = moments[:, :1]
    if not bool((n.ge(0) & n.eq(n.floor())).all()) or not float(n.sum()) <= _MOST:
        raise ValueError("its counts of pairs are no counts")
    if not bool((moments.abs() <= n * _LARGEST_SQUARE).all()):
        raise ValueError("its sums are not finite, or larger than those of so many pairs")
    for name in _COUNTS:
        if bool((tensors[name] < 0).any()):
            raise ValueError(f"{name} holds negative counts")
    channel = tensors["pairs.channel"]
    if not bool((channel.ge(0) & channel.lt(stats.channels)).all()):
        raise ValueError("its pairs name channels that do not exist")
    if any(bool((sample.position < 0).any()) for sample in (stats.tokens, stats.largest)):
        raise ValueError("its tokens name places that do not exist")
    low, high = stats.channel_extremes
    untouched = low.isposinf() & high.isneginf() & (stats.channel_sums == 0).all(0)  # until the first token comes
    finite = {name: tensor for name, tensor in tensors.items() if name.startswith(_FINITE)}
    if stats.grouped or not n.any():  # a group's tokens come without the others'
        finite["channel_extremes"] = stats.channel_extremes[:, ~untouched]
    for name, values in finite.items():
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


_GRIDS = {
    "pairs": PAIR_GRID,
    "density_x": DENSITY_X_GRID,
    "density_y": DENSITY_Y_GRID,
    "tokens": TOKEN_GRID,
    "channels": CHANNEL_GRID,
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
    entries: Sequence[Mapping[str, Any]],
    seed: int,
    tensors: Mapping[str, Tensor],
    prefix: str = "",
    parts: Sequence[Mapping[str, PairStats]] = (),
) -> tuple[list[NormSite], dict[str, PairStats]]:
    """Rebuild sites and sums from the ``sites`` of :func:`described` and the tensors of :func:`tensors_of`.

    Args:
        entries: the ``sites``.
        seed: of the drawing samples.
        tensors: by name; those without the prefix are left alone.
        prefix: that the tensors were named with.
        parts: what the sites' sums are those of, by site, where they have no tensors of their own.

    Raises:
        ValueError: if a value is none that a capture can have. What else damaged entries raise, KeyError, TypeError,
            AttributeError, RuntimeError and OverflowError among it, is in :data:`DAMAGES`.
    """
    sites = [_site(entry) for entry in entries]
    sources = [_sources(entry["sources"]) for entry in entries]
    of_sites: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        start, _, name = full_name.partition(".")
        of_sites.setdefault(start, {})[name] = tensor
    stats = sums_of(sites, parts)
    for site, seen in zip(sites, sources, strict=True):
        if not parts:
            of_site = of_sites.get(f"{prefix}{site.index}", {})
            stats[site.name] = unpacked(site.channels, seen, seed, of_site, grouped=site.grouped)
        whole = stats[site.name]
        if (site.channels, site.grouped, seen) != (whole.channels, whole.grouped, whole.sources):
            raise ValueError(f"{site.name} is not the sum of its parts")
    if not sites or not len(sites) == len(stats) == len({site.index for site in sites}):
        raise ValueError("it names no norm site, or one twice")
    return sites, stats


DAMAGES = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def grids() -> dict[str, list[int]]:
    """Return the grids that sums are taken on: mantissa bits, low and high exponent of each."""
    return {name: _numbers(grid) for name, grid in _GRIDS.items()}


def other_grid(stored: Mapping[str, Any]) -> str | None:
    """The first grid in a file that differs from this normscope's, in words; None if all are the same."""
    for name, grid in _GRIDS.items():
        if stored.get(name) != _numbers(grid):
            return f"{name} {stored.get(name)!r}, where this normscope has {_numbers(grid)!r}"
    return None


def _numbers(grid: FloatGrid) -> list[int]:
    return [grid.mantissa_bits, grid.low, grid.high]


def _site(entry: Mapping[str, Any]) -> NormSite:
    site = converted(NormSite, entry, "norm site")
    sizes = (site.index, site.channels - 1, site.eps, site.calls, site.tokens_per_sample)
    words = site.form in (None, *FORMS) and site.placement in (None, *PLACEMENTS)
    if min(sizes) < 0 or not is_shape(site.normalized_shape) or not words:
        raise ValueError(f"the norm site {site.name} is {entry!r:.200}")
    if not site.grouped and site.d != site.channels:
        raise ValueError(f"the tokens of {site.name} have {site.d} elements, but {site.channels} channels")
    return site


def _sources(entry: Mapping[str, Any]) -> SourcesSeen:
    sources = SourcesSeen(**{"assignment": "modulo", **entry})  # files of before the field hold no other
    for field in fields(sources):
        value = getattr(sources, field.name)
        if type(value) is not type(field.default):
            raise ValueError(f"the {field.name} of the sources is {value!r}")
    if sources.number not in ("none", "one", "several"):
        raise ValueError(f"the number of the sources is {sources.number!r}")
    if sources.assignment not in get_args(Assignment):
        raise ValueError(f"the assignment of the sources is {sources.assignment!r}")
    return sources


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def packed_seen(recorder: Recorder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the progress of a recorder as JSON and tensors: a checkpoint's, or a rank's message."""
    seen = recorder.seen
    header: dict[str, Any] = {
        "samples": dict(seen.n_samples),
        "first": seen.first,
        "late": [norm.as_dict() for norm in seen.late.values()],
        "parts": [],
        "inputs": kept_inputs.described(seen.inputs, recorder.sites),
        "unreadable": [[number, line] for number, line in seen.left_out.unreadable.items()],
        "cut": seen.left_out.cut,
    }
    tensors = kept_inputs.tensors_of(seen.inputs, recorder.sites)
    tensors["done"] = torch.frombuffer(bytearray(seen.done.flags or b"\0"), dtype=torch.uint8)
    for number, part in enumerate(seen.parts):
        sites = [site for site in recorder.sites if site.name in seen.stats[part]]
        stats = {name: own.to("cpu") for name, own in seen.stats[part].items()}
        capture = Capture({}, sites, [], stats, 0, recorder.summing.seed, {})
        header["parts"].append({"name": part, "sites": described(capture)["sites"]})
        tensors |= tensors_of(capture, f"{number}/")
    return header, tensors


def unpacked_seen(header: Mapping[str, Any], tensors: Mapping[str, Tensor], recorder: Recorder) -> Seen:
    """Rebuild what :func:`packed_seen` took apart; raises as :func:`sites_and_stats` does."""
    stats = {}
    for number, entry in enumerate(header["parts"]):
        _, stats[entry["name"]] = sites_and_stats(entry["sites"], recorder.summing.seed, tensors, f"{number}/")
    late = [SkippedNorm(**norm) for norm in header["late"]]
    first = {str(part): int(number) for part, number in header["first"].items()}
    inputs = kept_inputs.rebuilt(header.get("inputs", []), recorder.sites, tensors)
    done = Done(tensors["done"].numpy().tobytes())
    left_out = LeftOut({int(number): str(line) for number, line in header["unreadable"]}, int(header["cut"]))
    by_name = {norm.name: norm for norm in late}
    return Seen(stats, Counter(header["samples"]), by_name, first, inputs, done, left_out)


FORMAT = "normscope-capture"
FORMAT_VERSIONS = (4, 5, 6, 7)  # that are read; the last one is written
_AGAIN = "`normscope capture MODEL -o FILE` writes one"


def save_capture(capture: Capture, path: str | Path) -> Path:
    """Write a capture as one safetensors file, whole or not at all.

    Bins and cells that no pair fell into take no place in it, nor does the whole where it is the sum of its parts.

    Raises:
        UsageError: if it cannot be written there.
    """
    header = {"format": FORMAT, "version": FORMAT_VERSIONS[-1], **header_of(capture)}
    tensors = all_tensors(capture)
    if _adds_up(capture):
        tensors = {name: tensor for name, tensor in tensors.items() if "/" in name}
    write_checked(Path(path), header, tensors, deflated=True)
    return Path(path)


def _adds_up(capture: Capture) -> bool:
    """True if the parts add up to the whole to the bit; parts of merged captures differ by rounding."""
    summed = replace(capture, stats=sums_of(capture.sites, [part.stats for part in capture.parts.values()]))
    if summed.stats.keys() != capture.stats.keys():
        return False
    one, other = (digest(json.dumps(described(each)["sites"]), tensors_of(each)) for each in (capture, summed))
    return one == other


def header_of(capture: Capture) -> dict[str, Any]:
    """Return what a file says of a capture and its parts, as JSON takes it."""
    return {
        "seed": capture.seed,
        "versions": dict(capture.versions),
        "grids": grids(),
        "skipped": [norm.as_dict() for norm in capture.skipped],
        **described(capture),
        "parts": [{"name": name, **described(part)} for name, part in capture.parts.items()],
        **({"inputs": kept_inputs.described(capture.inputs, capture.sites)} if capture.inputs else {}),
    }


def all_tensors(capture: Capture) -> dict[str, Tensor]:
    """Return the sums of a capture and its parts by their names in a file, no two in the same memory."""
    tensors = tensors_of(capture)
    for number, part in enumerate(capture.parts.values()):
        # Copied: the only part is the whole, and safetensors refuses tensors that share memory.
        tensors |= {name: tensor.clone() for name, tensor in tensors_of(part, f"{number}/").items()}
    return tensors | kept_inputs.tensors_of(capture.inputs, capture.sites)


def is_capture(path: str | Path) -> bool:
    """Return True if a file has the header of a capture, of any version; its content is not read."""
    try:
        with safe_open(path, framework="pt") as file:
            return bool(json.loads(file.metadata()[HEADER])["format"] == FORMAT)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return False


def load_capture(path: str | Path) -> Capture:
    """Read a capture that :func:`save` wrote.

    Raises:
        DataError: if the file is missing, damaged, of another kind, of another format version or of other grids.
    """
    path = Path(path)
    return capture_from(*read_checked(path, FORMAT, FORMAT_VERSIONS, _AGAIN), path)


def capture_from(header: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Capture:
    """Rebuild a capture from :func:`header_of` and :func:`all_tensors`; DataError, naming ``path``."""
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
        if not isinstance(entry["name"], str) or not entry["name"] or entry["name"] in parts:
            raise ValueError(f"the name of a part is {entry['name']!r}")
        of_part = {key: entry[key] for key in ("about", "n_samples", "sites")}
        parts[entry["name"]] = _whole({**header, **of_part}, tensors, f"{number}/")
    derived = all("/" in name for name in tensors)
    whole = _whole(header, tensors, "", [part.stats for part in parts.values()] if derived else ())
    inputs = kept_inputs.rebuilt(header.get("inputs", []), whole.sites, tensors)
    parts = {name: replace(part, inputs=[one for one in inputs if one.part == name]) for name, part in parts.items()}
    names = {site.name for site in whole.sites}
    if any({site.name for site in part.sites} - names for part in parts.values()):
        raise ValueError("a part has norm sites that the whole has not")
    return replace(whole, parts=parts, inputs=inputs)


def _whole(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    prefix: str,
    parts: Sequence[Mapping[str, PairStats]] = (),
) -> Capture:
    if checked(header, {"n_samples": int, "seed": int}, "capture")["n_samples"] < 0:
        raise ValueError("its number of samples is none")
    sites, stats = sites_and_stats(header["sites"], header["seed"], tensors, prefix, parts)
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


_BYTES_OF_A_PAIR = 8  # x and y in float32


def raw_bytes(sites: Sequence[NormSite], n_samples: int, sample: int | None = None) -> int:
    """Return how many bytes the raw pairs of some sites will take, of all tokens or ``sample`` of each sample."""
    tokens = [min(site.tokens_per_sample, sample or site.tokens_per_sample) for site in sites]
    return n_samples * sum(n * site.d * _BYTES_OF_A_PAIR for n, site in zip(tokens, sites, strict=True))


class RawPairs:
    """Collects pairs on disk, a site at a time, and puts them in place once all are there.

    The folder then holds one safetensors file a site, ``INDEX-NAME.safetensors``, with x and y, float32
    ``(tokens, d)``, tokens in the order in which they came. Where tokens differ in size, x and y are ``(pairs,)``, and
    ``sizes``, int64 ``(tokens,)``, tells them apart.
    """

    def __init__(self, folder: Path) -> None:
        """Make room beside ``folder``; UsageError if that exists already, or cannot be written."""
        if folder.exists():
            raise UsageError(f"The folder {folder} exists already; move it away, or choose another --output.")
        self.folder = folder
        self._sizes: dict[str, list[int]] = {}
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        except OSError as error:
            raise UsageError(f"Cannot write {folder}: {error.strerror or error}.") from error

    def add(self, site: NormSite, x: Tensor, y: Tensor) -> None:
        """Append the pairs of some tokens, ``(tokens, d)``."""
        self._sizes.setdefault(site.name, []).extend([x.shape[1]] * len(x))
        try:
            for name, rows in (("x", x), ("y", y)):
                with (self._partial / f"{site.index}.{name}").open("ab") as file:
                    file.write(rows.float().cpu().numpy().tobytes())
        except OSError as error:
            raise UsageError(f"Cannot write {self.folder}: {error.strerror or error}.") from error

    def finish(self, capture: Capture) -> Path:
        """Write one file a site and let the folder appear; return it."""
        try:
            for site in capture.sites:
                self._write_site(site, dict(capture.about))
            self._partial.chmod(0o777 & ~umask())
            self._partial.rename(self.folder)
        except OSError as error:
            raise UsageError(f"Cannot write {self.folder}: {error.strerror or error}.") from error
        return self.folder

    def discard(self) -> None:
        """Remove whatever has not been put in place."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _write_site(self, site: NormSite, about: dict[str, str]) -> None:
        parts = {name: self._partial / f"{site.index}.{name}" for name in ("x", "y")}
        tensors = {name: torch.from_numpy(np.fromfile(part, dtype=np.float32)) for name, part in parts.items()}
        sizes = self._sizes[site.name]
        if len(set(sizes)) == 1:
            tensors = {name: pairs.view(-1, sizes[0]) for name, pairs in tensors.items()}
        else:
            tensors["sizes"] = torch.tensor(sizes)
        name = f"{site.index:03d}-{file_stem(site.name)}.safetensors"
        write_tensors(tensors, self._partial / name, {**about, "site": site.name})
        (self._partial / name).chmod(0o666 & ~umask())
        for part in parts.values():
            part.unlink()


Source: TypeAlias = Capture | str | Path


def merge_captures(captures: Sequence[Source]) -> Capture:
    """Return the capture of all inputs of several runs; in any order the same, up to float64's rounding of sums.

    Files are read one after the other: no more than two of them are in memory at once, however many there are.

    Args:
        captures: two or more, or the files that hold them.

    Raises:
        DataError: if a file is no capture, if they are not of the same model, weights, sites, seed and kind of sums,
            or if an input is in two of them.
        UsageError: if there are fewer than two.
    """
    if len(captures) < 2:
        raise UsageError(f"Merging takes two captures or more; there {'is one' if captures else 'is none'}.")
    names = [_name(source, number) for number, source in enumerate(captures)]
    merged = _loaded(captures[0])
    for number in range(1, len(captures)):
        other = _loaded(captures[number])
        try:
            merged = merged.merge(other)
        except DataError as error:
            first = next((i for i in range(number) if shared_input(_loaded(captures[i]), other)), 0)
            reason = str(error).removeprefix("Cannot merge ").removeprefix("two captures: ")
            raise DataError(f"Cannot merge {names[first]} and {names[number]}: {reason}") from None
    return merged


def _loaded(source: Source) -> Capture:
    return source if isinstance(source, Capture) else load_capture(source)


def _name(source: Source, number: int) -> str:
    return f"capture {number + 1}" if isinstance(source, Capture) else str(source)
