"""Levels: tokens, channels and pools, and one curve everywhere against the best at each site."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.fits.solving.levels import kind_of_site
from normscope.fits.solving.nodes import joined, mirrored, nodes_of
from normscope.fits.views.summaries import layerwise
from normscope.pairs.sums.binning import PAIR_GRID


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [("blocks.11.norm1", "blocks.*.norm1"), ("norm", "norm"), ("0", "*"), ("a1.b2.3.4", "a1.b2.*.*")],
)
def test_numbers_between_dots_make_no_kind(name, kind):
    assert kind_of_site(name) == kind


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


def test_joined_bins_hold_what_their_bins_did():
    generator = torch.Generator().manual_seed(0)
    moments = torch.rand(2, 6, PAIR_GRID.size, generator=generator, dtype=torch.float64)
    edges = PAIR_GRID.edges()
    wide = joined(moments, 4)
    assert wide.shape[-1] == 2 * (45 * 16 + 1) + 1
    torch.testing.assert_close(wide.sum(-1), moments.sum(-1), rtol=1e-12, atol=0)
    # Bins of either sign stay apart, and each wide one begins where four narrow ones do.
    lower = joined(torch.where(edges[:-1] > 0, 1.0, 0.0), 4)
    assert set(lower.tolist()) == {0.0, 1.0, 4.0}
    torch.testing.assert_close(wide[..., 0], moments[..., 0])
    torch.testing.assert_close(wide[..., wide.shape[-1] // 2], moments[..., PAIR_GRID.centre])
    torch.testing.assert_close(wide[..., -2], moments[..., -5:-1].sum(-1), rtol=1e-12, atol=0)


def test_mirrored_sums_are_those_of_mirrored_pairs(moments_of):
    x, y = np.random.default_rng(0).standard_normal((2, 1000))
    both = moments_of(np.concatenate([x, -x]), np.concatenate([y, -y]))[:, PAIR_GRID.centre :]
    folded = mirrored(moments_of(x, y))
    torch.testing.assert_close(folded[:, 1:], both[:, 1:], rtol=1e-12, atol=1e-12)


def test_nodes_have_the_sums_of_their_pairs(moments_of):
    x, noise = np.random.default_rng(0).standard_normal((2, 5000))
    y = np.tanh(x) + 0.3 * noise
    nodes = nodes_of(joined(moments_of(x, y), 4)[None])
    x = x.astype(np.float32).astype(float)
    for power_x, power_y in ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1)):
        ours = (nodes.weight * nodes.x**power_x * nodes.y**power_y).sum()
        assert float(ours) == pytest.approx(np.sum(x**power_x * y**power_y), rel=1e-9, abs=1e-9)
    assert float((nodes.weight * nodes.y**2 + nodes.scatter).sum()) == pytest.approx(y @ y, rel=1e-9)
    assert float(nodes.total[0]) == pytest.approx(np.sum((y - y.mean()) ** 2), rel=1e-9)
    # Second order in the width of a bin.
    assert float((nodes.weight * nodes.x.tanh() * nodes.y).sum()) == pytest.approx(np.tanh(x) @ y, rel=1e-5)
