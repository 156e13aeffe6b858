"""``--sample N``: every output says that not all tokens were taken."""

import json

import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from normscope.cli import app

SAID = "a sample of 3 tokens of each"
RUN = ("demo_vit", "--limit", "4", "--layers", "0,16", "--sample", "3")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.stderr
        return done

    return run


def test_a_table_and_its_document_say_so(run):
    assert SAID in run("fit", *RUN).stdout.splitlines()[0]
    document = json.loads(run("fit", *RUN, "--json").stdout)
    assert all(SAID in fit["data"] and fit["n_pairs"] == 4 * 3 * 64 for fit in document["fits"])


def test_a_figure_and_its_document_say_so(run, tmp_path):
    (figure,) = json.loads(run("plot", *RUN, "--json", "--dpi", "40").stdout)["figures"]
    assert figure["sample"] == SAID
    assert SAID in json.loads(Image.open(tmp_path / figure["file"]).text["Description"])["data"]
    (drawn,) = json.loads(run("plot", *RUN, "--json", "--format", "svg").stdout)["figures"]
    lettering = (tmp_path / drawn["file"]).read_text()
    assert "pairs of the sampled tokens" in lettering and "all pairs" not in lettering


def test_a_capture_its_raw_pairs_and_what_is_made_of_it_say_so(run, tmp_path):
    document = json.loads(run("capture", *RUN, "-o", "seen.safetensors", "--raw", "--json").stdout)
    assert document["sample"] == SAID
    assert [site["n_pairs"] for site in document["sites"]] == [768, 768]
    for file in (tmp_path / "seen-raw").iterdir():
        assert load_file(file)["x"].shape == (12, 64)
        with safe_open(file, "pt") as raw:
            assert SAID in raw.metadata()["data"]
    assert SAID in run("fit", "seen.safetensors").stdout
