"""Every benchmark can be imported and parses its options; their numbers are no business of a test."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TRITON_ALONE = {"accuracy_kernel"}  # its functions are kernels, compiled where they are imported


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in TRITON_ALONE))
def test_the_benchmark_parses_its_options(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module(name)
    if hasattr(module, "main"):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
        with pytest.raises(SystemExit, match="0"):
            module.main()
        assert "usage:" in capsys.readouterr().out


def test_only_peers_that_are_installed_are_measured(monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    common = importlib.import_module("common")
    parser, peers = common.options("", repeats=1, peers=("numpy", "no_such")), ("numpy", "no_such")
    with pytest.raises(SystemExit, match="no_such is not installed"):
        common.peers_left(parser, parser.parse_args([]), peers)
    assert common.peers_left(parser, parser.parse_args(["--without", "no_such"]), peers) == ["numpy"]
    with pytest.raises(SystemExit, match="2"):
        common.peers_left(parser, parser.parse_args(["--without", "nunpy"]), peers)
    assert "there is no peer 'nunpy' to leave out; the peers are numpy, no_such" in capsys.readouterr().err
