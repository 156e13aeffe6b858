"""Weighted points made of bins: the sums of their pairs, also joined and mirrored."""

import numpy as np
import pytest
import torch
from captures import moments_of

from normscope.fits.nodes import coarsened, mirrored, nodes_of
from normscope.pairs.sums.binning import PAIR_GRID


def test_joined_bins_hold_what_their_bins_did():
    generator = torch.Generator().manual_seed(0)
    moments = torch.rand(2, 6, PAIR_GRID.size, generator=generator, dtype=torch.float64)
    edges = PAIR_GRID.edges()
    wide = coarsened(moments, 4)
    assert wide.shape[-1] == 2 * (45 * 16 + 1) + 1
    torch.testing.assert_close(wide.sum(-1), moments.sum(-1), rtol=1e-12, atol=0)
    # Bins of either sign stay apart, and each wide one begins where four narrow ones do.
    lower = coarsened(torch.where(edges[:-1] > 0, 1.0, 0.0), 4)
    assert set(lower.tolist()) == {0.0, 1.0, 4.0}
    torch.testing.assert_close(wide[..., 0], moments[..., 0])
    torch.testing.assert_close(wide[..., wide.shape[-1] // 2], moments[..., PAIR_GRID.centre])
    torch.testing.assert_close(wide[..., -2], moments[..., -5:-1].sum(-1), rtol=1e-12, atol=0)


def test_mirrored_sums_are_those_of_mirrored_pairs():
    x, y = np.random.default_rng(0).standard_normal((2, 1000))
    both = moments_of(np.concatenate([x, -x]), np.concatenate([y, -y]))[:, PAIR_GRID.centre :]
    folded = mirrored(moments_of(x, y))
    torch.testing.assert_close(folded[:, 1:], both[:, 1:], rtol=1e-12, atol=1e-12)


def test_nodes_have_the_sums_of_their_pairs():
    x, noise = np.random.default_rng(0).standard_normal((2, 5000))
    y = np.tanh(x) + 0.3 * noise
    nodes = nodes_of(coarsened(moments_of(x, y), 4)[None])
    x = x.astype(np.float32).astype(float)
    for power_x, power_y in ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1)):
        ours = (nodes.weight * nodes.x**power_x * nodes.y**power_y).sum()
        assert float(ours) == pytest.approx(np.sum(x**power_x * y**power_y), rel=1e-9, abs=1e-9)
    assert float((nodes.weight * nodes.y**2 + nodes.scatter).sum()) == pytest.approx(y @ y, rel=1e-9)
    assert float(nodes.total[0]) == pytest.approx(np.sum((y - y.mean()) ** 2), rel=1e-9)
    # Second order in the width of a bin.
    assert float((nodes.weight * nodes.x.tanh() * nodes.y).sum()) == pytest.approx(np.tanh(x) @ y, rel=1e-5)


def test_each_problem_has_nodes_of_its_own_pairs_alone_and_errs_as_it_does_by_itself():
    """FitBatch whose x lie octaves apart share no bins: side by side none has more nodes than alone."""
    generator = np.random.default_rng(3)
    x = generator.uniform(0.5, 1, (4, 3000)) * np.array([[1e-3], [1.0], [-30.0], [1e4]])
    x[0] = x[0, :300].repeat(10)
    stacked = torch.stack([moments_of(one, np.sin(one) + one) for one in x])
    both, alone = nodes_of(stacked), [nodes_of(one[None]) for one in stacked]
    assert both.x.shape[1] == max(one.x.shape[1] for one in alone)
    errors = both.residual(both.x.sin() - both.x)
    expected = torch.cat([one.residual(one.x.sin() - one.x) for one in alone])
    torch.testing.assert_close(errors, expected, rtol=1e-13, atol=0)  # sums of as many numbers in another order
    torch.testing.assert_close(both.total, torch.cat([one.total for one in alone]), rtol=1e-13, atol=0)
