"""Options for running networks: the same in every command, and none that a command would ignore."""

import dataclasses

import pytest
from command_line import document, invoke
from typer.main import get_command

from normscope.cli import app
from normscope.cli.running import RunOptions

CAPTURE_ONLY = {"shuffle", "sample", "device_map", "workers", "verify", "guidance"}
LEFT_OUT = {
    **dict.fromkeys(("plot", "fit", "stats", "gradient", "compare", "report"), CAPTURE_ONLY),
    "capture": set(),
    "layers": {
        *("limit", "shuffle", "batch_size", "workers", "sample", "skip", "seed", "dtype", "guidance", "timesteps")
    },
    "swap": {"sample", "workers", "verify"},
    "swap-bench": {"sample", "workers", "verify"},
    "heal": {"device_map", "dtype", "sample", "workers", "verify", "guidance"},
    "simplify": {*CAPTURE_ONLY, "skip", "dtype", "batch_size", "seed", "timesteps"},
}
OWN_DEFAULTS = {("compare", "weights"), ("heal", "batch_size")}
FIELDS = {field.name: field.default for field in dataclasses.fields(RunOptions)}


@pytest.mark.parametrize("command", LEFT_OUT)
def test_commands_share_options_and_their_defaults(command):
    parameters = {option.name: option for option in get_command(app).commands[command].params}
    assert FIELDS.keys() & parameters.keys() == FIELDS.keys() - LEFT_OUT[command]
    for name in FIELDS.keys() & parameters.keys():
        assert parameters[name].opts[0] == f"--{name.replace('_', '-')}"
        assert parameters[name].default == FIELDS[name] or (command, name) in OWN_DEFAULTS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_results_mention_a_sample_of_tokens(folder):
    captured = document("capture demo_vit --limit 4 --layers 0,16 --sample 3 -o seen.safetensors")
    assert captured["sample"] == "a sample of 3 tokens of each"
    assert [site["n_pairs"] for site in captured["sites"]] == [768, 768]
    assert captured["sample"] in invoke("fit seen.safetensors --func tanh").stdout
    (figure,) = document("plot seen.safetensors --func tanh --color density --format svg")["figures"]
    assert figure["sample"] == captured["sample"]
    lettering = (folder / figure["file"]).read_text()
    assert "pairs of sampled tokens" in lettering and "all pairs" not in lettering


@pytest.mark.usefixtures("folder")
def test_sites_that_a_number_selects_are_reported_once():
    few = "demo_vit --limit 2"
    line = "--layers 3 selects, evenly over the depth: 0 blocks.0.norm1, 7 blocks.3.norm2, 16 norm\n"
    capture = f"capture {few} -o seen.safetensors"
    assert line not in invoke(f"{capture} --layers 3 -q").stderr
    assert "evenly" not in invoke(f"{capture} --layers 2,7").stderr
    assert invoke(f"{capture} --layers 3").stderr.count(line) == 1
    assert invoke("stats seen.safetensors --layers 1").stderr.count("--layers 1 selects") == 1
    assert invoke("swap demo_vit --limit 2 --func identity --sites 3 -o swapped").stderr.count(line) == 1
