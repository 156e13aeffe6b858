"""``normscope merge`` as a user meets it: the file that it writes, and what takes it."""

import csv
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import normscope


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Capture two folders of pictures, a third that holds both, and the second with weights rounded to bfloat16."""
    folder = tmp_path_factory.mktemp("merge")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 8, 8), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        for name in ("first" if i < 2 else "second", "all"):
            (folder / name).mkdir(exist_ok=True)
            Image.fromarray(picture).save(folder / name / f"{i}.png")
    for name in ("first", "second", "all", "rounded"):
        data, dtype = ("second", "bf16") if name == "rounded" else (name, "fp32")
        network = normscope.load("demo_vit", data=folder / data, dtype=dtype)
        seen = normscope.capture(network.module, network.inputs, layers=2, about=network.about)
        normscope.save_capture(seen, folder / f"{name}.safetensors")
    return folder


@pytest.mark.slow
def test_two_runs_are_one(run, run_here, folder):
    done = run("merge", "first.safetensors", "second.safetensors", "-o", "both.safetensors", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    both, whole = (normscope.load_capture(folder / f"{name}.safetensors") for name in ("both", "all"))
    assert document["merged"] == ["first.safetensors", "second.safetensors"]
    assert (document["n_samples"], document["file"]) == (5, "both.safetensors")
    assert document["data"] == both.about["data"] and " + " in document["data"]
    assert [site["n_pairs"] for site in document["sites"]] == [stats.n_pairs for stats in whole.stats.values()]
    for name, stats in whole.stats.items():  # the folds differ: pictures of two folders are numbered in each
        mine, all_at_once = both.stats[name].moments.sum(0), stats.moments.sum(0)
        assert torch.equal(mine[0], all_at_once[0])
        torch.testing.assert_close(mine, all_at_once, rtol=0, atol=1e-12 * float(all_at_once.abs().max()))
    assert "merged first.safetensors, second.safetensors" in done.stderr
    fitted = run_here("fit", "both.safetensors", "--json", "-q", cwd=folder)
    assert fitted.returncode == 0 and json.loads(fitted.stdout)["fits"][0]["data"] == document["data"]


def test_rows_and_quiet(run_here, folder):
    done = run_here(
        "merge", "first.safetensors", "second.safetensors", "-o", "rows.safetensors", "--csv", "-q", cwd=folder
    )
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert len(rows) == 2 and rows[0]["file"] == "rows.safetensors" and int(rows[0]["n_pairs"]) > 0
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [("merge", "first.safetensors", "second.safetensors"), ("capture", "demo_vit")])
def test_only_a_capture_is_replaced_without_force(run_here, folder, arguments):
    code = folder / "network.py"
    code.write_text("x = 1\n")
    options = ("--limit", "2", "--layers", "1", "--device", "cpu") if arguments[0] == "capture" else ()
    refused = run_here(*arguments, *options, "-o", code.name, cwd=folder)
    assert (refused.returncode, code.read_text()) == (2, "x = 1\n")
    assert "Cannot write network.py: it exists, and is not a capture." in refused.stderr
    for more in (["--force"], []):  # then it is a capture, which needs no force
        done = run_here(*arguments, *options, "-o", code.name, *more, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert normscope.load_capture(code).n_samples > 1
