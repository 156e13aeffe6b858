"""A capture: the sums of every chosen norm site of one network, and what they were taken from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata

from normscope.errors import DataError
from normscope.pairs.selection import Layers, select
from normscope.pairs.sites import NormSite, SkippedNorm
from normscope.pairs.stats import PairStats


@dataclass
class Capture:
    """What the norms of one network did to one set of inputs.

    Attributes:
        about: ``model``, ``weights`` (the resolved checkpoint and revision) and ``data``, in words; and ``sample``
            where only a sample of the tokens was taken.
        sites: the observed norm sites in the order of their first calls.
        skipped: norms that were seen and could not be observed, and why.
        stats: the sums of each site, by its name.
        n_samples: number of samples that went through the network.
        seed: of the drawing samples.
        versions: of Python and the libraries.
        parts: captures of parts of the data, each by its name (``timestep 980``), where batches named theirs.
    """

    about: Mapping[str, str]
    sites: list[NormSite]
    skipped: list[SkippedNorm]
    stats: dict[str, PairStats]
    n_samples: int
    seed: int
    versions: Mapping[str, str]
    parts: Mapping[str, Capture] = field(default_factory=dict)

    def only(self, layers: Layers) -> Capture:
        """Return the capture of some of the sites, see :func:`normscope.pairs.selection.select`."""
        sites = select(self.sites, layers)
        names = {site.name for site in sites}
        parts = {name: part._limited_to(names) for name, part in self.parts.items()}
        return replace(self._limited_to(names), parts=parts)

    def _limited_to(self, names: set[str]) -> Capture:
        sites = [site for site in self.sites if site.name in names]
        return replace(self, sites=sites, stats={site.name: self.stats[site.name] for site in sites})

    def merge(self, other: Capture) -> Capture:
        """Return the capture of both sets of inputs.

        Raises:
            DataError: if the two are not of the same model, weights and sites, or not the same sample of the tokens.
        """
        for key in ("model", "weights"):
            if self.about[key] != other.about[key]:
                raise DataError(
                    f"Cannot merge captures of different {key}: {self.about[key]!r} and {other.about[key]!r}."
                )
        samples = [about.get("sample", "all tokens") for about in (self.about, other.about)]
        if samples[0] != samples[1]:
            raise DataError(f"Cannot merge a capture of {samples[0]} with one of {samples[1]}; take the same of both.")
        if list(map(_of_any_length, self.sites)) != list(map(_of_any_length, other.sites)):
            raise DataError("Cannot merge captures of different norm sites; capture the same layers of both.")
        data = dict.fromkeys([self.about["data"], other.about["data"]])
        about = {**self.about, "data": " + ".join(data)}
        if self.about.get("part") != other.about.get("part"):
            about.pop("part", None)
        return Capture(
            about=about,
            sites=self.sites,
            skipped=list(dict.fromkeys([*self.skipped, *other.skipped])),
            stats={name: stats.merge(other.stats[name]) for name, stats in self.stats.items()},
            n_samples=self.n_samples + other.n_samples,
            seed=self.seed,
            versions=self.versions,
            parts=_merged(self.parts, other.parts),
        )


def _merged(mine: Mapping[str, Capture], theirs: Mapping[str, Capture]) -> dict[str, Capture]:
    both = {name: part.merge(theirs[name]) for name, part in mine.items() if name in theirs}
    return {**mine, **theirs, **both}


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
