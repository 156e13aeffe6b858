"""The command line: help, output and exit status; in a process of its own where imports, pipes or signals matter."""

import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from command_line import document, invoke, words
from typer.main import get_command
from typer.testing import CliRunner

import normscope
from normscope.cli import app
from normscope.cli.options import PANELS
from normscope.errors import ModelError

CHECKOUT = Path(normscope.__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def captured(folder):
    invoke("capture demo_vit -o seen.safetensors --layers 0,16 --limit 9", cwd=folder)


def test_help_is_fast_and_imports_nothing_heavy(run, folder):
    code = (
        "import sys; from normscope.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    done = run("plot", "--help", cwd=folder, command=(sys.executable, "-c", code))
    assert done.stderr.strip() == "[]"
    assert re.search(r"Examples:\s+normscope plot\s+normscope plot vit_b16", done.stdout)


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_help_leaves_descriptions_half_the_width(command):
    done = invoke(f"{command} -h", COLUMNS="80")
    panels = re.findall(r"^╭─ (\w+) ─", done.stdout, flags=re.MULTILINE)
    assert panels == [name for name in ("Arguments", *PANELS) if name in panels]
    for types in ("<", "INTEGER", "x>=", "range", "Options"):
        assert types not in done.stdout.replace("ranges", "").partition("╭")[2]
    for line in done.stdout.splitlines():
        if re.match(r"│[ *]+-", line):
            *_, description = re.split(r"\s{2,}", line.strip("│ "))
            assert line.index(description) <= 41, line


def option_names(command, *, listed=True):
    context = typer.Context(get_command(app).commands[command])
    options = [param for param in context.command.get_params(context) if param.param_type_name == "option"]
    return {param.name for param in options if not (listed and param.hidden)} - {"help"}


def test_help_is_short_and_hidden_options_are_listed_by_another_command():
    commands = [command.name for command in app.registered_commands]
    listed = {command: option_names(command) for command in commands}
    declared = {command: option_names(command, listed=False) for command in commands}
    assert sum(map(len, listed.values())) <= 230
    assert sum(map(len, declared.values())) <= 280
    elsewhere = listed["capture"] | listed["plot"] | {"guidance", "timesteps", "by"}
    assert all(declared[command] - listed[command] <= elsewhere for command in commands)


def test_options_of_diffusion_models_are_listed_after_the_name_of_one():
    for command in ("plot demo_dit", "capture diffusers:owner/name", "swap dit_xl"):
        assert "─ Diffusion ─" in invoke(f"{command} -h").stdout
    assert "timesteps" not in invoke("plot demo_vit -h").stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("normscope swap", ["swap-bench", "swap"]),
        ("normscope plot mini", ["minilm"]),
        ("normscope swap demo_", ["demo_vit", "demo_wav2vec2", "demo_dit"]),
    ],
)
def test_shells_complete_commands_and_models(typed, completed):
    words = {"_NORMSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = CliRunner(env=words).invoke(app, prog_name="normscope")
    assert done.stdout.split() == completed


def test_model_names_are_checked_and_announced_before_torch_is_imported(run, folder):
    (folder / "torch.py").write_text("raise SystemExit(77)")
    path = {"PYTHONPATH": f"{folder}:{CHECKOUT}"}
    done = run("fit", "seen.safetensors", "demo_vitt", cwd=folder, **path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "Error: There is no model 'demo_vitt'. Did you mean 'demo_vit' or 'demo_dit'?\n"
    done = run("fit", "demo_vit", cwd=folder, **path)
    assert (done.returncode, done.stderr) == (77, "loading demo_vit …\n")
    (folder / "torch.py").unlink()


@pytest.mark.slow
def test_plot_without_a_model_draws_the_embedded_ones(folder):
    done = invoke("plot", cwd=folder)
    names = ("demo_vit", "demo_wav2vec2", "demo_dit", "overview")
    assert done.stdout.splitlines() == [f"outputs/{name}-scurves.png" for name in names]
    assert "no model named: taking what is embedded, demo_vit, demo_wav2vec2, demo_dit" in done.stderr


@pytest.mark.slow
def test_timesteps_are_captured_separately(folder):
    capture = "capture demo_dit --timesteps 980,20 --guidance 1 --limit 3 --layers 2"
    names = ["timestep 980", "timestep 20"]
    assert document(f"{capture} --by timestep -o dit.safetensors", cwd=folder)["parts"] == names
    fits = document("fit dit.safetensors --by timestep", cwd=folder)["fits"]
    parts = [normscope.load_capture(folder / "dit.safetensors").parts[part] for part in names]
    assert [row["alpha"] for row in fits] == [fit.alpha for part in parts for fit in normscope.fit(part)]
    assert fits[0]["data"].endswith("timesteps 980, 20 · timestep 980")
    drawn = invoke("plot dit.safetensors --by timestep --color token -o dit", cwd=folder)
    files = ["demo_dit-timestep-980-scurves.png", "demo_dit-timestep-20-scurves.png", "overview-scurves.png"]
    assert drawn.stdout.splitlines() == [f"dit/{file}" for file in files]
    assert document(f"{capture} -o whole.safetensors", cwd=folder)["parts"] == []
    refused = words(invoke("fit whole.safetensors --by timestep", status=2, cwd=folder).stderr)
    assert "whole.safetensors keeps no timesteps apart" in refused and "--by timestep -o whole.safetensors" in refused


def test_json_is_one_document_on_stdout(folder):
    done = invoke("fit demo_vit --func dyisru --layers 2 --json -o fits.json", cwd=folder)
    printed = json.loads(done.stdout)
    assert json.loads((folder / "fits.json").read_text()) == printed and printed["skipped"] == []
    assert [(fit["site"], fit["curve"]) for fit in printed["fits"]] == [("blocks.0.norm1", "isru"), ("norm", "isru")]
    assert printed["fits"][0]["folds"] == "source"
    assert "64 held-out digits" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("captured")
def test_commands_read_captures_in_place_of_models(folder):
    live = document("fit demo_vit --layers 0,16 --limit 9", cwd=folder)
    assert document("fit seen.safetensors", cwd=folder)["fits"] == live["fits"]
    figure = document("plot seen.safetensors --layers norm -o one.svg", cwd=folder)["figures"][0]
    assert (figure["file"], figure["sites"]) == ("one.svg", ["norm"])
    assert (folder / "one.svg").read_text().startswith("<?xml")


def test_layers_as_json_and_as_a_table(folder):
    done = invoke("layers demo_vit --json --verify", cwd=folder)
    printed = json.loads(done.stdout)
    assert list(printed) == ["model", "sites", "skipped"]
    assert printed["sites"][-1] == {
        **{"index": 16, "name": "norm", "kind": "LayerNorm", "normalized_shape": [64], "channel_axis": -1},
        **{"eps": 1e-6, "affine": True, "placement": "final", "calls": 1, "pointwise": None},
    }
    assert "the true output of all 17 norms was reproduced" in done.stderr


@pytest.mark.slow
def test_every_command_reports_norms_that_it_does_not_know(folder):
    factories = Path(__file__).with_name("factories.py")
    for command in ("layers", "fit", "stats", "plot --dpi 40", "capture -o mixed.safetensors"):
        done = invoke(f"{command} py:{factories}:known_and_unknown --json", cwd=folder)
        assert "skipped 1 (OddNorm): no form that is known reproduces its output" in done.stderr
        assert {"name": "1", "kind": "OddNorm"}.items() <= json.loads(done.stdout)["skipped"][0].items()
    none = words(invoke(f"fit py:{factories}:unknown", status=3, cwd=folder).stderr)
    assert "calls no normalization layer that normscope knows. Skipped: 0 (OddNorm)" in none


@pytest.mark.slow
def test_random_weights_are_reported_even_when_quiet(folder):
    done = invoke("fit demo_vit --weights random --seed 3 --layers 1 -q", cwd=folder)
    assert "random weights, seed 3" in done.stderr and "random weights, seed 3" in done.stdout
    drawn = invoke("plot demo_vit --weights random -o r.svg -q", cwd=folder)
    assert drawn.stdout == "r.svg\n" and "random weights, seed 0" in drawn.stderr
    assert "weights: random weights, seed 0" in (folder / "r.svg").read_text()


@pytest.mark.usefixtures("captured")
def test_pipes_get_no_colour_and_no_progress(folder):
    done = invoke("fit seen.safetensors", cwd=folder)
    assert "\x1b" not in done.stdout + done.stderr
    assert "blocks.0.norm1  tanh" in done.stdout
    done = invoke("fit seen.safetensors", cwd=folder, FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[3" not in done.stdout + done.stderr


def test_the_version_names_what_a_bug_report_needs():
    lines = invoke("--version").stdout.splitlines()
    assert lines[0] == f"normscope {normscope.__version__}"
    assert lines[1].startswith(f"Python {platform.python_version()}, ")
    assert f"torch {version('torch')}, " in lines[2]
    assert lines[3].startswith("Devices: cpu")


@pytest.mark.parametrize("debug", ["", "0", "1"])
def test_a_traceback_is_printed_on_request_only(debug):
    result = invoke("plot no_such_model", status=ModelError.exit_status, NORMSCOPE_DEBUG=debug)
    assert ("Traceback" in result.stderr) == (debug == "1")
    assert "Error: There is no model 'no_such_model'" in result.stderr


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_reported_with_remedies(run, folder):
    done = run("plot", "vit_b16", "--layers", "4", cwd=folder, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(folder))
    assert (done.returncode, done.stdout) == (3, "")
    for way in ("--weights FILE", "--weights random", "normscope plot demo_vit"):
        assert way in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_interruption_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "normscope", "fit", "timm:vit_small_patch16_224", "--weights", "random"),
            *("-o", "fits.csv", "--layers", "1", "--batch-size", "1"),
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "loading" in process.stderr.readline()
    assert "random weights" in process.stderr.readline()  # the network is there, and runs
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, rest
    assert "Interrupted" in rest and "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["models", "--json"]], ids=" ".join)
def test_a_closed_pipe_ends_quietly(run, folder, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(*arguments, cwd=folder, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.usefixtures("uncovered")  # coverage writes a file of its own, for which there is no room either
def test_a_full_disk_behind_stdout_is_reported(run, folder):
    def leave_no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    with (folder / "full.txt").open("w") as full:
        done = run("models", cwd=folder, stdout=full, before=leave_no_room, PYTHONDONTWRITEBYTECODE="1")
    assert (done.returncode, done.stderr) == (2, "Error: Cannot write to standard output: File too large.\n")


def test_an_encoding_without_greek_letters_ends_no_command(run, folder):
    done = run("fit", "--help", cwd=folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and "\\u03b1" in done.stdout
    printed = CliRunner(charset="ascii").invoke(app, ["curves", "--json"]).stdout
    assert printed.isascii() and json.loads(printed) == document("curves")
