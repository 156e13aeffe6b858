"""What a command says, without running one."""

import io
import re

import torch

import normscope
from normscope.cli.output import Output, ProgressLines, print_error


def test_tokens_that_hold_no_numbers_are_said_once_a_site(capsys):
    norms = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
    tokens = torch.randn(3, 4)
    tokens[0, 0] = torch.nan
    seen = normscope.capture(norms, [tokens])
    Output(quiet=True).account(seen)
    assert capsys.readouterr().err == "".join(
        f"{site.name}: 1 of 3 tokens hold a NaN or an infinity, and are in no sum\n" for site in seen.sites
    )


def test_no_name_from_a_file_commands_the_terminal(capsys):
    say, hostile = Output(), "swap \x1b[2J\x1b]0;mine\x07\r\x9b31m of\nit\u202egnp"
    for tell in (say.remark, say.warn, say.result, print_error):
        tell(hostile)
    told = capsys.readouterr()
    for line in ("\\x1b[2J\\x1b]0;mine\\x07\\r\\x9b31m of\\nit\\u202egnp\n", *"\x1b\x07\r\x9b\u202e"):
        assert ((line in told.out), (line in told.err)) == (len(line) > 1,) * 2


def test_lines_take_the_place_of_bars_where_stderr_is_no_terminal_unless_quiet(capsys, monkeypatch):
    monkeypatch.setattr("normscope.cli.output._SECONDS_TO_A_LINE", 0.0)
    for quiet in (False, True):
        with Output(as_json=True, quiet=quiet).bars() as progress:
            progress("compiling …", 0, 1)
            progress("samples", 2, 1000)
            progress("compiling …", 0, 1)
        assert capsys.readouterr().err == ("" if quiet else "compiling …\nsamples: 2 of 1,000, 0:00:00 left\n")


def lines_of(calls):
    """Lines printed by calls of (second, stage, done, of)."""
    lines, seconds = [], iter([second for second, *_ in calls])
    progress = ProgressLines(lines.append, seconds.__next__)
    for _, *call in calls:
        progress(*call)
    return lines


def test_short_stages_print_nothing_and_long_ones_their_time_left():
    assert lines_of([(0.4 * n, "samples", n, 20) for n in range(21)]) == []
    assert lines_of([(n, "end to end", 10 * n, 5000) for n in range(71)]) == [
        "end to end: 100 of 5,000, 0:08:10 left",
        "end to end: 400 of 5,000, 0:07:40 left",
        "end to end: 700 of 5,000, 0:07:10 left",
    ]
    resumed = [(0, "blocks", 50, 100), (10, "blocks", 70, 100), (60, "blocks", 90, 100)]
    assert lines_of(resumed) == ["blocks: 70 of 100, 0:00:15 left", "blocks: 90 of 100, 0:00:15 left"]
    assert lines_of([(15 * n, "samples", 10 * n, None) for n in range(2)]) == ["samples: 10"]
    begun_anew = [(0, "a", 0, 9), (40, "b", 0, 90), (50, "b", 1, 90)]
    assert lines_of(begun_anew) == ["b: 1 of 90, 0:14:50 left"]


def test_the_bars_of_a_terminal_show_the_time_left(monkeypatch):
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
