"""Names that break lines, reverse text or steer a terminal: escaped wherever people look, exact for programs."""

import csv
import re

import pytest
from command_line import document, invoke
from PIL import Image

NAME = "a\nb\x1b[2J\u202egnp\u2066[red]"
ESCAPED = r"a\nb\x1b[2J\u202egnp\u2066[red]"
FACTORY = f"""
import torch
from torch import nn

def make():
    net = nn.Sequential(nn.Linear(4, 8))
    net.add_module({NAME!r}, type({NAME!r}, (nn.LayerNorm,), {{}})(8))
    return net, [torch.randn(3, 5, 4) for _ in range(4)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORY, encoding="utf-8")
    return tmp_path


def control_characters(text):
    return re.findall("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


@pytest.mark.parametrize("command", ["layers", "fit --func tanh", "stats", "swap -o swapped"])
def test_a_terminal_shows_names_escaped(command):
    done = invoke(f"{command} py:mine.py:make --device cpu")
    assert not control_characters(done.stdout + done.stderr)
    assert any(ESCAPED in line for line in done.stdout.splitlines())


def test_a_program_reads_exact_names(folder):
    fits = document("fit py:mine.py:make --func tanh --device cpu -o fits.csv --plot x.svg")["fits"]
    assert [row["site"] for row in fits] == [NAME]
    with (folder / "fits.csv").open(newline="") as file:
        assert [row["site"] for row in csv.DictReader(file)] == [NAME]
    figure = (folder / "x.svg").read_text(encoding="utf-8")
    assert not control_characters(figure)


def test_names_of_files_are_escaped(folder):
    data = folder / "data\u202e\n"
    data.mkdir()
    Image.new("L", (8, 8)).save(data / "a.png")
    (data / "b\n\u202egnp.png").write_bytes(b"no image")
    done = invoke(f"fit demo_vit --data '{data}' --func tanh --layers 1 --device cpu")
    assert not control_characters(done.stdout + done.stderr)
    assert r"unreadable, left out: b\n\u202egnp.png: not an image" in done.stderr
    assert r"data\u202e\n: 2 images (1 unreadable)" in done.stderr
