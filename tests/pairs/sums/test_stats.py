"""Merging is addition: associative, commutative, and the same as having seen everything at once."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from captures import assert_same_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import numbered_samples

from normscope.errors import DataError
from normscope.inputs.batch import Sample
from normscope.norms.formulas import Lines, layer_norm
from normscope.pairs.storage import pack_sums
from normscope.pairs.sums.binning import PAIR_GRID, TOKEN_GRID
from normscope.pairs.sums.sampling import LARGEST_TOKENS, PAIRS_PER_BIN, UNIFORM_TOKENS, SourcesSeen
from normscope.pairs.sums.stats import PairStats

D = 6
LAYER_NORM = Lines(layer_norm, 1e-6)
TOKENS = 5


def rows_of(sample: Sample) -> torch.Tensor:
    """The tokens of a sample: the same whenever it is seen."""
    generator = torch.Generator().manual_seed(sample.index)
    return torch.randn(TOKENS, D, generator=generator) * torch.rand(TOKENS, 1, generator=generator) * 10


GAMMA = torch.linspace(0.5, 3, D)


def stats_of(*samples: Sample, seed: int = 0) -> PairStats:
    stats = PairStats.empty(D, seed, by_gamma=True, per_channel=True, diagonal=True)
    if samples:
        x = torch.cat([rows_of(sample) for sample in samples])
        stats.update(x, LAYER_NORM, samples, gamma=GAMMA)
    return stats.to("cpu")


def assert_same(a: PairStats, b: PairStats) -> None:
    assert_same_tensors(pack_sums(a), pack_sums(b))
    assert (a.sources.number, a.fold_by) == (b.sources.number, b.fold_by)


parts = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=4).map(
    lambda pairs: [Sample(f"source {source}", source, 40 * source + index) for source, index in dict.fromkeys(pairs)]
)


@settings(max_examples=10, deadline=None)
@given(parts, parts, parts)
def test_merging_is_associative_and_commutative(one, two, three):
    a, b, c = stats_of(*one), stats_of(*two), stats_of(*three)
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert_same(a.merge(b), b.merge(a))
    assert_same(a.merge(stats_of()), a)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), min_size=1, max_size=8, unique=True), st.data())
def test_merged_parts_are_the_whole(pairs, data):
    samples = [Sample(f"source {source}", source, 40 * source + index) for source, index in pairs]
    cut = data.draw(st.integers(0, len(samples)))
    assert_same(stats_of(*samples), stats_of(*samples[:cut]).merge(stats_of(*samples[cut:])))


def test_folds_of_one_source_are_its_samples_and_of_several_the_sources():
    crops = [Sample("photo", 3, index) for index in range(4)]
    other = Sample("other photo", 9, 17)
    assert stats_of(crops[0]).fold_by is None
    by_sample = stats_of(*crops)
    assert by_sample.fold_by == "sample"
    assert sorted(by_sample.moments[:, 0].sum(1).tolist()) == [0.0] * 4 + [30.0] * 4
    by_source = by_sample.merge(stats_of(other))
    assert by_source.fold_by == "source"
    pairs = by_source.moments[:, 0].sum(1)
    assert pairs[pairs > 0].tolist() in ([120.0, 30.0], [30.0, 120.0])


@pytest.mark.parametrize("of", ["sources", "samples"])
def test_each_block_of_eight_fills_every_fold_in_an_order_of_its_own(of):
    """Eight apart, every second source would be in the same four folds; by a plain hash, eight fill five or so."""
    several = of == "sources"
    samples = [Sample("photo", n, n, "a") if several else Sample("photo", 0, n, "a") for n in range(1600)]
    folds = np.array(SourcesSeen("several" if several else "one").folds_of(samples)).reshape(200, 8)
    assert (np.sort(folds, axis=1) == np.arange(8)).all()
    assert len({tuple(block) for block in folds}) > 190  # of 200 draws from 40,320 orders
    for period in (2, 4, 8):
        kinds = np.arange(1600).reshape(200, 8) % period
        share = [(folds[kinds == 0] == fold).mean() for fold in range(8)]
        assert share == pytest.approx([1 / 8] * 8, abs=5 * (7 / 64 / (1600 / period)) ** 0.5)


def test_folds_are_the_same_in_every_process():
    """As captures of one data set by several ranks, or on several days, are merged."""
    samples = [Sample("photo", n, n, "digits") for n in range(16)]
    assert SourcesSeen("several").folds_of(samples) == [6, 0, 5, 7, 2, 1, 3, 4, 1, 7, 2, 3, 6, 0, 4, 5]


def test_equal_names_in_two_data_sets_are_two_sources():
    first, second = Sample("1.jpg", 0, 0, data="a"), Sample("1.jpg", 0, 0, data="b")
    merged = stats_of(first).merge(stats_of(second))
    assert merged.sources.number == "several"
    assert len(merged.tokens.key.unique()) == 2 * TOKENS


def test_tokens_that_belong_to_no_sample_leave_no_folds():
    x, samples = torch.randn(5, D, generator=torch.Generator().manual_seed(0)), (Sample("c", 2, 2), Sample("d", 3, 3))
    unmapped, mapped = stats_of(), stats_of(Sample("a", 0, 0), Sample("b", 1, 1))
    both = mapped.merge(unmapped)
    for stats in (unmapped, both):
        stats.update(x, LAYER_NORM, samples, gamma=GAMMA)  # 5 tokens for 2 samples
    for stats in (mapped.merge(unmapped), unmapped.merge(mapped), both):
        assert stats.fold_by is None
        assert stats.n_tokens == 15


def test_the_largest_tokens_do_not_depend_on_order_where_they_tie():
    samples = numbered_samples(8)
    x = torch.randn(8, TOKENS, D, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)

    def seen(order):
        stats = PairStats.empty(D)
        for i in order:
            stats.update(x[i], LAYER_NORM, (samples[i],))
        return stats.to("cpu").largest.key

    assert torch.equal(seen(range(8)), seen(reversed(range(8))))


def test_token_histograms_count_sigma_and_mean_over_sigma():
    samples = numbered_samples(20)
    stats = stats_of(*samples)
    x = torch.cat([rows_of(sample) for sample in samples]).double().numpy()
    sigma = np.sqrt(x.var(1) + 1e-6)
    edges = TOKEN_GRID.edges().numpy()
    for counts, values in ((stats.token_scales, sigma), (stats.token_offsets, x.mean(1) / sigma)):
        assert int(counts.sum()) == len(x)
        expected, _ = np.histogram(values, np.concatenate([[-1e30], edges[1:-1], [1e30]]))
        # float32 may put a value that lies on an edge into the bin beside it
        assert np.abs(counts.numpy() - expected).sum() <= 2


def test_the_drawing_sample_is_uniform_over_tokens():
    samples = numbered_samples(100)
    picked = torch.zeros(100)
    every = torch.stack([rows_of(sample) for sample in samples])  # (samples, tokens, d)
    for seed in range(40):
        drawn = stats_of(*samples, seed=seed).tokens
        assert len(drawn.key) == UNIFORM_TOKENS
        picked += (every[:, :, None] == drawn.x).all(-1).any(-1).sum(1)
    # 40 draws of 64 from 500 tokens: 25.6 hits a sample on average, standard deviation under 4.8.
    assert picked.mean().item() == pytest.approx(40 * UNIFORM_TOKENS / 100)
    assert picked.min() > 6 and picked.max() < 46


def test_the_largest_tokens_are_the_largest():
    samples = numbered_samples(30)
    every = torch.cat([rows_of(sample) for sample in samples])
    expected = every.abs().amax(1).sort(descending=True).values[:LARGEST_TOKENS]
    assert torch.equal(stats_of(*samples).largest.x.abs().amax(1), expected)


def test_sums_that_were_moved_or_merged_take_more_tokens():
    samples = numbered_samples(30)
    begun = stats_of(samples[0]).merge(stats_of(samples[1]))
    begun.update(torch.cat([rows_of(sample) for sample in samples[2:]]), LAYER_NORM, samples[2:], gamma=GAMMA)
    assert_same(begun.to("cpu"), stats_of(*samples))


def test_sampled_pairs_are_pairs_of_their_bins():
    samples = numbered_samples(30)
    stats = stats_of(*samples)
    every_x = torch.cat([rows_of(sample) for sample in samples])
    every_y = layer_norm(every_x.double(), 1e-6)[0].float()
    filled = stats.pairs.filled
    bins = filled.nonzero()[:, 1]
    assert torch.equal(PAIR_GRID.index(stats.pairs.x[filled]), bins)
    pairs = {
        (x.item(), y.item(), c)
        for row in zip(every_x, every_y, strict=True)
        for c, (x, y) in enumerate(zip(*row, strict=True))
    }
    drawn = (values[filled].tolist() for values in (stats.pairs.x, stats.pairs.y, stats.pairs.channel))
    assert set(zip(*drawn, strict=True)) <= pairs
    assert set(bins.tolist()) <= set(stats.moments[:, 0].sum(0).nonzero().squeeze(1).tolist())


def test_single_pairs_are_drawn_evenly_over_bins_and_elements():
    d, tokens = 20, 6000
    stats = PairStats.empty(d)
    x = torch.rand(tokens, d, generator=torch.Generator().manual_seed(0)) + 1  # 64 bins of about 1,900 pairs
    x[:5] *= 1000
    stats.update(x, LAYER_NORM, numbered_samples(tokens))
    per_bin, filled = stats.moments[:, 0].sum(0), stats.pairs.filled.sum(0)
    # An eighth of the pairs compete for four places each: one stays empty of 1,000 pairs once in e³¹ bins.
    assert (filled[per_bin > 1000] == PAIRS_PER_BIN).all() and (per_bin > 1000).sum() == 64
    assert 0 < filled[per_bin < 100].sum() < per_bin[per_bin < 100].sum() / 3
    drawn = torch.bincount(stats.pairs.channel[stats.pairs.filled].long(), minlength=d)
    assert drawn.min() > 0 and drawn.max() < 6 * drawn.double().mean()


def test_sums_that_do_not_belong_together_are_refused():
    for other, reason in (
        (PairStats.empty(7), r"6 channels .* 7"),
        (PairStats.empty(6, seed=1), "seed 1"),
        (PairStats.empty(6, by_gamma=True), "with gamma_moments and sums without"),
        (PairStats.empty(6, diagonal=True), "with diagonal_moments and sums without"),
    ):
        with pytest.raises(DataError, match=reason):
            PairStats.empty(6).merge(other)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def bytes_a_site(tokens: int) -> float:
    """Return the resident memory that a site of some tokens of width 64 takes."""

    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens))

    def seen() -> PairStats:
        stats = PairStats.empty(64)
        for first, rows in enumerate(x.chunk(5)):
            stats.update(rows, LAYER_NORM, [Sample("data", 8 * first + i, 8 * first + i) for i in range(8)])
        return stats

    kept = [seen() for _ in range(5)]  # loops are compiled, and memory for intermediate results is there
    before = resident_bytes()
    kept += [seen() for _ in range(30)]
    taken = (resident_bytes() - before) / 30
    assert {stats.nbytes for stats in kept} == {PairStats.empty(64).nbytes}  # whatever was added
    return taken


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="The system does not report resident memory.")
def test_pages_of_empty_bins_take_no_memory():
    command = [sys.executable, __file__, "2000"]  # a fresh process, where nothing else is allocated
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert float(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout) < 2.4e6


if __name__ == "__main__":
    print(bytes_a_site(int(sys.argv[1])))
