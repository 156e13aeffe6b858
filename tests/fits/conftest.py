"""Raw pairs as the sums that fits are made of."""

import math

import numpy as np
import pytest
import torch

from normscope.fits.curves import CURVES
from normscope.fits.forms import Form
from normscope.fits.levels import Level
from normscope.fits.problems import batches
from normscope.fits.search import fitted
from normscope.pairs.binning import PAIR_GRID


@pytest.fixture(scope="session")
def moments_of():
    """Bin raw pairs, as float32 holds x: ``(6, bins)``."""

    def moments(x, y, grid=PAIR_GRID):
        x, y = np.asarray(x, np.float32), np.asarray(y, float)
        bins = grid.index(torch.from_numpy(x)).numpy()
        x = x.astype(float)
        weights = (None, x, y, x * x, x * y, y * y)
        return torch.stack([torch.from_numpy(np.bincount(bins, w, grid.size)).double() for w in weights])

    return moments


@pytest.fixture(scope="session")
def level_of(moments_of):
    """Make a level of raw pairs, which belong to no folds or to eight."""

    def level(x, y, folds=None, bound=math.inf, slope=math.nan):
        x, y = np.ravel(x), np.ravel(y)
        numbers = np.zeros(x.size, int) if folds is None else np.ravel(folds)
        moments = torch.stack([moments_of(x[numbers == fold], y[numbers == fold]) for fold in range(8)])
        return Level(
            site="norm",
            sites=(),
            channel=None,
            moments=moments,
            counts=moments[:, 0],
            grid=PAIR_GRID,
            fold_by=None if folds is None else "source",
            reach=float(np.abs(x).max()),
            bound=bound,
            slope=slope,
            nothing=None,
        )

    return level


@pytest.fixture(scope="session")
def solved(level_of):
    """Fit one curve to raw pairs; return amplitude, alpha, shift, residual, straight and converged as attributes."""

    def solve(x, y, curve="tanh", form=None, **level):
        form = form or Form(shift=False)
        [(_, problems)] = batches([level_of(x, y, **level)])
        found = fitted(problems, CURVES.get(curve, curve) if isinstance(curve, str) else curve, form)
        return _Solved(found)

    return solve


class _Solved:
    def __init__(self, found):
        self.fitted = found
        for name in ("amplitude", "alpha", "shift", "residual"):
            setattr(self, name, float(getattr(found.solutions, name)[0]))
        self.straight, self.converged = bool(found.solutions.straight[0]), bool(found.solutions.converged[0])
        self.r2, self.rmse = float(found.goodness.r2[0]), float(found.goodness.rmse[0])
        self.intervals = {name: (float(low[0]), float(high[0])) for name, (low, high) in found.intervals.items()}
