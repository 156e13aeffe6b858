"""``normscope gradient`` of embedded networks."""

import json

import pytest
from command_line import document, invoke, words
from PIL import Image

import normscope

QUICK = "--limit 4 --device cpu"


def test_tables_and_a_figure(here):
    done = invoke(f"gradient demo_vit {QUICK} --layers 2", COLUMNS="60")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("demo_vit · embedded demo_vit")
    assert lines[-1] == "outputs/demo_vit-gradient.png"
    heads = [line.split() for line in lines if line.startswith("site")]
    assert heads[0][-4:] == ["R²", "tanh′", "R²", "isru′"]
    assert lines[2].count("±") == 2
    assert ": norm, d, tokens, share, least, in tail." in words(done.stdout)
    assert "over all pairs" in words(done.stdout)
    tails = [cells for line in lines if (cells := line.split())[:1] == ["tail"]]
    assert len(tails) == 2 and all(len(tail) in (5, 6) for tail in tails)
    with Image.open("outputs/demo_vit-gradient.png") as image:
        assert json.loads(image.text["Description"])["model"] == "demo_vit"


@pytest.mark.slow
def test_a_capture_gives_the_result_of_its_network_and_of_python(here):
    invoke(f"capture demo_vit -o seen.safetensors --diagonal {QUICK}")
    options = "--layers 0,16 --func isru"
    live = document(f"gradient demo_vit {QUICK} {options} -o a.svg")
    printed = document(f"gradient seen.safetensors {options} -o b.svg")
    assert live["gradient"] == printed["gradient"]
    assert [figure["file"] for result in (live, printed) for figure in result["figures"]] == ["a.svg", "b.svg"]
    seen = normscope.load_capture("seen.safetensors").only("0,16")
    views = [view.as_dict() for view in normscope.gradient(seen, normscope.fit(seen, "isru"))]
    assert views == printed["gradient"] and [view["site"] for view in views] == ["blocks.0.norm1", "norm"]
