"""Plans held to what Triton itself tells a driver, by one that notes launches and runs none."""

import contextlib
import itertools
from collections import defaultdict

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is made for Linux alone")

from triton.backends.compiler import GPUTarget  # noqa: E402

from normscope.pairs.norms.formulas import (  # noqa: E402
    FORMS,
    Lines,
    layer_norm,
    rms_norm,
)
from normscope.pairs.sums.binning import cuda, cuda_launches  # noqa: E402
from normscope.pairs.sums.stats import PairStats  # noqa: E402
from normscope.pairs.sums.tokens import Run, Tokens  # noqa: E402

KERNELS = (cuda.describe, cuda.add_pairs, cuda.flush, cuda.draw)
if not all(isinstance(kernel, triton.JITFunction) for kernel in KERNELS):
    pytest.skip("Triton interprets kernels here.", allow_module_level=True)


class Driver:
    """Notes launches: of which function, how many programs, on which stream, with which arguments."""

    def __init__(self):
        self.stream, self.launches = 2**40, []
        self.launcher_cls, self.utils = self.launcher, self

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return int(str(self.stream))  # a new number each time, as from C

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher(self, source, metadata):
        def launch(*given):
            *before, enter, leave = given[:9]
            assert not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave)
            arguments = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given[9:]]
            self.launches.append((source.fn.__name__, tuple(before[:6]), arguments))

        return launch


class Compiled:
    """What Triton's record of a compiled kernel is to those who launch it, without any machine code."""

    numbers = itertools.count(2**41)

    def __init__(self, source, target, options, **_):
        self.source, self.function = source, next(self.numbers)
        self.packed_metadata = (options["num_warps"], 1, 0)
        self._run = None

    @property
    def run(self):
        if self._run is None:
            self._run = triton.runtime.driver.active.launcher_cls(self.source, None)
        return self._run

    def launch_metadata(self, grid, stream, *arguments):
        return None


@pytest.fixture
def driver(monkeypatch):
    own = Driver()
    monkeypatch.setattr("triton.compiler.compile", Compiled)
    config = triton.runtime.driver
    monkeypatch.setattr(config, "_active" if hasattr(config, "_active") else "active", own)  # Triton 3.4 has no _active
    monkeypatch.setattr(cuda_launches, "_plans", {})
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    return own


@pytest.fixture
def slabs(monkeypatch):
    """What kernels fill for one another, as it is made: tensors that nothing else holds."""
    made, empty = [], torch.empty

    def noted(*given, **more):
        made.append(empty(*given, **more))
        return made[-1]

    monkeypatch.setattr(cuda_launches.torch, "empty", noted)
    return made


def told(driver, slabs, stats, tokens, valid):
    """Return what a call tells the driver, with names in place of addresses."""
    begin, zeros, kept, keep = len(driver.launches), [], [], cuda._kept
    with pytest.MonkeyPatch.context() as patch:
        made = torch.zeros
        patch.setattr(torch, "zeros", lambda *given, **more: zeros.append(made(*given, **more)) or zeros[-1])
        patch.setattr(cuda, "_kept", lambda stats: kept.append(keep(stats)) or kept[-1])
        cuda.add(stats, tokens)
    named = {tensor.data_ptr(): name for name, tensor in kept[-1].items()}
    runs = cuda._runs(tuple(tokens.runs), tokens.rows.device, 0)
    named |= {zeros[0].data_ptr(): "scratch", runs.data_ptr(): "runs", tokens.rows.data_ptr(): "rows"}
    given = {"shift": tokens.lines.shift, "rstd": tokens.lines.rstd, "valid": valid}
    named |= {tensor.data_ptr(): name for name, tensor in given.items() if tensor is not None}
    base, nbytes = slabs[-1].data_ptr(), slabs[-1].numel()

    def said(one):
        inside = isinstance(one, int) and base <= one < base + nbytes
        return f"byte {one - base}" if inside else named.get(one, one) if isinstance(one, int) else one

    return [(name, before, [said(one) for one in arguments]) for name, before, arguments in driver.launches[begin:]]


LAYER_NORM, RMS_NORM = Lines(FORMS[layer_norm], 1e-6), Lines(FORMS[rms_norm], 1e-5)


def of_given(n):
    return Lines(shift=torch.ones(n, dtype=torch.float64), rstd=torch.ones(n, dtype=torch.float64))


CASES = {
    "a Transformer's": ((40, 768), torch.bfloat16, LAYER_NORM, None, False),
    "as wide as wastes": ((40, 1152), torch.float16, RMS_NORM, None, False),
    "padded": ((33, 65), torch.float32, LAYER_NORM, None, True),
    "narrow": ((1000, 8), torch.bfloat16, LAYER_NORM, None, False),
    "one element": ((1, 1), torch.float32, LAYER_NORM, None, False),
    "groups": ((6, 300), torch.float32, LAYER_NORM, 2, False),
    "groups of a batch": ((16, 4096), torch.bfloat16, None, 4, False),
    "more pairs than float32 counts": ((2**16 + 1, 2**8), torch.bfloat16, RMS_NORM, None, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_tells_the_driver_what_triton_does(driver, slabs, monkeypatch, case):
    (n, d), dtype, lines, groups, padded = CASES[case]
    stats = PairStats.empty(d if groups is None else 4 * groups, grouped=groups is not None)
    rows, valid = torch.ones(n, d, dtype=dtype), torch.ones(n, dtype=torch.bool) if padded else None
    runs = [Run(0, n // 2, 0, 5, 0, 0), Run(n // 2, n, 1, 6, 0, 1)]
    tokens = Tokens(rows, lines or of_given(n), runs, stats.channels, groups, valid)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_launches, "_watched", lambda: True)
        by_triton = told(driver, slabs, stats, tokens, valid)
    assert by_triton[0][0] == "describe" and by_triton[-1][0] == "draw"
    assert not cuda_launches._plans
    first = told(driver, slabs, stats, tokens, valid)
    assert len(cuda_launches._plans) == 1 and None not in cuda_launches._plans.values()
    driver.stream += 64
    with monkeypatch.context() as patch:
        patch.setattr(cuda_launches, "_by_triton", None)
        patch.setattr(cuda, "_launches", None)
        planned = told(driver, slabs, stats, tokens, valid)
    assert first == by_triton
    on = driver.stream
    assert planned == [(name, (*before[:3], on, *before[4:]), given) for name, before, given in by_triton]
    names = [one for _, _, given in planned for one in given if isinstance(one, str)]
    assert "rows" in names and "moments" in names and "scratch" in names
    assert not [one for _, _, given in planned for one in given if isinstance(one, int) and 2**42 < one < 2**50]


def test_what_begins_elsewhere_has_a_plan_of_its_own(driver, slabs):
    lines, runs = LAYER_NORM, [Run(0, 4, 0, 5, 0, 0)]
    stats, memory = PairStats.empty(16), torch.ones(4 * 16 + 1)
    for rows in (memory[:-1].view(4, 16), memory[1:].view(4, 16)) * 2:
        told(driver, slabs, stats, Tokens(rows, lines, runs, 16), None)
    assert len(cuda_launches._plans) == 2
    functions = [[before[4] for _, before, _ in driver.launches[start : start + 4]] for start in (0, 4, 8, 12)]
    assert functions[0] == functions[2] != functions[1] == functions[3]


def test_a_hook_of_triton_is_called_and_nothing_is_planned(driver, slabs, monkeypatch):
    monkeypatch.setattr(cuda_launches._RUNTIME, "debug", True)
    stats = PairStats.empty(16)
    told(driver, slabs, stats, Tokens(torch.ones(4, 16), LAYER_NORM, [Run(0, 4, 0, 5, 0, 0)], 16), None)
    assert not cuda_launches._plans and len(driver.launches) == 4


def test_a_launch_in_another_way_is_never_planned(driver, slabs, monkeypatch):
    """As a Triton might launch that passes something else to the driver."""
    tokens = Tokens(torch.ones(4, 16), LAYER_NORM, [Run(0, 4, 0, 5, 0, 0)], 16)
    another = property(lambda self: object(), lambda self, value: None)
    monkeypatch.setattr(Compiled, "packed_metadata", another, raising=False)
    for _ in range(2):
        cuda.add(PairStats.empty(16), tokens)
    assert list(cuda_launches._plans.values()) == [None] and len(driver.launches) == 8


def test_plans_are_limited(driver, monkeypatch):
    monkeypatch.setattr(cuda_launches, "LIMIT", 2)
    for n in (3, 4, 5):
        cuda.add(PairStats.empty(16), Tokens(torch.ones(n, 16), LAYER_NORM, [Run(0, n, 0, 5, 0, 0)], 16))
    assert [kind[0] for kind in cuda_launches._plans] == [4, 5]
