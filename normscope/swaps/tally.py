"""A few numbers per input: what is kept of the distances of all batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normscope.drifts import Drift, Quantiles, Swapped
from normscope.swaps.distances import Distances


@dataclass(frozen=True)
class Configuration:
    """Which sites are swapped at once.

    Attributes:
        swapped: why just these.
        site: the one, or the one added last.
        paths: all of them.
    """

    swapped: Swapped
    site: str | None
    paths: tuple[str, ...]


@dataclass
class Tally:
    """The distances of one configuration at one place, batch after batch."""

    _batches: list[Distances] = field(default_factory=list)

    def add(self, found: Distances) -> None:
        """Take those of one more batch."""
        self._batches.append(found)

    def row(self, func: str, init: str, done: Configuration, at: str, part: str = "") -> Drift:
        """Return their quantiles."""
        left_out = torch.cat([one.left_out for one in self._batches])
        answers = self._total("answers")
        return Drift(
            func=func,
            init=init,
            swapped=done.swapped,
            site=done.site,
            sites_swapped=len(done.paths),
            at=at,
            part=part,
            inputs=int((~left_out).sum()),
            nonfinite=int(sum(int(one.nonfinite.sum()) for one in self._batches)),
            left_out=int(left_out.sum()),
            relative_l2=_quantiles([one.relative_l2[~one.left_out] for one in self._batches]),
            cosine=_quantiles([one.cosine[~one.left_out] for one in self._batches]),
            kl=_quantiles([one.kl[~one.left_out] for one in self._batches if one.kl is not None]) if answers else None,
            top1=_share(self._total("top1"), answers),
            top5=_share(self._total("top5"), answers),
            top5_overlap=_share(self._total("top5_overlap"), answers),
            answers=None if answers is None else int(answers),
            frames=self._frames(),
        )

    def _total(self, name: str) -> float | None:
        """Sum up over the samples that were compared; None where it is not known of them."""
        parts = [(getattr(one, name), one.left_out) for one in self._batches]
        known = [float(own[~left_out].sum()) for own, left_out in parts if own is not None]
        return math.fsum(known) if known else None

    def _frames(self) -> Quantiles | None:
        known = [one.frames for one in self._batches if one.frames is not None]
        return _quantiles(known) if known else None


def _share(total: float | None, of: float | None) -> float | None:
    return total / of if total is not None and of else None


def _quantiles(parts: Sequence[Tensor]) -> Quantiles:
    return Quantiles.of(torch.cat(list(parts)).tolist())
