"""On a GPU, tokens as networks make them, and more of them than 32 bits count: against the loop on the CPU, and torch.

With NORMSCOPE_KERNEL_TESTS=cpu and TRITON_INTERPRET=1 the same of a few tokens on the CPU: it shows that it runs.
"""

import contextlib
import itertools
import os
from dataclasses import replace

import pytest
import torch
from captures import assert_same_counts

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.norms.formulas import Lines, layer_norm, rms_norm
from normscope.pairs.sums import reference
from normscope.pairs.sums.binning import PAIR_GRID, cuda
from normscope.pairs.sums.site_sums import Run, Tokens
from normscope.pairs.sums.stats import PairStats

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = not INTERPRETED and torch.cuda.is_available() and torch.version.hip is None
HERE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LINES = {"layer norm": Lines(layer_norm, 1e-6), "RMS norm": Lines(rms_norm, 1e-5)}

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gigabytes")]


def sized(on_a_gpu, interpreted):
    return on_a_gpu if ON_GPU else interpreted


def rows_of(n: int, d: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Tokens with tails (Student's t, of three degrees of freedom), an offset each, and some that are not finite."""
    generator = torch.Generator(HERE).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=HERE)

    tails = (normal(n, d).square() + normal(n, d).square() + normal(n, d).square()).div_(3).rsqrt_()
    rows = tails.mul_(normal(n, d)).add_(normal(n, 1)).mul_(normal(n, 1).exp()).clamp_(-6e4, 6e4).to(dtype)
    rows[:, d // 3] *= 40  # a channel of massive activations
    rows[n // 7, 1], rows[n // 3, d - 1], rows[n // 2, 0], rows[n - 2] = torch.nan, torch.inf, -torch.inf, torch.nan
    return rows


def runs_of(n: int, samples: int) -> list[Run]:
    bounds = torch.linspace(0, n, samples + 1).long().tolist()
    return [
        Run(start, stop, number * 3 % 7, 977 * number - 10, 5, number)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def filled(loop, tokens: Tokens, device: torch.device = HERE, **asked) -> PairStats:
    stats = PairStats.empty(tokens.channels, device=device, grouped=tokens.groups is not None, **asked)
    loop(stats, tokens)
    return stats.to("cpu")


def sizes(sums: torch.Tensor) -> torch.Tensor:
    """Bound Σ|terms| of n, Σx, Σy, Σx², Σxy, Σy² from above, by Cauchy and Schwarz: along axis 1."""
    n, _, _, xx, _, yy = sums.unbind(1)
    return torch.stack([n, (n * xx).sqrt(), (n * yy).sqrt(), xx, (xx * yy).sqrt(), yy], 1)


def assert_same(ours: PairStats, truth: PairStats) -> None:
    """Hold counts and drawn keys to the bit, and sums of bins to what is allowed of those gathered in float32."""
    assert truth.n_pairs > 0
    assert_same_counts(ours, truth)
    terms, n = sizes(truth.moments), truth.moments[:, :1]
    gathered = 2 * (9 * 2.0**-24 + n.clamp(max=2.0**16) * 2.0**-31)  # docs/methods.md; the truth may be gathered too
    off = (ours.moments - truth.moments).abs() - gathered * terms - n * 2.0**-126
    assert off.max() <= 0, f"moments are off by {off.max():.3g} more than is allowed, at {off.flatten().argmax()}"
    of_channels = torch.stack([(truth.n_pairs * truth.channel_sums[1]).sqrt(), truth.channel_sums[1]])
    assert ((ours.channel_sums - truth.channel_sums).abs() <= 1e-12 * of_channels).all()


def of_a_network(name: str, dtype: torch.dtype) -> Tokens:
    """Tokens of eight samples of a Transformer, of a convolutional network, of many short rows."""
    if name == "groups":
        images, groups, channels, positions = sized((8, 32, 320, 4096), (2, 2, 4, 9))
        rows = rows_of(images * groups, channels // groups * positions, dtype)
        return Tokens(rows, LINES["layer norm"], runs_of(len(rows), images), channels, groups)
    n, d = {
        "a ViT-B": sized((1576, 768), (16, 24)),
        "a DiT-XL": sized((32768, 1152), (24, 36)),
        "many short rows": sized((262_147, 40), (66, 5)),
        "queries and keys": sized((201_729, 64), (40, 8)),
    }[name]
    lines = LINES["RMS norm" if name == "queries and keys" else "layer norm"]
    valid = torch.arange(n, device=HERE) % 5 != 3 if name == "many short rows" else None
    return Tokens(rows_of(n, d, dtype), lines, runs_of(n, 8), d, valid=valid)


@pytest.mark.parametrize("name", ["a ViT-B", "a DiT-XL", "many short rows", "queries and keys", "groups"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_networks_are_summed_as_by_torch_and_by_numba(name, dtype):
    tokens = of_a_network(name, dtype)
    ours = filled(cuda.add, tokens)
    assert ours.nonfinite_tokens >= 3
    assert_same(ours, filled(reference.add, tokens))
    cpu = pytest.importorskip("normscope.pairs.sums.binning.cpu", reason="numba fails here", exc_type=ImportError)
    valid = None if tokens.valid is None else tokens.valid.cpu()
    here = replace(tokens, rows=tokens.rows.cpu(), valid=valid)
    assert_same(ours, filled(cpu.add, here, torch.device("cpu")))


def test_on_a_stream_of_its_own():
    """Nothing waits for the other stream but by what is said: rows are made on that on which they are added up."""
    tokens = of_a_network("a DiT-XL", torch.bfloat16)
    truth = filled(cuda.add, tokens)
    with torch.cuda.stream(torch.cuda.Stream(HERE)) if ON_GPU else contextlib.nullcontext():
        if ON_GPU:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            torch.cuda._sleep(100_000_000)  # cycles: what runs on another stream would run before
        late = of_a_network("a DiT-XL", torch.bfloat16)
        ours = filled(cuda.add, late)
    assert_same(ours, truth)


def test_more_positions_than_programs_along_the_second_axis():
    """256 positions a program, and 65,535 programs at most but along the first."""
    positions = sized(256 * 65_535 + 300, 300)
    rows = torch.randn(2, positions, generator=torch.Generator(HERE).manual_seed(0), device=HERE).bfloat16()
    tokens = Tokens(rows, LINES["layer norm"], runs_of(2, 2), 1, 1)
    assert_same(filled(cuda.add, tokens), filled(reference.add, tokens))


def test_elements_beyond_2_to_the_31():
    """Counts against torch's own, of slices: the whole would take forty times the memory."""
    d, beyond = sized((1024, 2**31), (32, 2**9))
    n = beyond // d + 5
    at_once = sized(2**17, 8)
    generator = torch.Generator(HERE).manual_seed(0)
    rows = torch.empty(n, d, dtype=torch.bfloat16, device=HERE)
    for part in rows.split(at_once):
        part.copy_(torch.randn(part.shape, generator=generator, device=HERE) * 3)
    rows[-1, -1], rows[-3, 0] = torch.nan, 77_777.0
    runs = [Run(0, n - 9, 0, 5, 0, 0), Run(n - 9, n - 2, 1, 6, 0, 1), Run(n - 2, n, 2, 7, 0, 2)]
    stats = PairStats.empty(d, device=HERE)
    cuda.add(stats, Tokens(rows, LINES["layer norm"], runs, d))
    counts = torch.zeros(3, PAIR_GRID.size, dtype=torch.int64, device=HERE)
    sums = torch.zeros(2, d, dtype=torch.float64, device=HERE)
    for run in runs:
        for part in rows[run.start : min(run.stop, n - 1)].split(at_once):  # the last holds a NaN
            counts[run.fold] += torch.bincount(PAIR_GRID.index(part.float()).flatten(), minlength=PAIR_GRID.size)
            sums += torch.stack([part.double().sum(0), part.double().square().sum(0)])
    assert torch.equal(stats.moments[:3, 0], counts.double())
    assert not stats.moments[3:].any()
    assert int(stats.nonfinite_tokens) == 1 and stats.n_tokens == n - 1
    assert int(stats.density.sum()) == stats.n_pairs == (n - 1) * d
    of_channels = torch.stack([(n * sums[1]).sqrt(), sums[1]])  # no less than Σ|terms|
    assert ((stats.channel_sums - sums).abs() <= 1e-12 * of_channels).all()
    assert stats.channel_extremes[1].max() == rows[-3, 0] == stats.largest.x.max()
    torch.testing.assert_close(stats.moments[:, 3].sum(), sums[1].sum(), rtol=1e-6, atol=0)  # gathered in float32
    assert n - 3 - runs[1].start in stats.largest.position[stats.largest.sample == 1]
