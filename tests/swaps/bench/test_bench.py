"""Benchmarks time the cases that they name, leave the network untouched, and claim only what the samples show."""

import importlib.machinery
import sys
import time
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import State
from torch import nn
from torch._subclasses import FakeTensorMode

import normscope
import normscope.swaps.bench.bench as bench_module
from normscope.errors import DeviceError, ModelError, UsageError
from normscope.inputs.batch import Batch
from normscope.pairs.norms.trace import find_norms
from normscope.swaps.bench import timing
from normscope.swaps.bench.bench import bench, compilations, published, why_not
from normscope.swaps.bench.timing import NormBench, commonest, in_turns, judged, repeated, settled, variants
from normscope.swaps.pointwise import DyT
from normscope.swaps.reports import COPY, FASTER, INCONCLUSIVE, NATIVE, NOT_RUN, PUBLISHED, SLOWER, TOO_FEW, Timing

FORWARD, BOTH = "forward", "forward + backward"


class Net(nn.Module):
    """Three norms of one shape, one of another, and a GroupNorm, in whose place no RMSNorm can be."""

    def __init__(self):
        super().__init__()
        self.group = nn.GroupNorm(2, 6)
        self.grow = nn.Linear(6, 16)
        self.first, self.second, self.third = (nn.LayerNorm(16) for _ in range(3))
        self.shrink = nn.Linear(16, 5)
        self.last = nn.LayerNorm(5)

    def forward(self, x):
        x = self.grow(self.group(x.mT).mT)
        return self.last(self.shrink(self.third(self.second(self.first(x)))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def batch():
    return Batch((torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1)),))


@pytest.fixture
def compiled(monkeypatch):
    """Stand in for the compiler, which takes seconds: modules that it is given, wrapped as it wraps them."""
    given = []

    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module

        def forward(self, *args, **kwargs):
            return self._orig_mod(*args, **kwargs)

    def stand_in(module, **kwargs):
        given.append((module, kwargs))
        return Wrapped(module)

    monkeypatch.setattr(torch, "compile", stand_in)
    return given


@pytest.fixture
def quick(monkeypatch):
    """A sample of a norm is one call: what is timed does not depend on how fast the machine is."""
    monkeypatch.setattr(timing, "blocks", lambda run: [repeated(run)])


def row(samples, variant=NATIVE, way="eager", passes=FORWARD, timer="blocks", nbytes=8000, scope="norm"):
    return Timing(variant, way, scope, passes, "float32", timer, (10, 100), 3, nbytes, tuple(samples))


def verdict(samples, native):
    rows = [row(native), row(samples, "dyt")]
    result = judged(rows)[1].verdict
    assert settled(rows) == (result in (FASTER, SLOWER, NOT_RUN))
    return result


NATIVES = [10.0, 11.0, 12.0]


@pytest.mark.parametrize(
    ("own", "native", "said"),
    [
        ([7.0, 8.0, 9.0], NATIVES, FASTER),
        ([13.0, 14.0, 15.0], NATIVES, SLOWER),
        (NATIVES, NATIVES, INCONCLUSIVE),
        # The intervals touch, or overlap.
        ([7.0, 8.0, 10.0], NATIVES, INCONCLUSIVE),
        ([7.0, 8.0, 11.0], NATIVES, INCONCLUSIVE),
        ([12.0, 13.0, 14.0], NATIVES, INCONCLUSIVE),
        ([11.0, 13.0, 14.0], NATIVES, INCONCLUSIVE),
        # Faster at its best, slower by median and interval; and the other way round. 9 and 5 are below their p20.
        ([9.0, 13.0, 13.0, 14.0, 15.0, 16.0], [10.0, 10.0, 11.0, 11.0, 12.0, 12.0], INCONCLUSIVE),
        ([7.0, 8.0, 8.0, 9.0, 9.0, 9.0], [5.0, 10.0, 10.0, 11.0, 12.0, 12.0], INCONCLUSIVE),
        # As fast at its best.
        ([5.0, 8.0, 8.0, 9.0, 9.0, 9.0], [5.0, 10.0, 10.0, 11.0, 12.0, 12.0], INCONCLUSIVE),
        # Faster at its best and by the median, but not always: p80 is native's median; and the other way round.
        ([7.0, 8.0, 8.0, 11.0, 11.0, 11.0], [10.0, 10.0, 11.0, 11.0, 12.0, 12.0], INCONCLUSIVE),
        ([11.0, 11.0, 13.0, 13.0, 13.0, 13.0], [10.0, 10.0, 11.0, 11.0, 12.0, 12.0], INCONCLUSIVE),
        # One straggler, beyond p80, changes nothing.
        ([7.0, 8.0, 8.0, 9.0, 9.0, 90.0], [10.0, 10.0, 11.0, 11.0, 12.0, 12.0], FASTER),
        ([13.0, 14.0, 14.0, 15.0, 15.0, 15.0], [10.0, 10.0, 11.0, 11.0, 12.0, 90.0], SLOWER),
        ([7.0, 8.0], NATIVES, TOO_FEW),
        ([7.0, 8.0, 9.0], [10.0, 11.0], TOO_FEW),
        ([13.0, 14.0], [10.0, 11.0], TOO_FEW),
        ([10.5], [10.0, 11.0], INCONCLUSIVE),
        ([], NATIVES, NOT_RUN),
    ],
)
def test_faster_and_slower_are_said_only_where_minimum_median_and_spread_agree(own, native, said):
    assert verdict(own, native) == said


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9), st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9))
def test_a_verdict_the_other_way_round_is_the_opposite(own, native):
    opposite = {FASTER: SLOWER, SLOWER: FASTER, INCONCLUSIVE: INCONCLUSIVE, TOO_FEW: TOO_FEW}
    assert verdict(native, own) == opposite[verdict(own, native)]
    if verdict(own, native) == FASTER:
        assert min(own) < min(native) and np.median(own) < np.median(native)


def test_a_row_is_compared_with_the_native_one_of_its_own_setting():
    rows = judged(
        [
            row([2.0] * 3),
            row([4.0] * 3, way="compile"),
            row([16.0] * 3, passes=BOTH),
            row([8.0] * 3, scope="model"),
            row([1.0] * 3, "dyt"),
            row([1.0] * 3, "dyt", way="compile"),
            row([1.0] * 3, "dyt", way="compile + fused"),
            row([1.0] * 3, "dyt", passes=BOTH),
            row([1.0] * 3, "dyt, Liger", way="fused"),
            row([1.0] * 3, "dyt", way="fused", scope="model"),
            row([1.0] * 3, "dyt", timer="graph"),
        ]
    )
    assert [each.ratio for each in rows] == [*[None] * 4, 1 / 2, 1 / 4, 1 / 4, 1 / 16, 1 / 2, 1 / 8, None]
    assert rows[0].verdict == rows[-1].verdict == ""


def test_bytes_and_the_share_of_a_copy():
    native, both, copied, whole, identity = judged(
        [
            row([1e-6, 2e-6, 9e-6]),
            row([8e-6], "dyt", passes=BOTH, nbytes=16000),
            row([1e-6] * 3, COPY),
            row([1.0], "dyt", scope="model", nbytes=None, timer="passes"),
            row([0.0] * 3, "identity"),
        ]
    )
    assert native.gb_per_s == pytest.approx(4.0) and native.share_of_copy == pytest.approx(0.5)
    assert both.gb_per_s == pytest.approx(2.0) and both.share_of_copy == pytest.approx(0.25)
    assert copied.gb_per_s == pytest.approx(8.0) and copied.ratio is None
    assert whole.gb_per_s is whole.share_of_copy is None
    assert (identity.gb_per_s, identity.ratio, identity.verdict) == (None, 0.0, FASTER)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=40))
def test_quantiles_are_numpys(samples):
    result = timing.quantiles(samples)
    # The same sums of two in float64: one unit in the last place between n/2 and a lerp.
    assert result["median"] == pytest.approx(np.quantile(samples, 0.5), rel=1e-15)
    assert result["p20"] == np.quantile(samples, 0.2, method="lower")
    assert result["p80"] == np.quantile(samples, 0.8, method="higher")
    assert result["minimum"] == min(samples)


def test_blocks_time_a_call_and_not_a_block():
    # A sleep never ends early, and a block of these lasts no thousand times as long, whatever else the machine does.
    samples = timing.blocks(lambda: time.sleep(0.004))
    assert samples and all(0.004 <= sample < 4 for sample in samples)


def test_turns_begin_with_another_each_round():
    order = []

    def sampler(name):
        return lambda: [float(len(order)) if order.append(name) is None else 0.0]

    samples = in_turns({name: sampler(name) for name in "abc"}, at_least=4, at_most=4)
    assert "".join(order) == "abcbcacababc"
    assert list(samples) == ["a", "b", "c"]
    assert samples["a"] == [1.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize(
    ("until", "enough", "rounds"),
    [(0.0, 9, 2), (25.0, 9, 2), (30.0, 9, 3), (39.0, 9, 3), (1000.0, 9, 6), (1000.0, 4, 4), (1000.0, 1, 2)],
)
def test_no_round_begins_that_would_end_too_late_or_change_nothing(until, enough, rounds):
    at = [0.0]

    def ten_seconds():
        at[0] += 10
        return [10.0]

    samples = in_turns(
        *({"a": ten_seconds},),
        **{"at_least": 2, "at_most": 6, "until": until, "now": lambda: at[0]},
        settled=lambda samples: len(samples["a"]) >= enough,
    )
    assert len(samples["a"]) == rounds


@given(st.integers(1, 10**10), st.integers(1, 10**8))
def test_buffers_are_beyond_four_caches_and_no_more_than_it_takes(nbytes, cache):
    number = timing.sets_beyond_cache(nbytes, cache)
    assert number >= 4 and number * nbytes > 4 * cache
    assert number == 4 or (number - 1) * nbytes <= 4 * cache


def test_timers_of_triton_are_asked_for_every_sample_in_milliseconds(monkeypatch):
    testing = pytest.importorskip("triton.testing", reason="Triton is made for Linux alone")
    options, used = [], []
    monkeypatch.setattr(testing, "do_bench", lambda run, **given: options.append(given) or [2.0, 1.0])
    assert timing.flushed(lambda: None) == timing.flushed(lambda: None, 20) == [2e-3, 1e-3]
    assert options == [{"warmup": warmup, "rep": rep, "return_mode": "all"} for warmup, rep in ((25, 100), (5, 20))]

    def graph(run, return_mode):
        assert return_mode == "all"
        for _ in range(5):
            run()
        return [2.0, 1.0]

    monkeypatch.setattr(testing, "do_bench_cudagraph", graph)
    assert timing.replayed(used.append, "abc") == [2e-3, 1e-3] and used == list("abcab")  # each call takes the next set


def test_the_commonest_norm_at_its_real_shape(net, batch):
    norm = commonest(find_norms(net, batch))
    assert (norm.name, norm.kind, norm.shape, norm.sites) == ("first", "LayerNorm", (2, 7, 16), 3)


@pytest.mark.slow
def test_the_default_part_of_the_matrix(net, batch):
    report = bench(net, batch, budget=0)
    names = ["native", "rmsnorm", "identity", "dyt", "dyisru", "derf"]
    parts = {}
    for row in report.rows:
        parts.setdefault((row.scope, row.way, row.passes, row.dtype), []).append(row.variant)
    assert parts == {
        ("norm", "eager", FORWARD, "float32"): [*names, COPY],
        ("norm", "eager", BOTH, "float32"): names,
        ("model", "eager", FORWARD, "float32"): names,
    }
    assert {row.shape for row in report.rows if row.scope == "norm"} == {(2, 7, 16)}
    assert {row.sites for row in report.rows if row.scope == "norm"} == {3}
    assert all(row.nbytes == 2 * 2 * 7 * 16 * 4 for row in report.rows if (row.scope, row.passes) == ("norm", FORWARD))
    assert all(len(row.samples) >= (1 if row.scope == "model" else 4) for row in report.rows)
    assert all(row.verdict in ("", INCONCLUSIVE, FASTER, SLOWER, TOO_FEW) for row in report.rows)
    assert "compiled, forward: there was no room" in report.left_out[0]
    assert report.left_out[-1] == (
        "Left to --full: the whole network forward + backward; the whole network compiled; bfloat16; float16."
    )
    model_rows = {row.variant: row for row in report.rows if row.scope == "model"}
    assert model_rows["native"].sites == model_rows["dyt"].sites == 5
    assert model_rows["rmsnorm"].sites == 4
    assert model_rows["rmsnorm"].note.startswith("1 of 5 norms left as they are: rmsnorm cannot take the place")


def test_the_whole_matrix(net, batch, compiled, quick):
    report = bench(net, batch, "dyt", full=True)
    rows = {(row.scope, row.way, row.passes, row.dtype) for row in report.rows if row.samples and row.variant == "dyt"}
    whole = {
        (scope, way, passes, dtype)
        for scope in ("norm", "model")
        for way in ("eager", "compile")
        for passes in (FORWARD, BOTH)
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert rows == whole
    assert all(row.compile_seconds is not None for row in report.rows if row.way == "compile" and row.samples)
    assert all(row.compile_seconds is None for row in report.rows if row.way != "compile")
    assert report.left_out == ()
    assert {len(row.samples) for row in report.rows} == {10}


def test_the_network_is_left_as_it_was_found(net, batch, compiled, quick):
    net.train()
    net.first.eval()
    net.grow.weight.requires_grad_(False)
    net.shrink.weight.grad = torch.ones_like(net.shrink.weight)
    before, output, state = State(net), net(*batch.args), torch.get_rng_state()
    bench(net, batch, ["dyt"], full=True, dtypes=["float32", "bfloat16"])
    before.assert_same(net)
    assert torch.equal(net.shrink.weight.grad, torch.ones(5, 16))
    assert torch.equal(net(*batch.args), output) and torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_what_is_timed_is_the_norm_and_its_gradients(net, batch, monkeypatch):
    """By autograd on the module itself: what the timed call returns."""
    found = find_norms(net, batch)
    bench_of_norm = NormBench(net, variants(net, found.sites, ["dyt"]), commonest(found), torch.zeros(0))
    returned = {}
    monkeypatch.setattr(timing, "blocks", lambda run: [returned.setdefault(len(returned), run()) is None])
    bench_of_norm.measured(bench_of_norm.cases(["eager"], BOTH), 0.0)
    [buffers] = bench_of_norm.buffers
    first = returned[0]  # the native norm
    x = buffers.x.detach().clone().requires_grad_()
    (net.first(x) * buffers.dy).sum().backward()
    # The same kernels on the same numbers, in another order of additions at most.
    for ours, true in zip(first, (x.grad, net.first.weight.grad, net.first.bias.grad), strict=True):
        torch.testing.assert_close(ours, true)


def test_each_variant_is_in_the_network_while_it_is_timed(net, batch, monkeypatch, compiled, quick):
    seen = []
    net.register_forward_pre_hook(lambda *_: seen.append(str(net.first)))
    bench(net, batch, ["dyisru"])
    passes = seen[1:]  # after the pass that finds the norms
    kinds = [next(k for k in ("LayerNorm", "RMSNorm", "linear", "isru") if k in text) for text in passes]
    assert kinds[:4] == ["LayerNorm", "RMSNorm", "linear", "isru"]
    assert kinds[4:8] == ["RMSNorm", "linear", "isru", "LayerNorm"]


def test_a_network_that_does_not_compile_is_a_row_that_says_why(net, batch, monkeypatch, quick):
    class Broken(nn.Module):
        def forward(self, *args):
            raise RuntimeError("the back end is missing\nand more")

    monkeypatch.setattr(torch, "compile", lambda module, **options: Broken())
    report = bench(net, batch, ["dyt"], full=True, dtypes=["float32"])
    rows = [row for row in report.rows if row.way == "compile"]
    assert rows and all((row.verdict, row.median) == (NOT_RUN, None) for row in rows)
    assert {row.note for row in rows} == {"RuntimeError: the back end is missing"}
    assert {row.scope for row in rows} == {"norm", "model"}


@pytest.mark.slow
def test_compiled_for_real(net, batch):
    found = find_norms(net, batch)
    timed = NormBench(net, variants(net, found.sites, "dyt")[::3], commonest(found), torch.zeros(0))
    with torch.no_grad(), compilations():
        rows = timed.measured(timed.cases(["compile"], FORWARD), 0.0)
    assert [row.variant for row in rows] == ["native", "dyt"]
    # Compiling takes a second, a call of it 10 µs: what is compiled is in no sample.
    assert all(row.samples and max(row.samples) < row.compile_seconds for row in rows)


def test_mistakes(net, batch):
    for call, error, fragment in (
        (lambda: bench(net, batch, dtypes=["float8"]), UsageError, "There is no dtype 'float8'"),
        (lambda: bench(net, batch, "thanh"), UsageError, "There is no curve 'thanh'"),
        (lambda: bench(net, batch, "free"), UsageError, "free is what was fitted"),
        (lambda: bench(nn.Linear(2, 2), Batch((torch.ones(1, 2),))), ModelError, "no normalization of activations"),
        (lambda: published(nn.Linear(2, 2)), DeviceError, r"LLaMA 7B takes 13\.5 GB"),
    ):
        with pytest.raises(error, match=fragment):
            call()


def test_ligers_dyt_beside_ours_where_it_is(monkeypatch):
    """Liger needs a GPU: its class stands in, and a weight that says it is on one."""

    class LigerDyT(nn.Module):
        def __init__(self, hidden_size, beta=True, init_alpha=0.5):
            super().__init__()
            self.made = hidden_size, beta, init_alpha

    ours = DyT(8, alpha=0.25)
    assert timing.fused("dyt", ours, (4, 8), "forward") == {}
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.dyt"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["liger_kernel.transformers.dyt"].LigerDyT = LigerDyT
    assert timing.fused("dyt", ours, (4, 8), "forward") == {}  # on the CPU
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    [(name, module)] = timing.fused("dyt", ours, (4, 8), "forward").items()
    assert name == "dyt, Liger" and module.made == (8, True, 0.25)
    assert timing.fused("dyisru", normscope.DyISRU(8), (4, 8), "forward") == {}


@pytest.mark.parametrize(("gigabytes", "forward", "both"), [(12, True, True), (24, False, True), (80, False, False)])
def test_what_the_published_table_needs_of_a_card(monkeypatch, gigabytes, forward, both):
    card = types.SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    device = torch.device("cuda")
    assert (why_not(device) is not None, why_not(device, BOTH) is not None) == (forward, both)


def test_the_published_table_of_a_tiny_llama(compiled):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    before = dict(model.named_modules())
    report = published(model, tokens=8, n_passes=2, on_cpu=True)
    assert [(row.variant, row.norms, row.passes) for row in report.rows] == [
        (variant, norms, passes)
        for norms in ("eager", "compile")
        for passes in (FORWARD, BOTH)
        for variant in ("native", "dyt")
    ]
    assert all(row.layer > 0 and row.model > 0 for row in report.rows)
    assert set(report.notes) == {
        "Ours has tokens 8, the paper 4096.",
        "Ours has passes 2, the paper 100.",
        "Ours has dtype float32, the paper bfloat16.",
    }
    assert report.published == PUBLISHED and "2503.10622" in report.source
    assert all(module is before[name] for name, module in model.named_modules())


def test_only_the_cases_that_are_asked_for_are_timed(net, batch, compiled, quick):
    def only(case):
        return case.variant in (NATIVE, "dyt") and case.way == "compile" and case.passes == FORWARD

    report = bench(net, batch, full=True, dtypes=["float32"], budget=60, only=only)
    cases = [(row.scope, row.variant, row.way, row.passes) for row in report.rows]
    assert cases == [(scope, name, "compile", FORWARD) for scope in ("norm", "model") for name in (NATIVE, "dyt")]
    assert len(compiled) == 4 and all(row.ratio for row in report.rows if row.variant == "dyt")
    assert report.left_out == ()

    eager = bench(net, batch, ["dyt"], full=True, dtypes=["float32"], budget=60, only=lambda case: case.scope == "norm")
    assert {row.scope for row in eager.rows} == {"norm"} and COPY in {row.variant for row in eager.rows}


def test_what_cannot_be_timed_leaves_the_others_to_be(net, batch, monkeypatch):
    calls = []

    def refuse_the_fifth(run):
        calls.append(run)
        if len(calls) == 5:
            raise RuntimeError("cannot be captured\nand more")
        return [repeated(run)]

    monkeypatch.setattr(timing, "blocks", refuse_the_fifth)

    def only(case):
        return (
            case.scope == "norm" and case.way == "eager" and case.passes == FORWARD and case.variant in (NATIVE, "dyt")
        )

    native, dyt = bench(net, batch, ["dyt"], full=True, dtypes=["float32"], only=only).rows
    assert len(calls) == 10 + 3  # of the third round, the other begins
    assert (native.verdict, native.note, native.samples) == (NOT_RUN, "RuntimeError: cannot be captured", ())
    assert len(dyt.samples) == 10 and dyt.note == ""


@pytest.mark.parametrize(("budget", "samples"), [(1.0, 3), (0.0, 1)])
def test_the_network_is_passed_as_often_as_a_verdict_takes_where_the_budget_has_room(monkeypatch, budget, samples):
    # The norm alone takes longer than there is time, as where a compiler is started.
    monkeypatch.setattr(NormBench, "measured", lambda *_: time.sleep(1.5 * budget) or [])
    report = bench(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), Batch((torch.ones(2, 8),)), ["dyt"], budget=budget)
    timed = [len(row.samples) for row in report.rows if row.scope == "model"]
    assert timed and set(timed) == {samples}


def test_on_cuda_a_float32_network_is_timed_in_bfloat16():
    def chosen(dtype, device, names=None, full=False):
        return bench_module._dtypes(names, full, torch.empty(0, dtype=dtype, device=device))

    with FakeTensorMode():
        assert chosen(torch.float32, "cuda") == [torch.bfloat16]
        assert chosen(torch.float32, "cuda", ["float32"]) == [torch.float32]
        assert chosen(torch.float16, "cuda") == [torch.float16]
        assert chosen(torch.float32, "cuda", full=True)[0] == torch.float32
    assert chosen(torch.float32, "cpu") == [torch.float32]
