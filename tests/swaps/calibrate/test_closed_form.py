"""Ridge regression from sums, against numpy's least squares on the tokens themselves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from normscope.swaps.calibrate.closed_form import PENALTIES, LayerSums, least_squares, ridge, slopes
from normscope.swaps.pointwise import PointwiseFunction


def tokens(seed, count, *sizes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, size, generator=generator) + 0.5 for size in sizes]


def sums_of(inputs, *targets):
    sums = LayerSums()
    sums.add(inputs, targets)
    return sums


def eighths(values):
    """Round to few bits, whose products float32 sums exactly."""
    return (8 * values).round() / 8


def by_numpy(inputs, target, start, ridge_penalty, *, bias):
    """Minimize ‖HWᵀ + b − T‖² + λ‖W − W₀‖² as one system of equations, with rows for the penalty."""
    h, t, start = (part.double().numpy() for part in (inputs, target, start))
    weights = np.sqrt(ridge_penalty) * np.eye(h.shape[1])
    constant = ([np.ones((len(h), 1))], [np.zeros((h.shape[1], 1))]) if bias else ([], [])
    left = np.vstack([np.hstack([h, *constant[0]]), np.hstack([weights, *constant[1]])])
    solution = np.linalg.lstsq(left, np.vstack([t, weights @ start.T]), rcond=None)[0]
    return solution[: h.shape[1]].T, solution[h.shape[1] :]


def check_against_numpy(h, t, start, own_bias, n_learned):
    """Compare a fitted layer with numpy's: the choice of λ, both errors, and the weights on all tokens.

    Args:
        h: ``(tokens, groups, features)``.
        t: ``(tokens, groups, channels)``.
        start: ``(groups, channels, features)``.
        own_bias: ``(groups * channels,)`` or None.
        n_learned: tokens to learn from; the others decide.
    """
    groups, bias = range(h.shape[1]), own_bias is not None
    learned, validation = slice(0, n_learned), slice(n_learned, None)
    sums = [sums_of(h[rows], t[rows].flatten(1)) for rows in (learned, validation)]
    layer = ridge(*sums, start.flatten(0, 1), own_bias)
    centre = h[learned].double().mean(0) if bias else 0
    spread = float(((h[learned].double() - centre) ** 2).sum(0).mean())
    truth = t[validation].double().numpy()
    total = ((truth - truth.mean(0)) ** 2).sum()

    def error(layers):
        of_group = [
            h[validation, g].double().numpy() @ weight.T + (offset if bias else 0) - truth[:, g]
            for g, (weight, offset) in enumerate(layers)
        ]
        return np.sqrt(sum((part**2).sum() for part in of_group) / total)

    def solved(rows, penalty):
        return [by_numpy(h[rows, g], t[rows, g], start[g], penalty, bias=bias) for g in groups]

    own = np.zeros(len(groups)) if own_bias is None else own_bias.double().numpy().reshape(len(groups), -1)
    as_it_is = error([(start[g].double().numpy(), own[g]) for g in groups])
    errors = {penalty: error(solved(learned, penalty * spread)) for penalty in PENALTIES}
    errors[math.inf] = error(solved(learned, 1e15 * spread))  # the bias alone is fitted
    rounding = 1e-6  # of differences of sums in float64; between penalties closer than that, either may be chosen
    assert layer.before == pytest.approx(as_it_is, rel=rounding)
    if layer.penalty is None:
        assert layer.after == layer.before
        assert torch.equal(layer.weight, start.flatten(0, 1).double()) and layer.bias is own_bias
        assert min(errors.values()) > as_it_is * (1 - rounding)
        return layer
    chosen = errors[layer.penalty]
    assert layer.after == pytest.approx(chosen, rel=rounding) and layer.after < layer.before
    # The search goes downhill; a penalty that it passed by may be better only beyond a worse neighbour.
    near = PENALTIES.index(layer.penalty) if layer.penalty in PENALTIES else None
    neighbours = PENALTIES if near is None else [*PENALTIES[max(near - 1, 0) : near + 2], math.inf]
    assert chosen <= min(errors[penalty] for penalty in neighbours) * (1 + rounding)
    for g, (weight, offset) in enumerate(solved(slice(None), min(layer.penalty, 1e15) * spread * len(h) / n_learned)):
        channels = slice(g * t.shape[2], (g + 1) * t.shape[2])
        np.testing.assert_allclose(layer.weight[channels].numpy(), weight, rtol=1e-6, atol=1e-7)
        if bias:
            np.testing.assert_allclose(layer.bias[channels].numpy(), offset[0], rtol=1e-6, atol=1e-7)
    assert bias or layer.bias is None
    return layer


@example(1580, 1, 1, 1, False)  # no penalty improves on the layer as it is
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_it_is_least_squares_with_one_penalty_for_all_groups(seed, groups, features, channels, bias):
    h, noise = tokens(seed, 160, groups * features, groups * channels)
    h = eighths(h.reshape(160, groups, features) * (1 + torch.arange(groups)[:, None]))  # of different sizes
    generator = torch.Generator().manual_seed(seed + 1)
    start, slope = (torch.randn(groups, channels, features, generator=generator) for _ in range(2))
    t = eighths(torch.einsum("ngf,gcf->ngc", h, slope) + 0.3 * noise.reshape(160, groups, channels))
    check_against_numpy(h, t, start, torch.zeros(groups * channels) if bias else None, 120)


@pytest.mark.parametrize("moved", [0.0, 1.5])
@pytest.mark.parametrize(("noise", "larger"), [(0.0, False), (6.0, True)])
def test_the_penalty_is_the_one_that_does_best_on_other_sources(noise, larger, moved):
    """The search goes both ways, and the sources that decide may lie about another mean."""
    generator = torch.Generator().manual_seed(2)
    h = torch.randn(90, 1, 20, generator=generator)
    h[40:] += moved
    h = eighths(h)
    t = h @ torch.randn(20, 2, generator=generator) + noise * torch.randn(90, 1, 2, generator=generator) + 3
    layer = check_against_numpy(h, eighths(t), torch.zeros(1, 2, 20), torch.zeros(2), 40)
    assert (layer.penalty > 0.1) == larger and (layer.penalty < 0.1) != larger


def test_a_layer_that_is_right_already_stays_to_the_bit():
    # Whole numbers and halves, whose products float32 sums exactly.
    h = torch.randint(-8, 9, (100, 5), generator=torch.Generator().manual_seed(1)).float()
    start, bias = torch.arange(15).reshape(3, 5) / 2, torch.ones(3)
    t = h @ start.T + bias
    layer = ridge(sums_of(h[:70], t[:70]), sums_of(h[70:], t[70:]), start, bias)
    assert torch.equal(layer.weight, start.double()) and torch.equal(layer.bias, bias)
    assert (layer.penalty, layer.before, layer.after) == (None, 0, 0)


def test_what_inputs_do_not_explain_is_left_to_the_bias():
    h, start = tokens(1, 100, 5)[0], torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    t, nothing = h @ start.T + 1, torch.zeros(100, 5)
    layer = ridge(sums_of(nothing, t), sums_of(nothing, t), start, torch.ones(3))
    assert layer.penalty == float("inf") and torch.equal(layer.weight, start.double())
    torch.testing.assert_close(layer.bias, t.double().mean(0), rtol=1e-5, atol=1e-6)  # sums of float32 tokens
    assert layer.after == pytest.approx(1.0)
    unbiased = ridge(sums_of(nothing, t), sums_of(nothing, t), start, None)
    assert unbiased.penalty is None and unbiased.bias is None


@pytest.mark.parametrize(("seed", "groups"), [(0, 1), (1, 3), (2, 6)])
def test_derived_sums_are_the_sums_of_derived_values_in_any_pieces(seed, groups):
    h, first, second = tokens(seed, 200, 12, 6, 6)
    h, generator = h.reshape(200, groups, -1), torch.Generator().manual_seed(seed)
    factors, weight = torch.randn(2, 6, generator=generator), torch.randn(6, 12 // groups, generator=generator)
    outputs = torch.einsum("ngf,gcf->ngc", h, weight.unflatten(0, (groups, -1))).flatten(1)
    both, long = sums_of(h, first, second), tokens(2, 9000, 4, 3)
    pieces = LayerSums()
    for rows in (slice(0, 1), slice(1, 5000), slice(5000, 9000)):
        pieces.add(long[0][rows], [long[1][rows]])
    checks = {
        "combined": (both.combined(factors), sums_of(h, factors[0] * first + factors[1] * second)),
        "centred": (both.centred(), sums_of(h - h.mean(0), first - first.mean(0), second - second.mean(0))),
        "with a layer's own": (both.with_own(weight.double()), sums_of(h, first, second + outputs)),
        "added": (sums_of(h[:50], first[:50]) + sums_of(h[50:], first[50:]), sums_of(h, first)),
        "in pieces": (pieces, sums_of(*long)),
    }
    for name in ("features", "gram", "targets", "cross", "products"):
        for what, (derived, direct) in checks.items():
            assert derived.count == direct.count
            pair = getattr(derived, name), getattr(direct, name)
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-2, msg=lambda text, what=what: f"{what}: {text}")
    for group in range(groups):
        part = slice(group * 6 // groups, (group + 1) * 6 // groups)
        alone = sums_of(h[:, group], first[:, part], second[:, part])
        pairs = [(both.features[group], alone.features[0]), (both.gram[group], alone.gram[0])]
        pairs += [(both.cross[:, group], alone.cross[:, 0]), (both.products[..., part], alone.products)]
        for of_group, of_alone in [*pairs, (both.targets[:, part], alone.targets)]:
            torch.testing.assert_close(of_group, of_alone, rtol=1e-4, atol=1e-3)


def test_slopes_are_of_what_the_inputs_do_not_explain():
    h, p = tokens(5, 4000, 4, 2)
    t = 0.7 * p + h @ torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    # With next to no penalty, numpy's residuals about H and a constant.
    around = np.hstack([h.double().numpy(), np.ones((len(h), 1))])
    left = [
        part.double().numpy() - around @ np.linalg.lstsq(around, part.double().numpy(), rcond=None)[0]
        for part in (t, p)
    ]
    expected = (left[0] * left[1]).sum(0) / (left[1] ** 2).sum(0)
    np.testing.assert_allclose(slopes(sums_of(h, t, p), 1e-9).numpy(), expected, rtol=1e-3)
    np.testing.assert_allclose(expected, 0.7, rtol=1e-6)


@pytest.mark.parametrize("mean", [0.0, 30.0, 1000.0])
def test_features_that_depend_on_one_another(mean):
    few = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)) + mean
    h = few @ torch.randn(3, 60, generator=torch.Generator().manual_seed(1))  # of 60 features 57 say nothing new
    t = h[:, :2] - 2 * h[:, 2:4]
    layer = ridge(sums_of(h[:200], t[:200]), sums_of(h[200:], t[200:]), torch.zeros(2, 60), torch.zeros(2))
    assert layer.weight.isfinite().all()
    assert layer.after < 0.1 * layer.before


def fitted_by_least_squares(function, x, y):
    """Return the parameters in float64, and the function with them."""
    values = {name: value.double() for name, value in least_squares(function, x, y).items()}
    f = function.curve.function(values["alpha"] * x + values.get("shift", 0.0))
    return values, values["weight"] * f + values["bias"]


@pytest.mark.parametrize("curve", ["tanh", "isru", "erf"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_a_norm_that_is_straight_needs_no_weight_that_half_precision_does_not_hold(curve, per_channel, spread):
    x = spread * torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = 2 * x / spread + 0.5
    function = PointwiseFunction(
        curve, 3, alpha=torch.full((3 if per_channel else 1,), 0.1 / spread), shift=torch.full((1,), 0.01)
    )
    values, fitted = fitted_by_least_squares(function, x, y)
    assert values["weight"].abs().max() < 2 * 4 / 0.01 * 1.2  # no token reaches farther than 4 standard deviations
    assert (fitted - y).norm() < 1e-3 * y.norm()  # a trace of the bend, and float32 parameters


@pytest.mark.parametrize("alpha", [[-0.4], [-0.4, 0.4, -0.4]])
@pytest.mark.parametrize("straight", [False, True])
def test_alpha_is_positive_and_the_weight_has_the_sign(alpha, straight):
    """A search that begins below 0 ends there; the same function is written with α above it."""
    x = torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = -2 * x + 0.5 if straight else 3 * torch.tanh(-0.7 * x + 0.4) - 1
    ends = []
    for start in (torch.tensor(alpha), torch.tensor(alpha).abs()):
        function = PointwiseFunction("tanh", 3, alpha=start, shift=-0.1 * start.sign())
        values, fitted = fitted_by_least_squares(function, x, y)
        assert (values["alpha"] > 0).all() and (values["weight"] < 0).all()
        ends.append(fitted)
    torch.testing.assert_close(*ends, rtol=1e-3 if straight else 1e-4, atol=1e-3 if straight else 1e-4)  # float32
    assert (ends[0] - y).norm() < 1e-3 * y.norm()


def test_what_is_not_odd_keeps_its_sign():
    x = torch.randn(400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = 3 * torch.sigmoid(-0.7 * x) - 1
    values, fitted = fitted_by_least_squares(PointwiseFunction("sigmoid", 2, alpha=-0.4), x, y)
    assert (values["alpha"] < 0).all() and (fitted - y).norm() < 1e-4 * y.norm()  # where the search ends


def test_one_shift_for_alphas_of_both_signs_leaves_them():
    x = torch.randn(400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([0.7, -0.7], dtype=torch.float64)
    y = 3 * torch.tanh(slopes * x + 0.3) - 1
    for alpha, shift, signs in (([0.4, -0.4], 0.1, [1, -1]), ([-0.4, -0.4], -0.1, [1, 1])):
        function = PointwiseFunction("tanh", 2, alpha=torch.tensor(alpha), shift=torch.tensor([shift]))
        values, fitted = fitted_by_least_squares(function, x, y)
        assert values["alpha"].sign().tolist() == signs
        if signs == [1, -1]:
            assert (fitted - y).norm() < 1e-5 * y.norm()
