"""The kernels sum and draw what plain torch does: seen in Triton's interpreter and, where there is one, on a GPU.

Run as a script, in the interpreter, this file fills what the tests compare.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from captures import assert_same_counts

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.norms.formulas import Lines, layer_norm, rms_norm, root_mean_square, std_norm
from normscope.pairs.sums import reference
from normscope.pairs.sums.binning import PAIR_GRID, cuda
from normscope.pairs.sums.site_sums import Run, Tokens
from normscope.pairs.sums.stats import PairStats

pytestmark = pytest.mark.slow

LAYER_NORM = Lines(layer_norm, 1e-6)
ON_GPU = torch.cuda.is_available() and torch.version.hip is None
QUICKLY = {"_FLUSHED": 2**16}  # one program, which takes the interpreter as long as one of a few cells
# So that a few rows fill several tiles.
TINY = QUICKLY | {"_DESCRIBED": 32, "_ADDED": 32, "_OFFERED": 16, "_WARPS_TO_DRAW": 1}


def rows_of(tokens: int, d: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, d, generator=generator) + torch.randn(tokens, 1, generator=generator)
    return rows * torch.randn(tokens, 1, generator=generator).exp()


def tokens_of(rows: torch.Tensor, lines: Lines = LAYER_NORM, first: int = 0, **more) -> Tokens:
    """Tokens of five samples, one of which has none, in three folds."""
    n = len(rows)
    bounds = [0, n // 5, n // 5, n // 2, n - 1, n]
    folds, keys, samples = [5, 1, 0, 5, 7], [-(2**63), 3, 2**63 - 1, 977, -11], [4, 0, -1, 2**40, 9]
    runs = [
        Run(*ends, *of, first, sample) for *of, sample, ends in zip(folds, keys, samples, pairwise(bounds), strict=True)
    ]
    return Tokens(rows, lines, runs, more.pop("channels", rows.shape[1]), **more)


def grouped(groups: int, channels: int, positions: int, lines: Lines = LAYER_NORM, samples: int = 3, **more) -> Tokens:
    rows = rows_of(samples * groups, channels // groups * positions)
    return tokens_of(rows, lines, channels=channels, groups=groups, **more)


def given(n: int) -> Lines:
    generator = torch.Generator().manual_seed(3)
    shift, rstd = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return Lines(shift=shift, rstd=rstd.abs())


def of_many_kinds(n: int, d: int, least: float) -> torch.Tensor:
    """Rows of the size of 10^least and more, of equal max |x|, of no variance, with NaN and infinity."""
    rows = rows_of(n, d) * torch.logspace(least, 38, n)[:, None]
    rows[::7] = torch.tensor([2.0, -2.0, 0.0, -0.0, 2.0**18])[torch.arange(d) % 5]
    rows[3], rows[2, 1], rows[4, 0], rows[5, -1], rows[6] = 1.5, torch.nan, torch.inf, -torch.inf, torch.nan
    return rows


def cases() -> dict[str, list[Tokens]]:
    padding = torch.arange(30) % 4 != 1
    odd, many, hundreds, one_huge = rows_of(8, 67), rows_of(66, 5), rows_of(400, 3), rows_of(12, 40)
    one_huge[5] *= 1e25
    nearby = Lines(shift=torch.zeros(120).double(), rstd=torch.linspace(0.7, 1.4, 120).double())
    beyond = Lines(shift=torch.logspace(-30, 60, 12).double(), rstd=torch.logspace(60, -60, 12).double())
    return {
        "layer norm, two batches": [tokens_of(odd), tokens_of(odd.flip(0) * 2, first=8)],
        "rms norm, bfloat16": [tokens_of(rows_of(9, 48).bfloat16(), Lines(rms_norm, 1e-6))],
        "root mean square, float16": [tokens_of(rows_of(9, 33).half(), Lines(root_mean_square, 1e-3))],
        "standard deviation, float64": [tokens_of(rows_of(9, 20).double(), Lines(std_norm, 0.0))],
        "more tokens than places": [tokens_of(many), tokens_of(many[:20] * 2, first=66)],
        "many more tokens": [tokens_of(hundreds), tokens_of(hundreds * 2, first=400)],
        "many more, most of them padding": [tokens_of(hundreds, valid=torch.arange(400) % 4 == 0)],
        "zeros": [tokens_of(torch.zeros(9, 70)), tokens_of(rows_of(9, 70).relu(), first=9)],
        "next to nothing": [
            tokens_of(rows_of(9, 70).sign() * 1e-39, given(9)),
            tokens_of(rows_of(9, 70) * 1e-9, first=9),
        ],
        "one huge token": [tokens_of(one_huge), tokens_of(one_huge, Lines(rms_norm, 0.0), first=12)],
        "one element a token": [tokens_of(rows_of(12, 1), given(12)), tokens_of(rows_of(12, 1), first=12)],
        "lines beyond float32": [
            tokens_of(rows_of(12, 20), beyond),
            tokens_of(rows_of(12, 20).half(), beyond, first=12),
        ],
        "few bins": [tokens_of(1 + rows_of(120, 256, seed=4).clamp(-1, 1) / 64, nearby)],
        "padding": [tokens_of(rows_of(30, 12), valid=padding)],
        "every kind of number": [tokens_of(of_many_kinds(30, 9, -46))],
        "every kind of number, no eps": [tokens_of(of_many_kinds(20, 9, -30), Lines(std_norm, 0.0))],
        "given lines": [tokens_of(of_many_kinds(10, 12, -3), given(10))],
        "one token of one channel": [Tokens(torch.tensor([[3.0]]), given(1), [Run(0, 1, 3, 5, 0, 0)], 1)],
        "rows in strides": [tokens_of(rows_of(17, 10).T)],
        "all the sums": [tokens_of(rows_of(8, 6), gamma=torch.linspace(-1, 2, 6))],
        "groups": [grouped(2, 6, 7), grouped(2, 6, 37, samples=2, first=6)],
        "groups without positions": [grouped(2, 8, 1)],
        "one group": [grouped(1, 3, 40)],
        "channels by themselves, given lines": [grouped(5, 5, 30, given(15), valid=torch.arange(15) % 5 != 2)],
        "as wide as it comes": [tokens_of(rows_of(3, 2100))],
        "groups as wide as they come": [grouped(2, 4, 1030, samples=1)],
    }


AS_IT_COMES = {"few bins", "as wide as it comes", "groups as wide as they come", "every kind of number"}
ASKED = {"all the sums": {"by_gamma": True, "per_channel": True, "diagonal": True}}


def filled(loop, name: str, device: str = "cpu") -> PairStats:
    calls = cases()[name]
    on, first = torch.device(device), calls[0]
    stats = PairStats.empty(first.channels, device=on, grouped=first.groups is not None, **ASKED.get(name, {}))
    for tokens in calls:
        loop(stats, moved(tokens, on))
    return stats.to("cpu")


def moved(tokens: Tokens, device: torch.device) -> Tokens:
    def there(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    lines = replace(tokens.lines, **{name: there(value) for name, value in vars(tokens.lines).items()})
    return replace(tokens, **{name: there(value) for name, value in vars(tokens).items()} | {"lines": lines})


def by_kernels(name: str, device: str) -> PairStats:
    with mock.patch.dict(vars(cuda), QUICKLY if name in AS_IT_COMES else TINY):
        return filled(cuda.add, name, device)


def of_a_gpu(name: str):
    return pytest.param(name, marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=["interpreted", *map(of_a_gpu, ("on a GPU", "on a GPU, as it comes"))])
def made(request, tmp_path_factory) -> Callable[[str], PairStats]:
    """What the kernels fill: in the interpreter with tiny tiles, on a GPU with those and with its own."""
    if request.param == "interpreted":
        path = tmp_path_factory.mktemp("interpreted") / "stats.pt"
        env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, __file__, path], env=env, check=True)
        return torch.load(path, weights_only=False).__getitem__
    if request.param == "on a GPU":
        return lambda name: by_kernels(name, "cuda")
    return lambda name: filled(cuda.add, name, "cuda")


def sizes_of_terms(calls: list[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ|terms| of the moments and of the channels' sums: what the rounding of a sum is relative to."""
    moments, channels = 0, torch.zeros(2, calls[0].channels, dtype=torch.float64)
    for tokens in calls:
        every = slice(None)
        x = tokens.rows.double()
        shift, rstd = tokens.lines.of(x, every)
        y = (x - shift) * rstd
        counts = torch.isfinite(y).all(1) if tokens.valid is None else torch.isfinite(y).all(1) & tokens.valid
        x, y, channel = x[counts], y[counts], tokens.channel_of(every)[counts]
        cells = tokens.folds()[counts, None] * PAIR_GRID.size + PAIR_GRID.index(x.float())
        sums = reference.binned_moments(x.abs(), y.abs(), cells, 8 * PAIR_GRID.size)
        moments = moments + sums.view(6, 8, -1).transpose(0, 1)
        channels[0].index_add_(0, channel.flatten(), x.abs().flatten())
        channels[1].index_add_(0, channel.flatten(), x.square().flatten())
    return moments, channels


def allowed(terms: torch.Tensor) -> torch.Tensor:
    """How far sums gathered in float32 may be off (docs/methods.md): Σ|terms| by its roundings, a pair by the least."""
    n = terms[:, :1]
    return (9 * 2.0**-24 + n * 2.0**-31) * terms + n * 2.0**-126


@pytest.mark.parametrize("name", cases())
def test_kernels_match_the_reference(made, name):
    ours, truth = made(name), filled(reference.add, name)
    assert truth.n_pairs > 0
    assert_same_counts(ours, truth)
    moments, channels = sizes_of_terms(cases()[name])
    assert torch.equal(moments[:, 0], truth.moments[:, 0])
    assert ((ours.moments - truth.moments).abs() <= allowed(moments)).all()
    assert ((ours.channel_sums - truth.channel_sums).abs() <= 1e-12 * channels).all()
    for sums in ASKED.get(name, {}) and ("gamma_moments", "channel_moments", "diagonal_moments"):
        # On a GPU plain torch adds in no fixed order either: sums of a few terms, none larger than a thousand.
        off = 1e-12 if ON_GPU else 0
        torch.testing.assert_close(getattr(ours, sums), getattr(truth, sums), rtol=off, atol=off)
    assert len(truth.tokens.key) > 0


if __name__ == "__main__":
    torch.save({name: by_kernels(name, "cpu") for name in cases()}, sys.argv[1])
