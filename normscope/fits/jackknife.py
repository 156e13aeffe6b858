"""Honest intervals: what a number does when one fold of independent sources is left out, and then another.

Activations of one picture are anything but independent, so that intervals that count pairs are far too narrow.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVEL = 0.95
# Student's t at 97.5 %, for 1, 2, … degrees of freedom: folds are eight at most.
_STUDENT = torch.tensor([torch.nan, 12.70620, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624]).double()


def student(folds: Tensor) -> Tensor:
    """Return how many standard errors make 95 %, of so many folds each; NaN for fewer than two."""
    return _STUDENT[(folds - 1).clamp_min(0)]


def interval(whole: Tensor, without: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Delete-a-fold jackknife for folds of unequal size (Busing, Meijer, van der Leeden 1999, eq. 8).

    Args:
        whole: a number as all pairs give it, ``(problems,)``.
        without: as all pairs but one fold's give it, ``(problems, folds)``.
        pairs: number of pairs of each fold, likewise; zero for a fold that does not count.

    Returns:
        Lower and upper bound of 95 %, ``(problems,)`` each; NaN where fewer than two folds count.

    >>> low, high = interval(torch.tensor([2.0]), torch.tensor([[1.5, 2.5]]), torch.tensor([[10.0, 10.0]]))
    >>> bool(low < 2 < high)
    True
    """
    counts = pairs > 0
    folds = counts.sum(-1)
    share = pairs.sum(-1, keepdim=True) / torch.where(counts, pairs, 1.0)
    left = torch.where(counts, whole[:, None] - without, 0.0)
    # With pseudo-values hθ − (h − 1)θ₋ the mean of all is θ + Σ(1 − 1/h)(θ − θ₋).
    pseudo = whole[:, None] + (share - 1) * left
    centre = whole + ((1 - 1 / share) * left).sum(-1)
    spread = torch.where(counts, (pseudo - centre[:, None]).square() / (share - 1).clamp_min(1e-300), 0.0)
    width = student(folds) * (spread.sum(-1) / folds).sqrt()
    return whole - width, whole + width


def inside_noise(errors: Tensor, best: Tensor, pairs: Tensor) -> Tensor:
    """Say whether the held-out error of one curve passes another's by less than their folds differ.

    Args:
        errors: of each held-out fold, ``(problems, folds)``.
        best: of another curve, likewise.
        pairs: number of pairs of each fold, likewise; zero for a fold that does not count.
    """
    difference = torch.where(pairs > 0, errors - best, 0.0)
    total, number = difference.sum(-1, keepdim=True), pairs.sum(-1, keepdim=True)
    # A pair's difference, as a fold of many pairs would pass for noise by its size alone.
    low, _ = interval((total / number)[:, 0], (total - difference) / (number - pairs), pairs)
    return ~(low > 0)
