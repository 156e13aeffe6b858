"""What tests of several folders need of the machine."""

import pytest
import torch
from torch._subclasses import FakeTensorMode


@pytest.fixture(scope="session")
def fake_cuda():
    """Fake tensors on a GPU that is not there: an old torch, as 2.8 is, asks the driver for them, and may abort."""
    with FakeTensorMode():
        try:
            torch.empty(2, device="cuda")[1:]
        except RuntimeError:
            pytest.skip(f"torch {torch.__version__} has no fake tensors on a GPU that is not there")
