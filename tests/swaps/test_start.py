"""Start values are the numbers of the fits, of the theory or of the papers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import normscope
from normscope.cli.swapping import SwapChoice
from normscope.errors import UsageError
from normscope.swaps.inits import INITS, Init
from normscope.swaps.replace import replacements
from normscope.swaps.start import fitted, starts

WIDTH = 12


def captured(**options):
    """Two norms: of tokens whose mean is far from zero, and of tokens about zero, with sums per channel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).eval()
    nn.init.uniform_(model[0].weight, 0.1, 5)
    x = torch.randn(400, WIDTH) * torch.linspace(0.2, 4, WIDTH) + 2
    return normscope.capture(model, [x], per_channel=True, **options)


@pytest.fixture(scope="module")
def seen():
    return captured(by_gamma=True)


@pytest.fixture(scope="module")
def plain():
    return captured()


@pytest.fixture(scope="module")
def fits(seen):
    return normscope.fit(seen, "tanh,isru,free,best")


@pytest.fixture(scope="module")
def tanh(fits):
    return [fit for fit in fits if fit.curve == "tanh"]


def numbers(start):
    return float(start.amplitude), float(start.alpha), None if start.shift is None else float(start.shift)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dyt", "isru", "derf", "identity", "mine=x/(1+abs(x))"])
def test_a_capture_is_fitted_with_shift_and_by_what_reaches_the_next_layer(seen, plain, name):
    for capture, by in ((seen, "gamma"), (plain, "pairs")):
        expected = normscope.fit(capture, [name], shift=True, weights_by=by)
        for start, fit in zip(starts(name, capture), expected, strict=True):
            assert numbers(start) == (fit.amplitude, fit.alpha, fit.shift or None)
            assert start.curve.name == fit.curve
            assert start.norm.name == fit.site
    assert fitted(seen, name) != fitted(plain, name)


def test_derf_has_a_shift_also_where_none_was_fitted(seen):
    for fit in (starts("derf", seen, "theory"), starts("derf", normscope.fit(seen, "erf", shift=False))):
        assert [(start.curve.name, float(start.shift)) for start in fit] == [("derf", 0.0)] * 2


def test_start_values_are_the_parameters_of_the_fits(fits):
    for name in ("tanh", "isru"):
        begun = starts(name, fits)
        expected = [fit for fit in fits if fit.curve == name]
        assert [numbers(start)[:2] for start in begun] == [(fit.amplitude, fit.alpha) for fit in expected]
    assert [start.curve.name for start in starts("best", fits)] == [fit.curve for fit in fits if fit.best]
    assert [start.curve.name for start in starts("free", fits)] == ["free", "free"]


@pytest.mark.slow
def test_best_is_the_best_of_curves_with_shift(seen):
    best = starts("best", seen)
    expected = [fit for fit in normscope.fit(seen, "best", shift=True, weights_by="gamma") if fit.best]
    assert [start.curve.name for start in best] == [fit.curve for fit in expected]
    errors = normscope.fit(seen, "tanh,isru,erf,arctan", shift=True, weights_by="gamma")
    for start, fit in zip(best, expected, strict=True):
        assert numbers(start)[:2] == (fit.amplitude, fit.alpha)
        of_site = [other for other in errors if other.site == fit.site]
        assert fit.r2_cv is None or fit.r2_cv >= max(other.r2_cv for other in of_site) - 1e-9


def test_theory_is_the_norms_own_slope_and_bound(plain):
    """√(d−1)·tanh(x√(d−1)/(dσ)), as DyT is derived, at the slope of the token of mean σ."""
    for start in starts("tanh", plain, "theory"):
        amplitude, alpha, shift = numbers(start)
        assert amplitude == pytest.approx(math.sqrt(WIDTH - 1), rel=1e-12)
        (fit,) = (fit for fit in normscope.fit(plain, "tanh", theory=True) if fit.site == start.norm.name)
        assert (alpha, shift) == (fit.alpha, None)


def test_paper_needs_no_fit(seen, fits):
    for given in (seen, seen.sites, [fit for fit in fits if fit.curve == "isru"]):
        assert [numbers(start) for start in starts("dyt", given, "paper")] == [(1, 0.5, None)] * 2
        assert [numbers(start) for start in starts("derf", given, "paper")] == [(1, 0.5, 0)] * 2
        assert [start.curve for start in starts("rmsnorm", given)] == [None, None]


def test_a_new_row_of_the_table_is_an_initialization_everywhere(seen, monkeypatch):
    monkeypatch.setitem(INITS, "unit", Init("as wide as the norm", "-", lambda site: (site.channels, 2.0, 0.0)))
    assert [numbers(start) for start in starts("dyt", seen, "unit")] == [(WIDTH, 2, None)] * 2
    choice = SwapChoice.of("dyt", "unit", "site", None)
    assert (choice.start, choice.begin, choice.needs_pairs) == ("unit", "unit", False)


def test_fits_of_channels(seen):
    fits = normscope.fit(seen, "tanh", per="channel")
    start = next(start for start in starts("tanh", fits[::-1]) if start.norm.name == "0")
    own = [fit for fit in fits if fit.site == "0"]
    assert start.amplitude.tolist() == [fit.amplitude for fit in own]
    assert start.alpha.tolist() == [fit.alpha for fit in own]
    idle = [replace(own[0], nothing="a single value", amplitude=math.nan, alpha=math.nan), *own[1:]]
    (start,) = starts("tanh", idle)
    assert (start.amplitude[0], start.alpha[0]) == (0, 1)
    assert start.alpha[1:].tolist() == [fit.alpha for fit in own[1:]]
    with pytest.raises(UsageError, match="The fits of 0 are not one for each of its 12 channels"):
        starts("tanh", own[:-1])
    with pytest.raises(UsageError, match="The fits of 0 are not one for each of its 12 channels"):
        starts("tanh", [*own[:-1], own[0]])
    model = nn.Sequential(nn.LayerNorm(WIDTH)).eval()
    layer = replacements(model, "tanh", own)["0"]
    x = torch.randn(5, WIDTH)
    expected = torch.stack([fit(x[:, fit.channel]) for fit in own], 1).float()
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_a_site_without_a_fit_can_be_left_out(tanh):
    fits = [replace(tanh[0], nothing="all pairs alike"), tanh[1]]
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).eval()
    with pytest.raises(UsageError, match=r"Nothing could be fitted at 0 \(all pairs alike\); exclude it with layers"):
        replacements(model, "tanh", fits)
    assert list(replacements(model, "tanh", fits, layers=["2"])) == ["2"]


NO_STARTS = [
    (lambda seen, fits: starts("tanh", seen, "theroy"), "initialization 'theroy'"),
    (lambda seen, fits: starts("tahn", seen), "replacement 'tahn'. Did you mean 'tanh'"),
    (lambda seen, fits: starts("tanh,isru", seen), r"names 2\.$"),
    (lambda seen, fits: starts("free", seen, "paper"), "free is what was fitted: there is no paper start of it"),
    (lambda seen, fits: starts("isru", fits), r"None of the fits is of isru\. Fit it first"),
    (lambda seen, fits: starts("best", fits), "None of the fits is of best"),
    (lambda seen, fits: starts("tanh", fits, "theory"), "made of a capture, not of fits"),
    (lambda seen, fits: starts("tanh", [*fits, replace(fits[0], form="A")]), "2 fits of tanh at 0; a swap takes one"),
    (lambda seen, fits: starts("rmsnorm", []), "There is no norm site to swap"),
    (
        lambda seen, fits: starts("tanh", normscope.fit(seen, "tanh", pool="all"), "paper"),
        "pools several sites; a swap takes one",
    ),
]


@pytest.mark.parametrize(("call", "fragment"), NO_STARTS)
def test_refusals(seen, tanh, call, fragment):
    with pytest.raises(UsageError, match=fragment):
        call(seen, tanh)


def test_softcap_keeps_its_slope_of_one_and_has_no_shift(seen):
    for start in starts("softcap", seen):
        assert float(start.amplitude * start.alpha) == pytest.approx(1, rel=1e-12)
        assert start.shift is None
