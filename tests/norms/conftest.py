"""What tests of several rooms change of the norms that are known."""

import pytest

from normscope.norms import recognition


@pytest.fixture
def table(monkeypatch):
    """A table of norms that a test may change."""
    monkeypatch.setattr(recognition, "_TABLE", dict(recognition._TABLE))
