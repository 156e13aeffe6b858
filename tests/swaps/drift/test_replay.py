"""What is replayed is what the network would compute again, to the bit; what cannot be is run."""

import pytest
import torch
from torch import nn

from normscope.swaps.drift import copies, replay
from normscope.swaps.drift.drift import drift
from normscope.swaps.drift.replay import Replay
from normscope.swaps.pointwise import DyT, PointwiseFunction

CALLS = []


class Block(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.norm, self.layer = norm or nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        CALLS.append(self)
        return x + self.layer(self.norm(x)).relu()


class Stack(nn.Module):
    """Four blocks with a norm each; takes and gives (samples, 8)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InPlace(Stack):
    """What a block gave is changed after it was given."""

    def forward(self, x):
        skipped = []
        for block in self.blocks:
            x = block(x)
            skipped.append(x)
            if len(skipped) == 2:
                x.mul_(0.5)
        return self.head(x + skipped[0])


class ChangesItsInput(nn.Module):
    def forward(self, x):
        return x.clamp_(-0.1, 0.1) + 1


class InPlaceOfInput(Stack):
    """A module changes its input, which is used once more."""

    def __init__(self):
        super().__init__()
        self.bounded = ChangesItsInput()

    def forward(self, x):
        x = x * 2
        y = self.bounded(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y + x)


class Shared(Stack):
    """One module is called after each block."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = self.mixed(block(x))
        return self.head(x)


class OneNormTwice(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[2].norm = self.blocks[0].norm


class Random(Stack):
    """Noise that depends on how much was drawn before."""

    def forward(self, x):
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.3, training=True)
        return self.head(x)


class RandomWithin(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3, training=True)


class RandomBlocks(Stack):
    """The same within modules, which would draw nothing if they were replayed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(RandomWithin() for _ in range(4))


class Remembering(Block):
    def forward(self, x):
        self.seen = x.mean()
        return super().forward(x)


class Remembers(Stack):
    """What a block sets on itself is used at the end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(4))

    def forward(self, x):
        return super().forward(x) * (1 + self.blocks[0].seen)


class Noting(Block):
    def __init__(self, notes):
        super().__init__()
        self.notes = [notes]  # a list of lists, whose number never changes

    def forward(self, x):
        self.notes[0].append(x.mean())
        return super().forward(x)


class PastAllSigns(Stack):
    """Blocks leave notes that no attribute tells of; the end takes how many there are."""

    def __init__(self):
        super().__init__()
        self.notes = [[]]
        self.blocks = nn.ModuleList(Noting(self.notes[0]) for _ in range(4))

    def forward(self, x):
        self.notes[0].clear()
        return super().forward(x) * (1 + len(self.notes[0]))


class Loops(Stack):
    """A part of the first block is called again where the output is large, which a swap may decide."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if float(x.norm()) > 11:
            x = self.blocks[0].layer(x)
        return self.head(x)


class Views(Stack):
    """What a module gives is a view of what it got, and the whole is changed later."""

    def __init__(self):
        super().__init__()
        self.halves = nn.Flatten(1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = self.halves(x)
            x.add_(0.1)
        return self.head(x)


NETWORKS = [Stack, InPlace, InPlaceOfInput, Shared, OneNormTwice, Random, RandomBlocks, Remembers, PastAllSigns, Loops]
NETWORKS += [Views]


def both_ways(monkeypatch, network, batches):
    """The report with replays and without; and how often blocks were called."""
    reports, called = [], []
    for possible in (True, False):
        torch.manual_seed(1)
        model = network()
        modules = {path: DyT(8) for path, part in model.named_modules() if type(part) is nn.LayerNorm}
        with monkeypatch.context() as patched:
            patched.setattr(copies, "_ELEMENTS_TOGETHER", 0)  # what runs together is no more the same to the bit
            if not possible:
                patched.setattr(replay, "_has_hooks", lambda model: True)
            CALLS.clear()
            reports.append(drift(model, batches, modules).as_dict())
        called.append(len(CALLS))
        assert not any("forward" in vars(part) for part in model.modules())
    return reports, called


@pytest.mark.parametrize("network", NETWORKS)
def test_replayed_passes_give_what_full_passes_give(monkeypatch, network):
    batches = [torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    (replayed, in_full), (fewer, all_calls) = both_ways(monkeypatch, network, batches)
    assert replayed == in_full
    if network is Stack:
        assert fewer < 0.8 * all_calls


def test_a_hook_of_others_hears_every_pass(monkeypatch):
    heard = []

    class Heard(Stack):
        def __init__(self):
            super().__init__()
            self.blocks[1].register_forward_hook(lambda module, args, output: heard.append(1) or output * 1.5)

    (replayed, in_full), (calls, all_calls) = both_ways(monkeypatch, Heard, [torch.ones(2, 8)])
    assert replayed == in_full and calls == all_calls


def test_a_network_whose_outputs_are_large_keeps_the_outermost(monkeypatch):
    monkeypatch.setattr(replay, "_MOST_KEPT", 5 * 5 * 8 * 4)  # of the head and the blocks, and of nothing inside them
    (replayed, in_full), (fewer, all_calls) = both_ways(monkeypatch, Stack, list(torch.randn(12, 5, 8)))
    assert replayed == in_full and fewer < all_calls


def test_what_stands_in_a_norms_place_may_change_its_input(monkeypatch):
    class Overwriting(PointwiseFunction):
        def forward(self, x):
            return super().forward(x.mul_(0.9))

    reports = []
    for possible in (True, False):
        model = Stack()
        modules = {f"blocks.{i}.norm": Overwriting("tanh", 8) for i in range(4)}
        with monkeypatch.context() as patched:
            patched.setattr(copies, "_ELEMENTS_TOGETHER", 0)
            if not possible:
                patched.setattr(replay, "_has_hooks", lambda model: True)
            reports.append(drift(model, [torch.ones(2, 8), torch.full((2, 8), 2.0)], modules).as_dict())
    assert reports[0] == reports[1]


def test_a_pass_begins_at_the_first_swapped_site():
    model = Stack().eval()
    modules = {f"blocks.{i}.norm": DyT(8) for i in range(4)}
    watched, x = Replay(model, modules), torch.randn(3, 8)
    with torch.no_grad(), watched.watching():
        with watched.recorded() as recording:
            output = model(x)
        assert recording.ended_before(["blocks.2.norm"])[-1] == "blocks.1"
        CALLS.clear()
        with watched.begun_at(["blocks.2.norm"], recording):
            assert torch.equal(model(x), output)
    assert watched.possible and [model.blocks[2], model.blocks[3]] == CALLS


def watched_stack(network=Stack):
    model = network().eval()
    return model, Replay(model, {f"blocks.{i}.norm": DyT(8) for i in range(4)})


@torch.no_grad()
def recorded(model, watched, x):
    with watched.recorded() as recording:
        model(x)
    return recording


def test_an_output_that_is_changed_in_place_later_is_not_kept():
    model, watched = watched_stack(InPlace)
    with watched.watching():
        recording = recorded(model, watched, torch.randn(3, 8))
    assert "blocks.1" in recording.unsafe and "blocks.1" not in recording.outputs
    assert {"blocks.0", "blocks.1.layer", "blocks.2"} <= set(recording.outputs) and watched.possible


@pytest.mark.parametrize("network", [Stack, Remembers])
def test_a_network_that_sets_attributes_of_its_modules_is_not_replayed(network):
    model, watched = watched_stack(network)
    model(torch.ones(3, 8))  # from here on the attributes are there, and each pass sets other values
    with watched.watching():
        recorded(model, watched, torch.randn(3, 8))
    assert watched.possible == (network is Stack)


def test_a_module_that_is_called_twice_is_not_kept():
    model, watched = watched_stack(Shared)
    with watched.watching():
        recording = recorded(model, watched, torch.randn(3, 8))
    assert "mixed" in recording.unsafe and "mixed" not in recording.outputs and "blocks.3" in recording.outputs


class Turned(Stack):
    """It does something else once it is told to."""

    again = spoils = False

    def forward(self, x):
        first = x = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x)
        if self.again:
            x = self.blocks[0].layer(x)
        if self.spoils:
            first.mul_(2)
        return self.head(x)


def test_a_second_call_behind_the_swapped_site_is_no_replay():
    (model, watched), x = watched_stack(Turned), torch.randn(3, 8)
    with watched.watching():
        recording = recorded(model, watched, x)
        model.again = True
        with torch.no_grad(), watched.begun_at(["blocks.2.norm"], recording):
            output = model(x)
    assert watched.possible and torch.equal(output, model(x))


def test_a_pass_that_changes_what_it_replays_is_the_last_that_does():
    (model, watched), x = watched_stack(Turned), torch.randn(3, 8)
    with watched.watching(), torch.no_grad():
        recording = recorded(model, watched, x)
        with watched.begun_at(["blocks.2.norm"], recording):
            model(x)
        assert recording.intact and watched.possible
        model.spoils = True
        with watched.begun_at(["blocks.2.norm"], recording):
            model(x)
        assert not recording.intact and not watched.possible
