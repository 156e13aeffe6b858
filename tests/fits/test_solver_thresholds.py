"""What is decided by a threshold, and on a scale of its own: against searches over all raw pairs."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import brentq, minimize_scalar

from normscope.curves.known import CURVES
from normscope.fits import ceiling
from normscope.fits.solver import Solutions
from normscope.fits.targets import batches


def least_error(x, y, bounds=(1e-4, 1e3)):
    """The least squared error of A·tanh(αx), and its α, by a scan of α over all raw pairs and scipy's search in it."""

    def error(log_alpha):
        values = np.tanh(math.exp(log_alpha) * x)
        return y @ y - (y @ values) ** 2 / (values @ values)

    scan = np.linspace(*np.log(bounds), 60)
    at = int(np.argmin([error(place) for place in scan]))
    around = scan[max(at - 1, 0)], scan[min(at + 1, len(scan) - 1)]
    found = minimize_scalar(error, bounds=around, method="bounded", options={"xatol": 1e-9})
    return float(found.fun), math.exp(found.x)


def test_the_interval_of_alpha_is_that_of_its_logarithm(solved):
    """A jackknife of log α by scipy: where sources differ, that of α itself is another, and may reach below zero."""
    generator = np.random.default_rng(7)
    folds = np.repeat(np.arange(8), 400)
    x = generator.standard_normal(folds.size)
    steep = np.array([0.3, 0.5, 0.6, 1, 1.5, 2, 4, 9])[folds]
    y = np.tanh(steep * x) + 0.1 * generator.standard_normal(x.size)
    whole = math.log(least_error(x, y)[1])
    without = np.array([math.log(least_error(x[folds != fold], y[folds != fold])[1]) for fold in range(8)])
    error = math.sqrt(7 / 8 * np.sum((without - without.mean()) ** 2))  # of equal folds: Efron and Tibshirani, 11.5
    width = stats.t.ppf(0.975, 7) * error
    low, high = solved(x, y, folds=folds).intervals["alpha"]
    assert (math.log(low), math.log(high)) == pytest.approx((whole - width, whole + width), abs=2e-3)
    assert high - math.exp(whole) > 1.1 * (math.exp(whole) - low)  # far from symmetric on a linear scale


# By rival: the seed, A·tanh(αx) that bends by α, its bounds in log α, the rival itself, and α where it is searched.
RIVALS = {
    "line": (3, lambda bend, x: np.tanh(bend * x) / bend, (math.log(0.03), 0.0), lambda x: x, (1e-3, 10)),
    "step": (4, lambda bend, x: np.tanh(bend * x), (math.log(10), math.log(1e4)), np.sign, (1, 1e5)),
}


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize(("saved", "counts"), [(0.8e-3, False), (1.25e-3, True)])
def test_a_bend_counts_from_a_thousandth_of_the_squared_error_of_the_line_or_step(solved, rival, saved, counts):
    seed, curve, bounds, alone, searched = RIVALS[rival]
    x, noise = np.random.default_rng(seed).standard_normal((2, 20_000))

    def share(log_bend):
        y = curve(math.exp(log_bend), x) + 0.3 * noise
        of_rival = y @ y - (y @ alone(x)) ** 2 / (alone(x) @ alone(x))
        return 1 - least_error(x, y, searched)[0] / of_rival - saved

    found = solved(x, curve(math.exp(brentq(share, *bounds, xtol=1e-5)), x) + 0.3 * noise)
    assert (found.straight, found.converged) == (rival == "line" and not counts, rival == "line" or counts)


@pytest.mark.parametrize("end", ["beyond", "below"])
@pytest.mark.parametrize(("share", "resolved"), [(0.8e-3, True), (1.25e-3, False)])
def test_off_the_grid_counts_from_a_thousandth_of_the_squares(solved, level_of, end, share, resolved):
    """Of y in the bins beyond 2¹⁸, of x in the bin of zero below 2⁻²⁷."""
    generator = np.random.default_rng(5)
    x, noise = generator.standard_normal((2, 8000))
    if end == "beyond":
        x *= 2.0**14
    else:
        x = np.sign(x) * (2.0**-27 + np.abs(x) * 2.0**-27)
    y = np.tanh(x / np.abs(x).mean()) + 0.05 * noise
    squares = y if end == "beyond" else x
    off = 2.0**19 if end == "beyond" else 2.0**-28
    rest = np.sum(squares**2) * share / (1 - share)
    n = 8 if end == "beyond" else round(rest / off**2)
    x = np.append(x, np.full(n, off))
    y = np.append(y, np.full(n, math.sqrt(rest / n) if end == "beyond" else 0.0))
    squares = y if end == "beyond" else x
    assert np.sum(squares[8000:] ** 2) / np.sum(squares**2) == pytest.approx(share, rel=0.05)
    folds = np.arange(len(x)) % 8
    [(_, problems)] = batches([level_of(x, y, folds)])
    assert (ceiling.ceilings(problems) != [None]) == resolved
    if end == "beyond":
        assert solved(x, y, folds=folds).converged == resolved


def test_a_curve_without_bounds_must_lead_by_a_thousandth(level_of, monkeypatch):
    """Of seven sources near the origin it predicts better by half that, and misses the one that reaches far."""
    generator = np.random.default_rng(6)
    folds = np.repeat(np.arange(8), 500)
    x = generator.uniform(-1, 1, folds.size)
    far = folds == 7
    x[far] = generator.choice([-40.0, 40.0], 500)
    bent = np.tanh(0.3 * x) / 0.3
    noise, bend = 0.5 * generator.standard_normal(x.size), np.where(far, 0, bent - x)
    noise -= noise @ bend / (bend @ bend) * bend  # so that the bend costs what it is, whatever the noise
    y = np.where(far, bent, x) + noise
    errors = {name: (y - values) ** 2 for name, values in (("linear", x), ("tanh", bent))}
    near = {name: of[~far].sum() for name, of in errors.items()}
    assert near["linear"] < near["tanh"] < 1.001 * near["linear"]

    def solutions(amplitude, alpha):
        number = torch.ones(8, dtype=torch.float64)
        return Solutions(amplitude * number, alpha * number, 0 * number, number < 0, number > 0)

    fits = [(CURVES["linear"], solutions(1.0, 1.0)), (CURVES["tanh"], solutions(1 / 0.3, 0.3))]
    monkeypatch.setattr(ceiling, "_without_folds", lambda problems: iter(fits))
    [(_, problems)] = batches([level_of(x, y, folds)])
    [top] = ceiling.ceilings(problems)
    assert top.r2 == pytest.approx(1 - errors["tanh"].sum() / np.sum((y - y.mean()) ** 2), abs=2e-3)
