"""Which norm site of one network stands where another network's does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from normscope.pairs.sites import NormSite

NAMESAKES = 0.5  # of the sites of the smaller network: where more are shared, the two are built alike


@dataclass(frozen=True)
class Match:
    """Sites of two networks, put side by side.

    Attributes:
        by: ``name``: sites of one module path; or ``depth``: those of one placement, in the order of their calls.
        counterparts: module path in the second network, for each of the first that has a counterpart.
        unmatched: module paths without one, of the first network and of the second.
    """

    by: Literal["name", "depth"]
    counterparts: dict[str, str]
    unmatched: tuple[tuple[str, ...], tuple[str, ...]] = field(default=((), ()))


def match(first: Sequence[NormSite], second: Sequence[NormSite]) -> Match:
    """Put the sites of two networks side by side: by name where they are built alike, otherwise by depth.

    Networks are built alike where over half of the sites of the smaller share their module path with one of the other.
    By depth, the sites of one placement are put side by side in the order of their calls, the first beside the first
    and the last beside the last; where one network has more of them, the others are spread evenly, and some of its own
    remain without a counterpart.

    Args:
        first: sites in the order of their first calls.
        second: likewise.

    >>> from types import SimpleNamespace as Site
    >>> deep = [Site(name=f"block.{n}", placement="pre-norm") for n in range(5)]
    >>> match(deep, [Site(name=f"layer.{n}", placement="pre-norm") for n in range(3)]).counterparts
    {'block.0': 'layer.0', 'block.2': 'layer.1', 'block.4': 'layer.2'}
    """
    here, there = [site.name for site in first], [site.name for site in second]
    shared = set(here) & set(there)
    by_name = len(shared) > NAMESAKES * min(len(here), len(there))
    pairs = {name: name for name in here if name in shared} if by_name else _by_depth(first, second)
    taken = set(pairs.values())
    unmatched = tuple(n for n in here if n not in pairs), tuple(n for n in there if n not in taken)
    return Match("name" if by_name else "depth", pairs, unmatched)


def _by_depth(first: Sequence[NormSite], second: Sequence[NormSite]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for placement in dict.fromkeys(site.placement for site in first):
        here, there = ([s.name for s in sites if s.placement == placement] for sites in (first, second))
        few = min(len(here), len(there))
        pairs |= {here[i]: there[j] for i, j in zip(_spread(few, len(here)), _spread(few, len(there)), strict=True)}
    order = [site.name for site in first]
    return dict(sorted(pairs.items(), key=lambda pair: order.index(pair[0])))


def _spread(few: int, many: int) -> list[int]:
    """Return so few numbers below ``many``, evenly from the first to the last; of one, the middle."""
    if few == 1:
        return [(many - 1) // 2]
    return [round(i * (many - 1) / (few - 1)) for i in range(few)]
