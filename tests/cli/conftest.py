"""The command line in a process of its own, as a user meets it, and within this one."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

import normscope
from normscope.cli import app

CHECKOUT = Path(normscope.__file__).parents[1]
LEFT_OUT = ("COLUMNS", "FORCE_COLOR", "HF_ENDPOINT")  # what would change what is said


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


def run_within(*arguments, cwd, **changes):
    """A command in this process, which has imported everything already: most of a short command's time is imports."""
    clean = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    with contextlib.chdir(cwd), mock.patch.dict(os.environ, clean | changes, clear=True):
        done = CliRunner().invoke(app, [*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def run_here():
    return run_within
