"""``normscope swap-bench`` as a user meets it."""

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

FACTORIES = Path(__file__).parents[1] / "factories.py"
NAME = f"py:{FACTORIES}:network"
QUICK = "--quick --device cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("swap-bench")


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def moved_by_dyt(options_of=lambda learned: {}):
    """The relative L2 of every held-out input, by a swap in Python."""
    network = normscope.load(NAME, device="cpu")
    learned, held_out = learned_and_held_out(network.inputs)
    seen = normscope.capture(network.module, learned, by_gamma=True)

    def outputs():
        return torch.cat([network.module(*batch.args).double().flatten(1) for batch in held_out])

    with torch.no_grad():
        original = outputs()
        with swap(network.module, "dyt", seen, **options_of(learned)):
            return (outputs() - original).norm(dim=1) / original.norm(dim=1)


@pytest.fixture(scope="module")
def as_table(folder):
    """What one run prints."""
    return invoke(f"swap-bench {NAME} --func dyisru --init paper {QUICK}", cwd=folder)


@pytest.mark.slow
def test_the_document_holds_what_the_python_interface_measures(here):
    told = document(f"swap-bench {NAME} --func dyt,rmsnorm --init fit,paper -o out {QUICK}")
    assert list(told) == ["device", "drift", "speed", "figures"] and told["device"].startswith("cpu")
    reports = told["drift"]
    started = [(report["func"], report["init"]) for report in reports]
    assert started == [("dyt", "fit"), ("dyt", "paper"), ("rmsnorm", "")]
    moved = moved_by_dyt()
    row = next(row for row in reports[0]["rows"] if row["swapped"] == "all" and row["at"] == "output")
    assert row["inputs"] == len(moved) == 8
    # float32 outputs, of which the distances are taken in float64
    assert row["relative_l2"]["p50"] == pytest.approx(float(moved.quantile(0.5)), rel=1e-5)
    for figure in told["figures"]:
        assert (here / figure["file"]).read_bytes()[:4] == b"\x89PNG"
    (speed,) = told["speed"]
    assert "8 of 32 samples held out" in reports[0]["data"] and speed["about"]["model"] == NAME
    assert speed["about"]["data"].startswith("1 sample of ")  # on the CPU, the first
    assert {tuple(row["shape"]) for row in speed["rows"] if row["scope"] == "model"} == {(1, 5, 4)}


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_what_is_a_fit_itself_takes_part_once_and_formulas_have_a_place_in_the_figure():
    told = document(f"swap-bench {NAME} --func 'free,best,identity,mine=x/(1+abs(x))' --init paper,fit {QUICK}")
    assert [(report["func"], report["init"]) for report in told["drift"]] == [
        ("free", "fit"),
        ("best", "fit"),
        *((name, init) for name in ("identity", "mine=x/(1+abs(x))") for init in ("paper", "fit")),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_least_harmful_sites_are_told_by_the_inputs_learned_from():
    sites = document(f"swap-bench {NAME} --func dyt --layers least:2 {QUICK}")["drift"][0]["sites"]
    network = normscope.load(NAME, device="cpu")
    learned, _ = learned_and_held_out(network.inputs)
    modules = normscope.replacements(network.module, "dyt", normscope.capture(network.module, learned, by_gamma=True))
    alone = normscope.drift(network.module, learned, modules, cumulative=False)
    assert len(modules) == 3 and set(sites) == set(alone.least_harmful(2))


@pytest.fixture
def stopped(monkeypatch):
    """Commands end where the speed would be measured, which takes long."""

    def stop(*_):
        raise UsageError("no further")

    monkeypatch.setattr(swap_bench, "_speed", stop)


@pytest.mark.slow
@pytest.mark.usefixtures("stopped")
def test_quality_is_a_table_or_a_reason_why_there_is_none(here, as_table):
    first, *_ = as_table.stdout.splitlines()
    assert first.startswith("on cpu") and "no number here is of a GPU" in first
    assert re.search("faster$|slower$|inconclusive$", as_table.stdout, re.MULTILINE)
    assert "No quality: nothing tells what the network is for (in Python, pass quality=" in as_table.stdout
    for name in ("3", "7"):
        (here / "images" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 40 * int(name)).save(here / "images" / name / "a.png")
    done = invoke(f"swap-bench demo_vit --data images --func dyt --init paper {QUICK}", status=2)
    assert "top-1 accuracy" in done.stdout and "1 labelled sample · higher is better" in words(done.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_an_embedded_model_is_timed_at_full_size():
    done = invoke(f"swap-bench demo_vit --limit 4 --batch-size 1 --func dyt --init paper --json {QUICK}")
    told = json.loads(done.stdout)
    (speed,) = told["speed"]
    assert speed["about"]["model"] == "vit_b16" and speed["about"]["weights"] == "random weights, seed 0"
    assert "demo_vit is tiny" in done.stderr and "vit_b16: random weights" in done.stderr
    assert "embedded demo_vit" in told["drift"][0]["weights"]
    quality = told["drift"][0]["quality"]
    assert quality["scores"]["original"] == {"value": 1.0, "interval": [pytest.approx(0.5101, abs=1e-4), 1.0]}
    assert (quality["name"], quality["n"], list(quality["scores"])) == ("top-1 accuracy", 4, ["original", "swapped"])
    assert {row["sites"] for row in speed["rows"] if row["scope"] == "model"} == {25}


@pytest.mark.usefixtures("here", "stopped")
def test_calibrated_rows_learn_from_other_inputs_and_say_so(monkeypatch):
    measured = []
    drift = normscope.drift
    monkeypatch.setattr(normscope, "drift", lambda *a, **kw: measured.append(drift(*a, **kw)) or measured[-1])
    options = "--func dyt,rmsnorm --init fit,calibrated --layers 0,2"
    done = invoke(f"swap-bench {NAME} {options} {QUICK}", status=2)
    shown, remarks = words(done.stdout), words(done.stderr)
    assert "calibrated: each row by itself, on 24 other samples than it is measured on (6 of them decided)" in shown
    assert "calibrated with that site alone swapped" in shown
    assert "calibrated on" in remarks and "24 of 32 samples" in remarks and "8 of 32 samples held out" in remarks
    started = [(report.func, report.init, report.calibration is not None) for report in measured]
    assert started == [("dyt", "fit", False), ("dyt", "calibrated", True), ("rmsnorm", "", False)]
    row = measured[1].by_site[0]
    assert row.relative_l2.p50 < measured[0].by_site[0].relative_l2.p50
    # float32 outputs, of which the distances are taken in float64
    moved = moved_by_dyt(lambda learned: {"layers": [0], "init": "calibrated", "learn": list(learned)})
    assert row.relative_l2.p50 == pytest.approx(float(moved.quantile(0.5)), rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_quick_takes_the_fewest_timings():
    look = "--width 3.25 --title none"
    told = document(f"swap-bench {NAME} --quick --device cpu -o quick {look}")
    assert [report["func"] for report in told["drift"]] == ["dyt", "dyisru"]
    for figure in told["figures"]:
        with Image.open(figure["file"]) as image:
            assert image.width == 650
    rows = told["speed"][0]["rows"]
    assert {row["way"] for row in rows} <= {"eager", "fused"} and all(row["samples"] for row in rows)
    assert {row["variant"] for row in rows if row["scope"] == "model"} == {
        *("native", "rmsnorm", "identity", "dyt", "dyisru")
    }
