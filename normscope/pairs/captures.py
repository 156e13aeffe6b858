"""A capture: the sums of every chosen norm site of one network, and what they were taken from."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata

import torch
from torch import Tensor

from normscope.errors import DataError, count
from normscope.pairs.kept_inputs import KeptInput, first_inputs
from normscope.pairs.norms.sites import Layers, NormSite, SkippedNorm, select
from normscope.pairs.sums.sampling import NO_KEY, TokenSample
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import Tabled

_AND = " + "
_MIXED = " · folds of two assignments, so no intervals and no ceiling"


@dataclass(repr=False)
class Capture(Tabled):
    """Sums over the pairs of a network's norms on one set of inputs.

    Attributes:
        about: ``model``, ``weights`` (the resolved checkpoint and revision) and ``data``, in words; ``dtype`` of the
            network; and ``sample`` where only a sample of the tokens was taken.
        sites: the observed norm sites in the order of their first calls.
        skipped: norms that were seen and could not be observed, and why.
        stats: the sums of each site, by its name.
        n_samples: number of samples that went through the network.
        seed: of the drawing samples.
        versions: of Python and the libraries.
        parts: captures of parts of the data, each by its name (``timestep 980``), where they were asked for.
        inputs: those that were kept to be looked at, where that was asked for.
    """

    about: Mapping[str, str]
    sites: list[NormSite]
    skipped: list[SkippedNorm]
    stats: dict[str, PairStats]
    n_samples: int
    seed: int
    versions: Mapping[str, str]
    parts: Mapping[str, Capture] = field(default_factory=dict)
    inputs: Sequence[KeptInput] = ()

    def __repr__(self) -> str:
        pairs = sorted({stats.n_pairs for stats in self.stats.values()})
        each = (
            f"{pairs[0]:,} pairs each"
            if len(pairs) == 1
            else f"{pairs[0]:,} to {pairs[-1]:,} pairs"
            if pairs
            else "no pairs"
        )
        samples = count(self.n_samples, "sample")
        return f"Capture {self.about['model']}: {count(len(self.sites), 'site')}, {samples}, {each}"

    def only(self, layers: Layers) -> Capture:
        """Return the capture of some of the sites, see :func:`normscope.pairs.norms.sites.select`."""
        sites = select(self.sites, layers)
        names = {site.name for site in sites}
        parts = {name: part._limited_to(names) for name, part in self.parts.items()}
        return replace(self._limited_to(names), parts=parts)

    def _limited_to(self, names: set[str]) -> Capture:
        sites = [site for site in self.sites if site.name in names]
        stats = {site.name: self.stats[site.name] for site in sites}
        return replace(self, sites=sites, stats=stats, inputs=[one.only(names) for one in self.inputs])

    def merge(self, other: Capture) -> Capture:
        """Return the capture of both sets of inputs.

        Raises:
            DataError: if the two are not of the same model, weights, dtype and sites, or not the same sample of the
                tokens, if only one keeps parts, or if both contain the same input.
        """
        for key in ("model", "weights", "dtype"):
            mine, theirs = (about.get(key, "not named") for about in (self.about, other.about))
            if mine != theirs:
                raise DataError(f"Cannot merge captures of different {key}: {mine!r} and {theirs!r}.")
        samples = [about.get("sample", "all tokens") for about in (self.about, other.about)]
        if samples[0] != samples[1]:
            raise DataError(f"Cannot merge a capture of {samples[0]} with one of {samples[1]}; take the same of both.")
        if found := _other_site(self.sites, other.sites):
            raise DataError(f"Cannot merge captures of different norm sites: {found}; capture the same layers of both.")
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
        return self._merged(other)

    def _merged(self, other: Capture) -> Capture:
        stats = {name: stats.merge(other.stats[name]) for name, stats in self.stats.items()}
        data = _joined(*(capture.about["data"].removesuffix(_MIXED) for capture in (self, other)))
        mixed = any(merged.sources.assignment == "mixed" for merged in stats.values())
        about = {**self.about, "data": data + _MIXED * mixed}
        if self.about.get("part") != other.about.get("part"):
            about.pop("part", None)
        return Capture(
            about=about,
            sites=self.sites,
            skipped=list(dict.fromkeys([*self.skipped, *other.skipped])),
            stats=stats,
            n_samples=self.n_samples + other.n_samples,
            seed=self.seed,
            versions={
                name: _joined(version, other.versions.get(name, version)) for name, version in self.versions.items()
            },
            parts=_merged(self.parts, other.parts),
            inputs=first_inputs([*self.inputs, *other.inputs]),
        )


def sums_of(sites: Iterable[NormSite], parts: Sequence[Mapping[str, PairStats]]) -> dict[str, PairStats]:
    """Return the sums of each site over all parts that have it, by its name; of no site that no part has."""
    of_parts = {site.name: [own[site.name] for own in parts if site.name in own] for site in sites}
    return {name: functools.reduce(PairStats.merge, own) for name, own in of_parts.items() if own}


def shared_input(one: Capture, other: Capture) -> str | None:
    """Name an input that both captures have drawn tokens or pairs from; None if there is none.

    The drawing samples hold the tokens and pairs of least keys: of the inputs that two captures share, the least of
    both is among them. If a part J of all inputs is shared (Broder, "On the resemblance and containment of documents",
    1997), each of the thousands of places for single pairs misses it with probability 1 − J.
    """
    if one.seed != other.seed:  # the keys of one say nothing of the other's
        return None
    both = [(stats, other.stats[name]) for name, stats in one.stats.items() if name in other.stats]
    for mine, theirs in both:
        for sample in _samples_of_both(mine, theirs):
            return f"sample {sample} of the same data"
    return "some samples of the same data" if any(_pairs_of_both(*stats) for stats in both) else None


def _samples_of_both(one: PairStats, other: PairStats) -> Iterator[int]:
    for name in ("tokens", "largest"):
        (mine, samples), (theirs, _) = (_identified(getattr(stats, name)) for stats in (one, other))
        yield from samples[torch.isin(mine, theirs)].tolist()


def _identified(drawn: TokenSample) -> tuple[Tensor, Tensor]:
    """Keys and samples of the drawn tokens whose sample is known."""
    known = (drawn.sample >= 0) & (drawn.key != NO_KEY)
    return drawn.key[known], drawn.sample[known]


def _pairs_of_both(one: PairStats, other: PairStats) -> bool:
    if not (one.sources.mapped and other.sources.mapped):  # pairs do not tell whether their token was of a sample
        return False
    return bool((one.pairs.filled & (one.pairs.key == other.pairs.key)).any())


def _merged(mine: Mapping[str, Capture], theirs: Mapping[str, Capture]) -> dict[str, Capture]:
    both = {name: part._merged(theirs[name]) for name, part in mine.items() if name in theirs}
    return {**mine, **theirs, **both}


def _joined(mine: str, theirs: str) -> str:
    """Name both, and what is named in both once.

    >>> _joined("digits + letters", "letters")
    'digits + letters'
    """
    return _AND.join(dict.fromkeys([*mine.split(_AND), *theirs.split(_AND)]))


def _other_site(mine: Sequence[NormSite], theirs: Sequence[NormSite]) -> str | None:
    """Say where two lists of norm sites differ; None where they do not."""
    names = [{site.name for site in sites} for sites in (mine, theirs)]
    if alone := [site.name for site in (*mine, *theirs) if site.name in names[0] ^ names[1]]:
        return f"{alone[0]} is in one alone"
    for one, other in zip(map(_of_any_length, mine), map(_of_any_length, theirs), strict=True):
        for what in (f.name for f in fields(NormSite)):
            ours, others = getattr(one, what), getattr(other, what)
            if ours != others:
                return f"the {what} of {one.name} is {ours!r} and {others!r}"
    return None


def _of_any_length(site: NormSite) -> NormSite:
    """Forget what depends on how long the first sample was: it says nothing of the network."""
    shape = site.normalized_shape[:1] if site.grouped else site.normalized_shape
    return replace(site, tokens_per_sample=0, normalized_shape=shape)


def versions() -> dict[str, str]:
    """Name the versions that a file or a figure was made with."""
    found = {"python": platform.python_version()}
    for package in ("normscope", "torch", "numba", "timm", "torchaudio", "diffusers", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
