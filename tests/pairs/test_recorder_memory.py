"""Batches that memory ends at: split, and every pair counted once, wherever it ended."""

import gc
import weakref

import pytest
import torch
from captures import assert_same_capture
from networks import network_of
from torch import nn

from normscope.errors import MemoryEndedError, ModelError
from normscope.inputs.batch import Batch, Sample
from normscope.pairs.capture import capture, captured
from normscope.pairs.recorder import CaptureOptions

ON_THE_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried")
ON_A_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ON_A_GPU_OF_A_KERNEL = RuntimeError("Triton Error [CUDA]: out of memory")  # that is loaded for the first time
PLACES = ("start", "between", "in the branch", "between the calls", "behind", "grouped", "end")
POSITIONS, CHANNELS = 5, 8


class Fuse(nn.Module):
    """Has memory for so many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.at_most, self.error, self.blown = 10**6, ON_THE_CPU, 0

    def forward(self, x, samples):
        if samples > self.at_most:
            self.blown += 1
            raise self.error
        return x


class Network(nn.Module):
    """Norms whose every sample is by itself: element-wise functions alone, so that no rounding depends on a batch."""

    def __init__(self, sequence_first: bool = False) -> None:
        super().__init__()
        self.fuses = nn.ModuleDict({place: Fuse() for place in PLACES})
        self.first, self.shared, self.last = (nn.LayerNorm(CHANNELS) for _ in range(3))
        self.group = nn.GroupNorm(2, CHANNELS)
        self.gain = nn.Parameter(torch.linspace(-3, 3, CHANNELS))
        self.sequence_first = sequence_first
        for module in (self.first, self.shared, self.last, self.group):
            nn.init.uniform_(module.weight, -1, 2)

    def forward(self, x):
        n = len(x)
        x = self.fuses["start"](x, n) * self.gain
        y = x.transpose(0, 1) if self.sequence_first else x
        y = self.fuses["between"](self.first(y), n)
        branch = self.fuses["in the branch"](self.shared(y * 2).sin(), n)
        y = self.fuses["between the calls"](y + branch, n)
        y = self.fuses["behind"](self.shared(y).exp(), n)
        y = y.transpose(0, 1) if self.sequence_first else y
        y = self.fuses["grouped"](self.group(y.transpose(1, 2)).transpose(1, 2), n)
        return self.fuses["end"](self.last(y), n)


def batches(*sizes: int, parts: bool = False, padded: bool = False) -> list[Batch]:
    """Samples of four sources, each different; padded ones have one valid position to all of them."""
    made, first = [], 0
    for number, size in enumerate(sizes):
        x = torch.randn(size, POSITIONS, CHANNELS, generator=torch.Generator().manual_seed(number))
        samples = tuple(Sample(f"source {i % 4}", i % 4, i, "made") for i in range(first, first + size))
        valid = torch.arange(POSITIONS) < 1 + torch.arange(first, first + size)[:, None] % POSITIONS
        made.append(Batch((x,), {}, samples, valid if padded else None, f"timestep {number % 2}" if parts else ""))
        first += size
    return made


def network(place: str = "", at_most: int = 0, error: Exception = ON_THE_CPU, **options) -> Network:
    torch.manual_seed(0)
    made = Network(**options)
    if place:
        made.fuses[place].at_most, made.fuses[place].error = at_most, error
    return made


@pytest.fixture(scope="module")
def whole():
    return capture(network(), batches(16, 5))


@pytest.mark.parametrize("place", PLACES)
def test_wherever_memory_ends_every_pair_counts_once(whole, place):
    short = network(place, 3)
    assert_same_capture(capture(short, batches(16, 5)), whole)
    assert short.fuses[place].blown == 3  # 16 → 8 → 4 → 2; and not again in the batches that follow


@pytest.mark.parametrize(
    "options",
    [
        {"by_gamma": True, "per_channel": True, "diagonal": True, "sample": 3},
        {"verify": True, "layers": "shared"},
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["between the calls", "grouped"])
def test_all_sums_count_every_pair_once(place, options):
    truth = capture(network(), batches(16, 9), **options)
    assert_same_capture(capture(network(place, 3, ON_A_GPU), batches(16, 9), **options), truth)


@pytest.mark.parametrize("place", ["start", "grouped"])
def test_parts_keep_their_own(place):
    sizes = (7, 16, 16, 4)
    truth = capture(network(), batches(*sizes, parts=True), by_part=True)
    seen = capture(network(place, 5), batches(*sizes, parts=True), by_part=True)
    assert_same_capture(seen, truth)
    assert {part: own.n_samples for part, own in seen.parts.items()} == {"timestep 0": 23, "timestep 1": 20}


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("place", ["start", "between the calls"])
def test_padding_stays_padding_in_a_piece(place, sequence_first):
    only = {"layers": "first,shared"}  # a grouped norm mixes padding in, and is refused
    made = batches(16, 12, padded=True)
    truth = capture(network(sequence_first=sequence_first), made, **only)
    assert truth.stats["first"].n_tokens == sum(int(batch.valid.sum()) for batch in made)
    assert_same_capture(capture(network(place, 1, sequence_first=sequence_first), made, **only), truth)


def test_a_single_sample_that_does_not_fit_is_an_error():
    with pytest.raises(MemoryEndedError, match=r"^Network takes more memory with 1 sample .* Take another device"):
        capture(network("between", 0), batches(4))
    with pytest.raises(ModelError, match="raised RuntimeError"):  # no lack of memory
        capture(network("between", 8, RuntimeError("mat1 and mat2 shapes cannot be multiplied")), batches(16))


@pytest.mark.parametrize("error", [ON_A_GPU, ON_A_GPU_OF_A_KERNEL, ON_THE_CPU], ids=["gpu", "kernel", "cpu"])
def test_memory_that_ends_while_pairs_are_summed_ends_the_capture(error):
    def observe(site, x, y):
        if site.name == "shared":
            raise error

    with pytest.raises(MemoryEndedError, match="while the pairs of shared were summed up, so that its sums are lost"):
        captured(network(), batches(16), CaptureOptions(observe=observe))


def test_memory_that_ends_while_inputs_are_read_is_an_error():
    def made():
        yield from batches(4)
        raise ON_A_GPU

    with pytest.raises(MemoryEndedError, match=r"while inputs were made ready\. Take smaller batches"):
        capture(network(), made())


class Heavy(nn.Module):
    """Keeps hold of its tensors by nothing but its frame."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.alive = nn.LayerNorm(CHANNELS), []
        self.left_over = []

    def forward(self, x):
        self.left_over.append(sum(tensor() is not None for tensor in self.alive))
        grown = x.repeat(1, 1, 1) * 2
        inner = self.norm(grown)
        self.alive += [weakref.ref(grown), weakref.ref(inner)]
        if len(x) > 2:
            raise ON_A_GPU.__class__("CUDA out of memory.")
        return inner + grown


def test_memory_of_a_failed_attempt_is_free_before_the_next():
    model = Heavy()
    gc.disable()  # nothing may wait for it
    try:
        capture(model, batches(16))
    finally:
        gc.enable()
    assert len(model.left_over) == 1 + 3 + 8 and set(model.left_over) == {0}


def fused(forward, at_most):
    """A norm, and memory for so many samples."""
    network = network_of(forward, "Fused", norm=nn.LayerNorm(CHANNELS), fuse=Fuse())
    network.fuse.at_most = at_most
    return network


def test_inseparable_tokens_are_refused():
    def forward(self, x):  # one sample at a time: how often the norm is called is the size of the batch
        return torch.cat([self.fuse(self.norm(x[i : i + 1]), i + 1) for i in range(len(x))])

    with pytest.raises(MemoryEndedError, match="cannot be split: the tokens of norm"):
        capture(fused(forward, 3), batches(8))
    assert capture(fused(forward, 3), batches(3, 3)).stats["norm"].n_tokens == 6 * POSITIONS


def test_a_batch_that_cannot_be_cut_is_not_counted_twice():
    def forward(self, images, scale=None):
        x = torch.stack(list(images))
        return self.fuse(self.norm(x), len(x))

    (whole,) = batches(4)
    listed = Batch((list(whole.args[0]),), {}, whole.samples)
    assert whole.divisible and not listed.divisible
    first = Batch((list(whole.args[0][:1]),), {}, whole.samples[:1])
    with pytest.raises(MemoryEndedError, match="with 4 samples"):
        capture(fused(forward, 2), [first, listed])
    scaled = Batch(whole.args, {"scale": (224, 224), "more": {"mask": torch.ones(4, 2)}}, whole.samples)
    assert scaled.divisible and not Batch((torch.ones(1, 3),), {}, whole.samples).divisible
