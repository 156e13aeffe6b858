"""What is here runs in a process whose kernels Triton interprets: test_interpreted.py starts it."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

collect_ignore_glob = ["*.py"]
if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = []
    sys.path.insert(0, str(Path(__file__).parent))  # where truth.py is


def filling(make: Callable[..., Tensor], value: float) -> Callable[..., Tensor]:
    def made(*sizes: object, **options: object) -> Tensor:
        tensor = make(*sizes, **options)
        return tensor.fill_(value) if tensor.is_floating_point() else tensor

    return made


def _fill(patch: pytest.MonkeyPatch, value: float) -> None:
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, filling(getattr(owner, name), value))


@pytest.fixture(scope="session", autouse=True)
def poisoned() -> Iterator[None]:
    """Let memory that nothing is written to show: it holds NaN."""
    with pytest.MonkeyPatch.context() as patch:
        _fill(patch, float("nan"))
        yield


@pytest.fixture
def fill_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let new memory hold something else."""
    return lambda value: _fill(monkeypatch, value)
