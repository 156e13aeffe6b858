"""Warnings, remarks and progress of commands."""

import io
import re

import torch

import normscope
from normscope.cli.output import Output, ProgressLines


def test_sites_with_nonfinite_tokens_are_reported_once(capsys):
    norms = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
    tokens = torch.randn(3, 4)
    tokens[0, 0] = torch.nan
    seen = normscope.capture(norms, [tokens])
    out = Output(quiet=True)
    out.account(seen)
    out.account(seen)
    assert capsys.readouterr().err == "".join(
        f"{site.name}: 1 of 3 tokens contain a NaN or an infinity, and are in no sum\n" for site in seen.sites
    )


def test_progress_is_lines_where_stderr_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("normscope.cli.output._SECONDS_TO_A_LINE", 0.0)
    for quiet in (False, True):
        with Output(as_json=True, quiet=quiet).bars() as progress:
            progress("compiling …", 0, 1)
            progress("samples", 2, 1000)
            progress("compiling …", 0, 1)
        assert capsys.readouterr().err == ("" if quiet else "compiling …\nsamples: 2 of 1,000\n")


def test_the_time_left_is_that_of_this_run_without_its_first_step():
    lines, seconds = [], iter((0, 10, 60, 60, 75))
    progress = ProgressLines(lines.append, seconds.__next__)
    for done in (50, 70, 90):
        progress("blocks", done, 100)
    for done in (0, 10):
        progress("samples", done, None)
    assert lines == ["blocks: 70 of 100", "blocks: 90 of 100, 0:00:25 left", "samples: 10"]


def test_progress_is_bars_in_a_terminal(monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", stderr)
    for name, value in (("COLUMNS", "200"), ("TERM", "xterm"), ("TTY_COMPATIBLE", "1"), ("TTY_INTERACTIVE", "1")):
        monkeypatch.setenv(name, value)
    with Output(as_json=True).bars() as progress:
        progress("samples", 0, 3)
        for done in (0, 1):
            progress("compiling …", done, 1)
        for done in (1, 2):
            progress("samples", done, 3)
    printed = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stderr.getvalue())
    assert printed.count("compiling …") == 1
    assert re.search(r"samples +\S+ +2/3 +[-\d:]+", printed), printed
