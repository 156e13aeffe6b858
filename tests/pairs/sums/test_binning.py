import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.pairs.sums.binning import PAIR_GRID, TOKEN_GRID, FloatGrid
from normscope.pairs.sums.reference import binned_moments

finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
grids = st.sampled_from([PAIR_GRID, TOKEN_GRID, FloatGrid(4, -3, 5)])


@given(grids, st.lists(finite_floats, min_size=1, max_size=50))
def test_every_number_lies_between_the_edges_of_its_bin(grid, values):
    x = torch.tensor(values, dtype=torch.float32)
    index, edges = grid.index(x), grid.edges()
    assert len(edges) == grid.size + 1 and bool((edges.diff() > 0).all())
    low, high, exact = edges[index], edges[index + 1], x.double()
    # Bins of positive numbers hold their lower edge, those of negative numbers their upper one.
    assert bool(torch.where(exact >= 0, (low <= exact) & (exact < high), (low < exact) & (exact <= high)).all())


@given(st.floats(min_value=2.0**-27, max_value=2.0**18 - 1, width=32))
def test_a_bin_is_exponent_and_leading_mantissa_bits(x):
    mantissa, exponent = math.frexp(x)  # x = mantissa · 2^exponent, mantissa in [0.5, 1)
    octave, step = exponent - 1 + 27, math.floor((2 * mantissa - 1) * 64)
    assert PAIR_GRID.index(torch.tensor([x])).item() == PAIR_GRID.centre + 1 + 64 * octave + step


@given(finite_floats)
def test_the_grid_is_symmetric(x):
    plus, minus = PAIR_GRID.index(torch.tensor([x, -x])).tolist()
    assert plus + minus == 2 * PAIR_GRID.centre


def test_index_keeps_the_shape_and_takes_strided_input():
    x = torch.randn(4, 6, 5).transpose(0, 2)
    assert torch.equal(PAIR_GRID.index(x), PAIR_GRID.index(x.contiguous()))


def test_moments_equal_numpys_sums_bin_by_bin():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 5000, generator=generator).double()
    index = torch.randint(7, (5000,), generator=generator)
    moments = binned_moments(x, y, index, 8).numpy()
    for bin_number in range(8):
        own = (index == bin_number).numpy()
        a, b = x.numpy()[own].astype(np.float64), y.numpy()[own].astype(np.float64)
        expected = [own.sum(), a.sum(), b.sum(), a @ a, a @ b, b @ b]
        # float64 sums of 700 numbers: the order of summation moves the last few of 16 digits.
        np.testing.assert_allclose(moments[:, bin_number], expected, rtol=1e-12, atol=1e-12)
