"""Fixtures of several files: a GPU that is not there, and a mode that records operators."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.swaps import pointwise
from normscope.swaps.kernels import choice
from normscope.swaps.kernels.choice import VARIABLE


@pytest.fixture
def ampere(monkeypatch):
    """A GPU of compute capability 8.0 that can launch kernels."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(choice, "why_no_launcher", lambda: "")


@pytest.fixture
def chosen(ampere, monkeypatch):
    """Modules call the operator as on a GPU; it computes in plain torch where there is none."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(pointwise, "by_kernels", lambda curve, device, dtype: choice.by_kernels(curve, cuda, dtype))


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
