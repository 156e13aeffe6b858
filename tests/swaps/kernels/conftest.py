"""Modes that record operators, and a driver that records launches, for tests of several files."""

import importlib
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.fixture
def seen_by_dispatch():
    """A dispatch mode that lists the operators that are called within it."""

    class Mode(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(function.name())
            return function(*args, **(kwargs or {}))

    return Mode
