"""Folds: a handful of independent sub-sums of a capture, from which intervals and cross-validation come.

Sources (photographs, speakers, texts) are independent; samples of one source are not. As long as one source alone has
been seen, its samples are the folds, and every output says so. When a second one comes, all that the first gave
becomes a part of that source's fold. Batches and merges give the same result in any order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from normscope.batches import Sample

FOLDS = 8


@dataclass(frozen=True)
class SourcesSeen:
    """None, one or several sources; of a single one its data set, name and number.

    ``mapped`` is False for a site whose tokens cannot be told apart by sample; it has no folds.
    """

    number: Literal["none", "one", "several"] = "none"
    data: str = ""
    source: str = ""
    source_index: int = 0
    mapped: bool = True

    def with_samples(self, samples: Sequence[Sample]) -> SourcesSeen:
        """Return what has been seen once ``samples`` have."""
        if self.number == "several":
            return self
        seen = self
        for sample in samples:
            seen = seen.merged(SourcesSeen("one", sample.data, sample.source, sample.source_index, self.mapped))
        return seen

    def merged(self, other: SourcesSeen) -> SourcesSeen:
        """Return what both have seen."""
        mapped = self.mapped and other.mapped
        if self.number == "none":
            return replace(other, mapped=mapped)
        if other.number == "none" or replace(self, mapped=mapped) == replace(other, mapped=mapped):
            return replace(self, mapped=mapped)
        return SourcesSeen("several", mapped=mapped)

    @property
    def fold(self) -> int:
        """The fold of the single source, once others come beside it."""
        return _source_fold(self.data, self.source_index)

    def folds_of(self, samples: Sequence[Sample]) -> list[int]:
        """Return the fold of each sample."""
        if not self.mapped:
            return [0] * len(samples)
        if self.number == "one":
            return [sample.index % FOLDS for sample in samples]
        return [_source_fold(sample.data, sample.source_index) for sample in samples]


@functools.lru_cache(maxsize=4096)
def _source_fold(data: str, source_index: int) -> int:
    """Deal the sources of a data set out evenly; begin elsewhere for another data set, whose numbers are the same."""
    first = hashlib.blake2b(data.encode("utf-8", "surrogateescape"), digest_size=1).digest()[0]
    return (first + source_index) % FOLDS
