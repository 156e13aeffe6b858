"""``normscope merge``: one capture of several runs."""

import numpy as np
import pytest
import torch
from command_line import document, invoke
from PIL import Image

import normscope


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Capture two folders of pictures, and a third with all of them."""
    folder = tmp_path_factory.mktemp("merge")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 8, 8), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        for name in ("first" if i < 2 else "second", "all"):
            (folder / name).mkdir(exist_ok=True)
            Image.fromarray(picture).save(folder / name / f"{i}.png")
    for name in ("first", "second", "all"):
        seen = normscope.capture(normscope.load("demo_vit", data=folder / name), layers=2)
        normscope.save_capture(seen, folder / f"{name}.safetensors")
    return folder


def test_two_runs_equal_one_over_all_inputs(folder):
    printed = document("merge first.safetensors second.safetensors -o both.safetensors", cwd=folder)
    both, whole = (normscope.load_capture(folder / f"{name}.safetensors") for name in ("both", "all"))
    assert printed["merged"] == ["first.safetensors", "second.safetensors"]
    assert (printed["n_samples"], printed["file"]) == (5, "both.safetensors")
    assert printed["data"] == both.about["data"] and " + " in printed["data"]
    assert [site["n_pairs"] for site in printed["sites"]] == [stats.n_pairs for stats in whole.stats.values()]
    for name, stats in whole.stats.items():  # the folds differ: pictures of two folders are numbered in each
        mine, all_at_once = both.stats[name].moments.sum(0), stats.moments.sum(0)
        assert torch.equal(mine[0], all_at_once[0])
        torch.testing.assert_close(mine, all_at_once, rtol=0, atol=1e-12 * float(all_at_once.abs().max()))
    assert document("fit both.safetensors -q", cwd=folder)["fits"][0]["data"] == printed["data"]


def test_remarks_and_quiet(folder):
    merge = "merge first.safetensors second.safetensors -o again.safetensors"
    assert "merged first.safetensors, second.safetensors" in invoke(merge, cwd=folder).stderr
    done = invoke(f"{merge} -q", cwd=folder)
    assert (done.stdout, done.stderr) == ("again.safetensors\n", "")


@pytest.mark.parametrize(
    "command",
    ["merge first.safetensors second.safetensors", "capture demo_vit --limit 2 --layers 1 --device cpu"],
)
def test_only_a_capture_is_replaced_without_force(folder, command):
    code = folder / "network.py"
    code.write_text("x = 1\n")
    refused = invoke(f"{command} -o network.py", status=2, cwd=folder)
    assert "Cannot write network.py: it exists, and is not a capture." in refused.stderr
    assert code.read_text() == "x = 1\n"
    for more in ("--force", ""):  # then it is a capture, which needs no force
        invoke(f"{command} -o network.py {more}", cwd=folder)
        assert normscope.load_capture(code).n_samples > 1
