"""One forward pass finds the sites in the order of their calls, and what is none of them, with why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normscope.inputs.batch import as_batches
from normscope.pairs.norms.trace import find_norms


def report_of(model, *inputs):
    return find_norms(model, next(as_batches([inputs])))


def test_sites_come_in_the_order_of_their_first_calls_with_their_counts():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.defined_first = nn.LayerNorm(6)
            self.called_first = nn.LayerNorm(6, elementwise_affine=False, eps=1e-3)
            self.never = nn.LayerNorm(6)

        def forward(self, x):
            x = self.called_first(x)
            return self.called_first(self.defined_first(x))

    report = report_of(Twice(), torch.randn(1, 5, 6))
    shown = [(s.index, s.name, s.calls, s.affine, s.eps, s.tokens_per_sample) for s in report.sites]
    assert shown == [(0, "called_first", 2, False, 1e-3, 10), (1, "defined_first", 1, True, 1e-5, 5)]
    assert [(norm.name, norm.reason) for norm in report.skipped] == [("never", "not called")]


def test_unknown_and_functional_norms_are_reported():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.local, self.inner = nn.LayerNorm(6), nn.LocalResponseNorm(2), Functional()

        def forward(self, x):
            return self.inner(self.local(self.norm(x).transpose(1, 2)))

    class Functional(nn.Module):
        def forward(self, x):
            return F.layer_norm(x, x.shape[-1:])

    report = report_of(Mixed(), torch.randn(1, 4, 6))
    assert [site.name for site in report.sites] == ["norm"]
    skipped = [(norm.name, norm.kind) for norm in report.skipped]
    assert skipped == [("local", "LocalResponseNorm"), ("inner", "layer_norm")]
    assert "called as a function" in report.skipped[1].reason


def test_a_module_that_only_holds_a_norm_is_none():
    class HoldsNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(self.linear(x))

    report = report_of(nn.Sequential(HoldsNorm()), torch.randn(1, 6))
    assert [site.name for site in report.sites] == ["0.norm"]
    assert not report.skipped
    weight_normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.LayerNorm(6))
    assert not report_of(weight_normed, torch.randn(1, 6)).skipped


def test_torchaudios_transposing_norm_is_seen_channels_first():
    components = pytest.importorskip("torchaudio.models.wav2vec2.components", exc_type=Exception)
    sites = report_of(nn.Sequential(components.LayerNorm(8)), torch.randn(1, 8, 20)).sites
    assert (sites[0].channel_axis, sites[0].normalized_shape) == (1, (8,))
