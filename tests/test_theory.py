"""Every numbered formula of docs/theory.md, and what of normscope computes it, against one truth outside of both.

The truth is torch's own norms in float64, automatic differentiation of them, and numerical solutions.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad, solve_ivp
from torch import nn
from torch.autograd.functional import jacobian

import normscope
from normscope.curves.known import CURVES
from normscope.fits.gradient import constants_by_part, jacobians
from normscope.norms import formulas
from normscope.swaps.pointwise import DyISRU, DyT
from normscope.swaps.standalone import RMSNorm

PAGE = Path(__file__).parents[1] / "docs" / "theory.md"
HELD = {}
# float64 rounds at 1e-16; sums of a few dozen terms and the cancellation in 1 − y²/d cost some digits.
EXACT = {"rtol": 1e-10, "atol": 1e-12}
# What is asked of the solver; its global error is some ten times that.
SOLVED = {"rtol": 1e-10, "atol": 1e-12}
# Parameters of modules and the tokens of a capture are float32, which rounds at 6e-8; a few of these add up.
SINGLE = {"rtol": 1e-6, "atol": 1e-9}


def holds(**formulas):
    """Say which formulas of the page a test is about, word by word: a page that says something else fails."""

    def mark(test):
        HELD.update({int(number.removeprefix("of")): text for number, text in formulas.items()})
        return test

    return mark


def layer_norm(x, eps):
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def rms_norm(x, eps):
    return F.rms_norm(x, x.shape[-1:], eps=eps)


# By kind: torch's norm, normscope's form of it, and how many directions the mean takes away.
NORMS = {"LayerNorm": (layer_norm, formulas.layer_norm, 1), "RMSNorm": (rms_norm, formulas.rms_norm, 0)}
TANH, ISRU = CURVES["tanh"], CURVES["isru"]


def close(found, truth, **tolerance):
    np.testing.assert_allclose(np.asarray(found), np.asarray(truth), **(tolerance or EXACT))


def on_token(kind, x, eps):
    """normscope's Jacobian of one token."""
    return jacobians(NORMS[kind][1], x[None], eps)


def function_of(curve, amplitude, alpha, x):
    """A·f(αx) by a curve of normscope, in float64."""
    return amplitude * curve.function(alpha * torch.as_tensor(x, dtype=torch.float64)).numpy()


def captured(norm, x):
    return normscope.capture(nn.Sequential(norm), [x.float()])


tokens = st.builds(
    lambda seed, d, scale, offset, massive, eps: (token_of(seed, d, scale, offset, massive), eps),
    st.integers(0, 10_000),
    st.integers(2, 24),
    st.floats(-2, 2),
    st.floats(-3, 3),
    st.floats(0, 100),
    st.sampled_from([0.0, 1e-6, 1e-2, 1.0]),
)
on_tokens = settings(max_examples=10, deadline=None)


def token_of(seed, d, scale, offset, massive):
    """Noise of any scale about any mean, with one element far out."""
    x = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + offset
    x[0] += massive
    return x * 10.0**scale


def parts(x, eps):
    """μ, σ and ρ by numpy."""
    values = x.numpy()
    return values.mean(), math.sqrt(values.var() + eps), math.sqrt(np.mean(values**2) + eps)


@holds(
    of1="LayerNorm: y_i = (x_i − μ)/σ, σ² = Σ_j (x_j − μ)²/d + ε",
    of2="RMSNorm: y_i = x_i/ρ, ρ² = Σ_j x_j²/d + ε",
    of7="LayerNorm: q = 1 − ε/σ²",
    of8="RMSNorm: q = 1 − ε/ρ²",
)
@given(tokens)
@on_tokens
def test_the_norms(token):
    x, eps = token
    mean, sigma, rho = parts(x, eps)
    close(layer_norm(x, eps), (x - mean) / sigma)
    close(rms_norm(x, eps), x / rho)
    close(layer_norm(x, eps).square().mean(), 1 - eps / sigma**2)
    close(rms_norm(x, eps).square().mean(), 1 - eps / rho**2)
    for (kind, (norm, normalize, _)), scale in zip(NORMS.items(), (sigma, rho), strict=True):
        truth = norm(x, eps)
        y, rstd = normalize(x[None], eps)
        close(y[0], truth)
        shift, slope = normalize.line(x[None], eps)
        close(((x - shift) * slope)[0], truth)
        close([1 / rstd.item(), 1 / slope.item(), on_token(kind, x, eps).scale.item()], [scale] * 3)
    swapped_in = RMSNorm(len(x), eps=eps, elementwise_affine=False, bias=False)
    close(swapped_in(x[None])[0], rms_norm(x, eps))


@holds(of3="LayerNorm: |y_i| ≤ √(d − 1)", of4="RMSNorm: |y_i| ≤ √d")
@given(tokens)
@on_tokens
def test_the_bounds(token):
    x, eps = token
    d = len(x)
    assert layer_norm(x, eps).abs().max() <= math.sqrt(d - 1) * (1 + 1e-12)
    assert rms_norm(x, eps).abs().max() <= math.sqrt(d) * (1 + 1e-12)
    alone = torch.zeros(d, dtype=torch.float64)
    alone[0] = 1e3
    close([layer_norm(alone, 0.0)[0], rms_norm(alone, 0.0)[0]], [math.sqrt(d - 1), math.sqrt(d)])


@pytest.mark.parametrize("d", [2, 16, 768])
@pytest.mark.parametrize("kind", NORMS)
def test_a_sites_bound_is_reached_by_one_large_element(kind, d):
    alone = torch.zeros(1, d)
    alone[0, d // 2] = 1e3
    (site,) = captured(getattr(nn, kind)(d, eps=0.0), alone).sites
    reached = NORMS[kind][0](alone.double(), 0.0).abs().max()
    close(site.bound, reached)


@holds(
    of5="LayerNorm: ∂y_i/∂x_j = (δ_ij − 1/d − y_i·y_j/d)/σ",
    of6="RMSNorm: ∂y_i/∂x_j = (δ_ij − y_i·y_j/d)/ρ",
    of9="LayerNorm: ‖∂y/∂x‖² = (d − 1 − 2q + q²)/σ²",
    of10="RMSNorm: ‖∂y/∂x‖² = (d − 2q + q²)/ρ²",
    of11="LayerNorm: Σ_i (∂y_i/∂x_i)² ≥ (1 − 2/d)·‖∂y/∂x‖²",
    of12="RMSNorm: Σ_i (∂y_i/∂x_i)² ≥ (1 − 1/d)·‖∂y/∂x‖²",
)
@given(tokens)
@on_tokens
def test_the_jacobians(token):
    x, eps = token
    _, sigma, rho = parts(x, eps)
    d = len(x)
    for (kind, (norm, _, taken)), scale in zip(NORMS.items(), (sigma, rho), strict=True):
        truth = jacobian(lambda x, norm=norm: norm(x, eps), x)
        y = norm(x, eps)
        # Entries that are nearly zero are differences of numbers of the size of 1/scale.
        size = {"rtol": 1e-10, "atol": 1e-10 / scale}
        close((torch.eye(d, dtype=torch.float64) - taken / d - torch.outer(y, y) / d) / scale, truth, **size)
        q = 1 - eps / scale**2
        squares = truth.square().sum()
        close((d - taken - 2 * q + q**2) / scale**2, squares, rtol=1e-9, atol=1e-10 / scale**2)
        diagonal = truth.diagonal().square().sum()
        assert diagonal >= (1 - (1 + taken) / d) * squares - 1e-10 / scale**2
        found = on_token(kind, x, eps)
        close(found.diagonal[0], truth.diagonal(), **size)
        close(found.rows[0], truth.square().sum(1), rtol=1e-9, atol=1e-10 / scale**2)
        close(found.rows.sum(), squares, rtol=1e-9, atol=1e-10 / scale**2)
        if squares > 1e-6 / scale**2:  # of two elements a LayerNorm leaves nothing but rounding
            close(found.share[0], diagonal / squares, rtol=1e-6)
            assert found.share[0] >= 1 - (1 + taken) / d - 1e-6


@holds(
    of13="LayerNorm: (∂y_i/∂x_i)² = (1 − 1/d − y_i²/d)·Σ_j (∂y_i/∂x_j)²",
    of14="RMSNorm: (∂y_i/∂x_i)² = (1 − y_i²/d)·Σ_j (∂y_i/∂x_j)²",
)
@given(tokens)
@on_tokens
def test_the_rows(token):
    x, _ = token
    d = len(x)
    for (kind, (norm, _, taken)), scale in zip(NORMS.items(), parts(x, 0)[1:], strict=True):
        truth = jacobian(lambda x, norm=norm: norm(x, 0.0), x)
        share = 1 - taken / d - norm(x, 0.0).square() / d
        close(share * truth.square().sum(1), truth.diagonal().square(), rtol=1e-9, atol=1e-10 / scale**2)
        found = on_token(kind, x, 0.0)
        told = (found.rows[0] > 1e-6 / scale**2).numpy()  # smaller ones are rounding, of which a share says nothing
        close(found.row_share[0][told], share[told], rtol=1e-6, atol=1e-9)


def solution(slope, at, start=(0.0, 0.0)):
    """Solve dy/dx = slope(x, y) numerically from ``start``."""
    x0, y0 = start
    found = solve_ivp(slope, (x0, at[-1]), [y0], t_eval=at, method="DOP853", rtol=1e-12, atol=1e-13)
    return found.y[0]


@pytest.mark.parametrize(("d", "scale"), [(2, 0.3), (16, 1.0), (768, 4.0)])
@holds(
    of15="RMSNorm: dy/dx = (1 − y²/d)/ρ",
    of16="LayerNorm: dy/dx = (1 − 1/d − y²/d)/σ = (d − 1)/(d·σ)·(1 − y²/(d − 1))",
    of17="RMSNorm: y = √d·tanh(x/(√d·ρ))",
    of18="LayerNorm: y = √(d − 1)·tanh(√(d − 1)·x/(d·σ))",
)
def test_constant_scale_gives_tanh(d, scale):
    x = np.linspace(0, 3 * math.sqrt(d) * scale, 40)
    close(
        math.sqrt(d) * np.tanh(x / (math.sqrt(d) * scale)),
        solution(lambda x, y: (1 - y**2 / d) / scale, x),
        **SOLVED,
    )
    found = math.sqrt(d - 1) * np.tanh(math.sqrt(d - 1) * x / (d * scale))
    close(found, solution(lambda x, y: (1 - 1 / d - y**2 / d) / scale, x), **SOLVED)
    close(found, solution(lambda x, y: (d - 1) / (d * scale) * (1 - y**2 / (d - 1)), x), **SOLVED)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("d", "size"), [(3, 0.3), (96, 4.0)])
def test_theory_curves_solve_the_diagonal_equations(kind, d, size):
    """Tokens of one scale each: those of normscope.fit(theory=True) against the equations with that scale in them."""
    noise = torch.randn(8, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    norm, normalize, taken = NORMS[kind]
    tokens = size * norm(noise, 0.0)  # in a LayerNorm of mean zero, so that x is about its token's mean
    tanh, isru = normscope.fit(captured(getattr(nn, kind)(d, eps=0.0), tokens), "tanh,isru", theory=True)
    _, rstd = normalize(tokens, 0.0)
    scale = 1 / rstd[0].item()
    x = np.linspace(0, 3 * math.sqrt(d) * scale, 40)
    close(
        function_of(TANH, tanh.amplitude, tanh.alpha, x),
        solution(lambda x, y: (1 - taken / d - y**2 / d) / scale, x),
        **SINGLE,
    )
    # Where ρ = x/y (22's t for a LayerNorm), from the same slope at the origin on.
    x, bound = np.geomspace(0.01, 30, 60) * isru.C**0.5, d - taken
    y = function_of(ISRU, isru.amplitude, isru.alpha, x)
    close(y, solution(lambda x, y: y / x * (1 - y**2 / bound), x, (x[0], y[0])), **SINGLE)
    close(isru.C, (bound / (1 - taken / d) ** 2) * scale**2 if taken else d * scale**2, **SINGLE)
    slope_at_zero = jacobians(normalize, torch.zeros(1, d, dtype=torch.float64), scale**2).diagonal[0, 0].item()
    close([isru.slope, tanh.slope], [slope_at_zero] * 2, **SINGLE)


@pytest.mark.parametrize(("d", "constant"), [(2, 0.3), (16, 5.0), (768, 2000.0)])
@holds(
    of19="dy/(y·(1 − y²/d)) = dx/x",
    of20="1/(y·(1 − y²/d)) = 1/y + (y/d)/(1 − y²/d)",
    of21="RMSNorm: y = √d·x/√(x² + C), C = x²·(d/y² − 1)",
    of22="LayerNorm: y = √(d − 1)·t/√(t² + C), C = t²·((d − 1)/y² − 1)",
)
def test_the_scale_of_the_pair_gives_isru(d, constant):
    C = constant
    x = np.geomspace(0.01, 30, 60) * math.sqrt(C)
    for top in (d, d - 1):
        y = math.sqrt(top) * x / np.sqrt(x**2 + C)
        start = (x[0], y[0])
        close(y, solution(lambda x, y, top=top: y / x * (1 - y**2 / top), x, start), **SOLVED)
        close(x**2 * (top / y**2 - 1), np.full_like(x, C), rtol=1e-9)
        close(function_of(ISRU, math.sqrt(top), C**-0.5, x), solved := y)
        layer = DyISRU(1, C=C).double()
        with torch.no_grad():
            layer.weight.fill_(math.sqrt(top))
            close(layer(torch.from_numpy(x)[:, None])[:, 0], solved, **SINGLE)
    a, b = 0.1, 0.9 * math.sqrt(d)  # both sides of (19), integrated from one pair to another
    by_y, _ = quad(lambda y: 1 / (y * (1 - y**2 / d)), a, b, epsabs=0, epsrel=1e-11)
    to_x = [y * math.sqrt(C / (d - y**2)) for y in (a, b)]  # (21), solved for x
    assert by_y == pytest.approx(math.log(to_x[1] / to_x[0]), rel=1e-10)
    y = np.linspace(a, b, 9)
    close(1 / y + y / d / (1 - y**2 / d), 1 / (y * (1 - y**2 / d)))


@holds(
    of23="RMSNorm: y_i = √d·x_i/√(x_i² + C), C = Σ_{j≠i} x_j² + d·ε",
    of24="LayerNorm: C = d/(d − 1)·(Σ_{j≠i} (x_j − m)² + d·ε), t = x_i − m",
)
@given(tokens, st.integers(0, 23), st.floats(-50, 50))
@on_tokens
def test_dyisru_is_the_norm_in_one_element(token, place, moved):
    """Whatever x_i becomes, with the constant that the others made."""
    x, eps = token
    d, i = len(x), place % len(x)
    others = torch.cat([x[:i], x[i + 1 :]])
    m = others.mean()
    x = x.clone()
    x[i] = moved
    C = others.square().sum() + d * eps
    close(math.sqrt(d) * moved / torch.sqrt(moved**2 + C), rms_norm(x, eps)[i])
    if C > 0:
        close(function_of(ISRU, math.sqrt(d), C.item() ** -0.5, moved), rms_norm(x, eps)[i])
    C, t = d / (d - 1) * ((others - m).square().sum() + d * eps), moved - m
    close(math.sqrt(d - 1) * t / torch.sqrt(t**2 + C), layer_norm(x, eps)[i])
    if C > 0:
        close(function_of(ISRU, math.sqrt(d - 1), C.item() ** -0.5, t.item()), layer_norm(x, eps)[i])


@holds(
    of25="tanh u = u − u³/3 + …, u/√(1 + u²) = u − u³/2 + …",
    of26="1 − tanh u ≈ 2·exp(−2u), 1 − u/√(1 + u²) ≈ 1/(2u²)",
)
def test_where_the_two_curves_part():
    _parted(np.tanh, lambda u: u / np.sqrt(1 + u * u))
    _parted(*(lambda u, curve=curve: function_of(curve, 1.0, 1.0, u) for curve in (TANH, ISRU)))
    layers = [layer.double() for layer in (DyT(1, alpha=1.0), DyISRU(1, C=1.0))]
    _parted(*(lambda u, f=layer: f(torch.tensor([[u]], dtype=torch.float64)).item() for layer in layers))
    u = torch.tensor([1e-2], dtype=torch.float64)  # and their derivatives, where the next terms are of u⁴
    assert ((1 - TANH.derivative(u)) / u**2).item() == pytest.approx(1, rel=1e-3)
    assert ((1 - ISRU.derivative(u)) / u**2).item() == pytest.approx(3 / 2, rel=1e-3)


def _parted(tanh, isru):
    u = 1e-2  # the next terms are of u⁵: 1e-4 of what is compared, or less
    assert (u - tanh(u)) / u**3 == pytest.approx(1 / 3, rel=1e-3)
    assert (u - isru(u)) / u**3 == pytest.approx(1 / 2, rel=1e-3)
    assert (1 - tanh(6.0)) == pytest.approx(2 * math.exp(-12), rel=1e-4)  # the next term is exp(−4u)
    assert (1 - isru(1e3)) == pytest.approx(1 / 2e6, rel=1e-5)


@holds(
    of27="RMSNorm: C/d = ρ² − x_i²/d",
    of28="LayerNorm: C·(d − 1)/d² = σ² − (x_i − μ)²/(d − 1)",
    of29="LayerNorm: x²·(d/y² − 1) = d·σ²·(x/(x − μ))² − x²",
)
@given(tokens)
@on_tokens
def test_both_assumptions_determine_the_constant(token):
    x, eps = token
    mean, sigma, rho = parts(x, eps)
    d = len(x)
    layer, rms = (on_token(kind, x, eps) for kind in NORMS)
    for i in range(d):
        others = torch.cat([x[:i], x[i + 1 :]])
        C = others.square().sum() + d * eps
        close(d * rms.others[0, i] ** 2, C, rtol=1e-10, atol=1e-12 * d * rho**2)
        # A difference of numbers of the size of ρ², to which rounding is relative.
        close(C / d, rho**2 - x[i] ** 2 / d, rtol=1e-10, atol=1e-13 * rho**2)
        C = d / (d - 1) * ((others - others.mean()).square().sum() + d * eps)
        close(d**2 / (d - 1) * layer.others[0, i] ** 2, C, rtol=1e-10, atol=1e-11 * d * (sigma**2 + mean**2))
        own = (x[i] - mean) ** 2 / (d - 1)
        close(C * (d - 1) / d**2, sigma**2 - own, rtol=1e-10, atol=1e-12 * (sigma**2 + mean**2))
    y = layer_norm(x, eps)
    raw = x**2 * (d / y**2 - 1)
    size = {"rtol": 1e-8, "atol": 1e-10 * float(x.square().max())}
    close(raw, d * sigma**2 * (x / (x - mean)) ** 2 - x**2, **size)
    told = constants_by_part(x[None], y[None], layer, math.inf)["all"].C
    quantiles = np.quantile(d * sigma**2 * (x / (x - mean)) ** 2 - x**2, (0.16, 0.5, 0.84), method="inverted_cdf")
    close([told.p16, told.p50, told.p84], quantiles, **size)
    told = constants_by_part(x[None], rms_norm(x, eps)[None], rms, math.inf)["all"]
    size = {"rtol": 1e-8, "atol": 1e-10 * d * rho**2}
    close([told.C.p16, told.C.p50, told.C.p84], [d * found**2 for found in vars(told.others).values()], **size)


def test_every_formula_of_the_page_is_held():
    formulas = re.findall(r"^    \((\d+)\) +(.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(number): text for number, text in formulas} == HELD
    assert [int(number) for number, _ in formulas] == list(range(1, len(HELD) + 1))
