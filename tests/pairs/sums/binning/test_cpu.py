"""Whatever adds up the pairs: the same counts, the same sums, the same drawn tokens and pairs as plain torch."""

import contextlib
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from captures import assert_same_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import sums_of

from normscope.norms.formulas import Lines, layer_norm, rms_norm, root_mean_square, std_norm
from normscope.pairs.sums import reference
from normscope.pairs.sums.binning import cpu
from normscope.pairs.sums.site_sums import Run, Tokens
from normscope.pairs.sums.stats import PairStats


@contextlib.contextmanager
def shared_out(threads: int):
    """Let even a few tokens be shared out among so many threads, of the loop alone."""
    with mock.patch.object(cpu, "_PAIRS_A_THREAD", 1), mock.patch.object(torch, "get_num_threads", lambda: threads):
        yield


def tokens_of(rows: torch.Tensor, lines: Lines, n_samples: int = 3, first: int = 7, **more) -> Tokens:
    bounds = torch.linspace(0, len(rows), n_samples + 1).long().tolist()
    folds = [5, 0, 5, 2]
    runs = [
        Run(start, stop, folds[number % 4], 977 * number - 10, first, 3 * number - 1)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    return Tokens(rows, lines, runs, more.pop("channels", rows.shape[1]), **more)


def filled(loop, *calls: Tokens, **options) -> PairStats:
    first = calls[0]
    stats = PairStats.empty(first.channels, grouped=first.groups is not None, **options)
    for tokens in calls:
        loop(stats, tokens)
    return stats.to("cpu")


def assert_same(ours: PairStats, truth: PairStats, *calls: Tokens) -> None:
    assert_same_counts(ours, truth, rtol=3e-7)
    # Σ|terms|, of which sums in another order differ by a few 2⁻⁵³ for each halving of the number of terms.
    second = truth.moments[:, [3, 5]].sum((0, 2)).sqrt()
    scale = torch.stack([torch.ones(()), second[0], second[1], second[0] ** 2, second.prod(), second[1] ** 2])
    scale *= torch.tensor([1, 1, 1, 0, 0, 0]) * truth.n_pairs**0.5 + torch.tensor([0, 0, 0, 1, 1, 1])
    assert ((ours.moments - truth.moments).abs() <= 1e-12 * scale[:, None]).all()
    torch.testing.assert_close(ours.channel_sums[1], truth.channel_sums[1], rtol=1e-12, atol=0)
    assert ((ours.channel_sums[0] - truth.channel_sums[0]).abs() <= 1e-12 * scale[1]).all()
    if truth.gamma_moments is not None:  # 2⁻⁵³ of Σ|terms| for each halving, and the weights are at most 4 here
        assert ((ours.gamma_moments - truth.gamma_moments).abs() <= 4e-12 * scale[:, None]).all()
    for name in ("channel_moments", "diagonal_moments"):
        if getattr(truth, name) is not None:
            assert torch.equal(getattr(ours, name), getattr(truth, name))


def rows_of(seed: int, tokens: int, d: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, d, generator=generator) + torch.randn(tokens, 1, generator=generator)
    return scale * rows * torch.rand(tokens, 1, generator=generator).exp()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 250),  # up to 83 of a sample: more than two blocks of the loop
    st.sampled_from([2, 7, 64, 1023, 1025, 2100]),  # more than one part of a token, and nearly one
    st.sampled_from([layer_norm, rms_norm, root_mean_square, std_norm]),
    st.sampled_from([1e-6, 1.0, 1e4]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_compiled_loop_is_the_reference(seed, n, d, form, scale, dtype, threads, padded):
    rows = rows_of(seed, n, d, scale).to(dtype)
    valid = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.7 if padded else None
    lines = Lines(form, 1e-6)
    gamma = torch.linspace(-1, 2, d)
    calls = [
        tokens_of(part, lines, first=first, valid=valid, gamma=gamma)
        for first, part in ((0, rows), (500, rows * 3 - scale))
    ]
    with shared_out(threads):
        assert_same(filled(cpu.add, *calls, by_gamma=True), filled(reference.add, *calls, by_gamma=True))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 6]), st.integers(1, 300), st.integers(1, 4))
def test_the_compiled_loop_is_the_reference_of_grouped_norms(seed, groups, positions, threads):
    channels = 6
    rows = rows_of(seed, 5 * groups, channels // groups * positions)
    lines, gamma = Lines(layer_norm, 1e-5), torch.linspace(-1, 2, channels)
    tokens = tokens_of(rows, lines, 5, channels=channels, groups=groups, gamma=gamma)
    with shared_out(threads):
        assert_same(filled(cpu.add, tokens, by_gamma=True), filled(reference.add, tokens, by_gamma=True))


@pytest.mark.parametrize("d", [12, 1025])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_given_y_is_summed_as_it_is(threads, d):
    rows = rows_of(2, 70, d)
    rows[3], rows[4, 5] = 2.5, torch.nan  # a constant token counts, and one with a NaN does not
    y = torch.erf(0.7 * rows.double() + 0.2)
    tokens = tokens_of(rows, Lines(layer_norm, 1e-30, explicit_y=y), gamma=torch.linspace(-1, 2, d))
    asked = {"by_gamma": True, "per_channel": True}
    with shared_out(threads):
        ours = filled(cpu.add, tokens, **asked)
    assert_same(ours, filled(reference.add, tokens, **asked))
    assert (ours.n_tokens, int(ours.nonfinite_tokens)) == (69, 1)
    finite = torch.isfinite(rows).all(1)
    x, y = rows[finite].double(), y[finite]
    torch.testing.assert_close(ours.moments.sum((0, 2)), sums_of(x, y), rtol=1e-11, atol=1e-9)
    drawn = ours.pairs.filled
    torch.testing.assert_close(ours.pairs.y[drawn], torch.erf(0.7 * ours.pairs.x[drawn] + 0.2))
    torch.testing.assert_close(ours.tokens.kept().y, torch.erf(0.7 * ours.tokens.kept().x + 0.2))


@pytest.mark.parametrize("threads", [1, 3])
def test_given_lines_and_optional_sums(threads):
    rows = rows_of(0, 40, 12)
    generator = torch.Generator().manual_seed(1)
    lines = Lines(
        shift=torch.randn(40, generator=generator).double(), rstd=torch.rand(40, generator=generator).double()
    )
    tokens = tokens_of(rows, lines, gamma=torch.linspace(-1, 2, 12))
    asked = {"by_gamma": True, "per_channel": True}
    with shared_out(threads):
        ours = filled(cpu.add, tokens, **asked)
    assert_same(ours, filled(reference.add, tokens, **asked))
    y = (rows.double() - lines.shift[:, None]) * lines.rstd[:, None]
    torch.testing.assert_close(ours.moments[:, 4].sum(), (rows.double() * y).sum(), rtol=1e-12, atol=0)
    weighted = (torch.linspace(-1, 2, 12).double() ** 2 * y * y).sum()
    torch.testing.assert_close(ours.gamma_moments[:, 5].sum(), weighted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_nonfinite_tokens_are_counted_separately(bad, eps):
    rows = rows_of(3, 30, 9)
    rows[4, 2], rows[17, 8] = bad, bad
    rows[20] = 2.5  # of no variance: without eps, its y is no number
    tokens = tokens_of(rows, Lines(layer_norm, eps))
    ours = filled(cpu.add, tokens)
    assert_same(ours, filled(reference.add, tokens))
    assert int(ours.nonfinite_tokens) == (2 if eps else 3)
    assert ours.n_tokens == 30 - int(ours.nonfinite_tokens)
    assert torch.isfinite(ours.moments).all()


def test_numbers_at_the_ends_of_float32():
    rows = torch.tensor(
        [[0.0, -0.0, 1e-45, -1e-45], [3.4e38, -3.4e38, 1e38, 1.0], [2.0**18, -(2.0**18), 2.0**-27, 0.5]]
    )
    tokens = tokens_of(rows, Lines(rms_norm, 1e-6), 1)
    assert_same(filled(cpu.add, tokens), filled(reference.add, tokens))


def test_the_same_number_of_threads_gives_the_same_bits():
    lines = Lines(layer_norm, 1e-6)
    calls = [tokens_of(rows_of(seed, 200, 64), lines, first=1000 * seed) for seed in range(4)]
    for threads in (1, 3):
        with shared_out(threads):
            first, second = filled(cpu.add, *calls), filled(cpu.add, *calls)
        assert torch.equal(first.moments, second.moments)
        assert torch.equal(first.channel_sums, second.channel_sums)


def test_concurrent_captures_do_not_interfere():
    lines = Lines(layer_norm, 1e-6)
    calls = [tokens_of(rows_of(seed, 300, 64), lines, first=1000 * seed) for seed in range(6)]
    alone = filled(cpu.add, *calls)
    with shared_out(2), ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(filled, cpu.add, *calls) for _ in range(4)]:
            assert_same(future.result(), alone)


CAPTURED = """
import sys, warnings
sys.modules["numba"] = None
import normscope, torch
from torch import nn
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.randn(4, 8)])
print(seen.stats["0"].n_pairs, [str(w.message) for w in said if "numba" in str(w.message)])
"""


@pytest.mark.slow
def test_without_numba_the_sums_are_the_same():
    process = subprocess.run([sys.executable, "-c", CAPTURED], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("32 ['numba does not work here")
