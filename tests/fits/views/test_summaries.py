"""Slopes of tokens, and one curve everywhere against the best at each site."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.fits.views.summaries import layerwise


def tokens(count=400, d=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, d, generator=generator) * torch.exp(torch.randn(count, 1, generator=generator))


def test_slopes_of_tokens_are_those_of_their_lines():
    x = tokens()
    [found] = normscope.token_slopes(normscope.capture(nn.Sequential(nn.LayerNorm(64)), [x]))
    slopes = 1 / np.sqrt(x.double().var(-1, correction=0).numpy() + 1e-5)
    for share, slope in found.slopes.items():
        # A bin of the histogram is an eighth of an octave, 9 %, wide.
        assert slope == pytest.approx(np.quantile(slopes, share), rel=0.09)
    assert found.ratio == pytest.approx(np.quantile(slopes, 0.95) / np.quantile(slopes, 0.05), rel=0.12)
    assert (found.n_tokens, found.drawn) == (400, 64)
    assert found.largest_error < 1e-5  # float32's rounding of |y| ≤ 8
    assert json.loads(json.dumps(found.as_dict()))["slope_50"] == found.slopes[0.5]


def test_a_site_without_tokens_has_no_slopes():
    [found] = normscope.token_slopes(normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.full((4, 8), np.nan)]))
    shown = found.as_dict()
    assert shown["n_tokens"] == 0 and shown["slope_50"] is None and shown["ratio"] is None


def test_one_curve_everywhere_is_no_better_than_the_best_at_each_site():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((400, 64))
    model = nn.ModuleDict({"one": nn.LayerNorm(64), "two": nn.LayerNorm(64)})
    model.forward = lambda x: (model["one"](x), model["two"](torch.sinh(x)))
    fits = normscope.fit(normscope.capture(model, [torch.from_numpy(x).float() * tokens(400, 1)]), "all,free")
    found = layerwise(fits)
    table = {name: [one.r2 for one in fits if one.curve == name] for name in {one.curve for one in fits} - {"free"}}
    assert found.r2 == pytest.approx(max(np.mean(own) for own in table.values()), rel=1e-12)
    assert np.mean(table[found.func]) == pytest.approx(found.r2, rel=1e-12)
    assert found.r2_best == pytest.approx(np.mean(np.max(list(table.values()), axis=0)), rel=1e-12)
    assert found.r2_best >= found.r2 and found.sites == 2
    assert layerwise([one for one in fits if one.curve == "tanh"]) is None


def test_what_best_stands_for_counts_at_its_site_alone():
    model = nn.ModuleDict({"one": nn.LayerNorm(64), "two": nn.LayerNorm(64)})
    model.forward = lambda x: (model["one"](x), model["two"](torch.sinh(x)))
    seen = normscope.capture(model, [tokens()])
    best = normscope.fit(seen, "best")
    assert best[0].curve != best[1].curve
    assert layerwise(best) is None  # no curve was fitted everywhere
    tanh = normscope.fit(seen, "tanh")
    found = layerwise(normscope.fit(seen, "tanh,best"))
    assert (found.func, found.sites) == ("tanh", 2)
    assert found.r2 == pytest.approx(np.mean([one.r2 for one in tanh]), rel=1e-12)
    # What predicts held-out folds best need not have the largest R² on the pairs that it was fitted to.
    largest = [max(one.r2, own.r2) for one, own in zip(tanh, best, strict=True)]
    assert found.r2_best == pytest.approx(np.mean(largest), rel=1e-12)
