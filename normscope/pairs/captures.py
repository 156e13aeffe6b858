"""A capture: the sums of the chosen norm sites of one network, and a description of its inputs."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TypeVar

import torch
from torch import nn

from normscope.errors import DataError, count
from normscope.norms.sites import Layers, NormSite, SkippedNorm, select
from normscope.pairs.kept_inputs import KeptInput, first_inputs
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import Tabled

_T = TypeVar("_T")


@dataclass(repr=False)
class Capture(Tabled):
    """Sums over the pairs of a network's norms on one set of inputs.

    Attributes:
        about: ``model``, ``weights`` (the resolved checkpoint and revision) and ``data``, in words; ``dtype`` of the
            network; and ``sample`` where only a sample of the tokens was taken.
        sites: the observed norm sites in the order of their first calls.
        skipped: norms that could not be observed, and the reasons.
        stats: the sums of each site, by its name.
        n_samples: number of samples that went through the network.
        seed: of the drawing samples.
        versions: of Python and the libraries, see :func:`versions`.
        parts: captures of parts of the data, each by its name (``timestep 980``), where requested.
        inputs: inputs that were kept for display, where requested.
        skip: number of first positions of each sample that are in no sum.
    """

    about: Mapping[str, str]
    sites: list[NormSite]
    skipped: list[SkippedNorm]
    stats: dict[str, PairStats]
    n_samples: int
    seed: int
    versions: Mapping[str, str]
    parts: dict[str, Capture] = field(default_factory=dict)
    inputs: Sequence[KeptInput] = ()
    skip: int = 0

    def __repr__(self) -> str:
        pairs = sorted({stats.n_pairs for stats in self.stats.values()}) or [0]
        n_pairs = f"{pairs[0]:,} pairs each" if len(pairs) == 1 else f"{pairs[0]:,} to {pairs[-1]:,} pairs"
        parts = [count(len(self.sites), "site"), count(self.n_samples, "sample"), n_pairs if self.stats else "no pairs"]
        return f"Capture {self.about['model']}: {', '.join(parts + [without_first(self.skip)] * (self.skip > 0))}"

    def only(self, layers: Layers) -> Capture:
        """Return the capture of some of the sites, see :func:`normscope.norms.sites.select`."""
        names = {site.name for site in select(self.sites, layers)}

        def limited(capture: Capture) -> Capture:
            sites = [site for site in capture.sites if site.name in names]
            return replace(
                capture,
                sites=sites,
                stats={site.name: capture.stats[site.name] for site in sites},
                parts={name: limited(part) for name, part in capture.parts.items()},
                inputs=[kept.only(names) for kept in capture.inputs],
            )

        return limited(self)

    def merge(self, other: Capture) -> Capture:
        """Return the capture of both sets of inputs.

        Raises:
            DataError: if the two are not of the same model, weights, dtype and sites, or not the same sample of the
                tokens, if they leave out different numbers of positions, if only one keeps parts, or if both contain
                the same input.
        """
        for key in ("model", "weights", "dtype"):
            mine, theirs = (about.get(key, "not named") for about in (self.about, other.about))
            if mine != theirs:
                raise DataError(
                    f"Cannot merge captures of different {key.removesuffix('s')}s: {mine!r} and {theirs!r}."
                )
        samples = [about.get("sample", "all tokens") for about in (self.about, other.about)]
        if samples[0] != samples[1]:
            raise DataError(f"Cannot merge a capture of {samples[0]} with one of {samples[1]}; take the same of both.")
        if self.skip != other.skip:
            raise DataError(
                f"Cannot merge a capture with skip={self.skip} with one with skip={other.skip}; "
                "leave out the same positions in both."
            )
        if difference := _difference_of_sites(self.sites, other.sites):
            raise DataError(
                f"Cannot merge captures of different norm sites: {difference}; capture the same layers of both."
            )
        if bool(self.parts) != bool(other.parts):
            part = next(iter(self.parts or other.parts))
            raise DataError(
                f"Cannot merge a capture that keeps its parts, such as {part!r}, with one that does not; capture "
                "both the same way."
            )
        if common := shared_input(self, other):
            raise DataError(
                f"Cannot merge two captures: both hold {common}, and merged it would be counted twice. Capture other "
                "inputs, or leave one of the two out; inputs that differ need samples of different names "
                "(normscope.Batch(samples=…))."
            )
        return added(self, other)


def added(first: Capture, second: Capture) -> Capture:
    """Merge without checks; while captures are under way, sites and parts may be in one of them only."""
    sites = {site.name: site for site in (*second.sites, *first.sites)}
    stats = _union(first.stats, second.stats, PairStats.merge)
    about = {**first.about, "data": joined_names(*(capture.about.get("data", "") for capture in (first, second)))}
    if first.about.get("part") != second.about.get("part"):
        about.pop("part", None)
    return Capture(
        about=about,
        sites=sorted(sites.values(), key=lambda site: site.index),
        skipped=list(dict.fromkeys([*first.skipped, *second.skipped])),
        stats=stats,
        n_samples=first.n_samples + second.n_samples,
        seed=first.seed,
        versions=_union(first.versions, second.versions, joined_names),
        parts=_union(first.parts, second.parts, added),
        inputs=first_inputs([*first.inputs, *second.inputs]),
        skip=first.skip,
    )


def without_first(skip: int) -> str:
    """Describe the tokens that a capture leaves out."""
    return f"without the first {f'{skip} positions' if skip > 1 else 'position'} of each sample"


def sums_of(sites: Iterable[NormSite], parts: Sequence[Mapping[str, PairStats]]) -> dict[str, PairStats]:
    """Return the sums of each site over the parts that have it, by its name; sites that no part has are omitted."""
    by_site = {site.name: [stats[site.name] for stats in parts if site.name in stats] for site in sites}
    return {name: functools.reduce(PairStats.merge, stats) for name, stats in by_site.items() if stats}


def shared_input(first: Capture, second: Capture) -> str | None:
    """Name an input that both captures have drawn tokens from; None if there is none.

    A capture keeps the tokens of smallest keys, and a key depends on the seed, the input and the token's position.
    If the captures share J of all inputs, 64 tokens miss all of them with a probability of about (1 − J)⁶⁴.
    """
    if first.seed != second.seed:  # their keys cannot be compared
        return None
    for name, stats in first.stats.items():
        for sample in ("tokens", "largest") if name in second.stats else ():
            drawn, compared = getattr(stats, sample), getattr(second.stats[name], sample)
            common = (drawn.sample >= 0) & torch.isin(drawn.key, compared.key[compared.sample >= 0])
            if common.any():
                return f"sample {int(drawn.sample[common][0])} of the same data"
    return None


def _union(mine: Mapping[str, _T], theirs: Mapping[str, _T], merge: Callable[[_T, _T], _T]) -> dict[str, _T]:
    both = {name: merge(value, theirs[name]) for name, value in mine.items() if name in theirs}
    return {**mine, **theirs, **both}


def joined_names(mine: str, theirs: str) -> str:
    """Join two lists of names, without repetition.

    >>> joined_names("digits + letters", "letters")
    'digits + letters'
    """
    return " + ".join(dict.fromkeys([*mine.split(" + "), *theirs.split(" + ")]))


def _difference_of_sites(mine: Sequence[NormSite], theirs: Sequence[NormSite]) -> str | None:
    names = [{site.name for site in sites} for sites in (mine, theirs)]
    if alone := [site.name for site in (*mine, *theirs) if site.name in names[0] ^ names[1]]:
        return f"{alone[0]} is in one alone"
    for ours, counterpart in zip(mine, theirs, strict=True):
        for name, value in vars(ours).items():
            differing = getattr(counterpart, name)
            if name == "normalized_shape" and ours.grouped:  # which depends on the length of the first sample
                value, differing = value[:1], differing[:1]
            if name != "tokens_per_sample" and value != differing:
                return f"the {name} of {ours.name} is {value!r} and {differing!r}"
    return None


def versions(model: nn.Module) -> dict[str, str]:
    """Return the versions of Python, of normscope's arithmetic, and of the libraries that a network's classes are from.

    >>> list(versions(nn.LayerNorm(4)))
    ['python', 'normscope', 'torch', 'numba']
    """
    packages = sorted({type(module).__module__.partition(".")[0] for module in model.modules()})
    installed = {package: _version(package) for package in dict.fromkeys(("normscope", "torch", "numba", *packages))}
    return {"python": platform.python_version()} | {name: version for name, version in installed.items() if version}


@functools.cache  # reading them takes a tenth of a probe
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
