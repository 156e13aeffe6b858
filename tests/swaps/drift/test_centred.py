"""Drift of RMSNorms after exact centring, against outputs computed here."""

import copy

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import ModelError
from normscope.swaps.drift.centred import centred_drift

D = 8


class Network(nn.Module):
    """A stream that a linear layer writes, and beside it one that an activation writes, each before its LayerNorm."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.inner = nn.Linear(4, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.rectified, self.head = nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x):
        return self.head(self.rectified(self.inner(self.norm(self.linear(x))).relu()))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return [torch.randn(5, 4) for _ in range(3)]


def report_on(network, batches, *names):
    sites = normscope.find_norms(network, normscope.Batch((batches[0],))).sites
    return centred_drift(network, batches[:1], batches[1:], [site for site in sites if site.name in names])


def test_a_norm_that_is_exact_costs_rounding_alone(network, batches):
    before = copy.deepcopy(network.state_dict())
    report = report_on(network, batches, "norm")
    assert (report.func, report.all.inputs, report.sites) == ("rmsnorm centred", 10, ["norm"])
    assert report.all.relative_l2.max < 1e-6
    assert isinstance(network.norm, nn.LayerNorm)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_the_other_norms_lose_their_mean(network, batches):
    report = report_on(network, batches, "norm", "rectified")
    x = torch.cat(batches[1:])
    with torch.no_grad():
        stream = network.inner(network.norm(network.linear(x))).relu()
        y = nn.functional.rms_norm(stream, (D,), eps=1e-5) * network.rectified.weight + network.rectified.bias
        expected, original = network.head(y), network(x)
    moved = ((expected - original).norm(dim=1) / original.norm(dim=1)).double()
    assert float(moved.median()) > 0.1
    assert report.all.relative_l2.p50 == pytest.approx(float(moved.quantile(0.5)), rel=1e-5)
    assert report.all.relative_l2.max == pytest.approx(float(moved.max()), rel=1e-5)


def test_there_is_no_report_where_no_norm_is_exact(network, batches):
    with pytest.raises(ModelError, match="No norm here can be rewritten exactly"):
        report_on(network, batches, "rectified")
