"""How many times larger a number is in one capture than in another, and whether that is more than noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from normscope.fits.curve_fit import CurveFit, Interval
from normscope.fits.held_out import Without
from normscope.fits.jackknife import interval, student


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
        """Whether the interval holds 1; None without an interval."""
        return None if self.interval is None else self.interval[0] <= 1 <= self.interval[1]


@dataclass(frozen=True)
class Jackknives:
    """What is known of how two fits vary.

    Attributes:
        folds: number of folds of the first and of the other; 0 without any.
        first: of the same inputs, the first fit without each fold.
        other: likewise.
    """

    folds: tuple[int, int]
    first: Without | None = None
    other: Without | None = None


def ratio(name: str, base: CurveFit, own: CurveFit, jackknives: Jackknives) -> Ratio | None:
    """Divide ``alpha`` or ``slope`` of a fit by that of the first; None where one of them is none."""
    numbers = getattr(base, name), getattr(own, name)
    if not all(map(math.isfinite, numbers)) or not numbers[0]:
        return None
    value = numbers[1] / numbers[0]
    if value <= 0:
        return Ratio(value, None)
    if jackknives.first and jackknives.other:
        without = getattr(jackknives.other, name) / getattr(jackknives.first, name)
        whole = torch.tensor([value], dtype=torch.float64).log()
        low, high = (float(end.exp()) for end in interval(whole, without.log()[None], jackknives.first.pairs[None]))
        return Ratio(value, (low, high) if math.isfinite(low + high) else None, paired=True)
    folds = jackknives.folds
    errors = [_log_error(one.intervals.get(name), its) for one, its in zip((base, own), folds, strict=True)]
    width = float(student(torch.tensor(min(folds)))) * math.hypot(*errors)
    return Ratio(value, (value * math.exp(-width), value * math.exp(width)) if math.isfinite(width) else None)


def _log_error(interval: Interval | None, folds: int) -> float:
    """Return the standard error of a number's logarithm; NaN where its interval is missing or holds zero."""
    if interval is None or interval[0] * interval[1] <= 0:
        return math.nan
    low, high = interval
    # α's is symmetric on the log scale, where the two agree; the slope's is on its own, as errors propagate.
    return math.log(high / low) / 2 / float(student(torch.tensor(folds)))
