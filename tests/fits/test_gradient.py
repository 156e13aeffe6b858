"""Jacobians against automatic differentiation, and the view of a site against its raw tokens."""

import json
import math

import captures
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import network_of
from torch import nn
from torch.autograd.functional import jacobian
from torch.func import jacrev, vmap

import normscope
from normscope.errors import DataError
from normscope.fits.gradient import gradient, jacobians
from normscope.fits.jackknife import interval
from normscope.inputs.batch import Sample
from normscope.norms.formulas import FORMS
from normscope.show.figures.gradient import plot_gradient

D = 24


def noise(tokens, d=D, seed=0, dtype=torch.float32):
    return torch.randn(tokens, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(
    st.integers(0, 1000), st.integers(2, 12), st.floats(-1, 1), st.floats(0, 30), st.sampled_from([1e-12, 0.1, 20.0])
)
@settings(max_examples=6, deadline=None)
def test_jacobians_are_those_of_automatic_differentiation(form, seed, d, scale, massive, eps):
    """An eps of 20 clamps most tokens of the norm that is clamped."""
    rows = noise(3, d, seed, torch.float64) * 10**scale
    rows[0, 0] += massive
    rows[1] += massive
    fit = jacobians(form, rows, eps)
    for token, row in enumerate(rows):
        truth = jacobian(lambda x: form(x[None], eps)[0][0], row)
        size = 1 / float(fit.scale[token])  # to which the rounding of what nearly cancels is relative
        torch.testing.assert_close(fit.diagonal[token], truth.diagonal(), rtol=1e-9, atol=1e-10 * size)
        torch.testing.assert_close(fit.rows[token], truth.square().sum(1), rtol=1e-8, atol=1e-9 * size**2)
        assert size == pytest.approx(float(form(row[None], eps)[1]), rel=1e-12)
        for i in range(d):
            moved = row.clone()
            moved[i] = torch.cat([row[:i], row[i + 1 :]]).mean() if form.about_mean else 0.0
            without = 1 / float(form(moved[None], eps)[1])
            assert float(fit.others[token, i]) == pytest.approx(without, rel=1e-6, abs=1e-6 / size)


def observed(module, x):
    """A capture of one norm, and its raw x and y."""
    seen, raw = captures.observed(nn.Sequential(module), [x], diagonal=True)
    return seen, raw.get("0")


def heavy_tailed(tokens=60):
    """Tokens of different σ and mean, with a massive channel; up to 64 of them are all drawn."""
    x = noise(tokens) * torch.exp(0.7 * noise(tokens, 1, 1)) + 0.3 * noise(tokens, 1, 2)
    x[:, 5] *= 12
    return x


def weighted(norm):
    """γ and β that the view must not see: it is about y before the affine step."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.fixture(scope="module", params=[nn.LayerNorm, nn.RMSNorm], ids=["layer", "rms"])
def site(request):
    norm = weighted(request.param(D, eps=1e-2))
    plain = request.param(D, eps=1e-2, elementwise_affine=False).double()
    seen, (x, y) = observed(norm, heavy_tailed())
    torch.testing.assert_close(plain(x), y, rtol=1e-4, atol=1e-5)
    matrices = torch.stack([jacobian(plain, row) for row in x])
    return gradient(seen)[0], x, plain(x), matrices


def shares_of(matrices):
    """Share of the diagonal in each Jacobian's squared norm."""
    return matrices.diagonal(dim1=1, dim2=2).square().sum(1) / matrices.square().sum((1, 2))


def test_shares_are_those_of_the_raw_tokens(site):
    view, x, _, matrices = site
    diagonals, shares = matrices.diagonal(dim1=1, dim2=2), shares_of(matrices)
    rows = diagonals.square() / matrices.square().sum(2)
    assert view.n_tokens == view.of_tokens == len(x)
    # The capture's x are these very numbers: what differs is float64's rounding.
    assert view.share == pytest.approx(float(shares.mean()), rel=1e-10)
    assert view.least_share == pytest.approx(float(shares.min()), rel=1e-10)
    assert view.least_row_share == pytest.approx(float(rows.min()), rel=1e-8)
    in_tail = x.abs() > np.quantile(x.abs().numpy(), 0.99, method="inverted_cdf")
    assert view.tail_share == pytest.approx(float(rows[in_tail].mean()), rel=1e-9)
    assert view.tail_share < view.share - 0.1  # so that the two cannot be taken for one another


def test_constants_are_quantiles_over_the_raw_pairs(site):
    view, x, y, _ = site
    x, y = x.numpy(), y.numpy()
    mean = x.mean(1, keepdims=True) if view.centred else 0.0
    scale = np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + 1e-2) + 0 * x
    # C from the pairs themselves, by (21) and by (22) of docs/theory.md, in the unit of the scale.
    t = (x - mean) * (D / (D - 1) if view.centred else 1)
    top = D - view.centred
    others = np.sqrt(t**2 * (top / y**2 - 1) * ((D - 1) / D**2 if view.centred else 1 / D))
    tail = np.abs(x) > np.quantile(np.abs(x), 0.99, method="inverted_cdf")
    values = {"scale": scale, "others": others, "C": x**2 * (D / y**2 - 1)}
    for part, inside in (("all", tail | ~tail), ("centre", ~tail), ("tail", tail)):
        fit = view.constants[part]
        assert fit.n_pairs == inside.sum() > 5
        for name, truth in values.items():
            quantiles = np.quantile(truth[inside], (0.16, 0.5, 0.84), method="inverted_cdf")
            spread = getattr(fit, name)
            # y is float32 in the capture: C, a difference, loses what its terms are larger by.
            assert (spread.p16, spread.p50, spread.p84) == pytest.approx(tuple(quantiles), rel=3e-5)
            assert spread.ratio == pytest.approx(quantiles[2] / quantiles[0], rel=3e-5)


def about_the_mean(diagonals, slopes):
    return float(1 - (diagonals - slopes).square().mean() / diagonals.var(correction=0))


def torchs_own(norm, x):
    """The Jacobian diagonals of all tokens."""
    return vmap(jacrev(lambda row: norm(row, (D,), eps=1e-2)))(x.double()).diagonal(dim1=1, dim2=2)


CURVES = ("tanh", "softsign", "hardtanh")


@pytest.mark.parametrize("norm", [nn.functional.layer_norm, nn.functional.rms_norm], ids=["layer", "rms"])
def test_r2_is_over_all_tokens_whichever_are_drawn(norm):
    x = heavy_tailed(1500)
    module = nn.LayerNorm(D, eps=1e-2) if norm is nn.functional.layer_norm else nn.RMSNorm(D, eps=1e-2)
    diagonals = torchs_own(norm, x)
    views = []
    for seed in range(2):
        seen = normscope.capture(nn.Sequential(module), x.split(500), seed=seed, diagonal=True)
        fits = normscope.fit(seen, CURVES)
        views += gradient(seen, fits)
        for fit in fits:
            slopes = fit.derivative(x.double())
            truth = about_the_mean(diagonals, slopes)
            # A bin's pairs are two points of the same mean and variance of x: the error is of third order in its width,
            # a hundredth of x. A derivative that jumps is wrong in a part of the bin where it does.
            tolerance = 1e-7 if fit.function.smooth else 1e-4
            assert views[-1].r2[fit.curve] == pytest.approx(truth, abs=tolerance)
    assert all(view.r2 == views[0].r2 and view.intervals == views[0].intervals for view in views)
    assert len({view.share for view in views}) == 2  # of the drawn tokens, which differ


def test_intervals_leave_one_fold_of_raw_tokens_out():
    x = heavy_tailed(600)
    batches = [
        normscope.Batch((part,), samples=tuple(Sample(f"{n}", n // 3, n) for n in range(at, at + len(part))))
        for at, part in zip(range(0, 600, 100), x.split(100), strict=True)
    ]
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(D, eps=1e-2)), batches, diagonal=True)
    fits = normscope.fit(seen, ["tanh", "isru"])
    [view] = gradient(seen, fits)
    assert view.folds == "source"
    samples = [sample for batch in batches for sample in batch.samples]
    diagonals, fold = torchs_own(nn.functional.layer_norm, x), torch.tensor(seen.stats["0"].sources.folds_of(samples))
    assert fold.view(200, 3).eq(fold[::3, None]).all() and fold.unique().tolist() == list(range(8))
    for fit in fits:
        slopes = fit.derivative(x.double())
        without = [about_the_mean(diagonals[fold != own], slopes[fold != own]) for own in range(8)]
        whole = about_the_mean(diagonals, slopes)
        logs = (1 - torch.tensor([without], dtype=torch.float64)).log()
        pairs = torch.bincount(fold).double()[None] * D
        low, high = interval(torch.tensor([1 - whole], dtype=torch.float64).log(), logs, pairs)
        bounds = (float(1 - high.exp()), float(1 - low.exp()))
        assert view.intervals[fit.curve] == pytest.approx(bounds, abs=1e-6)  # ten times what is off in each R²
        assert bounds[0] < view.r2[fit.curve] < bounds[1]
    document = view.as_dict()
    assert document["intervals"]["r2_tanh"] == list(view.intervals["tanh"])
    assert document["folds"] == "source"


def test_without_folds_there_is_no_interval_and_no_ceiling():
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(D)), [heavy_tailed(50)[None]], diagonal=True)
    [view] = gradient(seen, normscope.fit(seen))
    assert (view.folds, view.intervals) == (None, {})
    assert math.isnan(view.r2_of_x) and all(math.isfinite(r2) for r2 in view.r2.values())
    assert view.as_dict()["r2_of_x"] is None


def test_a_capture_without_the_sums_is_refused():
    model = nn.ModuleDict({"group": nn.GroupNorm(1, 4), "layer": nn.LayerNorm(D)})
    model.forward = lambda x: [norm(x) for norm in model.values()]
    seen = normscope.capture(model, [noise(12).view(3, 4, D)])
    for make in (gradient, plot_gradient):
        with pytest.raises(DataError) as error:
            make(seen, ())
        assert str(error.value) == (
            "The capture holds no sums of the diagonal of the Jacobian of layer; capture again with diagonal=True "
            "(normscope capture --diagonal)."
        )
    [view] = gradient(seen.only("group"))
    assert "a token is a group" in view.reason


def massive(tokens=60, d=100):
    """One element makes its token's scale alone, and the others are alike: the hundredth that is the tail."""
    x = noise(tokens, d)
    x[:, 3] = torch.linspace(40, 4000, tokens)
    return x


def test_the_assumptions_differ_in_the_tail():
    """DyISRU is right there, and DyT is not."""
    seen, _ = observed(nn.RMSNorm(100), massive())
    [view] = gradient(seen)
    assert view.constants["tail"].n_pairs > 50
    assert view.constants["tail"].steadier == "others"
    assert view.constants["tail"].others.ratio < 1.3 < 4 < view.constants["tail"].scale.ratio
    assert view.constants["centre"].steadier is None  # there the two are the same
    assert view.least_row_share < 1e-3
    assert view.least_share > 1 - 1 / 100 - 1e-6  # the bound (12), which ε only raises


def test_where_x_determines_the_diagonal_its_mean_predicts_it_and_only_there():
    """Permutations of one token have the same ρ, so that ∂y/∂x is a function of x."""
    one = torch.linspace(-3, 3, 8).repeat(3)
    seen, _ = observed(nn.RMSNorm(D), one[noise(64).argsort(1)])
    assert gradient(seen)[0].r2_of_x == pytest.approx(1.0, abs=1e-9)
    seen, _ = observed(nn.RMSNorm(100), massive()[noise(60, 1).flatten().argsort()])
    assert gradient(seen)[0].r2_of_x < 0.1


def norm_by_largest():
    """A registered norm that divides by the largest |x|."""

    def normalize(rows, eps):
        rstd = 1 / (rows.abs().amax(-1, keepdim=True) + eps)
        return rows * rstd, rstd

    network = network_of(lambda net, x: normalize(x, net.eps)[0], kind="ByLargest", eps=1e-5)
    normscope.register_norm(type(network), normalize=normalize, centred=False)
    return network


@pytest.mark.parametrize(
    ("module", "x", "reason"),
    [
        (nn.GroupNorm(2, 8), noise(4, 8 * 9).view(4, 8, 9), "a token is a group"),
        (nn.BatchNorm1d(8).eval(), noise(4, 8 * 9).view(4, 8, 9), "running statistics"),
        (nn.LayerNorm(1), noise(9, 1), "one element"),
        (nn.LayerNorm(8), torch.full((9, 8), torch.nan), "no finite token"),
        (None, noise(9), "of no form whose Jacobian is known"),
    ],
    ids=["group", "batch", "one", "nan", "unknown"],
)
def test_sites_without_a_closed_form_have_a_reason(module, x, reason):
    seen, _ = observed(module or norm_by_largest(), x)
    [view] = gradient(seen, normscope.fit(seen, "tanh"))
    assert reason in view.reason
    assert view.n_tokens == 0 and not view.constants and not view.r2
    document = json.loads(json.dumps(view.as_dict(), allow_nan=False))
    assert document["share"] is None and document["reason"] == view.reason


def test_a_degenerate_site_has_no_r2():
    seen, _ = observed(nn.LayerNorm(D), torch.zeros(9, D))
    fits = normscope.fit(seen)
    [view] = gradient(seen, fits)
    assert all(fit.degenerate for fit in fits)
    assert all(math.isnan(value) for value in view.r2.values())
    document = json.loads(json.dumps(view.as_dict(), allow_nan=False))
    assert document["r2"] == {"tanh": None, "isru": None}
    assert document["constants"]["tail"] == {
        "n_pairs": 0,
        **{name: dict.fromkeys(("p16", "p50", "p84", "ratio")) for name in ("scale", "others", "C")},
        "steadier": None,
    }
    assert view.constants["all"].scale.ratio == pytest.approx(1.0)
