"""Running a network, and restoring what a forward pass changes."""

import collections
import contextlib
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from normscope.inputs.batch import Batch, Sample
from normscope.runtime.network import restoring, run


class Buffers(nn.Module):
    """A module with buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.tensor([0.5, torch.nan, -0.0]))
        self.register_buffer("mask", torch.tensor([True, False]).expand(4, 2))
        self.register_buffer("angles", torch.polar(torch.ones(2), torch.tensor([0.1, 0.2])))
        self.register_buffer("none", None)
        self.register_buffer("there", torch.empty(3, device="meta"))
        self.reach, self.tied = 1, None


def bits(network: nn.Module) -> dict[str, bytes]:
    buffers = {name: buffer for name, buffer in network.named_buffers() if not buffer.is_meta}
    return {name: buffer.contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, buffer in buffers.items()}


def in_place(network):
    network.mean.add_(1)
    network.inner.num_batches_tracked += 1


def through_data(network):
    network.mean.data.mul_(3)


def another_object(network):
    network.angles = network.angles * 2
    network.reach, network.tied = 9, "set"


def another_buffer(network):
    network.inner.register_buffer("table", torch.ones(4), persistent=False)
    network.inner.reach = 4


def another_shape(network):
    network.mean.data = torch.zeros(7)


def deleted(network):
    del network.mean
    network.none = torch.ones(2)


CHANGES = (in_place, through_data, another_object, another_buffer, another_shape, deleted)


@settings(deadline=None)  # the first imports torch's compiler
@given(st.lists(st.sampled_from(CHANGES), max_size=4, unique=True))
def test_buffers_are_restored_as_objects_and_to_the_bit(changes):
    network = Buffers()
    before, objects = bits(network), dict(network._buffers)
    with restoring(network) as buffers:
        assert not buffers.changed
        for change in sorted(changes, key=CHANGES.index):
            change(network)
        assert buffers.changed == bool(changes)
    assert bits(network) == before and network.training and network.inner.training
    assert list(network._buffers) == list(objects) and all(network._buffers[name] is objects[name] for name in objects)
    assert (network.reach, network.tied, hasattr(network.inner, "reach")) == (1, None, False)


def test_unchanged_buffers_are_not_written():
    network = Buffers()
    versions = {name: buffer._version for name, buffer in network.named_buffers()}
    with restoring(network):
        network.inner.running_mean += 1
    after = {name: buffer._version for name, buffer in network.named_buffers()}
    assert {name for name in after if after[name] != versions[name]} == {"inner.running_mean"}
    assert not network.inner.running_mean.any()


def test_buffers_of_inference_mode_are_restored():
    with torch.inference_mode():
        network = Buffers()
    before = bits(network)
    with restoring(network), torch.inference_mode():
        network.mean += 1
    assert bits(network) == before


@pytest.mark.slow
def test_torchs_compiler_is_not_imported_for_torchs_own_modules():
    script = """
import sys
from torch import nn
from normscope.runtime.network import restoring

class Own(nn.Module):
    pass

for model in (nn.LayerNorm(4), Own()):
    with restoring(nn.Sequential(model)):
        print("torch._dynamo" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt()])
@pytest.mark.parametrize(("fused", "stance"), [(True, "default"), (False, "eager_on_recompile")])
def test_compilation_and_fusion_are_disabled_and_restored(failure, fused, stance):
    def state():
        return torch._dynamo.eval_frame._stance.stance, torch.backends.mha.get_fastpath_enabled()

    usual = state()
    with torch.compiler.set_stance(stance):
        torch.backends.mha.set_fastpath_enabled(fused)
        try:
            with pytest.raises(type(failure)) if failure else contextlib.nullcontext(), restoring(Buffers()):
                with restoring(Buffers()):
                    assert state() == ("force_eager", False)
                assert state() == ("force_eager", False)
                if failure is not None:
                    raise failure
            assert state() == (stance, fused)
            with restoring(Buffers(), timed=True):
                assert state() == (stance, fused)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert state() == usual


Pair = collections.namedtuple("Pair", "one two")


class Doubling(nn.Module):
    """Doubles all tensors among its arguments, at any depth, in place."""

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        for tensor in {id(tensor): tensor for tensor in tensors(self.seen)}.values():
            tensor.detach().mul_(2)
        return args[0]


class Cache:
    def __init__(self, lock=None) -> None:
        self.values, self.lock = torch.ones(2), lock


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Cache):
        return [] if value.lock else [value.values]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for entry in values for tensor in tensors(entry)]


def test_a_network_runs_on_copies_of_its_arguments():
    x, rows, locked, layer = torch.arange(6.0).view(2, 3), torch.ones(2, 2), Cache(threading.Lock()), nn.Linear(1, 1)
    x.requires_grad_()
    args = (x, [x, (rows,)], Pair(rows, {"deep": [torch.ones(2)]}), Cache(), locked, layer, "text", 3, None)
    kwargs = {"same": x, "whole": collections.OrderedDict(rows=rows)}
    before = [tensor.detach().clone() for tensor in tensors((args, kwargs))]
    network = Doubling()
    with torch.no_grad():
        run(network, Batch(args, kwargs, (Sample("a", 0, 0),)))
    assert all(torch.equal(a, b) for a, b in zip(tensors((args, kwargs)), before, strict=True))
    (first, (again, (its_rows,)), pair, cache, lock, same_layer, *rest), named = network.seen
    assert torch.equal(first, 2 * x) and first.requires_grad
    assert first is again is named["same"] and its_rows is pair.one is named["whole"]["rows"]
    assert type(pair) is Pair and type(named["whole"]) is collections.OrderedDict
    assert torch.equal(cache.values, 2 * torch.ones(2)) and lock is locked and same_layer is layer
    assert rest == ["text", 3, None]


def test_a_part_of_a_batch_is_copied_without_the_rest_and_its_graph():
    x = torch.ones(1000, 4, requires_grad=True)
    whole = Batch((x * 1,), samples=tuple(Sample("a", 0, i) for i in range(1000)))
    part = whole.take(range(3)).copied().args[0]
    assert part.untyped_storage().nbytes() == 3 * 4 * 4
    assert part.requires_grad and part.grad_fn is None
