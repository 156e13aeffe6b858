"""What fits become without one fold, and then another: for numbers that are made of two fits to the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves import FREE
from normscope.fits.forms import Form
from normscope.fits.levels import Level
from normscope.fits.objective import Solutions
from normscope.fits.problems import Problems, batches
from normscope.fits.solve import refined

_FORM = Form()


@dataclass(frozen=True)
class Without:
    """One fit without each of its folds.

    Attributes:
        alpha: α, float64 ``(folds,)``.
        slope: at the origin, likewise.
        pairs: number of pairs of the fold that is left out, likewise; zero where it holds none.
    """

    alpha: Tensor
    slope: Tensor
    pairs: Tensor


def without_folds(levels: Sequence[Level], fits: Sequence[CurveFit]) -> dict[tuple[str, str], Without]:
    """Fit again without each fold, from where the fits to all pairs ended.

    Args:
        levels: the sites of a capture.
        fits: what :func:`normscope.fit` made of it; those of another form than its default are left out.

    Returns:
        By site and curve, for every level with folds.
    """
    by_place = {(found.site, found.curve): found for found in fits}
    curves = {found.curve: found.function for found in fits if found.curve != FREE}
    held = {}
    for _, problems in batches([level for level in levels if level.fold_by]):
        for name, curve in curves.items():
            own = [by_place.get((level.site, name)) for level in problems.levels]
            known = [found for found in own if found is not None and found.form == _FORM.words(curve)]
            if len(known) == len(problems):
                for level, one in zip(problems.levels, _without(problems, known), strict=True):
                    held[level.site, name] = one
    return held


def _without(problems: Problems, fits: Sequence[CurveFit]) -> list[Without]:
    """Fit one curve to each problem without each of its folds."""
    curve = fits[0].function
    constraints = _FORM.constraints(curve, problems.levels)
    every = torch.arange(len(problems)).repeat_interleave(problems.folds)
    without = problems.without_folds(odd=curve.zero_centred and not constraints.shifted)
    others = refined(without, curve, constraints.of(every), _solutions(fits).of(every))
    slope = others.amplitude * others.alpha * curve.derivative(others.shift)
    columns = (others.alpha, slope, torch.where(problems.occupied, problems.n_pairs, 0.0))
    return [Without(*row) for row in zip(*(column.view(-1, problems.folds) for column in columns), strict=True)]


def _solutions(fits: Sequence[CurveFit]) -> Solutions:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(found, name) for found in fits])

    amplitude, alpha, shift = (column(name).double() for name in ("amplitude", "alpha", "shift"))
    residual = torch.full_like(alpha, torch.nan)
    only_power = column("straight") | column("power_law")
    return Solutions(amplitude, alpha, shift, residual, only_power, column("converged"))
