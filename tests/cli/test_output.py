"""What a command says, without running one."""

import io
import re

import torch

import normscope
from normscope.cli.output import Output, print_error


def test_tokens_that_hold_no_numbers_are_said_once_a_site(capsys):
    norms = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
    tokens = torch.randn(3, 4)
    tokens[0, 0] = torch.nan
    seen = normscope.capture(norms, [tokens])
    Output(as_json=False, quiet=True).account(seen)
    assert capsys.readouterr().err == "".join(
        f"{site.name}: 1 of 3 tokens hold a NaN or an infinity, and are in no sum\n" for site in seen.sites
    )


def test_no_name_from_a_file_commands_the_terminal(capsys):
    say, hostile = Output(as_json=False, quiet=False), "swap \x1b[2J\x1b]0;mine\x07\r\x9b31m of\nit\u202egnp"
    for tell in (say.remark, say.warn, say.result, print_error):
        tell(hostile)
    told = capsys.readouterr()
    for line in ("\\x1b[2J\\x1b]0;mine\\x07\\r\\x9b31m of\\nit\\u202egnp\n", *"\x1b\x07\r\x9b\u202e"):
        assert ((line in told.out), (line in told.err)) == (len(line) > 1,) * 2


def test_lines_take_the_place_of_bars_where_stderr_is_no_terminal_unless_quiet(capsys, monkeypatch):
    for name in ("_EARLY_SECONDS", "_LONG_SECONDS", "_PACE_SECONDS"):
        monkeypatch.setattr(f"normscope.cli.estimate.{name}", -1.0)
    for quiet in (False, True):
        with Output(as_json=True, quiet=quiet).bars() as progress:
            for done in (0, 1, 2):
                progress("samples", done, 1000)
        assert capsys.readouterr().err == ("" if quiet else "samples: 2 of 1,000, about 0 s in all\n")


def test_the_bars_of_a_terminal_end_in_what_is_left_of_the_whole_command(monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", stderr)
    for name, value in (("COLUMNS", "200"), ("TERM", "xterm"), ("TTY_COMPATIBLE", "1"), ("TTY_INTERACTIVE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("normscope.cli.estimate._PACE_SECONDS", 0.0)
    say = Output(as_json=True, quiet=False)
    say.estimate.expect({"end to end": 100.0})
    with say.bars() as progress:
        progress("samples", 0, 3)
        for done in (0, 1):
            progress("compiling …", done, 1)
        for done in (1, 2):
            progress("samples", done, 3)
    said = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stderr.getvalue())
    assert said.count("compiling …") == 1
    assert re.search(r"samples +\S+ +2/3 +about 100 s left", said), said
