"""Networks that change tensors in place, with their norms and without: every pass is as if it were the only one."""

import copy
import itertools

import numpy as np
import pytest
import torch
from networks import State, network_of, numbered_batches, same
from torch import nn

import normscope
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Outputs
from normscope.norms.trace import find_norms
from normscope.swaps.distances import output_errors
from normscope.swaps.pointwise import DyT
from normscope.swaps.replace import Swap
from normscope.tools.bench import bench
from normscope.tools.bench.reports import PASSES

WIDTH = 8


def overwriting_norm():
    """A LayerNorm that takes the mean away from its input itself."""

    def forward(self, x):
        x.sub_(x.mean(-1, keepdim=True))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    return network_of(forward, "OverwritingNorm", weight=nn.Parameter(torch.linspace(0.5, 2, WIDTH)), eps=1e-5)


def block(norm):
    """Changes what it is called with, and what its norm gave, and counts its calls."""

    def forward(self, x):
        self.steps += 1
        x.mul_(1.5)
        return x + self.steps * self.lines(self.relu(self.norm(x) + 0.1))

    parts = {"norm": norm, "lines": nn.Linear(WIDTH, WIDTH), "relu": nn.ReLU(inplace=True), "steps": torch.zeros(())}
    return network_of(forward, "Block", **parts)


def changing():
    """Doubles its input, and adds to what its blocks gave; a buffer of it decays, and another is made anew."""

    def forward(self, x):
        self.decay.mul_(0.8)
        self.gain = self.gain * 0.9
        x.mul_(2)
        for block in self.blocks:
            x = block(x)
            x += 1 - self.decay
        return self.head(x * self.gain).mean(1)

    torch.manual_seed(0)
    blocks = nn.ModuleList([block(nn.LayerNorm(WIDTH)), block(overwriting_norm())])
    head, decay, gain = nn.Linear(WIDTH, 3), torch.ones(()), torch.ones(WIDTH)
    return network_of(forward, "Changing", blocks=blocks, head=head, decay=decay, gain=gain)


SITES = ("blocks.0.norm", "blocks.1.norm")


def inputs(number: int = 4, size: int = 3, seed: int = 0, data: str = "made") -> list[Batch]:
    return numbered_batches(
        number, lambda generator, size: torch.randn(size, 5, WIDTH, generator=generator), size, seed, data
    )


def dyts() -> dict[str, nn.Module]:
    return {site: DyT(WIDTH, alpha=0.4 + 0.3 * number) for number, site in enumerate(SITES)}


def with_norms_replaced(network: nn.Module, paths=SITES) -> nn.Module:
    swapped = copy.deepcopy(network)
    Swap(swapped, {path: dyts()[path] for path in paths})
    return swapped


@torch.no_grad()
def output_of(network: nn.Module, batch: Batch) -> np.ndarray:
    """One forward of a fresh copy over a copy."""
    return copy.deepcopy(network).eval()(batch.args[0].clone()).double().numpy()


def distances_by_hand(network: nn.Module, swapped: nn.Module, batches: list[Batch]) -> np.ndarray:
    pairs = [(output_of(network, batch), output_of(swapped, batch)) for batch in batches]
    return np.concatenate([np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1) for a, b in pairs])


@pytest.fixture
def network():
    network = changing().eval()
    before, buffers = State(network), dict(network._buffers)
    yield network
    before.assert_same(network)
    assert all(network._buffers[name] is buffer for name, buffer in buffers.items())


@pytest.fixture
def batches():
    made = inputs()
    yield made
    assert all(torch.equal(batch.args[0], own.args[0]) for batch, own in zip(made, inputs(), strict=True))


def test_drift_is_that_of_single_passes_of_fresh_copies(network, batches):
    report = normscope.drift(network, batches, dyts())
    rows = {(row.swapped, row.site): row for row in report.rows if row.at == "output"}
    for key, paths in {("all", None): SITES, ("one", SITES[0]): SITES[:1], ("one", SITES[1]): SITES[1:]}.items():
        by_hand = distances_by_hand(network, with_norms_replaced(network, paths), batches)
        assert by_hand.min() > 1e-3
        # The outputs are float32.
        assert rows[key].relative_l2.p50 == pytest.approx(float(np.median(by_hand)), rel=1e-5)


def test_a_network_that_gives_its_own_buffer_drifts(batches):
    parts = {"norm": nn.LayerNorm(WIDTH), "state": torch.zeros(3, WIDTH)}
    network = network_of(lambda self, x: self.state.mul_(0.5).add_(self.norm(x)[:, 0]), **parts).eval()
    function = {"norm": DyT(WIDTH, alpha=0.4)}
    swapped = copy.deepcopy(network)
    Swap(swapped, function)
    by_hand = distances_by_hand(network, swapped, batches)
    median = normscope.drift(network, batches, function).all.relative_l2.p50
    assert median == pytest.approx(float(np.median(by_hand)), rel=1e-5) and median > 0.1
    errors = output_errors(network, swapped, batches, Outputs())
    np.testing.assert_allclose(errors.numpy(), by_hand, rtol=1e-5)


def test_walks_to_an_end_begin_from_the_same_buffers(network, batches):
    def ends():
        for batch in batches:
            with torch.no_grad():
                yield batch.samples, network(batch.args[0].clone())

    report = normscope.drift(network, batches[:1], dyts(), ends=ends)
    by_hand = distances_by_hand(network, with_norms_replaced(network), batches)
    assert report.end.relative_l2.p50 == pytest.approx(float(np.median(by_hand)), rel=1e-5)


def test_healing_reports_the_drift_of_single_passes(network, batches):
    swapped, held_out = with_norms_replaced(network), inputs(3, seed=5, data="others")
    buffers = {name: buffer.clone() for name, buffer in swapped.named_buffers()}
    before = distances_by_hand(network, swapped, held_out)
    report = normscope.heal(network, swapped, batches * 2, held_out, steps=20)
    after = distances_by_hand(network, swapped, held_out)
    assert report.before["median"] == pytest.approx(float(np.median(before)), rel=1e-5)
    assert report.after["median"] == pytest.approx(float(np.median(after)), rel=1e-5)
    assert same(dict(swapped.named_buffers()), buffers)
    assert all(torch.equal(batch.args[0], own.args[0]) for batch, own in zip(held_out, inputs(3, seed=5), strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_function_that_calls_itself_for_each_part_of_a_nested_tensor_is_looked_at(layout):
    def forward(self, x):
        self.nested(torch.nested.nested_tensor([x[0, :2], x[0]], layout=layout))
        return self.last(x.mul_(2))

    (batch,) = inputs(1)
    report = find_norms(network_of(forward, nested=DyT(WIDTH), last=nn.LayerNorm(WIDTH)), batch)
    assert list(report.kinds) == ["last"] and [norm.name for norm in report.skipped] == ["nested"]
    assert not report.overwriting and torch.equal(batch.args[0], inputs(1)[0].args[0])


def test_each_timed_pass_gets_a_copy(network, batches, monkeypatch):
    seen = []
    handle = network.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(bench, "times_of", lambda run, device: [run() is None or 1.0])
    report = normscope.bench(network, batches[0], ["dyt"], full=True)
    timed = [row for row in report.rows if row.samples and row.scope == "model"]
    assert {(row.way, row.passes) for row in timed} == set(itertools.product(("eager", "compile"), PASSES))
    handle.remove()
    assert len(seen) >= sum(len(row.samples) for row in timed)
    assert all(torch.equal(x, batches[0].args[0]) for x in seen)
