"""The search for α against searches over all raw pairs: the same maximum, and to many digits."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize_scalar

from normscope.fits.curves import CURVES, Curve
from normscope.fits.nodes import nodes_of
from normscope.fits.solve import _climb, least_squares
from normscope.pairs.binning import PAIR_GRID

NUMPY = {"tanh": np.tanh, "isru": lambda u: u / np.hypot(1, u)}
SLOPE = {"tanh": lambda u: np.cosh(np.minimum(np.abs(u), 300)) ** -2.0, "isru": lambda u: np.hypot(1, u) ** -3.0}


def nodes_for(x, y):
    bins = PAIR_GRID.index(torch.from_numpy(x.astype(np.float32))).numpy()
    weights = (None, x, y, x * x, x * y, y * y)
    return nodes_of(torch.stack([torch.from_numpy(np.bincount(bins, w, PAIR_GRID.size)).double() for w in weights]))


def residual_of(name, x, y, alpha):
    values = NUMPY[name](alpha * x)
    return float(y @ y - (y @ values) ** 2 / (values @ values))


def heavy_tailed(pairs, seed):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(pairs) * np.exp(1.2 * generator.standard_normal(pairs)), generator


@pytest.mark.parametrize("name", sorted(CURVES))
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("level", [0.0, 0.6])
def test_alpha_is_where_the_error_of_all_raw_pairs_is_stationary(name, scale, level):
    """The two signs of x need not mirror each other: y may be off centre, and one tail longer."""
    x, generator = heavy_tailed(30_000, 0)
    x = scale * np.where(x > 0, 1.7 * x, x)
    y = np.tanh(0.8 * x / scale) + level + 0.2 * generator.standard_normal(x.size)

    def slope(log_alpha):
        u = math.exp(log_alpha) * x
        f, g = NUMPY[name](u), u * SLOPE[name](u)
        return (y @ g) * (f @ f) - (y @ f) * (f @ g)

    found = least_squares(nodes_for(x, y), CURVES[name])
    at = math.log(found.alpha)
    alpha = math.exp(brentq(slope, at - 1e-3, at + 1e-3, xtol=1e-14))
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.residual == pytest.approx(residual_of(name, x, y, alpha), rel=3e-7)
    assert found.converged and not found.straight


def lowest(name, x, y, between):
    """Least error of all raw pairs for α between two bounds, and where it is."""
    found = minimize_scalar(
        lambda at: residual_of(name, x, y, math.exp(at)),
        bounds=np.log(between),
        method="bounded",
        options={"xatol": 1e-7},
    )
    return float(found.fun), math.exp(found.x)


@pytest.mark.parametrize("name", sorted(CURVES))
@pytest.mark.parametrize("beside", [-0.3, -0.01, -1e-4, 1e-4, 0.01, 0.3])
def test_of_two_maxima_the_higher_is_found(name, beside):
    """Two kinds of pairs that bend a thousandfold apart: the larger the far ones' y, the more their bend pays."""
    generator = np.random.default_rng(1)
    near = generator.random(20_000) < 0.6
    x = generator.standard_normal(near.size) * np.where(near, 1e-2, 30.0)
    noise = 0.1 * generator.standard_normal(near.size)

    def y_of(far):
        return np.where(near, np.tanh(300 * x), far * np.tanh(0.1 * x)) + noise

    def lead_of_far(far):
        return lowest(name, x, y_of(far), (10, 3e3))[0] - lowest(name, x, y_of(far), (1e-3, 1))[0]

    y = y_of(brentq(lead_of_far, 1.05, 5, xtol=1e-6) * (1 + beside))
    (near_error, near_alpha), (far_error, far_alpha) = (lowest(name, x, y, span) for span in ((10, 3e3), (1e-3, 1)))
    found = least_squares(nodes_for(x, y), CURVES[name])
    assert (near_error < far_error) == (beside < 0)
    assert found.alpha == pytest.approx(near_alpha if beside < 0 else far_alpha, rel=1e-4)


@pytest.mark.parametrize("name", sorted(CURVES))
def test_pairs_far_from_the_origin_and_close_together_bend_where_all_raw_pairs_do(name):
    generator = np.random.default_rng(2)
    x = generator.uniform(4, 5, 20_000)
    y = np.tanh(0.3 * x) + 0.01 * generator.standard_normal(x.size)
    found = least_squares(nodes_for(x, y), CURVES[name])
    alphas = np.geomspace(0.01, 10, 3000)
    errors = [residual_of(name, x, y, alpha) for alpha in alphas]
    assert found.alpha == pytest.approx(alphas[int(np.argmin(errors))], rel=3e-3)
    assert found.residual <= min(errors) * (1 + 1e-6)


@pytest.mark.parametrize("name", sorted(CURVES))
def test_the_climb_ends_at_the_maximum_from_however_far_off_it_starts(name):
    x, generator = heavy_tailed(5_000, 4)
    nodes = nodes_for(x, np.tanh(x) + 0.5 * generator.standard_normal(x.size))
    maximum = math.log(least_squares(nodes, CURVES[name]).alpha)
    for start in maximum + np.linspace(-8, 8, 33):
        assert _climb(nodes, CURVES[name], start, maximum - 8, maximum + 8) == pytest.approx(maximum, abs=1e-7)


@pytest.mark.parametrize("name", sorted(CURVES))
def test_a_fit_evaluates_the_curve_a_few_times_at_all_nodes(name):
    """Time is evaluations: the grid over all decades is for the coarse nodes alone."""
    x, generator = heavy_tailed(200_000, 3)
    nodes = nodes_for(x, np.tanh(x) + 0.5 * generator.standard_normal(x.size))
    sizes = []

    def counted(function):
        return lambda u: (sizes.append(u.numel()), function(u))[1]

    curve = CURVES[name]
    one = Curve(name, (), "", counted(curve.function), counted(curve.derivative), "")
    assert least_squares(nodes, one) == least_squares(nodes, curve)
    assert sum(sizes) < 20 * len(nodes.x)
