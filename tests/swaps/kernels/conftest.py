"""Who computes, and who is launched, as the tests of several files choose it."""

import importlib
from pathlib import Path

import pytest

from normscope.swaps import pointwise
from normscope.swaps.kernels.choice import CURVES

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def chosen(monkeypatch):
    """Modules take the operator, which computes in plain torch where there is no GPU."""
    monkeypatch.setattr(pointwise, "by_kernels", lambda curve, *_: curve in CURVES)


@pytest.fixture(scope="session")
def launches():
    """What notes launches in the place of a GPU's driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module("recorded_launches")


@pytest.fixture
def driver(launches):
    """Whatever is launched is noted, and nothing computed."""
    with launches.recorded() as own:
        yield own
