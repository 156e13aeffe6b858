"""Where a drawn token came from: its number within its sample, and the sample's number."""

import pytest
import torch
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.pairs.norms.formulas import Lines, layer_norm
from normscope.pairs.sums import reference
from normscope.pairs.sums import stats as loops
from normscope.pairs.sums.binning import cpu
from normscope.pairs.sums.stats import PairStats

WIDTH, CHANNEL = 16, 11


def sequence(index: int, length: int, planted: int | None = None) -> torch.Tensor:
    x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(index))
    if planted is not None:
        x[planted, CHANNEL] = -1000.0 - index
    return x


def batch(*samples: tuple[int, int, int | None]) -> Batch:
    """Sequences of (sample, length, planted token), padded at the end by what must not be drawn."""
    longest = max(length for _, length, _ in samples)
    x = torch.full((len(samples), longest, WIDTH), 5e4)
    valid = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, (index, length, planted) in enumerate(samples):
        x[row, :length], valid[row, :length] = sequence(index, length, planted), True
    return Batch((x,), samples=tuple(Sample(f"text {i}", i, i) for i, *_ in samples), valid=valid)


def largest(seen: normscope.Capture, count: int) -> list[tuple[int, int, int]]:
    """Sample, position and channel of the largest tokens, largest first."""
    drawn = seen.stats["0"].largest
    channels = drawn.x.abs().argmax(1)
    return list(zip(drawn.sample.tolist(), drawn.position.tolist(), channels.tolist(), strict=True))[:count]


@pytest.mark.parametrize("loop", [cpu.add, reference.add])
def test_a_planted_token_is_found_through_padding_merging_and_files(tmp_path, monkeypatch, loop):
    monkeypatch.setattr(loops, "_loop_of", lambda device: loop)
    model = nn.Sequential(nn.LayerNorm(WIDTH))
    one = normscope.capture(model, [batch((4, 9, None), (7, 5, 3)), batch((30, 12, 11))])
    two = normscope.capture(model, [batch((55, 6, 0), (2, 7, None))])
    assert largest(one, 2) == [(30, 11, CHANNEL), (7, 3, CHANNEL)]
    both = two.merge(one)
    assert largest(both, 3) == [(55, 0, CHANNEL), (30, 11, CHANNEL), (7, 3, CHANNEL)]
    again = normscope.load_capture(normscope.save_capture(both, tmp_path / "both.safetensors"))
    assert largest(again, 16) == largest(both, 16)
    drawn = again.stats["0"].tokens
    planted = {7: 3, 30: 11, 55: 0}
    lengths = {4: 9, 7: 5, 30: 12, 55: 6, 2: 7}
    assert len(drawn.key) == sum(lengths.values())
    for sample, position, x in zip(drawn.sample.tolist(), drawn.position.tolist(), drawn.x, strict=True):
        assert torch.equal(x, sequence(sample, lengths[sample], planted.get(sample))[position])


def test_calls_of_one_forward_are_numbered_through():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + self.norm(100 * x)

    x = torch.stack([sequence(index, 4) for index in range(3)])
    drawn = normscope.capture(Twice(), [x]).stats["norm"].largest
    assert set(drawn.position[:12].tolist()) == {4, 5, 6, 7}
    assert set(drawn.sample.tolist()) == {0, 1, 2}


def test_tokens_of_no_sample_say_so():
    stats = PairStats.empty(WIDTH)
    for index in range(2):
        samples = [Sample("a", 0, 2 * index), Sample("b", 1, 2 * index + 1)]
        stats.update(sequence(index, 7), Lines(layer_norm, 1e-6), samples)
    drawn = stats.to("cpu").tokens
    assert set(drawn.sample.tolist()) == {-1}
    assert sorted(drawn.position.tolist()) == sorted(2 * list(range(7)))  # in its batch
    assert len(set(drawn.key.tolist())) == 14
