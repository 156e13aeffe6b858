"""What tests of several folders need of the machine."""

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

import normscope


@pytest.fixture(scope="session")
def fake_cuda():
    """Fake tensors on a GPU that is not there: an old torch, as 2.8 is, asks the driver for them, and may abort."""
    with FakeTensorMode():
        try:
            torch.empty(2, device="cuda")[1:]
        except RuntimeError:
            pytest.skip(f"torch {torch.__version__} has no fake tensors on a GPU that is not there")


@pytest.fixture
def few_inputs(monkeypatch):
    """Load networks with 16 inputs, and 16 to calibrate on, where the docs' Python names no number."""
    monkeypatch.setattr(normscope, "load", partial(normscope.load, limit=16))
