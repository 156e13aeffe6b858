"""``normscope curves``: a table and a figure."""

import json

from command_line import document, invoke
from PIL import Image

from normscope.curves.known import BUILT_IN


def test_every_curve_is_listed_with_its_formula_and_drawn(tmp_path):
    rows = document("curves")["curves"]
    assert [(row["curve"], row["formula"]) for row in rows] == [(curve.name, curve.formula) for curve in BUILT_IN]
    done = invoke(f"curves --func tanh,isru --plot {tmp_path / 'two.png'} --width 5.5", COLUMNS="100")
    assert "u / √(1 + u²)" in done.stdout
    with Image.open(tmp_path / "two.png") as image:
        assert image.width == 1100
        assert json.loads(image.text["Description"]) == {"curves": ["tanh", "isru"]}
