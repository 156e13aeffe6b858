"""Modes that record operators, for tests of several files."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.swaps import pointwise
from normscope.swaps.kernels.choice import CURVES


@pytest.fixture
def chosen(monkeypatch):
    """Modules take the operator, which computes in plain torch where there is no GPU."""
    monkeypatch.setattr(pointwise, "by_kernels", lambda curve, *_: curve in CURVES)


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
