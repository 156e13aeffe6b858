"""Fits against scipy on all raw pairs, against curves that are known, and what is said where there is no curve."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import curve_fit
from torch import nn

import normscope
from normscope.fits.curves import CURVES
from normscope.fits.goodness import ceiling, conditional_mean
from normscope.fits.nodes import nodes_of, unresolved
from normscope.fits.solve import least_squares
from normscope.pairs.binning import PAIR_GRID

NUMPY = {"tanh": np.tanh, "isru": lambda u: u / np.sqrt(1 + u * u)}


def heavy_tailed_batches(count=2, seed=0):
    """Tokens of very different σ, and two channels that reach far out: what makes an S."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        x = torch.randn(16, 50, 128, generator=generator) * torch.exp(0.8 * torch.randn(16, 50, 1, generator=generator))
        x[..., 7] *= 20
        x[..., 9] *= -8
        batches.append(x)
    return batches


@pytest.fixture(scope="module")
def observed():
    """A capture, and all of its raw pairs."""
    pairs = {}
    model = nn.ModuleDict({"ln": nn.LayerNorm(128), "rms": nn.RMSNorm(128, eps=1e-6)})
    model.forward = lambda x: (model["ln"](x), model["rms"](x * 1e-3))
    seen = normscope.capture(
        model,
        heavy_tailed_batches(),
        observe=lambda site, x, y: pairs.setdefault(site.name, []).append((x.clone(), y.clone())),
    )
    raw = {
        name: [torch.cat(v).flatten().double().numpy() for v in zip(*rows, strict=True)] for name, rows in pairs.items()
    }
    return seen, raw


def test_fits_agree_with_scipy_on_all_raw_pairs(observed):
    seen, raw = observed
    for found in normscope.fit(seen):
        x, y = raw[found.site]
        f = NUMPY[found.curve]
        # scipy starts off our optimum, and within its basin.
        start = (1.2 * found.amplitude, 0.8 * found.alpha)
        (amplitude, alpha), _ = curve_fit(
            lambda x, scale, a, f=f: scale * f(a * x), x, y, p0=start, xtol=1e-13, ftol=1e-13
        )
        residual = y - amplitude * f(alpha * x)
        r2 = 1 - residual @ residual / ((y - y.mean()) @ (y - y.mean()))
        assert found.alpha == pytest.approx(alpha, rel=2e-5)
        assert found.amplitude == pytest.approx(amplitude, rel=2e-5)
        assert found.r2 == pytest.approx(r2, abs=1e-6)
        assert found.rmse == pytest.approx(np.sqrt(np.mean(residual**2)), rel=1e-6)
        assert found.n_pairs == x.size
        assert found.converged and not found.straight


def moments_of(x, y):
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32).astype(float)
    bins = PAIR_GRID.index(torch.from_numpy(x)).numpy()
    x = x.astype(float)
    weights = (None, x, y, x * x, x * y, y * y)
    return torch.stack([torch.from_numpy(np.bincount(bins, w, PAIR_GRID.size)).double() for w in weights])


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(CURVES)),
    st.floats(-6, 5),
    st.floats(0.7, 20),
    st.floats(0.1, 30),
    st.integers(0, 5),
)
def test_a_curve_without_noise_is_found_at_any_scale(name, log_scale, bend, amplitude, seed):
    """x spans |x| ~ 1e-6 … 1e5; α·max|x| = bend · about 4."""
    x = np.random.default_rng(seed).standard_normal(4000) * 10.0**log_scale
    alpha = bend / 10.0**log_scale
    found = least_squares(nodes_of(moments_of(x, amplitude * NUMPY[name](alpha * x))), CURVES[name])
    # y is rounded to float32, and a bin of 1/64 octave hides a curvature of second order in its width.
    assert found.alpha == pytest.approx(alpha, rel=1e-4)
    assert found.amplitude == pytest.approx(amplitude, rel=1e-4)
    assert found.converged and not found.straight


@given(st.floats(-6, 5), st.floats(0.01, 100))
@settings(max_examples=30, deadline=None)
def test_pairs_on_a_line_are_straight(log_scale, slope):
    x = np.random.default_rng(0).standard_normal(2000) * 10.0**log_scale
    for curve in CURVES.values():
        found = least_squares(nodes_of(moments_of(x, slope * x)), curve)
        assert found.straight and found.converged
        assert found.amplitude * found.alpha == pytest.approx(slope, rel=1e-3)


def test_pairs_that_bend_outwards_are_straight_too():
    x = np.random.default_rng(0).standard_normal(4000)
    found = least_squares(nodes_of(moments_of(x, np.sinh(x))), CURVES["tanh"])
    assert found.straight


def solved(x, y, curve="tanh"):
    return least_squares(nodes_of(moments_of(x, y)), CURVES[curve])


def test_a_bend_far_below_the_median_is_found():
    generator = np.random.default_rng(0)
    wide = generator.random(20_000) < 0.6
    x = generator.standard_normal(20_000) * np.where(wide, 1e4, 1e-3)
    found = solved(x, np.tanh(2000 * x) + 0.01 * generator.standard_normal(x.size))
    assert found.alpha == pytest.approx(2000, rel=0.02)
    assert found.converged


def test_what_cannot_be_told_is_not_called_converged():
    generator = np.random.default_rng(0)
    x, noise = generator.standard_normal((2, 5000))
    assert not solved(x, np.sign(x)).converged  # a step: any α will do that is large enough
    assert not solved(np.ones(5000), noise).converged  # x has no spread
    for scale in (1e6, 1e-9):  # beyond the grid, where bins have no width
        moments = moments_of(scale * x, np.tanh(x))
        found = least_squares(nodes_of(moments), CURVES["tanh"])
        assert unresolved(moments, found.alpha)
    for scale in (1e4, 1e-6):
        moments = moments_of(scale * x, np.tanh(x))
        assert not unresolved(moments, least_squares(nodes_of(moments), CURVES["tanh"]).alpha)


@pytest.mark.parametrize(("bend", "straight"), [(0.02, True), (0.5, False)])
def test_straight_is_a_matter_of_the_bend(bend, straight):
    """tanh departs from its tangent by u³/3: for u within ±0.08 noise of 1 % hides that, within ±2 it does not."""
    generator = np.random.default_rng(1)
    x, noise = generator.standard_normal((2, 20_000))
    assert solved(x, np.tanh(bend * x) / bend + 0.01 * noise).straight == straight


def test_a_straight_fit_has_the_slope_of_the_line():
    x, noise = np.random.default_rng(2).standard_normal((2, 5000))
    for y in (0.3 * x + noise, noise, np.sinh(x)):
        found = solved(x, y)
        assert found.straight
        assert found.amplitude * found.alpha == pytest.approx(float(x @ y / (x @ x)), rel=1e-3)


def test_a_single_token_is_its_line():
    token = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    token -= token.mean()  # through the origin
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(32)), [token])
    for found in normscope.fit(seen):
        assert found.straight and found.r2_ceiling is None and found.folds is None
        assert found.slope == pytest.approx(1 / math.sqrt(token.var(correction=0).item() + 1e-5), rel=1e-3)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_input_has_no_fit(value):
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.full((4, 8), value)])
    for found in normscope.fit(seen):
        assert found.degenerate and not found.converged
        shown = found.as_dict()
        assert shown["A"] is shown["alpha"] is shown["C"] is shown["slope"] is shown["r2"] is shown["rmse"] is None
        assert shown["n_pairs"] == 32


def test_json_says_what_the_fit_is(observed):
    found = next(one for one in normscope.fit(observed[0], "isru"))
    shown = found.as_dict()
    assert list(shown)[:14] == [
        *("model", "weights", "data", "site", "func", "A", "alpha", "shift", "C"),
        *("slope", "r2", "r2_ceiling", "rmse", "n_pairs"),
    ]
    assert shown["C"] == pytest.approx(1 / shown["alpha"] ** 2)
    assert shown["slope"] == pytest.approx(shown["A"] * shown["alpha"])
    x = torch.tensor([-3.0, 0.5])
    assert found(x).numpy() == pytest.approx(shown["A"] * NUMPY["isru"](shown["alpha"] * x.double().numpy()))


def folded(x, y, folds):
    per_fold = [moments_of(x[folds == k], y[folds == k]) for k in range(8)]
    return torch.stack(per_fold)


@pytest.mark.parametrize("noise", [0.05, 0.5, 2.0])
def test_the_ceiling_is_the_share_of_variance_that_is_no_noise(noise):
    generator = np.random.default_rng(3)
    x = generator.standard_normal(60_000) * np.exp(generator.standard_normal(60_000))
    signal = np.sign(x) * np.abs(x) ** 0.3  # bends as neither curve does
    y = signal + noise * generator.standard_normal(x.size)
    top = ceiling(folded(x, y, np.arange(x.size) % 8))
    truth = 1 - noise**2 / np.var(y)
    # The held-out error of 60,000 pairs is known to 2/√60000 ≈ 1 % of the noise's share.
    assert top == pytest.approx(truth, abs=0.015 * (1 - truth) + 0.003)


def test_the_ceiling_of_pure_noise_is_zero_although_tail_bins_hold_single_pairs():
    generator = np.random.default_rng(0)
    x = generator.standard_cauchy(3000)
    y = generator.standard_normal(3000)
    moments = folded(x, y, np.arange(3000) % 8)
    n, total, squares = (moments.sum(0)[row].numpy() for row in (0, 2, 5))
    occupied = n > 0
    naive = 1 - (squares - total**2 / np.maximum(n, 1))[occupied].sum() / (squares.sum() - total.sum() ** 2 / 3000)
    assert naive > 0.3
    assert ceiling(moments) == pytest.approx(0, abs=0.01)


def test_no_curve_passes_the_ceiling_by_more_than_noise(observed):
    for found in normscope.fit(observed[0]):
        assert found.r2 <= found.r2_ceiling + 0.01
        assert found.folds == "source"


def test_every_group_of_the_conditional_mean_holds_enough_pairs():
    x = np.concatenate([np.full(1, 1.0), np.full(126, 2.0), np.full(1, 3.0), np.full(200, 4.0)])
    y = np.where(x == 3, 99.0, x)
    at, mean, _ = conditional_mean(moments_of(x, y), least_count=64)
    assert len(at) == 2
    assert mean.max() < 5  # the lone pair at 3 does not stand by itself


def test_conditional_mean_recovers_the_function():
    x = np.random.default_rng(0).uniform(-4, 4, 50_000)
    at, mean, deviation = conditional_mean(moments_of(x, np.tanh(x)), least_count=100)
    assert (np.diff(at) > 0).all()
    np.testing.assert_allclose(mean, np.tanh(at), atol=2e-3)
    assert deviation.max() < 0.2
    assert math.isclose(at.min(), -4, rel_tol=0.05)
