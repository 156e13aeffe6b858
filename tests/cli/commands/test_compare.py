"""``normscope compare``: tables and one figure of several captures, or of a model's checkpoints."""

import json

import pytest
import torch
from command_line import document, invoke, words
from PIL import Image
from torch import nn

import normscope


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Captures of one network: of an input, of twice the input, and with one more norm; and of another network."""
    folder = tmp_path_factory.mktemp("captures")
    x = torch.randn(24, 6, 8, generator=torch.Generator().manual_seed(0))
    for number, names in enumerate((["a", "b"], ["a", "b"], ["a", "b", "c"], ["d", "e"])):
        model = nn.Sequential()
        for name in names:
            model.add_module(name, nn.LayerNorm(8, eps=1e-12))
        model.forward = lambda x, model=model, scale=number + 1: [norm(scale * x) for norm in model.children()]
        about = {"model": "net", "weights": f"step {number}", "data": "noise"}
        normscope.save_capture(normscope.capture(model, [x], about=about), folder / f"{number}.safetensors")
    return [folder / f"{number}.safetensors" for number in range(4)]


@pytest.mark.usefixtures("here")
def test_the_document_has_every_row(files):
    printed = document(f"compare {' '.join(map(str, files[:3]))} --func tanh -o out")
    assert printed["figure"] == "out/comparison.png"
    keys = ("capture", "weights", "samples", "seed")
    compared = [tuple(capture[key] for key in keys) for capture in printed["compared"]]
    assert compared == [(1, "step 0", 24, 0), (2, "step 1", 24, 0), (3, "step 2", 24, 0)]
    assert [(row["site"], row["capture"]) for row in printed["sites"]] == [(s, n) for s in "ab" for n in (1, 2, 3)]
    # 1e-4: a third is no power of two, and puts pairs into other bins.
    assert [row["alpha_ratio"] for row in printed["sites"][1:3]] == pytest.approx([1 / 2, 1 / 3], rel=1e-4)
    assert printed["unmatched"] == [{"capture": 3, "site": "c", "lacking_in": 1}] and printed["skipped"] == []
    with Image.open(printed["figure"]) as image:
        assert [about["weights"] for about in json.loads(image.text["Description"])] == ["step 0", "step 1", "step 2"]


@pytest.mark.usefixtures("here")
def test_the_table_reports_matched_sites(files):
    done = invoke(f"compare {files[0]} {files[2]} --func tanh -o one.svg", COLUMNS="60")
    text = words(done.stdout)
    assert "1 net · step 0 · noise (24 samples)" in text
    assert "2 sites matched by name; without a counterpart: 0 of 1, 1 of 2" in text
    left_out = text.partition("Left out at a width of 60")[2]
    assert "0.333" in text or "all columns take" in left_out
    assert "of the same inputs, each fold is left out of both" in text
    assert done.stdout.splitlines()[-1] == "one.svg"


def test_weights_are_repeated_for_checkpoints(here, runs):
    weights = "--weights pretrained --weights random"
    printed = document(f"compare demo_vit {weights} --limit 3 --layers 1 --device cpu --func tanh")
    assert len(runs) == 2 and runs[0] != runs[1] == "random weights, seed 0"
    assert [capture["weights"] for capture in printed["compared"]] == runs
    assert {row["paired"] for row in printed["sites"] if row["capture"] == 2} == {True}
    assert (here / "outputs" / "comparison.png").is_file()


@pytest.mark.usefixtures("here")
def test_networks_without_common_names_are_matched_by_depth(files):
    done = invoke(f"compare {files[0]} {files[3]} --func tanh")
    assert "matched by placement and relative depth" in words(done.stdout)
