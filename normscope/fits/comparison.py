"""What changes from one capture to another: models, data, or the checkpoints of a training, site by site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from normscope.errors import UsageError
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves import BEST, FREE, Curve, curves_named, split_names
from normscope.fits.fit import fit
from normscope.fits.held_out import Without, without_folds
from normscope.fits.levels import Level, levels_of
from normscope.fits.matching import Match, match
from normscope.fits.nodes import nodes_of
from normscope.fits.ratios import Jackknives, Ratio, ratio
from normscope.pairs.captures import Capture
from normscope.pairs.stats import PairStats

_FITTED = (
    *("site", "func", "A", "alpha", "C", "slope", "shift", "r2", "r2_ceiling", "n_pairs"),
    *("folds", "straight", "converged", "nothing"),
)


@dataclass(frozen=True)
class Compared:
    """One curve at one norm site of one of several captures, held against the first of them.

    Attributes:
        number: of the capture, from 1; the others are held against that one.
        counterpart: module path, in the first capture, of the site that this one is held against.
        d: elements of one token there.
        matched: how the two were put side by side, by ``name`` or by ``depth``; None in the first capture.
        fit: of the curve there.
        alpha: α over that of the first; None where one of the two does not bend.
        slope: slope at the origin over that of the first.
        r2_of_first: R², about the mean of y, that the curve fitted in the first capture has on this one's pairs.
    """

    number: int
    counterpart: str
    d: int
    matched: Literal["name", "depth"] | None
    fit: CurveFit
    alpha: Ratio | None = None
    slope: Ratio | None = None
    r2_of_first: float | None = None

    @property
    def r2_lost(self) -> float | None:
        """By how much less the curve of the first capture explains these pairs than their own does."""
        return None if self.r2_of_first is None else self.fit.r2 - self.r2_of_first

    def as_dict(self) -> dict[str, Any]:
        """Return a row of what ``normscope compare --json`` prints; a number that is none becomes None."""
        fitted = self.fit.as_dict()
        row = {"capture": self.number, "counterpart": self.counterpart, "matched": self.matched, "d": self.d}
        row |= {name: fitted[name] for name in _FITTED}
        intervals = dict(fitted["intervals"])
        for name, found in (("alpha_ratio", self.alpha), ("slope_ratio", self.slope)):
            row[name] = found.value if found else None
            row[f"{name}_in_noise"] = found.in_noise if found else None
            if found and found.interval:
                intervals[name] = list(found.interval)
        row["paired"] = next((found.paired for found in (self.alpha, self.slope) if found and found.interval), None)
        return {**row, "r2_of_first": self.r2_of_first, "r2_lost": self.r2_lost, "intervals": intervals}


@dataclass(frozen=True)
class Comparison:
    """Everything that several captures differ in.

    Attributes:
        captures: what is compared.
        fits: of each capture, curves at all of its sites.
        matches: the first capture's sites beside those of every other.
        rows: site by site in the order of the first capture, curve by curve, capture by capture.
    """

    captures: Sequence[Capture]
    fits: Sequence[Sequence[CurveFit]]
    matches: Sequence[Match]
    rows: Sequence[Compared] = field(repr=False)

    def unmatched(self) -> list[dict[str, Any]]:
        """List every site that has no counterpart: its capture, its module path, and the capture that lacks one."""
        return [
            {"capture": capture, "site": site, "lacking_in": lacking}
            for number, one in enumerate(self.matches, 2)
            for capture, lacking, sites in ((1, number, one.unmatched[0]), (number, 1, one.unmatched[1]))
            for site in sites
        ]


def compare(captures: Sequence[Capture], curves: str | Sequence[str | Curve] = "tanh,isru") -> list[Compared]:
    """Hold captures against the first of them: models, data, or the checkpoints of a training.

    Sites are matched by name where the networks are built alike and otherwise by placement and depth, see
    :func:`normscope.fits.matching.match`. Those without a counterpart in any other capture are left out.

    Args:
        captures: two or more.
        curves: names as :func:`normscope.fit` takes them, but not ``best``, which differs from site to site.

    Returns:
        A record for each site of the first capture, curve and capture, in this order; the first capture's own come
        before those that are held against them.

    Raises:
        UsageError: if there are fewer than two captures, no such curve, or no two sites to put side by side.

    The 95 % of a ratio are those of a jackknife of its logarithm, which leaves the same inputs out of both captures,
    where both saw the same tokens of the same samples, with the same seed. Otherwise the captures count as
    independent: the standard errors of both jackknives make (σ₁² + σ₂²)^½ on the log scale, times Student's t for the
    fewer folds of the two.

    >>> import normscope, torch
    >>> from torch import nn
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> seen = [normscope.capture(nn.Sequential(nn.LayerNorm(8)), [scale * x]) for scale in (1, 2)]
    >>> round(compare(seen, "tanh")[1].alpha.value, 3)
    0.5
    """
    names = check_curves(curves)
    check_number(len(captures))
    return list(compared(captures, [fit(capture, names) for capture in captures]).rows)


def check_curves(curves: str | Sequence[str | Curve]) -> list[str | Curve]:
    """Return the curves to compare, as :func:`normscope.fit` takes them; UsageError where there is none of a name."""
    names: list[str | Curve] = list(split_names(curves) if isinstance(curves, str) else curves)
    words = [name.strip().lower() if isinstance(name, str) else "" for name in names]
    if BEST in words:
        raise UsageError(
            "The best curve may be another at every site, so that there would be nothing to compare; name curves."
        )
    curves_named([name for name, word in zip(names, words, strict=True) if word != FREE])
    return names


def check_number(captures: int) -> None:
    """Refuse to compare fewer than two; UsageError."""
    if captures < 2:
        raise UsageError("A comparison takes two or more captures; there is no second one.")


def compared(captures: Sequence[Capture], fits: Sequence[Sequence[CurveFit]]) -> Comparison:
    """Compare captures that were fitted already, see :func:`compare`.

    Args:
        captures: two or more.
        fits: for each, what :func:`normscope.fit` made of it, of the same curves.
    """
    first = captures[0]
    matches = [match(first.sites, other.sites) for other in captures[1:]]
    if not any(one.counterparts for one in matches):
        raise UsageError(
            f"No norm site of {first.about['model']} has a counterpart: no two share their name or their placement."
        )
    base, *beside = (_Seen.of(capture, own) for capture, own in zip(captures, fits, strict=True))
    rows = []
    for site, curve in base.fits:
        others = [
            _against(base, other, number, one.by, (site, one.counterparts[site], curve))
            for number, (other, one) in enumerate(zip(beside, matches, strict=True), 2)
            if site in one.counterparts
        ]
        own = Compared(1, site, base.widths[site], None, base.fits[site, curve])
        rows += [own, *others] if others else []
    return Comparison(captures, fits, matches, rows)


class _Seen(NamedTuple):
    """One capture, by site, and by site and curve."""

    capture: Capture
    fits: dict[tuple[str, str], CurveFit]
    levels: dict[str, Level]
    widths: dict[str, int]
    held: dict[tuple[str, str], Without]

    @classmethod
    def of(cls, capture: Capture, fits: Sequence[CurveFit]) -> _Seen:
        levels = levels_of(capture)
        return cls(
            capture,
            {(found.site, found.curve): found for found in fits},
            {level.site: level for level in levels},
            {site.name: site.d for site in capture.sites},
            without_folds(levels, fits),
        )


def _against(
    first: _Seen, other: _Seen, number: int, by: Literal["name", "depth"], place: tuple[str, str, str]
) -> Compared:
    site, name, curve = place
    base, own = first.fits[site, curve], other.fits[name, curve]
    here, there = first.levels[site], other.levels[name]
    jackknives = Jackknives((_folds(here), _folds(there)))
    if _same_inputs(first.capture.stats[site], other.capture.stats[name]):
        jackknives = replace(jackknives, first=first.held.get((site, curve)), other=other.held.get((name, curve)))
    return Compared(
        number=number,
        counterpart=site,
        d=other.widths[name],
        matched=by,
        fit=own,
        alpha=ratio("alpha", base, own, jackknives) if base.told_apart and own.told_apart else None,
        slope=ratio("slope", base, own, jackknives) if curve != FREE else None,
        r2_of_first=_transferred(base, there),
    )


def _folds(level: Level) -> int:
    return int((level.counts.sum(1) > 0).sum()) if level.fold_by else 0


def _same_inputs(here: PairStats, there: PairStats) -> bool:
    """Whether both saw the same tokens of the same samples, so that their folds are the same too.

    The keys of the drawing sample tell: each is a hash of seed, data set, sample and place, and the least are kept.
    """
    keys = [stats.tokens.key.sort().values for stats in (here, there)]
    return here.fold_by == there.fold_by and torch.equal(*keys)


def _transferred(base: CurveFit, level: Level) -> float | None:
    """R² of a curve on the pairs of another capture."""
    if base.degenerate or level.nothing:
        return None
    nodes = nodes_of(level.moments.sum(0)[None])
    if not float(nodes.total) > 0:
        return None
    return float(1 - nodes.residual(base.extended(nodes.x)) / nodes.total)
