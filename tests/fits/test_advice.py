"""Advice against numpy on the numbers of the fits, and against the published table."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import normscope
from normscope.curves.known import CURVES
from normscope.fits.advice import (
    BY_WIDTH,
    Published,
    StartingValue,
    advise,
    feeds_of,
    layerwise,
    published,
    token_slopes,
)
from normscope.fits.curve_fit import CurveFit
from normscope.norms.sites import NormSite
from normscope.show.tables.fit import advice_table


def made(site, alpha=1.0, amplitude=1.0, curve="tanh", **changed):
    found = CurveFit(
        model="net", weights="made", data="noise", site=site, curve=curve, amplitude=amplitude, alpha=alpha, shift=0.0,
        r2=0.9, r2_ceiling=0.95, folds="source", rmse=0.1, n_pairs=100, straight=False, converged=True,
        function=CURVES.get(curve, CURVES["linear"]),
    )  # fmt: skip
    return replace(found, **changed)


def site(name, placement="pre-norm", d=8):
    return NormSite(0, name, "LayerNorm", (d,), -1, d, 1e-6, True, placement, 1, 1, True)


def table(advice, width=200):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(advice_table(advice))
    return console.export_text()


@pytest.mark.parametrize("alphas", [[0.2, 5.0, 0.8], [0.1, 0.4, 1.6, 30.0], [0.7]])
def test_the_start_is_the_median_and_one_outlier_does_not_move_it(alphas):
    amplitudes = [3 + n for n, _ in enumerate(alphas)]
    fits = [
        made(f"blocks.{n}.norm1", *both, curve="isru") for n, both in enumerate(zip(alphas, amplitudes, strict=True))
    ]
    (found,) = advise(fits)
    assert pytest.approx(float(np.exp(np.median(np.log([fit.C for fit in fits])))), rel=1e-12) == found.C
    assert advise([made("norm")])[0].C is None
    middle = float(np.exp(np.median(np.log(alphas))))
    assert found.alpha.value == pytest.approx(middle, rel=1e-12)  # float64's rounding of logarithms
    assert (found.alpha.least, found.alpha.most) == (min(alphas), max(alphas))
    assert found.amplitude == StartingValue(float(np.median(amplitudes)), min(amplitudes), max(amplitudes))
    assert (found.kind, found.sites, found.left_out) == ("blocks.*.norm1", len(alphas), 0)


def test_sites_without_a_start_are_counted_and_left_out():
    fits = [
        made("h.0.ln_1", 0.5),
        made("h.1.ln_1", 1e-6, straight=True),
        made("h.2.ln_1", 1e-6, converged=False),
        made("h.3.ln_1", math.nan, math.nan, nothing="all zero", converged=False),
        made("h.4.ln_1", 0.7),
        made("h.5.ln_1", 0.6),
    ]
    (found,) = advise(fits)
    assert (found.sites, found.straight, found.not_converged, found.nothing) == (3, 1, 1, 1)
    assert found.alpha == StartingValue(pytest.approx(0.6), 0.5, 0.7)
    assert "1 straight, 1 not converged, 1 nothing to fit" in " ".join(table([found]).split())
    (found,) = advise([made("norm", 1e-6, straight=True)])
    row = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert [row[name] for name in ("alpha", "amplitude", "C", "sites")] == [None, None, None, 0]
    assert "1 straight" in table([found])


def test_kinds_and_curves_are_separate_without_channels_and_free():
    fits = [
        made("a.0.norm"), made("a.0.norm", curve="isru"), made("b.0.norm"), made("a.1.norm"),
        made("a.1.norm", 99.0, channel=3), replace(made("a.1.norm", 99.0), curve="free"),
    ]  # fmt: skip
    found = [(one.kind, one.curve, one.sites, one.alpha.most) for one in advise(fits)]
    assert found == [("a.*.norm", "tanh", 2, 1.0), ("a.*.norm", "isru", 1, 1.0), ("b.*.norm", "tanh", 1, 1.0)]


@pytest.mark.parametrize(
    "kind, placement, feeds",
    [
        ("model.layers.*.input_layernorm", "pre-norm", "attention"),
        ("model.layers.*.post_attention_layernorm", "pre-norm", "other"),
        ("transformer.h.*.ln_1", "pre-norm", "attention"),
        ("layers.*.ffn_norm", "pre-norm", "other"),
        ("model.layers.*.pre_feedforward_layernorm", "pre-norm", "other"),
        ("model.norm", "final", "other"),
        # What these come before depends on the network, or is no residual branch.
        ("layers.*.norm1", "post-norm", None),
        ("layers.*.self_attn_layer_norm", "pre-norm", None),
        ("layers.*.self_attn_layer_norm_of_input_layernorm", "pre-norm", None),
        ("model.layers.*.input_layernorm", None, None),
    ],
)
def test_layers_after_a_norm_follow_from_unambiguous_names(kind, placement, feeds):
    assert feeds_of(kind, {placement}) == feeds
    assert feeds_of(kind, set()) is None
    assert feeds_of(kind, {"pre-norm", "post-norm"}) is None


# As the paper's tables of α₀ for LLaMA print them: width, attention, other; and widths between, whose nearest counts.
TABLE = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}
NEAREST = {768: 1024, 1500: 2048, 3072: 4096, 6656: 8192, 16384: 8192}


@pytest.mark.parametrize("width", [*TABLE, *NEAREST])
def test_published_values_are_those_of_the_paper_for_the_nearest_width(width):
    nearest = NEAREST.get(width, width)
    which = "" if width in TABLE else f", the nearest to {width}"
    for feeds, alpha in zip(("attention", "other"), TABLE[nearest], strict=True):
        assert published("language", {width}, feeds) == Published(alpha, f"LLaMA of width {nearest}{which}, {feeds}")
    assert set(BY_WIDTH) == set(TABLE)


@pytest.mark.parametrize(
    "family, widths, feeds, alpha",
    [
        ("vision", {8}, None, 0.5), ("speech", set(), "other", 0.5), ("diffusion", {8}, "attention", 0.5),
        (None, {4096}, "attention", None), ("your own", {4096}, "attention", None),
        ("language", {4096}, None, None), ("language", set(), "other", None), ("language", {8, 16}, "other", None),
    ],
)  # fmt: skip
def test_published_values_are_for_known_networks_only(family, widths, feeds, alpha):
    found = published(family, widths, feeds)
    assert (found and found.alpha) == alpha


def test_only_dyt_has_published_starts_here():
    norms = [site("layers.0.input_layernorm", d=4096)]
    fits = [made("layers.0.input_layernorm", curve=curve) for curve in ("tanh", "isru")]
    tanh, isru = advise(fits, norms, family="language")
    assert tanh.published.alpha == 0.8 and isru.published is None
    text = " ".join(table([tanh, isru], width=140).split())
    assert "0.8 (LLaMA of width 4096, attention)" in text
    assert "weight γ at A" in text


def test_columns_of_a_row():
    fits = [made(f"blocks.{n}.norm1", alpha, 2.0, "isru") for n, alpha in enumerate((0.25, 0.5, 1.0))]
    (found,) = advise(fits, [site("blocks.0.norm1")], family="vision")
    columns = {"model": "net", "kind": "blocks.*.norm1", "curve": "isru", "alpha": {"value": 0.5, "least": 0.25}}
    columns["alpha"]["most"] = 1.0
    columns |= {"shift": dict.fromkeys(("value", "least", "most"), 0.0)}
    columns |= {"amplitude": dict.fromkeys(("value", "least", "most"), 2.0), "C": 4.0, "sites": 3}
    columns |= {"left_out": dict.fromkeys(("straight", "not_converged", "nothing"), 0), "feeds": "attention"}
    assert list(found.as_dict().items()) == [*columns.items(), ("published_alpha", None), ("published_of", None)]


def tokens(count=400, d=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, d, generator=generator) * torch.exp(torch.randn(count, 1, generator=generator))


def test_slopes_of_tokens_are_those_of_their_lines():
    x = tokens()
    [found] = token_slopes(normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x]))
    slopes = 1 / np.sqrt(x.double().var(-1, correction=0).numpy() + 1e-5)
    for share, slope in found.slopes.items():
        # A bin of the histogram is an eighth of an octave, 9 %, wide.
        assert slope == pytest.approx(np.quantile(slopes, share), rel=0.09)
    assert found.ratio == pytest.approx(np.quantile(slopes, 0.95) / np.quantile(slopes, 0.05), rel=0.12)
    assert (found.n_tokens, found.drawn) == (400, 64)
    assert found.largest_error < 1e-5  # float32's rounding of |y| ≤ 8
    assert json.loads(json.dumps(found.as_dict()))["slope_50"] == found.slopes[0.5]


def test_a_site_without_tokens_has_no_slopes():
    [found] = token_slopes(normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.full((4, 8), np.nan)]))
    shown = found.as_dict()
    assert shown["n_tokens"] == 0 and shown["slope_50"] is None and shown["ratio"] is None


def test_one_curve_everywhere_is_compared_with_the_best_at_each_site():
    r2 = {"tanh": (0.9, 0.7), "isru": (0.8, 0.9), "softsign": (0.5, 0.95)}
    fits = [made(site, curve=curve, r2=r2[curve][n], parameters=3) for n, site in enumerate("ab") for curve in r2]
    fits += [made(site, curve="linear", r2=0.99, parameters=2) for site in "ab"] + [made("a", curve="free", r2=1.0)]
    best = layerwise(fits)
    assert (best.func, best.sites, best.curves, best.parameters) == ("isru", 2, 3, 3)
    assert (best.r2, best.r2_best) == (pytest.approx(0.85), pytest.approx(0.925))
    # A curve that some sites lack, as with ``best``, counts for the best at each alone.
    best = layerwise([fit for fit in fits if (fit.site, fit.curve) not in (("a", "isru"), ("a", "softsign"))])
    assert (best.func, best.r2, best.r2_best) == ("tanh", pytest.approx(0.8), pytest.approx(0.925))
    assert layerwise([fits[0], fits[4]]) is None  # no curve was fitted everywhere
    assert layerwise([fit for fit in fits if fit.curve in ("tanh", "linear", "free")]) is None
