"""Progress of long calls, as a notebook or a script shows it."""

import torch

import normscope


def test_bars_show_the_stage_and_the_number_of_samples(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    bars = normscope.ProgressBars()
    for batches in (list(torch.randn(6, 1, 4)), iter(torch.randn(6, 1, 4)), iter(torch.randn(6, 1, 4))):
        normscope.capture(model, batches, progress=bars)  # the same bars serve several calls
        out, err = capsys.readouterr()
        assert out == "" and "\rsamples: 0" in err


def test_a_long_step_without_progress_of_its_own_is_one_line(capsys):
    normscope.ProgressBars()("compiling …", 0, 1)
    assert capsys.readouterr() == ("", "compiling …\n")
