"""Passes that run together give what passes one by one give; networks that mix what runs together never do so."""

import pytest
import torch
from torch import nn

import normscope
from normscope.swaps.drift import copies
from normscope.swaps.drift.drift import drift
from normscope.swaps.drift.reports import Quantiles
from normscope.swaps.pointwise import DyT

PASSES = []


class Stack(nn.Module):
    """Six residual blocks; takes and gives (samples, 8)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(6))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        PASSES.append(len(x))
        return self.blocks(self.before(x))

    def before(self, x):
        return x

    def blocks(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).relu()
        return x


class PositionsFirst(Stack):
    """Axis 1 counts samples inside."""

    def before(self, x):
        return torch.stack([x, x.roll(1, -1), x * 0.5])

    def forward(self, x):
        return super().forward(x)[0] if x.ndim == 2 else super().forward(x)


class Windows(Stack):
    """Axis 0 counts windows inside, several a sample."""

    def before(self, x):
        return torch.stack([x, x.flip(-1)], 1).flatten(0, 1)

    def blocks(self, x):
        return super().blocks(x).unflatten(0, (-1, 2)).sum(1)


class ByKeyword(Stack):
    def blocks(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(input=x)).relu()
        return x


class TwiceEach(Stack):
    """Each norm is called twice."""

    def blocks(self, x):
        return super().blocks(super().blocks(x))


TOGETHER = [Stack, PositionsFirst, Windows, ByKeyword, TwiceEach]


class Mixing(Stack):
    """What is in a batch beside a sample changes its output."""

    def blocks(self, x):
        x = super().blocks(x)
        return x - 0.5 * x.mean(0)


class OneOutput(Stack):
    """The largest sample of the batch comes first."""

    def blocks(self, x):
        x = super().blocks(x)
        return x[x.norm(dim=1).argsort(descending=True)]


class Deciding(Stack):
    """Goes on where the whole batch is large."""

    def blocks(self, x):
        x = super().blocks(x)
        return x * 2 if float(x.norm()) > 20 else x


class OfFive(Stack):
    def before(self, x):
        if len(x) > 5:
            raise ValueError("five at most")
        return x


class KnowingItsSize(Stack):
    """Begins with a value of its own for each sample of five."""

    def before(self, x):
        return x + torch.arange(len(x)).unsqueeze(1) / 10


class HalfPrecision(Stack):
    def __init__(self):
        super().__init__()
        self.bfloat16()

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


APART = [Mixing, OneOutput, Deciding, OfFive, KnowingItsSize, HalfPrecision]


def inputs(number=6):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(5, 8, generator=draw) for _ in range(number)]


def dyts(model):
    return {f"norms.{n}": DyT(8, alpha=0.2 + 0.1 * n).to(model.layers[0].weight.dtype) for n in range(6)}


def both(monkeypatch, network, batches):
    """The rows with passes together and one by one, and how many passes those were."""
    rows, number = [], []
    for room in (copies._ELEMENTS_TOGETHER, 0):
        monkeypatch.setattr(copies, "_ELEMENTS_TOGETHER", room)
        PASSES.clear()
        model = network()
        rows.append(drift(model, batches, dyts(model)).rows)
        number.append(len(PASSES))
        assert not any("forward" in vars(norm) for norm in model.norms)
    return rows, number


def check_alike(rows, others):
    """A relative L2 of outputs is off by as much as outputs are: float32 over six blocks, about 1e-6 of them."""
    assert [(row.swapped, row.site, row.at) for row in rows] == [(row.swapped, row.site, row.at) for row in others]
    for row, other in zip(rows, others, strict=True):
        for name in ("relative_l2", "cosine"):
            one, two = (getattr(each, name) for each in (row, other))
            assert isinstance(one, Quantiles)
            assert vars(one) == pytest.approx(vars(two), abs=5e-6, rel=1e-5), (row.swapped, row.site, name)


@pytest.mark.parametrize("network", TOGETHER)
def test_passes_together_give_what_passes_one_by_one_give(monkeypatch, network):
    (rows, others), (together, one_by_one) = both(monkeypatch, network, inputs())
    check_alike(rows, others)
    assert together < 0.6 * one_by_one


@pytest.mark.parametrize("network", APART)
def test_networks_in_which_copies_are_not_alone_run_one_by_one(monkeypatch, network):
    (rows, others), _ = both(monkeypatch, network, inputs())
    assert rows == others


def test_copies_that_begin_to_mix_are_seen_at_that_batch(monkeypatch):
    class MixingLarge(Stack):
        def blocks(self, x):
            given = super().blocks(x)
            return given + (x.amax(0) - 50).relu() * given.mean(0)

    batches = inputs()
    batches[4] = batches[4] + torch.arange(5.0)[:, None] * 15  # from here on the mean over the batch matters
    (rows, others), (together, one_by_one) = both(monkeypatch, MixingLarge, batches)
    check_alike(rows, others)
    assert together < one_by_one


def test_large_batches_run_one_by_one(monkeypatch):
    monkeypatch.setattr(copies, "_ELEMENTS_TOGETHER", 4 * 5 * 8)
    (rows, others), (together, one_by_one) = both(monkeypatch, Stack, inputs())
    assert rows == others and together == one_by_one


def test_several_passes_where_there_is_no_room_for_all(monkeypatch):
    monkeypatch.setattr(copies, "_ELEMENTS_TOGETHER", 5 * 5 * 8)  # four sites, and the batch as it is
    (rows, others), (together, one_by_one) = both(monkeypatch, Stack, inputs())
    check_alike(rows, others)
    assert together < one_by_one and max(PASSES) == 5


def test_a_hook_of_others_hears_every_pass(monkeypatch):
    class Heard(Stack):
        def __init__(self):
            super().__init__()
            self.layers[2].register_forward_hook(lambda module, args, output: output * 1.5)

    (rows, others), (together, one_by_one) = both(monkeypatch, Heard, inputs())
    assert rows == others and together == one_by_one


@pytest.mark.slow
def test_the_embedded_networks_run_together(monkeypatch):
    taken = []
    outputs = copies.Copies.outputs

    def counted(self, *args):
        pairs = outputs(self, *args)
        taken.append(bool(pairs))
        return pairs

    monkeypatch.setattr(copies.Copies, "outputs", counted)
    for name in ("demo_vit", "demo_wav2vec2", "demo_dit"):
        network = normscope.load(name, limit=2, device="cpu")
        sites = normscope.find_norms(network, network.inputs.first_sample()).sites
        taken.clear()
        drift(network, replacements=normscope.replacements(network, "dyt", sites, init="paper"), ends=lambda: iter(()))
        assert taken and all(taken), name
