"""``normscope plot`` of several models: one figure more, of what was captured for the others."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import normscope
from normscope.cli import app

QUICK = ("--func", "tanh", "--color", "token", "--dpi", "40")


def plot(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


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
@pytest.mark.parametrize(
    ("model", "needed"), [("demo_vit", []), ("demo_wav2vec2", ["torchaudio"]), ("0.safetensors", [])]
)
def test_only_what_is_needed_is_imported(captures, model, needed):
    script = f"""
import sys
from normscope.cli import app
try:
    app(["plot", {model!r}, *{QUICK!r}, "--layers", "1", "--quiet"])
except SystemExit as done:
    assert not done.code
print([library for library in {LIBRARIES!r} if library in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(needed)


@pytest.mark.slow
def test_several_models_share_a_figure_and_none_is_run_twice(tmp_path, monkeypatch, runs):
    monkeypatch.chdir(tmp_path)
    options = ("--weights", "random", "--limit", "2", "--layers", "0,1,2,3,16", "--device", "cpu", *QUICK)
    done = plot("demo_vit", "demo_vit", *options)
    assert done.exit_code == 0, done.output
    names = ["demo_vit-scurves.png", "demo_vit-scurves-2.png", "overview-scurves.png"]
    assert done.stdout.splitlines() == [f"outputs/{name}" for name in names]
    assert runs == ["random weights, seed 0"] * 2
    with Image.open("outputs/overview-scurves.png") as image:
        described = json.loads(image.text["Description"])
        colours = image.convert("L").getcolors()
    assert [about["weights"] for about in described] == ["random weights, seed 0"] * 2
    assert len(colours) > 50  # although no figure of one model shows a density here


def test_the_document_names_the_overview_which_takes_nobodys_place(captures, tmp_path):
    done = plot(*captures, "--json", "-o", tmp_path / "out", "--format", "svg", *QUICK)
    document = json.loads(done.stdout)
    out = tmp_path / "out"
    files = [figure["file"] for figure in document["figures"]]
    assert files == [str(out / "overview-scurves.svg"), str(out / "overview-scurves-2.svg")]
    assert document["overview"] == str(out / "overview-scurves-3.svg")
    assert written(out) == ["overview-scurves-2.svg", "overview-scurves-3.svg", "overview-scurves.svg"]
    content = (out / "overview-scurves-3.svg").read_text()
    assert "weights: made weights" in content and "weights: random weights, seed 0" in content
    assert len(document["figures"][0]["fits"]) == 4


def test_one_model_has_no_overview(captures, tmp_path):
    done = plot(captures[0], "--json", "-o", tmp_path / "out", *QUICK)
    document = json.loads(done.stdout)
    assert document["overview"] is None
    assert written(tmp_path / "out") == ["overview-scurves.png"]


@pytest.mark.slow
def test_it_is_drawn_in_the_style_that_was_asked_for(captures, tmp_path):
    for style in ("light", "dark"):
        plot(*captures, "--style", style, "-o", tmp_path / style, *QUICK)
    corners = []
    for style in ("light", "dark"):
        with Image.open(tmp_path / style / "overview-scurves-3.png") as image:
            corners.append(image.convert("RGB").getpixel((0, 0)))
    assert corners == [(0xFF, 0xFF, 0xFF), (0x14, 0x17, 0x1C)]


@pytest.mark.parametrize("captures", ["network"], indirect=True)
def test_where_it_cannot_be_written_nothing_is_run(captures, tmp_path):
    (tmp_path / "out" / "overview-scurves.png").mkdir(parents=True)
    done = plot(*captures, "-o", tmp_path / "out", *QUICK)
    assert done.exit_code == 2
    assert "overview-scurves.png: it is a folder" in " ".join(done.stderr.split())
    assert (done.stdout, written(tmp_path / "out")) == ("", ["overview-scurves.png"])


@pytest.mark.parametrize("command", [pytest.param("plot", marks=pytest.mark.slow), "compare"])
def test_a_figure_is_as_wide_as_asked(captures, tmp_path, command):
    look = ("--func", "tanh", "--dpi", "40", "--width", "3.25", "--title", "none", "-o", tmp_path)
    shared = ("--share-axes",) if command == "plot" else ()
    done = CliRunner().invoke(app, [command, *captures, *map(str, look), *shared])
    assert done.exit_code == 0, done.output
    figures = [path for path in tmp_path.iterdir() if path.suffix == ".png"]
    assert figures
    for path in figures:
        with Image.open(path) as image:
            assert image.width == 130
