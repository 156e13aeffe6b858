"""The search for α and s against searches over all raw pairs: the same minimum, and to many digits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from captures import moments_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, curve_fit, minimize_scalar

from normscope.curves.expressions import curve_from
from normscope.curves.known import CURVES
from normscope.fits.form import FitForm
from normscope.fits.nodes import coarsened, nodes_of
from normscope.fits.solver import Objective, least_squares

NUMPY = {"tanh": np.tanh, "isru": lambda u: u / np.hypot(1, u)}
SLOPE = {"tanh": lambda u: np.cosh(np.minimum(np.abs(u), 300)) ** -2.0, "isru": lambda u: np.hypot(1, u) ** -3.0}
SEARCHED = [curve for curve in CURVES.values() if curve.name not in ("linear", "softcap", "sigmoid")]
SMOOTH = [curve for curve in SEARCHED if curve.smooth]


def residual_of(curve, x, y, alpha, shift=0.0):
    values = curve.function(torch.from_numpy(alpha * x + shift)).numpy()
    return float(y @ y - (y @ values) ** 2 / (values @ values))


def heavy_tailed(pairs, seed):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(pairs) * np.exp(1.2 * generator.standard_normal(pairs))
    return x.astype(np.float32).astype(float), generator


@pytest.mark.parametrize("name", sorted(NUMPY))
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("level", [0.0, 0.6])
def test_alpha_is_where_the_error_of_all_raw_pairs_is_stationary(solved, name, scale, level):
    """The two signs of x need not mirror each other: y may be off centre, and one tail longer."""
    x, generator = heavy_tailed(8000, 0)
    x = (scale * np.where(x > 0, 1.7 * x, x)).astype(np.float32).astype(float)
    y = np.tanh(0.8 * x / scale) + level + 0.2 * generator.standard_normal(x.size)

    def slope(log_alpha):
        u = math.exp(log_alpha) * x
        f, g = NUMPY[name](u), u * SLOPE[name](u)
        return (y @ g) * (f @ f) - (y @ f) * (f @ g)

    fit = solved(x, y, name)
    at = math.log(fit.alpha)
    alpha = math.exp(brentq(slope, at - 1e-3, at + 1e-3, xtol=1e-14))
    assert fit.alpha == pytest.approx(alpha, rel=1e-5)  # third order in bins of 1/16 octave
    assert fit.residual == pytest.approx(residual_of(CURVES[name], x, y, alpha), rel=1e-5)
    assert fit.converged and not fit.straight


@pytest.mark.parametrize("curve", SMOOTH, ids=lambda curve: curve.name)
@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_every_smooth_curve_agrees_with_scipy_on_all_raw_pairs(solved, by_scipy, curve, shift):
    x, generator = heavy_tailed(6000, 1)
    y = 2 * curve.function(torch.from_numpy(0.8 * x + shift)).numpy() + 0.3 * generator.standard_normal(x.size)
    fit = solved(x, y, curve, FitForm(shift=shift != 0))

    def predicted(x, amplitude, alpha, s=0.0):
        return amplitude * curve.function(torch.from_numpy(alpha * x + s)).numpy()

    truth = by_scipy(lambda u: curve.function(torch.from_numpy(u)).numpy(), x, y, shifted=shift != 0)
    ours = [fit.amplitude, fit.alpha, *([fit.shift] if shift else [])]
    assert ours == pytest.approx(truth, rel=1e-4, abs=1e-4)
    assert fit.residual == pytest.approx(float(np.sum((y - predicted(x, *truth)) ** 2)), rel=5e-5)
    assert fit.converged and not fit.straight


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("mean", [0.0, 0.5, -40.0])
def test_a_line_with_a_shift_is_the_regression_line_at_any_unit_of_x(solved, scale, mean):
    x, generator = heavy_tailed(20_000, 3)
    x = (scale * x).astype(np.float32).astype(float)
    y = 0.7 * x / scale + mean + 0.2 * generator.standard_normal(x.size)
    slope, offset = np.polyfit(x / scale, y, 1)
    fit = solved(x, y, "linear", FitForm(shift=True))
    assert fit.amplitude * fit.alpha * scale == pytest.approx(slope, rel=1e-9)
    assert fit.amplitude * fit.shift == pytest.approx(offset, rel=1e-9)


@pytest.mark.parametrize("curve", [c for c in SEARCHED if not c.smooth], ids=lambda curve: curve.name)
def test_curves_with_kinks_leave_no_more_than_the_best_of_a_fine_search(solved, curve):
    x, generator = heavy_tailed(6000, 2)
    y = 2 * curve.function(torch.from_numpy(0.8 * x)).numpy() + 0.3 * generator.standard_normal(x.size)
    fit = solved(x, y, curve)
    best = min(residual_of(curve, x, y, alpha) for alpha in np.geomspace(0.5 * fit.alpha, 2 * fit.alpha, 400))
    assert residual_of(curve, x, y, fit.alpha) <= best * (1 + 1e-4)
    assert fit.residual == pytest.approx(residual_of(curve, x, y, fit.alpha), rel=1e-4)


def test_a_kink_among_the_outermost_pairs_is_found(solved):
    """With a gain for α in a narrow range only, between where all pairs lie on the line and where too few do."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, 3000).astype(np.float32).astype(float)
    y = np.clip(1.1 * x, -1, 1) + 0.01 * generator.standard_normal(x.size)
    fit = solved(x, y, "hardtanh")
    assert not fit.straight
    assert fit.alpha == pytest.approx(1.1, rel=5e-3)


def lowest(name, x, y, between):
    """Least error of all raw pairs for α between two bounds, and where it is."""
    fit = minimize_scalar(
        lambda at: residual_of(CURVES[name], x, y, math.exp(at)),
        bounds=np.log(between),
        method="bounded",
        options={"xatol": 1e-7},
    )
    return float(fit.fun), math.exp(fit.x)


@pytest.mark.parametrize("name", sorted(NUMPY))
@pytest.mark.parametrize("beside", [-1e-4, 1e-4])
def test_the_lower_of_two_minima_is_found(solved, name, beside):
    """Two kinds of pairs that bend a thousandfold apart: the larger the far ones' y, the more their bend pays."""
    generator = np.random.default_rng(1)
    near = generator.random(6000) < 0.6
    x = generator.standard_normal(near.size) * np.where(near, 1e-2, 30.0)
    noise = 0.1 * generator.standard_normal(near.size)

    def y_of(far):
        return np.where(near, np.tanh(300 * x), far * np.tanh(0.1 * x)) + noise

    def lead_of_far(far):
        return lowest(name, x, y_of(far), (10, 3e3))[0] - lowest(name, x, y_of(far), (1e-3, 1))[0]

    y = y_of(brentq(lead_of_far, 1.05, 5, xtol=1e-6) * (1 + beside))
    (near_error, near_alpha), (far_error, far_alpha) = (lowest(name, x, y, span) for span in ((10, 3e3), (1e-3, 1)))
    fit = solved(x, y, name)
    assert (near_error < far_error) == (beside < 0)
    assert fit.alpha == pytest.approx(near_alpha if beside < 0 else far_alpha, rel=1e-4)


@pytest.mark.parametrize("name", ["hardtanh", "logsign_clip"])
def test_without_a_fold_a_curve_with_kinks_is_in_the_lower_of_two_minima(solved, name):
    """Of all pairs the two are nearly as deep, so that some folds, left out, decide which one is the lower."""
    generator = np.random.default_rng(1)
    near, folds = generator.random(8000) < 0.6, np.arange(8000) % 8
    x = generator.standard_normal(near.size) * np.where(near, 1e-2, 30.0)
    noise = np.where(folds < 4, 0.05, 0.3) * generator.standard_normal(near.size)
    spans = ((10, 3e3), (1e-3, 1))

    def y_of(far):
        far = far * np.where(folds < 4, 1.2, 0.8)
        return np.where(near, np.tanh(300 * x), far * np.tanh(0.1 * x)) + noise

    def lead_of_far(far):
        return lowest(name, x, y_of(far), spans[1])[0] - lowest(name, x, y_of(far), spans[0])[0]

    y = y_of(brentq(lead_of_far, 0.5, 5, xtol=1e-6))
    left, in_near = 0.0, 0
    for fold in range(8):
        held = folds == fold
        (near_error, near_alpha), (far_error, far_alpha) = (lowest(name, x[~held], y[~held], span) for span in spans)
        in_near += near_error < far_error
        alpha = near_alpha if near_error < far_error else far_alpha
        values, others = (CURVES[name].function(torch.from_numpy(alpha * x[of])).numpy() for of in (held, ~held))
        left += np.sum((y[held] - (y[~held] @ others) / (others @ others) * values) ** 2)
    assert 0 < in_near < 8
    assert solved(x, y, name, folds=folds).r2_cv == pytest.approx(1 - left / np.sum((y - y.mean()) ** 2), abs=2e-5)


@pytest.mark.parametrize("name", ["hardtanh", "logsign_clip", "tanh"])
def test_without_a_fold_a_shifted_curve_is_fitted_anew(solved, by_scipy, name):
    """Folds bend elsewhere, so that the whole's α and s predict them worse."""
    x, generator = heavy_tailed(4000, 3)
    folds = np.arange(x.size) % 8
    f = lambda u: CURVES[name].function(torch.from_numpy(u)).numpy()  # noqa: E731
    y = 2 * f((0.6 + 0.1 * folds) * x + 0.2 * (folds - 3)) + 0.1 * generator.standard_normal(x.size)
    left = 0.0
    for fold in range(8):
        held = folds == fold
        amplitude, alpha, s = by_scipy(f, x[~held], y[~held], shifted=True)
        left += np.sum((y[held] - amplitude * f(alpha * x[held] + s)) ** 2)
    fit = solved(x, y, name, FitForm(), folds=folds)
    # With kinks several minima are equally deep to a millionth, and predict the fold left out differently.
    assert fit.r2_cv == pytest.approx(1 - left / np.sum((y - y.mean()) ** 2), abs=1e-5 if name == "tanh" else 3e-4)


@pytest.mark.parametrize("name", sorted(NUMPY))
def test_pairs_far_from_the_origin_and_close_together_bend_where_all_raw_pairs_do(solved, name):
    generator = np.random.default_rng(2)
    x = generator.uniform(4, 5, 6000)
    y = np.tanh(0.3 * x) + 0.01 * generator.standard_normal(x.size)
    fit = solved(x, y, name)
    error, alpha = min(lowest(name, x, y, (bound, 2 * bound)) for bound in np.geomspace(0.01, 5, 10))
    assert fit.alpha == pytest.approx(alpha, rel=3e-3)
    assert fit.residual <= error * (1 + 1e-5)


@pytest.mark.parametrize("offset", [0.0, 3.0, -200.0])
def test_a_shift_finds_a_bend_away_from_the_origin(solved, offset):
    x, generator = heavy_tailed(8000, 5)
    y = 3 * np.tanh(0.9 * x) + 0.2 * generator.standard_normal(x.size)
    fit = solved(x + offset, y, "tanh", FitForm())
    # x near 200 is known to 1/64 octave at best, which is wider than the bend: its own regression line is what is left.
    rel = 0.01 if abs(offset) < 10 else 0.5
    assert fit.alpha == pytest.approx(0.9, rel=rel)
    assert -fit.shift / fit.alpha == pytest.approx(offset, abs=0.05 if abs(offset) < 10 else 1.0)


@pytest.mark.parametrize(
    ("name", "shifted", "most"),
    [("tanh", False, 35), ("tanh", True, 60), ("sigmoid", True, 90), ("hardtanh", True, 1200)],
)
def test_a_fit_evaluates_the_curve_a_few_times_at_all_nodes(name, shifted, most):
    """The grid over all decades is evaluated at the coarse nodes alone; sigmoid has no best s for small α."""
    x, generator = heavy_tailed(60_000, 4)
    moments = moments_of(x + 0.4 * shifted, np.tanh(x) + 0.5 * generator.standard_normal(x.size))[None]
    nodes, coarse = (nodes_of(coarsened(moments, width), odd=not shifted) for width in (1, 32))
    sizes = []

    def counted(function):
        return lambda u: (sizes.append(u.numel()), function(u))[1]

    curve = CURVES[name]
    counting = replace(curve, function=counted(curve.function), derivative=counted(curve.derivative))
    alphas = [float(least_squares(Objective(nodes, f, shifted=shifted), coarse).alpha) for f in (counting, curve)]
    assert alphas[0] == alphas[1] and sum(sizes) < most * nodes.x.numel()


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(SEARCHED),
    st.floats(-5.8, 4.7),  # at 1e-6 the steepest bends would begin below the grid
    st.floats(0.7, 20),
    st.floats(0.1, 30),
    st.integers(0, 5),
)
def test_a_curve_without_noise_is_found_at_any_scale(solved, curve, log_scale, bend, amplitude, seed):
    """x spans |x| ~ 2e-6 … 1e5, where the grid of bins ends; α·max|x| = bend · about 4."""
    x = (np.random.default_rng(seed).standard_normal(4000) * 10.0**log_scale).astype(np.float32).astype(float)
    alpha = bend / 10.0**log_scale
    y = amplitude * curve.function(torch.from_numpy(alpha * x)).numpy()
    fit = solved(x, y, curve)
    left = 1 - residual_of(curve, x, y, fit.alpha) / float(y @ y)
    # A bin of 1/16 octave hides what is of third order in its width, and one that holds a kink of second order.
    assert 1 - left <= (1e-7 if curve.smooth else 1e-4)
    if curve.smooth:
        assert fit.alpha == pytest.approx(alpha, rel=1e-4)
        assert fit.amplitude == pytest.approx(amplitude, rel=1e-4)
        assert fit.converged


LINEAR = [c for c in CURVES.values() if c.linear_at_origin and c.zero_centred and not c.amplitude_is_inverse_scale]


@given(st.sampled_from(LINEAR), st.floats(-6, 4.7), st.floats(0.01, 100), st.floats(-3, 3), st.floats(0, 0.3))
@settings(max_examples=10, deadline=None)
def test_pairs_about_a_line_are_straight_and_have_its_slope_and_offset(solved, curve, log_scale, slope, offset, noise):
    """Numpy's line, through the origin only without a shift."""
    if curve.name == "linear":  # α is 1, so that s, searched to 1e-7, is in the unit of x
        log_scale = max(log_scale, -2.0)
    x, off = np.random.default_rng(0).standard_normal((2, 1000))
    x = (x * 10.0**log_scale).astype(np.float32).astype(float)
    line = slope * x + slope * x.std() * noise * off
    shifted = line + slope * x.std() * offset
    fit = solved(x, line, curve)
    assert fit.straight and fit.converged
    at_origin = fit.amplitude * fit.alpha * curve.slope_at_origin
    assert at_origin == pytest.approx(x @ line / (x @ x), rel=1e-3)
    fit = solved(x, shifted, curve, FitForm())
    assert fit.straight and fit.converged
    predicted = fit.amplitude * curve.function(torch.from_numpy(fit.alpha * x + fit.shift)).numpy()
    np.testing.assert_allclose(predicted, np.polyval(np.polyfit(x, shifted, 1), x), atol=2e-3 * line.std())


def test_fits_that_do_not_determine_alpha_are_not_converged(solved):
    x, noise = np.random.default_rng(0).standard_normal((2, 5000))
    step = solved(x, np.sign(x), folds=np.arange(5000) % 8)  # any α will do that is large enough
    assert not step.converged and not {"amplitude", "alpha", "slope"} & set(step.intervals)
    assert not solved(np.ones(5000), noise).converged  # x has no spread
    for scale in (1e6, 1e-9):  # beyond the grid, where bins have no width
        assert not solved(scale * x, np.tanh(x)).converged
    for scale in (1e4, 1e-6):
        assert solved(scale * x, np.tanh(x)).converged


UNBENT = {
    "cubsign": (CURVES["cubsign"], 3),
    "logquad_clip": (CURVES["logquad_clip"], 2),
    "root": (curve_from("root=sign(x)*(1-exp(-sqrt(abs(x))))"), 1 / 2),
    "even": (curve_from("even=x**2/(1+x**2)"), 2),
}


@pytest.mark.parametrize("name", UNBENT)
@pytest.mark.parametrize(("scale", "shifted"), [(1e-3, False), (1e3, False), (1.0, True)])
def test_a_curve_without_a_slope_at_its_origin_is_not_identified_below_its_bend(solved, name, scale, shifted):
    """α then only scales the curve, which is as near to the pairs as numpy's multiple of |x|^p."""
    curve, power = UNBENT[name]
    generator = np.random.default_rng(0)
    x = (scale * generator.uniform(-1, 1, 8000)).astype(np.float32).astype(float)
    limit = np.abs(x) ** power * (1 if name == "even" else np.sign(x))
    y = 0.7 * limit + 0.3 * scale**power * generator.standard_normal(x.size)
    folds = np.arange(x.size) % 8
    fit = solved(x, y, curve, FitForm(shift=shifted), folds=folds)
    assert fit.unidentified and fit.converged and not fit.straight
    assert set(fit.intervals) <= {"r2"}
    least = float(y @ y - (limit @ y) ** 2 / (limit @ limit))
    assert fit.residual == pytest.approx(least, rel=1e-3)
    bent = solved(x, 2 * scale**power * curve.function(torch.from_numpy(3 * x / scale)).numpy(), curve)
    assert not bent.unidentified and bent.alpha == pytest.approx(3 / scale, rel=1e-2)


@pytest.mark.parametrize("formula", ["x**3", "sign(x)*abs(x)**.5", "x**2"])
def test_powers_are_never_identified(solved, formula):
    x, noise = np.random.default_rng(0).standard_normal((2, 8000))
    folds = np.arange(8000) % 8
    fit = solved(x, np.tanh(x) + 0.1 * noise, curve_from(f"mine={formula}"), FitForm(), folds=folds)
    assert fit.unidentified and not fit.straight and set(fit.intervals) == {"r2"}


def test_the_identity_is_the_line(solved):
    x, noise = np.random.default_rng(2).standard_normal((2, 5000))
    y = 0.3 * x + noise
    fit = solved(x, y, "linear")
    assert fit.straight and fit.converged and fit.alpha == 1
    assert fit.amplitude == pytest.approx(float(x @ y / (x @ x)), rel=1e-6)
    given = solved(x, y, "linear", FitForm(alpha=2.0, shift=False))
    assert given.alpha == 2 and 2 * given.amplitude == pytest.approx(fit.amplitude, rel=1e-12)


def test_softcap_is_tanh_whose_amplitude_is_the_inverse_scale(solved):
    x, generator = heavy_tailed(8000, 6)
    y = 5 * np.tanh(x / 5) + 0.1 * generator.standard_normal(x.size)
    fit = solved(x, y, "softcap")
    assert fit.amplitude == pytest.approx(1 / fit.alpha, rel=1e-12)
    [cap], _ = curve_fit(lambda x, cap: cap * np.tanh(x / cap), x, y, p0=[4.0], xtol=1e-14, ftol=1e-14)
    assert fit.amplitude == pytest.approx(cap, rel=1e-5)


@pytest.mark.parametrize(
    "form",
    [FitForm(alpha=1.0, shift=False), FitForm(amplitude="theory"), FitForm(alpha=0.3)],
    ids=str,
)
def test_fixed_parameters_keep_their_values(solved, form):
    x, generator = heavy_tailed(8000, 7)
    y = 2 * np.tanh(0.8 * x + 0.3) + 0.2 * generator.standard_normal(x.size)
    fit = solved(x, y, "tanh", form, bound=2.5)

    def predicted(x, *free):
        given = dict(zip(names, free, strict=True))
        amplitude = 2.5 if form.amplitude == "theory" else given["A"]
        return amplitude * np.tanh((form.alpha or given.get("alpha")) * x + given.get("s", 0.0))

    names = [*(["A"] if form.amplitude == "free" else []), *(["alpha"] if form.alpha is None else [])]
    names += ["s"] if form.shift else []
    ours = {"A": fit.amplitude, "alpha": fit.alpha, "s": fit.shift}
    starts = ([start] * len(names) for start in (0.05, 0.5, 5.0))  # which know nothing of ours
    tried = [curve_fit(predicted, x, y, p0=start, xtol=1e-14, ftol=1e-14)[0] for start in starts]
    truth = min(tried, key=lambda free: np.sum((y - predicted(x, *free)) ** 2))
    assert [ours[name] for name in names] == pytest.approx(truth, rel=1e-5, abs=1e-5)
    assert fit.alpha == (form.alpha or fit.alpha)
    assert fit.amplitude == (2.5 if form.amplitude == "theory" else fit.amplitude)


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
        rival_error = y @ y - (y @ alone(x)) ** 2 / (alone(x) @ alone(x))
        return 1 - lowest("tanh", x, y, searched)[0] / rival_error - saved

    fit = solved(x, curve(math.exp(brentq(share, *bounds, xtol=1e-5)), x) + 0.3 * noise)
    assert (fit.straight, fit.converged) == (rival == "line" and not counts, rival == "line" or counts)
