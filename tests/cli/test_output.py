"""What a command says, without running one."""

import torch

import normscope
from normscope.cli.output import Output


def test_tokens_that_hold_no_numbers_are_said_once_a_site(capsys):
    norms = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
    tokens = torch.randn(3, 4)
    tokens[0, 0] = torch.nan
    seen = normscope.capture(norms, [tokens])
    Output(as_json=False, quiet=True).account(seen)
    assert capsys.readouterr().err == "".join(
        f"{site.name}: 1 of 3 tokens hold a NaN or an infinity, and are in no sum\n" for site in seen.sites
    )
