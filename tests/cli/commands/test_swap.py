"""``normscope swap`` as a user meets it: real processes, the folder that they write, and what takes it."""

import copy
import json
from pathlib import Path

import pytest
import torch

import normscope
from normscope.cli.commands.layers import layers
from normscope.cli.commands.swap import swap
from normscope.errors import NormscopeError
from normscope.inputs.held_out import learned_and_held_out
from normscope.swaps.distances import output_errors
from normscope.swaps.start import asked_for, fitted
from normscope.swaps.store.record import read_record


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("swap")


@pytest.fixture(scope="module")
def swapped(run, folder):
    done = run("swap", "demo_vit", "--func", "dyt", "--limit", "160", "-o", "dyt", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "dyt", done


@pytest.mark.slow
def test_it_writes_what_the_python_interface_makes(swapped):
    path, done = swapped
    network = normscope.load("demo_vit", limit=160, device="cpu")
    learned = network.calibration or learned_and_held_out(network.inputs)[0]
    seen = normscope.capture(network.module, learned, by_gamma=True)
    normscope.swap(network.module, "dyt", fitted(seen, asked_for("dyt")))
    mine, theirs = network.module.state_dict(), normscope.load_swapped(path, device="cpu").module.state_dict()
    assert mine.keys() == theirs.keys()
    torch.testing.assert_close(theirs, mine, rtol=1e-6, atol=0)  # two processes may sum in another order
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["site", "norm", "replaced", "by", "A", "α", "s", "R²"]
    site, norm, curve, amplitude, alpha, *_ = lines[2 + 16].split()
    assert (site, norm, curve, lines[-1]) == ("norm", "LayerNorm", "tanh", "dyt")
    assert len(lines) == 2 + 17 + 4 + 1, done.stdout  # the quality has a heading, two rows and a caption
    assert float(alpha) == pytest.approx(float(theirs["norm.alpha"]), rel=1e-3)  # four digits
    gamma = normscope.load("demo_vit", device="cpu").module.norm.weight
    torch.testing.assert_close(theirs["norm.weight"], gamma * float(amplitude), rtol=1e-3, atol=0)
    assert "--weights dyt takes it in every command; in Python, normscope.load_swapped('dyt')" in done.stderr


@pytest.mark.slow
def test_a_calibrated_swap_is_what_the_python_interface_makes(run, folder):
    options = ("--func", "dyt", "--init", "calibrated", "--limit", "96")
    done = run("swap", "demo_vit", *options, "-o", "calibrated", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    report = told["calibration"]
    assert (told["init"], told["refit"], report["n_learned"], report["n_judged"]) == (
        "calibrated",
        "neighbours",
        72,
        24,
    )
    assert report["after"] < 0.5 * report["before"] and report["left"] == {}
    assert [row["amplitude"] for row in told["sites"]] == [None] * 17
    network = normscope.load("demo_vit", limit=96, device="cpu")
    original = copy.deepcopy(network.module)
    seen = normscope.capture(network.module, network.calibration, by_gamma=True)
    normscope.swap(network.module, "dyt", fitted(seen, asked_for("dyt")))
    mine = normscope.calibrate(original, network.module, network.calibration, outputs=network.outputs)
    theirs = normscope.load_swapped(folder / "calibrated", device="cpu")
    assert report["after"] == pytest.approx(mine.after, rel=1e-2)  # two processes may sum in another order
    for batch in network.inputs:
        torch.testing.assert_close(theirs.module(*batch.args), network.module(*batch.args), rtol=1e-2, atol=5e-2)


@pytest.mark.slow
def test_nothing_is_left_to_observe_in_it(run_here, folder, swapped):
    done = run_here("plot", "demo_vit", "--weights", "dyt", cwd=folder)
    assert done.returncode == 3
    assert "demo_vit: swap dyt (dyt in place of 17 norms, of embedded demo_vit" in done.stderr
    assert "Error: All 17 norms of this VisionTransformer were replaced (tanh), and none is left" in done.stderr
    assert "random" not in done.stderr


def test_some_sites_and_the_rest_is_seen_as_before(tmp_path, capsys):
    path = tmp_path / "last"
    swap("demo_vit", path, func="rmsnorm", sites="final", as_json=True, quiet=True)
    document = json.loads(capsys.readouterr().out)
    assert [(site["site"], site["curve"], site["r2"]) for site in document["sites"]] == [("norm", "rmsnorm", None)]
    assert (document["folder"], document["skipped"]) == (str(path), [])
    swap("demo_vit", path, func="free", sites="blocks.0.*", weights=str(path), limit=8)
    capsys.readouterr()
    layers(["demo_vit"], weights=str(path), verify=True, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [site["name"] for site in document["sites"]][::14] == ["blocks.1.norm1", "norm"]
    assert document["sites"][-1]["kind"] == "RMSNorm"
    assert [norm["reason"] for norm in document["skipped"]] == ["a point-wise function (free), no norm"] * 2


@pytest.mark.slow
def test_norms_are_kept_that_are_worth_most(tmp_path, capsys):
    path = tmp_path / "kept"
    swap("demo_vit", path, keep=2, limit=16, as_json=True, quiet=True)
    document = json.loads(capsys.readouterr().out)
    network = normscope.load("demo_vit", limit=16, device="cpu")
    seen = normscope.capture(network, network.calibration, by_gamma=True)
    modules = normscope.replacements(network, "dyt", fitted(seen, asked_for("dyt")))
    choice = normscope.keep(network, network.calibration, modules, number=2, held_out=network.inputs)
    assert document["keep"]["kept"] == choice.kept == [one.name for one in read_record(path).kept]
    assert [step["swapped"] for step in document["keep"]["steps"]] == [17, 16, 15]
    assert document["keep"]["steps"][2]["held_out"]["p50"] == pytest.approx(choice.steps[2].held_out.p50)
    assert [row["site"] for row in document["sites"]] == choice.swapped
    module = normscope.load_swapped(path, device="cpu").module
    assert all(type(module.get_submodule(name)) is torch.nn.LayerNorm for name in choice.kept)
    assert Path(document["figure"]).name == "kept-keep.png" and Path(document["figure"]).stat().st_size > 10_000


@pytest.mark.slow
def test_the_drift_that_is_allowed_is_met_after_calibration(tmp_path, capsys):
    path = tmp_path / "kept"
    options = {"init": "calibrated", "refit": "norms", "limit": 64, "quiet": True, "as_json": True}
    swap("demo_vit", path, max_drift=0.03, **options)
    document = json.loads(capsys.readouterr().out)
    tried = {step["kept"]: step["worked_on"] for step in document["keep"]["steps"] if step["worked_on"] is not None}
    kept = len(document["keep"]["kept"])
    assert tried[kept] <= 0.03 < tried[kept - 1]
    assert document["calibration"]["after"] == tried[kept]
    original = normscope.load("demo_vit", limit=64, device="cpu")
    held_out = learned_and_held_out(original.inputs)[1] if original.calibration is None else original.inputs
    errors = output_errors(
        original.module, normscope.load_swapped(path, device="cpu").module, list(held_out), original.outputs
    )
    assert document["held_out"]["p50"] == pytest.approx(
        float(errors.quantile(0.5)), rel=1e-3
    )  # of loops and of float32


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 17, "limit": 8}, "--keep 17 leaves nothing to swap: there are 17 norms"),
        pytest.param(
            {"max_drift": 0.0, "limit": 8}, "no norm can be swapped. Allow more drift", marks=pytest.mark.slow
        ),
    ],
)
def test_what_cannot_be_kept(options, said, tmp_path):
    with pytest.raises(NormscopeError, match=said):
        swap("demo_vit", tmp_path / "kept", **options)
    assert list(tmp_path.iterdir()) == []
