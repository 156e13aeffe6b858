"""Tables of fits: what their captions say."""

import dataclasses

import torch
from torch import nn

import normscope
from normscope.tables.fit import fits_table


def test_a_caption_tells_forms_apart():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    fits = normscope.fit(normscope.capture(nn.Sequential(nn.LayerNorm(32)), [x]), "tanh,derf,isru")
    assert "fitted: A, α; derf: A, α, s ·" in fits_table(fits).caption


def test_a_curve_that_passes_the_ceiling_is_named():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    fits = normscope.fit(normscope.capture(nn.Sequential(nn.LayerNorm(32)), [x]), "tanh,mine=x/(1+abs(x))")
    assert "above 1" not in fits_table([dataclasses.replace(found, r2_ceiling=0.99) for found in fits]).caption
    fits = [dataclasses.replace(fits[0], r2_ceiling=0.99), dataclasses.replace(fits[1], r2_cv=0.8, r2_ceiling=0.79)]
    assert "of it above 1: mine predicts held-out folds better" in fits_table(fits).caption


def test_numbers_of_free_parameters_are_told_and_unlike_ones_not_ranked():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(32)), [x])
    table = fits_table(normscope.fit(seen, "tanh,derf,isru,linear"))
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["params"] == ["2", "3", "2", "1"]
    assert [cell.rstrip("≈") for cell in columns["rank"]] in (["1", "–", "2", "–"], ["2", "–", "1", "–"])
    assert "rank: among curves with as many free parameters" in table.caption
