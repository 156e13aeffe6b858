"""``normscope swap-bench``: drift and speed of replacements."""

import json
import re
from pathlib import Path

import pytest
import torch
from command_line import document, invoke, words
from PIL import Image

import normscope
from normscope.cli.commands import swap_bench
from normscope.errors import UsageError
from normscope.inputs.held_out import learned_and_held_out
from normscope.swaps.calibrate.calibrate import swap

NAME = f"py:{Path(__file__).parents[1] / 'factories.py'}:network"
QUICK = "--quick --device cpu"


@pytest.fixture
def without_speed(monkeypatch):
    """End commands where speed would be measured, which takes long."""

    def stop(*_):
        raise UsageError("no further")

    monkeypatch.setattr(swap_bench, "_speed", stop)


def relative_l2_of_dyt(options_of=lambda learned: {}):
    """Return the relative L2 of every held-out input after a swap in Python."""
    network = normscope.load(NAME, device="cpu")
    learned, held_out = learned_and_held_out(network.inputs)
    seen = normscope.capture(network.module, learned, by_gamma=True)

    def outputs():
        return torch.cat([network.module(*batch.args).double().flatten(1) for batch in held_out])

    with torch.no_grad():
        original = outputs()
        with swap(network.module, "dyt", seen, **options_of(learned)):
            return (outputs() - original).norm(dim=1) / original.norm(dim=1)


@pytest.mark.slow
def test_drift_and_speed_are_those_of_python(here):
    look = "--width 3.25 --title none"
    printed = document(f"swap-bench {NAME} --func dyt,rmsnorm --init fit,paper -o out {QUICK} {look}")
    assert list(printed) == ["device", "drift", "speed", "figures"] and printed["device"].startswith("cpu")
    reports = printed["drift"]
    started = [(report["func"], report["init"]) for report in reports]
    assert started == [("dyt", "fit"), ("dyt", "paper"), ("rmsnorm", "")]
    errors = relative_l2_of_dyt()
    row = next(row for row in reports[0]["rows"] if row["swapped"] == "all" and row["at"] == "output")
    assert row["inputs"] == len(errors) == 8
    # float32 outputs, whose distances are computed in float64
    assert row["relative_l2"]["p50"] == pytest.approx(float(errors.quantile(0.5)), rel=1e-5)
    for figure in printed["figures"]:
        with Image.open(here / figure["file"]) as image:
            assert image.width == 650
    (speed,) = printed["speed"]
    assert "8 of 32 samples held out" in reports[0]["data"] and speed["about"]["model"] == NAME
    assert speed["about"]["data"].startswith("1 sample of ")  # on the CPU, the first
    rows = speed["rows"]
    assert {row["way"] for row in rows} <= {"eager", "fused"} and all(row["samples"] for row in rows)
    model_rows = [row for row in rows if row["scope"] == "model"]
    assert {tuple(row["shape"]) for row in model_rows} == {(1, 5, 4)}
    assert {row["variant"] for row in model_rows} == {"native", "rmsnorm", "identity", "dyt"}


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_curves_without_start_values_appear_once():
    printed = document(f"swap-bench {NAME} --func 'free,best,mine=x/(1+abs(x))' --init paper,fit {QUICK}")
    formula = "mine=x/(1+abs(x))"
    assert [(report["func"], report["init"]) for report in printed["drift"]] == [
        *(("free", "fit"), ("best", "fit"), (formula, "paper"), (formula, "fit"))
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_least_harmful_sites_are_chosen_on_learning_inputs():
    sites = document(f"swap-bench {NAME} --func dyt --layers least:2 {QUICK}")["drift"][0]["sites"]
    network = normscope.load(NAME, device="cpu")
    learned, _ = learned_and_held_out(network.inputs)
    modules = normscope.replacements(network.module, "dyt", normscope.capture(network.module, learned, by_gamma=True))
    alone = normscope.drift(network.module, learned, modules, cumulative=False)
    assert len(modules) == 3 and set(sites) == set(alone.least_harmful(2))


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_tables_and_the_reason_for_no_quality():
    output = invoke(f"swap-bench {NAME} --func dyisru --init paper {QUICK}").stdout
    assert output.startswith("on cpu") and "no number here is of a GPU" in output.splitlines()[0]
    assert re.search("faster$|slower$|inconclusive$", output, re.MULTILINE)
    assert "No quality: the network's task is unknown (in Python, pass quality=" in output


@pytest.mark.usefixtures("without_speed")
def test_quality_is_a_table(here):
    for name in ("3", "7"):
        (here / "images" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 40 * int(name)).save(here / "images" / name / "a.png")
    done = invoke(f"swap-bench demo_vit --data images --func dyt --init paper --layers 1 {QUICK}", status=2)
    assert "top-1 accuracy" in done.stdout and "1 labelled sample · higher is better" in words(done.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_an_embedded_model_is_timed_at_full_size():
    done = invoke(f"swap-bench demo_vit --limit 4 --batch-size 1 --func dyt --init paper --json {QUICK}")
    printed = json.loads(done.stdout)
    (speed,) = printed["speed"]
    assert speed["about"]["model"] == "vit_b16" and speed["about"]["weights"] == "random weights, seed 0"
    assert "demo_vit is tiny" in done.stderr and "vit_b16: random weights" in done.stderr
    assert "embedded demo_vit" in printed["drift"][0]["weights"]
    quality = printed["drift"][0]["quality"]
    assert quality["scores"]["original"] == {"value": 1.0, "interval": [pytest.approx(0.5101, abs=1e-4), 1.0]}
    assert (quality["name"], quality["n"], list(quality["scores"])) == ("top-1 accuracy", 4, ["original", "swapped"])
    assert {row["sites"] for row in speed["rows"] if row["scope"] == "model"} == {25}


@pytest.mark.usefixtures("here", "without_speed")
def test_calibrated_rows_learn_from_other_inputs(monkeypatch):
    reports, drift = [], normscope.drift
    monkeypatch.setattr(normscope, "drift", lambda *a, **kw: reports.append(drift(*a, **kw)) or reports[-1])
    options = "--func dyt,rmsnorm --init fit,calibrated --layers 0,2"
    done = invoke(f"swap-bench {NAME} {options} {QUICK}", status=2)
    shown, remarks = words(done.stdout), words(done.stderr)
    assert "calibrated: each row by itself, on 24 other samples than it is measured on (6 of them decided)" in shown
    assert "calibrated with that site alone swapped" in shown
    assert "calibrated on" in remarks and "24 of 32 samples" in remarks and "8 of 32 samples held out" in remarks
    started = [(report.func, report.init, report.calibration is not None) for report in reports]
    assert started == [("dyt", "fit", False), ("dyt", "calibrated", True), ("rmsnorm", "", False)]
    row = reports[1].by_site[0]
    assert row.relative_l2.p50 < reports[0].by_site[0].relative_l2.p50
    # float32 outputs, whose distances are computed in float64
    errors = relative_l2_of_dyt(lambda learned: {"layers": [0], "init": "calibrated", "learn": list(learned)})
    assert row.relative_l2.p50 == pytest.approx(float(errors.quantile(0.5)), rel=1e-5)
