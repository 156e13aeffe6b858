"""That everything which is compared on a GPU computes the same, and that what fails or is late is said."""

import math
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.special import erf

pytest.importorskip("triton", reason="Triton is made for Linux alone")
FOLDER = Path(__file__).parents[2] / "benchmarks"
SHAPE = (48, 40)


@pytest.fixture
def on_gpu(monkeypatch):
    """The modules that benchmarks/gpu.py runs."""
    monkeypatch.syspath_prepend(FOLDER)
    from on_gpu import contenders, speed, tilings, timers

    class Modules:
        pass

    for module in (contenders, speed, tilings, timers):
        setattr(Modules, module.__name__.rpartition(".")[2], module)
    return Modules


def truth(of, x, dy, parameters):
    """Y and the gradients by x, weight and bias in float64, by the papers' formulas and their derivatives by hand."""
    weight, bias = parameters["weight"], parameters["bias"]
    u = 0.7 * x + (0.1 if of == "Derf" else 0)
    f, slope = {
        "DyT": lambda: (np.tanh(u), 0.7 / np.cosh(u) ** 2),
        "DyISRU": lambda: (x / np.sqrt(x**2 + 0.7**-2), 0.7**-2 / (x**2 + 0.7**-2) ** 1.5),
        "Derf": lambda: (erf(u), 0.7 * 2 / math.sqrt(math.pi) * np.exp(-(u**2))),
    }[of]()
    return {"y": weight * f + bias, "dx": dy * weight * slope, "weight": (dy * f).sum(0), "bias": dy.sum(0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("curve", ["tanh", "isru", "erf"])
def test_all_that_is_compared_computes_the_same(on_gpu, curve, dtype):
    [own] = on_gpu.contenders.operands(SHAPE, dtype, "cpu")
    made = on_gpu.contenders.pointwise(curve, SHAPE[1], dtype, "cpu")
    assert [one.ours for one in made] == [True, True, False, False]
    off = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for one in made:
        affine = [part.detach().double().numpy() for part in one.parameters[-2:]]
        values = dict(zip(("weight", "bias"), affine, strict=True))
        exact = truth(one.of, own.x.double().numpy(), own.dy.double().numpy(), values)
        again = one.backward(own)
        again()
        dx, *_, by_weight, by_bias = (gradient for gradient in again() if gradient.numel())
        found = {"y": one.forward(own), "dx": dx, "weight": by_weight, "bias": by_bias}
        assert all(tensor.dtype == dtype for tensor in found.values())
        for name, tensor in found.items():
            largest = np.abs(exact[name]).max()
            np.testing.assert_allclose(tensor.detach().double().numpy(), exact[name], rtol=0, atol=off * largest)
        assert on_gpu.contenders.wrong(one, own) == ""


def test_the_norms_are_torchs_own(on_gpu):
    [own] = on_gpu.contenders.operands(SHAPE, torch.float32, "cpu")
    x = own.x.double().numpy()
    layer, rms = on_gpu.contenders.norms(SHAPE[1], torch.float32, "cpu")
    weight, bias = (part.detach().double().numpy() for part in layer.parameters)
    centred = x - x.mean(1, keepdims=True)
    for one, exact in (
        (layer, centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6) * weight + bias),
        (rms, x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * weight),
    ):
        np.testing.assert_allclose(one.forward(own).numpy(), exact, rtol=0, atol=1e-5)
        assert on_gpu.contenders.wrong(one, own) == ""


def test_what_computes_something_else_is_not_timed(on_gpu):
    from dataclasses import replace

    [own] = on_gpu.contenders.operands(SHAPE, torch.float32, "cpu")
    ours, _, eager, _ = on_gpu.contenders.pointwise("tanh", SHAPE[1], torch.float32, "cpu")

    def last_row_is(value):
        def call(x, *parameters):
            y = eager.call(x, *parameters)
            return torch.cat([y[:-1], y[-1:] * value])

        return call

    ready = on_gpu.speed.Ready()
    for value in (1.1, math.nan):
        for one in (replace(ours, call=last_row_is(value)), replace(eager, call=last_row_is(value))):
            on_gpu.speed._prepare(None, one, [own], "DyT {}", ready)
    assert len(ready.failures) == len(ready.left_out) == 2 and not ready.samplers
    assert "DyT by normscope, y, torch.float32, (48, 40): off by 0.09" in ready.failures[0]
    assert "off by nan" in ready.left_out[1] and "DyT by eager, as published" in ready.left_out[1]


def test_a_compiled_backward_pass_runs_more_than_once(on_gpu):
    [own] = on_gpu.contenders.operands(SHAPE, torch.float32, "cpu")
    _, _, eager, _ = on_gpu.contenders.pointwise("tanh", SHAPE[1], torch.float32, "cpu")
    compiled = on_gpu.contenders.compiled(eager, tuned=False, rehearsal=True)
    again = compiled.backward(own)
    first, second = again(), again()
    for one, other, plain in zip(first, second, eager.backward(own)(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, plain)
    assert compiled.way == "torch.compile, as published" and not compiled.ours
    torch._dynamo.reset()


def test_rounds_are_kept_apart_and_what_fails_or_is_late_is_said(on_gpu):
    order = []

    def sampler(name, fails=False):
        def sample():
            order.append(name)
            if fails:
                raise RuntimeError(f"no {name}\nmore")
            return {"graph": [float(len(order))]}

        return sample

    ready = on_gpu.speed.Ready(
        {
            ("DyT", "normscope", "forward"): sampler("ours", fails=True),
            ("DyT", "Liger", "forward"): sampler("Liger", fails=True),
            ("copy", "copy", "forward"): sampler("copy"),
            ("LayerNorm", "F.layer_norm", "forward"): sampler("norm"),
        }
    )
    taken = on_gpu.speed.in_rounds(ready, math.inf)
    assert order == ["ours", "Liger", "copy", "norm", "norm", "copy"]
    assert [times["graph"] for times in taken["copy", "copy", "forward"]] == [[3.0], [6.0]]
    assert ready.failures == ["DyT by normscope, forward, while it was timed: RuntimeError: no ours"]
    assert ready.left_out == ["DyT by Liger, forward, while it was timed: RuntimeError: no Liger"]
    late = on_gpu.speed.Ready({("copy", "copy", "forward"): sampler("copy")})
    assert on_gpu.speed.in_rounds(late, -math.inf) == {("copy", "copy", "forward"): []}
    assert late.left_out == ["Round 1: for 1 of 1 no time.", "Round 2: for 1 of 1 no time."]


def test_an_error_is_told_with_that_which_came_before_it(on_gpu):
    described = on_gpu.contenders.described
    with pytest.raises(RuntimeError) as raised:
        try:
            raise ValueError("not permitted when stream is capturing\nmore")
        finally:
            raise RuntimeError("a previous error during capture")
    assert described(raised.value) == (
        "RuntimeError: a previous error during capture; before that ValueError: not permitted when stream is capturing"
    )
    with pytest.raises(RuntimeError) as raised:
        try:
            raise ValueError
        except ValueError:
            raise RuntimeError("alone") from None
    assert described(raised.value) == "RuntimeError: alone"


def test_no_contender_is_compiled_when_it_is_late(on_gpu, monkeypatch):
    """What comes first is ready in any case; each of the others, packages too, is looked at by itself."""
    from on_gpu.parts import Setting

    speed, contenders = on_gpu.speed, on_gpu.contenders
    now = [0.0]
    monkeypatch.setattr(speed.time, "monotonic", lambda: now[0])
    liger = contenders.Contender("DyT", contenders.LIGER, abs, (), abs)
    monkeypatch.setattr(contenders, "peers", lambda *where: iter([liger, "QuACK: there is none"]))
    ready = speed.Ready()
    ways = []
    for one in speed._contenders(Setting(rehearsal=True), 8, "float32", False, 5.0, ready):
        ways.append(one.way)
        now[0] += one.way.startswith("torch.compile") * 3.0
    assert ways.count("normscope") == 3 and sum(way.startswith("torch.compile") for way in ways) == 2
    assert "Liger" not in ways
    assert len(ready.left_out) == 5 and "DyT by Liger, float32: there was no time" in ready.left_out[3]
    assert ready.left_out[4] == "QuACK: there is none; it is not timed."


def test_of_many_sentences_the_first_are_kept_and_the_others_counted(on_gpu):
    assert on_gpu.speed.first_of(["a"] * 20) == ["a"] * 20
    assert on_gpu.speed.first_of(["a"] * 23) == [*["a"] * 20, "And 3 more."]


@pytest.mark.parametrize("seconds", [1e-6, 18e-6, 2e-4, 0.01, 1.0])
def test_a_graph_takes_a_tenth_of_a_second_or_one_turn_of_the_sets(on_gpu, seconds):
    calls = on_gpu.timers.calls_of(seconds, sets=4)
    assert 4 <= calls <= 200
    assert calls == 4 or 5 * calls * seconds <= 0.1


def test_the_best_tiling_is_told_with_how_far_the_default_is_from_it(on_gpu):
    from normscope.swaps.kernels.launch import Tiling

    default, other = Tiling(4, 8), Tiling(8, 2)
    rows = on_gpu.tilings.best_of("a case", {default: [11.0, 12.0], other: [10.0, 10.0]}, default)
    assert {(row.way, row.quantity): list(row.samples) for row in rows} == {
        ("8 warps, 2 loads", "best"): [10.0, 10.0],
        ("8 warps, 2 loads", "default"): [11.0, 12.0],
        ("8 warps, 2 loads", "default above it"): pytest.approx([10.0, 20.0]),
    }
    assert on_gpu.tilings.best_of("a case", {other: [1.0]}, default) == []


def test_what_fills_other_numbers_or_none_is_seen(on_gpu):
    expected = [torch.tensor([1.0, -4.0]), torch.tensor([0.5])]
    furthest = on_gpu.tilings.furthest
    assert furthest(expected, expected) == 0
    assert furthest([torch.tensor([1.0, -3.0]), expected[1]], expected) == 0.25
    assert furthest([expected[0], torch.tensor([math.nan])], expected) == math.inf


def test_parts_fit_and_bfloat16_comes_first(on_gpu):
    from on_gpu.parts import Setting

    for setting in (Setting(), Setting(rehearsal=True)):
        parts = [*on_gpu.speed.parts(setting), *on_gpu.tilings.parts(setting)]
        assert len({part.name for part in parts}) == len(parts)
        assert all(part.seconds <= 480 and "," not in part.name for part in parts)
        assert "bfloat16" in parts[0].name and "max-autotune" not in parts[0].name
    of_all = {(dtype, shape) for part in on_gpu.speed.parts(Setting()) for shape, dtype, _ in [part.args]}
    assert len(of_all) == 12


def test_candidates_are_others_than_the_default_and_fit_into_the_registers(on_gpu):
    from normscope.swaps.kernels import launch

    for passes, default in (("forward", launch.FORWARD), ("backward", launch.BACKWARD)):
        tilings = on_gpu.tilings.TILINGS[passes]
        assert len({default, *tilings}) == len(tilings) + 1
        for tiling in tilings:
            assert 32 * tiling.warps * tiling.per_multiprocessor * (tiling.registers or 0) <= 65536


@pytest.mark.faults
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_no_candidate_spills(on_gpu, passes, tmp_path, monkeypatch):
    from disassembly import code_of_launch
    from machine_code import launches

    from normscope.swaps.kernels import launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = [(torch.bfloat16, (32768, 4096))]
    if passes == "backward":  # forward nothing limits the registers
        sizes.append((torch.float32, (131072, 1152)))
    for tiling in on_gpu.tilings.TILINGS[passes]:
        for dtype, shape in sizes:
            with mock.patch.object(launch, on_gpu.tilings.OWN[passes], tiling):
                own = launches(torch.empty(shape, dtype=dtype, device="meta"), "erf")[passes == "backward"]
            code = code_of_launch(own, 90)
            assert code.local == 0, (tiling, dtype)
            assert tiling.registers is None or code.registers <= tiling.registers


@pytest.mark.faults
def test_the_precise_function_takes_more_instructions_and_no_more_bytes(on_gpu, tmp_path, monkeypatch):
    from disassembly import code_of_launch
    from machine_code import LOADS, STORES, launches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.empty((32768, 4096), dtype=torch.bfloat16, device="meta")
    for curve in ("tanh", "erf"):
        cheap, precise = (on_gpu.tilings.with_function(launches(x, curve)[0], one) for one in (False, True))
        counts = [on_gpu.tilings.instructions(one, x, (9, 0)) for one in (cheap, precise)]
        assert counts[0] < 16 and counts[1] > 1.5 * counts[0]
        codes = [code_of_launch(one, 90) for one in (cheap, precise)]
        assert codes[0].counted(f"{LOADS}|{STORES}") == codes[1].counted(f"{LOADS}|{STORES}")


@pytest.mark.faults
def test_a_rehearsal_finds_nothing_wrong(tmp_path):
    only = "speed bfloat16,tilings backward bfloat16"
    command = [sys.executable, FOLDER / "gpu.py", "--rehearse", "--results", tmp_path, "--only", only]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "speed bfloat16 24x40: right" in done.stdout and "tilings backward bfloat16 24x40: right" in done.stdout
