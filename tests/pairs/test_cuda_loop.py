"""On a GPU: what plain torch sums and draws, seen in Triton's interpreter; no waiting; and no spilled registers.

Run as a script, in the interpreter, this file fills what the tests compare.
"""

import contextlib
import importlib
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton", reason="Triton is made for Linux alone")

from triton.compiler import ASTSource  # noqa: E402

from normscope.batches import Batch, Sample  # noqa: E402
from normscope.pairs.binning import PAIR_GRID, cuda, cuda_draw, cuda_loop, reference  # noqa: E402
from normscope.pairs.formulas import FORMS, layer_norm, rms_norm, root_mean_square, std_norm  # noqa: E402
from normscope.pairs.recorder import Recorder, Summing  # noqa: E402
from normscope.pairs.stats import PairStats  # noqa: E402
from normscope.pairs.tokens import Lines, Run, Tokens  # noqa: E402
from normscope.pairs.trace import find_norms  # noqa: E402

LAYER_NORM = Lines(FORMS[layer_norm], 1e-6)
COUNTS = ("density", "channel_extremes", "token_offsets", "token_scales", "nonfinite_tokens")
TINY = {"_DESCRIBED": 32, "_ADDED": 32, "_OFFERED": 16, "_WARPS_TO_DRAW": 1}  # so that a few rows fill several tiles


def rows_of(tokens: int, d: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, d, generator=generator) + torch.randn(tokens, 1, generator=generator)
    return rows * torch.randn(tokens, 1, generator=generator).exp()


def tokens_of(rows: torch.Tensor, lines: Lines = LAYER_NORM, first: int = 0, **more) -> Tokens:
    """Tokens of five samples, one of which has none, in three folds."""
    n = len(rows)
    bounds = [0, n // 5, n // 5, n // 2, n - 1, n]
    runs = [
        Run(start, stop, fold, key, first, sample)
        for start, stop, fold, key, sample in zip(
            bounds, bounds[1:], [5, 1, 0, 5, 7], [-(2**63), 3, 2**63 - 1, 977, -11], [4, 0, -1, 2**40, 9], strict=False
        )
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
    odd, many = rows_of(8, 67), rows_of(66, 5)
    return {
        "layer norm, two batches": [tokens_of(odd), tokens_of(odd.flip(0) * 2, first=8)],
        "rms norm, bfloat16": [tokens_of(rows_of(9, 48).bfloat16(), Lines(FORMS[rms_norm], 1e-6))],
        "root mean square, float16": [tokens_of(rows_of(9, 33).half(), Lines(FORMS[root_mean_square], 1e-3))],
        "standard deviation, float64": [tokens_of(rows_of(9, 20).double(), Lines(FORMS[std_norm], 0.0))],
        "more tokens than places": [tokens_of(many), tokens_of(many[:20] * 2, first=66)],
        "padding": [tokens_of(rows_of(30, 12), valid=padding)],
        "every kind of number": [tokens_of(of_many_kinds(30, 9, -46))],
        "every kind of number, no eps": [tokens_of(of_many_kinds(20, 9, -30), Lines(FORMS[std_norm], 0.0))],
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


AS_IT_COMES = {"as wide as it comes", "groups as wide as they come", "every kind of number"}
ASKED = {"all the sums": {"by_gamma": True, "per_channel": True}}


def filled(loop, name: str) -> PairStats:
    calls = cases()[name]
    stats = PairStats.empty(calls[0].channels, grouped=calls[0].groups is not None, **ASKED.get(name, {}))
    for tokens in calls:
        loop(stats, tokens)
    return stats.to("cpu")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, PairStats]:
    path = tmp_path_factory.mktemp("interpreted") / "stats.pt"
    subprocess.run([sys.executable, __file__, path], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    return torch.load(path, weights_only=False)


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


@pytest.mark.parametrize("name", cases())
def test_the_kernels_add_up_what_the_reference_does(interpreted, name):
    ours, truth = interpreted[name], filled(reference.add, name)
    assert truth.n_pairs > 0
    for counts in COUNTS:
        assert torch.equal(getattr(ours, counts), getattr(truth, counts)), counts
    assert torch.equal(ours.moments[:, 0], truth.moments[:, 0])
    moments, channels = sizes_of_terms(cases()[name])
    assert torch.equal(moments[:, 0], truth.moments[:, 0])
    assert ((ours.moments - truth.moments).abs() <= 1e-12 * moments).all()
    assert ((ours.channel_sums - truth.channel_sums).abs() <= 1e-12 * channels).all()
    for sums in ASKED.get(name, {}) and ("gamma_moments", "channel_moments"):
        assert torch.equal(getattr(ours, sums), getattr(truth, sums))


@pytest.mark.parametrize("name", cases())
def test_the_kernels_draw_what_the_reference_does(interpreted, name):
    ours, truth = interpreted[name], filled(reference.add, name)
    assert len(truth.tokens.key) > 0
    for sample in ("tokens", "largest", "pairs"):
        for f in fields(getattr(truth, sample)):
            mine, theirs = (getattr(getattr(stats, sample), f.name) for stats in (ours, truth))
            if f.name in ("y", "rstd"):  # rounded to float32 from sums of another order
                torch.testing.assert_close(mine, theirs, rtol=2**-23, atol=1e-12)
            else:
                assert torch.equal(mine, theirs), (sample, f.name)


class NothingWaits(TorchDispatchMode):
    """Refuses what a host waits for: a copy from the GPU, or one to it that is not from pinned memory and on its own.

    What depends on the data itself, the tensors without any refuse.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.pinned: list[torch.Tensor] = []

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.append(tensor)
        return tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [value for value in args if isinstance(value, torch.Tensor)]
        made = [result] if isinstance(result, torch.Tensor) else []
        before, after = ({tensor.device.type for tensor in tensors} for tensors in (given, made))
        assert not (before == {"cuda"} and after == {"cpu"}), function
        if before == {"cpu"} and after == {"cuda"}:
            assert any(given[0] is tensor for tensor in self.pinned), function
            assert (kwargs or {}).get("non_blocking"), function
        if after == {"cuda"}:
            self.names.append(function.overloadpacket.__name__)
        return result


class Launched:
    """In place of a kernel: says that it was launched, and on what."""

    def __init__(self, name: str, launches: list[str]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid)
        return self

    def __call__(self, *args, **options):
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        assert all(tensor.device.type == "cuda" for tensor in tensors)
        assert all(tensor.is_contiguous() or tensor.mT.is_contiguous() for tensor in tensors)
        self.launches.append(self.name)


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """Put nothing but a note in the place of each kernel."""
    noted: list[str] = []
    for name in ("describe", "add_pairs", "draw"):
        monkeypatch.setattr(cuda, name, Launched(name, noted))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "_stream", lambda device: 0)
    return noted


@pytest.fixture
def waits(monkeypatch):
    refuses = NothingWaits()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: refuses.pin(tensor))
    cuda._runs.cache_clear()
    yield refuses
    cuda._runs.cache_clear()


@pytest.mark.parametrize("groups", [None, 2])
def test_a_call_is_three_kernels_and_nothing_waits_for_them(waits, launches, groups):
    with FakeTensorMode():
        on = torch.device("cuda")
        stats = PairStats.empty(8, device=on, grouped=groups is not None)
        rows, valid = torch.randn(30, 8 if groups is None else 20, device=on), torch.ones(30, device=on).bool()
        tokens = Tokens(rows, LAYER_NORM, [Run(0, 12, 0, 1, 0, 0), Run(12, 30, 1, 2, 0, 1)], 8, groups, valid)
        with waits:
            cuda.add(stats, tokens)
            first = list(waits.names)
            waits.names.clear()
            cuda.add(stats, tokens)
    assert launches == ["describe", "add_pairs", "draw"] * 2
    assert first.count("_to_copy") == 1  # the runs, which the next norm finds there
    assert set(waits.names) <= {"empty", "detach", "mT", "transpose"}  # none of which runs anything on the GPU


def of_tokens() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6)).eval()


def of_groups() -> nn.Module:
    return nn.Sequential(nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.InstanceNorm1d(8, affine=True)).eval()


@pytest.mark.parametrize(("network", "padded"), [(of_tokens, False), (of_tokens, True), (of_groups, False)])
def test_no_hook_of_a_capture_waits(waits, launches, network, padded):
    one, several = ([Sample(source, "ab".index(source), i) for i, source in enumerate(own)] for own in ("aaa", "aab"))
    report = find_norms(network(), Batch((torch.randn(1, 8, 6),), samples=tuple(one[:1])))
    with FakeTensorMode(), torch.no_grad():
        on = torch.device("cuda")
        with on:
            recorder = Recorder(network(), Summing(0, None, False, False, False, None), report, report.sites)
        x, valid = torch.randn(3, 8, 6, device=on), torch.ones(3, 8, device=on).bool() if padded else None
        with waits, recorder.hooked():
            for samples in (one, several, one):  # the folds of one source become those of several
                recorder.run(Batch((x,), samples=tuple(samples), valid=valid))
    assert launches == ["describe", "add_pairs", "draw"] * 3 * len(network())
    assert "_to_copy" in waits.names  # it has seen what is sent to the GPU


POINTERS = {
    "valid": "*i1", "runs": "*i64", "keys": "*i64", "folds": "*i32", "shift": "*fp64", "rstd": "*fp64",
    "reach": "*fp32", "competing": "*i32", "token_offsets": "*i64", "token_scales": "*i64", "nonfinite_tokens": "*i64",
    "moments": "*fp64", "density": "*i64", "channel_sums": "*fp64", "channel_extremes": "*fp32",
    "pair_keys": "*i64", "pair_x": "*fp32", "pair_y": "*fp32", "pair_channel": "*i32",
    "numbers": "*i64", "samples": "*i64",
}  # fmt: skip
OF_TOKENS = {
    "rank": "*fp64",
    "key": "*i64",
    "x": "*fp32",
    "y": "*fp32",
    "rstd": "*fp32",
    "position": "*i64",
    "sample": "*i64",
}
POINTERS |= {f"{sample}_{name}": kind for sample in ("token", "largest") for name, kind in OF_TOKENS.items()}
FORM = {"eps": 1e-6, "centred": True, "about_mean": True, "correction": 0, "clamped": False, "given": False}
WARPS = cuda._WARPS_TO_DRAW
PLACES = {"uniform": 64, "largest": 16, "at_once": 16, "tile": cuda._OFFERED, "pairs_tile": 32 * WARPS}
KERNELS = {
    "describe": (cuda_loop.describe, {**FORM, "all_valid": False, "at_once": 1, "tile": cuda._DESCRIBED}, 4),
    "add_pairs": (cuda_loop.add_pairs, {"grouped": False, "at_once": 1, "tile": cuda._ADDED}, 4),
    "add_pairs of groups": (cuda_loop.add_pairs, {"grouped": True, "at_once": 1, "tile": cuda._ADDED}, 4),
    "draw": (cuda_draw.draw, {**PLACES, "grouped_width": 0}, WARPS),
    "draw of groups": (cuda_draw.draw, {**PLACES, "grouped_width": 256}, WARPS),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile_without_spilled_registers(tmp_path, monkeypatch, name, capability):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants, warps = KERNELS[name]
    types = {name: POINTERS.get(name, "i32") for name in kernel.arg_names} | {"rows": "*bf16"}
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name][0] == "*"},
    )
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    code = importlib.import_module("disassembly").code_of(source, capability, {"num_warps": warps})
    assert code.local == 0
    assert not code.counted(r"(LDL|STL)(\..*)?")
    assert "acq_rel" not in code.asm["ptx"]  # a fence at every addition
    if name.startswith("add_pairs"):
        assert code.counted(r"RED\w*\.E\.ADD\.F64.*")
        # One lane a word: eight neighbouring lanes to a pair, of which two are masked.
        assert "threadsPerWarp = [4, 8]" in code.asm["ttgir"]


if __name__ == "__main__":
    made = {}
    for case in cases():
        with mock.patch.dict(vars(cuda), {} if case in AS_IT_COMES else TINY):
            made[case] = filled(cuda.add, case)
    torch.save(made, sys.argv[1])
