"""A sample of whole tokens in place of all: the same ones whatever the batches were, and said by the capture."""

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.pairs.capture import captured as observed
from normscope.pairs.recorder import Summing

TOKENS = 12


def batches(*sizes: int, n_samples: int = 6) -> list[Batch]:
    x = torch.randn(n_samples, TOKENS, 8, generator=torch.Generator().manual_seed(0)) * 3
    found, start = [], 0
    for size in sizes:
        samples = tuple(Sample(f"s{index}", index, index) for index in range(start, start + size))
        found.append(Batch((x[start : start + size],), {}, samples))
        start += size
    return found


def captured(*sizes: int, **options) -> normscope.Capture:
    return normscope.capture(nn.Sequential(nn.LayerNorm(8)), batches(*sizes), **options)


def test_whole_tokens_are_taken_of_each_sample_whatever_the_batches_are():
    one, other = captured(6, sample=3).stats["0"], captured(1, 3, 2, sample=3).stats["0"]
    assert one.n_tokens == 3 * 6
    assert one.n_pairs == 3 * 6 * 8
    assert torch.equal(one.density, other.density)
    assert torch.equal(one.tokens.key, other.tokens.key)
    assert sorted(one.moments[:, 0].sum(1).tolist()) == [0.0] * 2 + [24.0] * 6


def test_a_sample_as_large_as_the_sample_is_all():
    assert torch.equal(captured(6, sample=TOKENS).stats["0"].moments, captured(6).stats["0"].moments)
    assert captured(6, sample=1000).stats["0"].n_tokens == 6 * TOKENS


def test_every_token_is_as_likely_as_another():
    taken = torch.zeros(TOKENS)
    x = batches(6)[0].args[0].reshape(-1, 8)
    for seed in range(60):
        rows = []
        summing = Summing(seed, sample=3, observe=lambda site, x, y, rows=rows: rows.append(x.clone()))
        observed(nn.Sequential(nn.LayerNorm(8)), batches(6), summing)
        assert len(rows[0]) == 18
        for row in rows[0]:
            taken[int((x == row).all(1).nonzero()) % TOKENS] += 1
    # Binomial with 360 draws of 1/4 each: 90 on average, standard deviation 8.2; four of them.
    assert ((taken - 90).abs() < 4 * 8.2).all()


def test_padding_is_never_taken():
    (batch,) = batches(6)
    valid = torch.ones(6, TOKENS, dtype=torch.bool)
    valid[2, 2:] = False
    padded = Batch(batch.args, {}, batch.samples, valid)
    stats = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [padded], sample=5).stats["0"]
    assert stats.n_tokens == 5 * 5 + 2


def test_the_capture_says_that_it_is_a_sample(tmp_path):
    seen = captured(6, sample=3)
    assert seen.about["sample"] == "a sample of 3 tokens of each"
    assert seen.about["data"].endswith("· a sample of 3 tokens of each")
    normscope.save_capture(seen, tmp_path / "seen.safetensors")
    assert normscope.load_capture(tmp_path / "seen.safetensors").about == seen.about
    assert "a sample of 3 tokens" in normscope.fit(seen, "tanh")[0].data
    with pytest.raises(DataError, match="a sample of 3 tokens of each with one of all tokens"):
        seen.merge(captured(6))


def test_a_sample_of_nothing_is_refused():
    with pytest.raises(UsageError, match="sample is 0"):
        captured(6, sample=0)
