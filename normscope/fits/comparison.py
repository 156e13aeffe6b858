"""Differences between captures, site by site: between models, data, or the checkpoints of a training."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.expressions import split_names
from normscope.fits.curves.known import BEST, FREE, Curve
from normscope.fits.fit import check_fit, fit
from normscope.fits.jackknife import Interval, interval, student
from normscope.fits.solver import FitForm, Solutions, refined
from normscope.fits.targets import FitBatch, FitTarget, batches, fit_targets, nodes_of
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import Records, Tabled, as_json

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
    counterparts = set(pairs.values())
    unmatched = tuple(n for n in here if n not in pairs), tuple(n for n in there if n not in counterparts)
    return Match("name" if by_name else "depth", pairs, unmatched)


def _by_depth(first: Sequence[NormSite], second: Sequence[NormSite]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for placement in dict.fromkeys(site.placement for site in first):
        here, there = ([s.name for s in sites if s.placement == placement] for sites in (first, second))
        few = min(len(here), len(there))
        pairs |= {here[i]: there[j] for i, j in zip(_evenly(few, len(here)), _evenly(few, len(there)), strict=True)}
    order = [site.name for site in first]
    return dict(sorted(pairs.items(), key=lambda pair: order.index(pair[0])))


def _evenly(few: int, many: int) -> list[int]:
    """A few numbers below ``many``, evenly from the first to the last; of one, the middle."""
    if few == 1:
        return [(many - 1) // 2]
    return [round(i * (many - 1) / (few - 1)) for i in range(few)]


@dataclass(frozen=True)
class Ratio:
    """A number of one capture over that of the first.

    Attributes:
        value: the ratio.
        interval: its 95 %; None where one of the two has none.
        paired: whether the interval is that of the ratio itself as the same inputs are left out of both captures;
            otherwise they count as independent.
    """

    value: float
    interval: Interval | None
    paired: bool = False

    @property
    def in_noise(self) -> bool | None:
        """True if the interval contains 1; None without an interval."""
        return None if self.interval is None else self.interval[0] <= 1 <= self.interval[1]


Refits = dict[str, Tensor]  # alpha and slope without each fold, and pairs of that fold, float64 ``(folds,)``


def ratio(
    name: str, base: CurveFit, other: CurveFit, folds: tuple[int, int], refits: tuple[Refits, Refits] | None
) -> Ratio | None:
    """Ratio of a fit's ``alpha`` or ``slope`` to that of the first; None where either is not finite.

    Args:
        name: of the two.
        base: the first fit.
        other: another.
        folds: number of folds of each; 0 without any.
        refits: of fits to the same inputs, each without its folds; None where inputs differ.
    """
    numbers = getattr(base, name), getattr(other, name)
    if not all(map(math.isfinite, numbers)) or not numbers[0]:
        return None
    value = numbers[1] / numbers[0]
    if value <= 0:
        return Ratio(value, None)
    if refits:
        first, second = refits
        whole, without = torch.tensor([value], dtype=torch.float64).log(), (second[name] / first[name]).log()
        low, high = (float(end.exp()) for end in interval(whole, without[None], first["pairs"][None]))
        return Ratio(value, (low, high) if math.isfinite(low + high) else None, paired=True)
    errors = [_log_error(each.intervals.get(name), number) for each, number in zip((base, other), folds, strict=True)]
    width = float(student(torch.tensor(min(folds)))) * math.hypot(*errors)
    return Ratio(value, (value * math.exp(-width), value * math.exp(width)) if math.isfinite(width) else None)


def _log_error(interval: Interval | None, folds: int) -> float:
    """Standard error of a number's logarithm; NaN where its interval is missing or holds zero."""
    if interval is None or interval[0] * interval[1] <= 0:
        return math.nan
    low, high = interval
    # α's is symmetric on the log scale, where the two agree; the slope's is on its own, as errors propagate.
    return math.log(high / low) / 2 / float(student(torch.tensor(folds)))


_FITTED = (
    *("site", "curve", "amplitude", "alpha", "C", "slope", "shift", "r2", "r2_ceiling", "n_pairs"),
    *("folds", "straight", "converged", "nothing"),
)


@dataclass(frozen=True, repr=False)
class Compared(Tabled):
    """One curve at one norm site of a capture, compared with the first capture.

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
    def site(self) -> str:
        """Module path of the first capture's site."""
        return self.fit.site

    @property
    def curve(self) -> str:
        """Name of the curve."""
        return self.fit.curve

    @property
    def r2_lost(self) -> float | None:
        """Loss of R² on these pairs with the first capture's curve in place of their own."""
        return None if self.r2_of_first is None else self.fit.r2 - self.r2_of_first

    def as_dict(self) -> dict[str, Any]:
        """A row of ``normscope compare --json``; a number that is none becomes None."""
        fitted = self.fit.as_dict()
        row = {"capture": self.number, "counterpart": self.counterpart, "matched": self.matched, "d": self.d}
        row |= {name: fitted[name] for name in _FITTED}
        ratios = {"alpha_ratio": self.alpha, "slope_ratio": self.slope}
        for name, over_first in ratios.items():
            row |= {name: over_first and over_first.value, f"{name}_in_noise": over_first and over_first.in_noise}
        bounded = {name: over_first for name, over_first in ratios.items() if over_first and over_first.interval}
        row["paired"] = next((over_first.paired for over_first in bounded.values()), None)
        row |= {"r2_of_first": self.r2_of_first, "r2_lost": self.r2_lost}
        row["intervals"] = fitted["intervals"] | {name: over_first.interval for name, over_first in bounded.items()}
        return {name: as_json(value) for name, value in row.items()}


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
        """Every site that has no counterpart: its capture, its module path, and the capture that lacks one."""
        return [
            {"capture": capture, "site": site, "lacking_in": lacking}
            for number, each in enumerate(self.matches, 2)
            for capture, lacking, sites in ((1, number, each.unmatched[0]), (number, 1, each.unmatched[1]))
            for site in sites
        ]


def compare(captures: Sequence[Capture], curves: str | Sequence[str | Curve] = "tanh,isru") -> Records[Compared]:
    """Compare captures with the first of them: models, data, or the checkpoints of a training.

    Sites are matched by name where the networks are built alike and otherwise by placement and depth, see
    :func:`normscope.fits.comparison.match`. Those without a counterpart in any other capture are left out.

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
    return Records(compared(captures, [fit(capture, names) for capture in captures]).rows)


def check_curves(curves: str | Sequence[str | Curve]) -> list[str | Curve]:
    """The curves to compare, as :func:`normscope.fit` takes them; UsageError where there is none of a name."""
    names: list[str | Curve] = list(split_names(curves) if isinstance(curves, str) else curves)
    if BEST in [name.strip().lower() for name in names if isinstance(name, str)]:
        raise UsageError(
            "The best curve may be another at every site, so that there would be nothing to compare; name curves."
        )
    check_fit(names)
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
    if not any(each.counterparts for each in matches):
        raise UsageError(
            f"No norm site of {first.about['model']} has a counterpart: no two share their name or their placement."
        )
    base, *beside = (_SeenCapture(capture, of_capture) for capture, of_capture in zip(captures, fits, strict=True))
    rows = []
    for site, curve in base.fits:
        others = [
            _against(base, other, number, each.by, (site, each.counterparts[site], curve))
            for number, (other, each) in enumerate(zip(beside, matches, strict=True), 2)
            if site in each.counterparts
        ]
        first_row = Compared(1, site, base.widths[site], None, base.fits[site, curve])
        rows += [first_row, *others] if others else []
    return Comparison(captures, fits, matches, rows)


class _SeenCapture:
    """One capture, by site, and by site and curve."""

    def __init__(self, capture: Capture, fits: Sequence[CurveFit]) -> None:
        self.stats = capture.stats
        self.fits = {(each.site, each.curve): each for each in fits}
        self.levels = {level.site: level for level in fit_targets(capture)}
        self.widths = {site.name: site.d for site in capture.sites}
        self.refits: dict[tuple[str, str], Refits] = {}
        default = [each for each in fits if each.curve != FREE and each.form == FitForm().words(each.function)]
        for _, problems in batches([level for level in self.levels.values() if level.fold_by]):
            for curve in dict.fromkeys(each.curve for each in default):
                of_sites = [self.fits[level.site, curve] for level in problems.levels]
                self.refits |= {(each.site, curve): refits for each, refits in _without_folds(problems, of_sites)}


def _without_folds(problems: FitBatch, fits: Sequence[CurveFit]) -> Iterator[tuple[CurveFit, Refits]]:
    """Fit one curve to each problem without each of its folds, beginning at the fits to all pairs."""
    curve, form = fits[0].function, FitForm()
    odd = form.odd(curve)

    def column(of: Callable[[CurveFit], float]) -> Tensor:
        return torch.tensor([of(each) for each in fits]).repeat_interleave(problems.folds)

    amplitude, alpha, shift = (column(operator.attrgetter(name)).double() for name in ("amplitude", "alpha", "shift"))
    only_power = column(lambda each: each.straight or each.power_law)
    near = Solutions(amplitude, alpha, shift, only_power, column(lambda each: each.converged))
    objective = form.objective(problems.without_folds(odd=odd), curve, problems.levels)
    others = refined(objective, near, problems.rough_without_folds(odd=odd))
    slope = others.amplitude * others.alpha * curve.derivative(others.shift)
    pairs = torch.where(problems.occupied, problems.n_pairs, 0.0)
    columns = [others.alpha.view_as(pairs), slope.view_as(pairs), pairs]
    for each, *values in zip(fits, *columns, strict=True):
        yield each, dict(zip(("alpha", "slope", "pairs"), values, strict=True))


def _against(
    first: _SeenCapture, other: _SeenCapture, number: int, by: Literal["name", "depth"], place: tuple[str, str, str]
) -> Compared:
    site, name, curve = place
    base, beside = first.fits[site, curve], other.fits[name, curve]
    here, there = first.levels[site], other.levels[name]
    refitted = (site, curve) in first.refits and (name, curve) in other.refits
    same = refitted and _same_inputs(first.stats[site], other.stats[name])
    refits = (first.refits[site, curve], other.refits[name, curve]) if same else None
    how = (base, beside, (_folds(here), _folds(there)), refits)
    return Compared(
        number=number,
        counterpart=site,
        d=other.widths[name],
        matched=by,
        fit=beside,
        alpha=ratio("alpha", *how) if base.told_apart and beside.told_apart else None,
        slope=ratio("slope", *how) if curve != FREE else None,
        r2_of_first=_transferred(base, there),
    )


def _folds(level: FitTarget) -> int:
    return int((level.counts.sum(1) > 0).sum()) if level.fold_by else 0


def _same_inputs(here: PairStats, there: PairStats) -> bool:
    """True if both contain the same tokens of the same samples, and so the same folds.

    The keys of the drawing sample tell: each is a hash of seed, data set, sample and place, and the least are kept.
    """
    keys = [stats.tokens.key.sort().values for stats in (here, there)]
    alike = (here.fold_by, here.sources.assignment) == (there.fold_by, there.sources.assignment)
    return alike and torch.equal(*keys)


def _transferred(base: CurveFit, level: FitTarget) -> float | None:
    """R² of a curve on the pairs of another capture."""
    if base.degenerate or level.nothing:
        return None
    nodes = nodes_of(level.moments.sum(0)[None])
    if not float(nodes.total) > 0:
        return None
    return float(1 - nodes.residual(base.extended(nodes.x)) / nodes.total)
