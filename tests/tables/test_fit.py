"""Tables of fits: what their captions say."""

import pytest
import torch
from torch import nn

import normscope
from normscope.tables.fit import fits_table


@pytest.fixture(scope="module")
def fits():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    return normscope.fit(normscope.capture(nn.Sequential(nn.LayerNorm(32)), [x]), "tanh,exproot,isru,linear")


def test_a_caption_tells_forms_apart(fits):
    assert "fitted: A, α, s; exproot: A, α ·" in fits_table(fits[:3]).caption


def test_numbers_of_free_parameters_are_told_and_unlike_ones_not_ranked(fits):
    table = fits_table(fits)
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["params"] == ["3", "2", "3", "2"]
    assert [cell.rstrip("≈") for cell in columns["rank"]] == ["1", "2", "1", "1"]  # two lines are alike
    assert "rank: by held-out error among curves with as many free parameters" in table.caption
