"""How far outputs are from what a network gives, and how often that network runs."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.swaps.drift import output_errors
from normscope.swaps.drift.output_errors import OutputErrors

BATCHES = [
    Batch((torch.full((2, 3), float(n + 1)),), samples=tuple(Sample(f"{n}", n, k) for k in range(2))) for n in range(3)
]


@pytest.fixture
def networks():
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    other = copy.deepcopy(original)
    nn.init.normal_(other[1].weight)
    return original, other


@pytest.mark.parametrize(("room", "passes"), [(2**30, 3), (2 * 4 * 4, 3 + 2), (0, 3 + 3)])
def test_the_original_runs_once_for_what_memory_holds(networks, monkeypatch, room, passes):
    original, other = networks
    monkeypatch.setattr(output_errors, "MOST_OUTPUT_BYTES", room)
    calls = []
    original.register_forward_hook(lambda *_: calls.append(1))
    errors = OutputErrors(original, BATCHES, Outputs())
    assert not calls
    found = errors.of(other)
    assert torch.equal(found, errors.of(other)) and len(calls) == passes
    with torch.no_grad():
        pairs = [(original(*b.args).double().numpy(), other(*b.args).double().numpy()) for b in BATCHES]
    by_hand = [np.linalg.norm(z - y) / np.linalg.norm(y) for ys, zs in pairs for y, z in zip(ys, zs, strict=True)]
    np.testing.assert_allclose(found.numpy(), by_hand, rtol=1e-6)  # float32 within
    assert torch.equal(errors.of(original), torch.zeros(6, dtype=torch.float64))
