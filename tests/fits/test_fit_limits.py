"""Where the ceiling is too low, or has no interval, and the output says so."""

import numpy as np
import pytest
import torch
from networks import network_of
from torch import nn

import normscope
from normscope.show.tables.fit import fits_table

SOURCES, TOKENS, D = 64, 24, 32


def drawn(blank=0.0, seed=0):
    """Tokens of sources, ``(SOURCES, TOKENS, D)``; a share of them are one of four, the same in every source."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SOURCES, TOKENS, D, generator=generator)
    x *= torch.randn(SOURCES, TOKENS, 1, generator=generator).exp()
    is_blank = torch.rand(SOURCES, TOKENS, generator=generator) < blank
    which = torch.randint(4, (SOURCES, TOKENS), generator=generator)
    return x.where(~is_blank[..., None], x[0, :4][which])


def fitted(x):
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(D, elementwise_affine=False)), [x])
    return normscope.fit(seen, "tanh")


def held_out_r2(x, groups=300):
    """R² of sources that are left out, eight at a time, by E[y|x]: that of each x that repeats, and between groups."""
    y = nn.functional.layer_norm(x, (D,)).double().numpy()
    x, left = x.numpy(), 0.0
    for fold in np.array_split(np.arange(SOURCES), 8):
        known = np.delete(np.arange(SOURCES), fold)
        values, place, times = np.unique(x[known].ravel(), return_inverse=True, return_counts=True)
        means = np.bincount(place, y[known].ravel()) / times
        others, y_of_others = values[times == 1], means[times == 1]
        parts = [
            (a.mean(), b.mean())
            for a, b in zip(np.array_split(others, groups), np.array_split(y_of_others, groups), strict=True)
        ]
        predicted = np.interp(x[fold], *zip(*parts, strict=True))
        at = np.searchsorted(values, x[fold]).clip(max=len(values) - 1)
        predicted = np.where((values[at] == x[fold]) & (times[at] > 1), means[at], predicted)
        left += np.sum((y[fold] - predicted) ** 2)
    return 1 - left / np.sum((y - y.mean()) ** 2)


def test_a_ceiling_that_is_too_low_as_x_repeats_is_marked():
    """By a function of x that tells repeated values from their neighbours in a bin."""
    x = drawn(blank=0.4)
    [fit] = fits = fitted(x)
    assert held_out_r2(x) > fit.intervals["r2_ceiling"][1] + 0.01
    assert fit.x_repeats and fit.as_dict()["x_repeats"]
    assert "ceiling underestimated at 0, where many x are identical" in fits_table(fits).caption


CONTINUOUS = {
    "of a ReLU, half of it zero": drawn().relu(),
    "of a network in half precision": drawn().half().float(),
    "of a network in bfloat16": drawn().bfloat16().float(),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_other_ceilings_are_not_marked(name):
    x = CONTINUOUS[name]
    [fit] = fits = fitted(x)
    assert not fit.x_repeats and "too low" not in fits_table(fits).caption
    assert held_out_r2(x) < fit.intervals["r2_ceiling"][1]


def test_where_nothing_is_left_to_explain_there_is_no_interval():
    """At a norm of a norm's output all that bends is one token that was nearly constant, and so lost to eps."""
    x = torch.randn(64, 20, 16, generator=torch.Generator().manual_seed(0))
    x[5, 3] *= 1e-3
    norms = nn.Sequential(*(nn.LayerNorm(16, elementwise_affine=False) for _ in range(2)))
    first, second = normscope.fit(normscope.capture(norms, [x]), "linear")
    assert second.r2_ceiling > 0.999
    assert {"r2", "r2_ceiling"}.isdisjoint(second.intervals) and "slope" in second.intervals
    for name in ("r2", "r2_ceiling"):
        low, high = first.intervals[name]
        assert 0 < low < getattr(first, name) < high < 1


def test_a_site_without_folds_is_fitted_beside_one_with_folds():
    token = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    network = network_of(lambda net, x: (net.all(x), net.two(x[:2])), all=nn.LayerNorm(8), two=nn.LayerNorm(8))
    seen = normscope.capture(network, [token.repeat(4, 1)])
    with_folds, without = normscope.fit(seen, "tanh")
    assert with_folds.folds == "source" and with_folds.r2_cv is not None
    assert (without.folds, without.r2_cv, without.r2_ceiling, dict(without.intervals)) == (None, None, None, {})
    assert without.alpha == pytest.approx(with_folds.alpha, rel=1e-6)
