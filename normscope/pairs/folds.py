"""Folds: a handful of independent sub-sums of a capture, from which intervals and cross-validation come.

Sources (photographs, speakers, texts) are independent; samples of one source are not. As long as one source alone has
been seen, its samples are the folds, and every output says so. When a second one comes, all that the first gave
becomes a part of that source's fold. Batches and merges give the same result in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from normscope.batches import Sample

FOLDS = 8


@dataclass(frozen=True)
class SourcesSeen:
    """None, one or several sources; of a single one its name and number.

    ``mapped`` is False for a site whose tokens cannot be told apart by sample; it has no folds.
    """

    number: Literal["none", "one", "several"] = "none"
    source: str = ""
    source_index: int = 0
    mapped: bool = True

    def with_samples(self, samples: Sequence[Sample]) -> SourcesSeen:
        """Return what has been seen once ``samples`` have."""
        seen = self
        for sample in samples:
            seen = seen.merged(SourcesSeen("one", sample.source, sample.source_index, self.mapped))
        return seen

    def merged(self, other: SourcesSeen) -> SourcesSeen:
        """Return what both have seen."""
        mapped = self.mapped and other.mapped
        if self.number == "none" or other.number == "none":
            one = other if self.number == "none" else self
            return SourcesSeen(one.number, one.source, one.source_index, mapped)
        if self.number == other.number == "one" and self.source == other.source:
            return SourcesSeen("one", self.source, min(self.source_index, other.source_index), mapped)
        return SourcesSeen("several", mapped=mapped)

    def folds_of(self, samples: Sequence[Sample]) -> list[int]:
        """Return the fold of each sample."""
        if not self.mapped:
            return [0] * len(samples)
        by_sample = self.number == "one"
        return [(sample.index if by_sample else sample.source_index) % FOLDS for sample in samples]
