"""Rank of this process, from torchrun's environment variables."""

import subprocess
import sys

import pytest

from normscope.runtime.processes import Process

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Process(0, 1, 0, 0)),
        (TORCHRUN, Process(5, 8, 1, 2, launched=True)),
        ({"TORCHELASTIC_RUN_ID": "none"}, Process(0, 1, 0, 0, launched=True)),
        # A shell inside a Slurm job, say: names that others set too, without torchrun.
        ({name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}, Process(0, 1, 0, 0)),
    ],
)
def test_ranks_are_those_of_torchrun(environment, place, monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Process.current() == place
    assert (place.alone, place.is_first) == (place.ranks == 1, place.rank == 0)


def test_ranks_need_no_torch():
    code = "import sys, normscope.runtime.processes; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
