"""Fused kernels in a benchmark: seen in Triton's interpreter, where they run without a GPU, and left out elsewhere.

Run as a script, in the interpreter, this file fills what the tests look at.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from normscope.errors import UsageError
from normscope.inputs.batch import Batch
from normscope.runtime.launches import EAGER, TRITON, VARIABLE
from normscope.swaps.bench import timing
from normscope.swaps.bench.bench import bench, published, without_kernels
from normscope.swaps.bench.timing import has_kernel, repeated
from normscope.swaps.kernels import choice, cpu
from normscope.swaps.pointwise import DyT, PointwiseFunction
from normscope.swaps.reports import COPY, FUSED, NOT_RUN

pytestmark = pytest.mark.slow

FORWARD, BOTH = "forward", "forward + backward"
KERNELS = ["dyt", "derf"]
VARIANTS = ["native", "rmsnorm", "identity", *KERNELS]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6)).eval()


def batch() -> Batch:
    return Batch((torch.randn(2, 3, generator=torch.Generator().manual_seed(1)),))


def in_the_interpreter() -> dict:
    """What a whole benchmark times: its report, each timed call's result and launches, and each compiled graph."""
    from normscope.swaps.kernels import launch as fused

    steps, timed, graphs, launched = [""], [], [], []
    compile, forward = torch.compile, fused.forward

    def recorded(run):
        before, results = len(launched), []
        seconds = repeated(lambda: results.append(run()))
        timed.append((steps[-1], len(launched) - before, results[0]))
        return seconds

    def backend(graph, inputs):
        graphs.append((steps[-1], sorted({str(node.target) for node in graph.graph.nodes})))
        return graph.forward

    def launch(*args):
        launched.append(args)
        return forward(*args)

    with (
        mock.patch.multiple(
            timing,
            **{"blocks": lambda run: [recorded(run)], "repeated": recorded},
            **{"AT_LEAST": 1, "NORM_AT_LEAST": 1, "AT_MOST": 1, "_COMPILED_PASSES": 1},
        ),
        mock.patch.object(torch, "compile", lambda module, **how: compile(module, backend=backend, **how)),
        mock.patch.object(fused, "forward", launch),
    ):
        report = bench(
            net(), batch(), VARIANTS[3:], dtypes=["float32"], full=True, progress=lambda step, *_: steps.append(step)
        )
    return {
        "rows": [row.as_dict() for row in report.rows],
        "device": report.device,
        "left_out": report.left_out,
        "timed": timed,
        "graphs": graphs,
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    file = tmp_path_factory.mktemp("seen") / "bench.pt"
    there = os.environ | {"TRITON_INTERPRET": "1", VARIABLE: TRITON}
    done = subprocess.run([sys.executable, str(Path(__file__)), str(file)], env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(file, weights_only=True)


def rows_of(seen, scope, way, passes):
    return [row for row in seen["rows"] if (row["scope"], row["way"], row["passes"]) == (scope, way, passes)]


@pytest.mark.parametrize("passes", [FORWARD, BOTH])
def test_what_has_a_kernel_is_timed_both_ways(seen, passes):
    """Of the identity, and of what is no point-wise function, there is no kernel."""
    for scope, way, variants in (
        ("norm", "eager", [*VARIANTS, COPY] if passes == FORWARD else VARIANTS),
        ("norm", "fused", KERNELS),
        ("norm", "compile", VARIANTS),
        ("model", "eager", VARIANTS),
        ("model", "fused", KERNELS),
        ("model", "compile", VARIANTS),
        ("model", "compile + fused", KERNELS),
    ):
        rows = rows_of(seen, scope, way, passes)
        assert [row["variant"] for row in rows] == variants
        assert all(row["verdict"] != NOT_RUN and row["samples"] for row in rows)


@pytest.mark.parametrize("scope", ["the norm alone", "the whole network"])
@pytest.mark.parametrize("passes", [FORWARD, BOTH])
def test_only_what_is_called_fused_launches_kernels_and_the_results_are_the_same(seen, scope, passes):
    timed = [one[1:] for one in seen["timed"] if one[0] == f"{scope}, eager and fused, {passes}"]
    timed = timed[-len(VARIANTS + KERNELS) - (scope == "the norm alone" and passes == FORWARD) :]  # after the untimed
    assert [count for count, _ in timed[: len(VARIANTS + KERNELS)]] == [0] * len(VARIANTS) + [1] * len(KERNELS)
    results = dict(zip(VARIANTS, (result for _, result in timed), strict=False))
    for variant, (_, result) in zip(KERNELS, timed[len(VARIANTS) :], strict=False):
        # Both are float32 inside: a few roundings apart, and no sum is of more than six terms of the size of one.
        torch.testing.assert_close(result, results[variant], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("passes", [FORWARD, BOTH])
def test_what_is_compiled_is_plain_torch_unless_it_says_fused(seen, passes):
    def holding(step):
        found = [targets for at, targets in seen["graphs"] if at == f"{step}, {passes}"]
        assert found
        return ["normscope.pointwise.default" in targets for targets in found]

    assert not any(holding("the norm alone, compile"))
    assert not any(holding("the whole network, compile"))
    assert holding("the whole network, compile + fused") == [True] * len(KERNELS)


def test_a_report_says_that_it_was_the_interpreter(seen):
    assert "in Triton's interpreter on the CPU, not on a GPU" in seen["device"]
    assert any("in Triton's interpreter on the CPU, not on a GPU" in reason for reason in seen["left_out"])


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timing, "blocks", lambda run: [repeated(run)])


@pytest.mark.parametrize("asked", ["", EAGER])
def test_nothing_is_fused_on_the_cpu_or_in_plain_torch_and_only_the_latter_is_explained(quick, monkeypatch, asked):
    monkeypatch.setenv(VARIABLE, asked)
    report = bench(net(), batch(), ["dyt"], budget=0)
    assert {row.way for row in report.rows} == {"eager"}
    assert ("Fused by normscope's kernels: NORMSCOPE_KERNELS=eager leaves them out." in report.left_out) == bool(asked)
    assert asked or "fused" not in f"{report.device} {report.left_out}".lower()
    assert os.environ[VARIABLE] == asked


def test_where_triton_cannot_launch_a_report_says_why_nothing_is_fused(monkeypatch):
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(choice, "_capability", lambda device: (8, 0))
    monkeypatch.setattr(choice, "why_no_launcher", lambda: "Triton cannot build what launches its kernels (no gcc)")
    [line] = without_kernels(torch.device("cuda"))
    assert line == (
        "Fused by normscope's kernels: none is timed: Triton cannot build what launches its kernels (no gcc)."
    )
    with FakeTensorMode(), torch.device("cuda"):
        assert not has_kernel(DyT(4), (3, 4), "forward")


def test_on_the_cpu_the_loop_is_timed_where_it_computes(monkeypatch):
    """Forward, in an eager network, of as many elements as it takes; nowhere else is there anything fused."""
    monkeypatch.delenv(VARIABLE, raising=False)
    batch_of = Batch((torch.randn(choice.LOOP_FROM // 6 + 1, 3),))
    lines, forward = [], cpu.fill
    monkeypatch.setattr(cpu, "fill", lambda *args: (lines.append(args[-1]), forward(*args)))
    backend = mock.patch.object(torch, "compile", lambda module, **_: module)
    with backend:
        report = bench(net(), batch_of, ["dyt", "softsign"], full=True, dtypes=["float32"], budget=0)
    fused = {(row.scope, row.variant, row.way, row.passes) for row in report.rows if row.way in FUSED}
    assert fused == {("norm", "dyt", "fused", FORWARD), ("model", "dyt", "fused", FORWARD)} and lines
    assert "interpreter" not in report.device and all(
        row.samples and not row.note for row in report.rows if row.way in FUSED
    )
    lines.clear()
    with backend:
        small = bench(net(), batch(), ["dyt"], full=True, dtypes=["float32"], budget=0)
    assert not lines and not any(row.way in FUSED for row in small.rows)


@pytest.mark.parametrize(("asked", "said"), [("triton", "cannot be met"), ("fast", "There is no NORMSCOPE_KERNELS")])
def test_what_cannot_be_met_is_an_error_before_anything_is_timed(monkeypatch, asked, said):
    monkeypatch.setenv(VARIABLE, asked)
    steps = []
    with pytest.raises(UsageError, match=said):
        bench(net(), batch(), ["dyt"], budget=0, progress=lambda step, *_: steps.append(step))
    assert steps == ["looking for norms"]
    assert os.environ[VARIABLE] == asked


def test_a_compiled_module_is_compiled_anew_where_the_choice_changes(monkeypatch):
    """Else what is compiled by plain torch would be called fused, or the other way about."""
    monkeypatch.setattr(choice, "why_not_on", lambda device: "")
    graphs = []

    def backend(graph, inputs):
        graphs.append("normscope.pointwise.default" in {str(node.target) for node in graph.graph.nodes})
        return lambda x, *more: (x,)

    torch._dynamo.reset()
    compiled, x = torch.compile(DyT(4).requires_grad_(False), backend=backend, fullgraph=True), torch.ones(2, 4)
    for asked in (TRITON, EAGER, TRITON):
        monkeypatch.setenv(VARIABLE, asked)
        compiled(x)
    assert graphs == [True, False]
    torch._dynamo.reset()


def test_the_published_table_has_plain_torch_and_kernels_apart(monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    # As on a GPU: kernels are there. They are not run here, plain torch stands in.
    steps, choices = [], set()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(timing, "has_kernel", lambda module, *_: isinstance(module, PointwiseFunction))
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(
        "normscope.swaps.pointwise.by_kernels",
        lambda *_: choices.add(("fused norms" in steps[-1], os.environ.get(VARIABLE))) or False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    report = published(model, tokens=2, n_passes=1, on_cpu=True, progress=lambda step, *_: steps.append(step))
    both = {(variant, norms) for variant in ("native", "dyt") for norms in ("eager", "compile")}
    assert {(row.variant, row.norms) for row in report.rows} == {*both, ("dyt", "fused")}
    assert choices == {(True, None), (False, EAGER)}


if __name__ == "__main__":
    torch.save(in_the_interpreter(), sys.argv[1])
