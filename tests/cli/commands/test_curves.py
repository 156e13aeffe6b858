"""``normscope curves``, and ``--plot`` of ``fit`` and ``stats``."""

import json

import pytest
import torch
from command_line import document, invoke
from PIL import Image
from torch import nn

import normscope
from normscope.curves.known import BUILT_IN


def test_every_curve_is_listed_with_its_formula_and_drawn(tmp_path):
    rows = document("curves")["curves"]
    assert [(row["curve"], row["formula"]) for row in rows] == [(curve.name, curve.formula) for curve in BUILT_IN]
    done = invoke(f"curves --func tanh,isru --plot {tmp_path / 'two.png'} --width 5.5", COLUMNS="100")
    assert "u / √(1 + u²)" in done.stdout
    with Image.open(tmp_path / "two.png") as image:
        assert image.width == 1100
        assert json.loads(image.text["Description"]) == {"curves": ["tanh", "isru"]}


@pytest.mark.parametrize("command", ["fit", "stats"])
def test_fit_and_stats_draw_into_one_file(tmp_path, command):
    about = {"model": "net", "weights": "random weights, seed 0", "data": "noise"}
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.randn(40, 8)], about=about)
    file = normscope.save_capture(seen, tmp_path / "seen.safetensors")
    drawn = tmp_path / "drawn.png"
    done = invoke(f"{command} {file} --plot {drawn} --width 5 --title none -q")
    assert str(drawn) in "".join(done.stdout.splitlines())
    with Image.open(drawn) as image:
        assert image.width == 1000
        assert json.loads(image.text["Description"])["weights"] == "random weights, seed 0"
