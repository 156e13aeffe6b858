"""Curves with kinks, and shifted curves, against least squares over all raw pairs: α, s, their intervals, and R²."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import curve_fit, minimize

from normscope.curves.known import CURVES
from normscope.fits.form import FitForm
from normscope.fits.jackknife import fitted
from normscope.fits.nodes import batches

KINKED = [curve for curve in CURVES.values() if curve.kinks]
SHIFTED = [curve for curve in CURVES.values() if FitForm().shifted(curve) and curve.bounded and not curve.shifted]


def values_of(curve, u):
    return curve.function(torch.from_numpy(u)).numpy()


def of_raw_pairs(curve, x, y, alpha, shift, shifted):
    """log α and s of least squared error over raw pairs, by a simplex about the law that made them."""

    def error(free):
        values = values_of(curve, math.exp(free[0]) * x + (free[1] if shifted else 0.0))
        return 1 - (y @ values) ** 2 / (values @ values) / (y @ y)

    begin = np.array([math.log(alpha), shift] if shifted else [math.log(alpha)])
    simplices = (np.vstack([begin, begin + side * np.eye(len(begin))]) for side in (0.02, -0.02, 0.1))
    options = {"xatol": 1e-6, "fatol": 1e-13}
    fit = [minimize(error, begin, method="Nelder-Mead", options=options | {"initial_simplex": s}) for s in simplices]
    least = min(fit, key=lambda result: result.fun).x
    return least if shifted else np.array([*least, 0.0])


def jackknifed(whole, without):
    """Interval of 95 % from estimates without each of eight equal folds (Efron and Tibshirani 1993, eq. 11.5)."""
    width = stats.t.ppf(0.975, 7) * math.sqrt(7 / 8 * np.sum((without - np.mean(without)) ** 2))
    return whole - width, whole + width


@pytest.mark.parametrize("curve", KINKED, ids=lambda curve: curve.name)
@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_alpha_and_its_interval_are_those_of_raw_pairs(solved, curve, shift):
    """Two points a bin of 1/16 octave draw a kink between them: α was off by up to 1.5 %, with too narrow intervals."""
    form = FitForm(shift=shift > 0)
    generator = np.random.default_rng(5)
    folds = np.arange(16_000) % 8
    x = generator.standard_normal(folds.size) * np.exp(0.8 * generator.standard_normal(folds.size))
    x = x.astype(np.float32).astype(float)
    y = 2 * np.tanh((0.8 + 0.01 * folds) * x + shift) + 0.3 * generator.standard_normal(x.size)
    fit = solved(x, y, curve, form, folds=folds)
    estimates = [of_raw_pairs(curve, x[of], y[of], fit.alpha, fit.shift, shift > 0) for of in [folds < 8]]
    estimates += [
        of_raw_pairs(curve, x[of], y[of], refit[0], fit.shift, shift > 0)
        for of, refit in zip((folds != fold for fold in range(8)), fit.refits, strict=True)
    ]
    log_alpha, s = np.transpose(estimates)
    assert math.log(fit.alpha) == pytest.approx(log_alpha[0], abs=2e-3)
    assert fit.shift == pytest.approx(s[0], abs=3e-3)
    low, high = jackknifed(log_alpha[0], log_alpha[1:])
    ours = np.log(fit.intervals["alpha"])
    assert 0.8 < (ours[1] - ours[0]) / (high - low) < 1.25


@pytest.mark.parametrize("scale", [1.0, 2 ** (1 / 32)])
def test_alpha_of_a_kink_does_not_depend_on_where_bins_begin(solved, scale):
    """Of the same pairs in other units, α·x is the same."""
    generator = np.random.default_rng(2)
    x = 1.5 * generator.standard_normal(8000)
    y = 3 * np.clip(0.7 * x + 0.4, -1, 1) + 0.2 * generator.standard_normal(x.size)
    log_alpha, s = of_raw_pairs(CURVES["hardtanh"], x, y, 0.7, 0.4, True)
    fit = solved(scale * x, y, "hardtanh", FitForm())
    assert math.log(fit.alpha * scale) == pytest.approx(log_alpha, abs=5e-4)
    assert fit.shift == pytest.approx(s, abs=5e-4)


@pytest.mark.parametrize("curve", SHIFTED, ids=lambda curve: curve.name)
def test_off_centre_laws_are_fitted_as_well_as_by_themselves(target_of, curve):
    """Centres lie within x or beyond, among its tails or on one side of all of it: least squares leaves no more."""
    generator = np.random.default_rng(5)
    pairs, targets = [], []
    for number in range(8):
        x = 10.0 ** generator.uniform(-2, 2) * generator.standard_normal(2000)
        x = x * np.exp((number % 2) * 0.8 * generator.standard_normal(2000))
        x = (np.abs(x) if number % 4 == 3 else x).astype(np.float32).astype(float)
        steep, centre = math.exp(generator.uniform(-1.5, 1.5)), generator.uniform(-3, 3)
        law = values_of(curve, steep * (x / np.quantile(np.abs(x), 0.7) - centre))
        noise = (0.003, 0.05, 0.3)[number % 3] * law.std()
        pairs.append((x, law + noise * generator.standard_normal(x.size), law))
        targets.append(target_of(*pairs[-1][:2]))
    rows = {}
    for numbers, problems in batches(targets):  # bins of x that reaches far are joined
        rows |= zip(numbers, fitted(problems, curve, FitForm())[0], strict=True)
    for number, (x, y, law) in enumerate(pairs):
        row = rows[number]
        off = y - row["amplitude"] * values_of(curve, row["alpha"] * x + row["shift"])
        total = np.sum((y - y.mean()) ** 2)
        assert np.sum(off**2) / total <= 1.02 * np.sum((y - law) ** 2) / total + 1e-5


def test_the_interval_of_the_slope_is_that_at_x_zero(solved):
    """A·α·f′(s) of curve_fit without each fold; that at the curve's centre, A·α, is three times as steep."""
    generator = np.random.default_rng(3)
    folds = np.arange(8000) % 8
    x = generator.standard_normal(folds.size)
    shift = 1.2 + 0.03 * (folds - 3.5)
    y = 2 * np.tanh(0.8 * x + shift) + 0.1 * generator.standard_normal(x.size)

    def slope(of):
        law = lambda x, amplitude, alpha, s: amplitude * np.tanh(alpha * x + s)  # noqa: E731
        (amplitude, alpha, s), _ = curve_fit(law, x[of], y[of], (2, 0.8, 1.2), xtol=1e-12)
        return amplitude * alpha / np.cosh(s) ** 2

    bounds = jackknifed(slope(folds < 8), np.array([slope(folds != fold) for fold in range(8)]))
    assert solved(x, y, "tanh", FitForm(), folds=folds).intervals["slope"] == pytest.approx(bounds, rel=2e-3)
