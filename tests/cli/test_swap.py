"""``normscope swap`` as a user meets it: real processes, the folder that they write, and what takes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normscope
from normscope.splits import learned_and_held_out
from normscope.swaps.start import asked_for, fitted

CHECKOUT = Path(normscope.__file__).parents[1]


def run(*arguments, cwd):
    clean = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "normscope", *arguments],
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("swap")


@pytest.fixture(scope="module")
def swapped(folder):
    done = run("swap", "demo_vit", "--func", "dyt", "-o", "dyt", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "dyt", done


def test_it_writes_what_the_python_interface_makes(swapped):
    path, done = swapped
    network = normscope.load("demo_vit", device="cpu")
    learned = network.calibration or learned_and_held_out(network.inputs)[0]
    seen = normscope.capture(network.module, learned, by_gamma=True)
    normscope.swap(network.module, "dyt", fitted(seen, asked_for("dyt")))
    mine, theirs = network.module.state_dict(), normscope.load_swapped(path, device="cpu").module.state_dict()
    assert mine.keys() == theirs.keys()
    torch.testing.assert_close(theirs, mine, rtol=1e-6, atol=0)  # two processes may sum in another order
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["site", "norm", "replaced", "by", "A", "α", "s", "R²"]
    assert len(lines) == 2 + 17 + 1
    site, norm, curve, amplitude, alpha, *_ = lines[-2].split()
    assert (site, norm, curve, lines[-1]) == ("norm", "LayerNorm", "tanh", "dyt")
    assert float(alpha) == pytest.approx(float(theirs["norm.alpha"]), rel=1e-3)  # four digits
    gamma = normscope.load("demo_vit", device="cpu").module.norm.weight
    torch.testing.assert_close(theirs["norm.weight"], gamma * float(amplitude), rtol=1e-3, atol=0)
    assert "--weights dyt takes it in every command; in Python, normscope.load_swapped('dyt')" in done.stderr


@pytest.mark.parametrize("command", ["plot", "layers"])
def test_nothing_is_left_to_observe_in_it(command, folder, swapped):
    done = run(command, "demo_vit", "--weights", "dyt", cwd=folder)
    assert done.returncode == 3
    assert "demo_vit: swap dyt (dyt in place of 17 norms, of embedded demo_vit" in done.stderr
    assert "Error: All 17 norms of this VisionTransformer were replaced (tanh), and none is left" in done.stderr
    assert "random" not in done.stderr


def test_some_sites_and_the_rest_is_seen_as_before(folder):
    done = run("swap", "demo_vit", "--func", "rmsnorm", "--sites", "final", "-o", "last", "--json", "-q", cwd=folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(site["site"], site["func"], site["r2"]) for site in document["sites"]] == [("norm", "rmsnorm", None)]
    assert (document["folder"], document["skipped"]) == ("last", [])
    arguments = ("--func", "free", "--sites", "blocks.0.*", "--weights", "last", "-o", "last")
    assert run("swap", "demo_vit", *arguments, cwd=folder).returncode == 0
    done = run("layers", "demo_vit", "--weights", "last", "--verify", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    layers = json.loads(done.stdout)
    assert [site["name"] for site in layers["sites"]][::14] == ["blocks.1.norm1", "norm"]
    assert layers["sites"][-1]["kind"] == "RMSNorm"
    assert {norm["reason"] for norm in layers["skipped"]} == {"a point-wise function (free), no norm"}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--func", "dytt"), 2, "There is no curve 'dytt'. Did you mean 'dyt'"),
        (("--func", "free", "--init", "paper"), 2, "free is what was fitted: there is no paper start of it"),
        (("--func", "best", "--per", "channel"), 2, "--per channel fits one curve in each channel"),
        (("-o", "full"), 2, "Cannot write full: the folder exists, and mine in it would be lost"),
        (("--device", "cuda:99"), 5, "cuda:99"),
        (("--weights", "full"), 3, "'full' are a folder"),
    ],
)
def test_mistakes_are_said_before_anything_is_run(arguments, status, said, folder):
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "mine").touch()
    done = run("swap", "demo_vit", "-o", "new", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "samples" not in done.stderr
    assert not (folder / "new").exists()
