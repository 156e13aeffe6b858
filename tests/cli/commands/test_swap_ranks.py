"""The commands that swap norms, started by torchrun."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from normscope.cli import app

pytestmark = pytest.mark.slow

FACTORY = """
import torch
from torch import nn

def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16))
    return model, [torch.randn(8, 5, 4) * 3 for _ in range(5)]
"""
NAME = "py:net.py:network"


def of_two(rank):
    return {"TORCHELASTIC_RUN_ID": "a", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}


@pytest.mark.parametrize("command", [["models"], ["layers", "demo_vit"]])
def test_what_needs_one_process_is_said_by_the_first(command):
    done = CliRunner(env=of_two(1)).invoke(app, command)
    assert done.exit_code == 0 and not done.output
    assert "demo_vit" in CliRunner(env=of_two(0)).invoke(app, command).stdout


def test_healing_is_refused(tmp_path):
    done = CliRunner(env=of_two(0)).invoke(app, ["heal", "demo_vit", "-o", str(tmp_path / "healed")])
    said = " ".join(done.stderr.split())
    assert done.exit_code == 2 and "torchrun started 2" in said and not list(tmp_path.iterdir())


def test_swap_bench_of_two_processes_is_that_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FACTORY)
    arguments = ["swap-bench", NAME, "--func", "dyt,free", "--sites", "least:1", "--seconds", "0", "--device", "cpu"]
    arguments += ["--json", "-o"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "normscope", *arguments, "two"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    document, known = json.loads(done.stdout), CliRunner().invoke(app, [*arguments, "one"])
    assert document["drift"] == json.loads(known.stdout)["drift"]
    assert [figure["view"] for figure in document["figures"]] == ["drift", "speed"]
    assert done.stderr.count("2 ranks divide the drift") == 1 and "ranks" not in done.stdout
    assert "divide the drift" not in known.stderr
