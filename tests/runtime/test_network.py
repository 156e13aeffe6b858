"""A network that is lent: what a forward pass changes is put back."""

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
from normscope.runtime.network import left_as_found, run


class Held(nn.Module):
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
    own = {name: buffer for name, buffer in network.named_buffers() if not buffer.is_meta}
    return {name: buffer.contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, buffer in own.items()}


def in_place(network):
    network.mean.add_(1)
    network.inner.num_batches_tracked += 1


def through_data(network):
    network.mean.data.mul_(3)


def another_object(network):
    network.angles = network.angles * 2
    network.reach, network.tied = 9, "set"


def more_of_them(network):
    network.inner.register_buffer("table", torch.ones(4), persistent=False)
    network.inner.reach = 4


def another_shape(network):
    network.mean.data = torch.zeros(7)


def none_left(network):
    del network.mean
    network.none = torch.ones(2)


CHANGES = (in_place, through_data, another_object, more_of_them, another_shape, none_left)


@settings(deadline=None)  # the first imports torch's compiler
@given(st.lists(st.sampled_from(CHANGES), max_size=4, unique=True))
def test_buffers_come_back_as_the_objects_and_to_the_bit_that_they_were(changes):
    network = Held()
    before, objects = bits(network), dict(network._buffers)
    with left_as_found(network) as buffers:
        assert not buffers.changed
        for change in sorted(changes, key=CHANGES.index):
            change(network)
        assert buffers.changed == bool(changes)
    assert bits(network) == before and network.training and network.inner.training
    assert list(network._buffers) == list(objects) and all(network._buffers[name] is objects[name] for name in objects)
    assert (network.reach, network.tied, hasattr(network.inner, "reach")) == (1, None, False)


def test_what_did_not_change_is_not_written():
    network = Held()
    versions = {name: buffer._version for name, buffer in network.named_buffers()}
    with left_as_found(network):
        network.inner.running_mean += 1
    after = {name: buffer._version for name, buffer in network.named_buffers()}
    assert {name for name in after if after[name] != versions[name]} == {"inner.running_mean"}
    assert not network.inner.running_mean.any()


def test_buffers_made_in_inference_mode_come_back():
    with torch.inference_mode():
        network = Held()
    before = bits(network)
    with left_as_found(network), torch.inference_mode():
        network.mean += 1
    assert bits(network) == before


@pytest.mark.slow
def test_what_compiles_nothing_costs_no_import_of_the_compiler():
    script = """
import sys
import torch
from torch import nn
from normscope.runtime.network import left_as_found

class Foreign(nn.Module):
    pass

def stance():
    return torch._dynamo.eval_frame._stance.stance if "torch._dynamo" in sys.modules else "nothing compiles"

with left_as_found(nn.Sequential(nn.LayerNorm(4))):
    print(stance())
    with left_as_found(nn.Sequential(Foreign())):
        print(stance())
    print(stance())
print(stance())
with left_as_found(nn.LayerNorm(4)):
    print(stance())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["nothing compiles", "force_eager", "default", "default", "force_eager"]


@pytest.mark.parametrize("failure", [None, ValueError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stance", ["default", "eager_on_recompile"])
def test_how_torch_compiles_and_fuses_is_left_as_found(failure, fused, stance):
    def found():
        return torch._dynamo.eval_frame._stance.stance, torch.backends.mha.get_fastpath_enabled()

    usual = found()
    with torch.compiler.set_stance(stance):
        torch.backends.mha.set_fastpath_enabled(fused)
        try:
            with pytest.raises(type(failure)) if failure else contextlib.nullcontext(), left_as_found(Held()):
                with left_as_found(Held()):
                    assert found() == ("force_eager", False)
                assert found() == ("force_eager", False)
                if failure is not None:
                    raise failure
            assert found() == (stance, fused)
            with left_as_found(Held(), timed=True):
                assert found() == (stance, fused)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert found() == usual


Pair = collections.namedtuple("Pair", "one two")


class Doubling(nn.Module):
    """Doubles every tensor that it is given, wherever it stands."""

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        for tensor in {id(tensor): tensor for tensor in tensors(self.seen)}.values():
            tensor.detach().mul_(2)
        return args[0]


class Cache:
    def __init__(self) -> None:
        self.values = torch.ones(2)


class Locked(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Cache):
        return [] if isinstance(value, Locked) else [value.values]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for own in values for tensor in tensors(own)]


def test_a_network_gets_copies_of_all_that_it_is_called_with():
    x, rows, locked, layer = torch.arange(6.0).view(2, 3), torch.ones(2, 2), Locked(), nn.Linear(1, 1)
    x.requires_grad_()
    args = (x, [x, (rows,)], Pair(rows, {"deep": [torch.ones(2)]}), Cache(), locked, layer, "text", 3, None)
    kwargs = {"same": x, "whole": collections.OrderedDict(rows=rows)}
    batch = Batch(args, kwargs, (Sample("a", 0, 0),))
    as_given = [tensor.detach().clone() for tensor in tensors((args, kwargs))]
    network = Doubling()
    with torch.no_grad():
        run(network, batch)
    assert all(torch.equal(a, b) for a, b in zip(tensors((args, kwargs)), as_given, strict=True))
    (got, (again, (its_rows,)), pair, cache, lock, same_layer, *rest), named = network.seen
    assert torch.equal(got, 2 * x) and got.requires_grad
    assert got is again is named["same"] and its_rows is pair.one is named["whole"]["rows"]
    assert type(pair) is Pair and type(named["whole"]) is collections.OrderedDict
    assert torch.equal(cache.values, 2 * torch.ones(2)) and lock is locked and same_layer is layer
    assert rest == ["text", 3, None]


def test_a_part_of_a_batch_is_copied_without_the_rest():
    whole = Batch((torch.ones(1000, 4),), samples=tuple(Sample("a", 0, i) for i in range(1000)))
    part = whole.take(range(3)).copied().args[0]
    assert part.untyped_storage().nbytes() == 3 * 4 * 4


@pytest.mark.parametrize("grad", [True, False])
def test_what_was_copied_gets_no_gradient(grad):
    x = torch.ones(2, 3, requires_grad=grad)
    lent = Batch((x * 1, x)).copied()
    assert lent.args[0].requires_grad == lent.args[1].requires_grad == grad
    assert lent.args[0].grad_fn is None
