"""README's Python is run as it stands; its commands are what .ci/run runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope.pairs.norms import recognition

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


class MyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(block, {})  # noqa: S102 - our own README
    assert "blocks.0.norm2" in capsys.readouterr().out
    assert (tmp_path / "scurves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
def test_the_python_of_its_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recognition, "_TABLE", dict(recognition._TABLE))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names = {"MyRMSNorm": MyRMSNorm}
    for block in blocks:
        exec(block, names)  # noqa: S102 - our own README
    assert recognition.kind_of(MyRMSNorm()).name == "MyRMSNorm"
    assert "blocks.0.norm2" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scurves.png", "seen.safetensors"]
    assert names["both"].n_samples == 800 + 8


def test_the_readme_holds_the_two_commands_and_can_be_read_in_minutes():
    assert "\npip install -c constraints.txt '.[speech]' && normscope plot\n" in README
    assert "\npip install -c constraints.txt -e '.[test,speech]' && pytest\n" in README
    assert len(README.split()) <= 850
