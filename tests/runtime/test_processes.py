"""The place among processes, as torchrun tells it."""

import subprocess
import sys

import pytest

from normscope.runtime.processes import Place

OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place(0, 1, 0, 0)),
        (OF_TORCHRUN, Place(5, 8, 1, 2, launched=True)),
        ({"TORCHELASTIC_RUN_ID": "none"}, Place(0, 1, 0, 0, launched=True)),
        # A shell inside a Slurm job, say: names that others set too, without torchrun.
        ({name: value for name, value in OF_TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}, Place(0, 1, 0, 0)),
    ],
)
def test_what_torchrun_says(environment, place, monkeypatch):
    assert Place.from_environment(environment) == place
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Place.from_environment() == place
    assert (place.alone, place.speaks) == (place.ranks == 1, place.rank == 0)


def test_it_takes_no_torch_to_know():
    said = "import sys, normscope.runtime.processes, normscope.inputs.chunks; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", said], text=True) == "False\n"
