"""``normscope gradient``, end to end on networks that come with it."""

import csv
import io
import json

import pytest
from PIL import Image
from typer.testing import CliRunner

import normscope
from normscope.cli import app

QUICK = ("--limit", "4", "--device", "cpu", "--dpi", "40")


def gradient(*arguments):
    return CliRunner().invoke(app, ["gradient", *map(str, arguments)])


def test_tables_and_a_figure(here):
    done = gradient("demo_vit", *QUICK, "--layers", "4")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("demo_vit · embedded demo_vit")
    assert lines[-1] == "outputs/demo_vit-gradient.png"
    heads = [line.split() for line in lines if line.startswith("site")]
    assert heads[0][-4:] == ["R²", "tanh′", "R²", "isru′"]
    assert lines[2].count("±") == 2
    assert ": norm, d, tokens, share, least, in tail, ceiling." in " ".join(done.stdout.split())
    assert "over all pairs" in " ".join(done.stdout.split())
    tails = [cells for line in lines if (cells := line.split())[:1] == ["tail"]]
    assert len(tails) == 4 and all(len(tail) in (5, 6) for tail in tails)
    with Image.open("outputs/demo_vit-gradient.png") as image:
        assert json.loads(image.text["Description"])["model"] == "demo_vit"


@pytest.mark.slow
def test_a_capture_file_gives_what_its_network_gave(here):
    made = CliRunner().invoke(
        app, ["capture", "demo_vit", "-o", "seen.safetensors", "--layers", "all", "--diagonal", *QUICK[:4]]
    )
    assert made.exit_code == 0, made.output
    options = ("--layers", "0,16", "--func", "isru", "--json", "--dpi", "40")
    documents = [
        json.loads(done.stdout)
        for done in (
            gradient("demo_vit", *QUICK[:4], *options, "-o", "a.svg"),
            gradient("seen.safetensors", *options, "-o", "b.svg"),
        )
    ]
    assert documents[0]["gradient"] == documents[1]["gradient"]
    views = documents[0]["gradient"]
    assert [view["site"] for view in views] == ["blocks.0.norm1", "norm"]
    assert [figure["file"] for document in documents for figure in document["figures"]] == ["a.svg", "b.svg"]
    # The same from Python.
    seen = normscope.load_capture("seen.safetensors").only("0,16")
    assert [view.as_dict() for view in normscope.gradient(seen, normscope.fit(seen, "isru"))] == views


def test_intervals_have_columns_of_their_own(here):
    done = gradient("demo_vit", *QUICK, "--csv", "--layers", "0,")
    assert done.exit_code == 0, done.output
    [row] = csv.DictReader(io.StringIO(done.stdout))
    assert float(row["r2_tanh_low"]) < float(row["r2_tanh"]) < float(row["r2_tanh_high"])


@pytest.mark.slow
def test_the_timesteps_of_a_diffusion_model_are_kept_apart(here):
    arguments = ("demo_dit", "--limit", "2", "--device", "cpu", "--timesteps", "900,0", "--by", "timestep")
    done = gradient(*arguments, "--layers", "2", "--json", "--dpi", "40", "-o", "out")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [view["n_tokens"] for view in document["gradient"]] == [32] * 4
    names = [f"out/demo_dit-timestep-{step}-gradient.png" for step in (900, 0)]
    assert [figure["file"] for figure in document["figures"]] == names
    assert [figure["part"] for figure in document["figures"]] == ["timestep 900", "timestep 0"]
    assert all((here / name).is_file() for name in names)
