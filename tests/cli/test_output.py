"""What a command says, without running one."""

import torch

import normscope
from normscope.cli.output import Output, ProgressLines, print_error


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


def lines_of(calls, seconds):
    said, clock = [], iter(seconds)
    told = ProgressLines(said.append, now=clock.__next__)
    for call in calls:
        told(*call)
    return said


def test_a_long_stage_says_in_its_first_seconds_how_long_it_takes_and_then_how_far_it_is():
    calls = [("end to end", done, 1000) for done in range(0, 1001, 10)]
    said = lines_of(calls, range(101))
    assert said == [
        "end to end: 30 of 1,000, about 100 s in all",
        "end to end: 330 of 1,000, about 67 s left",
        "end to end: 630 of 1,000, about 37 s left",
        "end to end: 930 of 1,000, about 7 s left",
    ]


def test_what_is_over_soon_says_nothing():
    assert lines_of([("samples", done, 20) for done in range(21)], [0.9 * n for n in range(21)]) == []


def test_each_stage_is_told_by_itself_and_what_was_done_before_it_began_tells_no_speed():
    calls = [("samples", done, 100) for done in (0, 10, 20)] + [("blocks", done, 100) for done in (50, 60, 70)]
    assert lines_of(
        calls, [0, 20, 25, 26, 31, 36]
    ) == [  # the first step may compile something: it tells no speed either
        "samples: 20 of 100, about 65 s in all",
        "blocks: 70 of 100, about 25 s in all",
    ]
    assert lines_of([("samples", 10 * n, None) for n in range(4)], [0, 15, 30, 70]) == ["samples: 20", "samples: 30"]


def test_lines_take_the_place_of_bars_where_stderr_is_no_terminal_unless_quiet(capsys, monkeypatch):
    for name in ("_EARLY_SECONDS", "_LONG_SECONDS"):
        monkeypatch.setattr(f"normscope.cli.output.{name}", -1.0)
    for quiet in (False, True):
        with Output(as_json=True, quiet=quiet).bars() as progress:
            for done in (0, 1, 2):
                progress("samples", done, 1000)
        assert capsys.readouterr().err == ("" if quiet else "samples: 2 of 1,000, about 0 s in all\n")
