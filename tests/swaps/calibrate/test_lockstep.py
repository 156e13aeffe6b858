"""Passes that wait for one another, against passes that run alone."""

import threading

import pytest
import torch
from torch import nn

from normscope.errors import ModelError
from normscope.inputs.batch import Batch, Sample
from normscope.swaps.calibrate.lockstep import all_to, stations, waiting_passes


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).requires_grad_(False)


def batches(sizes=(2, 1, 5)):
    generator = torch.Generator().manual_seed(1)
    return [
        Batch((torch.randn(size, 6, 4, generator=generator),), samples=tuple(Sample("a", 0, i) for i in range(size)))
        for size in sizes
    ]


def gone_on_to_the_end(passes):
    assert [one.go_on() for one in passes] == [None] * len(passes)
    return [one.result for one in passes]


@pytest.mark.parametrize("behind", [False, True])
def test_what_passes_give_is_what_they_give_alone(behind):
    model, inputs = network(), batches()
    with stations(model, ["2", "3"], behind=behind), waiting_passes(model, inputs) as passes:
        at_norm = all_to(passes, "2")
        for stop, batch in zip(at_norm, inputs, strict=True):
            alone = model[:2](batch.args[0])
            assert torch.equal(stop.input, alone)
            assert torch.equal(stop.output, model[2](alone)) if behind else stop.output is None
        all_to(passes, "3")
        results = gone_on_to_the_end(passes)
    for result, batch in zip(results, inputs, strict=True):
        assert torch.equal(result, model(batch.args[0]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_is_changed_where_all_wait_holds_for_all():
    model, inputs = network(), batches()
    with stations(model, ["3"], behind=False), waiting_passes(model, inputs) as passes:
        all_to(passes, "3")
        model[3].weight.zero_()
        model[3].bias.fill_(7.0)
        assert all(bool((result == 7).all()) for result in gone_on_to_the_end(passes))


def test_no_pass_is_left_behind():
    model, before = network(), threading.active_count()
    with stations(model, ["2"], behind=True), waiting_passes(model, batches()) as passes:
        all_to(passes, "2")
        assert threading.active_count() == before + len(passes)
    assert threading.active_count() == before


def test_a_network_that_fails_says_so_where_it_is_waited_for():
    model, inputs = network(), batches()
    inputs[1] = Batch((torch.zeros(1, 6, 5),), samples=inputs[1].samples)
    before = threading.active_count()
    with (
        pytest.raises(ModelError, match=r"Sequential raised RuntimeError on inputs of the shapes \(1, 6, 5\)"),
        stations(model, ["2"], behind=False),
        waiting_passes(model, inputs) as passes,
    ):
        all_to(passes, "2")
    assert threading.active_count() == before


def test_an_order_that_depends_on_the_input_is_refused():
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x)) if x.sum() > 0 else self.a(self.b(x))

    model = Turning().requires_grad_(False)
    inputs = [Batch((sign * torch.ones(1, 4),), samples=(Sample("a", 0, 0),)) for sign in (1, -1)]
    with (
        pytest.raises(ModelError, match="Batch 1 comes to b where the first one came to a"),
        stations(model, ["a", "b"], behind=True),
        waiting_passes(model, inputs) as passes,
    ):
        all_to(passes, "a")
