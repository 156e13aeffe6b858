"""Benchmarks time the cases that they name, leave the network untouched, and claim only what the samples show."""

import os
import subprocess
import sys

import pytest
import torch
from networks import State, network_of
from torch import nn

import normscope.tools.bench.bench as module
from normscope.errors import ModelError, UsageError
from normscope.inputs.batch import Batch
from normscope.norms.trace import find_norms
from normscope.swaps.kernels import choice
from normscope.tools.bench.bench import bench, commonest, distinct, norm_cases, times_of, variants, with_verdicts
from normscope.tools.bench.reports import FASTER, INCONCLUSIVE, NATIVE, NOT_RUN, SLOWER, Timing

FORWARD, BOTH = "forward", "forward + backward"


@pytest.fixture
def net():
    """Three norms of one shape, one of another, and a GroupNorm, in whose place no RMSNorm can be."""

    def forward(self, x):
        x = self.grow(self.group(x.mT).mT)
        return self.last(self.shrink(self.third(self.second(self.first(x)))))

    torch.manual_seed(0)
    parts = {"group": nn.GroupNorm(2, 6), "grow": nn.Linear(6, 16), "shrink": nn.Linear(16, 5), "last": nn.LayerNorm(5)}
    return network_of(forward, **parts, **{name: nn.LayerNorm(16) for name in ("first", "second", "third")})


@pytest.fixture
def batch():
    return Batch((torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1)),))


@pytest.fixture
def uncompiled(monkeypatch):
    """Leave out the compiler, which takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)


@pytest.fixture
def one_call(monkeypatch):
    """Let each sample be one call of a second, and return the results of all calls."""
    results = []
    monkeypatch.setattr(module, "times_of", lambda run, device: [results.append(run()) or 1.0])
    return results


def row(samples, variant=NATIVE, way="eager", passes=FORWARD, scope="norm"):
    return Timing(variant, way, scope, passes, "float32", (10, 100), 3, tuple(samples))


@pytest.mark.parametrize(
    ("samples", "native", "verdict"),
    [
        ([1.0, 2.0, 3.0], [10.0, 11.0, 12.0], FASTER),
        ([20.0, 21.0, 22.0], [10.0, 11.0, 12.0], SLOWER),
        ([10.0, 11.0, 12.5], [10.0, 11.0, 12.0], INCONCLUSIVE),
        ([1.0, 2.0, 3.0, 4.0, 90.0], [10.0, 11.0, 12.0], FASTER),  # quartiles 2 and 4
        ([1.0, 1.0], [10.0, 11.0, 12.0], INCONCLUSIVE),
        ([1.0, 1.0, 1.0], [10.0], INCONCLUSIVE),
        ([], [10.0, 11.0, 12.0], NOT_RUN),
    ],
)
def test_a_verdict_needs_quartiles_that_do_not_overlap(samples, native, verdict):
    first, second = with_verdicts([row(native), row(samples, "dyt")])
    assert (first.verdict, second.verdict) == ("", verdict)


def test_a_row_is_compared_with_the_native_one_of_its_setting():
    rows = [row([2.0] * 3), row([4.0] * 3, way="compile"), row([8.0] * 3, scope="model"), row([16.0] * 3, passes=BOTH)]
    others = [row([1.0, 2.0, 4.0], "dyt", *setting) for setting in (("eager",), ("compile",), ("fused",))]
    others += [row([2.0] * 3, "dyt", scope="model"), row([2.0] * 3, "dyt", passes=BOTH)]
    others.append(row([2.0] * 3, "dyt", "compile", BOTH))  # without a native norm
    measured = with_verdicts(rows + others)[len(rows) :]
    assert [timing.ratio for timing in measured] == [1.0, 0.5, 1.0, 0.25, 0.125, None]
    assert (measured[0].p25, measured[0].median, measured[0].p75) == (1.5, 2.0, 3.0)


def test_times_are_of_one_call():
    calls = []
    samples = times_of(lambda: calls.append(torch.ones(1)), torch.device("cpu"))
    assert samples and len(calls) > len(samples) and max(samples) < 0.01


def test_the_commonest_norm_at_its_real_shape(net, batch):
    report = find_norms(net, batch)
    norm = commonest(report)
    assert (norm.name, norm.shape, norm.sites) == ("first", (2, 7, 16), 3)
    assert [norm.name for norm in distinct(report)] == ["group", "first", "last"]


def test_quick_is_one_round_without_a_compiler(net, batch, one_call):
    report = bench(net, batch, quick=True)
    names = ["native", "rmsnorm", "identity", "dyt", "dyisru", "derf"]
    parts = {}
    for timing in report.rows:
        parts.setdefault((timing.scope, timing.way, timing.passes), []).append(timing.variant)
    assert parts == {
        ("norm", "eager", FORWARD): names, ("norm", "eager", BOTH): names, ("model", "eager", FORWARD): names,
    }  # fmt: skip
    assert {len(timing.samples) for timing in report.rows} == {1}
    assert {(timing.shape, timing.sites) for timing in report.rows if timing.scope == "norm"} == {((2, 7, 16), 3)}
    assert report.left_out == ("Left to --full: the whole network compiled, and forward + backward.",)
    of_model = {timing.variant: timing for timing in report.rows if timing.scope == "model"}
    assert of_model["native"].sites == of_model["dyt"].sites == 5
    assert of_model["rmsnorm"].sites == 4
    assert of_model["rmsnorm"].note.startswith("1 of 5 norms left as they are: rmsnorm cannot take the place")


def test_full_times_every_scope_pass_and_way(net, batch, uncompiled, one_call):
    report = bench(net, batch, "dyt", full=True)
    settings = {(timing.scope, timing.way, timing.passes) for timing in report.rows if timing.variant == "dyt"}
    ways, passes = ("eager", "compile"), (FORWARD, BOTH)
    assert settings == {(scope, way, p) for scope in ("norm", "model") for way in ways for p in passes}
    assert {len(timing.samples) for timing in report.rows} == {5} and report.left_out == ()


def test_the_network_stays_as_it_was(net, batch, uncompiled, one_call):
    net.train()
    net.first.eval()
    net.grow.weight.requires_grad_(False)
    net.shrink.weight.grad = torch.ones_like(net.shrink.weight)
    before, output, state = State(net), net(*batch.args), torch.get_rng_state()
    bench(net, batch, ["dyt"], full=True)
    before.assert_same(net)
    assert torch.equal(net.shrink.weight.grad, torch.ones(5, 16))
    assert torch.equal(net(*batch.args), output) and torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_the_norm_and_its_gradients_are_timed(net, batch):
    norms = find_norms(net, batch)
    native, *_ = norm_cases(net, variants(net, norms.sites, ["dyt"]), commonest(norms), ["eager"], BOTH)
    x, dy = (torch.randn(2, 7, 16, generator=generator) for generator in [torch.Generator().manual_seed(0)] * 2)
    with native.prepared() as run:
        gradients = run()
    (net.first(x.requires_grad_()) * dy).sum().backward()
    for ours, true in zip(gradients, (x.grad, net.first.weight.grad, net.first.bias.grad), strict=True):
        torch.testing.assert_close(ours, true)


def test_candidates_take_turns_in_the_network(net, batch, uncompiled, one_call):
    seen = []
    net.register_forward_pre_hook(lambda *_: seen.append(str(net.first)))
    bench(net, batch, ["dyisru"])
    kinds = [next(k for k in ("LayerNorm", "RMSNorm", "linear", "isru") if k in text) for text in seen[1:]]
    assert kinds == ["LayerNorm", "RMSNorm", "linear", "isru"] * 5


def test_a_network_that_does_not_compile_is_a_row_with_the_reason(net, batch, monkeypatch, one_call):
    def broken(self, *args):
        raise RuntimeError("the back end is missing\nand more")

    monkeypatch.setattr(torch, "compile", lambda module, **options: network_of(broken))
    rows = [timing for timing in bench(net, batch, ["dyt"], full=True).rows if timing.way == "compile"]
    assert {timing.scope for timing in rows} == {"norm", "model"}
    assert all((timing.verdict, timing.median) == (NOT_RUN, None) for timing in rows)
    assert {timing.note for timing in rows} == {"RuntimeError: the back end is missing"}


def test_the_loop_of_the_cpu_is_timed_as_fused_and_plain_torch_as_eager(batch, one_call, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    by_loop = []
    find = choice.loop_for
    monkeypatch.setattr(
        "normscope.swaps.pointwise.loop_for", lambda *what: by_loop.append(find(*what) is not None) or find(*what)
    )
    model = nn.Sequential(nn.LayerNorm(64))
    rows = bench(model, Batch((torch.randn(256, 64),)), ["dyt"], quick=True).rows
    fused = [(timing.scope, timing.passes, timing.variant) for timing in rows if timing.way == "fused"]
    assert fused == [("norm", FORWARD, "dyt"), ("model", FORWARD, "dyt")]
    of_dyt = [way for way in by_loop if way]
    assert len(of_dyt) == 2  # one call each


@pytest.mark.slow
def test_kernels_in_the_interpreter_are_timed_as_fused():
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    code = (
        "import torch\n"
        "from torch import nn\n"
        "from normscope.inputs.batch import Batch\n"
        "from normscope.tools.bench.bench import bench\n"
        "report = bench(nn.Sequential(nn.LayerNorm(4)), Batch((torch.randn(2, 4),)), ['dyt'], quick=True)\n"
        "print([(row.scope, row.passes) for row in report.rows if row.way == 'fused' and row.samples])\n"
        "print(report.left_out[-1])"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", choice.VARIABLE: "triton"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    rows, remark = done.stdout.splitlines()
    assert rows == str([("norm", FORWARD), ("norm", BOTH), ("model", FORWARD)])
    assert "interpreter on the CPU, not on a GPU" in remark


@pytest.mark.slow
def test_compiled_for_real(net, batch):
    norms = find_norms(net, batch)
    cases = norm_cases(net, variants(net, norms.sites, "dyt")[::3], commonest(norms), ["compile"], FORWARD)
    with torch.no_grad(), module.compilations():
        rows = module.sampled(cases, torch.device("cpu"), 1)
    assert [timing.variant for timing in rows] == ["native", "dyt"]
    assert all(timing.samples and max(timing.samples) < 0.1 for timing in rows)  # compiling takes a second


@pytest.mark.parametrize(
    ("kernels", "changes", "words"),
    [
        ("", {"curves": "thanh"}, "There is no replacement 'thanh'"),
        ("", {"curves": "free"}, "free is what was fitted"),
        ("", {"full": True, "quick": True}, "leave full out"),
        ("", {"model": nn.Linear(6, 6)}, "no normalization of activations"),
        ("triton", {}, "cannot be met"),
        ("fast", {}, "There is no NORMSCOPE_KERNELS"),
    ],
)
def test_refusals(net, batch, monkeypatch, kernels, changes, words):
    monkeypatch.setenv(choice.VARIABLE, kernels)
    with pytest.raises((UsageError, ModelError), match=words):
        bench(**{"model": net, "batch": batch, "curves": "dyt", **changes})


def test_failing_cases_do_not_stop_the_others(net, batch, monkeypatch, one_call):
    forward = nn.LayerNorm.forward

    def failing(self, x):
        if x.requires_grad and not x.grad_fn:
            raise RuntimeError("no gradients here")
        return forward(self, x)

    monkeypatch.setattr(nn.LayerNorm, "forward", failing)
    rows = bench(net, batch, ["dyt"], quick=True).rows
    failed = [timing for timing in rows if timing.verdict == NOT_RUN]
    assert [(timing.variant, timing.scope, timing.passes) for timing in failed] == [(NATIVE, "norm", BOTH)]
    assert failed[0].note == "RuntimeError: no gradients here"
