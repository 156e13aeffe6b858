"""What is fitted at once; the levels themselves are held to raw pairs in tests/fits/test_fit.py."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import normscope
from normscope.fits.solving.levels import levels_of


@pytest.mark.parametrize(("pool", "levels"), [(None, 4), ("kind", 2), ("all", 1)])
def test_a_pool_by_kind_joins_the_sites_whose_paths_differ_in_numbers_alone(pool, levels):
    blocks = [nn.Sequential(OrderedDict(norm1=nn.LayerNorm(8), norm2=nn.LayerNorm(8))) for _ in range(2)]
    seen = normscope.capture(nn.Sequential(*blocks), [torch.randn(4, 8)])
    assert len(levels_of(seen, pool=pool)) == levels
