"""Differences between captures, site by site: between models, data, or the checkpoints of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from normscope.curves.known import BEST, FREE, Curve
from normscope.errors import UsageError
from normscope.fits.curve_fit import CurveFit
from normscope.fits.fit import fit, requested_curves
from normscope.fits.form import FitForm
from normscope.fits.jackknife import Interval, interval, student
from normscope.fits.nodes import nodes_of
from normscope.fits.saturation import with_modules
from normscope.fits.targets import FitTarget, as_capture, fit_targets
from normscope.norms.sites import NormSite
from normscope.pairs.captures import Capture
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import Records, Tabled, as_json

_IN_BLOCKS: set[str | None] = {"pre-norm", "post-norm"}
NAMESAKES = 0.5  # of the sites of the smaller network: networks that share more are built alike


@dataclass(frozen=True)
class Match:
    """Matched sites of two networks, by their module paths."""

    by: Literal["name", "depth"]
    counterparts: dict[str, str]  # in the second network, for each of the first that has one
    unmatched: tuple[tuple[str, ...], tuple[str, ...]]  # in the first network and in the second


def match(first: Sequence[NormSite], second: Sequence[NormSite]) -> Match:
    """Match the sites of two networks, in the order of calls: by name if they are built alike, otherwise by depth.

    Networks are built alike if over half of the sites of the smaller share their module path with one of the other.
    By depth, the sites of one placement are matched in order, the first with the first and the last with the last. If
    one network has more of them, the matched ones are spread evenly. Where one network is pre-norm and the other
    post-norm, these count as one placement.

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
    here, there = ({site.placement for site in sites} for sites in (first, second))
    opposed = _IN_BLOCKS.isdisjoint(here & there)
    pairs: dict[str, str] = {}
    for placement in here | there:
        alike = _IN_BLOCKS if opposed and placement in _IN_BLOCKS else {placement}
        ours, theirs = ([site.name for site in sites if site.placement in alike] for sites in (first, second))
        few = min(len(ours), len(theirs))
        pairs |= {ours[i]: theirs[j] for i, j in zip(_evenly(few, len(ours)), _evenly(few, len(theirs)), strict=True)}
    return {site.name: pairs[site.name] for site in first if site.name in pairs}


def _evenly(few: int, many: int) -> list[int]:
    """Numbers below ``many``, evenly from the first to the last; the middle if ``few`` is 1."""
    if few == 1:
        return [(many - 1) // 2]
    return [round(i * (many - 1) / (few - 1)) for i in range(few)]


@dataclass(frozen=True)
class Ratio:
    """A number of one capture over that of the first."""

    value: float
    interval: Interval | None  # 95 %; None if one of the two has none
    paired: bool = False  # by a jackknife that leaves the same inputs out of both captures

    @property
    def in_noise(self) -> bool | None:
        """True if the interval contains 1; None without an interval."""
        return None if self.interval is None else self.interval[0] <= 1 <= self.interval[1]


_FITTED = (
    *("site", "curve", "amplitude", "alpha", "C", "slope", "shift", "r2", "r2_cv", "r2_ceiling"),
    *("n_pairs", "folds", "straight", "converged", "saturated", "nothing"),
)


@dataclass(frozen=True, repr=False)
class Compared(Tabled):
    """One curve at one norm site of a capture, compared with the first capture.

    Attributes:
        number: of the capture, from 1.
        counterpart: module path of the matching site in the first capture.
        d, fit: elements of one token, and the fit of the curve.
        matched: ``name`` or ``depth``, see :class:`Match`; None in the first capture.
        alpha: α over that of the first; None if one of the two does not bend.
        slope: slope at the origin over that of the first.
        r2_of_first: R², about the mean of y, of the first capture's curve on this one's pairs.
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
        """Module path of the site."""
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
        """Return a row of ``normscope compare --json``; a number that is not finite is None."""
        fitted = self.fit.as_dict()
        row = {"capture": self.number, "counterpart": self.counterpart, "matched": self.matched, "d": self.d}
        row |= {name: fitted[name] for name in _FITTED}
        ratios = {"alpha_ratio": self.alpha, "slope_ratio": self.slope}
        for name, ratio in ratios.items():
            row |= {name: ratio and ratio.value, f"{name}_in_noise": ratio and ratio.in_noise}
        bounded = {name: ratio for name, ratio in ratios.items() if ratio and ratio.interval}
        row["paired"] = next((ratio.paired for ratio in bounded.values()), None)
        row |= {"r2_of_first": self.r2_of_first, "r2_lost": self.r2_lost}
        row["intervals"] = fitted["intervals"] | {name: ratio.interval for name, ratio in bounded.items()}
        return {name: as_json(value) for name, value in row.items()}


@dataclass(frozen=True)
class Comparison:
    """Several captures, compared with the first."""

    captures: Sequence[Capture]
    fits: Sequence[Sequence[CurveFit]]  # of each capture
    matches: Sequence[Match]  # of the first capture with each other
    rows: Sequence[Compared] = field(repr=False)  # by site of the first capture, curve and capture

    def unmatched(self) -> list[dict[str, Any]]:
        """List every site without a counterpart: its capture, its module path, and the capture that lacks one."""
        return [
            {"capture": capture, "site": site, "lacking_in": lacking}
            for number, matching in enumerate(self.matches, 2)
            for capture, lacking, sites in ((1, number, matching.unmatched[0]), (number, 1, matching.unmatched[1]))
            for site in sites
        ]


def compare(
    captures: Sequence[Capture], curves: str | Sequence[str | Curve] = "tanh,isru", *, shift: bool = True
) -> Records[Compared]:
    """Compare captures with the first of them: models, data, or the checkpoints of a training.

    Sites are matched by name if the networks are built alike and otherwise by placement and depth, see
    :func:`normscope.fits.comparison.match`. Sites without a counterpart in any other capture are left out.

    Args:
        captures: two or more.
        curves: names as of :func:`normscope.fit`, but not ``best``, which differs from site to site.
        shift: fit s in A·f(αx + s).

    Returns:
        A record for each site of the first capture, curve and capture, in this order, the first capture included.

    Raises:
        UsageError: if there are fewer than two captures, no such curve, or no two sites that match.

    The interval of a ratio is a jackknife of its logarithm. It leaves the same inputs out of both captures if both saw
    the same tokens of the same samples, with the same seed. Otherwise the captures count as independent: with the
    standard errors of both jackknives, it is (σ₁² + σ₂²)^½ on the log scale, times Student's t for the fewer folds.

    >>> import normscope, torch
    >>> from torch import nn
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> seen = [normscope.capture(nn.Sequential(nn.LayerNorm(8)), [scale * x]) for scale in (1, 2)]
    >>> round(compare(seen, "tanh")[1].alpha.value, 3)
    0.5
    """
    names = check_curves(curves)
    several = captures if isinstance(captures, (list, tuple)) else [captures]
    captures = [as_capture(capture, "compare") for capture in several]
    check_number(len(captures))
    return Records(compared(captures, [fit(capture, names, shift=shift) for capture in captures]).rows)


def check_curves(curves: str | Sequence[str | Curve]) -> list[str | Curve]:
    """Return the curves to compare, as :func:`normscope.fit` takes them; UsageError if there is none of a name."""
    requested = requested_curves(curves, FitForm())
    if BEST in requested:
        raise UsageError(
            "The best curve may be another at every site, so that there would be nothing to compare; name curves."
        )
    return requested


def check_number(captures: int) -> None:
    """Raise UsageError for fewer than two captures."""
    if captures < 2:
        raise UsageError("A comparison takes two or more captures; there is no second one.")


def compared(captures: Sequence[Capture], fits: Sequence[Sequence[CurveFit]]) -> Comparison:
    """Compare captures by the fits of the same curves to each, see :func:`compare`."""
    first = captures[0]
    matches = [match(first.sites, capture.sites) for capture in captures[1:]]
    if not any(matching.counterparts for matching in matches):
        raise UsageError(
            f"No norm site of {first.about['model']} has a counterpart: no two share their name or their placement."
        )
    base, *later = (
        _observed(capture, with_modules(capture, capture_fits))
        for capture, capture_fits in zip(captures, fits, strict=True)
    )
    rows = []
    for (site, curve), here in base.items():
        compared_rows = []
        for number, (observed, matching) in enumerate(zip(later, matches, strict=True), 2):
            there = observed.get((matching.counterparts.get(site, ""), curve))
            compared_rows += [_against(here, there, number, matching.by)] if there else []
        rows += [Compared(1, site, here.d, None, here.fit), *compared_rows] if compared_rows else []
    return Comparison(captures, fits, matches, rows)


@dataclass(frozen=True)
class _Observed:
    """One curve at one site of a capture."""

    fit: CurveFit
    target: FitTarget
    stats: PairStats
    d: int

    @property
    def pairs(self) -> Tensor:
        """Number of pairs in each fold, ``(1, folds)``; zero without folds."""
        return self.target.counts.sum(1)[None] * (self.target.fold_by is not None)

    @property
    def folds(self) -> int:
        return int((self.pairs > 0).sum())


def _observed(capture: Capture, fits: Sequence[CurveFit]) -> dict[tuple[str, str], _Observed]:
    targets = {target.site: target for target in fit_targets(capture)}
    widths = {site.name: site.d for site in capture.sites}
    return {
        (fit.site, fit.curve): _Observed(fit, targets[fit.site], capture.stats[fit.site], widths[fit.site])
        for fit in fits
    }


def _against(first: _Observed, second: _Observed, number: int, by: Literal["name", "depth"]) -> Compared:
    bend = first.fit.identified and second.fit.identified
    return Compared(
        number=number,
        counterpart=first.fit.site,
        d=second.d,
        matched=by,
        fit=second.fit,
        alpha=_ratio("alpha", first, second) if bend else None,
        slope=_ratio("slope", first, second) if first.fit.curve != FREE else None,
        r2_of_first=_transferred(first.fit, second.target),
    )


def _ratio(name: str, first: _Observed, second: _Observed) -> Ratio | None:
    """Ratio of ``alpha`` or ``slope``; None if either is not finite."""
    numbers = getattr(first.fit, name), getattr(second.fit, name)
    if not all(map(math.isfinite, numbers)) or not numbers[0]:
        return None
    value = numbers[1] / numbers[0]
    if value <= 0:
        return Ratio(value, None)
    folds = torch.tensor([first.folds, second.folds])
    if first.fit.refits and second.fit.refits and folds.all() and _same_inputs(first.stats, second.stats):
        refits = (torch.tensor(observed.fit.refits, dtype=torch.float64) for observed in (first, second))
        here, there = (alpha_and_slope[:, int(name == "slope")] for alpha_and_slope in refits)
        whole = torch.tensor([value], dtype=torch.float64).log()
        low, high = (float(end.exp()) for end in interval(whole, (there / here).log()[None], first.pairs))
        return Ratio(value, (low, high) if math.isfinite(low + high) else None, paired=True)
    width = float(student(folds.min())) * math.hypot(_log_error(name, first), _log_error(name, second))
    return Ratio(value, (value * math.exp(-width), value * math.exp(width)) if math.isfinite(width) else None)


def _log_error(name: str, observed: _Observed) -> float:
    """Standard error of a number's logarithm; NaN if its interval is missing or contains zero."""
    low, high = observed.fit.intervals.get(name, (math.nan, math.nan))
    if not low * high > 0:
        return math.nan
    # α's interval is symmetric on the log scale; the slope's on its own, where errors propagate likewise.
    return math.log(high / low) / 2 / float(student(torch.tensor(observed.folds)))


def _same_inputs(here: PairStats, there: PairStats) -> bool:
    """True if both contain the same tokens of the same samples, and so the same folds.

    A key of the drawing sample is a hash of seed, data set, sample and place; the least keys are kept.
    """
    keys = [stats.tokens.key.sort().values for stats in (here, there)]
    return here.fold_by == there.fold_by and torch.equal(*keys)


def _transferred(first: CurveFit, target: FitTarget) -> float | None:
    """R² of a curve on the pairs of another capture."""
    if first.degenerate or target.nothing:
        return None
    nodes = nodes_of(target.moments.sum(0)[None])
    return float(1 - nodes.residual(first.extended(nodes.x)) / nodes.total)
