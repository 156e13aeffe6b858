"""Samples of tokens: the same ones in any batches, named by the capture, with the place that each came from."""

import itertools

import pytest
import torch
from networks import network_of, numbered_samples
from torch import nn

import normscope
from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.norms.formulas import Lines, layer_norm
from normscope.pairs.sums import loops, reference
from normscope.pairs.sums.binning import cpu
from normscope.pairs.sums.stats import PairStats

TOKENS = 12
WIDTH, CHANNEL = 16, 11


def batches(*sizes: int, n_samples: int = 6) -> list[Batch]:
    x = torch.randn(n_samples, TOKENS, 8, generator=torch.Generator().manual_seed(0)) * 3
    starts = itertools.accumulate(sizes, initial=0)
    return [
        Batch((chunk,), {}, numbered_samples(len(chunk), start))
        for start, chunk in zip(starts, x.split(sizes), strict=False)
    ]


def captured(*sizes: int, **options) -> normscope.Capture:
    return normscope.capture(nn.Sequential(nn.LayerNorm(8)), batches(*sizes), **options)


def test_sampled_tokens_do_not_depend_on_batches():
    stats, expected = captured(6, sample=3).stats["0"], captured(1, 3, 2, sample=3).stats["0"]
    assert stats.n_tokens == 3 * 6
    assert stats.n_pairs == 3 * 6 * 8
    assert torch.equal(stats.density, expected.density)
    assert torch.equal(stats.tokens.key, expected.tokens.key)
    assert sorted(stats.moments[:, 0].sum(1).tolist()) == [0.0] * 2 + [24.0] * 6


def test_a_sample_as_large_as_the_sample_is_all_and_one_of_nothing_is_refused():
    assert torch.equal(captured(6, sample=TOKENS).stats["0"].moments, captured(6).stats["0"].moments)
    assert captured(6, sample=1000).stats["0"].n_tokens == 6 * TOKENS
    with pytest.raises(UsageError, match="sample is 0"):
        captured(6, sample=0)


def test_padding_is_never_taken():
    (batch,) = batches(6)
    valid = torch.ones(6, TOKENS, dtype=torch.bool)
    valid[2, 2:] = False
    padded = Batch(batch.args, {}, batch.samples, valid)
    stats = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [padded], sample=5).stats["0"]
    assert stats.n_tokens == 5 * 5 + 2


def test_a_capture_describes_its_sample(tmp_path):
    seen = captured(6, sample=3)
    assert seen.about["sample"] == "a sample of 3 tokens of each"
    assert seen.about["data"].endswith("· a sample of 3 tokens of each")
    normscope.save_capture(seen, tmp_path / "seen.safetensors")
    assert normscope.load_capture(tmp_path / "seen.safetensors").about == seen.about
    assert "a sample of 3 tokens" in normscope.fit(seen, "tanh")[0].data
    with pytest.raises(DataError, match="a sample of 3 tokens of each with one of all tokens"):
        seen.merge(captured(6))


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
def test_a_planted_token_survives_padding_merging_and_files(tmp_path, monkeypatch, loop):
    monkeypatch.setattr(loops, "loop_of", lambda device: loop)
    model = nn.Sequential(nn.LayerNorm(WIDTH))
    first = normscope.capture(model, [batch((4, 9, None), (7, 5, 3)), batch((30, 12, 11))])
    second = normscope.capture(model, [batch((55, 6, 0), (2, 7, None))])
    assert largest(first, 2) == [(30, 11, CHANNEL), (7, 3, CHANNEL)]
    both = second.merge(first)
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
    twice = network_of(lambda self, x: self.norm(x) + self.norm(100 * x), norm=nn.LayerNorm(WIDTH))
    x = torch.stack([sequence(index, 4) for index in range(3)])
    drawn = normscope.capture(twice, [x]).stats["norm"].largest
    assert set(drawn.position[:12].tolist()) == {4, 5, 6, 7}
    assert set(drawn.sample.tolist()) == {0, 1, 2}


def test_tokens_of_no_sample_have_no_sample_number():
    stats = PairStats.empty(WIDTH)
    for index in range(2):
        samples = [Sample("a", 0, 2 * index), Sample("b", 1, 2 * index + 1)]
        stats.update(sequence(index, 7), Lines(layer_norm, 1e-6), samples)
    drawn = stats.to("cpu").tokens
    assert set(drawn.sample.tolist()) == {-1}
    assert sorted(drawn.position.tolist()) == sorted(2 * list(range(7)))  # in its batch
    assert len(set(drawn.key.tolist())) == 14
