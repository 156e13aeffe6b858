"""``normscope plot`` of several models: one figure more, of what was captured for the others."""

import json
import subprocess
import sys

import pytest
import torch
from command_line import document, invoke, words
from PIL import Image
from torch import nn

import normscope

QUICK = "--func tanh --color token --dpi 40"


@pytest.fixture
def captures(tmp_path, monkeypatch, request):
    """Two files, of networks of one name; without a parameter, of the overview's own."""
    monkeypatch.chdir(tmp_path)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    for number, weights in enumerate(("made weights", "random weights, seed 0")):
        model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(5)))
        about = {"model": getattr(request, "param", "overview"), "weights": weights, "data": "noise"}
        normscope.save_capture(normscope.capture(model, [x], about=about), f"{number}.safetensors")
    return ["0.safetensors", "1.safetensors"]


def written(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".safetensors")


LIBRARIES = ("timm", "torchvision", "torchaudio", "diffusers", "transformers", "torch._dynamo")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("model", "needed"), [("demo_vit", []), ("demo_wav2vec2", ["torchaudio"])])
def test_only_what_is_needed_is_imported(model, needed):
    script = f"""
import sys
from normscope.cli import app
try:
    app(["plot", {model!r}, *{QUICK.split()!r}, "--layers", "1", "--quiet"])
except SystemExit as done:
    assert not done.code
print([library for library in {LIBRARIES!r} if library in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(needed)


@pytest.mark.slow
def test_several_models_share_a_figure_and_none_is_run_twice(here, runs):
    done = invoke(f"plot demo_vit demo_vit --weights random --limit 2 --layers 0,1,2,3,16 --device cpu {QUICK}")
    names = ["demo_vit-scurves.png", "demo_vit-scurves-2.png", "overview-scurves.png"]
    assert done.stdout.splitlines() == [f"outputs/{name}" for name in names]
    assert runs == ["random weights, seed 0"] * 2
    with Image.open("outputs/overview-scurves.png") as image:
        described = json.loads(image.text["Description"])
        colours = image.convert("L").getcolors()
    assert [about["weights"] for about in described] == ["random weights, seed 0"] * 2
    assert len(colours) > 50  # although no figure of one model shows a density here


def test_the_document_names_the_overview_which_takes_nobodys_place(captures, tmp_path):
    told = document(f"plot {' '.join(captures)} -o out --format svg {QUICK}")
    files = [figure["file"] for figure in told["figures"]]
    assert files == ["out/overview-scurves.svg", "out/overview-scurves-2.svg"]
    assert told["overview"] == "out/overview-scurves-3.svg"
    assert written(tmp_path / "out") == ["overview-scurves-2.svg", "overview-scurves-3.svg", "overview-scurves.svg"]
    content = (tmp_path / told["overview"]).read_text()
    assert "weights: made weights" in content and "weights: random weights, seed 0" in content
    assert len(told["figures"][0]["fits"]) == 4
    assert document(f"plot {captures[0]} -o alone {QUICK}")["overview"] is None
    assert written(tmp_path / "alone") == ["overview-scurves.png"]


@pytest.mark.parametrize("captures", ["network"], indirect=True)
def test_where_it_cannot_be_written_nothing_is_run(captures, tmp_path):
    (tmp_path / "out" / "overview-scurves.png").mkdir(parents=True)
    done = invoke(f"plot {' '.join(captures)} -o out {QUICK}", status=2)
    assert "overview-scurves.png: it is a folder" in words(done.stderr)
    assert (done.stdout, written(tmp_path / "out")) == ("", ["overview-scurves.png"])


def test_a_compact_figure_is_the_only_one_with_its_caption_beside(captures, tmp_path):
    told = document(f"plot {' '.join(captures)} --compact --caption tex --labels none -o all.pdf {QUICK}")
    assert told["overview"] == "all.pdf" and [figure["file"] for figure in told["figures"]] == [None, None]
    assert written(tmp_path) == ["all.pdf", "all.tex"]
    assert (tmp_path / "all.tex").read_text().startswith(r"\caption{Input x of norms, and")
    assert document(f"plot {captures[0]} --compact -o alone {QUICK}")["overview"] == "alone/overview-compact.png"
    assert "no kind of labels 'shrt'" in words(invoke(f"plot {captures[0]} --labels shrt", status=2).stderr)
