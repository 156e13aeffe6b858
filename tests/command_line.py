"""Commands run in this process, which has imported everything already: most of a short command's time is imports."""

import contextlib
import json
import shlex

from typer.testing import CliRunner

from normscope.cli import app

LEFT_OUT = ("COLUMNS", "FORCE_COLOR", "HF_ENDPOINT")  # variables that change the output


def invoke(line, *, status=0, cwd=".", **environment):
    """Run a command line, which ends with this status, if one is given."""
    with contextlib.chdir(cwd):
        done = CliRunner(env={**dict.fromkeys(LEFT_OUT), **environment}).invoke(app, shlex.split(line))
    assert status in (None, done.exit_code), done.output
    return done


def document(line, **options):
    """Run a command with ``--json``, and return its document."""
    return json.loads(invoke(f"{line} --json", **options).stdout)


def words(text):
    """Text without its line breaks and columns."""
    return " ".join(text.split())
