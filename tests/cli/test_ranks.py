"""Commands under torchrun, in processes on loopback: two give what one does.

This file is also their program: a process takes seconds to start, so it runs one command after the other.
"""

import contextlib
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
NAME = f"py:{Path(__file__).with_name('factories.py')}:network"
# Command lines by name. FILE is a file of the rank's own, and SHARED one of all ranks.
COMMANDS = {
    "vit": f"capture demo_vit {DIGITS} --layers 4 -o SHARED.safetensors",
    "dit": "capture demo_dit --limit 3 --timesteps 3 --layers 3 --per-channel --by timestep -o SHARED.safetensors",
    "two": "fit demo_vit demo_dit --limit 3 --layers 2 --func tanh --json",
    "plot": f"plot demo_vit {DIGITS} --layers 2 --func tanh --output FILE.png",
    "one": "capture demo_vit --data images/0/00000.png --layers 1 --resume -o SHARED.safetensors",
    "bench": f"swap-bench {NAME} --func dyt,free --layers least:1 --quick --device cpu --json -o SHARED",
    "no such layer": "capture demo_vit --layers 99-99 -o FILE.safetensors",
}
ALONE = ("vit", "dit", "one", "two", "bench")


def record(name, who):
    """Run a command in this process, and write its status and output."""
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


def run_commands():
    """Run all commands, the first rank some of them also by itself."""
    rank = os.environ["RANK"]
    for name in COMMANDS:
        record(name, f"rank {rank}" if rank != "0" else "together")
    if rank == "0":
        del os.environ["TORCHELASTIC_RUN_ID"]
        for name in ALONE:
            record(name, "alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_images(folder / "images", 13, corrupt_every=5)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "OMP_WAIT_POLICY": "PASSIVE"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(launcher, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def recorded(folder, name, who):
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
        assert "nothing to resume; starting from the beginning" in recorded(folder, name, "together")[2]
    else:
        assert len(together.parts) == 3 and all(part.n_samples == 3 for part in together.parts.values())
    assert not (folder / f"{name} together.safetensors.checkpoint").exists()


@pytest.mark.parametrize("name", ALONE[:-1])
def test_the_first_rank_prints_what_one_process_does_and_the_others_nothing(folder, name):
    status, *printed = recorded(folder, name, "together")
    assert [status, *(text.replace("together", "alone") for text in printed)] == recorded(folder, name, "alone")
    assert status == 0 and any(printed)
    assert recorded(folder, name, "rank 1") == [0, "", ""]


def test_the_first_rank_alone_writes_figures(folder):
    assert sorted(path.name for path in folder.glob("plot *.png")) == ["plot together.png"]
    status, _, err = recorded(folder, "plot", "together")
    assert status == 0 and err.count("unreadable, left out: ") == 2 and "left out: 0/00004.png" in err
    assert recorded(folder, "plot", "rank 1") == [0, "", ""]


def test_every_rank_reports_a_mistake(folder):
    for who, prefix in (("together", ""), ("rank 1", "rank 1: ")):
        status, out, err = recorded(folder, "no such layer", who)
        assert (status, out) == (2, "") and f"{prefix}Error: There are no layers 99-99" in err
        assert not (folder / f"no such layer {who}.safetensors").exists()


def torchrun_variables(rank):
    return {"TORCHELASTIC_RUN_ID": "a", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}


def start(folder, rank, port, *more):
    """Start one of two ranks with the environment that torchrun gives it."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"} | torchrun_variables(rank)
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


def test_the_first_rank_alone_lists_layers():
    assert not invoke("layers demo_vit", **torchrun_variables(1)).output
    assert "LayerNorm" in invoke("layers demo_vit", **torchrun_variables(0)).stdout


def test_drift_by_two_ranks_is_that_of_one(folder):
    (_, out, err), (_, out_alone, err_alone) = (recorded(folder, "bench", who) for who in ("together", "alone"))
    assert json.loads(out)["drift"] == json.loads(out_alone)["drift"]
    assert [figure["view"] for figure in json.loads(out)["figures"]] == ["drift", "speed"]
    assert err.count("2 ranks divide the drift") == 1 and "divide the drift" not in err_alone
    assert recorded(folder, "bench", "rank 1") == [0, "", ""]


if __name__ == "__main__":
    run_commands()
