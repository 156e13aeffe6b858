"""Launches of the kernels: four per call, for none of which the host waits; and their compilation for a GPU."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.inputs.batch import Batch, Sample  # noqa: E402
from normscope.pairs.norms.formulas import Lines, layer_norm  # noqa: E402
from normscope.pairs.norms.trace import find_norms  # noqa: E402
from normscope.pairs.recorder import Recorder, Summing  # noqa: E402
from normscope.pairs.sums import stats as loops  # noqa: E402
from normscope.pairs.sums.binning import cuda  # noqa: E402
from normscope.pairs.sums.stats import PairStats  # noqa: E402
from normscope.pairs.sums.tokens import Run, Tokens  # noqa: E402
from normscope.runtime import launches as launches_module  # noqa: E402

LAYER_NORM = Lines(layer_norm, 1e-6)


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


AT_MOST = (2**31 - 1, 65_535)  # programs along each axis
KERNELS_OF_A_CALL = ["describe", "add_pairs", "flush", "draw"]


class Launched:
    """In place of a kernel: says that it was launched, and on what."""

    def __init__(self, kernel, launches: list[str]) -> None:
        self.name, self.arg_names, self.launches = kernel.__name__, kernel.arg_names, launches

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and 0 < size <= most for size, most in zip(grid, AT_MOST, strict=False))
        return self

    def __call__(self, **given):
        assert set(self.arg_names) <= set(given)
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        assert all(tensor.device.type == "cuda" for tensor in tensors)
        assert all(tensor.is_contiguous() or tensor.mT.is_contiguous() for tensor in tensors)
        self.launches.append(self.name)


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """Put nothing but a note in the place of each kernel."""
    noted: list[str] = []
    for name in KERNELS_OF_A_CALL:
        monkeypatch.setattr(cuda, name, Launched(getattr(cuda, name), noted))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "_stream", lambda device: 0)
    monkeypatch.setattr(launches_module, "_watched", lambda: True)
    monkeypatch.setattr(loops, "why_no_launcher", lambda: "")
    return noted


@pytest.fixture
def waits(monkeypatch):
    refuses = NothingWaits()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: refuses.pin(tensor))
    cuda._runs.cache_clear()
    yield refuses
    cuda._runs.cache_clear()


@pytest.mark.parametrize(("shape", "parts"), [((3, 2**24 + 300), 6), ((2**30, 2), 128)])
@pytest.mark.parametrize("groups", [None, 1])
def test_however_large_a_call_is_its_programs_can_be_numbered(fake_cuda, monkeypatch, launches, shape, parts, groups):
    monkeypatch.setattr(cuda, "_runs", lambda runs, device, stream: torch.zeros(5, 1, device=device))
    with FakeTensorMode():
        rows, channels = torch.empty(shape, dtype=torch.bfloat16, device="cuda"), shape[1] if groups is None else 1
        stats = PairStats.empty(channels, device=rows.device, grouped=groups is not None)
        cuda.add(stats, Tokens(rows, LAYER_NORM, [Run(0, len(rows), 0, 1, 0, 0)], channels, groups))
    assert launches == ["describe", *["add_pairs", "flush"] * parts, "draw"]


@given(n_rows=st.integers(1, 10**9), width=st.integers(1, 2**26))
def test_no_part_has_more_pairs_than_float32_counts(n_rows, width):
    n_rows = min(n_rows, 2**30 // width + 1)
    parts = list(cuda._parts(n_rows, width))
    sizes = [(stop - start) * (last - first) for start, stop, first, last in parts]
    assert max(sizes) <= 2**24 and sum(sizes) == n_rows * width
    assert all(first % cuda._ADDED == 0 for *_, first, _ in parts)  # so that programs of two parts do not overlap
    edges = {(start, first) for start, _, first, _ in parts}
    assert len(edges) == len(parts)
    assert all(stop == n_rows or (stop, first) in edges for _, stop, first, _ in parts)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_call_is_four_kernels_and_nothing_waits_for_them(fake_cuda, waits, launches, groups):
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
    assert launches == KERNELS_OF_A_CALL * 2
    assert first.count("_to_copy") == 1  # the runs, which the next norm finds there
    of_no_work = {"empty", "detach", "mT", "transpose", "slice", "view"}  # nothing of it runs on the GPU
    assert set(waits.names) <= of_no_work | {"zeros"}


def of_tokens() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6)).eval()


def of_groups() -> nn.Module:
    return nn.Sequential(nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.InstanceNorm1d(8, affine=True)).eval()


@pytest.mark.parametrize(("network", "padded"), [(of_tokens, False), (of_tokens, True), (of_groups, False)])
def test_no_hook_of_a_capture_waits(fake_cuda, monkeypatch, waits, launches, network, padded):
    monkeypatch.setattr(Batch, "padded", padded)  # which is waited for before a batch begins, and never in a hook
    one, several = ([Sample(source, "ab".index(source), i) for i, source in enumerate(own)] for own in ("aaa", "aab"))
    report = find_norms(network(), Batch((torch.randn(1, 8, 6),), samples=tuple(one[:1])))
    with FakeTensorMode(), torch.no_grad():
        on = torch.device("cuda")
        with on:
            recorder = Recorder(network(), Summing(), report, report.sites)
        x, valid = torch.randn(3, 8, 6, device=on), torch.ones(3, 8, device=on).bool() if padded else None
        with waits, recorder.hooked():
            for samples in (one, several, one):  # the folds of one source become those of several
                recorder.run(Batch((x,), samples=tuple(samples), valid=valid))
    assert launches == KERNELS_OF_A_CALL * 3 * len(network())
    assert "_to_copy" in waits.names  # it has seen what is sent to the GPU
