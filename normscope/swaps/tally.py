"""A few numbers per input: what is kept of the distances of all batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from normscope.drifts import END, OUTPUT, Drift, Quantiles, Swapped
from normscope.pairs.ranks import Ranks
from normscope.swaps.distances import Distances

_OF_ALL = ("left_out", "frames")  # known of more than the samples that are compared

_Key = tuple[int, str, str]  # which configuration, where it was measured, and the part of the data
Came = tuple[int, int]


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
    """The distances of one configuration at one place, batch after batch.

    Quantiles do not depend on the order of their values, and sums are exact before they are rounded: who compared which
    batch makes no difference.

    Attributes:
        came: the chunk that the first of the batches was in, and its number therein.
    """

    came: Came
    _columns: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, found: Distances) -> None:
        """Take those of one more batch: of what was compared; samples with nothing to compare to are counted."""
        for column in fields(found):
            values = getattr(found, column.name)
            if values is not None:
                self.extend(column.name, values if column.name in _OF_ALL else values[~found.left_out])

    def extend(self, name: str, values: Tensor) -> None:
        """Take more values of one kind, by its name in :class:`Distances`."""
        self._columns.setdefault(name, []).append(values)

    def columns(self) -> dict[str, Tensor]:
        """Return all values of each kind that there is: float64."""
        return {name: torch.cat(parts).double() for name, parts in self._columns.items()}

    def row(self, func: str, init: str, done: Configuration, at: str, part: str = "") -> Drift:
        """Return their quantiles."""
        found = {name: values.tolist() for name, values in self.columns().items()}
        totals = {name: math.fsum(found[name]) for name in ("answers", "top1", "top5", "top5_overlap") if name in found}
        answers = totals.get("answers")
        return Drift(
            func=func,
            init=init,
            swapped=done.swapped,
            site=done.site,
            sites_swapped=len(done.paths),
            at=at,
            part=part,
            inputs=len(found["relative_l2"]),
            nonfinite=int(sum(found["nonfinite"])),
            left_out=int(sum(found["left_out"])),
            relative_l2=Quantiles.of(found["relative_l2"]),
            cosine=Quantiles.of(found["cosine"]),
            kl=Quantiles.of(found["kl"]) if answers else None,
            top1=_share(totals.get("top1"), answers),
            top5=_share(totals.get("top5"), answers),
            top5_overlap=_share(totals.get("top5_overlap"), answers),
            answers=None if answers is None else int(answers),
            frames=Quantiles.of(found["frames"]) if "frames" in found else None,
        )


@dataclass
class Tallies:
    """What one round of passes found: a tally of each configuration, at each place, for each part of the data.

    Attributes:
        wanted: the configurations, in the order of their rows.
    """

    wanted: Sequence[Configuration]
    _kept: dict[_Key, Tally] = field(default_factory=dict)

    def add(self, done: Configuration, at: str, part: str, found: Distances, came: Came) -> None:
        """Take the distances of one more batch, which came as this one of this chunk."""
        self._tally((self.wanted.index(done), at, part), came).add(found)

    @property
    def at_output(self) -> bool:
        """Whether there is any batch of which the output was compared."""
        return any(at == OUTPUT for _, at, _ in self._kept)

    def gathered(self, ranks: Ranks) -> Tallies:
        """Return what all ranks have found; every rank calls it, also one that found nothing."""
        if ranks.size == 1:
            return self
        columns = {key: tally.columns() for key, tally in self._kept.items()}
        lengths = [
            [key, self._kept[key].came, {name: len(own) for name, own in of.items()}] for key, of in columns.items()
        ]
        told = ranks.told(lengths)
        own = [values for of in columns.values() for values in of.values()]
        everyone = ranks.gathered(torch.cat([torch.zeros(0, dtype=torch.float64), *own]))
        whole = Tallies(self.wanted)
        for found, values in zip(told, everyone, strict=True):
            parts = iter(torch.split(values, [length for _, _, of in found for length in of.values()]))
            for (number, at, part), came, of in found:
                tally = whole._tally((number, at, part), tuple(came))
                for name in of:
                    tally.extend(name, next(parts))
        return whole

    def rows(self, func: str, init: str, sites: Sequence[str]) -> list[Drift]:
        """Return the quantiles: by configuration, by place in the network's order, by part as they came."""
        order = {at: number for number, at in enumerate([OUTPUT, *sites, END])}
        ordered = sorted(self._kept, key=lambda key: (key[0], order[key[1]], key[2] != "", self._kept[key].came))
        return [self._kept[key].row(func, init, self.wanted[key[0]], *key[1:]) for key in ordered]

    def _tally(self, key: _Key, came: Came) -> Tally:
        tally = self._kept.setdefault(key, Tally(came))
        tally.came = min(tally.came, came)
        return tally


def _share(total: float | None, of: float | None) -> float | None:
    return total / of if total is not None and of else None
