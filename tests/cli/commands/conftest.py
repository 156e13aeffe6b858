"""Fixtures of several commands."""

import pytest

from normscope.pairs import capture


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change into an empty folder, with a narrow terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    return tmp_path


@pytest.fixture
def runs(monkeypatch):
    """Record the weights of every captured network."""
    weights, captured = [], capture.captured

    def counted(network, **options):
        weights.append(network.about["weights"])
        return captured(network, **options)

    monkeypatch.setattr(capture, "captured", counted)
    return weights
