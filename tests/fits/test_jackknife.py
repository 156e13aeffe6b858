"""Intervals: the jackknife against its textbook form, and how often it covers the truth, by simulation."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import curve_fit

from normscope.curves.known import CURVES
from normscope.fits import jackknife
from normscope.fits.form import FitForm
from normscope.fits.jackknife import fitted, inside_noise, interval
from normscope.fits.nodes import batches


def test_quantiles_are_students():
    folds = torch.arange(1, 9)
    expected = [math.nan, *stats.t.ppf(0.975, np.arange(1, 8))]
    np.testing.assert_allclose(jackknife.student(folds), expected, rtol=1e-6)


def test_of_equal_folds_a_mean_has_students_interval():
    values = np.random.default_rng(0).standard_normal(8) + 3
    without = (values.sum() - values) / 7
    low, high = interval(torch.tensor([values.mean()]), torch.from_numpy(without)[None], torch.ones(1, 8))
    expected = stats.t.interval(0.95, 7, values.mean(), stats.sem(values))
    assert (float(low), float(high)) == pytest.approx(expected, rel=1e-6)


def test_the_interval_of_alpha_is_that_of_its_logarithm(solved):
    """A jackknife of log α by scipy: where sources differ, that of α itself is another, and may reach below zero."""
    generator = np.random.default_rng(7)
    folds = np.repeat(np.arange(8), 400)
    x = generator.standard_normal(folds.size)
    steep = np.array([0.3, 0.5, 0.6, 1, 1.5, 2, 4, 9])[folds]
    y = np.tanh(steep * x) + 0.1 * generator.standard_normal(x.size)

    def log_alpha(kept):
        (_, alpha), _ = curve_fit(lambda x, a, b: a * np.tanh(b * x), x[kept], y[kept], p0=(1, 1), xtol=1e-12)
        return math.log(alpha)

    whole, without = log_alpha(folds >= 0), np.array([log_alpha(folds != fold) for fold in range(8)])
    error = math.sqrt(7 / 8 * np.sum((without - without.mean()) ** 2))  # of equal folds: Efron and Tibshirani, 11.5
    width = stats.t.ppf(0.975, 7) * error
    low, high = solved(x, y, folds=folds).intervals["alpha"]
    assert (math.log(low), math.log(high)) == pytest.approx((whole - width, whole + width), abs=2e-3)
    assert high - math.exp(whole) > 1.1 * (math.exp(whole) - low)  # far from symmetric on a linear scale


def test_folds_of_unequal_size_weigh_as_much_as_they_hold():
    """Of a mean over pairs, the jackknife's variance is that of a ratio of sums (Cochran, Sampling Techniques, 6.4)."""
    generator = np.random.default_rng(1)
    truth, widths = [], []
    for _ in range(1500):
        sizes = generator.integers(1, 30, 8)
        means = generator.standard_normal(8) / np.sqrt(sizes)
        whole = (sizes @ means) / sizes.sum()
        without = (sizes @ means - sizes * means) / (sizes.sum() - sizes)
        low, high = interval(*(torch.from_numpy(np.atleast_1d(v)) for v in (whole, without[None], sizes[None])))
        truth.append(whole / math.sqrt(1 / sizes.sum()))
        widths.append(float(high - low) / 2 / stats.t.ppf(0.975, 7) / math.sqrt(1 / sizes.sum()))
    # Standard errors, in units of the true one: 1500 draws know their mean square to about 4 %.
    assert np.mean(np.square(truth)) == pytest.approx(1, abs=0.08)
    assert np.mean(np.square(widths)) == pytest.approx(1, abs=0.1)


def test_empty_folds_do_not_count_and_one_is_none():
    whole, without = torch.tensor([1.0, 1.0]).double(), torch.tensor([[0.9, 1.1, 7.0], [5.0, 1.0, 7.0]]).double()
    pairs = torch.tensor([[5.0, 5.0, 0.0], [9.0, 0.0, 0.0]]).double()
    low, high = interval(whole, without, pairs)
    expected = interval(whole[:1], without[:1, :2], pairs[:1, :2])
    assert (float(low[0]), float(high[0])) == pytest.approx([float(bound) for bound in expected])
    assert torch.isnan(low[1]) and torch.isnan(high[1])


@pytest.mark.parametrize("pairs", [[1] * 8, [20, 1, 1, 1, 1, 1, 1, 1], [10, 10, 1, 1, 1, 1, 1, 1]], ids=str)
def test_differences_inside_the_noise_of_the_folds(pairs):
    generator = np.random.default_rng(2)
    pairs = np.array(pairs, float)
    rates = {}
    for lead in (0.0, 3.0):
        best = generator.standard_normal((4000, 8)) + 50
        errors = best + lead * pairs / math.sqrt(pairs.sum()) + np.sqrt(pairs) * generator.standard_normal((4000, 8))
        given = (torch.from_numpy(values) for values in (errors, best, np.broadcast_to(pairs, best.shape).copy()))
        rates[lead] = float(inside_noise(*given).double().mean())
    assert rates[0.0] == pytest.approx(0.975, abs=0.01)  # one side of Student's 95 %
    power = 1 - stats.nct.sf(stats.t.ppf(0.975, 7), 7, 3.0)
    assert rates[3.0] == pytest.approx(power, abs=0.03)


def layer_norm_of(generator, sources, spread, tokens=8, d=32):
    """Pairs of a LayerNorm whose sources differ in scale, and one of whose channels reaches far out."""
    scale = np.exp(spread * generator.standard_normal((sources, 1, 1)))
    scale = scale * np.exp(0.3 * generator.standard_normal((sources, tokens, 1)))
    x = scale * generator.standard_normal((sources, tokens, d))
    x[..., 0] *= 8
    y = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    return x, y, np.broadcast_to((np.arange(sources) % 8)[:, None, None], x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("curve", ["tanh", "isru", "hardtanh"])
def test_intervals_cover_the_truth_in_95_percent(target_of, curve):
    """64 sources a data set; the truth is the fit to 20,000 of them."""
    generator = np.random.default_rng(0)
    [(_, everything)] = batches([target_of(*layer_norm_of(generator, 20_000, 0.2))])
    [truth], _ = fitted(everything, CURVES[curve], FitForm())
    targets = [target_of(*layer_norm_of(generator, 64, 0.2)) for _ in range(200)]
    hits = {name: [] for name in ("amplitude", "alpha", "slope", "r2")}
    known = truth | {"slope": truth["amplitude"] * truth["alpha"]}
    for _, problems in batches(targets):
        rows, _ = fitted(problems, CURVES[curve], FitForm())
        for name, of_name in hits.items():
            of_name += [row["intervals"][name][0] <= known[name] <= row["intervals"][name][1] for row in rows]
    for name, own in hits.items():
        # Of 200 draws at 95 %, fewer than 89 % come once in ten thousand times.
        assert 0.89 <= np.mean(own) <= 0.995, (name, np.mean(own))
