"""Every curve of the table against scipy and numpy in extended precision, and every property against the function."""

import math
import pickle
import re

import numpy as np
import pytest
import torch
from scipy import optimize, special

from normscope.curves.expressions import curves_named, split_names
from normscope.curves.known import CURVES, curve_of
from normscope.curves.properties import autograd_of, properties_of
from normscope.errors import UsageError

PI = np.longdouble("3.14159265358979323846")
EPS = 2.0**-52
TINY = 2.3e-308  # the smallest number of float64 that still has all its digits


def clip(u, bound):
    return np.clip(u, -bound, bound)


def sech2(u):
    return 4 * np.exp(-2 * abs(u)) / (1 + np.exp(-2 * abs(u))) ** 2


# The formulas as the authors' own code has them, and their derivatives by hand, in numbers of 64 bits and more range.
EXACT = {
    "tanh": (np.tanh, sech2),
    "softcap": (np.tanh, sech2),
    "isru": (lambda u: u / np.sqrt(u**2 + 1), lambda u: (u**2 + 1) ** np.longdouble(-1.5)),
    "erf": (lambda u: special.erf(u.astype(float)), lambda u: 2 / np.sqrt(PI) * np.exp(-(u**2))),
    "hardtanh": (lambda u: clip(u, 1), lambda u: 1.0 * (abs(u) < 1)),
    "linear": (lambda u: u, np.ones_like),
    "sigmoid": (lambda u: 1 / (1 + np.exp(-u)), lambda u: np.exp(-abs(u)) / (1 + np.exp(-abs(u))) ** 2),
    "arctan": (lambda u: 2 / PI * np.arctan(u), lambda u: 2 / PI / (1 + u**2)),
    "satursin": (lambda u: np.sin(clip(u, PI / 2)), lambda u: np.cos(u) * (abs(u) < PI / 2)),
    "expsign": (lambda u: -np.sign(u) * np.expm1(-abs(u)), lambda u: np.exp(-abs(u))),
    "softsign": (lambda u: u / (1 + abs(u)), lambda u: (1 + abs(u)) ** np.longdouble(-2)),
    "relsign": (
        lambda u: u / (np.sqrt(u**2 + 1) + 1),
        lambda u: (1 + np.tan(np.arctan(u) / 2) ** 2) / (1 + u**2) / 2,  # that of tan(atan(u)/2)
    ),
    "cubsign": (lambda u: u**3 / (abs(u) ** 3 + 1), lambda u: 3 * u**2 / (abs(u) ** 3 + 1) ** 2),
    "saturlog": (
        lambda u: np.sign(u) * np.log1p(abs(u)) / (np.log1p(abs(u)) + 1),
        lambda u: 1 / ((1 + abs(u)) * (np.log1p(abs(u)) + 1) ** 2),
    ),
    "logquad_clip": (
        lambda u: clip(np.sign(u) * np.log1p(u**2), 1),
        lambda u: 2 * abs(u) / (1 + u**2) * (np.log1p(u**2) < 1),
    ),
    "logsign_clip": (
        lambda u: clip(np.sign(u) * np.log1p(abs(u)), 1),
        lambda u: 1 / (1 + abs(u)) * (np.log1p(abs(u)) < 1),
    ),
}
KINKS = {"hardtanh": 1.0, "logquad_clip": math.sqrt(math.e - 1), "logsign_clip": math.e - 1}
MAGNITUDES = [*np.geomspace(5e-324, 1.7e308, 2001), *np.linspace(0.01, 40, 2000), math.pi / 2, 1e300, 700.0, 745.0]
LONG = np.array([*MAGNITUDES, *(-np.array(MAGNITUDES))])

curves = pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
assert set(EXACT) | {"derf"} == set(CURVES)


@curves
def test_functions_match_extended_precision(curve):
    u = LONG.astype(float)
    with np.errstate(all="ignore"):
        expected = EXACT[curve.function_name][0](u.astype(np.longdouble))
    found = curve.function(torch.from_numpy(u)).numpy()
    assert np.isfinite(found).all()
    # A few roundings. Below TINY digits are lost to everybody.
    assert (abs(found - expected) <= 4 * EPS * abs(expected) + TINY).all()


@curves
def test_derivatives_match_extended_precision(curve):
    u = LONG.astype(float)
    u = u[abs(abs(u) - KINKS.get(curve.name, -1)) > 1e-12]
    with np.errstate(all="ignore"):
        expected = EXACT[curve.function_name][1](u.astype(np.longdouble))
    found = curve.derivative(torch.from_numpy(u)).numpy()
    # The rounding of u² counts as often as it is large.
    with np.errstate(all="ignore"):
        rounding = np.minimum(EPS * (6 + (u**2 if curve.function_name == "erf" else 0)), 1)
    # cos meets zero at π/2, where the rounding of u itself is all that there is.
    absolute = EPS if curve.name == "satursin" else TINY
    assert np.isfinite(found).all()
    assert (abs(found - expected) <= rounding * abs(expected) + absolute).all()


IN_TEX = {
    **{"{-}": "-", r"\mathrm{clip}": "clip", r"\mathrm{sign}": "np.sign", r"\mathrm{erf}": "special.erf"},
    **{r"\tanh": "np.tanh", r"\sin": "np.sin", r"\ln": "np.log", r"\mathrm{atan}": "np.arctan", r"\pi": "np.pi"},
    **{r"\sqrt": "np.sqrt", "|u|": "abs(u)", "^": "**", "e*": "np.e*", r"\,": "*", r"\;": "*", "{": "(", "}": ")"},
}


@curves
def test_formulas_in_torch_and_tex_are_the_function(curve):
    """Those in JavaScript are evaluated by the browser that the page's tests start."""
    u = np.concatenate([np.linspace(-8, 8, 4001), np.geomspace(1e-3, 100, 101)])
    with np.errstate(all="ignore"):
        expected = EXACT[curve.function_name][0](u.astype(np.longdouble)).astype(float)
    in_torch = eval(curve.expression, {"torch": torch, "math": math, "u": torch.from_numpy(u)})  # noqa: S307
    np.testing.assert_allclose(in_torch.numpy(), expected, rtol=1e-14)
    tex, _, definition = curve.tex.replace(r"\ ", " ").partition(", L =")
    tex = tex.replace("L", f"({definition})") if definition else tex.partition(", A =")[0]
    for written, python in IN_TEX.items():
        tex = tex.replace(written, python)
    names = {"np": np, "special": special, "clip": np.clip, "u": u}
    np.testing.assert_allclose(eval(tex, names), expected, rtol=1e-10, atol=1e-15)  # noqa: S307 - our own table


@curves
def test_curves_are_finite_at_zero_and_keep_shape_and_type(curve):
    u = torch.tensor([0.0, -0.0], dtype=torch.float64)
    at_zero = 0.5 if curve.name == "sigmoid" else 0.0
    assert curve.function(u).tolist() == [at_zero, at_zero]
    assert curve.derivative(u).tolist() == pytest.approx([curve.slope_at_origin] * 2, rel=EPS)
    for shape in [(), (0,), (2, 3, 4)]:
        for of in (curve.function, curve.derivative):
            ones = torch.ones(shape, dtype=torch.float64)
            made = of(ones)
            assert made.shape == shape and made.dtype == torch.float64
            made.zero_()
            assert (ones == 1).all()  # nothing is written into the argument


GRID = torch.cat([-torch.logspace(12, -12, 4001, dtype=torch.float64), torch.logspace(-12, 12, 4001).double()])


@curves
def test_declared_bounds_symmetries_and_slopes_are_the_functions_own(curve):
    f, slope = curve.function(GRID), curve.derivative(GRID)
    assert curve.zero_centred == torch.allclose(f, -curve.function(-GRID), rtol=1e-15, atol=0)
    assert curve.monotone == bool((f.diff() >= -EPS).all())
    assert curve.bounded == (curve.limit is not None) == bool(f.abs().max() <= 1)
    if curve.bounded and curve.name != "saturlog":  # 1 − f = 1/(1 + ln(1 + u))
        assert curve.function(torch.tensor(1e17, dtype=torch.float64)).item() == curve.limit
    near = torch.linspace(-3, 3, 60001, dtype=torch.float64)
    assert curve.derivative(near).max().item() == pytest.approx(curve.peak, rel=1e-8)
    assert slope.abs().max().item() <= curve.peak * (1 + EPS)
    rise = (curve.function(torch.tensor([1e-9, -1e-9], dtype=torch.float64)).diff() / -2e-9).item()
    assert curve.centre_sensitive == (rise > 1e-3)
    assert curve.linear_at_origin == curve.centre_sensitive
    if curve.linear_at_origin:
        assert rise == pytest.approx(curve.slope_at_origin, rel=1e-6)


def test_curves_flat_at_the_origin_or_bound_to_their_scale():
    assert {name for name, curve in CURVES.items() if not curve.centre_sensitive} == {"cubsign", "logquad_clip"}
    assert {name: curve.shift_of for name, curve in CURVES.items() if curve.shifted} == {"derf": "erf"}
    assert {name for name, curve in CURVES.items() if curve.amplitude_is_inverse_scale} == {"softcap"}


@curves
def test_curves_go_through_pickle(curve):
    assert pickle.loads(pickle.dumps(curve)) == curve  # noqa: S301 - its own bytes


def test_curves_go_by_the_names_of_their_modules_too():
    assert [curve.name for curve in curves_named(["DyT", "dyisru"])] == ["tanh", "isru"]
    assert curves_named("all, derf, identity") == list(CURVES.values())
    assert [curve.name for curve in curves_named("smoothsign_clip,softsign,Linear_Clip")] == ["softsign", "hardtanh"]


@pytest.mark.parametrize(
    ("names", "words"),
    [("tanh,isur", "no curve 'isur'. Did you mean 'isru'"), ("free", "no curve 'free'"), ("", "no curve ''")]
    + [(wrong, f"'{right}'") for wrong, right in {"fre": "free", "bests": "best", "al": "all"}.items()],
)
def test_unknown_curves_are_refused_with_a_suggestion(names, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        curves_named(names)


def test_names_are_split_outside_of_brackets_only():
    assert split_names("tanh, a=clip(x,-1,max(x,1)) ,b=(x),free") == ["tanh", "a=clip(x,-1,max(x,1))", "b=(x)", "free"]
    assert split_names("a=x),tanh") == ["a=x)", "tanh"]


def test_own_curves_share_no_name_with_built_in_ones():
    own = curve_of(lambda u: u / (1 + u.abs() ** 3) ** (1 / 3), "own")
    found = curves_named([own, "tanh", "other=clip(x,-1,2)", own])
    assert [curve.name for curve in found] == ["own", "tanh", "other"] and found[0] is own
    assert len(curves_named("mine=x,mine=x")) == 1
    with pytest.raises(UsageError, match="Two curves are called 'own'"):
        curves_named([own, "own=tanh(x)"])
    for name in ("tanh", "DyT", "free", "all", "best", "a b", "1st", "", "__import__", "x" * 41):
        with pytest.raises(UsageError, match="cannot be called"):
            curve_of(torch.tanh, name)


def close(value, rel):
    return value if value is None else pytest.approx(value, rel=rel, nan_ok=True)


@curves
def test_measured_properties_match_the_table(curve):
    for derivative in (curve.derivative, autograd_of(curve.function)):
        measured = properties_of(curve.function, derivative, curve.name)
        # saturlog gets so slowly to its limit that 1e6 is not near it, and slopes are secants at 1e-6.
        if curve.name == "saturlog":
            assert measured.pop("limit") == pytest.approx(0.95, abs=0.01)
        for name, value in measured.items():
            assert value == close(getattr(curve, name), 1e-4), name


PROPERTIES = ("limit", "zero_centred", "monotone", "slope_at_origin", "peak", "smooth")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda u: u**3, (None, True, True, 0.0, math.inf, True)),
        (lambda u: u.sign() * u.abs().sqrt(), (None, True, True, math.inf, math.inf, False)),
        (torch.abs, (None, False, False, math.nan, 1.0, False)),
        (lambda u: -torch.tanh(3 * u), (1.0, True, True, -3.0, 3.0, True)),
        (torch.asinh, (None, True, True, 1.0, 1.0, True)),
        (lambda u: torch.log1p(torch.log1p(u.abs())) * u.sign(), (None, True, True, 1.0, 1.0, True)),
        (lambda u: u * torch.exp(-u * u), (math.exp(-0.5) / math.sqrt(2), True, False, 1.0, 1.0, True)),
        (lambda u: torch.tanh(u) + 1e-3, (1.001, False, True, 1.0, 1.0, True)),
        (lambda u: torch.where(u > 2.345, 2.345, u), (None, False, True, 1.0, 1.0, False)),
        (lambda u: 1 / (1 + torch.exp(-u)), (1.0, False, True, 0.25, 0.25, True)),
    ],
)
def test_properties_of_other_functions_match_calculus(function, expected):
    found = properties_of(function, autograd_of(function), "own")
    assert tuple(found) == PROPERTIES
    for name, value in zip(PROPERTIES, expected, strict=True):
        assert found[name] == close(value, 1e-3), name


@pytest.mark.parametrize(
    ("function", "kinks"),
    [
        (torch.relu, [0]),
        (lambda u: u.clamp(0, 6), [0, 6]),
        (lambda u: torch.copysign(u.abs().sqrt().clamp(max=2), u), [-4, 4]),
        (torch.nn.functional.softshrink, [-0.5, 0.5]),
        (torch.nn.functional.silu, []),
    ],
)
def test_kinks_of_other_functions_are_located(function, kinks):
    found = [u for u in curve_of(function, "own").kinks if kinks[0] == 0 or abs(u) > 1e-12]  # or f is vertical at 0
    assert found == pytest.approx(kinks, abs=1e-9)


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_autograd_works_where_gradients_are_switched_off(no_gradients):
    own = curve_of(torch.sin, "own")
    with no_gradients():
        u = torch.linspace(-2, 2, 5, dtype=torch.float64) + 0.1
        assert torch.allclose(own.derivative(u), torch.cos(u), rtol=1e-15)
        assert own.derivative(u.float()).dtype == torch.float64


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (torch.sum, "gives one real number for each u"),
        (lambda u: u[:3], "of shape \\(3,\\)"),
        (lambda u: u + 1j, "complex128"),
        (lambda u: 3.0, "float"),
        (torch.sqrt, "is nan at u = -1e-06"),
        (torch.exp, "is inf at u = 71"),
        (torch.zeros_like, "is 0 wherever u is"),
        (lambda u: u.detach().tanh(), "Give it yourself, as derivative="),
        (lambda u: u @ u[:3], "cannot be evaluated"),
    ],
)
def test_functions_that_are_no_curves_are_refused(function, message):
    with pytest.raises(UsageError, match=message):
        curve_of(function, "own")


def test_an_own_derivative_is_used():
    own = curve_of(lambda u: u.detach().tanh(), "own", "tanh", lambda u: 1 - u.tanh().square(), "a book")
    assert (own.formula, own.source, own.peak, own.smooth) == ("tanh", "a book", 1.0, True)
    with pytest.raises(UsageError, match="derivative of the curve 'own' gives"):
        curve_of(torch.tanh, "own", derivative=torch.sum)
    with pytest.raises(UsageError, match="'own' has the slope inf at u = 0; it has to be finite"):
        curve_of(lambda u: u.sign() * u.abs().sqrt(), "own", derivative=lambda u: 0.5 / u.abs().sqrt())


@curves
def test_ends_are_where_scipy_finds_five_percent_of_the_peak(curve):
    def excess(u):
        return abs(float(curve.derivative(torch.tensor([u], dtype=torch.float64)))) - 0.05 * curve.peak

    low, high = curve.ends
    if curve.name == "linear":
        assert (low, high) == (-math.inf, math.inf)
        return
    if curve.smooth:
        assert high == pytest.approx(optimize.brentq(excess, 1, 20), rel=1e-4)
    assert low == -high and excess(high * 1.001) < 0 <= excess(high * 0.999)
    beyond = torch.logspace(math.log10(1.001 * high), 5, 500, dtype=torch.float64)
    assert bool((curve.derivative(beyond).abs() < 0.05 * curve.peak).all())


def test_ends_of_curves_that_are_vertical_or_flat_on_one_side_alone():
    assert curve_of(lambda u: u.sign() * u.abs().sqrt(), "root").ends is None
    assert curve_of(torch.relu, "ramp").ends == (0, math.inf)
    low, high = curve_of(torch.nn.functional.silu, "swish").ends
    assert low == pytest.approx(optimize.brentq(lambda u: silu_slope(u) + 0.05 * silu_slope(2.4), -9, -3), rel=1e-3)
    assert high == math.inf


def silu_slope(u):
    s = 1 / (1 + math.exp(-u))
    return s * (1 + u * (1 - s))
