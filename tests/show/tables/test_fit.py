"""Tables of fits: what their captions say."""

import pytest
import torch
from torch import nn

import normscope
from normscope.show.tables.fit import comparison_table, fits_table


@pytest.fixture(scope="module")
def fits():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    curves = "tanh,root=sign(x)*(1-exp(-sqrt(abs(x)))),isru,linear"
    return normscope.fit(normscope.capture(nn.Sequential(nn.LayerNorm(32)), [x]), curves)


def test_a_caption_tells_forms_apart(fits):
    assert "fitted: A, α, s; root: A, α ·" in fits_table(fits[:3]).caption


def test_a_curve_without_a_slope_whose_bend_no_pair_reaches_is_marked():
    x = nn.functional.layer_norm(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)), (32,))
    fits = normscope.fit(normscope.capture(nn.Sequential(nn.LayerNorm(32)), [x]), "root=sign(x)*abs(x)**.5,cubsign")
    table = fits_table(fits)
    columns = dict(zip(table.headings, zip(*table.rows, strict=True), strict=True))
    assert columns["A"][0] == "A and α not identified" and (columns["α"][0], columns["slope"][0]) == ("", "–")
    assert [fit.as_dict()["unidentified"] for fit in fits] == [True, False]


def test_numbers_of_free_parameters_are_shown_and_unlike_ones_not_ranked(fits):
    table = fits_table(fits)
    columns = dict(zip(table.headings, map(list, zip(*table.rows, strict=True)), strict=True))
    assert columns["params"] == ["3", "2", "3", "2"]
    assert [cell.rstrip("≈") for cell in columns["rank"]] == ["1", "2", "1", "1"]  # two lines are alike
    assert "rank: by held-out error among curves with as many free parameters" in table.caption


def test_comparisons_have_the_r2_that_compares_with_the_ceiling():
    x = torch.randn(24, 6, 8, generator=torch.Generator().manual_seed(0))
    rows = normscope.compare([normscope.capture(nn.Sequential(nn.LayerNorm(8)), [n * x]) for n in (1, 2)], "tanh")
    table = comparison_table(rows)
    columns = dict(zip(table.headings, zip(*table.rows, strict=True), strict=True))
    assert "R²" not in columns
    assert [float(cell) for cell in columns["held-out R²"]] == pytest.approx([row.fit.r2_cv for row in rows], abs=1e-3)
