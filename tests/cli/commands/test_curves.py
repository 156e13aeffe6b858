"""``normscope curves``, and the figures that ``fit`` and ``stats`` draw: files that open, and what is refused."""

import json

import pytest
import torch
from command_line import document, invoke
from PIL import Image
from torch import nn

import normscope
from normscope.curves.known import BUILT_IN


@pytest.fixture
def file(tmp_path):
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    about = {"model": "net", "weights": "random weights, seed 0", "data": "noise"}
    return normscope.save_capture(
        normscope.capture(nn.Sequential(nn.LayerNorm(8)), [x], about=about), tmp_path / "seen.safetensors"
    )


def test_every_curve_is_listed_with_its_formula_and_drawn(tmp_path):
    rows = document("curves")["curves"]
    assert [(row["curve"], row["formula"]) for row in rows] == [(curve.name, curve.formula) for curve in BUILT_IN]
    done = invoke(f"curves --func tanh,isru --plot {tmp_path / 'two.png'} --width 5.5", COLUMNS="100")
    assert "u / √(1 + u²)" in done.stdout
    with Image.open(tmp_path / "two.png") as image:
        assert image.width == 1100
        assert json.loads(image.text["Description"]) == {"curves": ["tanh", "isru"]}


@pytest.mark.parametrize("command", ["fit", "stats"])
def test_fit_and_stats_draw_what_they_say_into_one_file(file, tmp_path, command):
    drawn = tmp_path / "drawn.png"
    done = invoke(f"{command} {file} --plot {drawn} --width 5 --title none -q")
    assert str(drawn) in "".join(done.stdout.splitlines())
    with Image.open(drawn) as image:
        assert image.width == 1000
        assert json.loads(image.text["Description"])["weights"] == "random weights, seed 0"


def test_width_title_and_scale_reach_the_figure_of_plot(file, tmp_path):
    look = "--width 3 --title none --xscale asinh --dpi 100 --color density"
    invoke(f"plot {file} {look} -o {tmp_path / 'drawn.svg'} -q")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert 'width="216pt"' in drawn and "x (asinh scale)" in drawn
    assert ">net" not in drawn and "random weights, seed 0" in drawn
