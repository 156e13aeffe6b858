"""Networks that change tensors in place: inputs, activations, buffers, and norms that change their own input."""

import copy

import pytest
import torch
from networks import sums_of
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.norms.trace import find_norms

WIDTH = 8


class OverwritingNorm(nn.Module):
    """A LayerNorm as users write one that saves memory: it takes the mean away from its input itself."""

    def __init__(self, through_data: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self.through_data = nn.Parameter(torch.linspace(0.5, 2, WIDTH)), 1e-5, through_data

    def forward(self, x):
        (x.data if self.through_data else x).sub_(x.mean(-1, keepdim=True))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Changing(nn.Module):
    """Adds to its residual stream in place, as the networks of libraries do, and changes what else it is told to."""

    def __init__(self, changes: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.changes, self.at_most, self.memory_ends_at = changes, 10**6, "end"
        of_their_own = {"a norm's own input": False, "a norm's own input through data": True}
        own = OverwritingNorm(of_their_own[changes]) if changes in of_their_own else nn.LayerNorm(WIDTH)
        self.first, self.second, self.relu = own, nn.LayerNorm(WIDTH), nn.ReLU(inplace=True)
        self.lines = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.reach = 0

    def fuse(self, x, place):
        if len(x) > self.at_most and place == self.memory_ends_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def forward(self, x, more):
        if self.changes == "inputs":
            x.mul_(2)
            more["offset"].add_(1)
        x = x + more["offset"]
        if self.changes == "buffers":
            self.steps += 1
            self.scale.mul_(0.9)
        if self.changes == "buffers through data":
            self.scale.data.mul_(0.9)
        if self.changes == "other buffers":
            self.scale = self.scale * 0.9
        if self.changes == "a table" and x.shape[1] > self.reach:  # as long as the longest sequence so far
            self.register_buffer("table", torch.linspace(-1, 1, x.shape[1])[:, None])
            self.reach = x.shape[1]
        x = x * self.scale * (1 + 0.1 * self.steps)
        if self.changes == "a table":
            x = x + self.table[: x.shape[1]]
        self.fuse(x, "start")
        x += self.lines(self.relu(self.first(x)))
        self.fuse(x, "end")
        return self.relu(self.second(x)).sum((1, 2))


CHANGES = (
    *("inputs", "buffers", "buffers through data", "other buffers", "a table"),
    *("a norm's own input", "a norm's own input through data"),
)


def batches(*sizes: int) -> list[Batch]:
    """Samples of their own sources, with a second tensor that stands in a dict."""
    generator, made, first = torch.Generator().manual_seed(1), [], 0
    for number, size in enumerate(sizes):
        x, offset = (torch.randn(size, 4 - number % 2, WIDTH, generator=generator) for _ in range(2))
        samples = tuple(Sample(f"source {i}", i, i, "made") for i in range(first, first + size))
        made.append(Batch((x,), {"more": {"offset": offset}}, samples))
        first += size
    return made


def plain_loop(network: nn.Module, inputs: list[Batch]) -> dict[str, torch.Tensor]:
    """Sum up n, x, y, x², xy, y² of both norms, in float64: x as it was before them, of a copy run over copies."""
    network, sums = copy.deepcopy(network).eval(), {}

    def hook_of(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            x = args[0].detach().clone().double()
            y = nn.functional.layer_norm(x, (WIDTH,), eps=module.eps)
            sums[name] = sums.get(name, 0) + sums_of(x, y)

        return hook

    for name in ("first", "second"):
        network.get_submodule(name).register_forward_pre_hook(hook_of(name))
    with torch.no_grad():
        for batch in copy.deepcopy(inputs):
            network(*batch.args, **batch.kwargs)
    return sums


def assert_sums(seen: normscope.Capture, truth: dict[str, torch.Tensor]) -> None:
    assert seen.stats.keys() == truth.keys()
    for name, sums in truth.items():
        # float64 sums of some hundred numbers of at most 100, in another order.
        torch.testing.assert_close(seen.stats[name].moments.sum((0, 2)), sums, rtol=1e-12, atol=1e-10)


def state_of(network: nn.Module) -> dict[str, object]:
    return {"objects": dict(network._buffers), "reach": getattr(network, "reach", None)}


@pytest.mark.parametrize("changes", CHANGES)
def test_pairs_are_those_of_a_plain_loop_and_nothing_is_changed(changes):
    network, inputs = Changing(changes), batches(3, 5, 2)
    truth, as_given, found = plain_loop(network, inputs), copy.deepcopy(inputs), state_of(network)
    values = {name: buffer.clone() for name, buffer in network.named_buffers()}
    seen = normscope.capture(network, inputs, verify=True)
    assert_sums(seen, truth)
    for batch, other in zip(inputs, as_given, strict=True):
        assert torch.equal(batch.args[0], other.args[0])
        assert torch.equal(batch.kwargs["more"]["offset"], other.kwargs["more"]["offset"])
    assert state_of(network) == found
    assert all(torch.equal(buffer, values[name]) for name, buffer in network.named_buffers())
    assert_sums(normscope.capture(network, inputs), truth)


@pytest.mark.parametrize(
    ("changes", "place"),
    # What a norm has summed up when memory ends counts, and is of the whole batch's one step.
    [("inputs", "end"), ("buffers", "start"), ("other buffers", "start"), ("a norm's own input", "end")],
)
def test_changes_of_a_pass_that_ran_out_of_memory_are_undone(changes, place):
    (whole,) = batches(8)
    network = Changing(changes)
    truth = plain_loop(network, [whole.take(range(start, start + 2)) for start in range(0, 8, 2)])
    network.at_most, network.memory_ends_at = 2, place
    assert_sums(normscope.capture(network, [whole]), truth)


def test_norms_that_change_their_input_are_detected():
    network, (batch,) = Changing("a norm's own input"), batches(2)
    report = find_norms(network, batch)
    assert report.overwriting == {"first"} and not report.keeps_state
    assert find_norms(Changing("inputs"), batch).overwriting == frozenset()
    assert find_norms(Changing("buffers"), batch).keeps_state


def test_inference_tensors_have_no_count_of_changes():
    network, inputs = Changing("a norm's own input"), batches(3, 2)
    truth = plain_loop(network, inputs)
    with torch.inference_mode():
        assert_sums(normscope.capture(network, inputs), truth)


def test_a_norm_that_returns_its_own_input_is_a_site():
    class Whole(OverwritingNorm):
        def forward(self, x):
            x.sub_(x.mean(-1, keepdim=True))
            return x.mul_(torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).mul_(self.weight)

    Whole.__name__ = "WholeNorm"
    network, inputs = Changing(), batches(3, 2)
    network.first = Whole()
    assert_sums(normscope.capture(network, inputs, verify=True), plain_loop(network, inputs))
