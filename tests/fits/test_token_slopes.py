"""Slopes of tokens against numpy."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.fits.scale import token_slopes


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
