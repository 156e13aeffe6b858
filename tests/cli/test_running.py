"""The options with which networks are run: the same everywhere, and none that a command would ignore; ``--sample``."""

import dataclasses
import json

import pytest
from command_line import document, invoke
from PIL import Image
from typer.main import get_command

from normscope.cli import app
from normscope.cli.running import RunOptions

OF_CAPTURE = {"shuffle", "sample", "device_map", "workers", "verify"}
LEFT_OUT = {
    **dict.fromkeys(("plot", "fit", "stats", "gradient", "compare", "report"), OF_CAPTURE),
    "capture": set(),
    "layers": {
        *("limit", "shuffle", "batch_size", "workers", "sample", "skip", "seed", "dtype", "guidance", "timesteps")
    },
    "swap": {"sample", "workers", "verify"},
    "swap-bench": {"sample", "workers", "verify"},
    "heal": {"device_map", "dtype", "sample", "workers", "verify"},
    "simplify": {*OF_CAPTURE, "skip", "dtype", "batch_size", "guidance", "timesteps"},
}
OWN_DEFAULTS = {("compare", "weights"), ("heal", "batch_size")}
FIELDS = {field.name: field.default for field in dataclasses.fields(RunOptions)}


@pytest.mark.parametrize("command", LEFT_OUT)
def test_a_command_has_the_options_that_it_follows_and_their_defaults(command):
    parameters = {one.name: one for one in get_command(app).commands[command].params}
    assert FIELDS.keys() & parameters.keys() == FIELDS.keys() - LEFT_OUT[command]
    for name in FIELDS.keys() & parameters.keys():
        assert parameters[name].opts[0] == f"--{name.replace('_', '-')}"
        assert parameters[name].default == FIELDS[name] or (command, name) in OWN_DEFAULTS


SAID = "a sample of 3 tokens of each"
RUN = "demo_vit --limit 4 --layers 0,16 --sample 3"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_figure_and_its_document_say_so(folder):
    invoke(f"capture {RUN} -o seen.safetensors")
    (figure,) = document("plot seen.safetensors --dpi 40")["figures"]
    assert figure["sample"] == SAID
    assert SAID in json.loads(Image.open(folder / figure["file"]).text["Description"])["data"]
    (drawn,) = document("plot seen.safetensors --format svg")["figures"]
    lettering = (folder / drawn["file"]).read_text()
    assert "pairs of sampled tokens" in lettering and "all pairs" not in lettering


def test_a_capture_and_what_is_made_of_it_say_so(folder):
    told = document(f"capture {RUN} -o seen.safetensors")
    assert told["sample"] == SAID
    assert [site["n_pairs"] for site in told["sites"]] == [768, 768]
    assert SAID in invoke("fit seen.safetensors").stdout


@pytest.mark.usefixtures("folder")
def test_which_sites_a_number_took_is_said_once_for_people():
    few = "demo_vit --limit 2"
    line = "--layers 3 selects, evenly over the depth: "
    line += "0 blocks.0.norm1, 7 blocks.3.norm2, 16 norm\n"
    capture = f"capture {few} -o seen.safetensors"
    assert invoke(f"fit {few} --layers 3").stderr.count(line) == 1
    assert line not in invoke(f"{capture} --layers 3 -q").stderr
    assert "evenly" not in invoke(f"{capture} --layers 2,7").stderr
    assert invoke(f"{capture} --layers 3").stderr.count(line) == 1
    assert invoke("stats seen.safetensors --layers 1").stderr.count("--layers 1 selects") == 1
    swap = invoke("swap demo_vit --limit 2 --func identity --sites 3 -o swapped").stderr
    assert swap.count(line) == 1
