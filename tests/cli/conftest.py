"""The command line in a process of its own, as a user meets it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import LEFT_OUT

import normscope

CHECKOUT = Path(normscope.__file__).parents[1]


def started(
    *arguments, cwd, command=(sys.executable, "-m", "normscope"), stdout=subprocess.PIPE, before=None, **changes
):
    clean = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)} | changes,
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=before,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="session")
def run():
    return started
