"""Tables of fits: what their captions say."""

import torch
from torch import nn

import normscope
from normscope.figures.fit_tables import fits_table


def test_a_caption_tells_forms_apart():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    fits = normscope.fit(normscope.capture(nn.Sequential(nn.LayerNorm(32)), [x]), "tanh,derf,isru")
    assert "fitted: A, α; derf: A, α, s ·" in fits_table(fits).caption
