"""Raw pairs as the sums that fits are made of."""

import contextlib
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from captures import moments_of
from scipy.optimize import curve_fit

import normscope
from normscope.curves.known import CURVES
from normscope.fits.form import FitForm
from normscope.fits.jackknife import fitted
from normscope.fits.nodes import batches
from normscope.fits.targets import FitTarget


@pytest.fixture(scope="session")
def by_scipy():
    """Return A, α and, if ``shifted``, s of least (weighted) squared error, by scipy from several starts."""

    def search(f, x, y, weight=None, shifted=False):
        sigma = None if weight is None else 1 / np.sqrt(weight)
        minima = []
        for steepness, centre in itertools.product((0.03, 0.3, 3.0), (0.1, 0.5, 0.9) if shifted else (None,)):
            alpha = steepness / np.median(np.abs(x))
            start = [np.abs(y).max(), alpha, *([-alpha * np.quantile(x, centre)] if shifted else [])]
            with contextlib.suppress(RuntimeError), np.errstate(all="ignore"):  # a start that leads nowhere
                fitted, _ = curve_fit(
                    lambda x, scale, a, s=0.0: scale * f(a * x + s), x, y, start, sigma, xtol=1e-13, ftol=1e-13
                )
                off = y - fitted[0] * f(fitted[1] * x + (fitted[2] if shifted else 0.0))
                minima.append((float(np.sum(off**2 if weight is None else weight * off**2)), *fitted))
        _, amplitude, alpha, *shift = min(minima)
        sign = np.sign(alpha)  # every f here is odd
        return np.array([sign * amplitude, sign * alpha, *(sign * s for s in shift)])

    return search


@pytest.fixture(scope="session")
def embedded(made_on_demand):
    """A capture of each embedded network, of a few of its own inputs."""
    return made_on_demand(lambda name: normscope.capture(normscope.load(name, limit=16)))


@pytest.fixture(scope="session")
def target_of():
    """Make a target of raw pairs, which belong to no folds or to eight."""

    def target(x, y, folds=None, bound=math.inf, slope=math.nan):
        x, y = np.ravel(x), np.ravel(y)
        numbers = np.zeros(x.size, int) if folds is None else np.ravel(folds)
        moments = torch.stack([moments_of(x[numbers == fold], y[numbers == fold]) for fold in range(8)])
        return FitTarget(
            site="norm",
            moments=moments,
            counts=moments[:, 0],
            reach=float(np.abs(x).max()),
            nothing=None,
            fold_by=None if folds is None else "source",
            bound=bound,
            slope=slope,
        )

    return target


@pytest.fixture(scope="session")
def solved(target_of):
    """Fit one curve to raw pairs; return CurveFit's attributes and the squared error over all pairs."""

    def solve(x, y, curve="tanh", form=None, **about):
        form = form or FitForm(shift=False)
        [(_, problems)] = batches([target_of(x, y, **about)])
        [row], _ = fitted(problems, CURVES.get(curve, curve) if isinstance(curve, str) else curve, form)
        return SimpleNamespace(**row, residual=row["rmse"] ** 2 * np.size(x))

    return solve
