"""``normscope merge`` as a user meets it: the file that it writes, and what takes it."""

import numpy as np
import pytest
import torch
from command_line import document, invoke
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


def test_two_runs_are_one(folder):
    told = document("merge first.safetensors second.safetensors -o both.safetensors", cwd=folder)
    both, whole = (normscope.load_capture(folder / f"{name}.safetensors") for name in ("both", "all"))
    assert told["merged"] == ["first.safetensors", "second.safetensors"]
    assert (told["n_samples"], told["file"]) == (5, "both.safetensors")
    assert told["data"] == both.about["data"] and " + " in told["data"]
    assert [site["n_pairs"] for site in told["sites"]] == [stats.n_pairs for stats in whole.stats.values()]
    for name, stats in whole.stats.items():  # the folds differ: pictures of two folders are numbered in each
        mine, all_at_once = both.stats[name].moments.sum(0), stats.moments.sum(0)
        assert torch.equal(mine[0], all_at_once[0])
        torch.testing.assert_close(mine, all_at_once, rtol=0, atol=1e-12 * float(all_at_once.abs().max()))
    assert document("fit both.safetensors -q", cwd=folder)["fits"][0]["data"] == told["data"]


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
