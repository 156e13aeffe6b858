"""Launches of the kernels: four per call, for none of which the host waits; and their compilation for a GPU."""

import contextlib
import importlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.inputs.batch import Batch, Sample  # noqa: E402
from normscope.pairs.norms.formulas import FORMS, Lines, layer_norm  # noqa: E402
from normscope.pairs.norms.trace import find_norms  # noqa: E402
from normscope.pairs.recorder import Recorder, Summing  # noqa: E402
from normscope.pairs.sums import stats as loops  # noqa: E402
from normscope.pairs.sums.binning import cuda, cuda_pairs  # noqa: E402
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


COMPILED = {
    "a Transformer's": ((4096, 768), 768, None, LAYER_NORM),
    "a few tokens": ((20, 1000), 1000, None, LAYER_NORM),
    "groups": ((64, 4096), 64, 2, LAYER_NORM),
    "given lines": ((4096, 768), 768, None, Lines(shift=torch.ones(4096).double(), rstd=torch.ones(4096).double())),
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", COMPILED)
def test_the_kernels_compile_without_spilled_registers(tmp_path, monkeypatch, case, capability):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "benchmarks")
    monkeypatch.setattr(cuda, "_major", lambda device: capability // 10)
    shape, channels, groups, lines = COMPILED[case]
    rows, scratch = torch.empty(shape, dtype=torch.bfloat16), launches_module.Scratch(torch.device("cpu"))
    tokens = Tokens(rows, lines, [Run(0, len(rows), 0, 1, 0, 0)], channels, groups, torch.ones(len(rows)).bool())
    stats = PairStats.empty(channels, grouped=groups is not None)
    memory = {"rows": rows, "valid": tokens.valid, "scratch": torch.empty(8), "runs": torch.empty(5, 1).long()}
    memory |= cuda._kept(stats)
    if lines.form is None:
        memory |= {"shift": lines.shift, "rstd": lines.rstd}
    for call in cuda._launches(stats, tokens, scratch):
        call = launches_module.complete(call, memory, scratch)
        code = importlib.import_module("disassembly").code_of_launch(call, capability)
        assert code.local == 0
        assert not code.counted(r"(LDL|STL)(\..*)?")
        assert "acq_rel" not in code.asm["ptx"]  # a fence at every addition
        if call.kernel is cuda_pairs.add_pairs and capability >= 90:  # below, no addition takes four words
            # Two neighbouring lanes a pair, of four words each.
            assert "sizePerThread = [1, 4], threadsPerWarp = [16, 2]" in code.asm["ttgir"]
            assert code.counted(r"REDG\.E\.ADD\.F32x4.*")


CASES = {
    "a Transformer's": ((40, 768), torch.bfloat16, "layer_norm", None, False),
    "as wide as wastes": ((40, 1152), torch.float16, "rms_norm", None, False),
    "padded": ((33, 65), torch.float32, "layer_norm", None, True),
    "one element": ((1, 1), torch.float32, "layer_norm", None, False),
    "groups": ((6, 300), torch.float32, "layer_norm", 2, False),
    "groups of a batch": ((16, 4096), torch.bfloat16, None, 4, False),
    "more pairs than float32 counts": ((2**16 + 1, 2**8), torch.bfloat16, "rms_norm", None, False),
}


@pytest.fixture
def driver(monkeypatch):
    """Record launches, and keep all memory, so that addresses are not used twice."""
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "benchmarks")
    for name in ("empty", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *given, make=make, **more: kept.append(make(*given, **more)) or kept[-1]
        )
    make = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *given, **more: kept.append(make(*given, **more)) or kept[-1])
    kept = []
    with importlib.import_module("recorded_launches").recorded(
        kernels=[getattr(cuda, name) for name in KERNELS_OF_A_CALL]
    ) as own:
        yield own
    kept.clear()


def launched(driver, stats, tokens):
    """Return what a call launches, with an address replaced by its rank among those of the call's own kind."""
    begin = len(driver.launches)
    cuda.add(stats, tokens)
    made = driver.launches[begin:]
    named = {}
    for one in made:
        for place in one.arguments:
            if isinstance(place, int) and place > 2**40:
                named.setdefault(place, f"address {len(named)}")
    return [(one.kernel, one.grid, one.function, [named.get(a, a) for a in one.arguments]) for one in made]


@pytest.mark.skipif(not isinstance(cuda.draw, triton.JITFunction), reason="Triton interprets kernels here")
@pytest.mark.parametrize("case", CASES)
def test_a_cached_launch_passes_to_the_driver_what_triton_does(driver, monkeypatch, case):
    (n, d), dtype, form, groups, padded = CASES[case]
    stats = PairStats.empty(d if groups is None else 4 * groups, grouped=groups is not None)
    given = torch.ones(n, dtype=torch.float64)
    lines = Lines(FORMS[form], 1e-6) if form else Lines(shift=given, rstd=given.clone())
    valid = torch.ones(n, dtype=torch.bool) if padded else None
    runs = [Run(0, n // 2, 0, 5, 0, 0), Run(n // 2, n, 1, 6, 0, 1)]
    tokens = Tokens(torch.ones(n, d, dtype=dtype), lines, runs, stats.channels, groups, valid)
    with monkeypatch.context() as patch:
        patch.setattr(launches_module, "_watched", lambda: True)
        by_triton = launched(driver, stats, tokens)
    assert [by_triton[0][0], by_triton[-1][0]] == ["describe", "draw"]
    assert launched(driver, stats, tokens) == by_triton
    driver.stream += 64
    monkeypatch.setattr(cuda, "_launches", None)  # nothing is computed again
    assert launched(driver, stats, tokens) == by_triton
    assert driver.launches[-1].stream == driver.stream


@pytest.mark.skipif(not isinstance(cuda.draw, triton.JITFunction), reason="Triton interprets kernels here")
def test_unaligned_tokens_are_launched_with_a_kernel_of_their_own(driver):
    stats, memory = PairStats.empty(16), torch.ones(4 * 16 + 1)
    for rows in (memory[:-1].view(4, 16), memory[1:].view(4, 16)) * 2:
        launched(driver, stats, Tokens(rows, LAYER_NORM, [Run(0, 4, 0, 5, 0, 0)], 16))
    functions = [[one.function for one in driver.launches[start : start + 4]] for start in (0, 4, 8, 12)]
    assert functions[0] == functions[2] != functions[1] == functions[3]
