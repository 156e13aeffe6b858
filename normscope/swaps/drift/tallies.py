"""Distances of swaps over all batches and ranks, as rows of a drift report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normscope.pairs.ranks import Ranks
from normscope.swaps.distances import Distances
from normscope.swaps.reports import END, OUTPUT, Drift, Quantiles, Swapped

_FOR_ALL = ("left_out", "frames")  # columns that do not have one element per compared sample
_Key = tuple[int, str, str]  # number of the configuration, where it was measured, and the part of the data
_Columns = dict[str, Tensor]  # by name in Distances


@dataclass(frozen=True)
class Configuration:
    """Sites that are swapped together.

    ``swapped`` and ``site`` are as in :class:`normscope.swaps.reports.Drift`; ``paths`` are all swapped sites.
    """

    swapped: Swapped
    site: str | None
    paths: tuple[str, ...]


@dataclass
class Tallies:
    """Distances of several configurations, batch after batch.

    Results do not depend on how ranks divide the batches: quantiles ignore order, and sums use ``math.fsum``.
    """

    configurations: Sequence[Configuration]  # in the order of their rows
    _batches: dict[_Key, list[tuple[tuple[int, int], _Columns]]] = field(default_factory=dict)  # with their numbers

    def add(self, configuration: Configuration, at: str, part: str, moved: Distances, number: tuple[int, int]) -> None:
        """Add the distances of a batch; ``number`` is that of its chunk among all ranks, and of the batch in it."""
        columns = {
            name: values if name in _FOR_ALL else values[~moved.left_out]
            for name, values in vars(moved).items()
            if values is not None
        }
        key = self.configurations.index(configuration), at, part
        self._batches.setdefault(key, []).append((number, columns))

    def gathered(self, ranks: Ranks) -> Tallies:
        """Merge the tallies of all ranks; every rank calls it, also one without a batch."""
        if ranks.size == 1:
            return self
        mine = [
            (key, self._first(key), {name: values.tolist() for name, values in self._columns(key).items()})
            for key in self._batches
        ]
        merged = Tallies(self.configurations)
        for key, number, lists in itertools.chain.from_iterable(ranks.gather(mine)):
            columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in lists.items()}
            merged._batches.setdefault(tuple(key), []).append((tuple(number), columns))
        return merged

    def rows(self, sites: Sequence[str]) -> list[Drift]:
        """Return quantiles and shares: by configuration, by place in the order of the sites, by part as they came."""
        order = {at: number for number, at in enumerate([OUTPUT, *sites, END])}
        keys = sorted(self._batches, key=lambda key: (key[0], order[key[1]], key[2] != "", self._first(key)))
        return [self._row(*key) for key in keys]

    def _first(self, key: _Key) -> tuple[int, int]:
        return min(number for number, _ in self._batches[key])

    def _columns(self, key: _Key) -> _Columns:
        batches = [columns for _, columns in self._batches[key]]
        return {name: torch.cat([columns[name] for columns in batches]).double() for name in batches[0]}

    def _row(self, number: int, at: str, part: str) -> Drift:
        columns = {name: values.tolist() for name, values in self._columns((number, at, part)).items()}
        answers = math.fsum(columns["answers"]) if "answers" in columns else None
        optional: dict[str, Any] = {}
        if answers:
            shares = [name for name in ("top1", "top5", "top5_overlap") if name in columns]
            optional = {name: math.fsum(columns[name]) / answers for name in shares}
            optional["kl"] = Quantiles.of(columns["kl"])
        if "frames" in columns:
            optional["frames"] = Quantiles.of(columns["frames"])
        configuration = self.configurations[number]
        return Drift(
            *("", ""),  # of the curve and the start values, which drift() adds
            configuration.swapped,
            configuration.site,
            len(configuration.paths),
            at,
            part,
            inputs=len(columns["relative_l2"]),
            nonfinite=int(sum(columns["nonfinite"])),
            left_out=int(sum(columns["left_out"])),
            relative_l2=Quantiles.of(columns["relative_l2"]),
            cosine=Quantiles.of(columns["cosine"]),
            answers=None if answers is None else int(answers),
            **optional,
        )
