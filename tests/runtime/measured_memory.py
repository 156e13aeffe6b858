"""How much memory passes take, by what this process has at its peak; see test_batch_size.py, which starts it."""

import gc

import pytest
import torch
from torch import nn

from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import LoadOptions
from normscope.models.inputs.numbered_inputs import TensorInputs
from normscope.runtime import batch_size
from normscope.runtime.batch_size import Gauge, largest

CPU = torch.device("cpu")
MB = 2**20


def inputs(number):
    samples = [Sample(f"source {i}", i, i) for i in range(number)]
    return TensorInputs(
        torch.zeros(number, 4), samples, "zeros", LoadOptions("random", None, None, 3, 0, CPU, torch.float32)
    )


class Growing(nn.Module):
    """Takes 40 MB a sample, at its peak and not afterwards: what is so large goes back to the system at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.ones(len(x), 40 * MB // 4).sum(1) * self.scale


@pytest.mark.parametrize(("room", "size"), [(60 * MB, 1), (120 * MB, 2), (500 * MB, 8)])
def test_on_a_cpu_memory_ends_before_it_is_taken(monkeypatch, room, size):
    gc.collect()
    monkeypatch.setattr(batch_size, "available", lambda: room)
    monkeypatch.setattr(batch_size, "_SUMS", 0)
    found = largest(Growing(), inputs(256))
    # 40 MB · size is less than 80 % of the room, and twice of it is more, by 16 MB at least.
    assert (found.size, found.because) == (size, f"memory ends at {2 * size}")


def test_ranks_of_one_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(batch_size, "available", lambda: 480 * MB)
    monkeypatch.setattr(batch_size, "_SUMS", 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert largest(Growing(), inputs(256)).size == 2


def test_the_gauge_sees_a_peak_that_is_over(monkeypatch):
    monkeypatch.setattr(batch_size, "available", lambda: 1000 * MB + batch_size._SUMS)
    earlier = torch.ones(300 * MB // 4)
    del earlier
    gauge = Gauge([CPU])
    gauge.start()
    now = torch.ones(200 * MB // 4)
    del now
    assert gauge.fullness == pytest.approx(0.2, abs=0.02)  # 20 MB that others of this process come and go by
