"""Commands under torchrun, in real processes on loopback: what one process gives, from whatever number of them.

This file is also the program of two of them: a process takes seconds to start, and so runs one command after the other.
"""

import contextlib
import csv
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import normscope
from normscope.cli import app

sys.path.append(str(Path(__file__).parents[1]))  # where torchrun runs this file
from command_line import invoke
from runs import differences, write_images

pytestmark = pytest.mark.slow

CHECKOUT = Path(normscope.__file__).parents[1]
DIGITS = "--data images --batch-size 4"
# Command lines by name; FILE stands for a file of the rank's own, and SHARED for one of all ranks.
COMMANDS = {
    "vit": f"capture demo_vit {DIGITS} --layers 4 -o SHARED.safetensors",
    "dit": "capture demo_dit --limit 3 --timesteps 3 --layers 3 --per-channel --by timestep -o SHARED.safetensors",
    "two": "fit demo_vit demo_dit --limit 3 --layers 2 --func tanh --json",
    "table": f"fit demo_vit {DIGITS} --layers 2 --func tanh --output FILE.csv",
    "plot": f"plot demo_vit {DIGITS} --layers 2 --func tanh --output FILE.png",
    "one": "capture demo_vit --data images/0/00000.png --layers 1 --resume -o SHARED.safetensors",
    "no such layer": "capture demo_vit --layers 99-99 -o FILE.safetensors",
    "no such option": "capture demo_vit --limits 99 -o FILE.safetensors",
}
ALONE = {"vit", "dit", "one", "two", "table"}


def said_by(name, who):
    """Run a command in this process, and write what it said and how it ended."""
    shared = f"{name} {who if who == 'alone' else 'together'}"
    command = COMMANDS[name].split()
    arguments = [argument.replace("FILE", f"{name} {who}").replace("SHARED", shared) for argument in command]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(arguments)
            status = None
        except SystemExit as done:
            status = done.code
    Path(f"{name} {who}.json").write_text(json.dumps([status or 0, out.getvalue(), err.getvalue()]))


def tell():
    """Run all commands, the first rank some of them also by itself."""
    rank = os.environ["RANK"]
    for name in COMMANDS:
        said_by(name, f"rank {rank}" if rank != "0" else "together")
    if rank == "0":
        del os.environ["TORCHELASTIC_RUN_ID"]
        for name in ALONE:
            said_by(name, "alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_images(folder / "images", 13, corrupt_every=5)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "OMP_WAIT_POLICY": "PASSIVE"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(launcher, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def said(folder, name, who):
    return json.loads((folder / f"{name} {who}.json").read_text())


@pytest.mark.parametrize("name", ["vit", "dit", "one"])
def test_a_capture_by_two_ranks(folder, name):
    together, alone = (normscope.load_capture(folder / f"{name} {who}.safetensors") for who in ("together", "alone"))
    assert differences(together, alone) == []
    assert together.skipped == alone.skipped
    if name == "vit":
        assert together.n_samples == 11 and "2 unreadable" in together.about["data"]
    elif name == "one":  # the other rank has nothing to do, and --resume nothing to go on from
        assert together.n_samples == 1
        assert "nothing to resume; starting from the beginning" in said(folder, name, "together")[2]
    else:
        assert len(together.parts) == 3 and all(part.n_samples == 3 for part in together.parts.values())
    assert not (folder / f"{name} together.safetensors.checkpoint").exists()


@pytest.mark.parametrize("name", sorted(ALONE))
def test_the_first_rank_says_what_one_alone_says_and_the_others_nothing(folder, name):
    status, out, err = said(folder, name, "together")
    assert [status, out.replace("together", "alone"), err.replace("together", "alone")] == said(folder, name, "alone")
    assert status == 0 and (out or err)
    assert said(folder, name, "rank 1") == [0, "", ""]


def test_files_are_the_same_and_written_once(folder):
    together, alone = (list(csv.reader((folder / f"table {who}.csv").open())) for who in ("together", "alone"))
    assert len(together) == len(alone) == 1 + 2
    for cells, expected in zip(together, alone, strict=True):
        for cell, text in zip(cells, expected, strict=True):
            try:
                # 1e-9: sums of float64 that two processes add in another order, and what a search makes of them.
                assert float(cell) == pytest.approx(float(text), rel=1e-9)
            except ValueError:
                assert cell == text
    assert sorted(path.name for path in folder.glob("plot *.png")) == ["plot together.png"]
    assert not list(folder.glob("* rank 1.[!j]*"))
    status, _, err = said(folder, "plot", "together")
    assert status == 0 and err.count("unreadable, left out: ") == 2 and "left out: 0/00004.png" in err
    assert said(folder, "plot", "rank 1") == [0, "", ""]


@pytest.mark.parametrize(
    ("name", "status", "sentence"),
    [
        ("no such layer", 2, "Error: There are no layers 99-99"),
        ("no such option", 2, "No such option"),
    ],
)
def test_mistakes_are_sentences(folder, name, status, sentence):
    for who in ("together", "rank 1"):
        found, out, err = said(folder, name, who)
        assert (found, out) == (status, "") and sentence in err and "Traceback" not in err
        assert not (folder / f"{name} {who}.safetensors").exists()
    if "Error: " in sentence:
        assert said(folder, name, "rank 1")[2].startswith("rank 1: Error: ")


def start(folder, rank, port, *more):
    """Start one of two ranks with the environment that torchrun gives it."""
    given = {"TORCHELASTIC_RUN_ID": "a", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    options = ["--data", "images", "--batch-size", "2", "--layers", "2", "-o", "seen.safetensors", *more]
    command = [sys.executable, "-m", "normscope", "capture", "demo_vit", *options]
    environment = {**os.environ, **given, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_killed_rank_and_resumption(tmp_path):
    write_images(tmp_path / "images", 200, corrupt_every=50)
    kept = tmp_path / "seen.safetensors.checkpoint"
    port = free_port()
    first, second = (start(tmp_path, rank, port, "--checkpoint-every", "0") for rank in range(2))
    while not all((kept / f"{rank}.safetensors").exists() for rank in range(2)):
        assert first.poll() is None and second.poll() is None
        time.sleep(0.01)
    second.kill()
    error = first.communicate(timeout=120)[1]
    assert first.returncode == 5 and "Error: Another rank ended" in error and "Traceback" not in error
    assert not (tmp_path / "seen.safetensors").exists()
    assert {path.name for path in kept.glob("[!.]*")} == {"0.safetensors", "1.safetensors"}
    refused = invoke("capture demo_vit --data images --layers 2 -o seen.safetensors --resume", status=2, cwd=tmp_path)
    assert "its number of ranks is 2, not 1" in refused.stderr
    port = free_port()
    ranks = [start(tmp_path, rank, port, "--resume") for rank in range(2)]
    ends = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert "going on from seen.safetensors.checkpoint" in ends[0] and not kept.exists()
    invoke("capture demo_vit --data images --batch-size 2 --layers 2 -o alone.safetensors", cwd=tmp_path)
    seen, alone = (normscope.load_capture(tmp_path / f"{name}.safetensors") for name in ("seen", "alone"))
    assert seen.n_samples == 196 and differences(seen, alone) == []


NAME = f"py:{Path(__file__).with_name('factories.py')}:network"


def of_two(rank):
    return {"TORCHELASTIC_RUN_ID": "a", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}


@pytest.mark.parametrize("command", ["models", "layers demo_vit"])
def test_what_needs_one_process_is_said_by_the_first(command):
    assert not invoke(command, **of_two(1)).output
    assert "demo_vit" in invoke(command, **of_two(0)).stdout


def test_swap_bench_of_two_processes_is_that_of_one(tmp_path):
    command = f"swap-bench {NAME} --func dyt,free --layers least:1 --quick --device cpu --json -o"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "normscope"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    arguments = [sys.executable, *torchrun, *command.split(), "two"]
    done = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    two, alone = json.loads(done.stdout), invoke(f"{command} alone", cwd=tmp_path)
    assert two["drift"] == json.loads(alone.stdout)["drift"]
    assert [figure["view"] for figure in two["figures"]] == ["drift", "speed"]
    assert done.stderr.count("2 ranks divide the drift") == 1 and "ranks" not in done.stdout
    assert "divide the drift" not in alone.stderr


if __name__ == "__main__":
    tell()
