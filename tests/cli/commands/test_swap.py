"""``normscope swap``: the folder that it writes, and the commands that read it."""

import copy

import pytest
import torch
from command_line import document, invoke

import normscope
from normscope.inputs.held_out import learned_and_held_out
from normscope.swaps.distances import output_errors
from normscope.swaps.start import asked_for, fitted
from normscope.swaps.store.record import read_record


def dyt_fits(network, **options):
    seen = normscope.capture(network.module, network.calibration, by_gamma=True, **options)
    return fitted(seen, asked_for("dyt"))


@pytest.mark.slow
def test_the_folder_is_what_python_writes(tmp_path):
    done = invoke("swap demo_vit --func dyt --limit 64 -o dyt", cwd=tmp_path)
    network = normscope.load("demo_vit", limit=64, device="cpu")
    gamma = network.module.norm.weight
    normscope.swap(network.module, "dyt", dyt_fits(network))
    ours, theirs = (
        each.module.state_dict() for each in (network, normscope.load_swapped(tmp_path / "dyt", device="cpu"))
    )
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=0)  # two runs may sum in another order
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["site", "norm", "replaced", "by", "A", "α", "s", "R²"]
    site, norm, curve, amplitude, alpha, *_ = lines[2 + 16].split()
    assert (site, norm, curve, lines[-1]) == ("norm", "LayerNorm", "DyT", "dyt")
    # The weights of the fits take two lines; the quality has a heading, two rows and a caption.
    assert len(lines) == 2 + 17 + 2 + 4 + 1 and "weighted by γ²" in lines[2 + 17], done.stdout
    assert float(alpha) == pytest.approx(float(theirs["norm.alpha"]), rel=1e-3)  # four digits
    torch.testing.assert_close(theirs["norm.weight"], gamma * float(amplitude), rtol=1e-3, atol=0)
    assert "--weights dyt takes it in every command; in Python, normscope.load_swapped('dyt')" in done.stderr
    listed = invoke("layers demo_vit --weights dyt --verify", cwd=tmp_path)
    assert "demo_vit: swap dyt (dyt in place of 17 norms, of embedded demo_vit" in listed.stderr
    assert "random" not in listed.stderr
    headings, first = (line.split() for line in listed.stdout.splitlines()[1:3])
    assert (headings[1:4], first[2:4]) == (["kind", "f", "α"], ["PointwiseFunction", "tanh"])
    assert float(first[4]) == pytest.approx(float(theirs["blocks.0.norm1.alpha"]), rel=1e-3)


@pytest.mark.slow
def test_a_calibrated_swap_is_what_python_writes(tmp_path):
    printed = document("swap demo_vit --func dyt --init calibrated --limit 48 -o calibrated", cwd=tmp_path)
    report = printed["calibration"]
    assert (printed["init"], printed["refit"]) == ("calibrated", "neighbours")
    assert (report["n_learned"], report["n_judged"], report["left"]) == (36, 12, {})
    assert report["after"] < 0.5 * report["before"]
    assert printed["held_out"]["n"] == 48 and printed["held_out"]["p50"] > report["after"]
    assert [row["amplitude"] for row in printed["sites"]] == [None] * 17
    network = normscope.load("demo_vit", limit=48, device="cpu")
    original = copy.deepcopy(network.module)
    normscope.swap(network.module, "dyt", dyt_fits(network))
    ours = normscope.calibrate(original, network.module, network.calibration, outputs=network.outputs)
    theirs = normscope.load_swapped(tmp_path / "calibrated", device="cpu")
    assert report["after"] == pytest.approx(ours.after, rel=1e-2)  # two runs may sum in another order
    for batch in network.inputs:
        torch.testing.assert_close(theirs.module(*batch.args), network.module(*batch.args), rtol=1e-2, atol=5e-2)


def test_a_second_swap_keeps_the_first(tmp_path):
    first = document("swap demo_vit -o last --func rmsnorm --layers final", cwd=tmp_path)
    assert [(site["site"], site["curve"], site["r2"]) for site in first["sites"]] == [("norm", "rmsnorm", None)]
    assert (first["folder"], first["skipped"]) == ("last", [])
    invoke("swap demo_vit -o last --func free --layers 'blocks.0.*' --weights last --limit 8", cwd=tmp_path)
    layers = document("layers demo_vit --weights last --verify", cwd=tmp_path)
    assert layers["sites"][-1]["kind"] == "RMSNorm"
    curves = [site["pointwise"] and site["pointwise"]["curve"] for site in layers["sites"]]
    assert (curves, layers["skipped"]) == (["free"] * 2 + [None] * 15, [])


@pytest.mark.slow
def test_the_most_valuable_norms_are_kept(tmp_path):
    layers = "blocks.0.*,blocks.4.*,norm"
    printed = document(f"swap demo_vit -o kept --keep 2 --limit 16 --layers '{layers}'", cwd=tmp_path)
    network = normscope.load("demo_vit", limit=16, device="cpu")
    modules = normscope.replacements(network, "dyt", dyt_fits(network, layers=layers))
    choice = normscope.keep(network, network.calibration, modules, number=2, held_out=network.inputs)
    assert printed["keep"]["kept"] == choice.kept == [norm.name for norm in read_record(tmp_path / "kept").kept]
    assert [step["swapped"] for step in printed["keep"]["steps"]] == [5, 4, 3]
    assert printed["keep"]["steps"][2]["held_out"]["p50"] == pytest.approx(choice.steps[2].held_out.p50)
    assert [row["site"] for row in printed["sites"]] == choice.swapped
    module = normscope.load_swapped(tmp_path / "kept", device="cpu").module
    assert all(type(module.get_submodule(name)) is torch.nn.LayerNorm for name in choice.kept)
    assert printed["figure"] == "kept-keep.png" and (tmp_path / printed["figure"]).stat().st_size > 10_000


@pytest.mark.slow
def test_the_largest_drift_is_met_after_calibration(tmp_path):
    options = "--init calibrated --refit norms --limit 32 --max-drift 0.03"
    printed = document(f"swap demo_vit -o kept {options}", cwd=tmp_path)
    tried = {step["kept"]: step["worked_on"] for step in printed["keep"]["steps"] if step["worked_on"] is not None}
    kept = len(printed["keep"]["kept"])
    assert tried[kept] <= 0.03 < tried[kept - 1]
    assert printed["calibration"]["after"] == tried[kept]
    network = normscope.load("demo_vit", limit=32, device="cpu")
    held_out = learned_and_held_out(network.inputs)[1] if network.calibration is None else network.inputs
    swapped = normscope.load_swapped(tmp_path / "kept", device="cpu").module
    errors = output_errors(network.module, swapped, list(held_out), network.outputs)
    # Of loops and of float32.
    assert printed["held_out"]["p50"] == pytest.approx(float(errors.quantile(0.5)), rel=1e-3)
