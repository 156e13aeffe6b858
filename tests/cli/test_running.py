"""The options with which networks are run: the same everywhere, and none that a command would ignore; ``--sample``."""

import dataclasses
import inspect
import json
from types import SimpleNamespace

import pytest
import typer
from command_line import document, invoke
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from typer.main import get_command

from normscope.cli import app
from normscope.cli.options import declared
from normscope.cli.running import RunOptions, check_sources, family_of
from normscope.errors import UsageError

LEFT_OUT = {
    **{command: {"verify"} for command in ("plot", "fit", "stats", "gradient", "compare", "report")},
    "capture": set(),
    "layers": {"limit", "shuffle", "batch_size", "workers", "sample", "seed", "dtype", "guidance", "timesteps"},
    "swap": {"sample", "device_map", "verify"},
    "swap-bench": {"sample", "device_map", "verify"},
    "heal": {"device_map", "dtype", "sample", "verify"},
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


@pytest.fixture
def called():
    """A command with all options for running but --sample, and the arguments that it was called with."""
    calls, program = [], typer.Typer()

    @program.command()
    @declared(without=("sample",))
    def command(model: str, *, run: RunOptions, quiet: bool = False) -> None:
        """Say so."""
        calls.append((model, run, quiet))

    return command, lambda *line: get_command(program)([*line], standalone_mode=False), calls


def test_what_is_given_reaches_the_run_and_the_rest_is_as_it_was(called):
    command, typed, calls = called
    command("demo_vit", limit=3, verify=True, quiet=True)
    typed("demo_vit", "--limit", "3", "--verify", "--quiet")
    assert calls == [("demo_vit", RunOptions(limit=3, verify=True), True)] * 2
    assert "sample" not in inspect.signature(command).parameters
    with pytest.raises(TypeError, match="sample"):
        command("demo_vit", sample=3)


def test_a_batch_size_is_a_number_or_auto(called):
    _, typed, calls = called
    for given in ((), ("--batch-size", "3"), ("--batch-size", "auto")):
        typed("demo_vit", *given)
    assert [run.batch_size for _, run, _ in calls] == [8, 3, "auto"]
    for wrong in ("0", "-1", "large", "1.5", str(2**63)):
        with pytest.raises(typer.BadParameter):
            typed("demo_vit", "--batch-size", wrong)


def test_options_that_only_a_network_can_follow_are_named_for_a_file(tmp_path):
    file = tmp_path / "seen.safetensors"
    file.touch()
    check_sources([str(file)], RunOptions())
    with pytest.raises(UsageError, match=r"--batch-size, --verify can have no effect"):
        check_sources([str(file)], RunOptions(batch_size=2, verify=True))


@pytest.mark.parametrize(
    ("about", "family"),
    [
        ({"model": "transformers:owner/name", "family": "speech"}, "speech"),
        ({"model": "transformers:owner/name"}, "language"),  # captured when transformers' networks all read text
        ({"model": "timm:test_vit"}, "vision"),
        ({"model": "MyNetwork"}, None),
    ],
)
def test_a_capture_says_its_family_where_the_name_does_not(about, family):
    assert family_of(SimpleNamespace(about=about)) == family


SAID = "a sample of 3 tokens of each"
RUN = "demo_vit --limit 4 --layers 0,16 --sample 3"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_figure_and_its_document_say_so(folder):
    (figure,) = document(f"plot {RUN} --dpi 40")["figures"]
    assert figure["sample"] == SAID
    assert SAID in json.loads(Image.open(folder / figure["file"]).text["Description"])["data"]
    (drawn,) = document(f"plot {RUN} --format svg")["figures"]
    lettering = (folder / drawn["file"]).read_text()
    assert "pairs of the sampled tokens" in lettering and "all pairs" not in lettering


def test_a_capture_its_raw_pairs_and_what_is_made_of_it_say_so(folder):
    told = document(f"capture {RUN} -o seen.safetensors --raw")
    assert told["sample"] == SAID
    assert [site["n_pairs"] for site in told["sites"]] == [768, 768]
    for file in (folder / "seen-raw").iterdir():
        assert load_file(file)["x"].shape == (12, 64)
        with safe_open(file, "pt") as raw:
            assert SAID in raw.metadata()["data"]
    assert SAID in invoke("fit seen.safetensors").stdout


@pytest.mark.usefixtures("folder")
def test_which_sites_a_number_took_is_said_once_for_people():
    few = "demo_vit --limit 2 --sample 3"
    line = "--layers 3 selects, evenly over the depth: "
    line += "2 blocks.1.norm1, 7 blocks.3.norm2, 16 norm\n"
    capture = f"capture {few} -o seen.safetensors"
    assert invoke(f"fit {few} --layers 3").stderr.count(line) == 1
    assert line not in invoke(f"{capture} --layers 3 -q").stderr
    assert "evenly" not in invoke(f"{capture} --layers 2,7").stderr
    assert invoke(f"{capture} --layers 3").stderr.count(line) == 1
    assert invoke("stats seen.safetensors --layers 1").stderr.count("--layers 1 selects") == 1
    swap = invoke("swap demo_vit --limit 2 --func identity --sites 3 -o swapped").stderr
    assert swap.count(line) == 1
