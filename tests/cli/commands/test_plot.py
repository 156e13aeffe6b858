"""``normscope plot`` of one model and of several, which share one more figure."""

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
LIBRARIES = ("timm", "torchvision", "torchaudio", "diffusers", "transformers", "torch._dynamo")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write captures of two networks of one name, which is that of the figure of several."""
    folder, seen = tmp_path_factory.mktemp("captures"), []
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    for weights in ("made weights", "random weights, seed 0"):
        model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(2)))
        about = {"model": "overview", "weights": weights, "data": "noise"}
        seen.append(
            normscope.save_capture(normscope.capture(model, [x], about=about), folder / f"{len(seen)}.safetensors")
        )
    return f"{seen[0]} {seen[1]}"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("model", "needed"), [("demo_vit", []), ("demo_wav2vec2", ["torchaudio"])])
def test_only_needed_libraries_are_imported(model, needed):
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
def test_several_models_share_a_figure_and_run_once(here, runs):
    done = invoke(f"plot demo_vit demo_vit --weights random --limit 2 --layers 0,1,2,3,16 --device cpu {QUICK}")
    names = ["demo_vit-scurves.png", "demo_vit-scurves-2.png", "overview-scurves.png"]
    assert done.stdout.splitlines() == [f"outputs/{name}" for name in names]
    assert runs == ["random weights, seed 0"] * 2
    with Image.open("outputs/overview-scurves.png") as image:
        described = json.loads(image.text["Description"])
        colours = image.convert("L").getcolors()
    assert [about["weights"] for about in described] == ["random weights, seed 0"] * 2
    assert len(colours) > 50  # although no figure of one model shows a density here


def test_figures_of_one_name_do_not_overwrite_each_other(files, here):
    printed = document(f"plot {files} -o out --format svg {QUICK}")
    names = ["overview-scurves.svg", "overview-scurves-2.svg", "overview-scurves-3.svg"]
    assert [figure["file"] for figure in printed["figures"]] == [f"out/{name}" for name in names[:2]]
    assert printed["overview"] == f"out/{names[2]}" and names_in(here / "out") == sorted(names)
    content = (here / printed["overview"]).read_text()
    assert "weights: made weights" in content and "weights: random weights, seed 0" in content
    assert len(printed["figures"][0]["fits"]) == 2


def test_nothing_is_run_where_the_figure_cannot_be_written(files, here):
    (here / "out" / "overview-scurves.png").mkdir(parents=True)
    done = invoke(f"plot {files} -o out {QUICK}", status=2)
    assert "overview-scurves.png: it is a folder" in words(done.stderr)
    assert (done.stdout, names_in(here / "out")) == ("", ["overview-scurves.png"])


def test_a_compact_figure_is_the_only_one_and_has_its_caption_beside(files, here):
    printed = document(f"plot {files} --compact --caption tex --labels none -o all.pdf {QUICK}")
    assert printed["overview"] == "all.pdf" and [figure["file"] for figure in printed["figures"]] == [None, None]
    assert names_in(here) == ["all.pdf", "all.tex"]
    caption = (here / "all.tex").read_text()
    assert caption.startswith(r"\caption{overview: LayerNorm, d = 8") and "Input x of norms, and" in caption
    alone = files.split()[0]
    assert document(f"plot {alone} --compact -o alone {QUICK}")["overview"] == "alone/overview-compact.png"
    assert "no kind of labels 'shrt'" in words(invoke(f"plot {alone} --labels shrt", status=2).stderr)


def test_width_title_and_scale_reach_the_figure(files, here):
    look = "--width 3 --title none --xscale asinh --dpi 100 --color density"
    invoke(f"plot {files.split()[1]} {look} -o drawn.svg -q")
    drawn = (here / "drawn.svg").read_text()
    assert 'width="216pt"' in drawn and "x (asinh scale)" in drawn
    assert ">overview" not in drawn.partition("</metadata>")[2] and "random weights, seed 0" in drawn
