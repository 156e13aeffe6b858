"""What the tests of several commands begin with."""

import pytest

from normscope.pairs import capture


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to stand in, and a narrow terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    return tmp_path


@pytest.fixture
def runs(monkeypatch):
    """The weights of every network that is run from now on."""
    weights, captured = [], capture.captured

    def counted(network, **options):
        weights.append(network.about["weights"])
        return captured(network, **options)

    monkeypatch.setattr(capture, "captured", counted)
    return weights
